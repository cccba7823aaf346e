"""What the verbs do to the table of a cache (Laws 1, 2, 3, 9, 10)."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import DTYPES, SLOTS, build, same_bits, verbs

from kvfunc import KVCache

every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
masks = st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS).map(np.array)


@every_dtype
@settings(max_examples=30)
@given(ops=programs.programs(), a=masks, b=masks)
def test_drop_is_idempotent_and_drops_commute_and_unite(dtype, ops, a, b):
    cache = build(ops, dtype)
    a, b = a & np.asarray(cache.written), b & np.asarray(cache.written)
    after_a, told_a = verbs.drop(cache, a)
    again, told_again = verbs.drop(after_a, a)
    assert same_bits(again, after_a)
    assert int(told_again.dropped) == 0

    a_then_b, told_b = verbs.drop(after_a, b)
    b_then_a, _ = verbs.drop(verbs.drop(cache, b)[0], a)
    union, told_union = verbs.drop(cache, a | b)
    assert same_bits(a_then_b, union)
    assert same_bits(b_then_a, union)
    assert int(told_a.dropped) + int(told_b.dropped) == int(told_union.dropped)
    assert same_bits(verbs.keep(cache, ~(a | b))[0], union)


@every_dtype
@settings(max_examples=30)
@given(ops=programs.programs())
def test_repos_twice_is_repos_once(dtype, ops):
    once, _ = verbs.repos(build(ops, dtype))
    twice, told = verbs.repos(once)
    assert same_bits(twice, once)
    assert (int(told.moved), int(told.displacement)) == (0, 0)


@every_dtype
@given(counts=st.lists(st.integers(1, 8), max_size=5))
@settings(max_examples=10)
def test_repos_with_nothing_to_close_is_the_identity_bit_for_bit(dtype, counts):
    cache = build([("append", count) for count in counts], dtype)
    moved, told = verbs.repos(cache)
    assert same_bits(moved, cache)
    assert (int(told.moved), int(told.displacement)) == (0, 0)


@every_dtype
@settings(max_examples=30)
@given(ops=programs.programs(), last=masks)
def test_repos_numbers_the_live_slots_from_0_also_when_the_tail_was_dropped(dtype, ops, last):
    cache = build(ops, dtype)
    tail = int(cache.length) - 1
    dropped, _ = verbs.drop(cache, (last & np.asarray(cache.written)) | programs.raw_mask({tail}))
    moved, _ = verbs.repos(dropped)
    position, live = np.asarray(moved.position), np.asarray(moved.live)
    assert position[live].tolist() == list(range(live.sum()))
    assert int(moved.next_position) == live.sum()
    assert same_bits(moved.live, dropped.live)


@every_dtype
@settings(max_examples=30)
@given(ops=programs.programs())
def test_drop_and_repos_leave_every_bit_of_kv_and_every_birth(dtype, ops):
    cache = build(ops, dtype)
    dropped, _ = verbs.drop(cache, programs.raw_mask({0}))
    moved, _ = verbs.repos(dropped)
    assert same_bits((moved.kv, moved.birth), (cache.kv, cache.birth))


steps = st.lists(st.one_of(
    st.tuples(st.just("append"), st.integers(0, 20)), st.tuples(st.just("drop"), masks),
    st.tuples(st.just("keep"), masks), st.just(("repos",)), st.just(("compact",))), max_size=12)


@settings(max_examples=80)
@given(steps=steps)
def test_a_cache_agrees_with_a_list_of_slots(steps):
    cache, model = programs.empty_cache(jnp.float32), oracle.ListModel()
    for step in steps:
        live = {slot.raw: slot.position for slot in model.live}
        match step:
            case "append", count:
                cache, told = verbs.reserve(cache, count=np.int32(count))
                fits = len(model.slots) + count <= SLOTS
                assert bool(told.overflow) == (not fits)
                first = len(model.slots)
                if fits:
                    assert told.slots[:count].tolist() == list(range(first, first + count))
                    assert told.births[:count].tolist() == [
                        model.next_position + i for i in range(count)]
                    model.append(count)
                assert (np.asarray(told.slots[count if fits else 0:]) == SLOTS).all()
            case ("drop" | "keep") as verb, mask:
                asked = {slot.raw for slot, chosen in zip(model.slots, mask, strict=False)
                         if chosen == (verb == "drop")}
                cache, told = getattr(verbs, verb)(cache, mask)
                model.drop(asked)
                assert int(told.dropped) == len(live) - len(model.live)
                unwritten = mask[len(model.slots):].sum() if verb == "drop" else 0
                assert int(told.unwritten) == unwritten
            case ("repos",):
                cache, told = verbs.repos(cache)
                model.repos()
                changes = [live[slot.raw] - slot.position for slot in model.live]
                assert int(told.moved) == sum(change > 0 for change in changes)
                assert int(told.displacement) == max(changes, default=0)
            case ("compact",):
                places = {slot: i for i, slot in enumerate(map(id, model.live))}
                expected = [places.get(id(slot), KVCache.DROPPED) for slot in model.slots]
                cache, slot_map = verbs.compact(cache)
                assert slot_map.tolist() == expected + [KVCache.DROPPED] * (SLOTS - len(expected))
                model.compact()
        check_agreement(cache, model)


def check_agreement(cache: KVCache, model: oracle.ListModel):
    rows = [(slot.birth, slot.position if slot.live else KVCache.DROPPED) for slot in model.slots]
    rows += [(KVCache.UNWRITTEN, KVCache.DROPPED)] * (SLOTS - len(rows))
    assert list(zip(cache.birth.tolist(), cache.position.tolist(), strict=True)) == rows
    assert int(cache.next_position) == model.next_position
    assert (int(cache.length), int(cache.live.sum())) == (len(model.slots), len(model.live))
    assert (cache.capacity, cache.kv.slots) == (SLOTS, SLOTS)


@settings(max_examples=15)
@given(ops=programs.programs())
def test_shifts_lie_between_0_and_birth_and_live_positions_increase(ops):
    for end in range(1, len(ops) + 1):
        cache = build(ops[:end], jnp.float32)
        live, shift = np.asarray(cache.live), np.asarray(cache.shift)
        assert (shift >= 0).all()
        assert (shift[live] <= np.asarray(cache.birth)[live]).all()
        position = np.asarray(cache.position)[live]
        assert (np.diff(position) > 0).all()
        assert (position < int(cache.next_position)).all()


@settings(max_examples=30)
@given(ops=programs.programs(), order=programs.orders)
def test_repos_counts_in_history_order_whatever_the_physical_order(ops, order):
    cache = build(ops, jnp.float32)
    moved, told = verbs.repos(cache)
    scattered, told_too = verbs.repos(programs.reordered(cache, order))
    assert same_bits(scattered, programs.reordered(moved, order))
    assert same_bits(told_too, told)


@every_dtype
@settings(max_examples=30)
@given(ops=programs.programs(), order=programs.orders)
def test_compaction_copies_live_rows_bit_for_bit_in_history_order(dtype, ops, order):
    cache = programs.reordered(build(ops, dtype), order)
    compacted, slot_map = verbs.compact(cache)
    old = np.flatnonzero(cache.live)
    old = old[np.argsort(np.asarray(cache.position)[old])]
    new = np.arange(len(old))
    assert np.asarray(slot_map)[old].tolist() == new.tolist()
    for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(compacted), strict=True):
        if before.ndim:
            assert same_bits(np.asarray(after)[new], np.asarray(before)[old])
    assert compacted.written.tolist() == [True] * len(old) + [False] * (SLOTS - len(old))
    assert int(compacted.next_position) == int(cache.next_position)
