"""Pages: who holds which slot, and what is handed out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfunc.history import HOLE
from kvfunc.serve.pages import Pages


def ints(*values):
    return np.array(values, np.int32)


def test_pages_are_handed_out_whole_and_in_one_run():
    pages = Pages(8, 4)
    slots = pages.take(3)
    assert slots.tolist() == list(range(12)) and slots.dtype == np.int32
    assert (pages.free, pages.held, pages.evictable) == (5, 3, 0)


def test_a_page_is_free_when_nobody_holds_any_of_its_slots_and_the_tree_keeps_none():
    pages = Pages(2, 4)
    slots = pages.take(1)
    pages.keep(slots[:2])
    pages.release(slots[1:])
    assert (pages.free, pages.held, pages.evictable) == (1, 1, 0)
    pages.release(slots[:1])
    assert (pages.free, pages.held, pages.evictable) == (1, 0, 1)
    pages.forget(slots[:1])
    assert pages.evictable_pages.tolist() == [True, False]
    pages.forget(slots[1:2])
    assert pages.free == 2


def test_a_slot_is_held_as_often_as_it_was_taken_up():
    pages = Pages(1, 4)
    slots = pages.take(1)
    pages.hold(ints(HOLE, 2, HOLE))
    pages.release(slots)
    assert pages.held == 1
    pages.release(ints(2, HOLE))
    assert pages.free == 1


def test_the_pages_that_follow_a_slot_are_preferred():
    pages = Pages(6, 2)
    first = pages.take(1)
    assert pages.take(2, after=int(first[-1])).tolist() == [2, 3, 4, 5]
    pages.release(first)
    assert pages.take(1, after=5).tolist() == [6, 7]
    assert pages.take(3, after=11).tolist() == [8, 9, 10, 11, 0, 1]  # nothing follows the last


def test_the_smallest_run_that_is_long_enough_is_used():
    pages = Pages(10, 1)
    pages.take(10)
    pages.release(ints(0, 1, 2, 4, 5, 7, 8, 9))
    assert pages.take(2).tolist() == [4, 5]
    assert pages.take(4).tolist() == [0, 1, 2, 7]


def test_more_pages_than_are_free_are_refused():
    pages = Pages(2, 4)
    with pytest.raises(ValueError, match="3 pages are wanted and 2 are free"):
        pages.take(3)
    assert pages.take(0).tolist() == []


class Model:
    """The same in plain Python."""

    def __init__(self, count, size):
        self.count, self.size = count, size
        self.holders = [0] * (count * size)
        self.kept = [False] * (count * size)

    def states(self):
        found = {"free": 0, "held": 0, "evictable": 0}
        for page in range(self.count):
            mine = range(page * self.size, (page + 1) * self.size)
            held, kept = (any(x[i] for i in mine) for x in (self.holders, self.kept))
            found["held" if held else "evictable" if kept else "free"] += 1
        return found


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_free_and_held_and_evictable_pages_are_all_pages(count, size, data):
    pages, model, held = Pages(count, size), Model(count, size), []
    for _ in range(data.draw(st.integers(0, 12))):
        what = data.draw(st.sampled_from(["take", "hold", "release", "keep", "forget"]))
        some = np.array(sorted(data.draw(st.sets(st.integers(0, count * size - 1)))), np.int32)
        if what == "take":
            number, after = data.draw(st.integers(0, pages.free)), data.draw(
                st.integers(HOLE, count * size - 1))
            before = [*model.holders]
            some = pages.take(number, after)
            assert len(set(some.tolist())) == len(some) == number * size
            assert not any(before[i] or model.kept[i] for i in some)
        if what in ("take", "hold"):
            if what == "hold":
                pages.hold(some)
            held.append(some)
            for i in some:
                model.holders[i] += 1
        if what == "release" and held:
            some = held.pop(data.draw(st.integers(0, len(held) - 1)))
            pages.release(some)
            for i in some:
                model.holders[i] -= 1
        if what in ("keep", "forget"):
            getattr(pages, what)(some)
            for i in some:
                model.kept[i] = what == "keep"
        states = model.states()
        assert states == {name: getattr(pages, name) for name in states}
        assert pages.free + pages.held + pages.evictable == count
