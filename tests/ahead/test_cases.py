"""What compile.py is given covers what the kernels are for."""

import pytest

from .cases import CUDA, FP8, GPUS, SHAPES, TPU, TPUS, Attention, Step


@pytest.mark.parametrize("cases, chips", [(TPU, TPUS), (CUDA, GPUS)], ids=["tpu", "cuda"])
def test_every_shape_type_size_and_chip_is_there(cases, chips):
    attention = [case for case in cases if isinstance(case, Attention)]
    kernels = [case for case in attention if not case.xla]
    assert {case.model for case in kernels} == set(SHAPES)
    assert {case.dtype for case in kernels} == {"bfloat16", "float32", "int8", FP8}
    assert {case.queries for case in kernels} == {16, 512}
    assert {case.chip for case in kernels} == set(chips)
    assert {case.chip for case in attention if case.xla} == set(chips)
    assert {case.chip for case in cases if isinstance(case, Step)} == set(chips)
