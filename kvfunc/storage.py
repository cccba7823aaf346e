"""How K and V lie in memory: written once, read in blocks, always as stored.

Every query reads what the storage holds, its own chunk and itself included, so KV is the same
function of tokens and events however a prompt was cut. This file and quantize.py are the only ones
that know what an element of the storage looks like.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from kvfunc.quantize import BITS_OF_FP8, FP8, Quantized, is_quantized, quantize

_BITS_OF_BFLOAT16 = jnp.dtype(jnp.uint16)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KV:
    """Storage: K and V of every layer. A library cache and a server's pool hold the same.

    A layer's K or V is an array of a float type, or of uint16, which holds bfloat16 bit patterns
    (see `fastest_dtype`); or `Quantized`, which is int8 or fp8 with scales.
    """

    # K is rotated at birth.
    k: tuple[Shaped[Array, "*batch slots kv_heads head_dim"] | Quantized, ...]
    v: tuple[Shaped[Array, "*batch slots kv_heads head_dim"] | Quantized, ...]

    @classmethod
    def zeros(cls, layers: int, slots: int, kv_heads: int, head_dim: int,
              dtype: DTypeLike = jnp.bfloat16) -> KV:
        """Room for `slots` tokens in each of `layers` layers.

        Args:
          layers: how many layers keep KV.
          slots: how many tokens there is room for.
          kv_heads: KV heads a layer.
          head_dim: dims a head.
          dtype: a float type of 16 bits or more, int8, float8_e4m3fn (fp8), or what
            `fastest_dtype` makes of these.

        Raises:
          ValueError: if a size is not positive, or the type cannot hold KV.
        """
        sizes = dict(layers=layers, slots=slots, kv_heads=kv_heads, head_dim=head_dim)
        for name, value in sizes.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        dtype = jnp.dtype(dtype)
        if is_quantized(dtype):
            zeros = Quantized.zeros
        elif dtype == _BITS_OF_BFLOAT16 or (jnp.issubdtype(dtype, jnp.floating)
                                            and dtype.itemsize > 1):
            zeros = jnp.zeros
        else:
            raise ValueError("dtype must be a float type of 16 bits or more, int8, float8_e4m3fn, "
                             "or uint16 or uint8 for the bits of bfloat16 or float8_e4m3fn, "
                             f"got {dtype}")
        shape = (slots, kv_heads, head_dim)
        return cls(k=tuple(zeros(shape, dtype) for _ in range(layers)),
                   v=tuple(zeros(shape, dtype) for _ in range(layers)))

    @property
    def slots(self) -> int:
        """How many tokens there is room for."""
        return self.k[0].shape[-3]

    @property
    def bytes_per_token(self) -> int:
        """What a slot takes, over all layers, scales included."""
        per_slot = len(self.k[0].shape) - 2  # the first axis after the slots
        return sum(x.dtype.itemsize * math.prod(x.shape[per_slot:]) for x in jax.tree.leaves(self))


def fastest_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The storage type that holds `dtype` and is updated in place on this backend.

    XLA's CPU backend updates an array of bfloat16 (or fp8) by converting all of it to float32 (or
    float16) and back; an array of the same bits as uint16 (or uint8) is updated in place. Gradients
    need a float type.
    """
    dtype = jnp.dtype(dtype)
    if jax.default_backend() != "cpu":
        return dtype
    return {jnp.dtype(jnp.bfloat16): _BITS_OF_BFLOAT16, FP8: BITS_OF_FP8}.get(dtype, dtype)


def number_dtype(stored: Array | Quantized) -> jnp.dtype:
    """The float type of the numbers that a layer's K or V holds."""
    if isinstance(stored, Quantized):
        return jnp.dtype(jnp.float32)
    return jnp.dtype(jnp.bfloat16) if stored.dtype == _BITS_OF_BFLOAT16 else stored.dtype


def with_numbers(stored: Array | Quantized) -> Array | Quantized:
    """The same, with bits as the numbers that they stand for."""
    if isinstance(stored, Quantized):
        return stored.with_numbers()
    if stored.dtype == _BITS_OF_BFLOAT16:
        stored = lax.bitcast_convert_type(stored, jnp.bfloat16)
    return stored


def write_layer(
    stored: Shaped[Array, "slots kv_heads head_dim"] | Quantized, slots: Int[Array, " n"],
    new: Float[Array, "n kv_heads head_dim"],
) -> Shaped[Array, "slots kv_heads head_dim"] | Quantized:
    """Put one layer's new keys (or values) into their slots, rounded to the stored type.

    A slot index equal to the number of slots or larger is discarded: so is padding written.
    """
    if isinstance(stored, Quantized):
        new = quantize(new, stored.values.dtype)
    else:
        new = new.astype(number_dtype(stored))
        if stored.dtype == _BITS_OF_BFLOAT16:
            new = lax.bitcast_convert_type(new, stored.dtype)
    return jax.tree.map(lambda old, new: old.at[slots].set(new, mode="drop"), stored, new)


def read_block(stored: Shaped[Array, "slots kv_heads head_dim"] | Quantized, start: Int[Array, ""],
               size: int) -> Float[Array, "size kv_heads head_dim"]:
    """The numbers in `size` slots from `start` on, which must lie inside the storage."""
    block = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), stored)
    return block.numbers() if isinstance(block, Quantized) else with_numbers(block)
