"""Attention problems on the shapes of real models, and their dense answers in float64.

Every problem is padded to the sizes of its shape, so one compiled program serves all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kvfunc.rope import Rope
from kvfunc.rows import Rows


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads of a model and its kind of attention, and the sizes that are compiled for it."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    queries: int = 160
    slots: int = 1500
    rows: int = 512

    @property
    def rope(self) -> Rope:
        return Rope.default(self.head_dim)

    @property
    def options(self) -> dict[str, Any]:
        return dict(scale=self.scale, window=self.window, softcap=self.softcap)


# Windows are shorter than the models' own, so that short problems reach beyond them.
SMOLLM2_135M = Shape(9, 3, 64, queries=300, slots=4000)
LLAMA_3_1_8B = QWEN3_8B = Shape(32, 8, 128)
GPT_OSS_20B = Shape(64, 8, 64, window=128, sinks=True)
GEMMA_2_27B = Shape(32, 16, 128, scale=144**-0.5, window=96, softcap=50.0)
GEMMA_2_2B = Shape(8, 4, 256, window=96, softcap=50.0)
# What one of eight devices has of a model.
PHI_2_OF_EIGHT = Shape(4, 4, 80)
PHI_3_MINI_OF_EIGHT = Shape(4, 4, 96)
# A pool smaller than a block, and decode of one request.
LLAMA_2_7B = Shape(32, 32, 128, queries=12, slots=40, rows=8)
QWEN3_0_6B = Shape(16, 8, 128, queries=1, rows=64)


class Run(NamedTuple):
    """Keys of a request's context."""

    length: int
    shift: int = 0
    until: int | None = None  # the first of the request's queries that may not see them


class Request(NamedTuple):
    """New tokens, which see themselves and the runs before them."""

    queries: int
    context: Sequence[Run] = ()


@dataclasses.dataclass(frozen=True)
class Problem:
    """Arguments of `segment_attention`, in NumPy. Slots outside of the rows hold NaN."""

    shape: Shape
    q: np.ndarray  # [queries, heads, head_dim] float32
    k: np.ndarray  # [slots, kv_heads, head_dim]
    v: np.ndarray
    rows: Rows
    births: np.ndarray
    sinks: np.ndarray | None

    @property
    def is_padding(self) -> np.ndarray:
        return self.rows.query_raw == Rows.NO_QUERY


def problem(shape: Shape, *requests: Request, seed: int = 0, dtype: Any = np.float32,
            at_end: bool = False, gap: int = 5) -> Problem:
    """Random numbers for these requests.

    Args:
      shape: what it is padded to.
      requests: packed one after another; each has its own runs of slots.
      seed: of the numbers.
      dtype: of K and V.
      at_end: whether the last run ends with the pool, rather than the first begin with it.
      gap: slots between two runs, which hold NaN as all slots outside of the runs do.
    """
    table, births, query_raw, slot = [], [], [], 0
    for queries, context in requests:
        raw, position = 0, 0
        first_query = sum(run.length for run in context)
        for run in (*context, Run(queries)):
            until = Rows.NEVER if run.until is None else first_query + run.until
            table.append((len(births), queries, slot, run.length, raw, position + run.shift,
                          run.shift, until))
            raw, position, slot = raw + run.length, position + run.length, slot + run.length + gap
        births += range(position - queries, position)
        query_raw += range(first_query, raw)
    columns = dict(zip(Rows.COLUMNS, np.array(table, np.int32).T, strict=True))
    if at_end:
        columns["slot"] = columns["slot"] + (shape.slots - (slot - gap))
    rows = Rows(**columns, query_raw=np.array(query_raw, np.int32))
    return with_numbers(shape, rows, np.array(births, np.int32), seed, dtype)


def with_numbers(shape: Shape, rows: Rows, births: np.ndarray, seed: int = 0,
                 dtype: Any = np.float32) -> Problem:
    """Pad a table, and make up its queries, keys, values and sinks."""
    rng = np.random.default_rng(seed)

    def pool():
        numbers = np.full((shape.slots, shape.kv_heads, shape.head_dim), np.nan, np.float32)
        for slot, length in zip(rows.slot, rows.length, strict=True):
            assert slot >= 0 and slot + length <= shape.slots
            numbers[slot : slot + length] = rng.normal(size=(length, *numbers.shape[1:]))
        return numbers.astype(dtype)

    q = rng.normal(size=(shape.queries, shape.heads, shape.head_dim)).astype(np.float32)
    births = np.pad(births, (0, shape.queries - len(births)))
    return Problem(shape, q, pool(), pool(), rows.pad(shape.rows, shape.queries), births,
                   rng.normal(size=shape.heads).astype(np.float32) if shape.sinks else None)


def dense(problem: Problem) -> np.ndarray:
    """The answer, with every key rotated to where it counts as being."""
    m, total, acc = dense_partial(problem)
    if problem.sinks is not None:
        total = total + np.exp(problem.sinks - np.where(np.isinf(m), 0.0, m))
    return np.where(total[..., None] > 0, acc / np.where(total > 0, total, 1)[..., None], 0.0)


def dense_partial(problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Largest score, sum of exponentials and weighted sum of values, [queries, heads, …]."""
    shape, rows = problem.shape, problem.rows
    scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
    q = np.moveaxis(problem.q.astype(np.float64), 1, 0)
    m = np.full(q.shape[:2], -np.inf)
    seen = []  # for each row: its queries, their scores [heads, queries, keys], the values
    for q_start, q_len, slot, length, raw, birth, shift, until in zip(
            *(getattr(rows, name) for name in Rows.COLUMNS), strict=True):
        if not q_len or not length:
            continue
        keys, values = (
            np.moveaxis(stored[slot : slot + length].astype(np.float64), 1, 0).repeat(
                shape.heads // shape.kv_heads, axis=0) for stored in (problem.k, problem.v))
        own, index = slice(q_start, q_start + q_len), np.arange(length)
        scores = q[:, own] @ rotated(keys, -shift).mT * scale
        if shape.softcap is not None:
            scores = shape.softcap * np.tanh(scores / shape.softcap)
        query_raw = rows.query_raw[own, None]
        visible = (raw + index <= query_raw) & (query_raw < until)
        if shape.window is not None:
            visible &= problem.births[own, None] - (birth - shift + index) < shape.window
        scores = np.where(visible, scores, -np.inf)
        m[:, own] = np.maximum(m[:, own], scores.max(-1))
        seen.append((own, scores, values))
    total, acc = np.zeros_like(m), np.zeros_like(q)
    for own, scores, values in seen:
        p = np.exp(scores - np.where(np.isinf(m), 0.0, m)[:, own, None])
        total[:, own] += p.sum(-1)
        acc[:, own] += p @ values
    return m.T, total.T, np.moveaxis(acc, 0, 1)


def rotated(x: np.ndarray, positions: int) -> np.ndarray:
    """RoPE of theta 10,000 in half-split order, in float64."""
    half = x.shape[-1] // 2
    angle = positions * 10_000.0 ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle),
                           b * np.cos(angle) + a * np.sin(angle)], -1)


def bits(x: np.ndarray) -> np.ndarray:
    """The bit patterns of bfloat16 numbers, as a pool may hold them."""
    return x.astype(ml_dtypes.bfloat16).view(np.uint16)
