"""Mixture of experts: a router gives each token a few MLPs of many, whose outputs are summed.

Tokens are sorted by expert, so that each expert's are neighbours and one grouped product serves
all of them. What a token gets does not depend on which others are there.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from kvfunc.linear import product
from kvfunc.quantize import Quantized
from kvfunc.storage import with_numbers

SCORES = ("softmax", "softmax_of_chosen", "sigmoid")
ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")
TILE = 16  # rows
_ROWS_BY_GROUP = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0])


@dataclasses.dataclass(frozen=True)
class MoE:
    """The experts of a layer: a hashable value, static under jit.

    Attributes:
      experts: how many there are.
      chosen: how many each token gets.
      width: length of an expert's hidden layer.
      scores: "softmax" over all experts (Qwen), "softmax_of_chosen" (GPT-OSS), or "sigmoid" of
        each, to which a correction is added for the choice alone (MiniMax-M2).
      normalised: whether the scores of those that were chosen are made to sum to 1.
      biases: whether router and experts have biases.
      shared_width: hidden width of an expert that all tokens get, behind a gate; 0 for none.
    """

    experts: int
    chosen: int
    width: int
    scores: str = "softmax"
    normalised: bool = True
    biases: bool = False
    shared_width: int = 0

    def __post_init__(self):
        if self.scores not in SCORES:
            raise ValueError(f"scores must be one of {', '.join(SCORES)}, got {self.scores!r}")
        if not 1 <= self.chosen <= self.experts:
            raise ValueError(f"chosen must be between 1 and the {self.experts} experts, "
                             f"got {self.chosen}")

    @property
    def corrected(self) -> bool:
        """Whether a correction is added to the scores for the choice alone."""
        return self.scores == "sigmoid"


def activated(kind: str, gate: Float[Array, "*n width"],
              up: Float[Array, "*n width"]) -> Float[Array, "*n width"]:
    """The hidden layer of a gated MLP, in float32."""
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    if kind == "silu":
        return jax.nn.silu(gate) * up
    if kind == "gelu_tanh":
        return jax.nn.gelu(gate, approximate=True) * up
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)  # GPT-OSS
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1.0)


def route(moe: MoE, logits: Float[Array, "n experts"],
          correction: Float[Array, " experts"] | None = None,
          ) -> tuple[Int[Array, "n chosen"], Float[Array, "n chosen"]]:
    """Which experts each token gets, and the weights of their outputs.

    Args:
      moe: the layer's experts.
      logits: float32, of the router.
      correction: added to the scores for the choice alone.
    """
    if moe.scores == "softmax_of_chosen":
        best, chosen = lax.top_k(logits, moe.chosen)
        return chosen, jax.nn.softmax(best, axis=-1)
    scores = jax.nn.sigmoid(logits) if moe.corrected else jax.nn.softmax(logits, axis=-1)
    wanted = scores if correction is None else scores + correction.astype(jnp.float32)[None]
    chosen = lax.top_k(wanted, moe.chosen)[1]
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if moe.normalised:
        weights = weights / weights.sum(-1, keepdims=True)
    return chosen, weights


def mixed(moe: MoE, activation: str, x: Float[Array, "n in"], chosen: Int[Array, "n chosen"],
          weights: Float[Array, "n chosen"], params: dict) -> Float[Array, "n in"]:
    """What the chosen experts make of each token, summed by weight, in float32.

    Args:
      moe: the layer's experts.
      activation: one of `ACTIVATIONS`.
      x: the tokens.
      chosen: int32, experts of each.
      weights: of their outputs.
      params: `gate` and `up` [experts, width, in] and `down` [experts, in, width], each a dict
        with `weight`, which may be the bits of bfloat16 (`storage.fastest_dtype`), and, where
        there are biases, `bias`.
    """
    count = chosen.shape[0]
    expert = chosen.reshape(-1)  # of each (token, choice)
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.bincount(expert, length=moe.experts).astype(jnp.int32)
    sorted_x, expert = x[order // moe.chosen], expert[order]

    def times(rows: Array, name: str) -> Array:
        out = _grouped(rows, params[name]["weight"], sizes, expert)
        bias = params[name].get("bias")
        return out if bias is None else out + bias[expert].astype(jnp.float32)

    hidden = activated(activation, times(sorted_x, "gate"), times(sorted_x, "up"))
    out = times(hidden.astype(x.dtype), "down")[jnp.argsort(order)]
    return (out.reshape(count, moe.chosen, -1) * weights[..., None]).sum(1)


def dense(moe: MoE, activation: str, x: Float[Array, "n in"], chosen: Int[Array, "n chosen"],
          weights: Float[Array, "n chosen"], params: dict) -> Float[Array, "n in"]:
    """As `mixed`, by asking every expert about every token: the reference."""
    def times(rows: Array, name: str) -> Array:
        weight = with_numbers(params[name]["weight"])
        weight = weight.numbers() if isinstance(weight, Quantized) else weight.astype(jnp.float32)
        out = jnp.einsum("eni,eoi->eno", rows.astype(jnp.float32), weight)
        bias = params[name].get("bias")
        return out if bias is None else out + bias[:, None].astype(jnp.float32)

    all_x = jnp.broadcast_to(x[None], (moe.experts, *x.shape))
    hidden = activated(activation, times(all_x, "gate"), times(all_x, "up")).astype(x.dtype)
    by_expert = times(hidden, "down")
    share = (jax.nn.one_hot(chosen, moe.experts) * weights[..., None]).sum(1)  # [n, experts]
    return jnp.einsum("ne,eno->no", share, by_expert)


def router_logits(x: Float[Array, "n in"], weight: Float[Array, "experts in"],
                  bias: Float[Array, " experts"] | None) -> Float[Array, "n experts"]:
    """In float32 from the first sum on."""
    logits = product(x, weight, jnp.float32)
    return logits if bias is None else logits + bias.astype(jnp.float32)[None]


def _grouped(x: Float[Array, "n in"], weight: Shaped[Array, "experts out in"] | Quantized,
             sizes: Int[Array, " experts"], expert: Int[Array, " n"]) -> Float[Array, "n out"]:
    """Each row times its expert's matrix, float32; rows stand by expert, `sizes` of each."""
    if isinstance(weight, Quantized):
        return _products(x, weight.values, sizes) * weight.scales[expert]
    return _products(x, weight, sizes)


