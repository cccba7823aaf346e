"""Segment attention on TPUs: one Pallas kernel; tiles of queries go over the runs that they see.

A tile is some neighbouring packed queries. It stays in VMEM while the blocks of keys that it may
see come in from the pool, each fetched while the one before is worked on; what no query of the tile
sees is not fetched. The rows lie in SMEM, the rotation of a row comes with its first block, and the
queries are turned there.

Elsewhere than on TPUs the kernel is interpreted, which is slow and serves tests.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvfunc.contract import Options, Partial, exp_below
from kvfunc.rope import Rotation
from kvfunc.rows import Rows
from kvfunc.storage import number_dtype, with_numbers
from kvfunc.tiles import (
    Runs,
    Tiles,
    in_passes,
    over_dims,
    padded,
    runs_of,
    seen,
    tiles_of,
    under_sine,
    up,
)

MOST_ROWS = 2**14  # in SMEM at once; a longer table runs in parts
PIECE = 128  # keys of a block that are worked on at once: the compiler unrolls over them
# Of VMEM, which has 64 MiB or more: for the kernel, its blocks of keys and values, and its tile.
VMEM_BYTES, BLOCK_BYTES, TILE_BYTES = 48 * 2**20, 8 * 2**20, 24 * 2**20


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a pass over the rows.

    Args:
      queries: of a tile; 1, or a multiple of 8, which is what a register holds.
      keys: of a block, a multiple of 128.

    Raises:
      ValueError: for other sizes.
    """

    queries: int
    keys: int

    def __post_init__(self):
        if self.queries != 1 and (self.queries < 1 or self.queries % 8):
            raise ValueError(f"queries must be 1 or a multiple of 8, got {self.queries}")
        if self.keys < 1 or self.keys % 128:
            raise ValueError(f"keys must be a multiple of 128, got {self.keys}")

    @classmethod
    def of(cls, q, k, few: bool) -> Config:
        """What fits into VMEM: as many keys as can be, up to 512, and 128 queries, or 1 for few.

        There the last two dims are filled up to whole registers. Of keys and values two blocks
        each are held; of a query, two copies of the four arrays of its size that come and go, one
        turned, and two of m and l.
        """
        heads, dim = q.shape[1:]
        width = up(dim, 128)
        of_key = 4 * up(k.shape[1], 32 // k.dtype.itemsize) * width * k.dtype.itemsize
        of_query = 4 * heads * (7 * width + 4 * 128)
        keys = max(128, min(512, BLOCK_BYTES // of_key // 128 * 128))
        queries = max(8, min(128, TILE_BYTES // of_query // 8 * 8))
        return cls(1 if few else queries, keys)


def forward(options: Options, q, k, v, rows: Rows, births, turn: Rotation, *,
            interpret: Any = False) -> Partial:
    """As `xla.forward`; `interpret` is Pallas's, and not False elsewhere than on TPUs."""
    def attend(start: int) -> Partial:
        table = {name: getattr(rows, name)[start:start + MOST_ROWS] for name in Rows.COLUMNS}
        its_turn = jax.tree.map(lambda x: x[start:start + MOST_ROWS], turn)
        return in_passes(
            lambda part, few: _pass(options, q, k, v, part, births, its_turn,
                                    config=Config.of(q, k, few), interpret=interpret),
            dataclasses.replace(rows, **table))

    starts = range(0, rows.q_len.shape[0], MOST_ROWS)
    return functools.reduce(Partial.merge, map(attend, starts))


def _pass(options: Options, q, k, v, rows: Rows, births, turn: Rotation, *, config: Config,
          interpret: Any) -> Partial:
    """The attention of one size of tiles."""
    queries, heads, dim = q.shape
    slots, kv_heads = k.shape[:2]
    group, size, keys = heads // kv_heads, config.queries, min(config.keys, slots)
    vectors = group * size  # of a tile and a KV head: for each head of the group its queries

    def tiled(x):
        x = padded(x, size).reshape(-1, size, kv_heads, group, dim)
        return jnp.moveaxis(x, 1, 3).reshape(-1, kv_heads, vectors, dim)

    def untiled(x):
        x = jnp.moveaxis(x.reshape(-1, kv_heads, group, size, x.shape[-1]), 3, 1)
        return x.reshape(-1, heads, x.shape[-1])[:queries]

    index = jnp.arange(queries, dtype=jnp.int32)
    numbers = (padded(rows.query_raw, size, Rows.NO_QUERY), padded(births, size),
               padded(index, size))
    numbers = jnp.stack([jnp.tile(x.reshape(-1, size), (1, group)) for x in numbers], -1)
    tiles = numbers.shape[0]
    q = q.astype(jnp.float32) * options.scale
    stored = [*jax.tree.leaves(with_numbers(k)), *jax.tree.leaves(with_numbers(v))]

    def block(last: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, kv_heads, vectors, last), lambda tile, *_: (tile, 0, 0, 0))

    kernel = functools.partial(_kernel, options, size, keys, slots, number_dtype(k))
    in_place = pl.BlockSpec(memory_space=pl.ANY)
    m, l, acc = pl.pallas_call(  # noqa: E741
        kernel,
        out_shape=[jax.ShapeDtypeStruct((tiles, kv_heads, vectors, last), jnp.float32)
                   for last in (1, 1, dim)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=(tiles,),
            in_specs=[block(dim), block(dim),
                      pl.BlockSpec((1, vectors, 3), lambda tile, *_: (tile, 0, 0)),
                      *[in_place] * (1 + len(stored))],
            out_specs=[block(1), block(1), block(dim)],
            scratch_shapes=[
                pltpu.VMEM((kv_heads, vectors, dim), jnp.float32),
                pltpu.VMEM((2, 2, 1, dim), jnp.float32),
                *[pltpu.VMEM((2, keys, *x.shape[1:]), x.dtype) for x in stored],
                pltpu.SemaphoreType.DMA((2, 1 + len(stored)))]),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret, name="segment_attention",
    )(jnp.stack(tiles_of(rows, births, size)), jnp.stack(runs_of(rows)), tiled(q),
      tiled(under_sine(q, turn)), numbers, over_dims(turn, dim)[:, :, None], *stored)
    return Partial(m=untiled(m)[..., 0], l=untiled(l)[..., 0], acc=untiled(acc))


def _kernel(options: Options, size: int, keys: int, slots: int, dtype, tile_table, row_table, q,
            q_under_sine, numbers, turns, *refs) -> None:
    """One tile: over all blocks of all rows that its queries may see."""
    count = (len(refs) - 6) // 2
    stored, (m, l, acc, turned, turn) = refs[:count], refs[count:count + 5]  # noqa: E741
    blocks, arrived = refs[count + 5:-1], refs[-1]
    scaled = count == 4
    size_of_piece = PIECE if keys % PIECE == 0 else keys
    tile = pl.program_id(0)
    bounds = Tiles(*(tile_table[column, tile] for column in range(len(Tiles._fields))))
    stop_row = bounds.stop_row
    raw, born, index = (numbers[0, :, i:i + 1] for i in range(3))  # [vectors, 1]

    def run_of(row):
        return Runs(*(row_table[column, row] for column in range(len(Runs._fields))))

    def seen_of(row):
        return seen(options, slots, size, tile, bounds, run_of(row))

    def with_keys(row):
        """The first row from this one on that has keys for the tile, `stop_row` for none."""
        def is_empty(row):
            start, stop = seen_of(jnp.minimum(row, row_table.shape[1] - 1))
            return (row < stop_row) & (start >= stop)

        return lax.while_loop(is_empty, lambda row: row + 1, row)

    def behind(row, block):
        """The next block, of this row or another."""
        start, stop = seen_of(row)
        is_last = start + (block + 1) * keys >= stop
        return (lax.cond(is_last, lambda: with_keys(row + 1), lambda: row),
                jnp.where(is_last, 0, block + 1))

    def slot_of(row, block):
        """Where a block begins; near the end of the pool it is read from earlier on."""
        return jnp.minimum(run_of(row).slot + seen_of(row)[0] + block * keys, slots - keys)

    def copies(row, block, side):
        slot = slot_of(row, block)
        yield pltpu.make_async_copy(turns.at[row], turn.at[side], arrived.at[side, 0])
        for i, (source, to) in enumerate(zip(stored, blocks, strict=True), start=1):
            yield pltpu.make_async_copy(source.at[pl.ds(slot, keys)], to.at[side],
                                        arrived.at[side, i])

    def fetch(row, block, side):
        @pl.when(row < stop_row)
        def _():
            for copy in copies(row, block, side):
                copy.start()

    def read(which: int, head: int, side, piece, is_inside):
        """Keys or values of a head; slots outside of the run may hold NaN."""
        at = which * count // 2
        x = blocks[at][side, piece, head, :]
        if scaled:
            x = x.astype(jnp.float32) * blocks[at + 1][side, piece][:, head:head + 1]
        return jnp.where(is_inside, x, jnp.zeros_like(x))

    def attend(row, block, side):
        @pl.when(block == 0)
        def _():
            turned[...] = q[0] * turn[side, 0][None] + q_under_sine[0] * turn[side, 1][None]

        run, (start, stop) = run_of(row), seen_of(row)
        start += block * keys
        first = slot_of(row, block) - run.slot

        def of_piece(number, _):
            piece = pl.ds(pl.multiple_of(number * size_of_piece, size_of_piece), size_of_piece)

            def in_run(shape):
                key = lax.broadcasted_iota(jnp.int32, shape, shape.index(size_of_piece))
                key += first + number * size_of_piece
                return key, (key >= start) & (key < stop)

            key, visible = in_run((1, size_of_piece))
            visible &= (run.q_start <= index) & (index < run.q_start + run.q_len)
            visible &= (run.raw + key <= raw) & (raw < run.visible_until)
            if options.window is not None:
                visible &= born - (run.position + key) < options.window
            _, is_inside = in_run((size_of_piece, 1))
            for head in range(q.shape[1]):
                its_keys = read(0, head, side, piece, is_inside)
                scores = _product(turned[head].astype(dtype), its_keys, 1)
                if options.softcap is not None:
                    scores = options.softcap * jnp.tanh(scores / options.softcap)
                scores = jnp.where(visible, scores, -jnp.inf)
                largest = jnp.maximum(m[0, head], scores.max(-1, keepdims=True))
                weights, old = exp_below(scores, largest), exp_below(m[0, head], largest)
                values = read(1, head, side, piece, is_inside)
                weighted = _product(weights.astype(values.dtype), values, 0)
                m[0, head] = largest
                l[0, head] = old * l[0, head] + weights.sum(-1, keepdims=True)
                acc[0, head] = old * acc[0, head] + weighted

        last = jnp.minimum(stop - first, keys) - 1
        lax.fori_loop(lax.div(start - first, size_of_piece), lax.div(last, size_of_piece) + 1,
                      of_piece, None)

    def step(state):
        row, block, side = state
        following = behind(row, block)
        fetch(*following, 1 - side)
        for copy in copies(row, block, side):
            copy.wait()
        attend(row, block, side)
        return *following, 1 - side

    m[...] = jnp.full_like(m, -jnp.inf)
    l[...] = jnp.zeros_like(l)
    acc[...] = jnp.zeros_like(acc)
    zero = jnp.int32(0)
    first = with_keys(bounds.first_row)
    fetch(first, zero, zero)
    lax.while_loop(lambda state: state[0] < stop_row, step, (first, zero, zero))


def _product(x, block, axis: int):
    """x, [vectors, n], with a block's axis of n; float32 sums."""
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, block, (((1,), (axis,)), ((), ())), precision=exact,
                           preferred_element_type=jnp.float32)
