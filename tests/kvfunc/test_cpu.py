"""What is the CPU implementation's own: its compiler and what it compiles."""

import logging
import os
import pathlib
import platform
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from kvfunc import cpu
from kvfunc.attention import segment_attention
from kvfunc.rows import Rows

from .test_any_rows import QUERIES, ROPE, numbers, table


def test_a_failing_compiler_leaves_xla_and_says_so_once(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CC", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu._library.cache_clear()
    jax.clear_caches()  # what was traced with a compiler would not ask again
    try:
        q, k, v = numbers("float32")
        births, rows = jnp.arange(QUERIES, dtype=jnp.int32), table([(0, 4, 0, 9, 0, 0, Rows.NEVER)])
        turn = ROPE.rotation(jnp.asarray(rows.shift))
        with caplog.at_level(logging.WARNING, "kvfunc.attention"):
            segment_attention(q, k, v, rows, births, turn)
            segment_attention(q, k, v, rows, births, turn, window=7)
        assert [record.message for record in caplog.records] == [
            'attention runs on "xla", since "cpu" cannot be used: ' + cpu.unavailable()]
        assert "the C compiler 'false' failed" in caplog.text
        with pytest.raises(NotImplementedError, match=r"compiler 'false' failed.*; use .xla"):
            segment_attention(q, k, v, rows, births, turn, implementation="cpu")
    finally:
        cpu._library.cache_clear()


def test_machines_without_wide_registers_give_the_same(tmp_path):
    """The portable paths, with another compilation in a process of its own."""
    if platform.machine() != "x86_64":
        pytest.fail("the flag below is for x86; add this machine's")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
         str(pathlib.Path(__file__).with_name("test_any_rows.py")), "-k", "cpu and not batched"],
        capture_output=True, text=True,
        env={**os.environ, "CFLAGS": "-march=x86-64-v3", "XDG_CACHE_HOME": str(tmp_path)})
    assert ran.returncode == 0, ran.stdout
    assert list(tmp_path.glob("kvfunc/cpu-*.so"))


def test_what_is_compiled_is_kept():
    assert cpu.unavailable() is None
    made = cpu._compiled()
    before = made.stat().st_mtime_ns
    assert cpu._compiled() == made and made.stat().st_mtime_ns == before
