"""Segment attention: packed queries read runs of slots, each run at its own shift.

This is the contract and its XLA implementation. For a key born at b that now counts as position n,
`R(p) q . R(n) k = R(p + (b - n)) q . R(b) k`: so the keys are read exactly as they were written and
the query block is turned by the row's shift. Work goes in blocks with an online softmax; a loop
runs to a traced count, so one compiled shape serves every length of context; blocks that no query
may see are not visited, and no [queries, keys] mask is ever made.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from kvfunc.rope import Rotation
from kvfunc.rows import Rows
from kvfunc.storage import number_dtype, read_block

# Rows of few queries (decode) are worked off a batch of key blocks at a time; rows of many queries
# (prefill) a tile of queries at a time.
FEW_QUERIES = 8
DECODE_BLOCKS, DECODE_BLOCK_KEYS = 16, 64
TILE_QUERIES, TILE_KEYS = 128, 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Partial:
    """Attention over some of the rows, before it is normalised. An empty one adds nothing."""

    m: Float[Array, "*n"]  # [queries, heads] float32, largest score; -inf where nothing was seen
    l: Float[Array, "*n"]  # [queries, heads] float32, sum of exp(score - m)  # noqa: E741
    acc: Float[Array, "*n head_dim"]  # [queries, heads, head_dim] float32, sum of exp(score - m) v

    @classmethod
    def empty(cls, queries: int, heads: int, head_dim: int) -> Partial:
        """What attention over no rows gives."""
        return cls(m=jnp.full((queries, heads), -jnp.inf, jnp.float32),
                   l=jnp.zeros((queries, heads), jnp.float32),
                   acc=jnp.zeros((queries, heads, head_dim), jnp.float32))

    def merge(self, other: Partial) -> Partial:
        """The attention over both sets of rows. Associative and commutative, up to rounding."""
        m = jnp.maximum(self.m, other.m)
        a, b = _exp_below(self.m, m), _exp_below(other.m, m)
        return Partial(m=m, l=a * self.l + b * other.l,
                       acc=a[..., None] * self.acc + b[..., None] * other.acc)

    def finish(self, sinks: Float[Array, " heads"] | None = None) -> (
            Float[Array, "*n head_dim"]):
        """Normalise, once all rows are merged; 0 where nothing was seen.

        Args:
          sinks: one logit a head that takes part in the softmax and has no value.
        """
        m, total = self.m, self.l
        if sinks is not None:
            sink = jnp.broadcast_to(sinks.astype(jnp.float32)[None], m.shape)
            m = jnp.maximum(self.m, sink)
            total = _exp_below(self.m, m) * self.l + jnp.exp(sink - m)
        scale = jnp.where(total > 0, _exp_below(self.m, m) / jnp.where(total > 0, total, 1.0), 0.0)
        return scale[..., None] * self.acc


def segment_attention(
    q: Float[Array, "queries heads head_dim"],
    k: Shaped[Array, "slots kv_heads head_dim"],
    v: Shaped[Array, "slots kv_heads head_dim"],
    rows: Rows,
    births: Int[Array, " queries"],
    turn: Rotation,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    partials: bool = False,
) -> Float[Array, "queries heads head_dim"] | Partial:
    """Attention of packed queries to runs of slots (semantics, "keys never move, queries do").

    Query j sees key i of a row iff j is one of the row's queries,
    `raw + i <= query_raw[j] < visible_until`, and, with a window, `births[j] - position < window`.
    Query head h reads KV head `h // (heads / kv_heads)`. Slots that no row names are never used,
    whatever they hold.

    Args:
      q: queries rotated to their births; best left in float32, since they are cast to K's type
        once, after the turn.
      k: keys as they were written.
      v: values as they were written.
      rows: which queries read which run of slots, and at which shift.
      births: int32, RoPE position of each query.
      turn: `rope.rotation(rows.shift)`; one rotation a row, made once for all layers.
      scale: factor on the scores, by default `head_dim ** -0.5`.
      window: how many positions back a query sees, itself included; None for all.
      softcap: scores become `softcap * tanh(score / softcap)`.
      sinks: one logit a head that takes part in the softmax and has no value.
      partials: return the unnormalised (m, l, acc), without sinks, to be merged with others.

    Returns:
      float32 outputs, 0 for queries that see nothing; or a `Partial`. Differentiable in q, k, v and
      sinks in reverse mode, not in `turn`. Under vmap a batch is more rows of one call.

    Raises:
      ValueError: if heads is not a multiple of kv_heads, or window or softcap is not positive.
    """
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads, which is no multiple of the {kv_heads} KV heads of k")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 position or None, got {window}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive or None, got {softcap}")
    options = _Options(head_dim**-0.5 if scale is None else float(scale), window, softcap)
    partial = _attend(options)(q, k, v, rows, births, jax.tree.map(lax.stop_gradient, turn))
    return partial if partials else partial.finish(sinks)


@dataclasses.dataclass(frozen=True)
class _Options:
    scale: float
    window: int | None
    softcap: float | None


def _exp_below(x: Array, m: Array) -> Array:
    """exp(x - m) for x <= m; 0 where x is -inf, m = -inf included."""
    return jnp.exp(x - jnp.where(m == -jnp.inf, 0.0, m))


@functools.lru_cache(maxsize=64)
def _attend(options: _Options) -> Callable[..., Partial]:
    """The differentiable core for one set of options; all tracing rules hang on it.

    Its outputs serve only in combinations that do not depend on m (merge, finish), so m counts as
    a constant in the backward pass: what flows through m and through l and acc cancels.
    """
    forward = _batch_is_more_rows(functools.partial(_forward, options))
    backward = _batch_is_more_rows(functools.partial(_backward, options))

    @jax.custom_vjp
    def attend(q, k, v, rows, births, turn):
        return forward(q, k, v, rows, births, turn)

    def attend_fwd(*args):
        partial = forward(*args)
        return partial, (args, partial.m)

    def attend_bwd(residuals, cotangent):
        (q, k, v, rows, births, turn), m = residuals
        dq, dk, dv = backward(q, k, v, rows, births, turn, m, cotangent.l, cotangent.acc)
        none = lambda x: np.zeros(x.shape, jax.dtypes.float0)  # noqa: E731
        return dq, dk, dv, jax.tree.map(none, rows), none(births), jax.tree.map(jnp.zeros_like, turn)

    attend.defvjp(attend_fwd, attend_bwd)
    return attend


def _batch_is_more_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Under vmap, offset `q_start` and `slot` and call once, for a loop cannot be batched well."""
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def rule(size, in_batched, q, k, v, rows, births, turn, *per_query):
        def batched(value, is_batched):
            return jax.tree.map(lambda x, b: x if b else jnp.broadcast_to(x, (size, *x.shape)),
                                value, is_batched)

        def flat(value):
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), value)

        args = [batched(value, is_batched) for value, is_batched in
                zip((q, k, v, rows, births, turn, *per_query), in_batched, strict=True)]
        q, k, v, rows, births, turn, *per_query = args
        index = jnp.arange(size, dtype=jnp.int32)[:, None]
        rows = dataclasses.replace(rows, q_start=rows.q_start + index * q.shape[1],
                                   slot=rows.slot + index * k.shape[1])
        out = mapped(*(flat(value) for value in (q, k, v, rows, births, turn, *per_query)))
        out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return mapped


