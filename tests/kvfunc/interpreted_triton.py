"""The Triton kernel in Triton's own interpreter: for a process with TRITON_INTERPRET=1.

There the fixture makes `implementation="triton"` run on a CPU. The interpreter reads and writes
host memory; torch, which it expects, is not needed.
"""

import importlib.util
import pathlib
import sys
import types

import jax
import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder

import kvfunc.triton
from kvfunc.triton import Config

# Loaded past jaxtyping's hook, which wraps the functions whose source Triton reads.
NAME = "kvfunc.triton.kernel"
PATH = pathlib.Path(kvfunc.triton.__file__).with_name("kernel.py")
spec = importlib.util.spec_from_file_location(NAME, PATH)
sys.modules[NAME] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[NAME])

NAMES = {"float32": "fp32", "bfloat16": "bf16", "int32": "i32", "int8": "i8", "uint8": "u8"}


class Tensor:
    """What Triton's interpreter wants to know of an array."""

    def __init__(self, array):
        self.array, self.dtype = array, NAMES[str(array.dtype)]

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def copy_(self, other):
        assert other.data_ptr() == self.data_ptr()

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def new_empty(self, *_, **__):
        return Tensor(self.array[:0])

    def set_(self, storage, *_):
        self.__init__(storage.array)


def interpreted(kernel, results, grid, config, *args, **constants):
    """`kvfunc.triton.call`, run by the interpreter on the host."""
    is_array = [isinstance(arg, jax.Array) for arg in args]
    sizes = dict(VECTORS=config.vectors, SIZE=config.queries, KEYS=config.keys)

    def run(*arrays):
        arrays = iter(arrays)
        given = [np.array(next(arrays)) if is_one else arg
                 for is_one, arg in zip(is_array, args, strict=True)]
        made = [np.full(result.shape, np.nan, result.dtype) for result in results]
        kernel[grid](*(Tensor(x) if isinstance(x, np.ndarray) else x for x in (*given, *made)),
                     **sizes, **constants)
        return made

    return jax.pure_callback(run, results, *(arg for arg in args if isinstance(arg, jax.Array)))


def dot(self, a, b, *others, exact=InterpreterBuilder.create_dot):
    """The interpreter multiplies the bits of bfloat16 as if they were integers."""
    a, b = (self.cast_impl(x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b))
    return exact(self, a, b, *others)


PREPARED = set()


def prepare_once(function, prepare=interpreter._patch_lang):
    """Triton's own names become the interpreter's: for good, and not at each call."""
    if id(function.__globals__) not in PREPARED:
        PREPARED.add(id(function.__globals__))
        prepare(function)
    return types.SimpleNamespace(restore=lambda: None)


@pytest.fixture(scope="session", autouse=True)
def in_the_interpreter():
    """It takes its time for every block, so there are few, of many queries and keys."""
    def wide(q, k, few):
        vectors = 512
        return Config(vectors, vectors // (q.shape[1] // k.shape[1]), 256, warps=4, stages=2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", dot)
        patch.setattr(interpreter, "_patch_lang", prepare_once)
        patch.setattr(kvfunc.triton, "call", interpreted)
        patch.setattr(kvfunc.triton, "unavailable", lambda: None)
        patch.setattr(kvfunc.triton, "PROGRAMS", 12)
        patch.setattr(Config, "of", wide)
        yield
