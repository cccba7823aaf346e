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

from kvfunc import cpu
from kvfunc.quantize import Quantized, no_gradient
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

IMPLEMENTATIONS = ("auto", "xla", "cpu")


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


@functools.partial(jax.jit, static_argnames=("scale", "window", "softcap", "partials",
                                             "implementation"))
def segment_attention(
    q: Float[Array, "queries heads head_dim"],
    k: Shaped[Array, "slots kv_heads head_dim"] | Quantized,
    v: Shaped[Array, "slots kv_heads head_dim"] | Quantized,
    rows: Rows,
    births: Int[Array, " queries"],
    turn: Rotation,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    partials: bool = False,
    implementation: str = "auto",
) -> Float[Array, "queries heads head_dim"] | Partial:
    """Attention of packed queries to runs of slots (semantics, "keys never move, queries do").

    Query j sees key i of a row iff j is one of the row's queries,
    `raw + i <= query_raw[j] < visible_until`, and, with a window, `births[j] - position < window`.
    Query head h reads KV head `h // (heads / kv_heads)`. Slots that no row names are never used,
    whatever they hold.

    Args:
      q: queries rotated to their births; best left in float32, since they are cast to K's type
        once, after the turn (float32 where K is quantised).
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
      implementation: "xla" runs everywhere; "cpu" is C code for CPUs; "auto" is the latter on CPUs
        where it can be compiled, and XLA elsewhere.

    Returns:
      float32 outputs, 0 for queries that see nothing; or a `Partial`. Differentiable in q, k, v and
      sinks in reverse mode, not in `turn`. Under vmap a batch is more rows of one call.

    Raises:
      ValueError: if heads is not a multiple of kv_heads, window or softcap is not positive, or the
        implementation is unknown; or if differentiated where K or V is quantised.
      NotImplementedError: if the implementation that was asked for cannot be used here.
    """
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads, which is no multiple of k's {kv_heads} KV heads")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 position or None, got {window}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive or None, got {softcap}")
    options = _Options(head_dim**-0.5 if scale is None else float(scale), window, softcap,
                       native=_is_native(implementation, k, v))
    partial = _attend(options)(q, k, v, rows, births, jax.tree.map(lax.stop_gradient, turn))
    return partial if partials else partial.finish(sinks)


@dataclasses.dataclass(frozen=True)
class _Options:
    scale: float
    window: int | None
    softcap: float | None
    native: bool  # whether CPUs run C


def _is_native(implementation: str, k, v) -> bool:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, "
                         f"got {implementation!r}")
    is_wished = implementation == "auto" and jax.default_backend() == "cpu"
    if implementation != "cpu" and not is_wished:
        return False
    missing = next((f"KV of dtype {number_dtype(x)} is not built" for x in (k, v)
                    if not cpu.supports(x)), None) or cpu.unavailable()
    if missing and not is_wished:
        raise NotImplementedError(f'implementation="cpu" cannot be used: {missing}; use "xla"')
    return not missing


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
        for stored in args[1:3]:
            if isinstance(stored, Quantized):
                raise no_gradient(stored.values.dtype)
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
    xla = functools.partial(_forward_xla, options)
    if not options.native:
        return xla(q, k, v, rows, births, turn)

    def native(q, k, v, rows, births, turn) -> Partial:
        return Partial(*cpu.attend(q, k, v, rows, births, turn, scale=options.scale,
                                   window=options.window, softcap=options.softcap))

    return lax.platform_dependent(q, k, v, rows, births, turn, cpu=native, default=xla)


def _forward_xla(options: _Options, q, k, v, rows: Rows, births, turn: Rotation) -> Partial:
    state = Partial.empty(*q.shape)
    few = rows.q_len <= FEW_QUERIES
    state = _tiles(options, q, k, v, _only(rows, few), births, turn, state, 1)
    if q.shape[0] > FEW_QUERIES:
        state = _tiles(options, q, k, v, _only(rows, ~few), births, turn, state, TILE_QUERIES)
    return state


def _only(rows: Rows, mask) -> Rows:
    return dataclasses.replace(rows, q_len=jnp.where(mask, rows.q_len, 0))


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


def _scores(options: _Options, grouped, keys, mask):
    """Masked scores [kv_heads, group, queries, keys] of grouped queries against one key block."""
    scores = _product("hnd,thd->hnt", grouped, keys)
    if options.softcap is not None:
        scores = options.softcap * jnp.tanh(scores / options.softcap)
    return scores + mask[None, None]


def _attended(part: Partial, scores, values) -> Partial:
    """Online softmax: a grouped partial, [kv_heads, group, queries, …], with one more key block."""
    m = jnp.maximum(part.m, scores.max(-1))
    p = _exp_below(scores, m[..., None])
    old = _exp_below(part.m, m)
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

    def read(self, options: _Options, stored, first, size: int):
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

    def __init__(self, options: _Options, rows: Rows, births, turn: Rotation, size: int):
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


def _turned(options: _Options, run: _Run, grouped, dtype):
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


def _tiles(options: _Options, q, k, v, rows: Rows, births, turn: Rotation,
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


def _backward(options: _Options, q, k, v, rows: Rows, births, turn: Rotation, m, dl, dacc):
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
                p = _exp_below(scores, m_tile[..., None])
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
