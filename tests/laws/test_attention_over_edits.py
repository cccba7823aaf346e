"""Attention over an edited context, against float64 and against itself (Laws 4, 5, 6, 8)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from programs import (
    AS_BITS,
    DTYPES,
    FLOATS,
    HEAD_DIM,
    OPTIONS,
    QUANTIZED,
    ROPES,
    SLOTS,
    Vectors,
    verbs,
)

from kvfunc import KVCache, Quantized, Rows

pytestmark = pytest.mark.usefixtures("each_attention")

# Queries are cast to bfloat16 with bfloat16 keys; with quantised ones they stay float32.
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2, jnp.uint16: 1e-2,
             jnp.int8: 1e-5, jnp.float8_e4m3fn: 1e-5, jnp.uint8: 1e-5}
every_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
every_float = pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
every_rope = pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def expected(life, rope, vectors, stored_k, stored_v, **options):
    """In float64: un-rotated keys, rotated to where each query sees them.

    From float32 storage the keys are the original ones; from less, they are what was stored.
    """
    if not isinstance(stored_k, Quantized) and stored_k.dtype == jnp.float32:
        return oracle.attend_as_seen(life, rope, *vectors, **options)
    k = oracle.unrotate(rope, programs.numbers(stored_k), life.births)
    return oracle.attend_as_seen(life, rope, vectors.q, k, programs.numbers(stored_v), **options)


def check_cache(ops, rope, seed, dtype, **options):
    vectors, life = Vectors.random(seed), programs.life(ops)
    cache, outputs = programs.play(ops, rope, vectors, dtype, **options)
    k, v = jax.tree.map(lambda x: x[:len(life.births)], (cache.kv.k[0], cache.kv.v[0]))
    np.testing.assert_allclose(outputs, expected(life, rope, vectors, k, v, **options),
                               rtol=0, atol=TOLERANCE[dtype])


@every_float
@every_rope
@settings(max_examples=25)
@given(ops=programs.programs(), seed=programs.seeds)
def test_attention_after_drops_and_repos_is_that_of_keys_rotated_again_in_float64(
        rope, dtype, ops, seed):
    check_cache(ops, rope, seed, dtype)


@pytest.mark.parametrize("dtype", (QUANTIZED | AS_BITS).values(), ids=QUANTIZED | AS_BITS)
@settings(max_examples=15)
@given(ops=programs.programs(), seed=programs.seeds)
def test_quantised_keys_and_bits_attend_as_the_numbers_that_they_stand_for(dtype, ops, seed):
    check_cache(ops, ROPES["llama3"], seed, dtype)


@pytest.mark.parametrize("options", [OPTIONS["window"], OPTIONS["all"]], ids=["window", "all"])
@settings(max_examples=25)
@given(ops=programs.programs(), seed=programs.seeds)
def test_windows_softcaps_and_sinks_count_positions_as_they_are_now(options, ops, seed):
    check_cache(ops, ROPES["yarn"], seed, jnp.float32, **options)


@every_option
@settings(max_examples=25)
@given(ops=programs.programs(repos=3), seed=programs.seeds, data=st.data())
def test_rows_of_a_history_give_each_query_the_shifts_of_its_own_stage(options, ops, seed, data):
    rope, vectors, life = ROPES["yarn"], Vectors.random(seed), programs.life(ops)
    history = programs.history(ops)
    slots = data.draw(programs.orders, label="slots")[:history.tokens]
    chosen = data.draw(st.sets(st.integers(0, history.tokens - 1), min_size=1), label="queries")
    queries = np.array(sorted(chosen))
    k, v = programs.pool(rope, vectors, history.births, slots, jnp.float32)
    out = programs.attend(rope, vectors, queries, history.births[queries], k, v,
                          history.rows(queries, slots), **options)
    np.testing.assert_allclose(out, expected(life, rope, vectors, k, v, **options)[queries],
                               rtol=0, atol=TOLERANCE[jnp.float32])


def same_attention_after(edit, ops, rope, seed, dtype):
    """The next tokens' attention must be the same over the played cache and the edited one."""
    vectors = Vectors.random(seed)
    cache, _ = programs.play(ops, rope, vectors, dtype)
    tokens = int(cache.length)
    _, plain = programs.append(cache, rope, vectors, tokens, 5)
    _, edited = programs.append(edit(cache), rope, vectors, tokens, 5)
    np.testing.assert_allclose(edited, plain, rtol=0, atol=TOLERANCE[dtype])


