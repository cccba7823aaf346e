"""The verbs under jit, vmap and scan: the same as eagerly, with flags in the place of errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import HEAD_DIM, KV_HEADS, same_bits

import kvfunc
from kvfunc import KVCache

SLOTS, STEPS, CHUNK = 24, 8, 5
NOTHING, APPEND, DROP, KEEP, REPOS, COMPACT = range(6)


def empty_cache(dtype=jnp.float32) -> KVCache:
    return kvfunc.init(2, SLOTS, KV_HEADS, HEAD_DIM, dtype)


def fresh_kv(step: int, count: int) -> tuple[jax.Array, ...]:
    """K of two layers for the tokens of one step, exact in any order; V is twice as much."""
    tokens = jnp.arange(CHUNK, dtype=jnp.float32) + 10 * jnp.asarray(step, jnp.float32)
    dims = jnp.arange(KV_HEADS * HEAD_DIM, dtype=jnp.float32).reshape(1, KV_HEADS, HEAD_DIM)
    k = ((dims - 13) * tokens[:, None, None])[:count]
    return k, k + 0.5


def eagerly(program, dtype) -> KVCache:
    cache = empty_cache(dtype)
    for step, (verb, count, mask) in enumerate(program):
        if verb == APPEND:
            k = fresh_kv(step, count)
            cache, _ = kvfunc.append(cache, k, [2 * x for x in k])
        elif verb in (DROP, KEEP):
            function = kvfunc.drop if verb == DROP else kvfunc.keep
            cache, _ = function(cache, jnp.asarray(mask) & cache.written)
        elif verb in (REPOS, COMPACT):
            cache, _ = (kvfunc.repos if verb == REPOS else kvfunc.compact)(cache)
    return cache


def in_a_scan(program, dtype) -> KVCache:
    def append(cache, step, count, mask):
        cache, new = kvfunc.reserve(cache, CHUNK, count)
        k = fresh_kv(step, CHUNK)
        return kvfunc.write(cache, new.slots, k, [2 * x for x in k])

    branches = [
        lambda cache, step, count, mask: cache,
        append,
        lambda cache, step, count, mask: kvfunc.drop(cache, mask & cache.written)[0],
        lambda cache, step, count, mask: kvfunc.keep(cache, mask)[0],
        lambda cache, step, count, mask: kvfunc.repos(cache)[0],
        lambda cache, step, count, mask: kvfunc.compact(cache)[0],
    ]

    def one(cache, step):
        index, (verb, count, mask) = step
        return jax.lax.switch(verb, branches, cache, index, count, mask), None

    cache, _ = jax.lax.scan(one, empty_cache(dtype), (jnp.arange(STEPS), program))
    return cache


@functools.partial(jax.jit, static_argnums=1)
def batch_of_scans(programs, dtype) -> KVCache:
    return jax.vmap(functools.partial(in_a_scan, dtype=dtype))(programs)


@st.composite
def scripts(draw):
    """STEPS of (verb, count, mask); there is always room for the appends."""
    script, free = [], SLOTS
    for _ in range(STEPS):
        verb = draw(st.integers(0, 5))
        count = draw(st.sampled_from([2, CHUNK]))
        verb = NOTHING if verb == APPEND and count > free else verb
        free -= count if verb == APPEND else 0
        bits = draw(st.integers(0, 2**SLOTS - 1))
        script.append((verb, count, [bool(bits >> slot & 1) for slot in range(SLOTS)]))
    return script


def packed(script):
    verb, count, mask = zip(*script, strict=True)
    return np.array(verb, np.int32), np.array(count, np.int32), np.array(mask)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8, jnp.float8_e4m3fn])
@settings(max_examples=8)
@given(scripts=st.lists(scripts(), min_size=3, max_size=3))
def test_programs_are_the_same_eagerly_and_as_a_batch_of_compiled_scans(dtype, scripts):
    expected = [eagerly(script, dtype) for script in scripts]
    batch = batch_of_scans(jax.tree.map(lambda *x: np.stack(x), *map(packed, scripts)), dtype)
    for i, cache in enumerate(expected):
        assert same_bits(jax.tree.map(lambda x, i=i: x[i], batch), cache)


def full_but_two() -> KVCache:
    cache, _ = kvfunc.reserve(empty_cache(), SLOTS - 2)
    return kvfunc.drop(cache, jnp.arange(5))[0]


def test_appending_beyond_capacity_is_an_error_on_the_host_and_a_flag_under_jit():
    cache, k = full_but_two(), fresh_kv(0, 3)
    with pytest.raises(ValueError, match="no room for 3 more tokens: 2 of capacity 24 slots are fre"
                                         "e; drop and compact, or init with more slots"):
        kvfunc.append(cache, k, k)
    unchanged, told = jax.jit(kvfunc.append)(cache, k, k)
    assert bool(told.overflow)
    assert told.slots.tolist() == [SLOTS] * 3
    assert same_bits(unchanged, cache)
    fitting, told = jax.jit(kvfunc.append)(cache, *[[x[:2] for x in k]] * 2)
    assert not bool(told.overflow)
    assert int(fitting.length) == SLOTS


@pytest.mark.parametrize("which, unwritten", [
    ([0, SLOTS - 2], 1), ([SLOTS - 1, SLOTS - 2], 2), ([3, SLOTS], 1), ([-1, 3], 1),
])
def test_dropping_what_is_not_written_is_an_error_on_the_host_and_counted_under_jit(which,
                                                                                   unwritten):
    cache, which = full_but_two(), jnp.array(which)
    with pytest.raises(ValueError, match=f"{unwritten} of the slots in `which` hold no token: 22 of"
                                         " 24 slots are written; drop written slots only"):
        kvfunc.drop(cache, which)
    dropped, told = jax.jit(kvfunc.drop)(cache, which)
    assert int(told.unwritten) == unwritten
    inside = [slot for slot in which.tolist() if 0 <= slot < SLOTS - 2]
    expected, _ = kvfunc.drop(cache, jnp.array(inside, jnp.int32))
    assert same_bits(dropped, expected)


def test_a_mask_over_unwritten_slots_is_the_same_error():
    cache, everything = full_but_two(), jnp.ones(SLOTS, bool)
    with pytest.raises(ValueError, match="2 of the slots in `which` hold no token"):
        kvfunc.drop(cache, everything)
    dropped, told = jax.jit(kvfunc.drop)(cache, everything)
    assert (int(told.unwritten), int(dropped.live.sum())) == (2, 0)


def test_layers_must_match_and_storage_must_be_possible():
    k = fresh_kv(0, 2)
    with pytest.raises(ValueError, match="one array for each of 2 layers, got 1 and 2"):
        kvfunc.append(empty_cache(), k[:1], k)
    with pytest.raises(ValueError, match="slots must be at least 1, got 0"):
        kvfunc.init(1, 0, KV_HEADS, HEAD_DIM)
    with pytest.raises(ValueError, match="dtype must be a float type"):
        kvfunc.init(1, SLOTS, KV_HEADS, HEAD_DIM, jnp.int32)


@pytest.mark.parametrize("count", [-1, 3])
def test_a_count_outside_of_the_size_is_an_error_on_the_host_and_a_flag_under_jit(count):
    cache = kvfunc.init(1, 8, 1, 1, jnp.float32)
    with pytest.raises(ValueError, match=f"count must be between 0 and size=2, got {count}"):
        kvfunc.reserve(cache, 2, count)
    same, told = jax.jit(kvfunc.reserve, static_argnums=1)(cache, 2, jnp.int32(count))
    assert bool(told.overflow)
    assert (int(same.length), int(same.next_position)) == (0, 0)
