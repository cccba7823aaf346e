"""Which tokens each parameter leaves over, seen in hundreds of draws with fixed seeds."""

import jax.numpy as jnp
import numpy as np
import pytest

from kvfunc.serve.interface import Sampling
from kvfunc.serve.sampler import choose, logprobs

# Tokens 2, 0, 3, 1 in order of likelihood.
PROBABILITIES = {2: 0.4, 0: 0.3, 3: 0.2, 1: 0.1}
LOGITS = jnp.log(jnp.array([PROBABILITIES[token] for token in range(4)])) + 7


def drawn(logits=LOGITS, seeds=400, **fields):
    """How often each token was chosen, over many seeds."""
    sampling = Sampling(**fields)
    tokens = [int(choose(logits, sampling, seed, 0)) for seed in range(seeds)]
    return np.bincount(tokens, minlength=len(logits)) / seeds


def support(*args, **fields):
    return set(np.flatnonzero(drawn(*args, **fields)).tolist())


def test_without_restrictions_tokens_come_as_often_as_they_are_likely():
    np.testing.assert_allclose(drawn(seeds=1500), [0.3, 0.1, 0.4, 0.2], atol=0.04)


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_no_temperature_is_greedy(temperature):
    assert support(temperature=temperature, seeds=20) == {2}
    assert support(jnp.array([1.0, 5.0, 5.0]), temperature=temperature, seeds=20) == {1}


def test_temperature_divides_the_logits():
    # p^(1/T), normalised: T = 0.5 squares the probabilities.
    expected = np.array([0.09, 0.01, 0.16, 0.04]) / 0.3
    np.testing.assert_allclose(drawn(temperature=0.5, seeds=1500), expected, atol=0.04)
    np.testing.assert_allclose(drawn(temperature=1e4, seeds=1500), 0.25, atol=0.04)
    assert support(temperature=2e-5, seeds=20) == {2}


@pytest.mark.parametrize("top_k, kept", [
    (0, {0, 1, 2, 3}), (1, {2}), (2, {2, 0}), (3, {2, 0, 3}), (4, {0, 1, 2, 3}),
    (1000, {0, 1, 2, 3})])
def test_top_k_leaves_the_k_likeliest(top_k, kept):
    assert support(top_k=top_k) == kept


@pytest.mark.parametrize("top_p, kept", [
    (0.0, {2}), (0.39, {2}), (0.41, {2, 0}), (0.69, {2, 0}), (0.71, {2, 0, 3}), (0.89, {2, 0, 3}),
    (0.91, {0, 1, 2, 3}), (1.0, {0, 1, 2, 3})])
def test_top_p_leaves_the_fewest_that_together_reach_p(top_p, kept):
    assert support(top_p=top_p) == kept


@pytest.mark.parametrize("min_p, kept", [
    (0.0, {0, 1, 2, 3}), (0.24, {0, 1, 2, 3}), (0.26, {2, 0, 3}), (0.49, {2, 0, 3}), (0.51, {2, 0}),
    (0.74, {2, 0}), (0.76, {2}), (1.0, {2})])
def test_min_p_leaves_what_is_that_likely_relative_to_the_likeliest(min_p, kept):
    assert support(min_p=min_p) == kept


def test_top_p_counts_what_temperature_and_top_k_have_left():
    # Of {2, 0, 3} token 2 has 0.44 and token 0 has 0.33: together beyond 0.75.
    assert support(top_k=3, top_p=0.75) == {2, 0}
    # Squared probabilities: 0.53 and 0.30.
    assert support(temperature=0.5, top_p=0.82) == {2, 0}
    assert support(temperature=0.5, top_p=0.84) == {2, 0, 3}
    assert support(top_p=0.8, min_p=0.6) == {2, 0}


def test_what_is_left_keeps_its_proportions():
    np.testing.assert_allclose(drawn(top_k=2, seeds=1500), [3 / 7, 0, 4 / 7, 0], atol=0.04)


def test_equally_likely_tokens_stand_or_fall_together():
    logits = jnp.array([1.0, 3.0, 1.0, 3.0])
    assert support(logits, top_k=1) == {1, 3}
    assert support(logits, top_p=0.1) == {1, 3}


def test_seed_and_index_determine_the_token():
    logits = jnp.zeros(1000)

    def token(seed, index, **fields):
        return int(choose(logits, Sampling(**fields), seed, index))

    assert token(3, 5) == token(3, 5) == token(3, 5, top_k=900)
    assert len({token(seed, 5) for seed in range(20)}) > 15
    assert len({token(3, index) for index in range(20)}) > 15
    assert token(2**32 - 1, 0) == token(-1, 0) != token(0, 0)


def test_extreme_logits():
    for logits in ([-jnp.inf, 0.0, -jnp.inf], [-3e38, 0.0, -3e38], [-1e30, 1e30, 1e29]):
        for fields in ({}, dict(top_k=2), dict(top_p=0.5), dict(min_p=0.1), dict(temperature=0.0)):
            assert support(jnp.array(logits), seeds=10, **fields) == {1}
    assert support(jnp.full(4, -1e30), seeds=40) == {0, 1, 2, 3}
    assert support(jnp.array([5.0]), seeds=5) == {0}


def test_log_probabilities_are_those_of_the_softmax_before_temperature():
    own, best, ids = logprobs(LOGITS, jnp.int32(3))
    assert float(own) == pytest.approx(np.log(0.2), abs=1e-6)
    assert ids.tolist() == [2, 0, 3, 1]
    np.testing.assert_allclose(best, np.log([0.4, 0.3, 0.2, 0.1]), atol=1e-6)


def test_at_most_twenty_alternatives_are_told():
    logits = jnp.arange(30.0)
    _, best, ids = logprobs(logits, jnp.int32(0))
    assert ids.tolist() == list(range(29, 9, -1)) and best.shape == (20,)
    _, best, ids = logprobs(jnp.array([1000.0, -1000.0]), jnp.int32(1))
    assert best.tolist() == [0, -2000] and ids.tolist() == [0, 1]
