"""Distances and weights of anchors, KVCOMM's beside ours, and who makes way."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfunc import matching
from kvfunc.packed import Packed

from . import anchor_oracle as oracle
from .anchor_oracle import CHANNELS, HEAD_DIM, HEADS, LAYERS, TOKENS, flat, text

tries = settings(max_examples=60, deadline=None, derandomize=True)
sketch = jax.jit(matching.sketch)
distances = jax.jit(matching.distances)
temperature = jax.jit(matching.temperature)
entropy = jax.jit(matching.entropy)
weights = jax.jit(matching.weights, static_argnames="weighting")
paper_weights, paper_gate = jax.jit(matching.paper_weights), jax.jit(matching.paper_gate)
paper_counts = jax.jit(matching.paper_counts)
first_to_go = jax.jit(matching.first_to_go, static_argnames=("rule", "window"))


def int32s(*values):
    return jnp.array(values, jnp.int32)


def apart(mine, theirs) -> float:
    """The distance from one text to another by their sketches."""
    return float(distances(sketch(mine.flat), mine.length, sketch(theirs.flat)[None],
                           theirs.length[None])[0])


def test_a_distance_by_sketch_is_near_the_one_of_the_whole_kv():
    errors = []
    for seed in range(20):
        mine = text(2 * seed)
        other = oracle.moved(mine, np.random.default_rng(seed).normal(
            size=(LAYERS, TOKENS, CHANNELS)) * (seed + 1) / 10)
        errors.append(apart(mine, other) / oracle.distance(flat(mine), flat(other)) - 1)
    bound = math.sqrt(2 / (matching.SKETCH * TOKENS))
    assert np.abs(errors).max() < 3 * bound
    assert np.sqrt(np.mean(np.square(errors))) < 1.2 * bound


def test_a_text_is_at_0_from_itself_and_from_any_beginning_of_it():
    assert apart(text(0), text(0)) == 0
    beginning = text(0, 7)
    assert apart(text(0), beginning) < 1e-6
    assert apart(beginning, text(0)) < 1e-6


def test_only_tokens_that_both_have_count():
    mine, other = text(0, 9), text(1, 20)
    assert apart(mine, other) == pytest.approx(apart(mine, oracle.segment(
        np.asarray(other.k), np.asarray(other.v), 9)), rel=1e-6)


def doubled(of, sizes=1.0):
    k, v = (np.tile(np.asarray(x)[:, :12], (1, 2, 1, 1)) * sizes for x in (of.k, of.v))
    return oracle.segment(k, v, 24)


def test_neither_length_nor_scale_changes_a_distance():
    mine, other = text(0, 12), text(1, 12)
    expected = apart(mine, other)
    assert apart(doubled(mine), doubled(other)) == pytest.approx(expected, rel=1e-5)
    assert apart(doubled(mine, 10.0), doubled(other, 10.0)) == pytest.approx(expected, rel=1e-5)


def test_what_has_no_tokens_is_infinitely_far():
    sketches = jnp.ones((2, TOKENS, matching.SKETCH))
    assert distances(sketches[0], jnp.int32(4), sketches, int32s(0, 3)).tolist() == [math.inf, 0]


def test_temperature_is_the_median_distance_to_the_nearest():
    sizes = jnp.array([1, 2, 4, 1e6, 8], jnp.float32)[:, None, None]
    sketches = jnp.ones((5, 2, matching.SKETCH)) * sizes
    # Nearest to 1: 2, at 1; to 2: 1, at 1/2; to 4: 2, at 1/2; to 8: 4, at 1/2. The fourth is empty.
    assert temperature(sketches, int32s(2, 2, 2, 0, 2)) == 0.5
    assert temperature(sketches, int32s(2, 2, 0, 0, 0)) == 0.75


@pytest.mark.parametrize("lengths", [[], [0, 0], [2, 0]])
def test_temperature_of_fewer_than_two_is_1(lengths):
    sketches = jnp.ones((len(lengths), 2, matching.SKETCH))
    assert temperature(sketches, jnp.array(lengths, jnp.int32)) == 1


def test_temperature_of_equal_texts_is_1_not_0():
    assert temperature(jnp.ones((2, 2, matching.SKETCH)), int32s(2, 2)) == 1


def test_weights_are_a_softmax_of_distance_by_tau_or_one_over_its_square():
    away, all_of = jnp.array([0.1, 0.2, 0.4]), jnp.ones(3, jnp.bool_)
    np.testing.assert_allclose(weights(away, all_of, 0.1, weighting="softmax"),
                               np.array([math.e**2, math.e, 1 / math.e]) / (
                                   math.e**2 + math.e + 1 / math.e), rtol=1e-5)
    np.testing.assert_allclose(weights(away, all_of, 0.1, weighting="confidence"),
                               np.array([16, 4, 1]) / 21, rtol=1e-4)


allowances = st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=5, max_size=5)
lengths_away = st.lists(st.one_of(st.floats(0, 2, width=32), st.just(math.inf)), min_size=5,
                        max_size=5)


@pytest.mark.parametrize("weighting", ["softmax", "confidence"])
@tries
@given(away=lengths_away, allowed=allowances, tau=st.sampled_from([1e-3, 0.1, 1.0]))
def test_weights_sum_to_1_among_those_allowed_and_are_0_elsewhere(weighting, away, allowed, tau):
    allowed = np.array(allowed) & np.isfinite(away)[:, None]
    found = np.asarray(weights(jnp.array(away, jnp.float32), jnp.asarray(allowed), tau,
                               weighting=weighting))
    assert (found[~allowed] == 0).all()
    np.testing.assert_allclose(found.sum(0), allowed.any(0), rtol=1e-5)


@pytest.mark.parametrize(("of", "bits"), [
    ([1.0, 0, 0, 0], 0), ([0.5, 0.5, 0, 0], 1), ([0.25] * 4, 2), ([0.0] * 4, 0),
    ([0.5, 0.25, 0.25, 0], 1.5)])
def test_entropy_is_in_bits_and_0_log_0_is_0(of, bits):
    assert float(entropy(jnp.array(of, jnp.float32))) == pytest.approx(bits, abs=1e-6)


def test_an_epsilon_below_the_normal_floats_would_be_flushed_and_refuse_nothing():
    def flushed(weights):
        return -(weights * jnp.log2(weights + 1e-40)).sum()

    one_hot = jnp.array([1, 0, 0, 0], jnp.float32)
    assert math.isnan(jax.jit(flushed)(one_hot))
    assert not jax.jit(flushed)(one_hot) > 0.3 * 2
    assert entropy(one_hot) == 0


def stored(texts, tokens: int = TOKENS):
    packed = Packed.zeros((len(texts),), LAYERS, tokens, 2 * HEADS, HEAD_DIM, jnp.float32)
    for number, of in enumerate(texts):
        packed = packed.put((number,), matching.resized(of.flat, tokens))
    return packed


# Room of the pool, and of the text: anchors may be longer than the text has room for.
@pytest.mark.parametrize(("room", "size"), [(TOKENS, TOKENS), (TOKENS, 12), (16, TOKENS)])
def test_weights_of_the_paper_are_its_formulas(room, size):
    mine = text(0, 10, size)
    texts = [oracle.moved(text(0, 10), np.random.default_rng(n).normal(
        size=(LAYERS, 10, CHANNELS)) / 5) for n in range(2)] + [text(3, 16), text(4, 13)]
    lengths, allowed = int32s(10, 10, 16, 13), jnp.array([True, False, True, True])
    expected = oracle.Paper(flat(mine), [flat(texts[n]) for n in (0, 2, 3)])
    of_tokens, of_following = paper_weights(
        mine.flat, mine.length, stored(texts, room), lengths, allowed)
    np.testing.assert_allclose(np.asarray(of_tokens)[[0, 2, 3], :, :10], expected.of_tokens(),
                               rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.asarray(of_following)[[0, 2, 3]], expected.of_following(),
                               rtol=0, atol=1e-5)
    assert not np.asarray(of_tokens)[1].any()
    assert not np.asarray(of_following)[1].any()
    gate = paper_gate(mine.flat, stored(texts, room), allowed)
    np.testing.assert_allclose(np.asarray(gate)[[0, 2, 3]], expected.of_gate(), rtol=0, atol=1e-5)


def test_with_no_anchor_allowed_the_paper_weighs_nothing():
    mine, texts, none = text(0), [text(1), text(2)], jnp.zeros(2, jnp.bool_)
    weighed = paper_weights(mine.flat, mine.length, stored(texts), int32s(24, 24), none)
    for found in (*weighed, paper_gate(mine.flat, stored(texts), none)):
        assert not np.asarray(found).any()


@pytest.mark.parametrize(("of", "counted"), [
    ([0.6, 0.25, 0.1, 0.05], {0, 1}),  # the third crosses .9 and is left out
    ([0.1, 0.05, 0.6, 0.25], {2, 3}),
    ([0.95, 0.03, 0.02, 0.0], {0, 1, 2, 3}),  # the first crosses it: all
    ([0.25, 0.25, 0.25, 0.25], {0, 1, 2})])
def test_the_paper_counts_those_before_the_one_that_crosses_nine_tenths(of, counted):
    found = paper_counts(jnp.array(of, jnp.float32), jnp.ones(4, jnp.bool_))
    assert set(np.flatnonzero(found).tolist()) == counted == oracle.activated(of)


@tries
@given(shares=st.lists(st.integers(1, 2**20), min_size=6, max_size=6, unique=True),
       allowed=st.lists(st.booleans(), min_size=6, max_size=6))
def test_the_paper_counts_as_in_plain_python(shares, allowed):
    shares = np.array(shares) * np.array(allowed)
    of = (shares / max(shares.sum(), 1)).astype(np.float32)
    there = np.flatnonzero(allowed)
    if np.abs(np.cumsum(np.sort(of)[::-1]) - 0.9).min() < 1e-5:
        return  # rounding decides
    found = paper_counts(jnp.asarray(of), jnp.array(allowed))
    assert set(np.flatnonzero(found).tolist()) == {
        int(there[place]) for place in oracle.activated(of[there].tolist())}


histories = st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 9),
                               st.sampled_from([1.0, 100.0, 300.0])), min_size=7, max_size=7)


def plain(rule: str, window: int, anchors: dict, clock: int) -> set[int]:
    """All whom a rule would let go, since rounding may decide between equals."""
    if rule == "lru":
        cost = {place: used for place, (_, _, used, _) in anchors.items()}
    elif rule == "value":
        cost = {place: (uses + 1) / (clock - inserted + 1) / size
                for place, (uses, inserted, _, size) in anchors.items()}
    else:
        oldest = sorted(anchors, key=lambda place: anchors[place][1])[:window]
        cost = {place: (anchors[place][0], oldest.index(place)) for place in oldest}
    least = min(cost.values())
    return {place for place in cost if cost[place] == least or (
        rule == "value" and math.isclose(cost[place], least, rel_tol=1e-6))}


@pytest.mark.parametrize(("rule", "window"), [("lru", 5), ("value", 5), ("windowed_lfu", 1),
                                              ("windowed_lfu", 3), ("windowed_lfu", 9)])
@tries
@given(history=histories, order=st.permutations(range(7)), later=st.integers(0, 5))
def test_who_makes_way_is_as_in_plain_python(rule, window, history, order, later):
    there, uses, since, size = (np.array(x) for x in zip(*history, strict=True))
    inserted = np.array(order)
    used, clock = inserted + since, 16 + later
    anchors = {place: (int(uses[place]), int(inserted[place]), int(used[place]), float(size[place]))
               for place in np.flatnonzero(there).tolist()}
    if not anchors:
        return
    found = first_to_go(rule, window, jnp.asarray(there), *(
        jnp.asarray(x, jnp.int32) for x in (uses, inserted, used, clock)),
        jnp.asarray(size, jnp.float32))
    assert int(found) in plain(rule, window, anchors, clock)


def test_windowed_lfu_spares_a_young_anchor_though_it_was_never_used():
    arguments = (jnp.ones(4, jnp.bool_), int32s(3, 2, 2, 0), int32s(1, 2, 3, 4),
                 int32s(9, 8, 7, 6), jnp.int32(10), jnp.ones(4))
    assert first_to_go("windowed_lfu", 3, *arguments) == 1  # of equals the oldest
    assert first_to_go("windowed_lfu", 4, *arguments) == 3


def test_resized_cuts_or_pads_with_zeros():
    x = jnp.ones((1, 3, 2))
    assert matching.resized(x, 2).tolist() == [[[1, 1], [1, 1]]]
    assert matching.resized(x, 4).tolist() == [[[1, 1]] * 3 + [[0, 0]]]
