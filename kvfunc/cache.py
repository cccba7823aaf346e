"""The KV cache as a frozen struct of arrays, and the pure verbs that edit it.

K and V are written once, by `write`, and never touched again. What happens to a context afterwards
(`drop`, `repos`) is an edit of two small integers a slot: the position the key was born at, which
never changes, and the position it counts as having now. `compact` is the one verb that copies rows.

Every verb works under jit, vmap and scan. What cannot be raised there is a documented field of the
verb's `info`; outside of a trace the same fault is a ValueError.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvfunc.rows import Rows
from kvfunc.storage import KV, write_layer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """A cache with its integer table. Slots are rows of storage; shapes tell the capacity."""

    UNWRITTEN: ClassVar[int] = -1  # birth of a slot that holds no token yet
    DROPPED: ClassVar[int] = -1  # position of a slot that later queries cannot attend to

    kv: KV  # by layer [slots, kv_heads, head_dim], with scales if quantised
    birth: Int[Array, "*batch slots"]  # int32, RoPE position the key was written at
    position: Int[Array, "*batch slots"]  # int32, the position the key counts as having now
    next_position: Int[Array, "*batch"]  # int32, where the next token is born

    @property
    def capacity(self) -> int:
        """How many slots there are."""
        return self.birth.shape[-1]

    @property
    def written(self) -> Bool[Array, "*batch slots"]:
        """Which slots hold a token, live or dropped."""
        return self.birth != self.UNWRITTEN

    @property
    def live(self) -> Bool[Array, "*batch slots"]:
        """Which slots later queries may attend to."""
        return self.position != self.DROPPED

    @property
    def length(self) -> Int[Array, "*batch"]:
        """How many slots hold a token, live or dropped."""
        return self.written.sum(-1, dtype=jnp.int32)

    @property
    def shift(self) -> Int[Array, "*batch slots"]:
        """birth - position of every live slot, 0 elsewhere: what its queries are turned by."""
        return jnp.where(self.live, self.birth - self.position, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reserved:
    """What `reserve` and `append` tell."""

    slots: Int[Array, " size"]  # int32, where each token goes; the capacity if padding or refused
    births: Int[Array, " size"]  # int32, the position each token is rotated to
    overflow: Bool[Array, ""]  # True: no room (or count > size), the cache is unchanged


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dropped:
    """What `drop` and `keep` tell."""

    dropped: Int[Array, ""]  # int32, slots that were live before and are not now
    unwritten: Int[Array, ""]  # int32, slots asked for that hold no token or do not exist: ignored


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moved:
    """What `repos` tells."""

    moved: Int[Array, ""]  # int32, live slots whose position changed
    displacement: Int[Array, ""]  # int32, the largest change of a position


def init(layers: int, slots: int, kv_heads: int, head_dim: int,
         dtype: DTypeLike = jnp.bfloat16) -> KVCache:
    """An empty cache.

    Args:
      layers: how many layers of the model keep KV.
      slots: capacity in tokens, dropped ones included until `compact`.
      kv_heads: KV heads a layer.
      head_dim: dims a head.
      dtype: what K and V are stored as: a float type of 16 bits or more, int8 or float8_e4m3fn
        (fp8); on a CPU, bfloat16 and fp8 are fastest as `storage.fastest_dtype` of them.

    Raises:
      ValueError: if a size is not positive, or the type cannot hold KV.
    """
    return KVCache(kv=KV.zeros(layers, slots, kv_heads, head_dim, dtype),
                   birth=jnp.full(slots, KVCache.UNWRITTEN, jnp.int32),
                   position=jnp.full(slots, KVCache.DROPPED, jnp.int32),
                   next_position=jnp.int32(0))


def reserve(cache: KVCache, size: int,
            count: int | Int[Array, ""] | None = None) -> tuple[KVCache, Reserved]:
    """Give `count` new tokens their slots and births. An edit of the table only: no KV is written.

    The tokens are live at once, so that rows made from the cache let them see each other; write
    their K and V (`write`, or a model's forward pass) before anything reads them. Dropped slots are
    never used again.

    Args:
      cache: any cache.
      size: how many entries the answer has (static).
      count: how many of them are tokens, at most `size`; the others are padding. None: all.

    Returns:
      The cache, and slots and births of the tokens.

    Raises:
      ValueError: outside of a trace, if there is no room or `count` is not in [0, size]; inside,
        `info.overflow`.
    """
    count = jnp.asarray(size if count is None else count, jnp.int32)
    free = ~cache.written
    room = free.sum(dtype=jnp.int32)
    if _known(count) and not 0 <= count <= size:
        raise ValueError(f"count must be between 0 and size={size}, got {count}")
    overflow = (count > jnp.minimum(room, size)) | (count < 0)
    if _known(overflow) and overflow:
        raise ValueError(
            f"no room for {count} more tokens: {room} of capacity {cache.capacity} slots are free; "
            "drop and compact, or init with more slots")
    index = jnp.arange(size, dtype=jnp.int32)
    slots = jnp.nonzero(free, size=size, fill_value=cache.capacity)[0].astype(jnp.int32)
    slots = jnp.where((index < count) & ~overflow, slots, cache.capacity)
    births = cache.next_position + index
    grown = dataclasses.replace(
        cache,
        birth=cache.birth.at[slots].set(births, mode="drop"),
        position=cache.position.at[slots].set(births, mode="drop"),
        next_position=cache.next_position + jnp.where(overflow, 0, count))
    return grown, Reserved(slots, births, overflow)


def write(cache: KVCache, slots: Int[Array, " n"],
          k: Sequence[Float[Array, "n kv_heads head_dim"]],
          v: Sequence[Float[Array, "n kv_heads head_dim"]]) -> KVCache:
    """Put the K and V of every layer into reserved slots, cast to the cache's type.

    Args:
      cache: the cache that `reserve` returned.
      slots: int32, as `reserve` gave them; out-of-range ones (padding) are discarded.
      k: for each layer the keys, rotated to their births.
      v: for each layer the values.

    Raises:
      ValueError: if the number of layers differs.
    """
    layers = len(cache.kv.k)
    if not len(k) == len(v) == layers:
        raise ValueError(f"k and v must have one array for each of {layers} layers, "
                         f"got {len(k)} and {len(v)}")
    kv = KV(k=tuple(write_layer(old, slots, new) for old, new in zip(cache.kv.k, k, strict=True)),
            v=tuple(write_layer(old, slots, new) for old, new in zip(cache.kv.v, v, strict=True)))
    return dataclasses.replace(cache, kv=kv)


def append(cache: KVCache, k: Sequence[Float[Array, "n kv_heads head_dim"]],
           v: Sequence[Float[Array, "n kv_heads head_dim"]]) -> tuple[KVCache, Reserved]:
    """`reserve` and `write` in one: new tokens whose K and V are at hand.

    The keys must have been rotated to `next_position`, `next_position + 1`, …

    Raises:
      ValueError: as `reserve` and `write` do; inside a trace `info.overflow`, the cache unchanged.
    """
    cache, info = reserve(cache, k[0].shape[0])
    return write(cache, info.slots, k, v), info


def drop(cache: KVCache,
         which: Bool[Array, " slots"] | Int[Array, " n"]) -> tuple[KVCache, Dropped]:
    """Take slots out of the attention of every later query (semantics, `drop`).

    Survivors keep their KV and their positions, and so does `next_position`. Dropping a dropped
    slot changes nothing.

    Args:
      cache: any cache.
      which: a mask over slots, or slot indices.

    Raises:
      ValueError: outside of a trace, if a slot holds no token yet; inside, `info.unwritten` counts
        such slots and they are ignored.
    """
    if which.dtype == jnp.bool_:
        chosen, unknown = which, jnp.int32(0)
    else:
        inside = (which >= 0) & (which < cache.capacity)
        unknown = (~inside).sum(dtype=jnp.int32)
        chosen = jnp.zeros(cache.capacity, jnp.bool_).at[
            jnp.where(inside, which, cache.capacity)].set(True, mode="drop")
    unwritten = unknown + (chosen & ~cache.written).sum(dtype=jnp.int32)
    if _known(unwritten) and unwritten:
        raise ValueError(
            f"{unwritten} of the slots in `which` hold no token: {cache.length} of "
            f"{cache.capacity} slots are written; drop written slots only")
    gone = chosen & cache.live
    position = jnp.where(gone, KVCache.DROPPED, cache.position)
    return (dataclasses.replace(cache, position=position),
            Dropped(gone.sum(dtype=jnp.int32), unwritten))


def keep(cache: KVCache, which: Bool[Array, " slots"]) -> tuple[KVCache, Dropped]:
    """Drop every written slot outside of the mask `which`."""
    return drop(cache, ~which & cache.written)


def repos(cache: KVCache) -> tuple[KVCache, Moved]:
    """Renumber the live slots 0, 1, 2, … in history order; `next_position` becomes their number.

    No byte of K or V is read or written. Queries are turned by birth - position when they attend.
    """
    position = jnp.where(cache.live, _history_places(cache), KVCache.DROPPED)
    change = cache.position - position
    moved = dataclasses.replace(cache, position=position,
                                next_position=cache.live.sum(dtype=jnp.int32))
    return moved, Moved((change != 0).sum(dtype=jnp.int32), change.max())


def compact(cache: KVCache) -> tuple[KVCache, Int[Array, " slots"]]:
    """Copy the live slots to the front, bit for bit, in history order; the others become free.

    Positions, births and `next_position` stay, so attention is unchanged.

    Returns:
      The cache, and the new slot of every old one: int32, `KVCache.DROPPED` for slots that were
      not live.
    """
    places = _history_places(cache)
    order = _inverse(places)
    kept = jnp.arange(cache.capacity) < cache.live.sum()
    compacted = dataclasses.replace(
        cache,
        kv=jax.tree.map(lambda stored: stored[order], cache.kv),
        birth=jnp.where(kept, cache.birth[order], KVCache.UNWRITTEN),
        position=jnp.where(kept, cache.position[order], KVCache.DROPPED))
    return compacted, jnp.where(cache.live, places, KVCache.DROPPED)


def rows_for(cache: KVCache, new: Reserved) -> Rows:
    """The rows through which newly reserved tokens attend to the cache, themselves included.

    Every new token sees the live slots before it and itself. Within one cache, order among live
    slots is order of position, so positions serve as raw indices.

    Args:
      cache: the cache that `reserve` returned.
      new: what it told. The packed queries are its entries, padding included.

    Returns:
      As many rows as the cache has slots, so that any pattern of drops fits; the table of a cache
      with few gaps is nearly all empty rows, which cost nothing.
    """
    birth, position, live = cache.birth, cache.position, cache.live
    follows = live[:-1] & (jnp.diff(birth) == 1) & (jnp.diff(position) == 1)
    starts = live & ~jnp.concatenate([jnp.zeros(1, jnp.bool_), follows])
    first = jnp.nonzero(starts, size=cache.capacity, fill_value=cache.capacity)[0]
    row_of_slot = jnp.where(live, jnp.cumsum(starts) - 1, cache.capacity)
    length = jnp.zeros(cache.capacity, jnp.int32).at[row_of_slot].add(1, mode="drop")
    used = length > 0

    def of_first(values: Int[Array, " slots"]) -> Int[Array, " rows"]:
        return jnp.where(used, values.at[first].get(mode="fill", fill_value=0), 0)

    is_token = new.slots < cache.capacity
    count = is_token.sum(dtype=jnp.int32)
    return Rows(
        q_start=jnp.zeros_like(length), q_len=jnp.where(used, count, 0),
        slot=jnp.where(used, first, 0).astype(jnp.int32), length=length,
        raw=of_first(position), birth=of_first(birth), shift=of_first(cache.shift),
        visible_until=jnp.full(cache.capacity, Rows.NEVER, jnp.int32),
        query_raw=jnp.where(is_token, new.births, Rows.NO_QUERY))


@jax.jit
def _history_places(cache: KVCache) -> Int[Array, " slots"]:
    """The place of every slot when the live ones stand first, in order of position."""
    live = cache.live

    def partition():
        """Where slots already stand in order of position, as `append` leaves them."""
        return jnp.where(live, jnp.cumsum(live) - 1, live.sum() + jnp.cumsum(~live) - 1)

    def sort():
        rank = jnp.where(live, cache.position, jnp.iinfo(jnp.int32).max)
        return _inverse(jnp.argsort(rank, stable=True))

    highest_before = jax.lax.cummax(jnp.where(live, cache.position, -1))
    in_order = ((cache.position > jnp.roll(highest_before, 1).at[0].set(-1)) | ~live).all()
    return jax.lax.cond(in_order, partition, sort).astype(jnp.int32)


def _inverse(permutation: Int[Array, " n"]) -> Int[Array, " n"]:
    index = jnp.arange(permutation.shape[0], dtype=permutation.dtype)
    return jnp.zeros_like(permutation).at[permutation].set(index)


def _known(value: Array) -> bool:
    return not isinstance(value, jax.core.Tracer)