def _forward(options: _Options, q, k, v, rows: Rows, births, turn: Rotation) -> Partial:
    queries, heads, head_dim = q.shape
    state = Partial.empty(queries, heads, head_dim)
    few = rows.q_len <= FEW_QUERIES
    state = _few_queries(options, q, k, v, _only(rows, few), births, turn, state)
    if queries > FEW_QUERIES:
        state = _tiles(options, q, k, v, _only(rows, ~few), births, turn, state)
    return state


def _only(rows: Rows, mask) -> Rows:
    return dataclasses.replace(rows, q_len=jnp.where(mask, rows.q_len, 0))


@dataclasses.dataclass(frozen=True)
class _Work:
    """One row with what the loops need of it, read from one int32 table by one gather."""

    q_start: Any
    q_len: Any
    slot: Any
    length: Any
    raw: Any
    position: Any  # of the row's first key
    visible_until: Any
    start: Any  # keys [start, stop) of the row may be seen
    stop: Any
    blocks: Any  # pieces of work for each query, or for the row
    begin: Any  # number of its first piece of work

    @classmethod
    def table(cls, rows: Rows, start, stop, blocks, begin) -> Int[Array, "rows columns"]:
        """All rows as [rows, columns]."""
        columns = [rows.q_start, rows.q_len, rows.slot, rows.length, rows.raw,
                   rows.birth - rows.shift, rows.visible_until, start, stop, blocks, begin]
        return jnp.stack([jnp.asarray(column) for column in columns], -1)

    @classmethod
    def unpack(cls, fields: Int[Array, " columns"]) -> _Work:
        """One row of the table, scalar fields."""
        return cls(*fields)


