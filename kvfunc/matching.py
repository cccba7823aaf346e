"""Which anchors speak for a text and how loudly: distances, weights, entropy; who makes way."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.special import xlogy
from jaxtyping import Array, Bool, Float, Int

from kvfunc.packed import Packed

SKETCH = 16  # numbers a token that distances are computed from
TOP_P = 0.9  # share of the weights that KVCOMM counts as used


def sketch(flat: Float[Array, "layers tokens channels"]) -> Float[Array, "tokens sketch"]:
    """A few numbers a token from which distances follow: random directions keep lengths.

    (Johnson and Lindenstrauss: with T tokens, a distance is off by about sqrt(2 / (16 T)).)
    """
    layers, _, channels = flat.shape
    directions = _directions(layers * channels, SKETCH).reshape(layers, channels, SKETCH)
    return jnp.einsum("ltc,lcs->ts", flat, jnp.asarray(directions))


@functools.lru_cache(maxsize=8)
def _directions(size: int, count: int) -> np.ndarray:
    signs = np.random.default_rng(0).integers(0, 2, (size, count)) * 2 - 1
    return (signs / math.sqrt(count)).astype(np.float32)


def distances(mine: Float[Array, "tokens sketch"], length: Int[Array, ""],
              theirs: Float[Array, "A tokens sketch"],
              lengths: Int[Array, " A"]) -> Float[Array, " A"]:
    """Root-mean-square difference over the tokens that both have, over that of `mine`; scale-free.

    Infinite to what has no tokens.
    """
    both = jnp.arange(mine.shape[0])[None] < jnp.minimum(lengths, length)[:, None]
    difference = jnp.square(theirs - mine[None]).sum(-1)
    size = jnp.square(mine).sum(-1)[None]
    squared = jnp.where(both, difference, 0).sum(-1) / jnp.maximum(
        jnp.where(both, size, 0).sum(-1), 1e-30)
    return jnp.where(lengths > 0, jnp.sqrt(squared), jnp.inf)


def temperature(sketches: Float[Array, "A tokens sketch"],
                lengths: Int[Array, " A"]) -> Float[Array, ""]:
    """The median distance of the anchors to their nearest; 1 for fewer than two."""
    if not len(lengths):
        return jnp.float32(1)

    def nearest(anchor: Array) -> Array:
        away = distances(sketches[anchor], lengths[anchor], sketches, lengths)
        return away.at[anchor].set(jnp.inf).min()

    found = lax.map(nearest, jnp.arange(len(lengths)))
    found = jnp.where((lengths > 0) & jnp.isfinite(found), found, jnp.nan)
    median = jnp.nanmedian(found)
    return jnp.where(median > 0, median, 1.0)


def weights(distance: Float[Array, " A"], allowed: Bool[Array, " A *n"],
            tau: Float[Array, ""] | float, weighting: str) -> Float[Array, " A *n"]:
    """Of each anchor among those allowed; they sum to 1, or are all 0 where none is.

    Args:
      distance: to each.
      allowed: which count, perhaps differently for each token.
      tau: temperature.
      weighting: "softmax" of -distance / tau, or "confidence", 1 / distance^2.
    """
    logits = -distance / tau if weighting == "softmax" else -2 * jnp.log(distance + 1e-6)
    logits = jnp.expand_dims(logits, tuple(range(1, allowed.ndim)))
    return softmax(jnp.broadcast_to(logits, allowed.shape), allowed)


def softmax(logits: Float[Array, " A *n"], allowed: Bool[Array, " A *n"]) -> Float[Array, " A *n"]:
    """Softmax over the anchors allowed, all 0 where none is."""
    if not len(logits):
        return logits
    logits = jnp.where(allowed, logits, -jnp.inf)
    largest = logits.max(0, keepdims=True)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(largest), largest, 0.0))
    return weights / jnp.maximum(weights.sum(0, keepdims=True), 1.0)


def entropy(weights: Float[Array, " A"]) -> Float[Array, ""]:
    """In bits. 0 log 0 is 0 by `xlogy`: an epsilon below the normal floats is flushed to NaN."""
    return -xlogy(weights, weights).sum() / math.log(2)


def paper_weights(
    flat: Float[Array, "layers tokens channels"], length: Int[Array, ""], base: Packed,
    lengths: Int[Array, " A"], allowed: Bool[Array, " A"],
) -> tuple[Float[Array, "A kinds tokens"], Float[Array, "A layers channels"]]:
    """KVCOMM's: of the text by token, for K and V apart; of what follows by layer and channel.

    The first from the mean absolute difference, the second from the norm of the difference to the
    anchor's last tokens, both at temperature 1.
    """
    layers, tokens, channels = flat.shape
    valid = jnp.arange(tokens) < length
    kinds = flat.reshape(layers, tokens, 2, channels // 2)

    def differences(anchor: tuple[Packed, Array]) -> tuple[Array, Array]:
        theirs = anchor[0].numbers()
        theirs = resized(theirs, max(theirs.shape[1], tokens))
        head = resized(theirs, tokens).reshape(kinds.shape)
        tail = resized(jnp.roll(theirs, length - anchor[1], axis=1), tokens)
        squared = jnp.where(valid[None, :, None], jnp.square(flat - tail), 0).sum(1)
        return jnp.abs(kinds - head).mean((0, 3)).T, jnp.sqrt(squared)

    first, last = lax.map(differences, (base, lengths))
    return (softmax(-first, jnp.broadcast_to(allowed[:, None, None], first.shape)),
            softmax(-last, jnp.broadcast_to(allowed[:, None, None], last.shape)))


def paper_gate(flat: Float[Array, "layers tokens channels"], base: Packed,
               allowed: Bool[Array, " A"]) -> Float[Array, " A"]:
    """The weights of KVCOMM's gate: of the norm over all values, unscaled, at temperature 1."""
    tokens, channels = flat.shape[1:]
    some = (flat != 0).any((0, 2))[None, :, None]

    def away(anchor: Packed) -> Array:
        theirs = resized(anchor.numbers(), tokens)
        difference = jnp.where(some, flat - theirs, 0)[..., channels // 2:]
        return jnp.sqrt(jnp.square(difference).sum())

    return softmax(-lax.map(away, base), allowed)


def paper_counts(weights: Float[Array, " A"], allowed: Bool[Array, " A"]) -> Bool[Array, " A"]:
    """The anchors that KVCOMM counts as used, for eviction only: weights below nine tenths in all.

    Its rule leaves out the anchor that crosses nine tenths, and takes all if the first does.
    """
    order = jnp.argsort(-weights)
    below = jnp.cumsum(weights[order]) < TOP_P
    chosen = jnp.zeros_like(allowed).at[order].set(below)
    return jnp.where(below.any(), chosen & allowed, allowed)


def first_to_go(rule: str, window: int, there: Bool[Array, " A"], uses: Int[Array, " A"],
                inserted: Int[Array, " A"], used: Int[Array, " A"], clock: Int[Array, ""],
                size: Float[Array, " A"]) -> Int[Array, ""]:
    """The anchor that makes way.

    Args:
      rule: "lru", the least recently used; "value", the fewest uses by age and byte; or
        "windowed_lfu", of the `window` oldest the least used, and of those the oldest.
      window: see there.
      there: which places hold an anchor; at least one does, or the answer means nothing.
      uses: estimates that each weighed in.
      inserted: when it came.
      used: when it was used last.
      clock: now.
      size: bytes of each.
    """
    if not len(there):
        return jnp.int32(0)
    if rule == "lru":
        cost = used.astype(jnp.float32)
    elif rule == "value":
        age = (clock - inserted + 1).astype(jnp.float32)
        cost = (uses + 1).astype(jnp.float32) / age / jnp.maximum(size, 1.0)
    else:
        age = jnp.argsort(jnp.argsort(jnp.where(there, inserted, np.iinfo(np.int32).max)))
        there &= age < window
        cost = uses.astype(jnp.float32) + age.astype(jnp.float32) / (len(age) + 1)
    return jnp.argmin(jnp.where(there, cost, jnp.inf)).astype(jnp.int32)


def resized(flat: Float[Array, "layers tokens channels"],
            tokens: int) -> Float[Array, "layers size channels"]:
    """Cut, or padded with zeros, to so many tokens."""
    return jnp.pad(flat[:, :tokens], ((0, 0), (0, max(tokens - flat.shape[1], 0)), (0, 0)))
