"""Whether implementations of segment attention are right here: against float64, twice, with NaN.

The problems are those of the tests, on shapes of real models.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress

from kvfunc.attention import choose, segment_attention
from kvfunc.quantize import quantize

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests" / "kvfunc"))
from shapes import (
    GEMMA_2_27B,
    GPT_OSS_20B,
    LLAMA_3_1_8B,
    SMOLLM2_135M,
    Request,
    Run,
    Shape,
    dense,
    problem,
)

console = Console(markup=False, highlight=False, soft_wrap=True)


class Case(NamedTuple):
    """A problem that is compared with its dense answer."""

    name: str
    shape: Shape
    requests: Sequence[Request]
    dtype: str  # of K and V


# With int8, Triton multiplies by numbers in two parts of bfloat16.
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2, "int8": 1e-4}
ALONE = [Request(1, [Run(keys, shift=keys)]) for keys in (0, 1, 64, 129, 700)]
IN_RUNS = [Request(1, [Run(16, shift=7 * run) for run in range(50)]), Request(1, [Run(200)])]
MIXED = [Request(1, [Run(70), Run(33, shift=20)]), Request(9, [Run(257, shift=4)]),
         Request(70, [Run(64), Run(40, shift=900, until=33), Run(1, shift=950)])]
CASES = [Case("SmolLM2-135M, decode", SMOLLM2_135M, ALONE, "float32"),
         Case("SmolLM2-135M, decode in runs", SMOLLM2_135M, IN_RUNS, "float32"),
         Case("SmolLM2-135M, prefill", SMOLLM2_135M, [Request(200, [Run(500, 30)])], "float32"),
         Case("Llama-3.1-8B, decode in runs", LLAMA_3_1_8B, IN_RUNS, "bfloat16"),
         Case("Llama-3.1-8B, prefill", LLAMA_3_1_8B, [Request(130, [Run(200, 30)])], "bfloat16"),
         Case("Llama-3.1-8B, mixed", LLAMA_3_1_8B, MIXED, "bfloat16"),
         Case("Gemma-2-27B, window, softcap", GEMMA_2_27B, MIXED, "float32"),
         Case("GPT-OSS-20B, decode", GPT_OSS_20B, ALONE, "int8"),
         Case("GPT-OSS-20B, window, sinks", GPT_OSS_20B, MIXED, "int8")]


def check(case: Case, implementations: Sequence[str]) -> Iterator[tuple[float, str | None]]:
    """For each implementation its largest error, and what is wrong."""
    made = problem(case.shape, *case.requests,
                   dtype=np.float32 if case.dtype == "int8" else jnp.dtype(case.dtype))
    kv, exact = (made.k, made.v), made
    if case.dtype == "int8":
        kv = tuple(jax.jit(quantize, static_argnums=1)(x, jnp.int8) for x in kv)
        k, v = (np.asarray(x.numbers()) for x in kv)
        exact = dataclasses.replace(made, k=k, v=v)
    want, turn = dense(exact), case.shape.rope.rotation(jnp.asarray(made.rows.shift))

    def attend(kv, implementation: str) -> np.ndarray:
        return np.asarray(segment_attention(
            made.q, *kv, made.rows, made.births, turn, sinks=made.sinks,
            implementation=implementation, **case.shape.options))

    for implementation in implementations:
        try:
            out = attend(kv, implementation)
            error = float(np.abs(out - want).max())
            if not error <= TOLERANCES[case.dtype]:
                yield error, f"off by {error:.1e}"
            elif not np.array_equal(attend(kv, implementation), out):
                yield error, "a second run gives other bits"
            # Slots that no row names hold NaN.
            elif not np.array_equal(attend(jax.tree.map(jnp.nan_to_num, kv), implementation), out):
                yield error, "unused slots show"
            else:
                yield error, None
        except Exception as failure:
            yield np.nan, f"failed: {str(failure)[:400]}"


def check_all(implementations: Sequence[str], reasons: Sequence[str]) -> bool:
    """Print what is proven here and what is not; whether nothing is wrong."""
    faults: dict[str, list[str]] = {name: [] for name in implementations}
    console.print("largest errors:")
    with Progress(console=console, transient=True) as progress:
        for case in progress.track(CASES, description="checking"):
            errors = []
            for name, (error, fault) in zip(implementations, check(case, implementations),
                                            strict=True):
                errors.append(f"{name} {error:.1e}" + " (wrong)" * bool(fault))
                faults[name] += [f"{case.name}: {fault}"] if fault else []
            console.print(f"{case.name}, {case.dtype}: {', '.join(errors)}; "
                          f"allowed {TOLERANCES[case.dtype]:.0e}")
    proven = [name for name in implementations if not faults[name]]
    console.print(f"Proven here, on {jax.devices()[0].device_kind}: {', '.join(proven) or 'none'}; "
                  f'"auto" is "{choose("auto", jnp.bfloat16)}".')
    for reason in [*reasons, *(f"{name}: {fault}" for name in faults for fault in faults[name])]:
        console.print(f"Not proven: {reason}.")
    return proven == [*implementations]
