"""What is Triton's own: sizes, what is said where it cannot run, and its numbers, interpreted."""

import logging
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from kvfunc import attention, triton
from kvfunc.triton import Config

COMPILERS = pathlib.Path(sys.prefix) / "compilers"


def test_the_contract_in_tritons_interpreter():
    """In a process of its own, since Triton must be told before it is imported."""
    assert COMPILERS.is_dir(), "Triton is missing: run `make test`, which installs it"
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-k", "triton",
         *(str(pathlib.Path(__file__).with_name(name))
           for name in ("test_attention.py", "test_any_rows.py"))],
        capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(COMPILERS),
             "OPENBLAS_NUM_THREADS": "1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"})
    assert ran.returncode == 0, ran.stdout


@pytest.fixture
def on_a_gpu(monkeypatch):
    """As JAX would say there; what was said before is forgotten."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    attention._say_once.cache_clear()
    triton._trial.cache_clear()
    yield monkeypatch
    triton._trial.cache_clear()


def test_it_needs_a_gpu():
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU, and JAX runs on 'cpu'"):
        attention.choose("triton", jnp.bfloat16)


def test_without_jax_triton_auto_is_xla_and_says_so_once(on_a_gpu, caplog):
    on_a_gpu.setitem(sys.modules, "jax_triton", None)
    with caplog.at_level(logging.WARNING, "kvfunc.attention"):
        assert [attention.choose("auto", jnp.bfloat16) for _ in range(2)] == ["xla", "xla"]
    (record,) = caplog.records
    assert record.message.startswith('attention runs on "xla", since "triton" cannot be used: '
                                     "jax-triton cannot be imported")
    assert 'pip install "kvfunc[cuda]"' in record.message
    with pytest.raises(NotImplementedError, match="jax-triton cannot be imported"):
        attention.choose("triton", jnp.bfloat16)


def test_a_jax_triton_that_does_not_fit_is_found_before_it_is_used(on_a_gpu):
    def triton_call(*args, **kwargs):
        raise AttributeError("gone from JAX")

    on_a_gpu.setitem(sys.modules, "jax_triton", types.SimpleNamespace(triton_call=triton_call))
    on_a_gpu.setitem(sys.modules, "kvfunc.triton.kernel",
                     types.SimpleNamespace(segment_attention=None))
    assert attention.choose("auto", jnp.bfloat16) == "xla"
    with pytest.raises(NotImplementedError, match=r"compiled \(gone from JAX\): pip"):
        attention.choose("triton", jnp.bfloat16)


@pytest.mark.parametrize("dtype", ["float16", "float8_e5m2"])
def test_types_that_it_does_not_read_are_left_to_xla(on_a_gpu, dtype):
    on_a_gpu.setattr(triton, "unavailable", lambda: None)
    assert attention.choose("auto", jnp.bfloat16) == "triton"
    assert attention.choose("auto", dtype) == "xla"
    with pytest.raises(NotImplementedError, match=f"KV of dtype {dtype} is not built"):
        attention.choose("triton", dtype)


SIZES = dict(vectors=16, queries=4, keys=64, warps=4, stages=3)


@pytest.mark.parametrize("change, message", [
    (dict(vectors=8), "vectors must be a power of two from 16 on, got 8"),
    (dict(vectors=24), "vectors must be a power of two from 16 on, got 24"),
    (dict(keys=48), "keys must be a power of two from 16 on, got 48"),
    (dict(warps=3), "warps must be a power of two from 1 on, got 3"),
    (dict(queries=0), "queries must be 1 to vectors, 16, got 0"),
    (dict(queries=17), "queries must be 1 to vectors, 16, got 17"),
    (dict(stages=0), "stages must be at least 1, got 0")])
def test_sizes_that_no_kernel_has_are_refused(change, message):
    Config(**SIZES)
    with pytest.raises(ValueError, match=message):
        Config(**SIZES | change)


@pytest.mark.parametrize("heads, kv_heads, head_dim, dtype, few, many", [
    (9, 3, 64, "bfloat16", (16, 1, 64, 4, 3), (128, 42, 64, 8, 3)),
    (9, 3, 64, "float32", (16, 1, 32, 4, 3), (64, 21, 32, 8, 3)),
    (32, 8, 128, "bfloat16", (16, 1, 64, 4, 3), (128, 32, 64, 8, 3)),
    (32, 8, 128, "float32", (16, 1, 16, 4, 3), (32, 8, 16, 8, 3)),
    (32, 32, 80, "bfloat16", (16, 1, 64, 4, 3), (128, 128, 64, 8, 3)),
    (16, 8, 256, "bfloat16", (16, 1, 32, 8, 3), (32, 16, 32, 8, 3)),
    (16, 8, 256, "float32", (16, 1, 16, 8, 3), (16, 8, 16, 8, 3)),
    (32, 1, 128, "int8", (32, 1, 64, 4, 3), (32, 1, 64, 8, 3))])
def test_sizes_by_shape(heads, kv_heads, head_dim, dtype, few, many):
    q, k = jnp.zeros((16, heads, head_dim)), jnp.zeros((8, kv_heads, head_dim), dtype)
    assert Config.of(q, k, few=True) == Config(*few)
    assert Config.of(q, k, few=False) == Config(*many)


def test_a_chunk_of_prompts_takes_as_many_queries_as_fit():
    q, k = jnp.zeros((512, 32, 128)), jnp.zeros((8, 8, 128), jnp.bfloat16)
    assert Config.of(q, k, few=True).queries == 16 // 4
