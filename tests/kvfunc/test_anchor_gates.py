"""KVCOMM's estimate and gates, ours beside them, and other ways to weigh."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvfunc.anchors import PAPER, Estimated, Options

from . import anchor_oracle as oracle
from .anchor_oracle import CHANNELS, close, deviation, flat, near, text
from .test_anchors import ANCHORS, empty, estimate, teach

BY_ENTROPY = Options(estimator="anchors", gate="entropy")


def blend(weights, offsets):
    return sum(weight * offset for weight, offset in zip(weights, offsets, strict=True))


def test_the_papers_estimate_is_its_formulas_for_the_text_and_what_follows():
    mine, pool = text(0, 10), empty()
    texts = [near(mine, 0.4, 1), text(2, 9), text(3, 14), text(4, 12)]
    offsets = [deviation(n, int(of.length)) for n, of in enumerate(texts)]
    for n, of in enumerate(texts):  # the second is too short, the fourth another consumer's
        pool = teach(pool, of, offsets[n], n == 3, deviation(10 + n, 4))
    found, told = estimate(pool, mine, jnp.int32(0), PAPER)
    speak = [0, 2]
    by = oracle.Paper(flat(mine), [flat(texts[n]) for n in speak])
    of_channel = np.repeat(by.of_tokens(), CHANNELS // 2, axis=1).swapaxes(1, 2)[:, None]
    close(flat(found.text), blend(of_channel, [offsets[n][:, :10] for n in speak]))
    close(flat(found.following), blend(by.of_following()[:, :, None],
                                       [deviation(10 + n, 4) for n in speak]))
    assert told.rule == Estimated.ANCHORS
    # The gate knows texts alone, whosoever.
    gate = oracle.Paper(flat(mine), [flat(texts[n]) for n in (0, 2, 3)]).of_gate()
    assert told.refused == (oracle.entropy(gate) > 0.3 * np.log2(3))
    counted = {(0, 2, 3)[place] for place in oracle.activated(gate.tolist())}
    assert set(np.flatnonzero(told.counted).tolist()) == counted


def pool_of(texts):
    pool = empty()
    for seed, of in enumerate(texts):
        pool = teach(pool, of, deviation(seed, int(of.length)))
    return pool


@pytest.mark.parametrize(("shares", "refused"), [
    ([0.1, 3.0], False),  # one is far nearer
    ([0.3, 0.3], True),  # both as near: 1 bit of 1
    ([0.3, 0.3, 9.0], True),  # 1 bit of 1.6, with a weight of exactly 0
    ([0.1], True)])  # of one anchor there is no entropy
def test_the_entropy_gate_refuses_what_no_anchor_is_near_alone(shares, refused):
    base = text(0, 20)
    pool = pool_of([near(base, share, seed) for seed, share in enumerate(shares)])
    _, told = estimate(pool, base, jnp.int32(0), BY_ENTROPY)
    assert told.refused == refused


def test_with_a_gamma_above_1_entropy_refuses_nothing():
    base = text(0, 20)
    pool = pool_of([near(base, 0.3, seed) for seed in range(2)])
    options = dataclasses.replace(BY_ENTROPY, gamma=1.01)
    assert not estimate(pool, base, jnp.int32(0), options)[1].refused


def test_the_papers_gate_is_unscaled_so_that_larger_values_pass():
    def told(size, texts):
        scaled = [oracle.segment(size * np.asarray(of.k), size * np.asarray(of.v), int(of.length))
                  for of in texts]
        gate = oracle.Paper(flat(scaled[0]), [flat(of) for of in scaled[1:]]).of_gate()
        refused = bool(estimate(pool_of(scaled[1:]), scaled[0], jnp.int32(0), PAPER)[1].refused)
        assert refused == (oracle.entropy(gate) > 0.3 * np.log2(len(gate)))
        return refused

    texts = [text(0, 20), *(text(seed, 20) for seed in range(1, 4))]
    assert [told(size, texts) for size in (0.01, 0.1, 3, 100)] == [True, True, False, False]
    # Two as near and one whose weight is 0 exactly: 1 bit of 1.6, and no NaN that passes.
    base = texts[0]
    twins = [oracle.moved(base, sign * 0.1 * flat(texts[1])) for sign in (1, -1)]
    far = oracle.moved(base, 900 + 0 * flat(base))
    assert told(1, [base, *twins, far])


def test_one_text_may_be_refused_and_the_next_reused():
    pool = pool_of([text(0, 20), text(1, 20)])
    _, again = estimate(pool, text(0, 20), jnp.int32(0), BY_ENTROPY)
    _, other = estimate(pool, text(77, 20), jnp.int32(0), BY_ENTROPY)
    assert (again.refused, other.refused) == (False, True)


def test_decay_makes_the_offset_of_later_layers_smaller():
    pool = pool_of([text(0, 20)])
    found, _ = estimate(pool, text(0, 20), jnp.int32(0), dataclasses.replace(ANCHORS, decay=0.5))
    close(flat(found.text), deviation(0, 20) * np.array([0, 0.5, 0.25])[:, None, None])


def test_by_confidence_an_anchor_weighs_one_over_its_squared_distance():
    base = text(0, 20)
    pool = pool_of([near(base, 0.2, 1), near(base, 0.4, 2)])
    _, told = estimate(pool, base, jnp.int32(0), dataclasses.replace(ANCHORS,
                                                                     weighting="confidence"))
    assert told.weights[0] / told.weights[1] == pytest.approx(4, rel=0.4)
    assert told.weights.sum() == pytest.approx(1)