@jax.custom_vjp
def _products(x: Array, weight: Array, sizes: Array) -> Array:
    return lax.platform_dependent(x, weight, sizes, cpu=by_tiles, default=by_groups)


def _forward(x, weight, sizes):
    return _products(x, weight, sizes), (x, weight, sizes)


def _backward(residuals, cotangent):
    x, weight, sizes = residuals
    pull = jax.vjp(lambda x, weight: by_groups(x, weight, sizes), x, weight)[1]
    return *pull(cotangent), np.zeros(sizes.shape, jax.dtypes.float0)


_products.defvjp(_forward, _backward)


def by_groups(x: Float[Array, "n in"], weight: Shaped[Array, "experts out in"],
              sizes: Int[Array, " experts"]) -> Float[Array, "n out"]:
    """Each row times its group's matrix, by XLA's grouped product."""
    return lax.ragged_dot_general(x, with_numbers(weight).astype(x.dtype), sizes, _ROWS_BY_GROUP,
                                  preferred_element_type=jnp.float32)


def by_tiles(x: Float[Array, "n in"], weight: Shaped[Array, "experts out in"],
             sizes: Int[Array, " experts"]) -> Float[Array, "n out"]:
    """The same a few rows at a time, each tile with one matrix: for CPUs.

    There XLA multiplies every row with every matrix. It also converts all of a bfloat16 array
    to read a part of it, so give the bits. Tiles are made in order, so that what one
    writes beyond its group is overwritten by those of the next.
    """
    tiles, first = -(-sizes // TILE), jnp.cumsum(sizes) - sizes
    stop = jnp.cumsum(tiles)
    padded = jnp.pad(x, ((0, TILE), (0, 0)))

    def one(tile, made):
        group = jnp.searchsorted(stop, tile, side="right")
        row = first[group] + (tile - stop[group] + tiles[group]) * TILE
        matrix = lax.dynamic_index_in_dim(weight, group, keepdims=False)
        matrix = with_numbers(matrix).astype(x.dtype)
        out = product(lax.dynamic_slice_in_dim(padded, row, TILE), matrix, jnp.float32)
        return lax.dynamic_update_slice_in_dim(made, out, row, 0)

    made = jnp.zeros((x.shape[0] + TILE, weight.shape[1]), jnp.float32)
    return lax.fori_loop(0, stop[-1], one, made)[:x.shape[0]]