@every_dtype
@settings(max_examples=20)
@given(ops=programs.programs(), seed=programs.seeds, order=programs.orders)
def test_any_physical_order_of_slots_attends_the_same(dtype, ops, seed, order):
    same_attention_after(lambda cache: programs.reordered(cache, order), ops, ROPES["llama3"], seed,
                         dtype)


@every_dtype
@settings(max_examples=20)
@given(ops=programs.programs(), seed=programs.seeds, order=programs.orders)
@example(seed=0, order=np.arange(SLOTS),  # neighbours born at 3 and 4 that now stand at 1 and 4
         ops=[("append", 4), ("drop", ((1, 3),)), ("repos",), ("append", 3), ("drop", ((4, 6),))])
def test_compaction_from_any_order_attends_the_same(dtype, ops, seed, order):
    same_attention_after(lambda cache: verbs.compact(programs.reordered(cache, order))[0], ops,
                         ROPES["yarn"], seed, dtype)


@every_dtype
@settings(max_examples=20)
@given(ops=programs.programs(), seed=programs.seeds)
def test_drops_attend_like_a_cache_of_the_gathered_live_slots(dtype, ops, seed):
    def gathered(cache):
        live, fresh = np.flatnonzero(cache.live), programs.empty_cache(dtype)

        def into(new, old):
            rows = np.array(new)
            rows[:len(live)] = np.asarray(old)[live]
            return jnp.asarray(rows)

        return KVCache(kv=jax.tree.map(into, fresh.kv, cache.kv),
                       birth=into(fresh.birth, cache.birth),
                       position=into(fresh.position, cache.position),
                       next_position=cache.next_position)

    same_attention_after(gathered, ops, ROPES["default"], seed, dtype)


@every_dtype
@settings(max_examples=20)
@given(ops=programs.programs(), seed=programs.seeds, data=st.data())
def test_append_in_one_chunk_is_append_in_any_split(dtype, ops, seed, data):
    split = []
    for op in ops:
        while op[0] == "append" and op[1] > 1:
            first = data.draw(st.integers(1, op[1]))
            split.append(("append", first))
            op = ("append", op[1] - first)
        split += [op] if op != ("append", 0) else []
    vectors = Vectors.random(seed)
    whole_cache, whole = programs.play(ops, ROPES["default"], vectors, dtype)
    split_cache, parts = programs.play(split, ROPES["default"], vectors, dtype)
    assert programs.same_bits(split_cache, whole_cache)
    np.testing.assert_allclose(parts, whole, rtol=0, atol=TOLERANCE[dtype])


@every_dtype
@settings(max_examples=15)
@given(requests=st.lists(programs.programs(tokens=10, repos=2), min_size=3, max_size=3),
       seed=programs.seeds, order=programs.orders)
def test_requests_with_different_shifts_in_one_call_equal_one_call_each(dtype, requests, seed,
                                                                         order):
    rope, vectors = ROPES["llama3"], Vectors.random(seed)
    histories = [programs.history(ops) for ops in requests]
    starts = np.cumsum([0, *(history.tokens for history in histories)])
    slots = order[:starts[-1]]
    births = np.concatenate([history.births for history in histories])
    k, v = programs.pool(rope, vectors, births, slots, dtype)
    tables = [history.rows(np.arange(history.tokens), slots[start:start + history.tokens])
              for history, start in zip(histories, starts, strict=False)]
    together = programs.attend(rope, vectors, np.arange(len(births)), births, k, v,
                               Rows.concatenate(tables))
    for table, start, history in zip(tables, starts, histories, strict=False):
        tokens = start + np.arange(history.tokens)
        alone = programs.attend(rope, vectors, tokens, history.births, k, v, table)
        np.testing.assert_allclose(together[tokens], alone, rtol=0, atol=1e-6)


