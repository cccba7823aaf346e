"""Segment attention in XLA, on any device: its loops, and their gradients.

Work goes in blocks with an online softmax; a loop runs to a traced count, so one compiled shape
serves every length of context; blocks that no query may see are not visited, and no
[queries, keys] mask is ever made.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvfunc.contract import Options, Partial, exp_below
from kvfunc.rope import Rotation
from kvfunc.rows import Rows
from kvfunc.storage import number_dtype, read_block

# A row's queries are worked off in tiles. Rows of few queries (decode) take one query at a time, so
# that nothing is computed for padding. The keys go in large blocks while these are full and in
# small ones for the rest, so that a history of many short rows costs what its keys cost.
FEW_QUERIES, TILE_QUERIES = 8, 64
LARGE_BLOCK, LARGE_BLOCK_OF_ONE_QUERY, SMALL_BLOCK = 512, 256, 64
# For one query, up to so many KV heads are read as one (see _folded).
FOLDED_HEADS = 8



def forward(options: Options, q, k, v, rows: Rows, births, turn: Rotation) -> Partial:
    """The rows of few queries, then the others; arguments as of `segment_attention`."""
    state = Partial.empty(*q.shape)
    few = rows.q_len <= FEW_QUERIES
    state = _tiles(options, q, k, v, rows.where(few), births, turn, state, 1)
    if q.shape[0] > FEW_QUERIES:
        state = _tiles(options, q, k, v, rows.where(~few), births, turn, state, TILE_QUERIES)
    return state


def _product(subscripts: str, grouped, block):
    """Of [kv_heads, group, queries, …] and a block of keys or values, in float32."""
    heads, group, queries, last = grouped.shape
    operands = grouped.reshape(heads, group * queries, last), block
    if heads == 1:  # a batch of one is not compiled to a plain product
        subscripts = subscripts.replace("h", "")
        operands = operands[0][0], block[:, 0]
    out = jnp.einsum(subscripts, *operands, preferred_element_type=jnp.float32,
                     precision=lax.Precision.HIGHEST)
    return out.reshape(heads, group, queries, -1)


def _scores(options: Options, grouped, keys, mask):
    """Masked scores [kv_heads, group, queries, keys] of grouped queries against one key block."""
    scores = _product("hnd,thd->hnt", grouped, keys)
    if options.softcap is not None:
        scores = options.softcap * jnp.tanh(scores / options.softcap)
    return scores + mask[None, None]


def _attended(part: Partial, scores, values) -> Partial:
    """Online softmax: a grouped partial, [kv_heads, group, queries, …], with one more key block."""
    m = jnp.maximum(part.m, scores.max(-1))
    p = exp_below(scores, m[..., None])
    old = exp_below(part.m, m)
    new = _product("hnt,thd->hnd", p.astype(values.dtype), values)
    return Partial(m=m, l=old * part.l + p.sum(-1), acc=old[..., None] * part.acc + new)


def _grouped(x, kv_heads: int):
    """[queries, heads, …] -> [kv_heads, group, queries, …]."""
    return jnp.moveaxis(x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:]), 0, 2)


def _ungrouped(x):
    """The reverse of `_grouped`."""
    x = jnp.moveaxis(x, 2, 0)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Some neighbouring queries of a group of rows: rows that have the same queries."""

    at: Any  # first packed query of the slice
    query_raw: Any  # [queries]
    births: Any  # [queries]
    valid: Any  # [queries] which of the slice are meant
    first_row: Any
    stop_row: Any

    def queries_of(self, packed):
        """This tile's slice of an array with one entry a packed query."""
        return lax.dynamic_slice_in_dim(packed, self.at, self.valid.shape[0])

    def put(self, packed, new):
        """The reverse of `queries_of`."""
        return lax.dynamic_update_slice_in_dim(packed, new.astype(packed.dtype), self.at, 0)


