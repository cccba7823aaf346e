"""The life of one cache, as a table that a person can read. The laws are in tests/laws."""

import jax.numpy as jnp
import numpy as np

import kvfunc
from kvfunc.rows import Rows


def shown(cache):
    """Each slot as birth->position; `x` is dropped, `.` holds no token; then `next_position`."""
    slots = [
        "." if birth == kvfunc.KVCache.UNWRITTEN else
        f"{birth}->{'x' if position == kvfunc.KVCache.DROPPED else position}"
        for birth, position in zip(cache.birth.tolist(), cache.position.tolist(), strict=True)]
    return f"{' '.join(slots)} | {cache.next_position}"


def keys(cache):
    return cache.kv.k[0][:, 0, 0].tolist()


def grown(cache, *numbers):
    """Append tokens whose keys and values are these numbers."""
    new = [jnp.array(numbers, jnp.float32)[:, None, None]]
    return kvfunc.append(cache, new, new)


def five_tokens():
    return grown(kvfunc.init(1, 7, 1, 1, jnp.float32), 10, 11, 12, 13, 14)[0]


def test_an_empty_cache():
    cache = kvfunc.init(layers=2, slots=3, kv_heads=1, head_dim=4)
    assert shown(cache) == ". . . | 0"
    assert (cache.capacity, int(cache.length), len(cache.kv.k)) == (3, 0, 2)


def test_append_drop_repos_append_compact():
    cache = five_tokens()
    assert shown(cache) == "0->0 1->1 2->2 3->3 4->4 . . | 5"
    cache, dropped = kvfunc.drop(cache, jnp.array([1, 2]))
    assert shown(cache) == "0->0 1->x 2->x 3->3 4->4 . . | 5"
    assert (int(dropped.dropped), int(dropped.unwritten)) == (2, 0)
    cache, moved = kvfunc.repos(cache)
    assert shown(cache) == "0->0 1->x 2->x 3->1 4->2 . . | 3"
    assert (int(moved.moved), int(moved.displacement)) == (2, 2)
    assert cache.shift.tolist() == [0, 0, 0, 2, 2, 0, 0]
    cache, new = grown(cache, 20)
    assert shown(cache) == "0->0 1->x 2->x 3->1 4->2 3->3 . | 4"
    assert (new.slots.tolist(), new.births.tolist(), bool(new.overflow)) == ([5], [3], False)
    assert keys(cache) == [10, 11, 12, 13, 14, 20, 0]
    cache, slot_map = kvfunc.compact(cache)
    assert shown(cache) == "0->0 3->1 4->2 3->3 . . . | 4"
    assert slot_map.tolist() == [0, -1, -1, 1, 2, 3, -1]
    assert keys(cache)[:4] == [10, 13, 14, 20]


def test_keep_drops_what_is_outside_of_the_mask():
    mask = jnp.array([True, False, False, True, False, False, True])
    cache, info = kvfunc.keep(five_tokens(), mask)
    assert shown(cache) == "0->0 1->x 2->x 3->3 4->x . . | 5"
    assert int(info.dropped) == 3


def test_reserve_pads_with_slots_outside_of_the_cache():
    cache, new = kvfunc.reserve(five_tokens(), size=4, count=2)
    assert shown(cache) == "0->0 1->1 2->2 3->3 4->4 5->5 6->6 | 7"
    assert new.slots.tolist() == [5, 6, 7, 7]
    assert keys(cache) == [10, 11, 12, 13, 14, 0, 0]


def test_rows_for_new_tokens_are_the_runs_of_live_slots():
    cache, _ = kvfunc.drop(five_tokens(), jnp.array([1]))
    cache, _ = kvfunc.repos(cache)
    cache, new = kvfunc.reserve(cache, size=3, count=2)
    assert shown(cache) == "0->0 1->x 2->1 3->2 4->3 4->4 5->5 | 6"
    rows = kvfunc.rows_for(cache, new)
    table = np.stack([getattr(rows, name) for name in Rows.COLUMNS], -1)
    never = Rows.NEVER
    # q_start, q_len, slot, length, raw, birth, shift, visible_until
    assert table[:3].tolist() == [[0, 2, 0, 1, 0, 0, 0, never],
                                  [0, 2, 2, 3, 1, 2, 1, never],
                                  [0, 2, 5, 2, 4, 4, 0, never]]
    assert not table[3:, [1, 3]].any()  # the others are empty
    assert rows.query_raw.tolist() == [4, 5, Rows.NO_QUERY]
