"""What a pool learns of a text behind a prompt, and what it says of the next one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle as laws
import pytest
from programs import same_bits

from kvfunc import KV, Rope, anchors, segments, storage
from kvfunc.anchors import PAPER, Estimated, Options

from . import anchor_oracle as oracle
from .anchor_oracle import (
    BEHIND,
    CHANNELS,
    HEAD_DIM,
    HEADS,
    LAYERS,
    TOKENS,
    close,
    deviation,
    flat,
    near,
    text,
)

RIDGE, ANCHORS = Options(), Options(estimator="anchors")
every_estimator = pytest.mark.parametrize("options", [RIDGE, ANCHORS, PAPER],
                                          ids=lambda options: options.estimator)

observe = jax.jit(anchors.observe, static_argnames="options")
estimate = jax.jit(anchors.estimate, static_argnames="options")
fit = jax.jit(anchors.fit, static_argnames="options")
apply = jax.jit(anchors.apply)


def empty(**sizes):
    return anchors.init(LAYERS, HEADS, HEAD_DIM, **dict(
        consumers=2, anchors=4, tokens=TOKENS, following=BEHIND, dtype=jnp.float32) | sizes)


BEFORE = text(50, BEHIND, BEHIND)  # the static text behind, as it is elsewhere


def teach(pool, base, offset, consumer=0, behind=None, approximate=False):
    following = BEFORE, BEFORE if behind is None else oracle.moved(BEFORE, behind)
    return observe(pool, base, oracle.moved(base, offset), jnp.int32(consumer), following, RIDGE,
                   jnp.asarray(approximate))[0]


@functools.cache
def linear_world():
    """Texts whose offset is a linear map of KV, plus something by index, plus noise."""
    rng = np.random.default_rng(9)
    slopes = rng.normal(size=(LAYERS - 1, CHANNELS, CHANNELS)) / 8
    first = rng.normal(size=(LAYERS - 1, TOKENS, CHANNELS)) / (1 + np.arange(TOKENS))[:, None]
    texts = [text(seed, length) for seed, length in enumerate([24, 20, 9, 24, 17, 24])]
    offsets = []
    for base in texts:
        offset = deviation(len(offsets), int(base.length), 0.1)
        offset[1:] += np.einsum("ltc,lcd->ltd", flat(base)[1:], slopes) + first[:, :base.length]
        offsets.append(offset)
    return texts, offsets


def told_of(of: np.ndarray, first: int = 0) -> np.ndarray:
    """The features of a layer's tokens [tokens, channels]."""
    index = first + np.arange(len(of))
    one_hot = index[:, None] == np.arange(anchors.FIRST)
    return np.concatenate([of, one_hot, np.log1p(index)[:, None], np.ones((len(of), 1))], 1)


@functools.cache
def linear_pool(kept: int = 4):
    pool = empty(anchors=kept)
    for base, offset in zip(*linear_world(), strict=True):
        pool = teach(pool, base, offset)
    return pool


def test_a_text_unlike_any_gets_the_prediction_of_the_ridge():
    new, (texts, offsets) = text(77, 21), linear_world()
    found, told = estimate(linear_pool(), new, jnp.int32(0), RIDGE)
    assert told.rule == Estimated.RIDGE
    assert told.unreliable == 0
    assert not told.refused
    for layer in range(1, LAYERS):
        by = oracle.Ridge(np.concatenate([told_of(flat(base)[layer]) for base in texts]),
                          np.concatenate([offset[layer] for offset in offsets]), RIDGE.penalty)
        close(flat(found.text)[layer], by(told_of(flat(new)[layer])), 1e-3)


