"""How K and V lie in memory: written once, read in blocks, always as stored.

Every query reads what the storage holds, its own chunk and itself included, so KV is the same
function of tokens and events however a prompt was cut. This file is the only one that knows what
an element of the storage looks like.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

_BITS_OF_BFLOAT16 = jnp.uint16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KV:
    """Storage: one K and one V array a layer. A library cache and a server's pool hold the same.

    The arrays are of a float type, or of uint16, which holds bfloat16 bit patterns (see
    `fastest_dtype`).
    """

    k: tuple[Shaped[Array, "*batch slots kv_heads head_dim"], ...]  # rotated at birth
    v: tuple[Shaped[Array, "*batch slots kv_heads head_dim"], ...]

    @classmethod
    def zeros(cls, layers: int, slots: int, kv_heads: int, head_dim: int,
              dtype: DTypeLike = jnp.bfloat16) -> KV:
        """Room for `slots` tokens in each of `layers` layers.

        Raises:
          ValueError: if a size is not positive, or the type cannot hold KV.
        """
        sizes = dict(layers=layers, slots=slots, kv_heads=kv_heads, head_dim=head_dim)
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not (jnp.issubdtype(dtype, jnp.floating) or dtype == _BITS_OF_BFLOAT16):
            raise ValueError(f"dtype must be a float type, or uint16 for the bits of bfloat16, "
                             f"got {jnp.dtype(dtype)}")
        shape = (slots, kv_heads, head_dim)
        return cls(k=tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
                   v=tuple(jnp.zeros(shape, dtype) for _ in range(layers)))

    @property
    def slots(self) -> int:
        """How many tokens there is room for."""
        return self.k[0].shape[-3]


def fastest_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The storage type that holds `dtype` and is updated in place on this backend.

    XLA's CPU backend updates an array of bfloat16 by converting all of it to float32 and back;
    an array of the same bits as uint16 is updated in place. Gradients need a float type.
    """
    as_bits = jnp.dtype(dtype) == jnp.bfloat16 and jax.default_backend() == "cpu"
    return jnp.dtype(_BITS_OF_BFLOAT16 if as_bits else dtype)


def number_dtype(stored: Array) -> jnp.dtype:
    """The float type of the numbers that a storage array holds."""
    return jnp.dtype(jnp.bfloat16) if stored.dtype == _BITS_OF_BFLOAT16 else stored.dtype


def write_layer(
    stored: Shaped[Array, "slots kv_heads head_dim"], slots: Int[Array, " n"],
    new: Float[Array, "n kv_heads head_dim"],
) -> Shaped[Array, "slots kv_heads head_dim"]:
    """Put one layer's new keys (or values) into their slots, rounded to the stored type.

    A slot index equal to the number of slots or larger is discarded: so is padding written.
    """
    new = new.astype(number_dtype(stored))
    if stored.dtype == _BITS_OF_BFLOAT16:
        new = lax.bitcast_convert_type(new, stored.dtype)
    return stored.at[slots].set(new, mode="drop")


def read_block(stored: Shaped[Array, "slots kv_heads head_dim"], start: Int[Array, ""],
               size: int) -> Float[Array, "size kv_heads head_dim"]:
    """The numbers in `size` slots from `start` on, which must lie inside the storage."""
    block = lax.dynamic_slice_in_dim(stored, start, size)
    if stored.dtype == _BITS_OF_BFLOAT16:
        block = lax.bitcast_convert_type(block, jnp.bfloat16)
    return block
