"""The Pallas kernel, and steps of the engine with it, compile for TPUs that are not here."""

import pytest

from .cases import BEYOND_VMEM, LARGE_POOL, TPU
from .compiled import compile_all


@pytest.fixture(scope="module")
def compiled():
    return compile_all("tpu")


@pytest.mark.parametrize("case", TPU, ids=lambda case: case.name)
def test_it_compiles(case, compiled):
    compiled.check(case)


def test_a_step_does_not_copy_the_pool(compiled):
    case = LARGE_POOL["tpu"]
    assert compiled.of(case)["memory"]["temp"] < case.pool_bytes / 4


def test_more_memory_than_there_is_is_found(compiled):
    assert "CompileTimeScopedVmemOom" in compiled.of(BEYOND_VMEM)["error"]
