"""The next token from logits, on the device: one compiled function for all parameters."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from .interface import MAX_LOGPROBS, Sampling

GREEDY_BELOW = 1e-5  # temperatures smaller than this take the likeliest token


def choose(logits: Float[Array, " vocab"], sampling: Sampling, seed: int, index: int) -> Array:
    """The id of the next token, a device scalar.

    The same seed and index give the same token for the same logits, whatever else runs.

    Args:
      logits: float32.
      sampling: temperature, then top_k, then top_p, then min_p.
      seed: of the request.
      index: how many tokens of the answer there are already.
    """
    return _choose(logits, np.float32(sampling.temperature), np.int32(sampling.top_k),
                   np.float32(sampling.top_p), np.float32(sampling.min_p),
                   np.uint32(seed & 0xFFFFFFFF), np.int32(index))


@jax.jit
def _choose(logits, temperature, top_k, top_p, min_p, seed, index) -> Int[Array, ""]:
    def greedy():
        return jnp.argmax(logits).astype(jnp.int32)

    def sampled():
        # From the largest down, so that noise is not lost beside logits of great magnitude.
        scaled = (logits - logits.max()) / temperature
        ordered = jnp.sort(scaled, descending=True)
        rank = jnp.arange(ordered.shape[0], dtype=jnp.int32)
        in_top_k = (top_k <= 0) | (rank < top_k)
        probability = jax.nn.softmax(jnp.where(in_top_k, ordered, -jnp.inf))
        before = jnp.cumsum(probability) - probability
        kept = in_top_k & (before < top_p) & (probability >= min_p * probability[0])
        least = jnp.where(kept.at[0].set(True), ordered, jnp.inf).min()
        noise = jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), index), logits.shape)
        return jnp.argmax(jnp.where(scaled >= least, scaled + noise, -jnp.inf)).astype(jnp.int32)

    return jax.lax.cond(temperature < GREEDY_BELOW, greedy, sampled)


@functools.partial(jax.jit, static_argnames="alternatives")
def logprobs(logits: Float[Array, " vocab"], token: Int[Array, ""],
             alternatives: int = MAX_LOGPROBS) -> tuple[Array, Array, Array]:
    """Log-probabilities before temperature: of the token, and of the likeliest with their ids."""
    normalised = jax.nn.log_softmax(logits)
    best, ids = jax.lax.top_k(normalised, min(alternatives, logits.shape[0]))
    return normalised[token], best, ids
