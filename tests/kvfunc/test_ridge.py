"""Regression from sums alone: what it predicts, of which rank, and what its noise says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfunc import ridge

from .anchor_oracle import Ridge

FEATURES, OUTPUTS, EXAMPLES = 7, 4, 40
MANY = 20  # outputs, whose leading directions come from an iteration
PENALTY = 0.03

add = jax.jit(ridge.Sums.add)
fit = jax.jit(ridge.fit, static_argnames=("penalty", "rank"))


def examples(seed: int, count: int = EXAMPLES, outputs: int = OUTPUTS):
    """Features of unequal means and sizes, the last of them 1, and what they give with noise."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, FEATURES)) * np.linspace(0.5, 20, FEATURES) + rng.normal(
        size=FEATURES)
    x[:, -1] = 1
    # The directions of the outputs have sizes that fall off, as offsets of KV have.
    directions = np.linalg.qr(rng.normal(size=(outputs, outputs)))[0]
    slopes = rng.normal(size=(FEATURES, outputs)) * 0.5 ** np.arange(outputs)
    y = x @ slopes @ directions + 0.1 * rng.normal(size=(count, outputs))
    return x.astype(np.float32), y.astype(np.float32)


def sums_of(x, y, mask=None):
    mask = np.ones(len(x), bool) if mask is None else mask
    return add(ridge.Sums.zeros((), x.shape[-1], y.shape[-1]), jnp.asarray(x), jnp.asarray(y),
               jnp.asarray(mask))


def fitted(x, y, rank=OUTPUTS, penalty=PENALTY):
    return fit(sums_of(x, y), penalty=penalty, rank=rank)


def in_float64(*arrays):
    return [np.asarray(array, float) for array in arrays]


def close(actual, expected, of=None, tolerance=2e-4):
    size = np.abs(expected if of is None else of).max()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * size)


@pytest.mark.parametrize("penalty", [0.001, 1.0])
def test_full_rank_is_the_standardised_ridge_with_a_free_mean(penalty):
    x, y = examples(0)
    new, _ = examples(1)
    weights, oracle = fitted(x, y, penalty=penalty), Ridge(*in_float64(x, y), penalty)
    close(weights(jnp.asarray(new)), oracle(in_float64(new)[0]))


def test_the_units_of_a_feature_do_not_matter():
    x, y = examples(0)
    scale = np.float32(2) ** np.array([-6, 3, 0, 5, 0, -2, 0], np.float32)
    close(fitted(x * scale, y)(jnp.asarray(x * scale)), fitted(x, y)(jnp.asarray(x)))


def test_the_mean_is_not_penalised():
    x, y = examples(0)
    predicted = fitted(x, y + np.float32(500), penalty=1.0)(jnp.asarray(x))
    close(np.asarray(predicted).mean(0), (y + np.float32(500)).mean(0))


@pytest.mark.parametrize(("rank", "outputs"), [(1, OUTPUTS), (3, OUTPUTS), (2, MANY), (16, MANY)])
def test_a_rank_is_the_best_approximation_of_the_fitted_values_of_that_rank(rank, outputs):
    x, y = examples(0, outputs=outputs)
    new, _ = examples(1, outputs=outputs)
    weights, oracle = fitted(x, y, rank), Ridge(*in_float64(x, y), PENALTY, rank)
    assert weights.left.shape[-2] == weights.right.shape[-1] == min(rank, FEATURES)
    close(weights(jnp.asarray(new)), oracle(in_float64(new)[0]), tolerance=2e-3)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(mine=st.lists(st.booleans(), min_size=EXAMPLES, max_size=EXAMPLES).map(np.array))
def test_sums_of_two_parts_added_are_the_sums_of_all(mine):
    x, y = examples(0)
    both = sums_of(x, y, mine) + sums_of(x, y, ~mine)
    for part, whole in zip(jax.tree.leaves(both), jax.tree.leaves(sums_of(x, y)), strict=True):
        close(part, np.asarray(whole), tolerance=1e-6)
    assert both.count == EXAMPLES


def test_examples_added_later_are_as_if_added_at_once():
    x, y = examples(0)
    none = ridge.Sums.zeros((), FEATURES, OUTPUTS)
    later = none
    for part in np.split(np.arange(EXAMPLES), 4):
        later = add(later, jnp.asarray(x[part]), jnp.asarray(y[part]), jnp.ones(10, jnp.bool_))
    close(later.gram, np.asarray(sums_of(x, y).gram), tolerance=1e-6)


