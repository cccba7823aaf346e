"""Many small moves equal one big move: shifts add as integers, so no error adds up."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest
from programs import HEAD_DIM, KV_HEADS, ROPES, Vectors, rotations, verbs

import kvfunc

MOVES, SURVIVORS, QUERIES = (1, 16, 256, 4096), 64, 8
SLOTS = max(MOVES) + SURVIVORS + QUERIES


@jax.jit
def drop_the_oldest_and_repos_each_time(cache, moves):
    def move(slot, cache):
        cache, _ = kvfunc.drop(cache, jnp.arange(SLOTS) == slot)
        return kvfunc.repos(cache)[0]

    return jax.lax.fori_loop(0, moves, move, cache)


@functools.lru_cache
def tables(moves: int) -> tuple[kvfunc.KVCache, kvfunc.KVCache]:
    """`moves` tokens and the survivors behind them, after many moves and after one."""
    cache = kvfunc.init(1, SLOTS, 1, 1, jnp.float32)
    cache, _ = jax.jit(kvfunc.reserve, static_argnums=1)(cache, SLOTS, moves + SURVIVORS)
    one, _ = verbs.repos(verbs.drop(cache, np.arange(SLOTS) < moves)[0])
    return drop_the_oldest_and_repos_each_time(cache, moves), one


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
    count = SURVIVORS + QUERIES
    births = np.concatenate([moves + np.arange(SURVIVORS), SURVIVORS + np.arange(QUERIES)])
    q, k, v = (x[:count] for x in Vectors.random(7))
    cache, new = verbs.reserve(tables(moves)[0], count=QUERIES)
    assert new.births[:QUERIES].tolist() == births[SURVIVORS:].tolist()
    rows = verbs.rows(cache, new)
    q_born, k_born, turn = rotations(rope, q, k, births.astype(np.int32), rows.shift)
    storage = jax.tree.map(programs.not_a_number,
                           kvfunc.KV.zeros(1, SLOTS, KV_HEADS, HEAD_DIM, dtype))
    cache = verbs.write(dataclasses.replace(cache, kv=storage), moves + np.arange(count),
                        (k_born,), (v,))
    only = dataclasses.replace(rows, query_raw=rows.query_raw[:QUERIES])
    out = kvfunc.segment_attention(q_born[SURVIVORS:], cache.kv.k[0], cache.kv.v[0], only,
                                   new.births[:QUERIES], turn)

    if dtype != jnp.float32:
        k, v = (programs.numbers(x[0])[moves:moves + count] for x in (cache.kv.k, cache.kv.v))
        k = oracle.unrotate(rope, k, births)
    positions = np.arange(count)
    keys, queries = oracle.rotate(rope, k, positions), oracle.rotate(rope, q, positions)
    exact = [oracle.attend(queries[i], keys[:i + 1], v[:i + 1]) for i in positions[SURVIVORS:]]
    return float(np.sqrt(np.square(np.asarray(out) - exact).mean()))


@pytest.mark.parametrize("rope, dtype, bound", [
    *((rope, dtype, bound) for rope in ("default", "llama3", "yarn")
      for dtype, bound in ((jnp.float32, 1e-7), (jnp.bfloat16, 1e-3))),
    ("llama3", jnp.int8, 1e-7), ("llama3", jnp.float8_e4m3fn, 1e-7)])
def test_the_error_does_not_grow_with_the_number_of_moves(rope, dtype, bound):
    errors = [error(moves, ROPES[rope], dtype) for moves in MOVES]
    assert max(errors) < bound
    assert max(errors) < 1.5 * errors[0]
