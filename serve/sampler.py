"""The next token of every running answer, chosen on the device by one compiled function.

Each row of a batch has its own parameters, and its token follows from its logits, parameters, seed
and index alone: sums that decide are sums of integers, which come out the same in any order, so
neither the neighbours nor the size of the batch can tip them. What no row of a batch asks for is
not computed, and nothing sorts a vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from .interface import MAX_LOGPROBS, MAX_STOP_IDS, Sampling

GREEDY_BELOW = 1e-5  # temperatures smaller than this take the likeliest token

_BLOCK = 32  # tokens that are looked at together before single ones are
_SHORT_TOP_K = 64  # up to this top_k the threshold is read off the likeliest tokens
_UNIT = 2.0**22  # within a block the likeliest token's weight
_INDEX_BITS = 22  # longer answers would meet the noise of second attempts again
_LARGEST = np.iinfo(np.int32).max

Int32s = Int[Array, " rows"] | Int[np.ndarray, " rows"]
Float32s = Float[Array, " rows"] | Float[np.ndarray, " rows"]
Bools = Bool[Array, " rows"] | Bool[np.ndarray, " rows"]
Blocks = Float[Array, "rows blocks block"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lanes:
    """What penalties and biases of running answers need; one lane an answer."""

    bias: Float[Array, "lanes vocab"]  # float32, added to the logits
    counts: Int[Array, "lanes vocab"]  # int32, how often the answer has the token
    prompt: Bool[Array, "lanes vocab"]  # whether the prompt has it

    @classmethod
    def zeros(cls, lanes: int, vocab: int) -> Lanes:
        """Lanes of answers and prompts without tokens.

        Raises:
          ValueError: if a size is not positive.
        """
        for name, value in dict(lanes=lanes, vocab=vocab).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        return cls(*(jnp.zeros((lanes, vocab), dtype)
                     for dtype in (jnp.float32, jnp.int32, jnp.bool_)))


def needs_lane(sampling: Sampling) -> bool:
    """Whether an answer reads its lane; if not, what the lane holds does not matter."""
    return bool(sampling.presence_penalty or sampling.frequency_penalty
                or sampling.repetition_penalty != 1 or sampling.logit_bias)


def begin(lanes: Lanes, lane: int, sampling: Sampling, prompt: Int[np.ndarray, " prompt"],
          answer: Int[np.ndarray, " answer"]) -> Lanes:
    """Set a lane for a request, whatever was in it; donates `lanes`.

    Args:
      lanes: of the engine.
      lane: which one.
      sampling: its logit_bias is stored; of a token that stands there twice, the sum.
      prompt: token ids.
      answer: token ids generated so far: some, if the request was preempted.

    Raises:
      ValueError: for a lane or a token id that does not exist.
    """
    count, vocab = lanes.bias.shape
    if not 0 <= lane < count:
        raise ValueError(f"lane must be between 0 and {count - 1}, got {lane}")
    ids = np.array([token for token, _ in sampling.logit_bias], np.int64)
    for name, tokens in dict(logit_bias=ids, prompt=prompt, answer=answer).items():
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab:
            bad = tokens[(tokens < 0) | (tokens >= vocab)][0]
            raise ValueError(f"{name} has the token id {bad}; the vocabulary has 0 to {vocab - 1}: "
                             "send the ids of this model's tokenizer")
    bias = np.zeros(vocab, np.float32)
    np.add.at(bias, ids, np.array([value for _, value in sampling.logit_bias], np.float32))
    counts = np.bincount(answer, minlength=vocab).astype(np.int32)
    seen = np.zeros(vocab, bool)
    seen[prompt] = True
    return _set(lanes, lane, Lanes(bias, counts, seen))


@functools.partial(jax.jit, donate_argnames="lanes")
def _set(lanes: Lanes, lane, content: Lanes) -> Lanes:
    return jax.tree.map(lambda rows, row: rows.at[lane].set(row), lanes, content)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """The parameters of a batch, a column each. Padding is greedy and has no lane."""

    NO_LANE: ClassVar[int] = -1
    NO_TOKEN: ClassVar[int] = _LARGEST

    lane: Int32s  # [S] or NO_LANE
    temperature: Float32s  # [S]
    top_p: Float32s  # [S]
    top_k: Int32s  # [S] 0: off
    min_p: Float32s  # [S]
    presence: Float32s  # [S]
    frequency: Float32s  # [S]
    repetition: Float32s  # [S]
    seed: UInt32[Array, "rows 2"] | UInt32[np.ndarray, "rows 2"]  # [S, 2] high and low half
    index: Int32s  # [S] how many tokens the answer has
    min_tokens: Int32s  # [S]
    # [S, MAX_STOP_IDS] filled up with NO_TOKEN
    stop_ids: Int[Array, "rows stop_ids"] | Int[np.ndarray, "rows stop_ids"]
    reads_lane: Bools  # [S]
    logprobs: Bools  # [S] whether log-probabilities are wanted

    @classmethod
    def of(cls, rows: Sequence[tuple[int, Sampling, int, int]], size: int) -> Batch:
        """A batch of `size` rows, on the host.

        Args:
          rows: lane (NO_LANE: none), parameters, seed, and how many tokens the answer has. Of a
            seed the low 64 bits count.
          size: how many rows there are with the padding.

        Raises:
          ValueError: if there are more rows than `size`, more stop_ids than MAX_STOP_IDS, or
            penalties or biases without a lane.
        """
        if len(rows) > size:
            raise ValueError(f"{len(rows)} rows do not fit into size={size}; ask for a larger one")
        column = functools.partial(np.full, size)
        batch = cls(
            lane=column(cls.NO_LANE, np.int32), temperature=column(0, np.float32),
            top_p=column(1, np.float32), top_k=column(0, np.int32), min_p=column(0, np.float32),
            presence=column(0, np.float32), frequency=column(0, np.float32),
            repetition=column(1, np.float32), seed=np.zeros((size, 2), np.uint32),
            index=column(0, np.int32), min_tokens=column(0, np.int32),
            stop_ids=np.full((size, MAX_STOP_IDS), cls.NO_TOKEN, np.int32),
            reads_lane=column(False, np.bool_), logprobs=column(False, np.bool_))
        for at, (lane, sampling, seed, index) in enumerate(rows):
            stops = len(sampling.stop_ids)
            if stops > MAX_STOP_IDS:
                raise ValueError(f"stop_ids may be {MAX_STOP_IDS} at most, got {stops}")
            reads_lane = needs_lane(sampling)
            if reads_lane and lane == cls.NO_LANE:
                raise ValueError(f"lane is {lane}, but penalties and logit_bias need one: give the "
                                 "request a lane and `begin` it")
            batch.lane[at] = lane
            batch.temperature[at] = sampling.temperature
            batch.top_p[at] = sampling.top_p
            batch.top_k[at] = min(sampling.top_k, _LARGEST)
            batch.min_p[at] = sampling.min_p
            batch.presence[at] = sampling.presence_penalty
            batch.frequency[at] = sampling.frequency_penalty
            batch.repetition[at] = sampling.repetition_penalty
            batch.seed[at] = seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF
            batch.index[at] = index
            batch.min_tokens[at] = min(sampling.min_tokens, _LARGEST)
            batch.stop_ids[at, :stops] = sorted(sampling.stop_ids)
            batch.reads_lane[at] = reads_lane
            batch.logprobs[at] = sampling.logprobs is not None
        return batch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """The chosen tokens. Log-probabilities mean something only in rows that want them."""

    tokens: Int[Array, " rows"]  # [S] int32
    logprob: Float[Array, " rows"]  # [S] float32, of the token
    # [S, MAX_LOGPROBS] int32, from the likeliest; -1 beyond a small vocabulary
    top_ids: Int[Array, "rows top"]
    top_logprobs: Float[Array, "rows top"]  # [S, MAX_LOGPROBS] float32, -inf beyond it


@functools.partial(jax.jit, donate_argnames="lanes")
def sample(lanes: Lanes, logits: Float[Array, "rows vocab"],
           batch: Batch) -> tuple[Sampled, Lanes]:
    """The next token of every row; donates `lanes`.

    In this order: logit_bias is added; before min_tokens the stop_ids become -inf; logits of tokens
    of prompt and answer are divided by the repetition penalty, or multiplied where negative;
    presence and frequency penalties are taken off; temperature divides. Of that distribution top_k
    leaves the k likeliest, top_p the fewest of these that together reach p, min_p those that are
    likely enough beside the likeliest. What is as likely as the last token left stays too, and so
    does the likeliest, always. Greedy rows take the largest adjusted logit, of equal ones the
    lowest id.

    Log-probabilities are those of the logits as they came in.

    Args:
      lanes: counts of the rows' lanes grow by the chosen token.
      logits: float32. NaN counts as -inf; a row of nothing else gives token 0.
      batch: of as many rows.
    """
    adjusted = jnp.any(batch.reads_lane | (batch.index < batch.min_tokens))
    blocks = lax.cond(adjusted, lambda: _blocks(_adjusted(lanes, logits, batch)),
                      lambda: _blocks(logits))
    tokens = _choose(blocks, logits.shape[1], batch)
    own, ids, best = lax.cond(jnp.any(batch.logprobs), _logprobs, _no_logprobs, logits, tokens)
    # Beyond the last lane nothing is added: a negative index would count from the end.
    lane = jnp.where(batch.lane == Batch.NO_LANE, lanes.counts.shape[0], batch.lane)
    counts = lanes.counts.at[lane, tokens].add(1, mode="drop")
    return Sampled(tokens, own, ids, best), dataclasses.replace(lanes, counts=counts)


def warm_up(lanes: Lanes, sizes: Sequence[int]) -> Lanes:
    """Compile for batches of these sizes; donates `lanes`, and lane 0 begins anew."""
    nothing = np.zeros(0, np.int32)
    lanes = begin(lanes, 0, Sampling(), nothing, nothing)
    for size in sizes:
        logits = jnp.zeros((size, lanes.bias.shape[1]), jnp.float32)
        _, lanes = sample(lanes, logits, Batch.of((), size))
    return lanes


def _adjusted(lanes: Lanes, logits, batch: Batch) -> Float[Array, "rows vocab"]:
    """Bias, min_tokens and penalties."""
    bias, counts, prompt = (column[batch.lane]
                            for column in (lanes.bias, lanes.counts, lanes.prompt))
    adjusted = logits + bias
    repetition = batch.repetition[:, None]
    repeated = adjusted * jnp.where(adjusted > 0, 1 / repetition, repetition)
    adjusted = jnp.where(prompt | (counts > 0), repeated, adjusted)
    adjusted -= jnp.where(counts > 0, batch.presence[:, None], 0)
    adjusted -= counts.astype(jnp.float32) * batch.frequency[:, None]
    adjusted = jnp.where(batch.reads_lane[:, None], adjusted, logits)
    # No penalty moves -inf, so the stop ids may come last.
    early = batch.index < batch.min_tokens
    stops = jnp.where(early[:, None], batch.stop_ids, Batch.NO_TOKEN)
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return adjusted.at[rows, stops].set(-jnp.inf, mode="drop")


def _blocks(logits) -> Blocks:
    """The vocabulary in blocks, NaN and the end of the last block as -inf."""
    rows, vocab = logits.shape
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
    padded = jnp.pad(logits, ((0, 0), (0, -vocab % _BLOCK)), constant_values=-jnp.inf)
    return padded.reshape(rows, -1, _BLOCK)


def _choose(blocks: Blocks, vocab: int, batch: Batch) -> Int[Array, " rows"]:
    rows = blocks.shape[0]
    best = blocks.max(axis=2)
    top = best.max(axis=1)
    greedy = (batch.temperature < GREEDY_BELOW) | (top == -jnp.inf)
    likeliest = _pick(best, blocks, jnp.zeros((rows, _BLOCK), jnp.float32))
    return lax.cond(
        jnp.all(greedy), lambda: likeliest,
        lambda: jnp.where(greedy, likeliest, _choose_at_random(blocks, top, greedy, vocab, batch)))


def _pick(by_block: Float[Array, "rows blocks"], blocks: Blocks,
          noise: Float[Array, "rows block"]) -> Int[Array, " rows"]:
    """Of the block with the largest value the token with the largest, noise added."""
    block = lax.argmax(by_block, 1, jnp.int32)
    inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * _BLOCK + lax.argmax(inside + noise, 1, jnp.int32)


def _choose_at_random(blocks: Blocks, top: Float[Array, " rows"], greedy: Bool[Array, " rows"],
                      vocab: int, batch: Batch) -> Int[Array, " rows"]:
    """A token of what the filters leave; of greedy rows anything.

    top_p has no threshold to find: a token is in the nucleus iff what is likelier weighs less than
    p. If the one drawn is not, neither is anything less likely, and the next attempt draws from the
    likelier ones, as FlashInfer's sampler does. An attempt succeeds with probability p or more.
    """
    narrow = ~greedy & (batch.top_k > 0) & (batch.top_k < vocab)
    nucleus = ~greedy & (batch.top_p < 1)
    least = lax.cond(jnp.any(narrow), lambda: _kth(blocks, top, batch.top_k, vocab),
                     lambda: jnp.full_like(top, -jnp.inf))
    least = jnp.where(narrow, least, -jnp.inf)[:, None, None]
    # Scores are logarithms of likelihoods relative to the likeliest token's.
    coldness = 1 / jnp.where(greedy, 1, batch.temperature)[:, None, None]
    from_top = jnp.where(blocks == top[:, None, None], 0, blocks - top[:, None, None])
    scores = jnp.where(blocks >= least, from_top * coldness, -jnp.inf)
    min_score = jnp.log(jnp.clip(batch.min_p, 0, 1))[:, None, None]
    likely = jnp.where(scores < min_score, -jnp.inf, scores)
    bits = min(15, 32 - vocab.bit_length())  # the sum of so many bits a token fits into uint32

    def weigh():
        weights = jnp.rint(jnp.exp(scores) * 2.0**(2 * bits)).astype(jnp.int32)
        return weights, batch.top_p * _mass(weights, jnp.ones_like(weights, jnp.bool_), bits)

    def attempt(state):
        number, above, tokens, waiting = state
        candidates = jnp.where(blocks > above[:, None, None], likely, -jnp.inf)
        tokens = jnp.where(waiting, _draw(candidates, batch, number), tokens)
        value = jnp.take_along_axis(blocks.reshape(len(tokens), -1), tokens[:, None], axis=1)[:, 0]

        def outside():
            likelier = _mass(weights, blocks > value[:, None, None], bits)
            return waiting & nucleus & (value != top) & (likelier >= limit)

        waiting = lax.cond(jnp.any(nucleus), outside, lambda: jnp.zeros_like(waiting))
        return number + 1, jnp.where(waiting, value, above), tokens, waiting

    weights, limit = lax.cond(jnp.any(nucleus), weigh,
                              lambda: (jnp.zeros_like(blocks, jnp.int32), jnp.zeros_like(top)))
    start = (jnp.int32(0), jnp.full_like(top, -jnp.inf), jnp.zeros_like(top, jnp.int32),
             jnp.ones_like(top, jnp.bool_))
    return lax.while_loop(lambda state: jnp.any(state[-1]), attempt, start)[2]


def _draw(scores: Blocks, batch: Batch, number: Int[Array, ""]) -> Int[Array, " rows"]:
    """A token as likely as its score's exponential; `number` counts the attempts.

    A block is drawn by the sum of its exponentials, then a token of it, each as the largest of
    value plus Gumbel noise, so that a row takes little noise. Beyond float32's own errors, weights
    are rounded to 2^-22 of their block's largest, and noise comes from 32 bits.
    """
    best = scores.max(axis=2)
    base = jnp.where(best == -jnp.inf, 0, best)
    weights = jnp.rint(jnp.exp(scores - base[:, :, None]) * _UNIT).astype(jnp.int32)
    total = weights.sum(axis=2, dtype=jnp.int32)
    by_block = jnp.where(best == -jnp.inf, -jnp.inf, base + jnp.log(total.astype(jnp.float32)))
    blocks = best.shape[1]

    def bits(seed, index):
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        key = jax.random.fold_in(key, index + (number << _INDEX_BITS))
        return jax.random.bits(key, (blocks + _BLOCK,), jnp.uint32)

    # Neither 0 nor 1, so that all noise is finite.
    uniform = (jax.vmap(bits)(batch.seed, batch.index).astype(jnp.float32) + 0.5) * 2.0**-32
    noise = -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24)))
    return _pick(by_block + noise[:, :blocks], scores, noise[:, blocks:])


def _mass(weights: Int[Array, "rows blocks block"], counted: Bool[Array, "rows blocks block"],
          bits: int) -> Float[Array, " rows"]:
    """The sum of the counted weights of 2 * `bits` bits: rounded once, so it rises with them."""
    low, high = (jnp.sum(jnp.where(counted, half, 0), axis=(1, 2), dtype=jnp.uint32)
                 for half in (weights & ((1 << bits) - 1), weights >> bits))
    high += low >> bits
    low &= (1 << bits) - 1
    return high.astype(jnp.float32) * 2.0**bits + low.astype(jnp.float32)


def _kth(blocks: Blocks, top, k, vocab: int) -> Float[Array, " rows"]:
    """A threshold that the k largest of a row reach, with what equals the last, and no other."""
    values, _ = _likeliest(blocks, min(_SHORT_TOP_K, vocab))
    at = jnp.clip(k - 1, 0, values.shape[1] - 1)
    short = jnp.take_along_axis(values, at[:, None], axis=1)[:, 0]
    is_long = k > _SHORT_TOP_K
    return lax.cond(jnp.any(is_long),
                    lambda: jnp.where(is_long, _kth_by_counting(blocks, top, k), short),
                    lambda: short)


def _kth_by_counting(blocks: Blocks, top, k) -> Float[Array, " rows"]:
    """`_kth` for any k: bisect the floats, in the order of their bits."""
    def halve(_, bounds):
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        larger = blocks > _from_order(middle)[:, None, None]
        # float32 counts a vocabulary exactly, and XLA's CPU adds floats in half the time.
        few = jnp.sum(larger, axis=(1, 2), dtype=jnp.float32) < k.astype(jnp.float32)
        return jnp.where(few, low, middle), jnp.where(few, middle, high)

    lowest = jnp.full_like(top, -jnp.inf)
    return _from_order(lax.fori_loop(0, 32, halve, (_to_order(lowest), _to_order(top)))[1])


def _to_order(x: Float[Array, " rows"]) -> Int[Array, " rows"]:
    """Integers in the order of the floats, neighbours for neighbours, both zeros alike."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, -(bits & _LARGEST), bits)


