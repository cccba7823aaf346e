"""Segment attention on NVIDIA GPUs from Ampere on: a Triton kernel, called through jax-triton.

A program goes over a share of the key blocks that a tile of queries sees with one KV head; a second
pass merges the shares. What a tile sees and how that is shared out is planned by jitted code, from
the rows alone: XLA makes one plan for all layers. jax-triton comes with `kvfunc[cuda]`, and is
imported when the first kernel is traced.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvfunc.contract import Options, Partial
from kvfunc.quantize import BITS_OF_FP8, Quantized
from kvfunc.rope import Rotation
from kvfunc.rows import Rows
from kvfunc.storage import with_numbers
from kvfunc.tiles import (
    Runs,
    Tiles,
    in_passes,
    over_dims,
    runs_of,
    seen,
    tiles_of,
    under_sine,
)

PROGRAMS = 512  # that run at once, on GPUs of 108 to 132 multiprocessors
MOST_SHARES = 64
BATCH = 64  # packed queries, or fewer, that are taken for as many requests


def unavailable() -> str | None:
    """Why it cannot be used here, None if it can."""
    if jax.default_backend() != "gpu":
        return f"it needs an NVIDIA GPU, and JAX runs on {jax.default_backend()!r} here"
    try:
        import jax_triton  # noqa: F401
    except ImportError as error:
        return f'jax-triton cannot be imported ({error}): pip install "kvfunc[cuda]"'
    return _trial()


@functools.cache
def _trial() -> str | None:
    """Why a small call cannot be compiled: not every jax-triton fits every JAX and GPU."""
    of_two, x, number = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (
        ((2,), jnp.int32), ((2, 1, 16), jnp.bfloat16), ((2, 8), jnp.float32)))
    rows = Rows(*[of_two] * len(Rows.COLUMNS), query_raw=of_two)
    try:
        jax.jit(forward, static_argnums=0).lower(
            Options(1.0, None, None), x, x, x, rows, of_two,
            Rotation(number, number, interleaved=False)).compile()
    except Exception as error:
        return f'a kernel cannot be compiled ({error}): pip install "kvfunc[cuda]" has what fits'
    return None


def _power_of_two(count: int) -> int:
    """The least that is not below `count`."""
    return 1 << (count - 1).bit_length()


def _dims(head_dim: int) -> int:
    """As many as tensor cores take."""
    return max(16, _power_of_two(head_dim))


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a pass over the rows.

    Args:
      vectors: of a program: its queries times the heads that share a KV head, filled up; a power of
        two from 16 on, as tensor cores take them.
      queries: of a tile, at most `vectors`.
      keys: of a block, a power of two from 16 on.
      warps: of a program, a power of two.
      stages: blocks that are on their way at once.

    Raises:
      ValueError: for other sizes.
    """

    vectors: int
    queries: int
    keys: int
    warps: int
    stages: int

    def __post_init__(self):
        for name, least in dict(vectors=16, keys=16, warps=1).items():
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ValueError(f"{name} must be a power of two from {least} on, got {value}")
        if not 1 <= self.queries <= self.vectors:
            raise ValueError(f"queries must be 1 to vectors, {self.vectors}, got {self.queries}")
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1, got {self.stages}")

    @classmethod
    def of(cls, q, k, few: bool) -> Config:
        """By shape: as much as registers hold on sm_80, by what ptxas spills.

        Queries stay in float32 where K is float32 or quantised, which takes twice the registers.
        """
        group, dims = q.shape[1] // k.shape[1], _dims(q.shape[2])
        least = max(16, _power_of_two(group))
        if few:
            vectors = least
        elif k.dtype.itemsize == 2:
            vectors = max(128 if dims <= 128 else 8192 // dims, least)
        else:
            vectors = max(4096 // dims, least)
        queries = 1 if few and q.shape[0] <= BATCH else vectors // group
        keys = max(16, min(64, (2048 if k.dtype == jnp.float32 else 8192) // dims))
        return cls(vectors, queries, keys, 4 if few and dims <= 128 else 8, 3)


def forward(options: Options, q, k, v, rows: Rows, births, turn: Rotation) -> Partial:
    """As `xla.forward`."""
    return in_passes(lambda rows, few: _pass(options, q, k, v, rows, births, turn,
                                             Config.of(q, k, few)), rows)


def _pass(options: Options, q, k, v, rows: Rows, births, turn: Rotation,
          config: Config) -> Partial:
    """The attention of one size of tiles."""
    from kvfunc.triton.kernel import segment_attention

    queries, heads, dim = q.shape
    slots, kv_heads = k.shape[:2]
    bounds, runs = tiles_of(rows, births, config.queries), runs_of(rows)
    tiles = bounds.stop_row.shape[0]
    shares = min(MOST_SHARES, -(-PROGRAMS // (tiles * kv_heads)))
    start, stop, following, work = _plan(options, runs, bounds, slots, config, shares)
    q = q.astype(jnp.float32) * options.scale
    scaled = isinstance(k, Quantized)
    (k, k_scales), (v, v_scales) = _parts(k), _parts(v)
    results = [jax.ShapeDtypeStruct((shares, *shape), jnp.float32)
               for shape in (q.shape[:2], q.shape[:2], q.shape)]
    parts = Partial(*call(
        segment_attention, results, (tiles, kv_heads, shares), config,
        q, under_sine(q, turn), over_dims(turn, dim), rows.query_raw, births,
        jnp.stack(runs), start, stop, following, work, k, k_scales, v, v_scales,
        queries, rows.q_len.shape[0], shares,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, DIMS=_dims(dim),
        WINDOW=options.window or 0, SOFTCAP=options.softcap or 0.0, SCALED=scaled))
    return parts.merged()


def _parts(stored) -> tuple[jax.Array, jax.Array]:
    """Values and scales of a layer's K or V; the values of fp8 as bits, which every GPU reads."""
    if not isinstance(stored, Quantized):
        return with_numbers(stored), jnp.zeros(1, jnp.float32)
    values = stored.values
    if values.dtype.itemsize == 1 and values.dtype != jnp.int8:
        values = lax.bitcast_convert_type(values, BITS_OF_FP8)
    return values, stored.scales


def _plan(options: Options, runs: Runs, bounds: Tiles, slots: int, config: Config, shares: int):
    """What each program does.

    Returns:
      start, stop: [tiles, rows], the keys of a row that a tile sees.
      following: [tiles, rows], the next row of which it sees any.
      work: [tiles, shares, 3]: row and block that a share begins with, and how many blocks it has.
    """
    tile = jnp.arange(bounds.stop_row.shape[0], dtype=jnp.int32)
    start, stop = seen(options, slots, config.queries, tile[:, None],
                       jax.tree.map(lambda x: x[:, None], bounds),
                       jax.tree.map(lambda x: x[None], runs))
    blocks = (stop - start + config.keys - 1) // config.keys
    row = jnp.arange(blocks.shape[1], dtype=jnp.int32)
    ends = jnp.cumsum(blocks, 1)
    total = ends[:, -1:]
    share = (total + shares - 1) // shares
    first = jnp.minimum(jnp.arange(shares, dtype=jnp.int32)[None] * share, total)
    count = jnp.minimum(first + share, total) - first
    first_row = (ends[:, None] <= first[..., None]).sum(-1, dtype=jnp.int32)
    first_row = jnp.minimum(first_row, blocks.shape[1] - 1)
    has_keys = jnp.where(blocks > 0, row[None], blocks.shape[1])
    following = lax.cummin(has_keys, axis=1, reverse=True)[:, 1:]
    following = jnp.pad(following, ((0, 0), (0, 1)))
    before = jnp.take_along_axis(ends - blocks, first_row, 1)
    return start, stop, following, jnp.stack([first_row, first - before, count], -1)


def call(kernel, results, grid, config: Config, *args, **constants) -> Any:
    """Run a Triton kernel; `args` are arrays and integers, and the results come after them."""
    import jax_triton

    return jax_triton.triton_call(
        *args, kernel=kernel, out_shape=results, grid=grid, num_warps=config.warps,
        num_stages=config.stages, VECTORS=config.vectors, SIZE=config.queries, KEYS=config.keys,
        **constants)
