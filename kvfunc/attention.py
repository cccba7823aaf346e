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

# A row's queries are worked off in tiles, and the keys of a tile in blocks. Rows of few queries
# (decode) take one query at a time, so that nothing is computed for padding.
FEW_QUERIES, TILE_QUERIES = 8, 256
DECODE_KEYS, TILE_KEYS = 128, 512


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


@functools.partial(jax.jit, static_argnames=("scale", "window", "softcap", "partials"))
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
        raise ValueError(f"q has {heads} heads, which is no multiple of k's {kv_heads} KV heads")
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
        integers = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), (rows, births))
        return dq, dk, dv, *integers, jax.tree.map(jnp.zeros_like, turn)

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
    state = Partial.empty(*q.shape)
    few = rows.q_len <= FEW_QUERIES
    state = _tiles(options, q, k, v, _only(rows, few), births, turn, state, 1, DECODE_KEYS)
    if q.shape[0] > FEW_QUERIES:
        state = _tiles(options, q, k, v, _only(rows, ~few), births, turn, state, TILE_QUERIES,
                       TILE_KEYS)
    return state


def _only(rows: Rows, mask) -> Rows:
    return dataclasses.replace(rows, q_len=jnp.where(mask, rows.q_len, 0))


def _scores(options: _Options, grouped, keys, mask):
    """Masked scores [kv_heads, group, queries, keys] of grouped queries against one key block."""
    scores = jnp.einsum("hgqd,thd->hgqt", grouped, keys, preferred_element_type=jnp.float32,
                        precision=lax.Precision.HIGHEST)
    if options.softcap is not None:
        scores = options.softcap * jnp.tanh(scores / options.softcap)
    return scores + mask[None, None]


def _attended(part: Partial, scores, values) -> Partial:
    """Online softmax: a grouped partial, [kv_heads, group, queries, …], with one more key block."""
    m = jnp.maximum(part.m, scores.max(-1))
    p = _exp_below(scores, m[..., None])
    old = _exp_below(part.m, m)
    new = jnp.einsum("hgqt,thd->hgqd", p.astype(values.dtype), values,
                     preferred_element_type=jnp.float32, precision=lax.Precision.HIGHEST)
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
    """Some queries of one row, and the keys [start, stop) of the row that they may see."""

    at: Any  # first packed query of the slice
    query_raw: Any  # [queries]
    births: Any  # [queries]
    valid: Any  # [queries] which of the slice are meant
    turn: Rotation  # the row's, with a leading axis of one
    slot: Any  # of the row's first key, as are raw index and position
    raw: Any
    position: Any
    visible_until: Any
    start: Any
    stop: Any

    def queries_of(self, packed):
        """This tile's slice of an array with one entry a packed query."""
        return lax.dynamic_slice_in_dim(packed, self.at, self.valid.shape[0])

    def put(self, packed, new):
        """The reverse of `queries_of`."""
        return lax.dynamic_update_slice_in_dim(packed, new.astype(packed.dtype), self.at, 0)

    def key_blocks(self, size: int):
        """The blocks [first, stop) of the row's keys that hold one that may be seen."""
        return self.start // size, -(-self.stop // size)

    def read(self, options: _Options, stored, index, size: int):
        """Block `index` of the row: its first slot, the numbers, and the mask [queries, keys].

        Near the end of the pool the block is read from earlier on. Slots outside of the run may
        hold anything, NaN included, and come back as zeros.
        """
        wanted = self.slot + index * size
        slot = jnp.minimum(wanted, stored[0].shape[0] - size)
        key = index * size + (slot - wanted) + jnp.arange(size, dtype=jnp.int32)
        inside = (key >= jnp.maximum(index * size, self.start)) & (key < self.stop)
        blocks = [jnp.where(inside[:, None, None], read_block(x, slot, size), 0) for x in stored]
        raw, key = self.query_raw[:, None], key[None]
        visible = self.valid[:, None] & inside[None] & (self.raw + key <= raw)
        visible &= raw < self.visible_until
        if options.window is not None:
            visible &= self.births[:, None] - (self.position + key) < options.window
        # Without the barrier XLA computes the mask again for every head.
        return slot, blocks, lax.optimization_barrier(jnp.where(visible, 0.0, -jnp.inf))


