"""Slots, their users, and the conversations that are found again."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfunc.history import HOLE, Drop, History, Repos
from kvfunc.serve.store import Conversation, Store


def ints(values):
    return np.array(values, np.int32)


def kept(store, tokens, *events, salt="a", holes=()):
    """Take slots for a conversation and keep it."""
    slots = np.full(len(tokens), HOLE, np.int32)
    with_kv = [i for i in range(len(tokens)) if i not in holes]
    slots[with_kv] = store.take(len(with_kv))
    made = Conversation(salt, ints(tokens), History(len(tokens), events), slots)
    store.keep(made)
    return made


def found(store, tokens, *events, salt="a"):
    match = store.find(salt, ints(tokens), History(len(tokens), events))
    assert match.length == len(match.slots)
    return match.slots.tolist()


def test_the_longest_shared_prefix_is_found():
    store = Store(20)
    kept(store, [1, 2, 3, 4])
    kept(store, [1, 2, 9, 9, 9])
    assert found(store, [1, 2, 3, 4, 5]) == [0, 1, 2, 3]
    assert found(store, [1, 2, 3]) == [0, 1, 2]
    assert found(store, [1, 2, 9, 4]) == [4, 5, 6]
    assert found(store, [7, 1, 2]) == found(store, []) == []


def test_of_equal_prefixes_the_last_used_is_found():
    store = Store(20)
    kept(store, [1, 2, 3])
    kept(store, [1, 2, 4])
    assert found(store, [1, 2, 5]) == [3, 4]


def test_another_salt_is_another_cache():
    store = Store(20)
    kept(store, [1, 2, 3], salt="a")
    assert found(store, [1, 2, 3], salt="b") == []
    kept(store, [1, 2, 3, 4], salt="b")
    assert found(store, [1, 2, 3], salt="a") == [0, 1, 2]


def test_events_before_a_token_are_part_of_the_key():
    store, drop, repos = Store(20), Drop(3, ((0, 2),)), Repos(3)
    kept(store, [1, 2, 3, 4, 5], drop, repos)
    assert found(store, [1, 2, 3, 4, 5], drop, repos) == [0, 1, 2, 3, 4]
    assert found(store, [1, 2, 3, 4, 5], drop) == [0, 1, 2]
    assert found(store, [1, 2, 3, 4, 5]) == [0, 1, 2]
    assert found(store, [1, 2, 3, 4, 5], Drop(3, ((0, 1),)), repos) == [0, 1, 2]
    assert found(store, [1, 2, 3, 4, 5], drop, repos, Repos(4)) == [0, 1, 2, 3, 4]  # no event
    assert found(store, [1, 2, 3, 4, 5], drop, repos, Drop(4, ((3, 4),))) == [0, 1, 2, 3]
    assert found(store, [1, 2, 3], drop, repos) == [0, 1, 2]  # they stand behind the last token


def test_holes_are_part_of_what_is_found():
    store = Store(20)
    kept(store, [1, 2, 3, 4], Drop(2, ((1, 2),)), holes=[1])
    assert found(store, [1, 2, 3, 5], Drop(2, ((1, 2),))) == [0, HOLE, 1]


def test_slots_are_free_when_nobody_uses_them():
    store = Store(5)
    slots = store.take(3)
    assert slots.tolist() == [0, 1, 2] and slots.dtype == np.int32 and store.free == 2
    store.hold(ints([1, HOLE, 2]))
    store.release(slots)
    assert store.free == 3
    assert store.take(3).tolist() == [0, 3, 4]
    store.release(ints([HOLE, 1]))
    assert store.free == 1
    assert store.take(0).tolist() == []


def test_the_oldest_conversations_make_room_and_no_more_of_them_than_needed():
    store = Store(9)
    for token in (1, 2, 3):
        kept(store, [token] * 3)
    assert store.free == 0
    assert store.take(2).tolist() == [0, 1]
    assert [found(store, [token] * 3) for token in (1, 2, 3)] == [[], [3, 4, 5], [6, 7, 8]]
    assert store.take(1).tolist() == [2]
    assert store.take(4).tolist() == [3, 4, 5, 6]
    assert found(store, [3] * 3) == []


def test_what_a_request_holds_survives_the_conversation():
    store = Store(6)
    one = kept(store, [1, 2, 3, 4])
    store.hold(one.slots[:2])
    assert store.take(5).tolist() == [2, 3, 4, 5]  # fewer than asked for: 0 and 1 are held
    assert found(store, [1, 2, 3, 4]) == []
    assert store.free == 0


def test_a_conversation_replaces_what_it_extends():
    store = Store(10)
    first = kept(store, [1, 2, 3])
    store.hold(first.slots)
    longer = np.concatenate([first.slots, store.take(2)])
    store.keep(Conversation("a", ints([1, 2, 3, 4, 5]), History(5), longer))
    assert found(store, [1, 2, 3, 4, 5, 6]) == [0, 1, 2, 3, 4]
    assert store.free == 5
    assert store.take(10).tolist() == list(range(10))  # one conversation gone: all are free


def test_a_conversation_takes_over_what_it_lacks_from_the_one_it_extends():
    store = Store(10)
    first = kept(store, [1, 2, 3])
    store.hold(first.slots[2:])
    longer = np.concatenate([ints([HOLE, HOLE]), first.slots[2:], store.take(1)])
    store.keep(Conversation("a", ints([1, 2, 3, 4]), History(4), longer))
    assert found(store, [1, 2, 3, 4]) == [0, 1, 2, 3]
    assert store.free == 6
    assert store.take(10).tolist() == list(range(10))


def test_what_differs_in_salt_or_events_or_tokens_is_not_replaced():
    store, drop = Store(20), Drop(1, ((0, 1),))
    kept(store, [1, 2, 3], salt="b")
    kept(store, [1, 2, 3], drop)
    kept(store, [1, 2, 4])
    kept(store, [1, 2, 3, 5])
    assert found(store, [1, 2, 3, 9], salt="b") == [0, 1, 2]
    assert found(store, [1, 2, 3, 9], drop) == [3, 4, 5]
    assert found(store, [1, 2, 4, 9]) == [6, 7, 8]
    assert found(store, [1, 2, 3, 9]) == [9, 10, 11]


def key(tokens, history):
    """The stream as a radix key: for each token, the events before it and its id."""
    return [(tuple(event for event in history.events if event.at == at), int(token))
            for at, token in enumerate(tokens)]


requests = st.tuples(
    st.sampled_from("ab"), st.lists(st.integers(0, 1), min_size=1, max_size=9),
    st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.integers(0, 5)), max_size=2),
    st.integers(0, 9), st.sets(st.integers(0, 8), max_size=3))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sampled_from([14, 200]), st.lists(requests, max_size=12))
def test_a_slot_always_holds_what_its_finders_think(size, asked):
    """Random requests as the engine makes them; `content` is what their KV would be."""
    store, content = Store(size), {}
    conversations = []  # (salt, key) of all that were ever kept
    for salt, tokens, schedule, done, holes in asked:
        events = [Drop(at, ((min(start, at - 1), at),)) if is_drop else Repos(at)
                  for at, is_drop, start in sorted(schedule) if at <= len(tokens)]
        history = History(len(tokens), events)
        stream = key(tokens, history)
        match = store.find(salt, ints(tokens), history)
        longest = max((shared(stream, other) for its_salt, other in conversations
                       if its_salt == salt), default=0)
        # In the small store some made room for others.
        assert match.length <= longest if size == 14 else match.length == longest
        for index, slot in enumerate(match.slots):
            assert slot == HOLE or content[slot] == (salt, stream[: index + 1])

        slots = np.full(len(tokens), HOLE, np.int32)
        slots[: match.length] = match.slots
        store.hold(slots)
        lacking = [i for i in np.flatnonzero(slots == HOLE) if i not in holes]
        new = store.take(len(lacking))
        slots[lacking[: len(new)]] = new
        for index in lacking[: len(new)]:
            content[slots[index]] = (salt, stream[: index + 1])
        done = min(done, len(tokens))
        store.release(slots[done:])
        if done:
            made = Conversation(salt, ints(tokens[:done]),
                                History(done, [e for e in history.events if e.at < done]),
                                slots[:done])
            store.keep(made)
            conversations.append((salt, stream[:done]))
            assert store.find(salt, made.tokens, made.history).length == done
    assert len(store.take(size)) == size  # nobody holds anything any more


def shared(one, other):
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)
