"""Products with weights: what is computed, whatever the sizes, and the same on every road."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfunc import cpu, linear
from kvfunc.linear import product
from kvfunc.quantize import Quantized, quantize

FLOATS = [jnp.float32, jnp.bfloat16]
ROADS = {"as it runs here": product, "XLA": lambda x, weight, dtype, gate=None: jax.jit(
    linear._xla, static_argnums=3)(x, weight, gate, dtype)}
every_road = pytest.mark.parametrize("road", ROADS.values(), ids=ROADS)
shapes = st.tuples(st.sampled_from([1, 2, 15, 16, 17, 31, 33, 70]),
                   st.sampled_from([1, 3, 16, 31, 32, 64, 65, 130]),
                   st.sampled_from([1, 4, 31, 32, 33, 63, 64, 65, 200]))


def numbers(shape, seed, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def matrix(shape, seed):
    """int8 with scales of every size."""
    random = np.random.default_rng(seed)
    return Quantized(jnp.asarray(random.integers(-128, 128, shape).astype(np.int8)),
                     jnp.asarray(random.uniform(0.01, 2, shape[0]).astype(np.float32)))


def steps(shape, seed, dtype=jnp.float32):
    """Tokens that are whole steps of their scale, since XLA's division is not exact at a tie."""
    random = np.random.default_rng(seed)
    whole = random.integers(-127, 128, shape)
    whole[np.arange(shape[0]), random.integers(0, shape[1], shape[0])] = 127
    return jnp.asarray(np.ldexp(whole, random.integers(-9, 9, (shape[0], 1))), dtype)


def sums_of_int8(x, weight):
    """In NumPy: exact sums, and the scales in the order in which they are multiplied."""
    x = quantize(x, jnp.int8)
    sums = np.asarray(x.values, np.int64) @ np.asarray(weight.values, np.int64).T
    return sums.astype(np.float32) * np.asarray(x.scales)[:, None] * np.asarray(weight.scales)


def silu(x):
    x = x.astype(np.float64)
    return x * (1 + np.tanh(x / 2)) / 2


@every_road
@settings(max_examples=40, deadline=None, derandomize=True)
@given(shapes, st.sampled_from(FLOATS))
def test_sums_of_int8_are_exact(road, shape, dtype):
    tokens, outputs, inner = shape
    x, weight = steps((tokens, inner), 1, dtype), matrix((outputs, inner), 2)
    wanted = sums_of_int8(x, weight)
    np.testing.assert_array_equal(road(x, weight, jnp.float32), wanted)
    np.testing.assert_array_equal(road(x, weight, jnp.bfloat16), wanted.astype(ml_dtypes.bfloat16))


@every_road
@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(shapes)
def test_sums_of_floats_are_those_in_float64(road, dtype, shape):
    tokens, outputs, inner = shape
    x, weight = numbers((tokens, inner), 1, dtype), numbers((outputs, inner), 2, dtype)
    wanted = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(road(x, weight, jnp.float32), wanted, rtol=1e-5, atol=1e-4)
    rounded = np.asarray(road(x, weight, jnp.bfloat16), np.float64)
    np.testing.assert_allclose(rounded, wanted, rtol=2**-8, atol=1e-4)


@every_road
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(shapes)
def test_a_gate_is_silu_of_its_product(road, kind, shape):
    tokens, outputs, inner = shape
    if kind == "int8":
        x = steps((tokens, inner), 1)
        weight, gate = (matrix((outputs, inner), seed) for seed in (2, 3))
        up, gated = sums_of_int8(x, weight), sums_of_int8(x, gate)
    else:
        x = numbers((tokens, inner), 1, kind)
        weight, gate = (numbers((outputs, inner), seed, kind) for seed in (2, 3))
        up, gated = (np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
                     for w in (weight, gate))
    wanted = silu(gated) * up
    np.testing.assert_allclose(road(x, weight, jnp.float32, gate), wanted, rtol=1e-5,
                               atol=1e-4 * np.abs(up).max())


