"""Experts: the grouped product against the dense one and against a loop in float64, and routing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfunc.models import moe
from kvfunc.models.moe import MoE
from kvfunc.quantize import Quantized, quantize

IN, WIDTH, TOKENS = 6, 5, 9


def numbers(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def params_of(some, seed=0, of=jnp.asarray):
    shapes = {"gate": (WIDTH, IN), "up": (WIDTH, IN), "down": (IN, WIDTH)}
    return {name: {"weight": of(numbers([seed, i], some.experts, *shape))} | (
        {"bias": jnp.asarray(numbers([seed, i, 1], some.experts, shape[0]))} if some.biases else {})
        for i, (name, shape) in enumerate(shapes.items())}


def gated(kind, gate, up):
    """The activations in float64, from their papers' formulas."""
    if kind == "silu":
        return gate / (1 + np.exp(-gate)) * up
    if kind == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def one_by_one(activation, x, chosen, weights, params):
    def times(name, expert, vector):
        found = params[name]
        weight = found["weight"]
        weight = weight.numbers() if isinstance(weight, Quantized) else weight
        bias = np.asarray(found["bias"][expert], np.float64) if "bias" in found else 0
        return np.asarray(weight[expert], np.float64) @ vector + bias

    out = np.zeros((len(x), IN))
    for token, vector in enumerate(x.astype(np.float64)):
        for expert, weight in zip(chosen[token], weights[token], strict=True):
            hidden = gated(activation, times("gate", expert, vector), times("up", expert, vector))
            out[token] += weight * times("down", expert, hidden)
    return out


@pytest.mark.parametrize("activation", moe.ACTIVATIONS)
@pytest.mark.parametrize("biases", [False, True])
@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 99), size=st.sampled_from([1, 3]), data=st.data())
def test_each_token_gets_its_experts(activation, biases, seed, size, data):
    some, x = MoE(experts=4, chosen=2, width=WIDTH, biases=biases), size * numbers(seed, TOKENS, IN)
    # Experts that nobody chose, and one that all did, are among them.
    pairs = st.permutations(range(4)).map(lambda order: order[:2])
    chosen = np.array([data.draw(pairs) for _ in range(TOKENS)], np.int32)
    weights = np.random.default_rng(seed).uniform(0, 1, (TOKENS, 2)).astype(np.float32)
    params, expected = params_of(some), one_by_one(activation, x, chosen, weights, params_of(some))
    for way in (moe.mixed, moe.dense):
        found = jax.jit(way, static_argnums=(0, 1))(
            some, activation, jnp.asarray(x), jnp.asarray(chosen), jnp.asarray(weights), params)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(0, 40), min_size=4, max_size=4).filter(any))
def test_the_two_grouped_products(dtype, sizes):
    x = np.asarray(numbers(0, sum(sizes), IN))
    weight = (20 * numbers(1, 4, WIDTH, IN)).astype(dtype)
    expected = np.einsum("ni,noi->no", x.astype(np.float64),
                         weight.astype(np.float64)[np.repeat(np.arange(4), sizes)])
    for way in (moe.by_tiles, moe.by_groups):
        found = way(jnp.asarray(x), jnp.asarray(weight), jnp.array(sizes, jnp.int32))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


def test_experts_may_be_the_bits_of_bfloat16():
    some = MoE(experts=4, chosen=2, width=WIDTH)
    x = jnp.asarray(numbers(0, TOKENS, IN), jnp.bfloat16)
    routed = moe.route(some, jnp.asarray(numbers(1, TOKENS, 4)))
    bits = params_of(some, of=lambda weight: jnp.asarray(weight, jnp.bfloat16).view(jnp.uint16))
    floats = params_of(some, of=lambda weight: jnp.asarray(weight, jnp.bfloat16))
    expected = moe.dense(some, "silu", x, *routed, floats)
    for params in (bits, floats):
        np.testing.assert_allclose(moe.mixed(some, "silu", x, *routed, params), expected,
                                   rtol=0, atol=2**-6 * np.abs(expected).max())


def test_gradients_are_those_of_the_dense_reference():
    some = MoE(experts=4, chosen=2, width=WIDTH, biases=True)
    x, logits = jnp.asarray(numbers(0, TOKENS, IN)), jnp.asarray(numbers(1, TOKENS, 4))

    def loss(way, x, logits, params):
        return jnp.square(way(some, "silu", x, *moe.route(some, logits), params)).sum()

    mine, theirs = (jax.jit(jax.grad(functools.partial(loss, way), (0, 1, 2)))(
        x, logits, params_of(some)) for way in (moe.mixed, moe.dense))
    for one, other in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_experts_in_int8_have_a_scale_a_row():
    some, x = MoE(experts=4, chosen=2, width=WIDTH), numbers(0, TOKENS, IN)
    params = params_of(some, of=lambda weight: quantize(jnp.asarray(weight), jnp.int8))
    assert params["up"]["weight"].scales.shape == (4, WIDTH)
    chosen, weights = moe.route(some, jnp.asarray(numbers(1, TOKENS, 4)))
    expected = one_by_one("silu", x, np.asarray(chosen), np.asarray(weights), params)
    for way in (moe.mixed, moe.dense):
        found = way(some, "silu", jnp.asarray(x), chosen, weights, params)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_token_does_not_feel_the_others():
    some, params = MoE(experts=4, chosen=2, width=WIDTH), params_of(MoE(4, 2, WIDTH))
    x, logits = numbers(0, TOKENS, IN), numbers(1, TOKENS, 4)

    def run(tokens):
        chosen, weights = moe.route(some, jnp.asarray(logits[tokens]))
        return moe.mixed(some, "silu", jnp.asarray(x[tokens]), chosen, weights, params)

    everyone = run(np.arange(TOKENS))
    np.testing.assert_allclose(run(np.array([7, 2])), everyone[np.array([7, 2])], atol=1e-6)


@pytest.mark.parametrize(("scores", "normalised"), [
    ("softmax", True), ("softmax", False), ("softmax_of_chosen", True), ("sigmoid", True)])
def test_routing(scores, normalised):
    logits, correction = numbers(0, TOKENS, 8), numbers(1, 8)
    some = MoE(8, 3, WIDTH, scores, normalised)
    chosen, weights = moe.route(some, jnp.asarray(logits),
                                jnp.asarray(correction) if some.corrected else None)
    for token, row in enumerate(logits.astype(np.float64)):
        all_scores = 1 / (1 + np.exp(-row)) if some.corrected else np.exp(row) / np.exp(row).sum()
        wanted = np.argsort(-(all_scores + correction if some.corrected else all_scores))[:3]
        assert chosen[token].tolist() == wanted.tolist()
        sums_to_one = normalised or scores == "softmax_of_chosen"
        expected = all_scores[wanted] / (all_scores[wanted].sum() if sums_to_one else 1)
        np.testing.assert_allclose(weights[token], expected, rtol=1e-5)


@pytest.mark.parametrize(("changes", "named"), [
    ({"scores": "max"}, "scores"), ({"chosen": 0}, "chosen"), ({"chosen": 9}, "chosen")])
def test_bad_experts_are_named(changes, named):
    with pytest.raises(ValueError, match=f"^{named} must be .* got "):
        MoE(**{"experts": 8, "chosen": 2, "width": WIDTH} | changes)
