"""Pools of anchors at their limits: bytes, places, unknown consumers, and who counts as used."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvfunc import anchors
from kvfunc.anchors import Estimated, Options

from .anchor_oracle import BEHIND, CHANNELS, LAYERS, TOKENS, deviation, flat, moved, near, text
from .test_anchors import empty, estimate, observe

ANCHORED = Options(estimator="anchors")
BYTES = LAYERS * CHANNELS * 4  # of a token


def learn(pool, base, offset, consumer=0, behind=None, options=ANCHORED):
    """The pool after an exact prefill, with or without static text behind."""
    following = None
    if behind is not None:
        static = text(50, BEHIND, BEHIND)
        following = static, moved(static, behind)
    return observe(pool, base, moved(base, offset), jnp.int32(consumer), following, options=options)


def test_what_followed_an_evicted_text_is_not_what_follows_the_new_one():
    pool, _ = learn(empty(anchors=1), text(0), deviation(0), behind=deviation(0, BEHIND))
    pool, told = learn(pool, text(1), deviation(1))
    assert int(told.evicted) == 1
    offsets, _ = estimate(pool, text(1), jnp.int32(0), ANCHORED)
    assert not flat(offsets.following).any()


def test_what_follows_is_averaged_over_the_anchors_that_have_it():
    pool, _ = learn(empty(), near(text(0), 0.3, 1), deviation(0), behind=deviation(0, BEHIND))
    pool, _ = learn(pool, near(text(0), 0.3, 2), deviation(1))
    offsets, _ = estimate(pool, text(0), jnp.int32(0), ANCHORED)
    np.testing.assert_allclose(flat(offsets.following), deviation(0, BEHIND), atol=1e-5)


def test_a_text_that_is_seen_again_without_what_follows_keeps_what_followed():
    pool, _ = learn(empty(), text(0), deviation(0), behind=deviation(0, BEHIND))
    pool, _ = learn(pool, text(0), deviation(0))
    assert pool.following_length[0].tolist() == [BEHIND, 0]


@pytest.mark.parametrize("tokens, steps, kept", [
    (2 * TOKENS, [(0, 0, False), (0, 1, False)], [(0, 0)]),  # no room for the second consumer
    (3 * TOKENS, [(0, 0, False), (0, 1, False)], [(0, 0), (0, 1)]),
    (2 * TOKENS, [(0, 0, True)], []),  # what follows counts too
    (2 * TOKENS + BEHIND, [(0, 0, True)], [(0, 0)]),
    (2 * TOKENS, [(0, 0, False), (1, 0, False)], [(1, 0)]),
    (10, [(0, 0, False)], []),  # larger than all there is
    (3 * TOKENS, [(0, 0, False), (1, 0, False), (1, 1, False)], [(1, 0), (1, 1)]),
])
def test_the_bound_in_bytes_holds_whatever_is_added(tokens, steps, kept):
    options, pool, seeds = Options(max_bytes=BYTES * tokens, eviction="lru"), empty(), {}
    for seed, consumer, follows in steps:
        pool, told = learn(pool, text(seed), deviation(seed), consumer,
                           deviation(seed, BEHIND) if follows else None, options)
        seeds[int(told.anchor)] = seed
        assert float(pool.bytes_of_anchors.sum()) <= BYTES * tokens
    there = [(seeds[int(place)], int(consumer)) for place, consumer in np.argwhere(pool.seen)]
    assert sorted(there) == kept


@pytest.mark.parametrize("consumer", [-1, 2])
def test_an_unknown_consumer_teaches_nothing_inside_a_trace(consumer):
    before, _ = learn(empty(), text(0), deviation(0))
    pool, told = learn(before, text(1), deviation(1), consumer)
    assert int(told.anchor) == len(pool.length) and int(told.evicted) == 0
    for mine, old in zip(jax.tree.leaves(dataclasses.replace(pool, clock=before.clock)),
                         jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(mine, old)


def test_there_is_nothing_to_evict_where_no_anchors_are_kept():
    pool, place = anchors.evict(empty(anchors=0))
    assert int(place) == 0 and len(pool.length) == 0


def test_a_text_speaks_alone_beside_a_longer_one_that_begins_with_it():
    longer = text(0)
    short = dataclasses.replace(longer, length=jnp.int32(10))
    pool, _ = learn(empty(), longer, deviation(1))
    pool, told = learn(pool, short, deviation(0, 10))
    _, info = estimate(pool, short, jnp.int32(0), ANCHORED)
    assert info.weights.tolist() == np.eye(len(pool.length))[int(told.anchor)].tolist()


def test_the_entropy_gate_knows_this_consumers_anchors_only_and_a_texts_own():
    gate = Options(estimator="anchors", gate="entropy")
    pool = empty()
    for seed in range(3):
        pool, _ = learn(pool, near(text(0), 0.3, seed), deviation(seed), consumer=1)
    pool, _ = learn(pool, near(text(0), 0.3, 5), deviation(5))
    assert estimate(pool, text(0), jnp.int32(0), gate)[1].refused  # one anchor is no crowd
    pool, _ = learn(empty(), text(0), deviation(0))
    assert not estimate(pool, text(0), jnp.int32(0), gate)[1].refused


def test_anchors_that_do_not_weigh_in_the_text_are_not_counted():
    pool, _ = learn(empty(), text(0), deviation(0), behind=deviation(0, BEHIND))
    _, info = estimate(pool, text(5), jnp.int32(0), Options())
    assert int(info.rule) == Estimated.RIDGE and not info.counted.any()
    assert not info.weights.any()


def test_the_error_is_what_the_ridge_leaves_and_the_distance_of_anchors():
    pool, _ = learn(empty(anchors=0), text(0), deviation(0))
    pool, _ = learn(pool, text(1), deviation(1))
    weights = anchors.fit(pool, 0)
    _, info = estimate(pool, text(5), jnp.int32(0), Options())
    assert float(info.error) == pytest.approx(float(jnp.sqrt(weights.noise.mean())), rel=1e-5)
    assert 0 < float(info.error) < 1
    refused = estimate(pool, text(5), jnp.int32(0), Options(bound=float(info.error) / 2))[1]
    assert refused.refused and not info.refused
    pool, _ = learn(empty(), text(0), deviation(0))
    _, info = estimate(pool, near(text(0), 0.3), jnp.int32(0), Options())
    assert float(info.error) == pytest.approx(float(info.distance), rel=1e-5)
    assert float(info.error) == pytest.approx(0.3, abs=0.1)
    assert float(estimate(empty(), text(0), jnp.int32(0), Options())[1].error) == 1


def test_padding_is_not_moved_and_a_small_model_has_a_small_rank():
    pool, _ = learn(empty(), text(0), deviation(0))
    _, info = estimate(pool, text(5, 10), jnp.int32(0), Options())
    assert info.moved[:10].all() and not info.moved[10:].any()
    small = anchors.init(3, 1, 8, consumers=1, anchors=0)
    assert anchors.fit(small, 0).right.shape[-1] == 16


def test_tokens_that_only_the_base_has_teach_no_offset():
    base = text(0)
    exact = dataclasses.replace(moved(base, deviation(0)), length=jnp.int32(10))
    pool, _ = observe(empty(), base, exact, jnp.int32(0), None)
    stored = pool.offset.entry((0, 0)).numbers()
    assert not stored[:, 10:].any() and stored[1:, :10].any()
