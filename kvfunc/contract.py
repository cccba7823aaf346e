"""What every implementation of segment attention takes and gives."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Types of KV that the kernels of cpu/, pallas/ and triton/ read; XLA reads every other too.
KERNEL_TYPES = tuple(map(jnp.dtype, ("float32", "bfloat16", "uint16", "int8", "uint8",
                                     "float8_e4m3fn")))


@dataclasses.dataclass(frozen=True)
class Options:
    """What is known when the call is compiled."""

    scale: float  # of the scores
    window: int | None  # how many positions back a query sees, itself included
    softcap: float | None


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
        a, b = exp_below(self.m, m), exp_below(other.m, m)
        return Partial(m=m, l=a * self.l + b * other.l,
                       acc=a[..., None] * self.acc + b[..., None] * other.acc)

    def merged(self) -> Partial:
        """The parts that are stacked along the first axis, merged."""
        m = self.m.max(0)
        weights = exp_below(self.m, m[None])
        return Partial(m=m, l=(weights * self.l).sum(0),
                       acc=(weights[..., None] * self.acc).sum(0))

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
            total = exp_below(self.m, m) * self.l + jnp.exp(sink - m)
        scale = jnp.where(total > 0, exp_below(self.m, m) / jnp.where(total > 0, total, 1.0), 0.0)
        return scale[..., None] * self.acc


def exp_below(x: Array, m: Array) -> Array:
    """exp(x - m) for x <= m; 0 where x is -inf, m = -inf included."""
    return jnp.exp(x - jnp.where(m == -jnp.inf, 0.0, m))
