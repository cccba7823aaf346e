"""How far quantised KV is off, what becomes of odd vectors, and whose scale is whose."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import kvfunc
from kvfunc.quantize import quantize
from kvfunc.storage import KV, read_block, write_layer

HEADS, HEAD_DIM = 3, 8
every_dtype = pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.uint8])
quantized = jax.jit(quantize, static_argnums=1)

# Vectors of any size, some of whose elements are far smaller than the largest.
numerators = st.one_of(st.integers(-(2**20), 2**20), st.integers(-(2**11), 2**11))
vectors = st.builds(lambda numbers, exponent: numbers * np.float32(2.0**exponent),
                    hnp.arrays(np.float32, (5, HEADS, HEAD_DIM), elements=numerators),
                    st.integers(-100, 60))


def vector(*numbers):
    return jnp.array(numbers, jnp.float32)[None, None]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(vectors)
def test_int8_is_off_by_half_a_scale_at_most(x):
    stored = quantized(x, jnp.int8)
    values, scales = np.asarray(stored.values, int), np.asarray(stored.scales)[..., None]
    np.testing.assert_allclose(scales, np.abs(x).max(-1, keepdims=True) / 127, rtol=2e-7)
    assert (np.abs(values).max(-1)[scales[..., 0] > 0] == 127).all()
    assert (np.abs(np.asarray(stored.numbers()) - x) <= scales * 0.50002).all()


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.uint8])
@settings(max_examples=100, deadline=None, derandomize=True)
@given(vectors)
def test_fp8_is_off_by_a_sixteenth_at_most_or_by_half_its_smallest_step(dtype, x):
    stored = quantized(x, dtype)
    scales = np.asarray(stored.scales)[..., None]
    np.testing.assert_allclose(scales, np.abs(x).max(-1, keepdims=True) / 448, rtol=2e-7)
    normal = np.abs(x) >= scales * 2.0**-6
    bound = np.where(normal, np.abs(x) * 2.0**-4, scales * 2.0**-10)
    assert (np.abs(np.asarray(stored.numbers()) - x) <= bound * 1.00001).all()


def test_int8_rounds_ties_to_even():
    stored = quantize(vector(127, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 126.4), jnp.int8)
    assert stored.scales.tolist() == [[1]]
    assert stored.values[0, 0].tolist() == [127, 0, 2, 2, 0, -2, -126, 126]


def test_fp8_rounds_ties_to_even_and_its_bits_are_those_of_e4m3fn():
    x = vector(448, 17, 19, -21, 432, 2**-10, 3 * 2**-10, -1)
    stored = quantize(x, jnp.float8_e4m3fn)
    assert stored.scales.tolist() == [[1]]
    assert stored.values[0, 0].astype(jnp.float32).tolist() == [
        448, 16, 20, -20, 448, 0, 2**-8, -1]
    bits = quantize(x, jnp.uint8).values
    assert bits.dtype == jnp.uint8
    assert [hex(byte) for byte in bits[0, 0, jnp.array([0, 4, 7])].tolist()] == [
        "0x7e", "0x7e", "0xb8"]
    assert np.asarray(bits).tobytes() == np.asarray(stored.values).tobytes()
    assert np.asarray(bits).tobytes() == np.asarray(x).astype(ml_dtypes.float8_e4m3fn).tobytes()


@every_dtype
def test_zeros_stay_zeros(dtype):
    stored = quantized(jnp.zeros((2, HEADS, HEAD_DIM)), dtype)
    assert not stored.scales.any()
    assert not stored.numbers().any()


@every_dtype
@pytest.mark.parametrize("largest", [1e-45, 1e-40, 1.2e-38, 3e-37, 3.4e38])
def test_the_smallest_and_largest_floats_stay_what_they_are_nearly(dtype, largest):
    x = vector(largest, -largest, 0)
    np.testing.assert_allclose(quantized(x, dtype).numbers(), x, rtol=1e-6, atol=6e-36)


@every_dtype
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_becomes_nan_in_its_own_token_and_head_alone(dtype, bad):
    x = np.ones((4, HEADS, HEAD_DIM), np.float32)
    x[2, 1, 5] = bad
    numbers = np.asarray(quantized(x, dtype).numbers())
    expected = np.ones_like(x)
    expected[2, 1] = np.nan
    np.testing.assert_allclose(numbers, expected, rtol=2e-7)


@every_dtype
def test_bfloat16_is_quantised_as_the_numbers_that_it_holds(dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, HEADS, HEAD_DIM)), jnp.bfloat16)
    for mine, theirs in zip(jax.tree.leaves(quantize(x, dtype)),
                            jax.tree.leaves(quantize(x.astype(jnp.float32), dtype)), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@every_dtype
def test_a_token_has_the_same_bits_whatever_is_written_with_it_and_however_it_is_compiled(dtype):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(40, HEADS, HEAD_DIM)), jnp.float32)
    empty = KV.zeros(1, 40, HEADS, HEAD_DIM, dtype).k[0]
    whole = jax.jit(write_layer)(empty, jnp.arange(40), x)
    parts = empty
    for first, stop in ((0, 1), (1, 40)):
        parts = write_layer(parts, jnp.arange(first, stop), x[first:stop])
    batch = jax.vmap(write_layer, (None, None, 0))(empty, jnp.arange(40), jnp.stack([x, x]))
    for mine, theirs, twice in zip(*map(jax.tree.leaves, (whole, parts, batch)), strict=True):
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()
        assert np.asarray(twice).tobytes() == 2 * np.asarray(mine).tobytes()


LAYERS, SLOTS = 2, 7


def sizes_of(token: int, layer: int, is_v: bool) -> np.ndarray:
    """A power of two for each head, such that no other token, layer or head has it."""
    return 2.0 ** (np.arange(HEADS) + HEADS * (token + 5 * (layer + LAYERS * is_v)) - 30)


def of_tokens(tokens, is_v: bool) -> list[np.ndarray]:
    """By layer [tokens, HEADS]."""
    return [np.stack([sizes_of(token, layer, is_v) for token in tokens])
            for layer in range(LAYERS)]


def as_vectors(by_layer) -> list[jax.Array]:
    """Vectors that differ in their size alone, so that all have the same values when stored."""
    return [jnp.asarray(size[..., None] * np.array([1, -1] * (HEAD_DIM // 2)), jnp.float32)
            for size in by_layer]


def seen(k, v, slots: int):
    """Of each slot, what a query that sees it alone reads: its first key dim and its value."""
    column = jnp.zeros(slots, jnp.int32)
    each = jnp.arange(slots, dtype=jnp.int32)
    rows = kvfunc.Rows(q_start=each, q_len=column + 1, slot=each, length=column + 1, raw=column,
                       birth=column, shift=column, visible_until=column + 1, query_raw=column)
    q = jnp.zeros((slots, 2 * HEADS, HEAD_DIM)).at[..., 0].set(1)
    part = kvfunc.segment_attention(q, k, v, rows, column,
                                    kvfunc.Rope.default(HEAD_DIM).rotation(rows.shift), scale=1.0,
                                    partials=True)
    return part.m, part.finish()


@every_dtype
def test_every_token_layer_and_head_is_read_with_its_own_scale_after_edits(dtype):
    k, v = (as_vectors(of_tokens(range(5), is_v)) for is_v in (False, True))
    cache, _ = kvfunc.append(kvfunc.init(LAYERS, SLOTS, HEADS, HEAD_DIM, dtype), k, v)
    edited, _ = kvfunc.repos(kvfunc.drop(cache, jnp.array([1, 3]))[0])
    for mine, theirs in zip(jax.tree.leaves(edited.kv), jax.tree.leaves(cache.kv), strict=True):
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()
    compacted, _ = kvfunc.compact(edited)
    for cache, tokens in ((edited, [0, 1, 2, 3, 4]), (compacted, [0, 2, 4])):
        keys, values = (of_tokens(tokens, is_v) for is_v in (False, True))
        for layer in range(LAYERS):
            m, out = seen(cache.kv.k[layer], cache.kv.v[layer], len(tokens))
            np.testing.assert_allclose(m[:, ::2], keys[layer], rtol=1e-6)
            np.testing.assert_allclose(out[:, 1::2], as_vectors(values)[layer], rtol=1e-6)


REFUSED = ("has no gradient, since it is rounded to few steps; differentiate through KV and "
           "weights of float32 or bfloat16")


@every_dtype
def test_gradients_through_quantised_storage_are_refused(dtype):
    stored = KV.zeros(1, 2, HEADS, HEAD_DIM, dtype).k[0]

    def written(x):
        return read_block(write_layer(stored, jnp.arange(2), x), jnp.int32(0), 2).sum()

    x = jnp.ones((2, HEADS, HEAD_DIM))
    for differentiated in (jax.grad(written), jax.jit(jax.grad(written)),
                           lambda x: jax.jvp(written, (x,), (x,))):
        with pytest.raises(ValueError, match=f"what is stored as {jnp.dtype(dtype)} {REFUSED}"):
            differentiated(x)


@pytest.mark.parametrize("which", ["K", "V"])
def test_gradients_of_attention_to_quantised_kv_are_refused(which):
    quantised, exact = (KV.zeros(1, 2, HEADS, HEAD_DIM, dtype).k[0]
                        for dtype in (jnp.int8, jnp.float32))
    k, v = (quantised, exact) if which == "K" else (exact, quantised)
    rows = jax.tree.map(jnp.asarray, kvfunc.Rows.empty().pad(1, 1))
    turn = kvfunc.Rope.default(HEAD_DIM).rotation(rows.shift)

    def attended(q):
        return kvfunc.segment_attention(q, k, v, rows, jnp.zeros(1, jnp.int32), turn).sum()

    q = jnp.ones((1, HEADS, HEAD_DIM))
    assert attended(q) == 0
    with pytest.raises(ValueError, match=f"what is stored as int8 {REFUSED}"):
        jax.grad(attended)(q)
