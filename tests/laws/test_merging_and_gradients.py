"""Attention in parts, in batches and backwards (Law 11 and the transforms of JAX)."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import HEADS, QUERIES, ROPES, ROWS, SINKS, SLOTS, Vectors, padded

import kvfunc
from kvfunc import Rotation, Rows

pytestmark = pytest.mark.usefixtures("each_attention")

ROPE = ROPES["llama3"]
PLAIN, ALL = (), (("window", 5), ("softcap", 2.0))  # with sinks too: programs.OPTIONS["all"]


class Case(NamedTuple):
    """All queries of a program over a pool with scattered slots and NaN between them."""

    q: jax.Array
    k: jax.Array | kvfunc.Quantized
    v: jax.Array | kvfunc.Quantized
    rows: Rows
    births: np.ndarray
    turn: Rotation
    weights: np.ndarray  # of the outputs in the loss; 0 for padding
    slots: np.ndarray  # [QUERIES] of the tokens; padding points to the first one
    seen: np.ndarray  # [QUERIES, QUERIES] which query sees which token; padding sees the first one
    shift: np.ndarray  # [QUERIES, QUERIES] at which shift

    @classmethod
    def of(cls, ops, seed: int, order, dtype=jnp.float32) -> "Case":
        history, life, vectors = programs.history(ops), programs.life(ops), Vectors.random(seed)
        tokens = history.tokens
        slots = order[:tokens]
        k, v = programs.pool(ROPE, vectors, history.births, slots, dtype)
        rows = history.rows(np.arange(tokens), slots).pad(ROWS, QUERIES)
        births = padded(history.births, 0)
        q, _, turn = programs.rotations(ROPE, vectors.q[:QUERIES], vectors.k[:QUERIES], births,
                                        rows.shift)
        seen, shift = np.zeros((QUERIES, QUERIES), bool), np.zeros((QUERIES, QUERIES), np.int32)
        seen[tokens:, 0] = True
        for query, positions in enumerate(life.seen):
            seen[query, list(positions)] = True
            shift[query, list(positions)] = [births[t] - at for t, at in positions.items()]
        weights = np.random.default_rng(seed + 1).standard_normal(q.shape).astype(np.float32)
        weights[tokens:] = 0
        return cls(q, k, v, rows, births, turn, weights, padded(slots, slots[0]), seen, shift)


recipes = st.tuples(programs.programs(repos=3), programs.seeds, programs.orders)


@settings(max_examples=25)
@given(recipe=recipes, part_of_row=st.lists(st.integers(0, 2), min_size=ROWS, max_size=ROWS),
       order=st.permutations(range(3)))
def test_partials_merged_over_any_split_of_the_rows_are_the_whole(recipe, part_of_row, order):
    case = Case.of(*recipe)

    def part(number):
        q_len = np.where(np.array(part_of_row) == number, case.rows.q_len, 0).astype(np.int32)
        return kvfunc.segment_attention(
            *case[:3], dataclasses.replace(case.rows, q_len=q_len), case.births, case.turn,
            partials=True, **dict(ALL))

    merged = functools.reduce(kvfunc.Partial.merge, map(part, order))
    whole = kvfunc.segment_attention(*case[:3], case.rows, case.births, case.turn, sinks=SINKS,
                                     **dict(ALL))
    np.testing.assert_allclose(merged.finish(jnp.asarray(SINKS)), whole, rtol=0, atol=1e-6)


def test_a_partial_of_no_rows_adds_nothing_and_alone_gives_zero():
    case = Case.of([("append", 9)], 0, np.arange(SLOTS))

    def attend(rows):
        return kvfunc.segment_attention(*case[:3], rows, case.births, case.turn, partials=True,
                                        **dict(ALL))

    nothing, some = attend(Rows.empty().pad(ROWS, QUERIES)), attend(case.rows)
    assert np.array_equal(nothing.m, np.full((QUERIES, HEADS), -np.inf))
    assert not nothing.l.any()
    assert not nothing.acc.any()
    assert not nothing.finish().any()
    assert not nothing.finish(jnp.asarray(SINKS)).any()
    for merged in (some.merge(nothing), nothing.merge(some)):
        assert programs.same_bits(merged, some)


def segments(options, q, k, v, sinks, case: Case):
    """The library's attention."""
    return kvfunc.segment_attention(q, k, v, case.rows, case.births, case.turn, sinks=sinks,
                                    **dict(options))


