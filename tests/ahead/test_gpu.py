"""The Triton kernel, and steps of the engine with it, compile for GPUs that are not here."""

import re

import pytest

from .cases import BEYOND_REGISTERS, BEYOND_SHARED_MEMORY, CUDA, FP8_AS_IT_IS, LARGE_POOL
from .compiled import compile_all


@pytest.fixture(scope="module")
def compiled():
    return compile_all("cuda")


@pytest.mark.parametrize("case", CUDA, ids=lambda case: case.name)
def test_it_compiles(case, compiled):
    compiled.check(case)


def test_a_step_does_not_copy_the_pool(compiled):
    case = LARGE_POOL["cuda"]
    assert compiled.of(case)["memory"]["temp"] < case.pool_bytes / 4


def test_more_memory_than_there_is_is_found(compiled):
    assert "229376 bytes of shared memory, and a800 has 166912" in (
        compiled.of(BEYOND_SHARED_MEMORY)["error"])


def test_more_registers_than_there_are_are_found(compiled):
    error = compiled.of(BEYOND_REGISTERS)["error"]
    assert int(re.search(r"spills (\d+) bytes of registers", error)[1]) > 5000


def test_types_that_a_gpu_lacks_are_found(compiled):
    assert "fp8e4nv not supported in this architecture" in compiled.of(FP8_AS_IT_IS)["error"]
