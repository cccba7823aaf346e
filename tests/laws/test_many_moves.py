"""Many small moves equal one big move: shifts add as integers, so no error adds up."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest
from programs import DTYPES, HEAD_DIM, HEADS, KV_HEADS, ROPES

import kvfunc

MOVES, SURVIVORS, QUERIES = (1, 16, 256, 4096), 64, 8
SLOTS = max(MOVES) + SURVIVORS + QUERIES


@jax.jit
def drop_the_oldest_and_repos_each_time(cache, moves):
    def move(slot, cache):
        cache, _ = kvfunc.drop(cache, jnp.arange(SLOTS) == slot)
        return kvfunc.repos(cache)[0]

    return jax.lax.fori_loop(0, moves, move, cache)


@jax.jit
def drop_all_and_repos_once(cache, moves):
    cache, _ = kvfunc.drop(cache, jnp.arange(SLOTS) < moves)
    return kvfunc.repos(cache)[0]


@functools.lru_cache
def tables(moves: int) -> tuple[kvfunc.KVCache, kvfunc.KVCache]:
    """`moves` tokens and the survivors behind them, after many moves and after one."""
    cache = kvfunc.init(1, SLOTS, 1, 1, jnp.float32)
    cache, _ = kvfunc.reserve(cache, SLOTS, moves + SURVIVORS)
    return drop_the_oldest_and_repos_each_time(cache, moves), drop_all_and_repos_once(cache, moves)


@pytest.mark.parametrize("moves", MOVES)
def test_many_moves_leave_the_same_table_as_one(moves):
    many, one = tables(moves)
    assert programs.same_bits(many, one)
    assert many.shift[moves:moves + SURVIVORS].tolist() == [moves] * SURVIVORS
    assert many.position[moves:moves + SURVIVORS].tolist() == list(range(SURVIVORS))


def error(moves: int, rope, dtype) -> float:
    """Root-mean-square error of attention to the survivors, against float64.

    The survivors are the same whatever was dropped before them; what was dropped holds NaN.
    """
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((SURVIVORS + QUERIES, heads, HEAD_DIM)).astype(np.float32)
               for heads in (HEADS, KV_HEADS, KV_HEADS))
    births = np.concatenate([moves + np.arange(SURVIVORS), SURVIVORS + np.arange(QUERIES)])
    positions = np.arange(SURVIVORS + QUERIES)

    cache, new = kvfunc.reserve(tables(moves)[0], QUERIES)
    assert new.births.tolist() == births[SURVIVORS:].tolist()
    storage = kvfunc.init(1, SLOTS, KV_HEADS, HEAD_DIM, dtype).kv
    cache = dataclasses.replace(cache, kv=jax.tree.map(programs.not_a_number, storage))
    cache = kvfunc.write(cache, jnp.asarray(moves + positions),
                         (rope.rotate(jnp.asarray(k), jnp.asarray(births)),), (jnp.asarray(v),))
    rows = kvfunc.rows_for(cache, new)
    q_born = rope.rotate(jnp.asarray(q[SURVIVORS:]), new.births)
    out = kvfunc.segment_attention(q_born, cache.kv.k[0], cache.kv.v[0], rows, new.births,
                                   rope.rotation(rows.shift))

    if dtype != jnp.float32:
        stored = [programs.numbers(x[0][moves + positions]) for x in (cache.kv.k, cache.kv.v)]
        k, v = oracle.unrotate(rope, stored[0], births), stored[1]
    keys = oracle.rotate(rope, k, positions)
    exact = [oracle.attend(oracle.rotate(rope, q[i, None], [i])[0], keys[:i + 1], v[:i + 1])
             for i in positions[SURVIVORS:]]
    return float(np.sqrt(np.square(np.asarray(out) - exact).mean()))


@pytest.mark.parametrize("dtype, bound", [(jnp.float32, 1e-7), (jnp.bfloat16, 1e-3)], ids=DTYPES)
@pytest.mark.parametrize("rope", [ROPES[name] for name in ("default", "llama3", "yarn")])
def test_the_error_does_not_grow_with_the_number_of_moves(rope, dtype, bound):
    errors = [error(moves, rope, dtype) for moves in MOVES]
    assert max(errors) < bound
    assert max(errors) < 1.5 * errors[0]