@every_road
def test_gates_from_one_end_to_the_other(road):
    gate = np.array([-np.inf, -200, -88, -20, -1, -1e-30, 0, 1e-30, 1, 20, 88, 200], np.float32)
    one = jnp.ones((1, 1), jnp.bfloat16)
    got = road(one, jnp.full((12, 1), 2, jnp.bfloat16), jnp.float32,
               jnp.asarray(gate, jnp.bfloat16)[:, None])
    wanted = 2 * silu(np.asarray(jnp.asarray(gate[1:], jnp.bfloat16), np.float64))
    np.testing.assert_allclose(got[0, 1:], wanted, rtol=1e-5, atol=1e-30)
    assert np.isnan(got[0, 0])  # -inf * 0, as in every silu that is a product


@every_road
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_token_that_is_not_finite_spoils_itself_alone(road, bad):
    x, weight = steps((3, 70), 5).at[1, 40].set(bad), matrix((40, 70), 6)
    got = np.asarray(road(x, weight, jnp.float32))
    assert np.isnan(got[1]).all()
    np.testing.assert_array_equal(got[[0, 2]], sums_of_int8(x[jnp.array([0, 2])], weight))
    assert not np.asarray(road(jnp.zeros((2, 70)), weight, jnp.float32)).any()


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_an_output_does_not_depend_on_how_many_tokens_there_are(kind):
    if not cpu.has_product():
        pytest.skip("there is no AMX here, and XLA promises no order of sums")
    x = numbers((70, 200), 7, jnp.bfloat16)
    weight = matrix((65, 200), 8) if kind == "int8" else numbers((65, 200), 8, jnp.bfloat16)
    whole = np.asarray(product(x, weight, jnp.float32))
    parts = [product(part, weight, jnp.float32) for part in jnp.split(x, [1, 9, 40])]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_gradients_and_batches_are_those_of_xla():
    x, weight, gate = (numbers(shape, seed, jnp.bfloat16)
                       for seed, shape in enumerate([(5, 40), (33, 40), (33, 40)]))

    def loss(function, *args):
        x, weight, gate = args
        return jnp.sin(function(x, weight, jnp.float32, gate)).sum()

    got, wanted = (jax.grad(functools.partial(loss, road), (0, 1, 2))(x, weight, gate)
                   for road in ROADS.values())
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(mine, np.float32), np.asarray(theirs, np.float32),
                                   rtol=0.02, atol=0.02)
    many = numbers((3, 5, 40), 9, jnp.bfloat16)
    batched = jax.vmap(lambda x: product(x, weight, jnp.float32))(many)
    np.testing.assert_array_equal(batched, [product(x, weight, jnp.float32) for x in many])


@every_road
def test_no_tokens_give_nothing(road):
    assert road(jnp.zeros((0, 40)), matrix((33, 40), 1), jnp.bfloat16).shape == (0, 33)


def test_without_amx_xla_does_it(monkeypatch):
    monkeypatch.setattr(cpu, "has_product", lambda: False)
    monkeypatch.setattr(cpu, "product", None)
    x, weight = numbers((5, 70), 3), matrix((40, 70), 4)
    np.testing.assert_array_equal(product(x, weight, jnp.float32), sums_of_int8(x, weight))


def test_what_cannot_be_is_refused():
    x, weight = numbers((2, 8), 0), matrix((3, 8), 0)
    wide = Quantized(weight.values.astype(jnp.uint8), weight.scales)
    with pytest.raises(ValueError, match="weight must be int8 where it has scales, got uint8"):
        product(x, wide, jnp.float32)
    with pytest.raises(ValueError, match="gate must be int8 where it has scales, got uint8"):
        product(x, weight, jnp.float32, wide)
    with pytest.raises(ValueError, match="x has rows of 7 and weight of 8: they must be"):
        product(x[:, :7], weight, jnp.float32)
    with pytest.raises(ValueError, match=r"gate must be as weight, int8\(3, 8\), got int8\(2, 8\)"):
        product(x, weight, jnp.float32, matrix((2, 8), 0))
    with pytest.raises(ValueError, match=r"weight, int8\(3, 8\), got float32\(3, 8\)"):
        product(x, weight, jnp.float32, numbers((3, 8), 0))
    with pytest.raises(ValueError, match="int8 has no gradient"):
        jax.grad(lambda x: product(x, weight, jnp.float32).sum())(x)
