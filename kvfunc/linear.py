"""Products with weights, x W^T: of floats, or of int8 with activations rounded too (W8A8)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kvfunc import cpu
from kvfunc.quantize import Quantized, quantize

Matrix = Float[Array, "out in"] | Quantized


def product(x: Float[Array, "n in"], weight: Matrix, dtype: DTypeLike,
            gate: Matrix | None = None) -> Float[Array, "n out"]:
    """x W^T, or silu(x G^T) * x W^T; in float32, and rounded to `dtype` at the end.

    With int8 weights each row of x is rounded to int8 as well, for itself; their sums are exact.
    On CPUs with AMX bfloat16 and int8 run in C.

    Args:
      x: float [n, in].
      weight: float [out, in], or int8 with one scale a row.
      dtype: a float type.
      gate: G, as `weight`.

    Raises:
      ValueError: if sizes do not fit, or a weight with scales is not int8 or is differentiated.
    """
    for name, matrix in ("weight", weight), ("gate", gate):
        if isinstance(matrix, Quantized) and matrix.dtype != jnp.int8:
            raise ValueError(f"{name} must be int8 where it has scales, got {matrix.dtype}")
    if x.shape[1] != weight.shape[1]:
        raise ValueError(f"x has rows of {x.shape[1]} and weight of {weight.shape[1]}: they must "
                         "be equally long")
    if gate is not None and (gate.shape, gate.dtype) != (weight.shape, weight.dtype):
        raise ValueError(f"gate must be as weight, {weight.dtype}{weight.shape}, got "
                         f"{gate.dtype}{gate.shape}")
    if jax.default_backend() == "cpu" and _is_built(x, weight, dtype) and cpu.has_product():
        return _in_c(x, weight, gate, dtype)
    return _xla(x, weight, gate, dtype)


def _is_built(x, weight, dtype) -> bool:
    floats = jnp.float32, jnp.bfloat16
    left = floats if isinstance(weight, Quantized) else (weight.dtype,)
    return weight.dtype in (jnp.int8, jnp.bfloat16) and x.dtype in left and dtype in floats


def _xla(x, weight, gate, dtype) -> Array:
    out = _sums(x, weight)
    if gate is not None:
        out = jax.nn.silu(_sums(x, gate)) * out
    return out.astype(dtype)


def _sums(x, weight) -> Array:
    if not isinstance(weight, Quantized):
        return jnp.einsum("ni,oi->no", x, weight, preferred_element_type=jnp.float32)
    x = quantize(x, jnp.int8)
    sums = jnp.einsum("ni,oi->no", x.values, weight.values, preferred_element_type=jnp.int32)
    return sums.astype(jnp.float32) * x.scales[:, None] * weight.scales[None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _in_c(x, weight, gate, dtype) -> Array:
    """C where this runs on a CPU."""
    return lax.platform_dependent(x, weight, gate, cpu=functools.partial(cpu.product, dtype=dtype),
                                  default=functools.partial(_xla, dtype=dtype))


def _forward(x, weight, gate, dtype):
    return _in_c(x, weight, gate, dtype), (x, weight, gate)


def _backward(dtype, operands, cotangent):
    return jax.vjp(functools.partial(_xla, dtype=dtype), *operands)[1](cotangent)


_in_c.defvjp(_forward, _backward)
