"""Segment attention in C for CPUs, compiled where it runs by the C compiler that is there.

XLA's loops run on one core and its thin products below full speed; this goes over the same blocks
on all cores of XLA's own thread pool, and on AMX for bfloat16 where the machine has it. The
compiler is CC (by default cc) with CFLAGS; what it makes is kept in ~/.cache/kvfunc (or below
XDG_CACHE_HOME). Without one the XLA implementation stays in use, and a warning says so once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import pathlib
import platform
import shlex
import subprocess
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from kvfunc.quantize import Quantized
from kvfunc.rope import Rotation
from kvfunc.rows import Rows

SOURCE = pathlib.Path(__file__).with_name("attention.c")
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno",
         "-fno-trapping-math", "-fno-signed-zeros", "-fvisibility=hidden", "-shared", "-fPIC")
TYPES = tuple(map(jnp.dtype, ("float32", "bfloat16", "uint16", "int8", "uint8", "float8_e4m3fn")))
_TARGET = "kvfunc_segment_attention"
_log = logging.getLogger(__name__)


def supports(stored: jax.Array | Quantized) -> bool:
    """Whether KV of this type can be read."""
    return stored.dtype in TYPES


@functools.cache
def unavailable() -> str | None:
    """Why it cannot be used here, None if it can. The first call compiles, if nobody has before."""
    try:
        library = ctypes.CDLL(str(_compiled()))
        jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(getattr(library, _TARGET)),
                                    platform="cpu")
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        _log.warning("segment attention runs on XLA, which is slower: the C compiler %r failed: "
                     "%s; install one, or name it in CC", shlex.join(_compiler()), said)
        return f"it could not be compiled: {said}"
    return None


def attend(q: jax.Array, k: jax.Array | Quantized, v: jax.Array | Quantized, rows: Rows,
           births: jax.Array, turn: Rotation, *, scale: float, window: int | None,
           softcap: float | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The m, l and acc of `attention.Partial`; arguments as those of `segment_attention`."""
    parts = [(x.values, x.scales) if isinstance(x, Quantized) else (x, jnp.zeros(0, jnp.float32))
             for x in (k, v)]
    (k, k_scales), (v, v_scales) = parts
    head = q.shape[:2]
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (head, head, q.shape)]
    columns = (getattr(rows, name) for name in Rows.COLUMNS)
    return tuple(jax.ffi.ffi_call(_TARGET, results)(
        q.astype(jnp.float32), k, v, k_scales, v_scales, *columns, rows.query_raw, births,
        turn.cos, turn.sin, scale=np.float32(scale), window=np.int32(window or 0),
        softcap=np.float32(softcap or 0), interleaved=np.int32(turn.interleaved)))


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "cc"))


def _compiled() -> pathlib.Path:
    """The library for this machine, source, compiler and JAX, made if it is not there yet."""
    compiler, include = _compiler(), pathlib.Path(jax.ffi.include_dir())
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout
    flags = [*FLAGS, *shlex.split(os.environ.get("CFLAGS", ""))]
    inputs = [SOURCE.read_bytes(), version, " ".join(flags).encode(), _processor().encode(),
              (include / "xla/ffi/api/c_api.h").read_bytes()]
    name = hashlib.sha256(b"\0".join(inputs)).hexdigest()[:16]
    root = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    made = root / "kvfunc" / f"attention-{name}.so"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            built = pathlib.Path(folder) / made.name
            subprocess.run([*compiler, *flags, f"-I{include}", str(SOURCE), "-o", str(built),
                            "-lm"], capture_output=True, check=True, text=True)
            built.replace(made)  # whole or not at all, whoever else is building it
    return made


def _processor() -> str:
    """What tells machines apart that need code of their own."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return " ".join(sorted({line for line in lines
                            if line.startswith(("model name", "flags", "Features"))}))
