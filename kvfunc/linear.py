"""Products with int8 matrices (W8A8): activations are rounded token by token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kvfunc import cpu
from kvfunc.quantize import Quantized


def int8_product(x: Quantized, weight: Quantized) -> Float[Array, "n out"]:
    """x W^T in float32: exact sums of int8, times the scales of x's rows and of W's.

    Args:
      x: int8 [n, in], with one scale a row.
      weight: int8 [out, in], with one scale a row.

    Raises:
      ValueError: if either is not int8.
    """
    for name, value in ("x", x), ("weight", weight):
        if value.dtype != jnp.int8:
            raise ValueError(f"{name} must be int8, got {value.dtype}")
    if jax.default_backend() != "cpu" or not cpu.has_int8():
        return _xla(x, weight)
    return lax.platform_dependent(x, weight, cpu=cpu.int8_product, default=_xla)


def _xla(x: Quantized, weight: Quantized) -> Array:
    sums = jnp.einsum("ni,oi->no", x.values, weight.values, preferred_element_type=jnp.int32)
    return sums.astype(jnp.float32) * x.scales[:, None] * weight.scales[None]