@dataclasses.dataclass(frozen=True)
class _Run:
    """The keys [start, stop) of a row that a tile may see."""

    tile: _Tile
    turn: Rotation  # the row's, with leading axes of one
    slot: Any  # of the row's first key, as are raw index and position
    raw: Any
    position: Any
    visible_until: Any
    start: Any
    stop: Any

    def over_keys(self, slots: int, body, carry):
        """`body(first key, size of the block, carry)` over all keys that may be seen."""
        large = LARGE_BLOCK if len(self.tile.valid) > 1 else LARGE_BLOCK_OF_ONE_QUERY
        large, small = min(large, slots), min(SMALL_BLOCK, slots)
        count = (self.stop - self.start) // large
        rest = self.start + count * large
        carry = lax.fori_loop(
            0, count, lambda i, carry: body(self.start + i * large, large, carry), carry)
        return lax.fori_loop(0, -(-(self.stop - rest) // small),
                             lambda i, carry: body(rest + i * small, small, carry), carry)

    def read(self, options: Options, stored, first, size: int):
        """Keys [first, …) of the row: their first slot, the numbers, the mask [queries, keys].

        Near the end of the pool the block is read from earlier on. Slots outside of the run may
        hold anything, NaN included, and come back as zeros.
        """
        wanted = self.slot + first
        slot = jnp.minimum(wanted, stored[0].shape[0] - size)
        key = first + (slot - wanted) + jnp.arange(size, dtype=jnp.int32)
        inside = (key >= first) & (key < self.stop)
        blocks = [jnp.where(inside[:, None, None], read_block(x, slot, size), 0) for x in stored]
        raw, key = self.tile.query_raw[:, None], key[None]
        visible = self.tile.valid[:, None] & inside[None] & (self.raw + key <= raw)
        visible &= raw < self.visible_until
        if options.window is not None:
            visible &= self.tile.births[:, None] - (self.position + key) < options.window
        # Without the barrier XLA computes the mask again for every head.
        return slot, blocks, lax.optimization_barrier(jnp.where(visible, 0.0, -jnp.inf))


class _Work:
    """The table cut into tiles of at most `size` queries."""

    def __init__(self, options: Options, rows: Rows, births, turn: Rotation, size: int):
        self._options, self._rows, self._births, self._turn = options, rows, births, turn
        self._size = size
        same = (rows.q_start[1:] == rows.q_start[:-1]) & (rows.q_len[1:] == rows.q_len[:-1])
        begins = ~jnp.concatenate([jnp.zeros(1, jnp.bool_), same])
        group = jnp.cumsum(begins) - 1
        members = jnp.zeros_like(rows.q_len).at[group].add(1)[group]
        tiles = jnp.where(begins, -(-rows.q_len // size), 0)
        self._ends = jnp.cumsum(tiles)
        self.count = self._ends[-1]
        # One table, so that a row is read by one slice.
        self._table = jnp.stack([
            rows.q_start, rows.q_len, self._ends - tiles, members, rows.slot, rows.length, rows.raw,
            rows.birth - rows.shift, rows.visible_until], -1)

    def tile(self, i) -> _Tile:
        """Tile i of `count`."""
        row = (self._ends <= i).sum(dtype=jnp.int32)
        q_start, q_len, before, members = self._table[row, :4]
        first = q_start + (i - before) * self._size
        at = jnp.minimum(first, self._births.shape[0] - self._size)
        index = at + jnp.arange(self._size, dtype=jnp.int32)
        valid = (index >= first) & (index < q_start + q_len)
        query_raw = lax.dynamic_slice_in_dim(self._rows.query_raw, at, self._size)
        births = lax.dynamic_slice_in_dim(self._births, at, self._size)
        return _Tile(at, query_raw, births, valid, row, row + members)

    def run(self, tile: _Tile, row) -> _Run:
        """What a tile may see of a row."""
        slot, length, raw, position, visible_until = self._table[row, 4:]
        last = jnp.where(tile.valid, tile.query_raw, Rows.NO_QUERY).max()
        first = jnp.where(tile.valid, tile.query_raw, Rows.NEVER).min()
        stop = jnp.clip(last - raw + 1, 0, jnp.where(first < visible_until, length, 0))
        start = jnp.zeros_like(stop)
        if self._options.window is not None:
            oldest = jnp.where(tile.valid, tile.births, Rows.NEVER).min()
            start = jnp.clip(oldest - (self._options.window - 1) - position, 0, stop)
        turn = jax.tree.map(lambda x: x[row][None, None], self._turn)
        return _Run(tile, turn, slot, raw, position, visible_until, start, stop)


def _turned(options: Options, run: _Run, grouped, dtype):
    """A tile's queries, float32 [kv_heads, group, queries, head_dim], as a row's keys see them."""
    return (run.turn(grouped) * options.scale).astype(dtype)


def _folded(grouped):
    """[kv_heads, group, 1, head_dim] -> [1, heads, 1, kv_heads * head_dim].

    Each head's query stands in the place of its KV head, with zeros beside it. So one plain product
    reads a block of slots as it lies; XLA's CPU takes half the time for it that it takes for a
    batch of thin ones, though most of it is zeros.
    """
    kv_heads, _, queries, head_dim = grouped.shape
    own = jnp.eye(kv_heads, dtype=grouped.dtype)[:, None, None, :, None]
    return (own * grouped[:, :, :, None]).reshape(1, -1, queries, kv_heads * head_dim)


def _unfolded(acc, kv_heads: int):
    """[queries, heads, kv_heads * head_dim] -> [queries, heads, head_dim], each head's own."""
    queries, heads, width = acc.shape
    acc = acc.reshape(queries, kv_heads, heads // kv_heads, kv_heads, -1)
    return jnp.einsum("qkgkd->qkgd", acc).reshape(queries, heads, width // kv_heads)


def _tiles(options: Options, q, k, v, rows: Rows, births, turn: Rotation,
           state: Partial, size: int) -> Partial:
    """Each tile of queries goes over the key blocks it may see, with an online softmax."""
    queries, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    size = min(size, queries)
    work = _Work(options, rows, births, turn, size)

    folds = size == 1 and 1 < kv_heads <= FOLDED_HEADS
    read_heads, width = (1, kv_heads * head_dim) if folds else (kv_heads, head_dim)

    def step(i, state: Partial) -> Partial:
        tile = work.tile(i)
        grouped = _grouped(tile.queries_of(q), kv_heads)

        def read_row(row, part: Partial) -> Partial:
            run = work.run(tile, row)
            turned = _turned(options, run, grouped, number_dtype(k))
            if folds:
                turned = _folded(turned).astype(jnp.float32)

            def read_keys(first, count: int, part: Partial) -> Partial:
                _, (keys, values), mask = run.read(options, (k, v), first, count)
                if folds:
                    keys, values = (x.astype(jnp.float32).reshape(count, 1, width)
                                    for x in (keys, values))
                return _attended(part, _scores(options, turned, keys, mask), values)

            return run.over_keys(k.shape[0], read_keys, part)

        part = jax.tree.map(lambda x: _grouped(x, read_heads), Partial.empty(size, heads, width))
        part = lax.fori_loop(tile.first_row, tile.stop_row, read_row, part)
        part = jax.tree.map(_ungrouped, part)
        if folds:
            part = dataclasses.replace(part, acc=_unfolded(part.acc, kv_heads))
        old = jax.tree.map(tile.queries_of, state)
        return jax.tree.map(tile.put, state, old.merge(part))

    return lax.fori_loop(0, work.count, step, state)


def backward(options: Options, q, k, v, rows: Rows, births, turn: Rotation, m, dl, dacc):
    """Gradients of l and acc at constant m, over the same tiles; float32 sums."""
    kv_heads = k.shape[1]
    size = min(TILE_QUERIES, q.shape[0])
    work = _Work(options, rows, births, turn, size)

    def step(i, grads):
        tile = work.tile(i)
        q_tile, m_tile, dl_tile, dacc_tile = (
            _grouped(tile.queries_of(x), kv_heads) for x in (q, m, dl, dacc))

        def read_row(row, grads):
            run = work.run(tile, row)

            def read_keys(first, count: int, grads):
                dq, dk, dv = grads
                slot, (keys, values), mask = run.read(options, (k, v), first, count)
                scores, pull = jax.vjp(lambda q_tile, keys: _scores(
                    options, _turned(options, run, q_tile, keys.dtype), keys, mask), q_tile, keys)
                p = exp_below(scores, m_tile[..., None])
                dp = dl_tile[..., None] + jnp.einsum("hgqd,thd->hgqt", dacc_tile,
                                                     values.astype(jnp.float32))
                dq_new, dk_new = pull(p * dp)
                dv_new = jnp.einsum("hgqt,hgqd->thd", p, dacc_tile)
                return (dq + dq_new.astype(jnp.float32), _add(dk, dk_new, slot),
                        _add(dv, dv_new, slot))

            return run.over_keys(k.shape[0], read_keys, grads)

        dq, dk, dv = grads
        dq_tile, dk, dv = lax.fori_loop(
            tile.first_row, tile.stop_row, read_row,
            (jnp.zeros(q_tile.shape, jnp.float32), dk, dv))
        return _add(dq, _ungrouped(dq_tile), tile.at), dk, dv

    grads = lax.fori_loop(0, work.count, step,
                          tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)))
    return tuple(grad.astype(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True))


def _add(total, new, at):
    """Add a block to the rows of `total` that begin at `at`."""
    old = lax.dynamic_slice_in_dim(total, at, new.shape[0])
    return lax.dynamic_update_slice_in_dim(total, old + new.astype(total.dtype), at, 0)
