"""What compile.py has found, by case: one process compiles all of a platform."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from .cases import KERNEL, Attention, Step

COMPILERS = pathlib.Path(sys.prefix) / "compilers"
ROOT = pathlib.Path(__file__).parents[2]
MOST_SECONDS = 1200


class Compiled(NamedTuple):
    """The reports, and how the process ended."""

    platform: str
    reports: dict[str, dict[str, Any]]
    end: str

    def of(self, case: Attention | Step) -> dict[str, Any]:
        if case.name not in self.reports:
            pytest.fail(f"{case.name} was not reached: the process {self.end}")
        return self.reports[case.name]

    def check(self, case: Attention | Step) -> None:
        """It was compiled, with the kernel and with nothing else that is foreign to XLA."""
        report = self.of(case)
        assert report["error"] is None, report["error"]
        assert report["lowered"] == [KERNEL[self.platform]] * bool(case.kernels), report
        assert (report["kernels"], report["collectives"]) == (case.kernels, []), report
        if isinstance(case, Step):  # the pool is donated
            assert report["memory"]["alias"] >= case.pool_bytes, report
        elif case.chips > 1:  # a chip has its part of the pool
            assert report["memory"]["argument"] < case.pool_bytes / case.chips * 2, report


def compile_all(platform: str) -> Compiled:
    """Wait for the process of a platform, however it ends."""
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
    return Compiled(platform, {report["name"]: report for report in reports}, end)