def what_is_seen(cache: KVCache, **options) -> dict[int, float]:
    """Slot -> weight in the attention of the next token, whose query and key are zero.

    For caches in which the value in slot i is the i-th unit vector; the new token's is zero.
    """
    nothing = Vectors(*(np.zeros_like(x) for x in Vectors.random(0)))
    _, out = programs.append(cache, ROPES["default"], nothing, 0, 1, **options)
    np.testing.assert_allclose(out[0], np.broadcast_to(out[0, 0], out[0].shape), rtol=0, atol=1e-6)
    return {slot: round(weight, 5) for slot, weight in enumerate(out[0, 0].tolist()) if weight}


def unit_values(count: int) -> KVCache:
    """`count` tokens with random keys; the value in slot i is the i-th unit vector."""
    vectors = Vectors.random(0)
    units = np.zeros_like(vectors.v)
    units[np.arange(count), :, np.arange(count)] = 1
    cache, _ = programs.append(programs.empty_cache(jnp.float32), ROPES["default"],
                               vectors._replace(v=units), 0, count)
    return cache


def test_two_separated_drops_then_repos_turn_abcdefghj_into_abefhj_at_positions_0_to_5():
    text = "abcdefghj"
    cache = unit_values(len(text))
    cache, _ = verbs.drop(cache, programs.raw_mask({text.index("c"), text.index("d")}))
    cache, told = verbs.drop(cache, programs.raw_mask({text.index("g")}))
    assert int(told.dropped) == 1
    cache, moved = verbs.repos(cache)
    live = [(letter, int(position), int(birth)) for letter, position, birth in
            zip(text, cache.position, cache.birth, strict=False) if position >= 0]
    assert live == [("a", 0, 0), ("b", 1, 1), ("e", 2, 4), ("f", 3, 5), ("h", 4, 7), ("j", 5, 8)]
    assert (int(moved.moved), int(moved.displacement), int(cache.next_position)) == (4, 3, 6)
    # The tenth token sees these six and itself, each with a seventh.
    assert what_is_seen(cache) == dict.fromkeys([0, 1, 4, 5, 7, 8], 0.14286)


def test_repos_brings_keys_back_into_a_window():
    cache, _ = verbs.drop(unit_values(9), programs.raw_mask(range(4, 8)))
    assert what_is_seen(cache, window=5) == {8: 0.5}  # the query stands at 9, token 8 at 8
    cache, _ = verbs.repos(cache)
    # Now it stands at 5, token 8 at 4, and the first four where they were: 0 is too far.
    assert what_is_seen(cache, window=5) == {1: 0.2, 2: 0.2, 3: 0.2, 8: 0.2}


def test_an_all_zero_key_counts_as_a_slot():
    zeros = Vectors(*(np.zeros_like(x) for x in Vectors.random(0)))
    cache, _ = programs.append(programs.empty_cache(jnp.float32), ROPES["default"], zeros, 0, 2)
    cache, _ = programs.append(cache, ROPES["default"], zeros._replace(v=zeros.v + 1), 2, 1)
    assert (int(cache.length), int(cache.live.sum()), int(cache.next_position)) == (3, 3, 3)
    # The query is zero, so all three keys and its own weigh a quarter; one value is 1.
    assert what_is_seen(cache) == dict.fromkeys(range(HEAD_DIM), 0.25)


@every_dtype
def test_nan_in_slots_that_are_dropped_or_not_written_never_leaks(dtype):
    vectors = Vectors.random(1)
    cache, _ = programs.append(programs.empty_cache(dtype), ROPES["default"], vectors, 0, 20)
    cache, _ = verbs.drop(cache, programs.raw_mask({0, 5, 6, 7, 19}))
    poisoned = programs.only_in(cache.live, cache.kv)
    for count in (1, 12):
        _, clean = programs.append(cache, ROPES["default"], vectors, 20, count)
        _, out = programs.append(dataclasses.replace(cache, kv=poisoned), ROPES["default"], vectors,
                                 20, count)
        assert np.isfinite(out).all()
        np.testing.assert_array_equal(out, clean)