def test_padding_changes_nothing_even_if_it_holds_nan():
    x, y = examples(0)
    mask = np.arange(EXAMPLES + 5) % 9 != 3
    padded_x, padded_y = (np.full((len(mask), n), np.nan, np.float32) for n in (FEATURES, OUTPUTS))
    padded_x[mask], padded_y[mask] = x[:mask.sum()], y[:mask.sum()]
    for mine, theirs in zip(jax.tree.leaves(sums_of(padded_x, padded_y, mask)),
                            jax.tree.leaves(sums_of(x[:mask.sum()], y[:mask.sum()])), strict=True):
        close(mine, np.asarray(theirs), tolerance=1e-6)


def test_features_that_never_vary_have_no_say():
    x, y = examples(0)
    new, _ = examples(1)
    x[:, 2], new[:, 2] = 1000.3, -7
    predicted = fitted(x, y)(jnp.asarray(new))
    others = np.delete(np.arange(FEATURES), 2)
    close(predicted, Ridge(*in_float64(x[:, others], y), PENALTY)(in_float64(new[:, others])[0]))


def test_features_that_always_come_together_have_a_solution():
    x, y = examples(0)
    x[:, 1] = x[:, 0]
    weights = fitted(x, y, penalty=0.001)
    close(weights(jnp.asarray(x)), Ridge(*in_float64(x, y), 1e-3)(in_float64(x)[0]))


def test_of_no_examples_the_weights_are_0():
    weights = fit(ridge.Sums.zeros((), FEATURES, OUTPUTS), penalty=PENALTY, rank=OUTPUTS)
    x, _ = examples(0)
    assert not np.asarray(weights(jnp.asarray(x))).any()
    assert weights.noise == 0


def test_one_example_is_answered_with_its_own_values_everywhere():
    x, y = examples(0)
    close(fitted(x[:1], y[:1])(jnp.asarray(x)), np.broadcast_to(y[0], y.shape))


@pytest.mark.parametrize("rank", [2, OUTPUTS])
@pytest.mark.parametrize("penalty", [0.03, 1.0])
def test_noise_is_the_share_of_the_mean_square_that_the_maps_leave(penalty, rank):
    x, y = examples(0)
    weights = fitted(x, y, rank, penalty)
    left = np.square(y - np.asarray(weights(jnp.asarray(x)), float)).mean()
    np.testing.assert_allclose(weights.noise, left / np.square(y).mean(), rtol=1e-2, atol=1e-5)
    np.testing.assert_allclose(weights.noise, Ridge(*in_float64(x, y), penalty, rank).noise,
                               rtol=1e-2, atol=1e-5)


def test_noise_of_what_is_no_function_of_the_features_is_1_nearly():
    x, _ = examples(0, 4000)
    y = np.random.default_rng(5).normal(size=(4000, OUTPUTS)).astype(np.float32)
    assert 0.98 < fitted(x, y).noise <= 1


def test_a_batch_is_solved_as_each_of_it():
    batch = 2, 2
    x, y = (np.stack(values).reshape(*batch, EXAMPLES, -1) for values in zip(
        *(examples(seed) for seed in range(np.prod(batch))), strict=True))
    mask = jnp.arange(EXAMPLES) < 33
    sums = add(ridge.Sums.zeros(batch, FEATURES, OUTPUTS), jnp.asarray(x), jnp.asarray(y), mask)
    weights = fit(sums, penalty=PENALTY, rank=2)
    predicted = weights(jnp.asarray(x))
    assert sums.count.tolist() == np.full(batch, 33).tolist()
    for place in np.ndindex(batch):
        alone = fit(sums_of(x[place], y[place], np.asarray(mask)), penalty=PENALTY, rank=2)
        close(predicted[place], np.asarray(alone(jnp.asarray(x[place]))), tolerance=1e-3)
        np.testing.assert_allclose(weights.noise[place], alone.noise, rtol=1e-3)


def test_under_vmap_the_answer_is_the_same():
    x, y = examples(0)
    twice = jax.vmap(lambda sums: fit(sums, penalty=PENALTY, rank=OUTPUTS))(
        jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), sums_of(x, y)))
    for predicted in twice(jnp.stack([jnp.asarray(x)] * 2)):
        close(predicted, np.asarray(fitted(x, y)(jnp.asarray(x))), tolerance=1e-3)


@pytest.mark.parametrize(("penalty", "rank", "says"), [
    (0.0, 2, "penalty must be above 0, got 0.0"), (-1.0, 2, "penalty must be above 0, got -1.0"),
    (float("nan"), 2, "penalty must be above 0, got nan"),
    (0.1, 0, "rank must be between 1 and the 4 outputs, got 0"),
    (0.1, 5, "rank must be between 1 and the 4 outputs, got 5")])
def test_a_penalty_or_rank_out_of_range_is_refused(penalty, rank, says):
    with pytest.raises(ValueError, match=says):
        ridge.fit(ridge.Sums.zeros((), FEATURES, OUTPUTS), penalty, rank)
