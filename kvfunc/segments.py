"""KV of a stretch of text by itself, in the frame of that stretch: keys stand at 0, 1, 2, …

So two computations of one text can be compared and subtracted wherever they stood, and relocation
is a shift: spliced into a cache, a segment is read at birth - position, which is negative here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvfunc.cache import KVCache, Reserved, reserve, write
from kvfunc.quantize import Quantized
from kvfunc.rope import Rope
from kvfunc.storage import KV, with_numbers, write_layer

Ropes = Rope | Sequence[Rope]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segment:
    """K and V of all layers, or what is added to them; float32, padded to a fixed size."""

    k: Float[Array, "*batch layers tokens kv_heads head_dim"]  # rotated to the index
    v: Float[Array, "*batch layers tokens kv_heads head_dim"]
    length: Int[Array, "*batch"]  # int32, how many tokens there are; the rest is padding

    @property
    def size(self) -> int:
        """How many tokens there is room for."""
        return self.k.shape[-3]

    @property
    def valid(self) -> Bool[Array, "*batch tokens"]:
        """Which places hold a token."""
        index = jnp.expand_dims(jnp.arange(self.size), range(self.length.ndim))
        return index < self.length[..., None]

    @property
    def flat(self) -> Float[Array, "*batch layers tokens channels"]:
        """Keys and values of a token as one vector, keys first; padding is 0."""
        joined = jnp.concatenate([lax.collapse(x, x.ndim - 2) for x in (self.k, self.v)], -1)
        return jnp.where(self.valid[..., None, :, None], joined, 0.0)

    @classmethod
    def of_flat(cls, flat: Float[Array, "*batch layers tokens channels"],
                length: Int[Array, "*batch"], kv_heads: int) -> Segment:
        """The segment whose `flat` this is."""
        k, v = jnp.split(flat, 2, -1)
        shape = *k.shape[:-1], kv_heads, k.shape[-1] // kv_heads
        return cls(k.reshape(shape), v.reshape(shape), length)


def read(kv: KV, slots: Int[Array, " tokens"], birth: int | Int[Array, ""],
         rope: Ropes) -> Segment:
    """Take a run of tokens out of storage, its keys turned back to their index; one rotation.

    Args:
      kv: the storage.
      slots: int32, where token 0, 1, 2, … stands; the number of slots or more is padding, at the
        end.
      birth: RoPE position that token 0 was written at, the others behind it.
      rope: of the model, or of each layer.
    """
    inside = slots < kv.slots
    back = turns(rope, -birth, len(kv.k), kv.k[0].shape[-1])
    k = jnp.stack([turned(numbers(stored, slots), by) for stored, by in zip(
        kv.k, back, strict=True)])
    v = jnp.stack([numbers(stored, slots) for stored in kv.v])
    return Segment(k, v, inside.sum(dtype=jnp.int32))


def place(kv: KV, segment: Segment, slots: Int[Array, " tokens"], birth: int | Int[Array, ""],
          rope: Ropes) -> KV:
    """Put a segment into storage as if its token 0 had been written at `birth`; one rotation.

    Args:
      kv: the storage.
      segment: what to write.
      slots: int32, where each token goes; those of padding are passed over.
      birth: RoPE position of token 0.
      rope: of the model, or of each layer.
    """
    slots = jnp.where(segment.valid, slots, kv.slots)
    there = turns(rope, birth, len(kv.k), segment.k.shape[-1])
    return KV(k=tuple(write_layer(old, slots, turned(new, by))
                      for old, new, by in zip(kv.k, segment.k, there, strict=True)),
              v=tuple(write_layer(old, slots, new)
                      for old, new in zip(kv.v, segment.v, strict=True)))


def splice(cache: KVCache, segment: Segment,
           first: int | Int[Array, ""] = 0) -> tuple[KVCache, Reserved]:
    """Append a segment that was computed elsewhere, at the next positions of a cache.

    Its keys are written as they are, born at 0, 1, 2, …: queries are turned by the negative shift.

    Args:
      cache: any cache.
      segment: what to append.
      first: index in its text of the segment's first token, where it is a later part of the text.

    Raises:
      ValueError: as `reserve` and `write` do; inside a trace `info.overflow`, the cache unchanged.
    """
    cache, new = reserve(cache, segment.size, segment.length)
    index = first + jnp.arange(segment.size, dtype=jnp.int32)
    cache = dataclasses.replace(cache, birth=cache.birth.at[new.slots].set(index, mode="drop"))
    return write(cache, new.slots, tuple(segment.k), tuple(segment.v)), new


def turn(rope: Rope, position: int | Int[Array, ""], head_dim: int) -> Float[Array, "dim dim"]:
    """The rotation by one position, which all tokens of a segment share, as a matrix.

    A product with it is several times as fast on CPUs as the rotation of each pair of numbers.
    """
    return rope.rotation(jnp.full(1, position, jnp.int32))(jnp.eye(head_dim)[None])[0]


def turns(rope: Ropes, position: int | Int[Array, ""], layers: int,
          head_dim: int) -> list[Float[Array, "dim dim"]]:
    """`turn` for each layer."""
    ropes = [rope] * layers if isinstance(rope, Rope) else rope
    made = {one: turn(one, position, head_dim) for one in dict.fromkeys(ropes)}
    return [made[one] for one in ropes]


def turned(x: Float[Array, "n heads dim"],
           matrix: Float[Array, "dim dim"]) -> Float[Array, "n heads dim"]:
    """Keys rotated by what `turn` gave."""
    return jnp.matmul(x, matrix, precision=lax.Precision.HIGHEST)


def numbers(stored: Array | Quantized, slots: Int[Array, " n"]) -> Float[Array, "n heads dim"]:
    """What stands in some slots of a layer, float32; 0 where there is no such slot."""
    rows = jax.tree.map(lambda x: x.at[slots].get(mode="fill", fill_value=0), stored)
    rows = with_numbers(rows)
    return (rows.numbers() if isinstance(rows, Quantized) else rows).astype(jnp.float32)