def test_weights_fitted_before_give_the_same_estimate():
    new = text(77, 21)
    weights = fit(linear_pool(), jnp.int32(0), RIDGE)
    for mine, theirs in zip(
            jax.tree.leaves(estimate(linear_pool(), new, jnp.int32(0), RIDGE, weights)),
            jax.tree.leaves(estimate(linear_pool(), new, jnp.int32(0), RIDGE)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@every_estimator
def test_layer_0_is_never_changed(options):
    pool, base = empty(), text(0, 20)
    for seed in range(2):
        pool = teach(pool, near(base, 0.2, seed), deviation(seed, 20) + 7,
                     behind=deviation(9, 4) + 7)
    found, _ = estimate(pool, base, jnp.int32(0), options)
    for part in (found.text, found.following):
        assert not flat(part)[0].any()
        assert flat(part)[1:].any((1, 2)).all()
    ones = jax.tree.map(jnp.ones_like, (base.k, base.v))
    spliced = apply(base, segments.Segment(*ones, base.length))
    assert same_bits((spliced.k[0], spliced.v[0]), (base.k[0], base.v[0]))
    close(flat(spliced)[1:], flat(base)[1:] + 1)
    assert spliced.length == 20


@pytest.mark.parametrize("options", [RIDGE, ANCHORS], ids=["ridge", "anchors"])
def test_the_same_text_again_gets_its_own_offset_alone_though_near_copies_are_there(options):
    base, pool = text(0, 20), empty()
    for seed, of in enumerate([near(base, 0.02, 1), base, near(base, 0.02, 2)]):
        pool = teach(pool, of, deviation(seed, 20), behind=deviation(seed, 4))
    found, told = estimate(pool, base, jnp.int32(0), options)
    assert told.weights.tolist() == [0, 1, 0, 0]
    assert told.counted.tolist() == [False, True, False, False]
    assert told.distance < 1e-6
    close(flat(found.text), deviation(1, 20))
    close(flat(found.following), deviation(1, 4))


@pytest.mark.parametrize("options", [RIDGE, ANCHORS], ids=["ridge", "anchors"])
def test_a_near_copy_has_nearly_all_the_weight(options):
    pool = empty()
    for seed in range(3):
        pool = teach(pool, text(seed), deviation(seed))
    found, told = estimate(pool, near(text(1), 0.25), jnp.int32(0), options)
    assert told.weights[1] > 0.999
    assert 0.2 < told.distance < 0.3
    assert told.rule == (Estimated.NEAR_COPY if options is RIDGE else Estimated.ANCHORS)
    close(flat(found.text), deviation(1), 0.01)


def test_what_is_blended_is_what_the_weights_say():
    base, pool = text(0), empty()
    for seed in range(3):
        pool = teach(pool, near(base, 0.3 + 0.1 * seed, seed), deviation(seed),
                     behind=deviation(seed, 4))
    found, told = estimate(pool, base, jnp.int32(0), ANCHORS)
    weights = np.asarray(told.weights)
    assert weights.sum() == pytest.approx(1)
    assert told.counted.tolist() == [*(weights[:3] >= 1 / 3).tolist(), False]
    for part, length in ((found.text, TOKENS), (found.following, 4)):
        close(flat(part), sum(weights[seed] * deviation(seed, length) for seed in range(3)))


def test_weights_depend_on_neither_length_nor_scale():
    def weights(times, size):
        def long(of):
            k, v = (np.tile(np.asarray(x)[:, :8], (1, times, 1, 1)) * size for x in (of.k, of.v))
            return oracle.segment(np.pad(k, ((0, 0), (0, TOKENS - 8 * times), (0, 0), (0, 0))),
                                  np.pad(v, ((0, 0), (0, TOKENS - 8 * times), (0, 0), (0, 0))),
                                  8 * times)

        base, pool = text(0), empty()
        for seed in range(2):
            pool = teach(pool, long(near(base, 0.3 + 0.1 * seed, seed)), deviation(0, 8 * times))
        return np.asarray(estimate(pool, long(base), jnp.int32(0), ANCHORS)[1].weights)

    once = weights(1, 1)
    assert 0.5 < once[0] < 0.95
    close(weights(3, 1), once)
    close(weights(2, 10), once)


def test_offsets_do_not_depend_on_how_long_the_prompts_were():
    rope = Rope.default(HEAD_DIM)
    raw = np.random.default_rng(4).normal(size=(4, LAYERS, TOKENS, HEADS, HEAD_DIM))

    def computed(k, v, birth):
        """KV of the text as a model leaves it in a cache behind so many tokens."""
        keys = [laws.rotate(rope, layer, birth + np.arange(TOKENS)) for layer in k]
        keys, values = (tuple(jnp.asarray(x, jnp.float32) for x in layers) for layers in (keys, v))
        return segments.read(KV(keys, values), jnp.arange(TOKENS, dtype=jnp.int32), birth, rope)

    base_k, base_v, exact_k, exact_v = raw
    pool = empty()
    for birth in (5, 9000):
        pool, _ = observe(pool, computed(base_k, base_v, birth // 3),
                          computed(exact_k, exact_v, birth), jnp.int32(0), (BEFORE, BEFORE), RIDGE,
                          jnp.asarray(False))
        offset = pool.offset.entry((0, 0)).numbers()
        keys = np.stack([laws.rotate(rope, layer, np.arange(TOKENS)) for layer in exact_k - base_k])
        close(offset[..., :CHANNELS // 2].reshape(keys.shape), keys, 2e-5)
    assert pool.is_there.tolist() == [True, False, False, False]  # the same text both times


@every_estimator
def test_without_anything_learned_the_estimate_is_0_and_refused(options):
    pool = teach(empty(), text(0, 12), deviation(0, 12), consumer=1)
    found, told = estimate(pool, text(0, 12), jnp.int32(0), options)
    assert told.rule == Estimated.NOTHING
    assert told.refused
    assert (told.unreliable, told.distance) == (12, np.inf)
    assert not told.weights.any()
    if options.gate != "entropy_paper":  # which counts whoever is long enough
        assert not told.counted.any()
    assert not flat(found.text).any()
    assert not flat(found.following).any()


def test_a_text_longer_than_the_anchors_has_no_offset_behind_them():
    base, pool = text(0, 16), teach(empty(), text(0, 10), deviation(0, 10))
    found, told = estimate(pool, base, jnp.int32(0), ANCHORS)
    close(flat(found.text)[:, :10], deviation(0, 10))
    assert not flat(found.text)[:, 10:].any()
    assert told.unreliable == 6
    assert told.rule == Estimated.ANCHORS
    by_paper, told = estimate(pool, base, jnp.int32(0), PAPER)
    assert not flat(by_paper.text).any()
    assert (told.rule, told.unreliable, told.refused) == (Estimated.NOTHING, 16, True)


def test_the_ridge_goes_on_where_a_near_copy_ends():
    base = text(0, 16)
    pool = teach(empty(), text(0, 10), deviation(0, 10))
    found, told = estimate(pool, base, jnp.int32(0), RIDGE)
    alone, _ = estimate(empty(anchors=0), base, jnp.int32(0), RIDGE, fit(pool, jnp.int32(0), RIDGE),
                        jnp.int32(0))
    assert (told.rule, told.unreliable) == (Estimated.NEAR_COPY, 0)
    close(flat(found.text)[:, :10], deviation(0, 10))
    close(flat(found.text)[:, 10:], flat(alone.text)[:, 10:])


def test_a_text_in_parts_is_the_text_whole():
    base, offset = text(0, 24), deviation(0, 24)
    parts = [(start, oracle.segment(*(np.asarray(x)[:, start:start + 12] for x in (base.k, base.v)),
                                    12)) for start in (0, 12)]
    pool = empty(anchors=0)
    for start, part in parts:
        pool, _ = observe(pool, part, oracle.moved(part, offset[:, start:start + 12]), jnp.int32(0),
                          first=jnp.int32(start))
    whole = teach(empty(anchors=0), base, offset)
    for mine, theirs in zip(jax.tree.leaves(pool.sums), jax.tree.leaves(whole.sums), strict=True):
        close(mine, np.asarray(theirs))
    weights = fit(whole, jnp.int32(0), RIDGE)
    found = [flat(estimate(pool, part, jnp.int32(0), RIDGE, weights, jnp.int32(start))[0].text)
             for start, part in parts]
    whole, _ = estimate(whole, base, jnp.int32(0), RIDGE, weights, jnp.int32(0))
    close(np.concatenate(found, 1), flat(whole.text))


@pytest.mark.parametrize("projection", [None, CHANNELS // 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [
    # Products are of the storage's type: what they lose is little beside the storage's rounding.
    (jnp.float32, 1e-5), (jnp.bfloat16, 2**-7), (jnp.uint16, 2**-7)])
def test_correcting_in_storage_is_read_estimate_apply_and_place(projection, dtype, tolerance):
    rope, stored = Rope.yarn(HEAD_DIM, 1e4, factor=4.0, original_context=64), text(77, 60, 60)
    rope = (Rope.default(HEAD_DIM, 100.0), rope, Rope.default(HEAD_DIM // 2))  # of three layers
    kv = KV.zeros(LAYERS, 60, HEADS, HEAD_DIM, dtype)
    kv = KV(*(tuple(storage.write_layer(old, jnp.arange(60), new)
                            for old, new in zip(olds, news, strict=True))
                      for olds, news in ((kv.k, stored.k), (kv.v, stored.v))))
    sources = jnp.array([*range(30, 47), *[60] * 7], jnp.int32)  # 17 tokens, and padding
    targets = jnp.array([*range(9, 2, -1), *range(10, 20), *[60] * 7], jnp.int32)
    pool = empty(anchors=0, projection=projection)
    for base, offset in zip(*linear_world(), strict=True):
        pool = teach(pool, base, offset)
    weights = fit(pool, jnp.int32(0), RIDGE)
    base = segments.read(kv, sources, 40, rope)
    offset, told = estimate(pool, base, jnp.int32(0), RIDGE, weights, jnp.int32(3))
    expected = segments.place(kv, apply(base, offset.text), targets, 700, rope)
    found, moved = jax.jit(anchors.correct, static_argnames="rope")(
        kv, weights, sources, targets, jnp.array([40, 700], jnp.int32), jnp.int32(3), rope)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        mine, theirs = (np.asarray(storage.with_numbers(x), np.float32) for x in (mine, theirs))
        assert np.linalg.norm(mine - theirs) < tolerance * np.linalg.norm(theirs)
    np.testing.assert_allclose(moved[:17], told.moved[:17], rtol=3 * tolerance, atol=1e-6)


def test_fewer_features_predict_through_fixed_directions():
    texts, offsets = linear_world()
    pool = empty(projection=CHANNELS // 2, anchors=0)
    assert pool.sums.gram.shape[-1] == 16 + anchors.FIRST + 2
    for base, offset in zip(texts, offsets, strict=True):
        pool = teach(pool, base, offset)
    found, told = estimate(pool, texts[0], jnp.int32(0), RIDGE)
    assert told.rule == Estimated.RIDGE
    left = np.linalg.norm(flat(found.text) - offsets[0]) / np.linalg.norm(offsets[0])
    assert 0.1 < left < 0.9


def test_the_first_tokens_and_those_that_move_most_are_to_be_computed():
    offset = deviation(0, 20, 0.01)
    offset[1:, [11, 15]] = 3
    base, options = text(0, 20), Options(estimator="anchors", recompute_first=2, recompute=0.2)
    _, told = estimate(teach(empty(), base, offset), base, jnp.int32(0), options)
    assert np.flatnonzero(told.recompute).tolist() == [0, 1, 11, 15]
    np.testing.assert_allclose(
        told.moved[:20], np.square(offset).sum((0, 2)) / np.square(flat(base)).sum((0, 2)), 1e-4)
    _, told = estimate(linear_pool(), text(77, 5), jnp.int32(0), RIDGE)
    assert told.recompute.tolist() == [True] * 5 + [False] * (TOKENS - 5)


def test_every_consumer_has_estimates_of_its_own_also_all_at_once():
    base = text(0, 20)
    pool = teach(teach(empty(), base, deviation(0, 20)), base, deviation(1, 20), consumer=1)
    assert pool.is_there.sum() == 1
    assert pool.seen[0].tolist() == [True, True]
    both = jax.jit(jax.vmap(anchors.estimate, (None, None, 0, None)), static_argnums=3)(
        pool, base, jnp.arange(2), ANCHORS)
    for consumer in range(2):
        found = estimate(pool, base, jnp.int32(consumer), ANCHORS)
        close(flat(found[0].text), deviation(consumer, 20))
        for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(both), strict=True):
            np.testing.assert_allclose(mine, theirs[consumer], rtol=1e-5, atol=1e-6)


def test_a_deviation_is_relative_by_layer_over_the_tokens_that_both_have():
    exact, wrong = text(0, 20), deviation(0, 20)
    wrong[0] = 100
    estimated = oracle.moved(exact, wrong)
    shorter = segments.Segment(estimated.k, estimated.v, jnp.int32(11))
    for of, length in ((estimated, 20), (shorter, 11)):
        expected = [np.linalg.norm(wrong[layer, :length]) / np.linalg.norm(
            flat(exact)[layer, :length]) for layer in range(1, LAYERS)]
        assert float(anchors.deviation(of, exact)) == pytest.approx(np.mean(expected), rel=1e-5)


def test_predict_tells_what_estimate_tells():
    predict = jax.jit(anchors.predict, static_argnames="options")
    predicted = predict(linear_pool(), text(77, 21), jnp.int32(0), ANCHORS)
    estimated = estimate(linear_pool(), text(77, 21), jnp.int32(0), ANCHORS)[1]
    for mine, theirs in zip(*map(jax.tree.leaves, (predicted, estimated)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