def _seen_keys(options: _Options, row: Rows | _Work, query_raw, births, valid):
    """The keys [start, stop) of a row that some valid query may see.

    The row's fields have leading axes; queries have one more, the last.
    """
    last = jnp.where(valid, query_raw, -1).max(-1)
    first = jnp.where(valid, query_raw, Rows.NEVER).min(-1)
    stop = jnp.clip(last - row.raw + 1, 0, row.length)
    stop = jnp.where(first < row.visible_until, stop, 0)
    start = jnp.zeros_like(stop)
    if options.window is not None:
        oldest = jnp.where(valid, births, Rows.NEVER).min(-1)
        position = row.position if isinstance(row, _Work) else row.birth - row.shift
        start = jnp.clip(oldest - (options.window - 1) - position, 0, stop)
    return start, stop


def _visible(options: _Options, key_index, valid_key, work: _Work, query_raw, births, valid_query):
    """Which queries of a tile see which keys of a block, [queries, keys]."""
    raw, key_index = query_raw[:, None], key_index[None]
    visible = (work.raw + key_index <= raw) & (raw < work.visible_until)
    visible &= valid_query[:, None] & valid_key[None]
    if options.window is not None:
        visible &= births[:, None] - (work.position + key_index) < options.window
    return visible


def _scores(options: _Options, grouped, keys, visible):
    """Masked scores [kv_heads, group, queries, keys] of grouped queries against one key block."""
    scores = jnp.einsum("hgqd,thd->hgqt", grouped, keys, preferred_element_type=jnp.float32,
                        precision=lax.Precision.HIGHEST)
    if options.softcap is not None:
        scores = options.softcap * jnp.tanh(scores / options.softcap)
    return jnp.where(visible[None, None], scores, -jnp.inf)


def _attended(scores, values) -> Partial:
    """Softmax sums over one key block; grouped as the scores are, [kv_heads, group, queries, …]."""
    m = scores.max(-1)
    p = _exp_below(scores, m[..., None])
    acc = jnp.einsum("hgqt,thd->hgqd", p.astype(values.dtype), values,
                     preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST)
    return Partial(m, p.sum(-1), acc)


def _grouped(x, kv_heads: int):
    """[queries, heads, …] -> [kv_heads, group, queries, …]."""
    return jnp.moveaxis(x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:]), 0, 2)


def _ungrouped(x):
    """The reverse of `_grouped`."""
    x = jnp.moveaxis(x, 2, 0)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _block(stored, work: _Work, index, block: int):
    """Keys [index * block, …) of a row: start slot, the keys' indices, which count, the numbers.

    Near the end of the pool the block is read from earlier on; slots outside of the run may hold
    anything, NaN included, and come back as zeros.
    """
    wanted = work.slot + index * block
    start = jnp.minimum(wanted, stored[0].shape[0] - block)
    key = index * block + (start - wanted) + jnp.arange(block, dtype=jnp.int32)
    valid = (key >= jnp.maximum(index * block, work.start)) & (
        key < jnp.minimum((index + 1) * block, work.stop))
    return start, key, valid, [
        jnp.where(valid[:, None, None], read_block(x, start, block), 0) for x in stored]


