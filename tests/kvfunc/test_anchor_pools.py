"""Pools of anchors: who is kept, what is stored, whose it is, and what two pools know."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import same_bits

from kvfunc import anchors
from kvfunc.anchors import Estimated, Options

from . import anchor_oracle as oracle
from .anchor_oracle import BEHIND, CHANNELS, HEAD_DIM, HEADS, LAYERS, close, deviation, flat, text
from .test_anchors import ANCHORS, BEFORE, empty, estimate, observe, teach

use, evict = jax.jit(anchors.use), jax.jit(anchors.evict, static_argnames="options")
merge = jax.jit(anchors.merge)


LENGTHS = [6, 12, 24, 9, 18, 15, 21]
BYTES = LAYERS * CHANNELS * 4  # of a token


def pool_of(*seeds):
    pool = empty()
    for seed in seeds:
        pool = teach(pool, text(seed, 20), deviation(seed, 20))
    return pool


class Kept:
    """A pool as a list: for each place None, or an anchor as a dict."""

    def __init__(self, options: Options, behind: int):
        self.places, self.clock = [None] * 4, 0
        self.options, self.behind = options, behind

    def observe(self, number: int, consumer: int):
        self.clock += 1
        if number not in self.numbers:
            new = BYTES * (2 * LENGTHS[number] + self.behind)
            while None not in self.places or (any(self.places) and (
                    self.bytes + new > (self.options.max_bytes or 1e9))):
                self.evict()
            self.places[self.places.index(None)] = dict(
                number=number, inserted=self.clock, uses=0, seen=set())
        anchor = self.places[self.numbers.index(number)]
        anchor["used"] = self.clock
        anchor["seen"].add(consumer)

    def use(self, places):
        self.clock += 1
        for anchor in (self.places[place] for place in places):
            if anchor is not None:
                anchor["used"] = self.clock
                anchor["uses"] += 1

    def evict(self):
        there = [anchor for anchor in self.places if anchor is not None]
        if self.options.eviction == "windowed_lfu":
            there = sorted(there, key=lambda anchor: anchor["inserted"])[:self.options.window]
        if there:
            cost = {"lru": lambda anchor: anchor["used"],
                    "windowed_lfu": lambda anchor: (anchor["uses"], anchor["inserted"]),
                    "value": lambda anchor: (anchor["uses"] + 1) / self.size(anchor)
                    / (self.clock - anchor["inserted"] + 1)}[self.options.eviction]
            self.places[self.places.index(min(there, key=cost))] = None

    @property
    def numbers(self):
        return [anchor and anchor["number"] for anchor in self.places]

    def size(self, anchor):
        length, seen = LENGTHS[anchor["number"]], len(anchor["seen"])
        return BYTES * (length + seen * (length + self.behind))

    @property
    def bytes(self):
        return sum(self.size(anchor) for anchor in self.places if anchor is not None)


def steps(consumers):
    observing = st.tuples(st.just("observe"), st.integers(0, 6), st.integers(0, consumers - 1))
    using = st.tuples(st.just("use"), st.sets(st.integers(0, 3), min_size=1))
    return st.lists(st.one_of(observing, observing, st.just(("evict",)), using), max_size=14)


@functools.cache
def some_estimate() -> Estimated:
    return estimate(empty(), text(0), jnp.int32(0), ANCHORS)[1]


def check(steps, options, following):
    """A pool and a list, step by step."""
    model, pool = Kept(options, BEHIND if following else 0), empty()
    for step in steps:
        getattr(model, step[0])(*step[1:])
        match step:
            case "observe", number, consumer:
                base = text(number, LENGTHS[number])
                pool, told = observe(pool, base, base, jnp.int32(consumer), following, options,
                                     jnp.asarray(False))
                assert pool.length[told.anchor] == LENGTHS[number]
            case "use", places:
                counted = pool.is_there & jnp.isin(jnp.arange(4), jnp.array(sorted(places)))
                pool = use(pool, dataclasses.replace(some_estimate(), counted=counted))
            case ("evict",):
                pool, _ = evict(pool, options)
        assert pool.length.tolist() == [
            0 if anchor is None else LENGTHS[anchor["number"]] for anchor in model.places]
        for place, anchor in enumerate(model.places):
            if anchor is not None:
                assert set(np.flatnonzero(pool.seen[place]).tolist()) == anchor["seen"]
                assert pool.uses[place] == anchor["uses"]
            size = 0 if anchor is None else model.size(anchor)
            assert pool.bytes_of_anchors[place] == size
        assert jax.tree.map(jnp.shape, pool) == jax.tree.map(jnp.shape, empty())
        yield pool


@pytest.mark.parametrize(("rule", "window"), [("value", 5), ("windowed_lfu", 2)])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(steps=steps(consumers=2))
def test_a_pool_keeps_whom_a_list_would_keep(rule, window, steps):
    for _ in check(steps, Options(eviction=rule, window=window), (BEFORE, BEFORE)):
        pass


@settings(max_examples=25, deadline=None, derandomize=True)
@given(steps=steps(consumers=1))
def test_anchors_never_take_more_bytes_than_the_bound(steps):
    options = Options(eviction="lru", max_bytes=2 * BYTES * 30)
    for pool in check(steps, options, None):
        assert pool.bytes_of_anchors.sum() <= options.max_bytes


def test_evicting_from_an_empty_pool_changes_nothing():
    pool, place = evict(empty(), Options())
    assert place == 4
    assert same_bits(pool, empty())


def test_what_an_evicted_anchor_taught_stays_in_the_sums():
    pool = pool_of(0)
    after, place = evict(pool, Options())
    assert place == 0
    assert not after.is_there.any()
    assert same_bits(after.sums, pool.sums)
    found, told = estimate(after, text(0, 20), jnp.int32(0), ANCHORS)
    assert not flat(found.text).any()
    assert told.refused


def test_an_offset_in_a_place_that_was_another_texts_is_not_that_texts():
    pool = teach(pool_of(0), text(0, 20), deviation(1, 20), consumer=1)
    assert pool.seen[0].tolist() == [True, True]
    pool = teach(evict(pool, Options())[0], text(1, 20), deviation(2, 20))
    assert pool.length.tolist() == [20, 0, 0, 0]
    assert pool.seen[0].tolist() == [True, False]
    assert estimate(pool, text(1, 20), jnp.int32(1), ANCHORS)[1].rule == Estimated.NOTHING


def test_whether_a_base_was_computed_on_estimates_is_kept_with_it():
    pool = empty()
    for seed, approximate in enumerate([False, True, False]):
        pool = teach(pool, text(seed, 20), deviation(seed, 20), approximate=approximate)
    assert pool.approximate.tolist() == [False, True, False, False]


@pytest.mark.parametrize(("dtype", "rank", "least", "most"), [
    (jnp.float32, None, 0, 0), (jnp.int8, None, 1e-3, 1e-2), (jnp.bfloat16, 4, 0.3, 0.9)])
def test_the_error_of_storage_is_told_as_it_is(dtype, rank, least, most):
    base, offset = text(0, 20), deviation(0, 20)
    pool = empty(dtype=dtype, rank=rank)
    for text_before in (text(1), text(2)):
        pool = teach(pool, text_before, deviation(1))
    pool, told = observe(pool, base, oracle.moved(base, offset), jnp.int32(0), (BEFORE, BEFORE),
                         Options(), jnp.asarray(False))
    kept = pool.offset.entry((2, 0)).numbers()[:, :20]
    error = np.linalg.norm(kept - offset) / np.linalg.norm(offset)
    np.testing.assert_allclose(told.storage_error, error, rtol=1e-3, atol=1e-6)
    assert least <= told.storage_error <= most


def test_a_text_longer_than_the_room_for_it_is_kept_in_part():
    base = text(0, 24)
    pool = teach(empty(tokens=10), base, deviation(0, 24))
    assert pool.length.tolist() == [10, 0, 0, 0]
    assert pool.sums.count.tolist() == [[24, 24], [0, 0]]
    assert teach(pool, base, deviation(0, 24)).is_there.sum() == 1


def test_two_pools_know_together_what_one_that_saw_all_knows():
    texts = [text(seed, 10 + seed) for seed in range(4)]
    mine, theirs, one = empty(), empty(), empty()
    for seed, base in enumerate(texts):
        offset, consumer = deviation(seed, 10 + seed), seed % 2
        one = teach(one, base, offset, consumer)
        if seed in (0, 3):
            mine = teach(mine, base, offset, consumer)
        else:
            theirs = teach(theirs, base, offset, consumer)
    both = merge(mine, theirs)
    for part, whole in zip(jax.tree.leaves(both.sums), jax.tree.leaves(one.sums), strict=True):
        close(part, np.asarray(whole))
    assert merge(mine, mine).is_there.sum() == 2
    with pytest.raises(ValueError, match="do not add: give pools of the same consumers"):
        anchors.merge(mine, empty(consumers=3))


def test_pools_side_by_side_under_vmap_are_pools_alone():
    pools = [pool_of(0, 1), pool_of(2)]
    base, exact = text(3, 20), oracle.moved(text(3, 20), deviation(3, 20))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *pools)

    def learned(pool):
        return observe(pool, base, exact, jnp.int32(0), (BEFORE, BEFORE), Options(),
                       jnp.asarray(False))

    batch = jax.vmap(learned)(stacked)
    for number, pool in enumerate(pools):
        alone = learned(pool)
        for mine, theirs in zip(jax.tree.leaves(batch), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(mine[number], theirs, rtol=1e-5, atol=1e-5)


def test_a_consumer_that_is_none_of_the_pools_is_refused():
    for consumer in (-1, 2):
        for call in (lambda consumer=consumer: anchors.observe(empty(), text(0), text(1), consumer),
                     lambda consumer=consumer: anchors.estimate(empty(), text(0), consumer)):
            with pytest.raises(ValueError, match=f"between 0 and 1, got {consumer}"):
                call()
    pool, _ = observe(empty(anchors=0), text(0), text(1), jnp.int32(2))
    assert same_bits(pool.sums, empty().sums)


def test_a_consumer_is_the_prompt_before_and_whoever_must_not_share_it():
    key = anchors.consumer_key("model", "salt", [1, 2, "question"])
    assert key == anchors.consumer_key("model", "salt", (1, 2, "question"))
    assert key.startswith("a5504c47ceb0ff20")
    others = [("model", "salt", [1, 2]), ("model", "salt", ["question", 1, 2]),
              ("model", "salt", [12, "question"]), ("model", "salt", ["1", 2, "question"]),
              ("model", "other", [1, 2, "question"]), ("other", "salt", [1, 2, "question"]),
              ("model", "salt", [1, 2, "question"], [1]), ("model", "salt", [1, 2, "question"], [])]
    assert len({key, *(anchors.consumer_key(*other) for other in others)}) == 1 + len(others)


@pytest.mark.parametrize(("wrong", "says"), [
    (dict(estimator="mean"), "estimator must be one of ridge, anchors, paper, got 'mean'"),
    (dict(weighting="l2"), "weighting must be one of softmax, confidence, got 'l2'"),
    (dict(gate="length"), "gate must be one of bound, entropy, entropy_paper, got 'length'"),
    (dict(eviction="fifo"), "eviction must be one of lru, value, windowed_lfu, got 'fifo'"),
    (dict(penalty=0.0), "penalty must be above 0, got 0.0"), (dict(decay=-1.0), "decay must be"),
    (dict(rank=0), "rank must be at least 1, got 0"), (dict(window=0), "window must be at least 1"),
    (dict(tau=0.0), "tau must be above 0, or None"), (dict(recompute=1.5), "a share from 0 to 1"),
    (dict(recompute_first=-1), "recompute_first must be at least 0")])
def test_options_out_of_range_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        Options(**wrong)


@pytest.mark.parametrize(("wrong", "says"), [
    (dict(consumers=0), "consumers must be at least 1, got 0"),
    (dict(tokens=0), "tokens must be at least 1, got 0"),
    (dict(anchors=-1), "must be at least 0, got -1"), (dict(following=-1), "at least 0, got 4, -1"),
    (dict(projection=33), "projection must be between 1 and the 32 channels of a token, got 33")])
def test_sizes_out_of_range_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        empty(**wrong)
    with pytest.raises(ValueError, match="layers must be at least 2, got 1"):
        anchors.init(1, HEADS, HEAD_DIM, consumers=1)