def _from_order(order: Int[Array, " rows"]) -> Float[Array, " rows"]:
    magnitude = lax.bitcast_convert_type(jnp.abs(order), jnp.float32)
    return jnp.where(order < 0, -magnitude, magnitude)


def _likeliest(blocks: Blocks, count: int) -> tuple[Float[Array, "rows count"],
                                                    Int[Array, "rows count"]]:
    """The largest values and their ids, of equal ones the lowest id first.

    They lie in the `count` blocks with the largest maxima: no other can hold one of them.
    """
    rows = blocks.shape[0]
    _, chosen = lax.top_k(blocks.max(axis=2), min(count, blocks.shape[1]))
    chosen = jnp.sort(chosen, axis=1)  # so that equal values stay in the order of ids
    candidates = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(rows, -1)
    values, at = lax.top_k(candidates, count)
    return values, jnp.take_along_axis(chosen, at // _BLOCK, axis=1) * _BLOCK + at % _BLOCK


def _logprobs(logits, tokens) -> tuple[Array, Array, Array]:
    """Of the token, ids of the likeliest, and theirs."""
    rows, vocab = logits.shape
    count = min(MAX_LOGPROBS, vocab)
    blocks = _blocks(logits)
    best, ids = _likeliest(blocks, count)
    top = best[:, :1]
    normaliser = jnp.log(jnp.sum(jnp.exp(blocks - top[:, :, None]), axis=(1, 2)))[:, None]
    own = jnp.take_along_axis(blocks.reshape(rows, -1), tokens[:, None], axis=1)
    beyond = ((0, 0), (0, MAX_LOGPROBS - count))
    return ((own - top - normaliser)[:, 0], jnp.pad(ids, beyond, constant_values=-1),
            jnp.pad(best - top - normaliser, beyond, constant_values=-jnp.inf))


def _no_logprobs(logits, tokens) -> tuple[Array, Array, Array]:
    shape = (len(tokens), MAX_LOGPROBS)
    return (jnp.zeros(len(tokens), jnp.float32), jnp.zeros(shape, jnp.int32),
            jnp.zeros(shape, jnp.float32))