def dense(options, q, k, v, sinks, case: Case):
    """The same with a [queries, keys] mask and every query turned for every key."""
    options = dict(options)
    k, v = (jnp.repeat(x[case.slots], HEADS // x.shape[1], axis=1) for x in (k, v))
    angles = jnp.einsum("qt,f->qtf", case.shift.astype(jnp.float32), jnp.float32(ROPE.inv_freq))
    angles = angles[:, :, None]
    a, b = jnp.split(q[:, None], 2, axis=-1)
    turned = jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles),
                              b * jnp.cos(angles) + a * jnp.sin(angles)], -1)
    scores = jnp.einsum("qthd,thd->hqt", turned, k) * q.shape[-1] ** -0.5
    if "softcap" in options:
        scores = options["softcap"] * jnp.tanh(scores / options["softcap"])
    seen = case.seen
    if "window" in options:
        position = case.births[None] - case.shift
        seen = seen & (case.births[:, None] - position < options["window"])
    scores = jnp.where(seen[None], scores, -jnp.inf)
    if sinks is not None:
        column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        scores = jnp.concatenate([scores, column], -1)
        v = jnp.concatenate([v, jnp.zeros_like(v[:1])])
    return jnp.einsum("hqt,thd->qhd", jax.nn.softmax(scores, -1), v)


def both_ways(attend, options, case: Case):
    """The outputs, and the gradients of their weighted sum in q, k, v and the sinks."""
    sinks = jnp.asarray(SINKS) if options else None
    out, pull = jax.vjp(lambda *inputs: attend(options, *inputs, case), case.q, case.k, case.v,
                        sinks)
    return out, pull(jnp.asarray(case.weights))


compiled = jax.jit(both_ways, static_argnums=(0, 1))
compiled_batch = jax.jit(
    lambda attend, options, cases: jax.vmap(functools.partial(both_ways, attend, options))(cases),
    static_argnums=(0, 1))


def check(found, expected, tolerance=5e-6):
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("options", [PLAIN, ALL], ids=["plain", "window, softcap, sinks"])
@settings(max_examples=20)
@given(recipe=recipes)
def test_gradients_are_those_of_dense_attention(options, recipe):
    case = Case.of(*recipe)
    (out, gradients), (dense_out, dense_gradients) = (
        compiled(attend, options, case) for attend in (segments, dense))
    tokens = int((case.rows.query_raw >= 0).sum())
    check((out[:tokens], gradients), (dense_out[:tokens], dense_gradients))


def stacked(cases):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *cases)


def one_of(batch, i: int):
    return jax.tree.map(lambda x: x[i], batch)


@settings(max_examples=15)
@given(recipes=st.lists(recipes, min_size=2, max_size=2))
def test_a_batch_of_caches_attends_and_is_differentiated_like_each_of_them(recipes):
    cases = [Case.of(*recipe) for recipe in recipes]
    batch = compiled_batch(segments, ALL, stacked(cases))
    for i, case in enumerate(cases):
        check(one_of(batch, i), compiled(segments, ALL, case))


batch_attention = jax.jit(jax.vmap(lambda case: segments(ALL, *case[:3], SINKS, case)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8, jnp.uint8])
@settings(max_examples=15)
@given(recipes=st.lists(recipes, min_size=2, max_size=2))
def test_vmap_over_caches_equals_a_loop(dtype, recipes):
    cases = [Case.of(*recipe, dtype) for recipe in recipes]
    batch = batch_attention(stacked(cases))
    for i, case in enumerate(cases):
        check(batch[i], segments(ALL, *case[:3], SINKS, case))
