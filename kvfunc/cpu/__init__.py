"""Attention and products in C for CPUs, compiled by the compiler that is there.

XLA's loops run on one core and its thin products below full speed; this goes over the same blocks
on all cores of XLA's own thread pool, and on AMX for bfloat16 where the machine has it. The
compiler is CC (by default cc) with CFLAGS; what it makes is kept in ~/.cache/kvfunc (or below
XDG_CACHE_HOME). Without one the XLA implementation stays in use.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import shlex
import subprocess
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvfunc.contract import Options, Partial
from kvfunc.quantize import Quantized
from kvfunc.rope import Rotation
from kvfunc.rows import Rows

SOURCES = [pathlib.Path(__file__).with_name(name)
           for name in ("attention.c", "product.c", "common.h")]
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno",
         "-fno-trapping-math", "-fno-signed-zeros", "-fvisibility=hidden", "-shared", "-fPIC")
_ATTENTION, _PRODUCT = TARGETS = "kvfunc_segment_attention", "kvfunc_product"


def unavailable() -> str | None:
    """Why it cannot be used here, None if it can. The first call compiles, if nobody has before."""
    library = _library()
    return library if isinstance(library, str) else None


def has_product() -> bool:
    """Whether `product` can be used here: it needs AMX."""
    library = _library()
    return not isinstance(library, str) and bool(library.kvfunc_has_product())


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The compiled library, or why there is none."""
    try:
        library = ctypes.CDLL(str(_compiled()))
        for target in TARGETS:
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)),
                                        platform="cpu")
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        return (f"the C compiler {shlex.join(_compiler())!r} failed: {said}; install one, or name "
                "it in CC")
    return library


def attend(options: Options, q: jax.Array, k: jax.Array | Quantized, v: jax.Array | Quantized,
           rows: Rows, births: jax.Array, turn: Rotation) -> Partial:
    """As `xla.forward`; arguments as those of `segment_attention`."""
    parts = [(x.values, x.scales) if isinstance(x, Quantized) else (x, jnp.zeros(0, jnp.float32))
             for x in (k, v)]
    (k, k_scales), (v, v_scales) = parts
    head = q.shape[:2]
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (head, head, q.shape)]
    columns = (getattr(rows, name) for name in Rows.COLUMNS)
    return Partial(*jax.ffi.ffi_call(_ATTENTION, results)(
        q.astype(jnp.float32), k, v, k_scales, v_scales, *columns, rows.query_raw, births,
        turn.cos, turn.sin, scale=np.float32(options.scale), window=np.int32(options.window or 0),
        softcap=np.float32(options.softcap or 0), interleaved=np.int32(turn.interleaved)))


def product(x: jax.Array, weight: jax.Array | Quantized, gate: jax.Array | Quantized | None,
            dtype: DTypeLike) -> jax.Array:
    """As `linear.product`, with weights in bfloat16, as x then is, or in int8."""
    if gate is None:
        gate = jax.tree.map(lambda w: w[:0], weight)
    matrices = [(w.values, w.scales) if isinstance(w, Quantized) else (w, jnp.zeros(0, jnp.float32))
                for w in (weight, gate)]
    result = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), dtype)
    return jax.ffi.ffi_call(_PRODUCT, result, vmap_method="sequential")(
        x, *matrices[0], *matrices[1])


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "cc"))


def _compiled() -> pathlib.Path:
    """The library for this machine, sources, compiler and JAX, made if it is not there yet."""
    compiler, include = _compiler(), pathlib.Path(jax.ffi.include_dir())
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True).stdout
    flags = [*FLAGS, *shlex.split(os.environ.get("CFLAGS", ""))]
    inputs = [*(source.read_bytes() for source in SOURCES), version, " ".join(flags).encode(),
              _processor().encode(), (include / "xla/ffi/api/c_api.h").read_bytes()]
    name = hashlib.sha256(b"\0".join(inputs)).hexdigest()[:16]
    root = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    made = root / "kvfunc" / f"cpu-{name}.so"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as folder:
            built = pathlib.Path(folder) / made.name
            subprocess.run([*compiler, *flags, f"-I{include}",
                            *(str(source) for source in SOURCES if source.suffix == ".c"), "-o",
                            str(built), "-lm"], capture_output=True, check=True, text=True)
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
