"""The tree: what is found again, by whom, and what goes first when room is short."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfunc.history import HOLE, Drop, History, Repos
from kvfunc.serve import eviction
from kvfunc.serve.pages import Pages
from kvfunc.serve.radix import Tree


def ints(values):
    return np.array(values, np.int32)


class World:
    """A tree over a pool, in which every insertion takes new pages."""

    def __init__(self, pages=50, size=1, policy=eviction.by_worth):
        self.pages = Pages(pages, size)
        self.tree = Tree(self.pages, policy, doubling=1000)

    def insert(self, tokens, *events, salt="a", holes=()):
        """Compute a stream whose tokens are integers; the slots that it was given."""
        history = History(len(tokens), events)
        self.tree.use(salt, ints(tokens), history)
        slots = np.full(len(tokens), HOLE, np.int32)
        written = [i for i in range(len(tokens)) if i not in holes]
        taken = self.pages.take(-(-len(written) // self.pages.size))
        slots[written] = taken[:len(written)]
        self.tree.insert(salt, ints(tokens), history, slots)
        self.pages.release(taken)
        return slots.tolist()

    def find(self, tokens, *events, salt="a"):
        return self.tree.find(salt, ints(tokens), History(len(tokens), events)).tolist()


def test_the_longest_shared_prefix_is_found():
    world = World()
    assert world.insert([1, 2, 3, 4]) == [0, 1, 2, 3]
    assert world.insert([1, 2, 9, 9, 9]) == [4, 5, 6, 7, 8]
    assert world.find([1, 2, 3, 4, 5]) == [0, 1, 2, 3, HOLE]
    assert world.find([1, 2, 3]) == [0, 1, 2]
    assert world.find([1, 2, 9, 4]) == [0, 1, 6, HOLE]
    assert world.find([7, 1, 2]) == [HOLE] * 3


def test_what_is_resident_already_is_not_kept_twice():
    world = World(10)
    world.insert([1, 2, 3, 4])
    world.insert([1, 2, 3, 4])
    world.insert([1, 2, 3, 5])
    assert world.find([1, 2, 3, 5]) == [0, 1, 2, 7]
    assert (world.pages.free, world.pages.evictable) == (5, 5)


def test_another_salt_is_another_cache():
    world = World()
    world.insert([1, 2, 3], salt="a")
    assert world.find([1, 2, 3], salt="b") == [HOLE] * 3
    world.insert([1, 2, 3, 4], salt="b")
    assert world.find([1, 2, 3], salt="a") == [0, 1, 2]
    assert world.find([1, 2, 3], salt="b") == [3, 4, 5]


def test_events_before_a_token_are_part_of_the_key():
    world, drop, repos = World(), Drop(3, ((0, 2),)), Repos(3)
    world.insert([1, 2, 3, 4, 5], drop, repos)
    none = [HOLE] * 5
    assert world.find([1, 2, 3, 4, 5], drop, repos) == [0, 1, 2, 3, 4]
    assert world.find([1, 2, 3, 4, 5], drop) == [0, 1, 2, *none[3:]]
    assert world.find([1, 2, 3, 4, 5]) == [0, 1, 2, *none[3:]]
    assert world.find([1, 2, 3, 4, 5], Drop(3, ((0, 1),)), repos) == [0, 1, 2, *none[3:]]
    assert world.find([1, 2, 3, 4, 5], drop, repos, Repos(4)) == [0, 1, 2, 3, 4]  # no event
    assert world.find([1, 2, 3, 4, 5], drop, repos, Drop(4, ((3, 4),))) == [0, 1, 2, 3, HOLE]
    assert world.find([1, 2, 3], drop, repos) == [0, 1, 2]  # they stand behind the last token


def test_requests_with_and_without_events_share_what_stands_before_the_first():
    world = World()
    world.insert([1, 2, 3, 4])
    world.insert([1, 2, 3, 4], Drop(2, ((0, 1),)))
    assert world.find([1, 2, 3, 4], Drop(2, ((0, 1),))) == [0, 1, 6, 7]
    assert world.find([1, 2, 3, 4]) == [0, 1, 2, 3]


def test_a_repos_copies_nothing():
    world = World()
    events = Drop(4, ((1, 3),)), Repos(4)
    world.insert([1, 2, 3, 4])
    before = world.pages.free
    assert world.find([1, 2, 3, 4, 5], *events) == [0, 1, 2, 3, HOLE]
    assert world.pages.free == before


def test_holes_are_found_and_filled():
    world = World()
    world.insert([1, 2, 3, 4], Drop(2, ((1, 2),)), holes=[1])
    assert world.find([1, 2, 3, 5], Drop(2, ((1, 2),))) == [0, HOLE, 1, HOLE]
    assert world.insert([1, 2]) == [3, 4]
    assert world.find([1, 2, 3, 4], Drop(2, ((1, 2),))) == [0, 4, 1, 2]


def test_a_branch_leaves_a_page_in_its_middle_and_shares_its_slots():
    world = World(4, size=4)
    world.insert([1, 2, 3, 4, 5, 6])
    world.insert([1, 2, 3, 9], holes=[0, 1, 2])
    assert world.find([1, 2, 3, 9]) == [0, 1, 2, 8]
    assert world.pages.evictable == 3


def test_dropped_tokens_lose_their_kv_first():
    world = World(9)
    world.insert([1, 2, 3, 4, 5, 6, 7], Drop(5, ((1, 3),)))
    world.insert([8, 9])
    assert world.tree.evict(2) == 2
    assert world.find([1, 2, 3, 4, 5, 6, 7], Drop(5, ((1, 3),))) == [0, HOLE, HOLE, 3, 4, 5, 6]
    assert world.find([8, 9]) == [7, 8]


def test_what_one_branch_dropped_and_another_sees_is_not_dropped():
    world = World(10)
    world.insert([1, 2, 3, 4])
    world.insert([1, 2, 3, 5], Drop(3, ((1, 2),)), holes=[0, 1, 2])
    world.insert([7, 8], Drop(1, ((0, 1),)))
    world.tree.evict(1)
    assert world.find([1, 2, 3, 4]) == [0, 1, 2, 3]
    assert world.find([7, 8], Drop(1, ((0, 1),))) == [HOLE, 6]


def test_what_many_branches_share_goes_after_what_one_has():
    world = World(20)
    world.insert([1, 2, 3])
    world.insert([1, 2, 4])
    world.insert([5, 6, 7])
    world.tree.evict(5)
    assert world.find([1, 2])[0] != HOLE and world.find([5, 6, 7]) == [HOLE] * 3


def test_least_recently_used_goes_from_its_end():
    world = World(9, policy=eviction.lru)
    for token in (1, 2, 3):
        world.insert([token] * 3)
    world.find([1] * 3)  # looking is no use
    world.tree.evict(2)
    assert world.find([1] * 3) == [0, HOLE, HOLE]
    world.insert([2] * 2)
    world.tree.evict(4)
    assert [world.find([t] * 3).count(HOLE) for t in (1, 2, 3)] == [3, 1, 2]


def test_dropped_first_and_then_least_recently_used():
    world = World(9, policy=eviction.dropped_first)
    world.insert([1] * 3)
    world.insert([2] * 6, Drop(4, ((1, 3),)))
    world.tree.evict(4)
    assert world.find([1] * 3) == [0, HOLE, HOLE]
    assert world.find([2] * 6, Drop(4, ((1, 3),))) == [3, HOLE, HOLE, 6, 7, 8]


@pytest.mark.parametrize("policy", eviction.POLICIES.values(), ids=eviction.POLICIES)
def test_what_a_request_holds_is_not_evicted(policy):
    world = World(6, policy=policy)
    world.insert([1, 2, 3])
    world.insert([4, 5, 6])
    world.pages.hold(ints([0, 1, HOLE]))
    assert world.tree.evict(6) == 4
    assert world.find([1, 2, 3]) == [0, 1, HOLE]
    world.pages.release(ints([0, 1]))
    assert world.tree.evict(6) == 2
    assert world.pages.free == 6


def test_a_page_goes_with_all_its_tokens_or_stays():
    world = World(4, size=4)
    world.insert([1] * 8, Drop(8, ((2, 4),)))
    world.insert([2] * 8)
    assert world.tree.evict(1) == 4
    assert [world.find([t] * 8).count(HOLE) for t in (1, 2)] in ([4, 0], [0, 4])


def test_a_conversation_that_goes_on_regularly_outlives_others_that_ended():
    gap = eviction.Gap()
    for _ in range(100):
        gap.observe(10)
    chances = [gap.chance(age) for age in (0, 5, 10, 20, 50, 1000)]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] == pytest.approx(0.9) and chances[-1] < 1e-9


def test_an_empty_tree_holds_nothing():
    world = World(6)
    world.insert([1, 2, 3])
    world.insert([1, 2, 4], salt="b")
    world.tree.clear()
    assert world.pages.free == 6 and world.find([1, 2, 3]) == [HOLE] * 3
    assert world.tree.evict(3) == 0


EVENTS = [(), (Drop(2, ((0, 1),)),), (Drop(2, ((0, 2),)), Repos(2)), (Repos(3),),
          (Drop(4, ((1, 3),)),), (Drop(4, ((1, 3),)), Repos(4), Drop(6, ((4, 5),)))]


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3), st.sampled_from(list(eviction.POLICIES.values())), st.data())
def test_whatever_is_found_was_written_for_the_same_key(size, policy, data):
    """Against a plain dictionary: slot -> (salt, the tokens and events up to the token)."""
    world, written = World(12, size, policy), {}
    for _ in range(data.draw(st.integers(1, 12))):
        salt = data.draw(st.sampled_from("ab"))
        tokens = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))
        history = History(len(tokens), [e for e in data.draw(st.sampled_from(EVENTS))
                                        if e.at < len(tokens)])

        def key(i, salt=salt, tokens=tokens, history=history):
            return salt, tuple(tokens[:i + 1]), history.events_between(0, i + 1)

        found = world.find(tokens, *history.events, salt=salt)
        for i, slot in enumerate(found):
            assert slot == HOLE or written[slot] == key(i)
        missing = [i for i, slot in enumerate(found) if slot == HOLE]
        missing = [i for i in missing if data.draw(st.integers(0, 3))]  # some stay holes
        mine = ints([slot for slot in found if slot != HOLE])
        world.pages.hold(mine)
        world.tree.use(salt, ints(tokens), history)
        wanted = -(-len(missing) // size)
        if wanted > world.pages.free:
            world.tree.evict(wanted - world.pages.free)
        if wanted <= world.pages.free:
            taken = world.pages.take(wanted)
            for i, slot in zip(missing, taken, strict=False):
                found[i] = int(slot)
                written[int(slot)] = key(i)
            world.tree.insert(salt, ints(tokens), history, ints(found))
            assert world.find(tokens, *history.events, salt=salt) == found
            world.pages.release(taken)
        world.pages.release(mine)
        kept = [slot for node in world.tree._nodes() for slot in node.slots if slot != HOLE]
        assert len(kept) == len(set(kept)) == int(world.pages._kept.sum())
        assert_well_formed(world.tree)
    assert world.pages.held == 0


def assert_well_formed(tree):
    for root in tree._roots.values():
        assert root.children
        for node in itertools.islice(root.walk(), 1, None):
            assert len(node.tokens) == len(node.slots) > 0
            assert node.parent.children[node.key] is node and node.start == node.parent.stop
            assert node.children or (node.slots != HOLE).any()
            assert len(node.children) != 1 or {node.last_use} != {
                child.last_use for child in node.children.values()}