def _few_queries(options: _Options, q, k, v, rows: Rows, births, turn: Rotation,
                 state: Partial) -> Partial:
    """Decode: each step takes the next `DECODE_BLOCKS` pairs of (query, key block) of all rows."""
    queries, head_dim, kv_heads = q.shape[0], q.shape[2], k.shape[1]
    block = min(DECODE_BLOCK_KEYS, k.shape[0])
    offsets = jnp.arange(min(FEW_QUERIES, queries), dtype=jnp.int32)[None]
    near = jnp.minimum(rows.q_start[:, None] + offsets, queries - 1)
    start, stop = _seen_keys(options, rows, rows.query_raw[near], births[near],
                             offsets < rows.q_len[:, None])
    blocks = jnp.where(rows.q_len > 0, -(-stop // block) - start // block, 0)
    ends = jnp.cumsum(blocks * rows.q_len)
    table = _Work.table(rows, start, stop, blocks, ends - blocks * rows.q_len)
    per_query = jnp.stack([rows.query_raw, births], -1)

    def one(fields, row_turn: Rotation, item):
        """One query against one key block: the query, and [heads, head_dim + 2] of sums."""
        work = _Work.unpack(fields)
        within, divisor = item - work.begin, jnp.maximum(work.blocks, 1)
        query = jnp.minimum(work.q_start + within // divisor, queries - 1)
        index = work.start // block + within % divisor
        _, key, valid, (keys, values) = _block((k, v), work, index, block)
        raw, birth = per_query[query][:, None]
        visible = _visible(options, key, valid, work, raw, birth, (item < ends[-1])[None])
        turned = (row_turn(q[query]) * options.scale).astype(keys.dtype)[None]
        part = _attended(_scores(options, _grouped(turned, kv_heads), keys, visible), values)
        return query, _pack(jax.tree.map(_ungrouped, part))[0]

    def step(i, packed):
        items = i * DECODE_BLOCKS + jnp.arange(DECODE_BLOCKS, dtype=jnp.int32)
        owner = jnp.minimum((ends[None] <= items[:, None]).sum(1), ends.shape[0] - 1)
        query, part = jax.vmap(one)(table[owner], jax.tree.map(lambda x: x[owner], turn), items)
        # Blocks of one query are merged among themselves first, so that the update below writes
        # the same value wherever a query stands more than once.
        same = query[:, None, None] == query[None, :, None]
        part_m = part[..., -1]
        m = jnp.where(same, part_m[None], -jnp.inf).max(1)
        weight = jnp.where(same, _exp_below(part_m[None], m[:, None]), 0.0)
        sums = jnp.einsum("ijh,jhd->ihd", weight, part[..., :-1])
        old = packed[query]
        new_m = jnp.maximum(old[..., -1], m)
        new = (_exp_below(old[..., -1], new_m)[..., None] * old[..., :-1]
               + _exp_below(m, new_m)[..., None] * sums)
        return packed.at[query].set(jnp.concatenate([new, new_m[..., None]], -1))

    packed = lax.fori_loop(0, -(-ends[-1] // DECODE_BLOCKS), step, _pack(state))
    return Partial(m=packed[..., head_dim + 1], l=packed[..., head_dim], acc=packed[..., :head_dim])


def _pack(part: Partial):
    """One array [..., head_dim + 2] of acc, l and m: one gather and one scatter instead of three."""
    return jnp.concatenate([part.acc, part.l[..., None], part.m[..., None]], -1)


@dataclasses.dataclass(frozen=True)
class _Tile:
    """One tile of one row's queries, and the keys it may see."""

    at: Any  # first packed query of the slice
    work: _Work  # the row; start and stop are those of the tile
    turn: Rotation  # the row's, with a leading axis of one
    query_raw: Any
    births: Any
    valid: Any

    def visible(self, options: _Options, key, valid_key):
        """Which of its queries see which keys of a block, [queries, keys]."""
        return _visible(options, key, valid_key, self.work, self.query_raw, self.births, self.valid)

    def key_blocks(self, block: int):
        """The blocks [first, stop) that some query of the tile may see."""
        return self.work.start // block, -(-self.work.stop // block)


def _tile_work(options: _Options, rows: Rows, births, turn: Rotation, size: int):
    """How many tiles there are, and a function that gives tile i."""
    tiles = jnp.where(rows.length > 0, -(-rows.q_len // size), 0)
    ends = jnp.cumsum(tiles)
    table = _Work.table(rows, jnp.zeros_like(tiles), rows.length, tiles, ends - tiles)

    def tile(i) -> _Tile:
        row = (ends <= i).sum()
        work = _Work.unpack(table[row])
        first = work.q_start + (i - work.begin) * size
        at = jnp.minimum(first, births.shape[0] - size)
        index = at + jnp.arange(size, dtype=jnp.int32)
        valid = (index >= first) & (index < work.q_start + work.q_len)
        query_raw = lax.dynamic_slice_in_dim(rows.query_raw, at, size)
        tile_births = lax.dynamic_slice_in_dim(births, at, size)
        start, stop = _seen_keys(options, work, query_raw, tile_births, valid)
        return _Tile(at, dataclasses.replace(work, start=start, stop=stop),
                     jax.tree.map(lambda x: x[row][None], turn), query_raw, tile_births, valid)

    return ends[-1], tile


def _tiles(options: _Options, q, k, v, rows: Rows, births, turn: Rotation,
           state: Partial) -> Partial:
    """Prefill: a tile of queries goes over the key blocks it may see, with an online softmax."""
    queries, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    size, block = min(TILE_QUERIES, queries), min(TILE_KEYS, k.shape[0])
    count, tile_at = _tile_work(options, rows, births, turn, size)

    def step(i, state: Partial) -> Partial:
        tile = tile_at(i)
        turned = tile.turn(lax.dynamic_slice_in_dim(q, tile.at, size))
        grouped = _grouped((turned * options.scale).astype(number_dtype(k)), kv_heads)

        def key_block(j, part: Partial) -> Partial:
            _, key, valid, (keys, values) = _block((k, v), tile.work, j, block)
            return part.merge(_attended(_scores(options, grouped, keys, tile.visible(
                options, key, valid)), values))

        part = jax.tree.map(lambda x: _grouped(x, kv_heads), Partial.empty(size, heads, head_dim))
        part = lax.fori_loop(*tile.key_blocks(block), key_block, part)
        old = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, tile.at, size), state)
        return jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new, tile.at, 0),
                            state, old.merge(jax.tree.map(_ungrouped, part)))

    return lax.fori_loop(0, count, step, state)


def _backward(options: _Options, q, k, v, rows: Rows, births, turn: Rotation, m, dl, dacc):
    """Gradients of l and acc at constant m, over the same tiles; float32 sums."""
    kv_heads = k.shape[1]
    size, block = min(TILE_QUERIES, q.shape[0]), min(TILE_KEYS, k.shape[0])
    count, tile_at = _tile_work(options, rows, births, turn, size)

    def step(i, grads):
        tile = tile_at(i)
        q_tile = lax.dynamic_slice_in_dim(q, tile.at, size)
        m_tile, dl_tile, dacc_tile = (
            _grouped(lax.dynamic_slice_in_dim(x, tile.at, size), kv_heads) for x in (m, dl, dacc))

        def key_block(j, grads):
            dq, dk, dv = grads
            start, key, valid, (keys, values) = _block((k, v), tile.work, j, block)

            visible = tile.visible(options, key, valid)

            def scores_of(q_tile, keys):
                turned = (tile.turn(q_tile) * options.scale).astype(keys.dtype)
                return _scores(options, _grouped(turned, kv_heads), keys, visible)

            scores, pull = jax.vjp(scores_of, q_tile, keys)
            p = _exp_below(scores, m_tile[..., None])
            dp = dl_tile[..., None] + jnp.einsum("hgqd,thd->hgqt", dacc_tile,
                                                 values.astype(jnp.float32))
            dq_new, dk_new = pull(p * dp)
            dv_new = jnp.einsum("hgqt,hgqd->thd", p, dacc_tile)

            def add(total, new, at):
                old = lax.dynamic_slice_in_dim(total, at, new.shape[0])
                return lax.dynamic_update_slice_in_dim(total, old + new.astype(jnp.float32), at, 0)

            return add(dq, dq_new, tile.at), add(dk, dk_new, start), add(dv, dv_new, start)

        return lax.fori_loop(*tile.key_blocks(block), key_block, grads)

    grads = lax.fori_loop(0, count, step, tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)))
    return tuple(grad.astype(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True))
