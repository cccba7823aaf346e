"""One attention on many devices, under shard_map."""

import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize("implementation", ["xla", "cpu", "pallas"])
def test_a_cache_on_eight_devices_is_read_as_on_one(implementation):
    """Over fewer KV heads than devices, and over slots."""
    program = pathlib.Path(__file__).with_name("on_eight_devices.py")
    ran = subprocess.run([sys.executable, str(program), implementation], capture_output=True,
                         text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert ran.returncode == 0, ran.stderr