def _tile_work(options: _Options, rows: Rows, births, turn: Rotation, size: int):
    """How many tiles of `size` queries there are, and a function that gives tile i."""
    tiles = jnp.where(rows.length > 0, -(-rows.q_len // size), 0)
    ends = jnp.cumsum(tiles)
    # One table, so that a tile reads its row by one slice.
    table = jnp.stack([rows.q_start, rows.q_len, rows.slot, rows.length, rows.raw,
                       rows.birth - rows.shift, rows.visible_until, ends - tiles], -1)

    def tile(i) -> _Tile:
        row = (ends <= i).sum()
        q_start, q_len, slot, length, raw, position, visible_until, before = table[row]
        first = q_start + (i - before) * size
        at = jnp.minimum(first, births.shape[0] - size)
        index = at + jnp.arange(size, dtype=jnp.int32)
        valid = (index >= first) & (index < q_start + q_len)
        query_raw = lax.dynamic_slice_in_dim(rows.query_raw, at, size)
        tile_births = lax.dynamic_slice_in_dim(births, at, size)

        stop = jnp.clip(jnp.where(valid, query_raw, -1).max() - raw + 1, 0, length)
        stop = jnp.where(jnp.where(valid, query_raw, Rows.NEVER).min() < visible_until, stop, 0)
        start = jnp.zeros_like(stop)
        if options.window is not None:
            oldest = jnp.where(valid, tile_births, Rows.NEVER).min() - (options.window - 1)
            start = jnp.clip(oldest - position, 0, stop)
        return _Tile(at, query_raw, tile_births, valid, jax.tree.map(lambda x: x[row][None], turn),
                     slot, raw, position, visible_until, start, stop)

    return ends[-1], tile


def _tiles(options: _Options, q, k, v, rows: Rows, births, turn: Rotation,
           state: Partial, size: int, block: int) -> Partial:
    """Each tile of queries goes over the key blocks it may see, with an online softmax."""
    queries, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    size, block = min(size, queries), min(block, k.shape[0])
    count, tile_at = _tile_work(options, rows, births, turn, size)

    def step(i, state: Partial) -> Partial:
        tile = tile_at(i)
        turned = tile.turn(tile.queries_of(q)) * options.scale
        grouped = _grouped(turned.astype(number_dtype(k)), kv_heads)

        def key_block(j, part: Partial) -> Partial:
            _, (keys, values), mask = tile.read(options, (k, v), j, block)
            return _attended(part, _scores(options, grouped, keys, mask), values)

        part = jax.tree.map(lambda x: _grouped(x, kv_heads), Partial.empty(size, heads, head_dim))
        part = lax.fori_loop(*tile.key_blocks(block), key_block, part)
        old = jax.tree.map(tile.queries_of, state)
        return jax.tree.map(tile.put, state, old.merge(jax.tree.map(_ungrouped, part)))

    return lax.fori_loop(0, count, step, state)


def _backward(options: _Options, q, k, v, rows: Rows, births, turn: Rotation, m, dl, dacc):
    """Gradients of l and acc at constant m, over the same tiles; float32 sums."""
    kv_heads = k.shape[1]
    size, block = min(TILE_QUERIES, q.shape[0]), min(TILE_KEYS, k.shape[0])
    count, tile_at = _tile_work(options, rows, births, turn, size)

    def step(i, grads):
        tile = tile_at(i)
        q_tile = tile.queries_of(q)
        m_tile, dl_tile, dacc_tile = (_grouped(tile.queries_of(x), kv_heads) for x in (m, dl, dacc))

        def key_block(j, grads):
            dq, dk, dv = grads
            slot, (keys, values), mask = tile.read(options, (k, v), j, block)

            def scores_of(q_tile, keys):
                turned = (tile.turn(q_tile) * options.scale).astype(keys.dtype)
                return _scores(options, _grouped(turned, kv_heads), keys, mask)

            scores, pull = jax.vjp(scores_of, q_tile, keys)
            p = _exp_below(scores, m_tile[..., None])
            dp = dl_tile[..., None] + jnp.einsum("hgqd,thd->hgqt", dacc_tile,
                                                 values.astype(jnp.float32))
            dq_new, dk_new = pull(p * dp)
            dv_new = jnp.einsum("hgqt,hgqd->thd", p, dacc_tile)

            def add(total, new, at):
                old = lax.dynamic_slice_in_dim(total, at, new.shape[0])
                return lax.dynamic_update_slice_in_dim(total, old + new.astype(jnp.float32), at, 0)

            return add(dq, dq_new, tile.at), add(dk, dk_new, slot), add(dv, dv_new, slot)

        return lax.fori_loop(*tile.key_blocks(block), key_block, grads)

    grads = lax.fori_loop(0, count, step, tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)))
    return tuple(grad.astype(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True))
