"""The kernels, and a whole step of the engine, compile for TPUs and NVIDIA GPUs that are not here.

One process a platform compiles all its cases, see compile.py; every case is a test, and those of a
platform run in one worker.
"""

import json
import os
import pathlib
import subprocess
import sys
from typing import NamedTuple

import pytest

from .cases import (
    BEYOND_SHARED_MEMORY,
    BEYOND_VMEM,
    CUDA,
    FP8,
    FP8_AS_IT_IS,
    GPUS,
    KERNEL,
    LARGE_POOL,
    SHAPES,
    TPU,
    TPUS,
    Attention,
    Step,
)

COMPILERS = pathlib.Path(sys.prefix) / "compilers"
ROOT = pathlib.Path(__file__).parents[2]
MOST_SECONDS = 1200


class Run(NamedTuple):
    """What a process has printed, by case, and how it ended."""

    reports: dict
    end: str

    def of(self, case):
        assert case.name in self.reports, f"{case.name} was not reached: the process {self.end}"
        return self.reports[case.name]


def run(platform):
    if not COMPILERS.is_dir():
        pytest.fail("the compilers are missing: run `make test`, which installs them")
    path = os.pathsep.join([str(COMPILERS), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        ran = subprocess.run(
            [sys.executable, "-m", f"{__package__}.compile", platform], cwd=ROOT, text=True,
            capture_output=True, timeout=MOST_SECONDS, env={**os.environ, "PYTHONPATH": path})
        out, end = ran.stdout, f"ended with {ran.returncode}:\n{ran.stderr}"
    except subprocess.TimeoutExpired as slow:
        out, said = ((x or b"").decode() for x in (slow.stdout, slow.stderr))
        end = f"took more than {MOST_SECONDS} s:\n{said}"
    reports = map(json.loads, out.splitlines())
    return Run({report["name"]: report for report in reports}, end)


@pytest.fixture(scope="module")
def tpu():
    return run("tpu")


@pytest.fixture(scope="module")
def cuda():
    return run("cuda")


on_tpus, on_gpus = (pytest.mark.xdist_group(platform) for platform in ("tpu", "cuda"))


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def assert_compiled(case, report, kernel):
    assert report["error"] is None, report["error"]
    assert report["lowered"] == [kernel] * bool(case.kernels)
    assert (report["kernels"], report["collectives"]) == (case.kernels, [])
    memory = report["memory"]
    if isinstance(case, Step):
        assert memory["alias"] >= case.pool_bytes  # donated
    elif case.chips > 1:
        assert memory["argument"] < case.pool_bytes / (case.chips / 2)


@on_tpus
@named(TPU)
def test_it_compiles_for_tpus(case, tpu):
    assert_compiled(case, tpu.of(case), KERNEL["tpu"])


@on_gpus
@named(CUDA)
def test_it_compiles_for_gpus(case, cuda):
    assert_compiled(case, cuda.of(case), KERNEL["cuda"])


@pytest.mark.parametrize("platform", [pytest.param("tpu", marks=on_tpus),
                                      pytest.param("cuda", marks=on_gpus)])
def test_a_step_does_not_copy_the_pool(platform, request):
    case = LARGE_POOL[platform]
    report = request.getfixturevalue(platform).of(case)
    assert report["memory"]["temp"] < case.pool_bytes / 4


@on_tpus
def test_more_than_a_tpu_has_is_found(tpu):
    assert "CompileTimeScopedVmemOom" in tpu.of(BEYOND_VMEM)["error"]


@on_gpus
def test_more_than_a_gpu_has_is_found(cuda):
    assert "229376 bytes of shared memory, and a800 has 166912" in (
        cuda.of(BEYOND_SHARED_MEMORY)["error"])


@on_gpus
def test_types_that_a_gpu_lacks_are_found(cuda):
    assert "fp8e4nv not supported in this architecture" in cuda.of(FP8_AS_IT_IS)["error"]


@pytest.mark.parametrize("cases, chips", [(TPU, TPUS), (CUDA, GPUS)], ids=["tpu", "cuda"])
def test_every_shape_type_size_and_chip_is_there(cases, chips):
    kernels = [case for case in cases if isinstance(case, Attention) and not case.xla]
    assert {case.model for case in kernels} == set(SHAPES)
    assert {case.dtype for case in kernels} == {"bfloat16", "float32", "int8", FP8}
    assert {case.queries for case in kernels} == {16, 512}
    assert {case.chip for case in kernels} == set(chips)
    assert {case.chip for case in cases if isinstance(case, Attention) and case.xla} == set(chips)
    assert {case.chip for case in cases if isinstance(case, Step)} == set(chips)
