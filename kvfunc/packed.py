"""How anchors are stored: KV of many tokens in a smaller type, or as factors of a low rank."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from kvfunc.quantize import Quantized, quantize

Stored = Shaped[Array, "..."] | Quantized


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """Entries of KV [*entries, layers, tokens, heads, dim]: whole, or as U V of a low rank."""

    u: Stored  # as above, or [*entries, layers, tokens, rank]
    v: Stored | None  # [*entries, layers, rank, heads, dim]; None: u is the whole

    @classmethod
    def zeros(cls, entries: tuple[int, ...], layers: int, tokens: int, heads: int, dim: int,
              dtype: DTypeLike, rank: int | None = None) -> Packed:
        """Entries of zeros, stored as a float type or int8, whole or of `rank`.

        Raises:
          ValueError: if the type cannot be used, or the rank is below 1.
        """
        dtype = jnp.dtype(dtype)
        if dtype == jnp.int8:
            make = Quantized.zeros
        elif jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1:
            make = jnp.zeros
        else:
            raise ValueError(f"dtype must be a float type of 16 bits or more or int8, got {dtype}")
        if rank is None:
            return cls(make((*entries, layers, tokens, heads, dim), dtype), None)
        if rank < 1:
            raise ValueError(f"rank must be at least 1, or None for all, got {rank}")
        return cls(make((*entries, layers, tokens, rank), dtype),
                   make((*entries, layers, rank, heads, dim), dtype))

    @property
    def bytes_per_token(self) -> float:
        """What a token of an entry takes, over all layers, its share of V included."""
        entry_axes = len(self.u.shape) - (4 if self.v is None else 3)
        tokens = max(self.u.shape[entry_axes + 1], 1)
        return sum(math.prod(x.shape[entry_axes:]) * x.dtype.itemsize
                   for x in jax.tree.leaves(self)) / tokens

    def numbers(self) -> Float[Array, "*entries layers tokens channels"]:
        """What is stored, float32, the heads of a token as one vector."""
        u = _numbers(self.u)
        if self.v is None:
            return lax.collapse(u, u.ndim - 2)
        v = _numbers(self.v)
        return u @ lax.collapse(v, v.ndim - 2)

    def entry(self, place: tuple[Int[Array, ""] | int, ...]) -> Packed:
        """One entry."""
        return jax.tree.map(lambda x: x[place], self)

    def put(self, place: tuple[Int[Array, ""] | int, ...],
            flat: Float[Array, "layers tokens channels"]) -> Packed:
        """The same with another entry; a place outside of the table changes nothing."""
        of = self.u if self.v is None else self.v
        heads = flat.reshape(*flat.shape[:-1], *of.shape[-2:])
        if self.v is None:
            new = Packed(_stored(heads, of), None)
        else:
            rank = self.u.shape[-1]
            u, s, v = jnp.linalg.svd(flat, full_matrices=False)
            u, v = (u * s[..., None, :])[..., :rank], v[..., :rank, :]
            missing = rank - u.shape[-1]  # of a text of fewer tokens than the rank
            u = jnp.pad(u, ((0, 0), (0, 0), (0, missing)))
            v = jnp.pad(v, ((0, 0), (0, missing), (0, 0)))
            new = Packed(_stored(u, of), _stored(v.reshape(*v.shape[:-1], *of.shape[-2:]), of))
        return jax.tree.map(lambda old, new: old.at[place].set(new, mode="drop"), self, new)


def _stored(x: Float[Array, " ..."], like: Stored) -> Stored:
    return quantize(x, jnp.int8) if isinstance(like, Quantized) else x.astype(like.dtype)


def _numbers(stored: Stored) -> Float[Array, " ..."]:
    return stored.numbers() if isinstance(stored, Quantized) else stored.astype(jnp.float32)
