"""Rows of every kind, gone astray too, give in every implementation what they give in XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvfunc.attention import segment_attention
from kvfunc.pallas import Config
from kvfunc.quantize import quantize
from kvfunc.rope import Rope
from kvfunc.rows import Rows

from .conftest import INTERPRETED

SLOTS, KV_HEADS, GROUP, HEAD_DIM, QUERIES, ROWS = 2600, 2, 3, 48, 80, 12
ROPE = Rope.default(HEAD_DIM - 16)
each_other = pytest.mark.parametrize("other", ["triton"] if INTERPRETED else ["cpu", "pallas"])
# Triton multiplies what is quantised by numbers in two parts of bfloat16, and its interpreter cuts
# bits off where a GPU rounds.
QUANTIZED = 1e-4 if INTERPRETED else 1e-5
TYPES = {"float32": 1e-5, "bfloat16": 2e-2, "int8": QUANTIZED, "float8_e4m3fn": QUANTIZED}


@functools.partial(jax.jit, static_argnames=("implementation", "window"))
def attend(q, k, v, rows, births, implementation, window=None):
    return segment_attention(q, k, v, rows, births, ROPE.rotation(rows.shift), window=window,
                             implementation=implementation, partials=True)


@functools.cache
def numbers(dtype):
    """Queries of any size, and keys and values of a type."""
    normal = np.random.default_rng(7).normal
    q = jnp.asarray(normal(size=(QUERIES, KV_HEADS * GROUP, HEAD_DIM)), jnp.float32)
    k, v = (jnp.asarray(normal(size=(SLOTS, KV_HEADS, HEAD_DIM)), jnp.float32) for _ in "kv")
    if dtype in ("int8", "float8_e4m3fn"):
        return q, *(jax.jit(quantize, static_argnums=1)(x, jnp.dtype(dtype)) for x in (k, v))
    return q, k.astype(dtype), v.astype(dtype)


def table(rows):
    """Rows of (first query, how many, slot, length, raw, shift, visible until)."""
    filled = [(*row[:5], row[4] + row[5], *row[5:]) for row in rows]
    filled += [(0,) * 8] * (ROWS - len(rows))
    columns = dict(zip(Rows.COLUMNS, np.array(filled, np.int32).T, strict=True))
    return Rows(**columns, query_raw=np.arange(1000, 1000 + QUERIES, dtype=np.int32))


rows_anywhere = st.lists(
    st.tuples(st.integers(0, QUERIES - 1), st.integers(1, QUERIES), st.integers(0, SLOTS - 1),
              st.sampled_from([1, 15, 16, 17, 128, 129, 600, 2500]), st.integers(0, 1100),
              st.integers(0, 900), st.sampled_from([Rows.NEVER, 1001, 1040])),
    min_size=1, max_size=ROWS).map(
        lambda rows: [(start, min(count, QUERIES - start), slot, min(length, SLOTS - slot), *rest)
                      for start, count, slot, length, *rest in rows])


@each_other
@settings(max_examples=8 if INTERPRETED else 25, deadline=None, derandomize=True,
          phases=set(Phase) - {Phase.shrink} if INTERPRETED else Phase)
@given(rows_anywhere, st.sampled_from(sorted(TYPES)), st.sampled_from([None, 1, 300]))
def test_any_rows_give_what_xla_gives(other, rows, dtype, window):
    """Also rows of the same queries that are no neighbours, and keys shared out over threads."""
    q, k, v = numbers(dtype)
    births = jnp.arange(1000, 1000 + QUERIES, dtype=jnp.int32)
    mine, xla = (attend(q, k, v, table(rows), births, implementation, window)
                 for implementation in (other, "xla"))
    np.testing.assert_array_equal(mine.m == -np.inf, xla.m == -np.inf)
    np.testing.assert_allclose(mine.finish(), xla.finish(), rtol=0, atol=TYPES[dtype])
    seen = np.isfinite(xla.m)
    total = np.exp(np.asarray(mine.m)[seen] - np.asarray(xla.m)[seen]) * np.asarray(mine.l)[seen]
    np.testing.assert_allclose(total, np.asarray(xla.l)[seen], rtol=TYPES[dtype])
    again = attend(q, k, v, table(rows), births, other, window)
    jax.tree.map(np.testing.assert_array_equal, mine, again)


@each_other
def test_rows_outside_of_the_storage_see_nothing(other):
    q, k, v = numbers("float32")
    births = jnp.arange(QUERIES, dtype=jnp.int32)
    astray = table([(0, 4, -3, 10, 0, 0, Rows.NEVER), (4, 4, SLOTS, 10, 0, 0, Rows.NEVER),
                    (-2, 4, 0, 10, 0, 0, Rows.NEVER), (QUERIES, 4, 0, 10, 0, 0, Rows.NEVER)])
    part = attend(q, k, v, astray, births, other)
    assert (np.asarray(part.l) == 0).all() and (np.asarray(part.acc) == 0).all()
    over = table([(QUERIES - 1, 9, SLOTS - 2, 10, 0, 0, Rows.NEVER)])
    inside = table([(QUERIES - 1, 1, SLOTS - 2, 2, 0, 0, Rows.NEVER)])
    parts = (attend(q, k, v, rows, births, other).finish() for rows in (over, inside))
    np.testing.assert_allclose(*parts, rtol=0, atol=1e-6)


@each_other
def test_a_nan_that_is_seen_shows_and_one_that_is_not_does_not(other):
    q, k, v = numbers("float32")
    births = jnp.arange(QUERIES, dtype=jnp.int32)
    k = k.at[5].set(jnp.nan)
    rows = table([(0, 1, 0, 6, 0, 0, Rows.NEVER), (1, 1, 0, 5, 0, 0, Rows.NEVER)])
    out = attend(q, k, v, rows, births, other).finish()
    assert np.isnan(out[0]).all() and np.isfinite(out[1:]).all()


@each_other
def test_other_types_are_left_to_xla(other):
    q, k, v = numbers("float32")
    births, rows = jnp.arange(QUERIES, dtype=jnp.int32), table([(0, 4, 0, 9, 0, 0, Rows.NEVER)])
    k, v = k.astype(jnp.float16), v.astype(jnp.float16)
    with pytest.raises(NotImplementedError, match=f'"{other}" cannot be used: KV of dtype float16 '
                                                  'is not built; use "xla"'):
        attend(q, k, v, rows, births, other)
    jax.tree.map(np.testing.assert_array_equal, attend(q, k, v, rows, births, "auto"),
                 attend(q, k, v, rows, births, "xla"))


def test_an_unknown_implementation_is_named():
    q, k, v = numbers("float32")
    with pytest.raises(ValueError, match="one of auto, xla, cpu, pallas, triton, got 'gpu'"):
        segment_attention(q, k, v, table([]), jnp.arange(QUERIES, dtype=jnp.int32),
                          ROPE.rotation(jnp.zeros(ROWS, jnp.int32)), implementation="gpu")


@each_other
def test_differentiated_and_batched_as_any_other(other):
    q, k, v = numbers("float32")
    births, rows = jnp.arange(QUERIES, dtype=jnp.int32), table([(0, 30, 4, 50, 980, 7, Rows.NEVER)])

    def loss(k, implementation):
        part = segment_attention(q, k, v, rows, births, ROPE.rotation(jnp.asarray(rows.shift)),
                                 implementation=implementation)
        return (part**2).sum()

    grads = [jax.grad(loss)(k, implementation) for implementation in (other, "xla")]
    np.testing.assert_allclose(*grads, rtol=0, atol=1e-5)
    two = jax.vmap(lambda k: loss(k, other))(jnp.stack([k, 2 * k]))
    np.testing.assert_allclose(two, [loss(k, other), loss(2 * k, other)], rtol=1e-5)


@pytest.mark.parametrize("queries, keys", [(1, 128), (8, 256), (128, 512)])
def test_sizes_of_pallas_that_can_be(queries, keys):
    assert Config(queries, keys) == Config(queries=queries, keys=keys)


@pytest.mark.parametrize("sizes, message", [
    ((0, 128), "queries must be 1 or a multiple of 8, got 0"),
    ((12, 128), "queries must be 1 or a multiple of 8, got 12"),
    ((8, 100), "keys must be a multiple of 128, got 100"), ((8, 0), "multiple of 128, got 0")])
def test_sizes_of_pallas_that_cannot_be(sizes, message):
    with pytest.raises(ValueError, match=message):
        Config(*sizes)


@pytest.mark.parametrize("heads, kv_heads, head_dim, keys", [(9, 3, 64, 512), (32, 8, 128, 512),
                                                             (32, 32, 80, 256), (64, 8, 128, 512)])
def test_sizes_of_pallas_that_are_chosen(heads, kv_heads, head_dim, keys):
    q, k = jnp.zeros((16, heads, head_dim)), jnp.zeros((8, kv_heads, head_dim), jnp.bfloat16)
    assert Config.of(q, k, few=True) == Config(1, keys)
    assert Config.of(q, k, few=False).keys == keys
    assert Config.of(q, k, few=False).queries >= 64
