"""Quantised KV: int8 or fp8 values, with one float32 scale per token and KV head.

A vector x is stored as `scale = max|x| / L` and `x / scale`, rounded to the nearest value of the
type, ties to even, where L is the type's largest number: 127 for int8, 448 for fp8 (e4m3fn, arXiv
2209.05433). A token is quantised once, when it is written, from its own numbers alone, so how a
prompt was cut does not show.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

FP8 = jnp.dtype(jnp.float8_e4m3fn)
BITS_OF_FP8 = jnp.dtype(jnp.uint8)
_LARGEST = {jnp.dtype(jnp.int8): 127.0, FP8: 448.0, BITS_OF_FP8: 448.0}


def is_quantized(dtype: DTypeLike) -> bool:
    """Whether KV of this type has scales: int8, fp8, and uint8, which holds the bits of fp8."""
    return jnp.dtype(dtype) in _LARGEST


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized:
    """Vectors and their scales: one layer's keys or values [slots, kv_heads, head_dim], or the rows
    of a matrix. A scale of 0 is a zero vector; NaN, one that was not finite.
    """

    values: Shaped[Array, "*vectors dim"]  # int8, fp8, or its bits as uint8
    scales: Float[Array, "*vectors"]  # float32

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: DTypeLike) -> Quantized:
        """Zero vectors; `shape` is that of the values."""
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape[:-1], jnp.float32))

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the numbers."""
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The type of the values."""
        return self.values.dtype

    def numbers(self) -> Float[Array, "*vectors dim"]:
        """The numbers that are stored, float32."""
        return self.with_numbers().values.astype(jnp.float32) * self.scales[..., None]

    def with_numbers(self) -> Quantized:
        """The same, with the bits of fp8 as fp8."""
        if self.values.dtype != BITS_OF_FP8:
            return self
        return Quantized(lax.bitcast_convert_type(self.values, FP8), self.scales)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def quantize(x: Float[Array, "*n head_dim"], dtype: DTypeLike) -> Quantized:
    """Vectors as they are stored.

    An element is off by at most half a scale (int8), by 1/16 of itself or 2^-10 scales, whichever
    is larger (fp8). A vector with a NaN or an infinity in it becomes NaN in all elements; one whose
    scale would be a subnormal float (all elements below 1e-35) may become zeros.

    Raises:
      ValueError: if differentiated.
    """
    x = x.astype(jnp.float32)
    limit = _LARGEST[jnp.dtype(dtype)]
    largest = jnp.abs(x).max(-1)
    # Multiplied, since XLA may compile a division by a constant to this, and the bits must not
    # depend on what is compiled together.
    scales = jnp.where(jnp.isfinite(largest), largest * np.float32(1 / limit), jnp.nan)
    usable = scales > 0
    steps = jnp.where(usable[..., None], x / jnp.where(usable, scales, 1.0)[..., None], 0.0)
    # Of a subnormal scale too few bits are left to bound the quotient.
    steps = jnp.clip(steps, -limit, limit)
    if jnp.dtype(dtype) == jnp.int8:
        return Quantized(jnp.round(steps).astype(jnp.int8), scales)
    values = steps.astype(FP8)
    if jnp.dtype(dtype) == BITS_OF_FP8:
        values = lax.bitcast_convert_type(values, BITS_OF_FP8)
    return Quantized(values, scales)


@quantize.defjvp
def _refuse(dtype, primals, tangents):
    raise no_gradient(dtype)


def no_gradient(dtype: DTypeLike) -> ValueError:
    """The error of whoever is differentiated through quantised KV or weights."""
    return ValueError(f"what is stored as {jnp.dtype(dtype)} has no gradient, since it is rounded "
                      "to few steps; differentiate through KV and weights of float32 or bfloat16")
