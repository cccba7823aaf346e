"""The batched sampler against a float64 oracle, seen in thousands of draws with fixed seeds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvfunc.serve import sampler
from kvfunc.serve.interface import MAX_LOGPROBS, MAX_STOP_IDS, Sampling
from kvfunc.serve.sampler import Batch, Lanes, begin, needs_lane, sample, warm_up

VOCAB = 8
LARGER = 200  # a vocabulary of several blocks, the last not full
LANES = 8
DRAWS = 1024
NONE = Batch.NO_LANE
NOTHING = np.zeros(0, np.int32)

# Tokens 2, 0, 3, 1 in order of likelihood; the others are impossible.
PROBABILITIES = {2: 0.4, 0: 0.3, 3: 0.2, 1: 0.1}
LOGITS = np.array([np.log(PROBABILITIES[token]) + 7 if token in PROBABILITIES else -np.inf
                   for token in range(VOCAB)], np.float32)
GREEDY = Sampling(temperature=0)


def ids(*tokens):
    return np.array(tokens, np.int32)


def run(logits, rows, size=None, lanes=None):
    """One step over rows of logits, padded to a few sizes; lanes of nothing unless given."""
    logits = np.asarray(logits, np.float32)
    size = size or next(size for size in (4, 16, DRAWS) if size >= len(logits))
    padding = np.full((size - len(logits), logits.shape[1]), np.nan, np.float32)
    lanes = Lanes.zeros(LANES, logits.shape[1]) if lanes is None else lanes
    sampled, lanes = sample(lanes, jnp.asarray(np.concatenate([logits, padding])),
                            Batch.of(rows, size))
    return jax.tree.map(lambda column: np.asarray(column)[:len(logits)], sampled), lanes


def drawn(logits=LOGITS, steps=1, **fields):
    """How often each token was chosen."""
    sampling, counts = Sampling(**fields), np.zeros(len(logits), np.int64)
    rows = np.tile(np.asarray(logits, np.float32), (DRAWS, 1))
    for index in range(steps):
        sampled, _ = run(rows, [(NONE, sampling, seed, index) for seed in range(DRAWS)])
        counts += np.bincount(sampled.tokens, minlength=len(logits))
    return counts


def support(*args, **fields):
    return set(np.flatnonzero(drawn(*args, **fields)).tolist())


def expected(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution in float64, and how far the nearest decision is from falling otherwise."""
    logits = np.asarray(logits, np.float64)
    weights = np.exp((logits - logits.max()) / temperature)
    if 0 < top_k < len(logits):
        weights[logits < np.sort(logits)[-top_k]] = 0
    weights /= weights.sum()
    before = np.array([weights[logits > value].sum() for value in logits])
    relative = weights / weights.max()
    kept = ((before < top_p) | (top_p == 1)) & (relative >= min_p) | (logits == logits.max())
    margin = min(np.abs(before - top_p).min() if 0 < top_p < 1 else 1,
                 np.abs(relative - min_p).min() if min_p > 0 else 1)
    return weights * kept / (weights * kept).sum(), margin


def assert_distributed(counts, probabilities):
    """Pearson's chi-square, five standard deviations wide; the impossible never comes."""
    assert not counts[probabilities == 0].any()
    likely = probabilities * counts.sum() >= 5
    wanted = np.append(probabilities[likely], probabilities[~likely].sum()) * counts.sum()
    got = np.append(counts[likely], counts[~likely].sum())
    wanted, got = wanted[wanted > 0], got[wanted > 0]
    freedom = max(len(wanted) - 1, 1)
    assert ((got - wanted) ** 2 / wanted).sum() < freedom + 5 * np.sqrt(2 * freedom)


# Greedy.


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_no_temperature_is_greedy(temperature):
    assert support(temperature=temperature) == {2}
    assert support(temperature=2e-5) == {2}


def test_of_equal_logits_greedy_takes_the_lowest_id():
    logits = np.zeros((3, LARGER), np.float32)
    logits[0, [70, 71, 150]] = 2
    logits[1, 1:] = -0.0
    logits[2, [199, 31]] = np.inf
    sampled, _ = run(logits, [(NONE, GREEDY, 0, 0)] * 3)
    assert sampled.tokens.tolist() == [70, 0, 31]


def test_a_row_of_nothing_gives_token_0_and_nan_is_never_chosen():
    logits = np.full((4, LARGER), np.nan, np.float32)
    logits[1] = -np.inf
    logits[2:, 100] = -50
    plain = Sampling(top_k=5, top_p=0.5)
    for sampling in (GREEDY, Sampling(), plain, Sampling(top_p=0.1, min_p=0.5)):
        sampled, _ = run(logits, [(NONE, sampling, 1, 0)] * 4)
        assert sampled.tokens.tolist() == [0, 0, 100, 100]


# The distribution.


def test_temperature_divides_the_logits():
    # p^(1/T), normalised: T = 0.5 squares the probabilities.
    assert_distributed(drawn(steps=8), np.array([0.3, 0.1, 0.4, 0.2, 0, 0, 0, 0]))
    squared = np.array([0.09, 0.01, 0.16, 0.04, 0, 0, 0, 0]) / 0.3
    assert_distributed(drawn(temperature=0.5, steps=8), squared)
    assert_distributed(drawn(temperature=1e4, steps=8), np.array([0.25] * 4 + [0] * 4))


@pytest.mark.parametrize("top_k, kept", [
    (0, {0, 1, 2, 3}), (1, {2}), (2, {2, 0}), (3, {2, 0, 3}), (4, {0, 1, 2, 3}),
    (2**40, {0, 1, 2, 3})])
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
    # min_p removes token 3, and the nucleus is still counted with it: 0.4 + 0.3 < 0.75.
    assert support(top_p=0.75, min_p=0.6) == {2, 0}


def test_equally_likely_tokens_stand_or_fall_together():
    logits = np.array([1, 3, 1, 3, 1, 1, 1, 1])
    assert support(logits, top_k=1) == {1, 3}
    assert support(logits, top_p=0.1) == {1, 3}
    assert support(np.array([0, -0.0] * 4), top_k=1) == set(range(8))


@given(logits=st.lists(st.integers(-4, 4), min_size=1, max_size=VOCAB),
       temperature=st.sampled_from([0.5, 1.0, 2.0]), top_k=st.integers(0, VOCAB + 1),
       top_p=st.floats(0, 1, width=32), min_p=st.floats(0, 1, width=32))
@settings(max_examples=40, deadline=None)
def test_every_combination_leaves_what_the_oracle_leaves(logits, temperature, top_k, top_p, min_p):
    logits = np.pad(np.array(logits, np.float64), (0, VOCAB - len(logits)),
                    constant_values=-np.inf)
    fields = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probabilities, margin = expected(logits, **fields)
    assume(margin > 1e-5)
    assert_distributed(drawn(logits, **fields), probabilities)
    assert support(logits, **fields) >= set(np.flatnonzero(probabilities > 0.02).tolist())


@pytest.mark.parametrize("fields", [
    dict(), dict(temperature=0.7), dict(top_p=0.6), dict(top_p=0.97), dict(top_k=10),
    dict(top_k=100), dict(top_k=100, top_p=0.8, min_p=0.02), dict(min_p=0.1)], ids=str)
def test_a_vocabulary_of_several_blocks_is_drawn_in_its_proportions(fields):
    for logits in (np.random.default_rng(0).normal(scale=1.5, size=LARGER),
                   np.arange(LARGER) * 67 % LARGER * 1e-3):
        logits = logits.astype(np.float32)
        probabilities, margin = expected(logits, **fields)
        assert margin > 1e-6
        assert_distributed(drawn(logits, steps=4, **fields), probabilities)


@pytest.mark.parametrize("top_p", [0.499, 0.501])
def test_a_tail_counts_for_what_it_weighs_together(top_p):
    logits = np.zeros(LARGER, np.float32)
    logits[150] = np.log(LARGER - 1)
    probabilities, _ = expected(logits, top_p=top_p)
    assert (probabilities > 0).sum() == (1 if top_p < 0.5 else LARGER)
    assert_distributed(drawn(logits, top_p=top_p), probabilities)


def test_the_weights_of_a_large_vocabulary_do_not_overflow():
    odd = np.arange(2**18) % 2 == 1
    logits = np.tile(np.where(odd, -1e-3, 0), (4, 1))
    for top_p, parities in ((0.4, {0}), (0.9, {0, 1})):
        sampling, found = Sampling(top_p=top_p), set()
        for index in range(8):
            sampled, _ = run(logits, [(NONE, sampling, seed, index) for seed in range(4)])
            found |= set((sampled.tokens % 2).tolist())
        assert found == parities


@pytest.mark.parametrize("top_k", [1, 63, 64, 65, 100, 199])
def test_top_k_of_any_size_is_exact_with_ties_and_infinities(top_k):
    token = np.arange(LARGER)
    for logits in (token * 67 % LARGER - 100.5, token * 31 % 70 - 35,
                   np.where(token % 2, -np.inf, 3e38), token * 67 % LARGER * 1e-6 + 3):
        logits = logits.astype(np.float32)
        kept = [np.isfinite(value) and (logits > value).sum() < top_k for value in logits]
        # So hot that 3e38 and 3 are alike, and a token of 200 is missed once in 10^8 times.
        logits_drawn = drawn(logits, temperature=1e38 / 8, top_k=top_k, steps=4)
        assert ((logits_drawn > 0) == kept).all()


def test_extreme_logits():
    for finite in ([-np.inf, 0.0, -np.inf], [-3e38, 0.0, -3e38], [-1e30, 1e30, 1e29],
                   [0.0, np.inf, 3e38]):
        logits = np.array(finite + [-np.inf] * 5)
        for fields in ({}, dict(top_k=2), dict(top_p=0.5), dict(min_p=0.1), dict(temperature=0.0)):
            assert support(logits, **fields) == {1}
    assert support(np.full(8, -1e30)) == set(range(8))
    assert support(np.array([np.inf, 5, np.inf] + [0] * 5), top_p=0.9) == {0, 2}


# Seeds.


def kinds():
    """Rows of every kind, the first two without a lane."""
    return [Sampling(), Sampling(temperature=0.6, top_p=0.9), Sampling(top_k=20, top_p=0.7),
            Sampling(top_k=150, min_p=0.01, logprobs=3), GREEDY,
            Sampling(top_p=0.2, presence_penalty=1.5, frequency_penalty=0.3),
            Sampling(repetition_penalty=1.3, logit_bias=((3, 5.0),)),
            Sampling(min_tokens=40, stop_ids=frozenset({1, 2, 3}))]


def test_a_token_depends_on_its_own_row_alone():
    rng = np.random.default_rng(1)
    logits = rng.normal(scale=2, size=(8, LARGER)).astype(np.float32)
    rows = [(lane, sampling, int(rng.integers(2**63)), 7)
            for lane, sampling in enumerate(kinds())]

    def lanes():
        made = Lanes.zeros(LANES, LARGER)
        for lane, (_, sampling, _, _) in enumerate(rows):
            made = begin(made, lane, sampling, ids(3, 4, 5), ids(5, 6, 6))
        return made

    for step in range(6):
        rows = [(lane, sampling, seed + step, step) for lane, sampling, seed, _ in rows]
        together = run(logits, rows, lanes=lanes())[0].tokens
        order = rng.permutation(8)
        mixed, _ = run(logits[order], [rows[at] for at in order], lanes=lanes())
        assert mixed.tokens.tolist() == together[order].tolist()
        for size in (1, 4):
            alone = [run(logits[at:at + 1], rows[at:at + 1], size, lanes())[0].tokens[0]
                     for at in range(8)]
            assert alone == together.tolist()


def test_seed_and_index_determine_the_token():
    def tokens(pairs, **fields):
        rows = [(NONE, Sampling(**fields), seed, index) for seed, index in pairs]
        return run(np.zeros((len(rows), LARGER)), rows, 16)[0].tokens.tolist()

    # Where a filter leaves everything, or the token drawn, the token is the same.
    assert tokens([(3, 5)]) == tokens([(3, 5)]) == tokens([(3, 5)], top_k=199)
    assert tokens([(3, 5)]) == tokens([(3, 5)], top_p=0.9)
    assert len(set(tokens([(seed, 5) for seed in range(16)]))) > 12
    assert len(set(tokens([(3, index) for index in range(16)]))) > 12
    assert len(set(tokens([((high << 32) + 3, 5) for high in range(16)]))) > 12
    minus_one, largest, low_half = tokens([(-1, 0), (2**64 - 1, 0), (2**32 - 1, 0)])
    assert minus_one == largest != low_half


# Penalties and biases.


@pytest.mark.parametrize("fields, token, adjusted", [
    (dict(), 0, 2.0),
    (dict(logit_bias=((0, 0.5), (3, 9.0), (0, 0.25))), 0, 2.75),
    (dict(repetition_penalty=1.25), 0, 1.6),  # in the prompt: divided
    (dict(repetition_penalty=1.25), 1, -2.5),  # in the answer, negative: multiplied
    (dict(repetition_penalty=1.25), 2, 1.0),  # in neither
    (dict(repetition_penalty=0.5), 0, 4.0),
    (dict(presence_penalty=0.5), 0, 2.0),  # the prompt does not count
    (dict(presence_penalty=0.5), 1, -2.5),  # twice in the answer, taken off once
    (dict(presence_penalty=-0.5), 1, -1.5),
    (dict(frequency_penalty=0.5), 1, -3.0),
    (dict(frequency_penalty=0.5), 4, 2.5),
    (dict(presence_penalty=0.25, frequency_penalty=0.5), 1, -3.25),
    # 2 + 1, divided by 2, less 0.5 for presence, 0.25 for frequency.
    (dict(logit_bias=((4, -2.0),), repetition_penalty=2.0, presence_penalty=0.5,
          frequency_penalty=0.25), 4, -0.25),
    # The bias turns the sign before the repetition penalty looks at it.
    (dict(logit_bias=((1, 4.0),), repetition_penalty=2.0), 1, 1.0)])
def test_adjusted_logits_are_the_hand_worked_ones(fields, token, adjusted):
    # Greedy prefers token 7 just above the adjusted logit, and not just below.
    logits = np.tile(np.array([2, -2, 1, 0, 3, 0, 0, 0], np.float32), (2, 1))
    others = [other for other in range(VOCAB) if other not in (token, 7)]
    logits[:, others] = -np.inf
    logits[:, 7] = adjusted - 0.01, adjusted + 0.01
    sampling = Sampling(temperature=0, **fields)
    lanes = begin(Lanes.zeros(LANES, VOCAB), 0, sampling, ids(0, 0, 6), ids(1, 1, 4))
    lanes = begin(lanes, 1, sampling, ids(0, 0, 6), ids(1, 1, 4))
    sampled, _ = run(logits, [(0, sampling, 0, 3), (1, sampling, 0, 3)], lanes=lanes)
    assert sampled.tokens.tolist() == [token, 7]


def test_bias_forbids_and_forces():
    lanes = Lanes.zeros(LANES, VOCAB)
    forbid = Sampling(logit_bias=((2, -100.0), (0, -100.0)))
    force = Sampling(logit_bias=((1, 100.0),))
    lanes = begin(begin(lanes, 0, forbid, NOTHING, NOTHING), 1, force, NOTHING, NOTHING)
    rows = [(seed % 2, (forbid, force)[seed % 2], seed, 0) for seed in range(DRAWS)]
    sampled, _ = run(np.tile(LOGITS, (DRAWS, 1)), rows, lanes=lanes)
    assert set(sampled.tokens[::2].tolist()) == {1, 3}
    assert set(sampled.tokens[1::2].tolist()) == {1}


def test_before_min_tokens_no_stop_id_is_chosen():
    stops = frozenset({2, 0, 5000})
    sampling = Sampling(temperature=0, min_tokens=3, stop_ids=stops)
    plain = Sampling(temperature=0, stop_ids=stops)
    rows = [(NONE, sampling, 0, 0), (NONE, sampling, 0, 2), (NONE, sampling, 0, 3),
            (NONE, plain, 0, 0)]
    assert run(np.tile(LOGITS, (4, 1)), rows)[0].tokens.tolist() == [3, 3, 2, 2]
    many = dataclasses.replace(sampling, stop_ids=frozenset(range(100, 100 + MAX_STOP_IDS)))
    logits = np.where(np.arange(LARGER) < 164, np.arange(LARGER), -1)
    assert run([logits], [(NONE, many, 0, 0)])[0].tokens.tolist() == [99]
    assert 2 not in support(min_tokens=1, stop_ids=frozenset({2}), top_p=0.9)


def test_no_bias_brings_a_stop_id_back():
    sampling = Sampling(temperature=0, min_tokens=1, stop_ids=frozenset({2}),
                        logit_bias=((2, 100.0),), presence_penalty=-2.0)
    lanes = begin(Lanes.zeros(LANES, VOCAB), 0, sampling, NOTHING, ids(2))
    rows = [(0, sampling, 0, 0), (0, sampling, 0, 1)]
    sampled, _ = run(np.tile(LOGITS, (2, 1)), rows, lanes=lanes)
    assert sampled.tokens.tolist() == [0, 2]


def test_what_needs_a_lane():
    assert not needs_lane(Sampling(temperature=0.3, top_p=0.5, top_k=3, min_p=0.1, logprobs=2,
                                   min_tokens=4, stop_ids=frozenset({1})))
    assert all(needs_lane(Sampling(**fields)) for fields in (
        dict(presence_penalty=-0.1), dict(frequency_penalty=0.1), dict(repetition_penalty=0.9),
        dict(logit_bias=((0, 1.0),))))


# Lanes.


def test_begin_resets_a_lane_whatever_was_in_it():
    lanes = Lanes.zeros(LANES, VOCAB)
    old = Sampling(logit_bias=((5, 2.0),))
    lanes = begin(lanes, 1, old, ids(4, 4, 7), ids(0, 3, 3))
    assert lanes.bias[:2].tolist() == [[0] * 8, [0, 0, 0, 0, 0, 2, 0, 0]]
    assert lanes.counts[:2].tolist() == [[0] * 8, [1, 0, 0, 2, 0, 0, 0, 0]]
    assert np.flatnonzero(lanes.prompt[1]).tolist() == [4, 7] and not lanes.prompt[0].any()
    lanes = begin(lanes, 1, Sampling(logit_bias=((6, -1.0),)), ids(2), NOTHING)
    assert lanes.bias[1].tolist() == [0, 0, 0, 0, 0, 0, -1, 0]
    assert lanes.counts[1].tolist() == [0] * 8
    assert np.flatnonzero(lanes.prompt[1]).tolist() == [2]


def test_every_chosen_token_is_counted_in_its_lane():
    lanes = begin(Lanes.zeros(LANES, VOCAB), 2, GREEDY, NOTHING, ids(1))
    rows = [(2, GREEDY, 0, 0), (NONE, GREEDY, 0, 0), (0, GREEDY, 0, 0)]
    logits = np.zeros((3, VOCAB))
    logits[[0, 1, 2], [1, 4, 6]] = 1
    for _ in range(2):
        _, lanes = run(logits, rows, 4, lanes)
    wanted = np.zeros((LANES, VOCAB))
    wanted[0, 6], wanted[2, 1] = 2, 3
    np.testing.assert_array_equal(lanes.counts, wanted)


def test_a_penalty_sees_the_tokens_that_steps_have_chosen():
    sampling = Sampling(temperature=0, frequency_penalty=1.0)
    lanes, chosen = begin(Lanes.zeros(LANES, VOCAB), 0, sampling, NOTHING, NOTHING), []
    for index in range(6):
        sampled, lanes = run([[2.5, 1.2, 0, 0, 0, 0, 0, 0]], [(0, sampling, 0, index)], 4, lanes)
        chosen.append(int(sampled.tokens[0]))
    assert chosen == [0, 0, 1, 0, 1, 2]
    resumed = begin(Lanes.zeros(LANES, VOCAB), 1, sampling, NOTHING, ids(*chosen[:4]))
    sampled, _ = run([[2.5, 1.2, 0, 0, 0, 0, 0, 0]], [(1, sampling, 0, 4)], 4, resumed)
    assert int(sampled.tokens[0]) == chosen[4]


def test_what_a_lane_holds_does_not_matter_unless_it_is_needed():
    lanes = Lanes(jnp.full((LANES, VOCAB), jnp.nan, jnp.float32),
                  jnp.full((LANES, VOCAB), 9, jnp.int32), jnp.ones((LANES, VOCAB), jnp.bool_))
    penalised = Sampling(temperature=0, presence_penalty=1.0)
    lanes = begin(lanes, 1, penalised, NOTHING, ids(2))
    rows = [(0, GREEDY, 0, 0), (1, penalised, 0, 0), (NONE, GREEDY, 0, 0)]
    sampled, _ = run(np.tile(LOGITS, (3, 1)), rows, lanes=lanes)
    assert sampled.tokens.tolist() == [2, 0, 2]


def test_lanes_are_donated():
    lanes = Lanes.zeros(LANES, VOCAB)
    begun = begin(lanes, 0, GREEDY, NOTHING, NOTHING)
    run([LOGITS], [(0, GREEDY, 0, 0)], lanes=begun)
    for array in (*jax.tree.leaves(lanes), *jax.tree.leaves(begun)):
        assert array.is_deleted()


# Log-probabilities.


def test_log_probabilities_are_those_of_the_logits_as_they_came():
    sampling = Sampling(temperature=0.1, top_k=1, logprobs=2, logit_bias=((3, 50.0),),
                        min_tokens=5, stop_ids=frozenset({2}))
    lanes = begin(Lanes.zeros(LANES, VOCAB), 0, sampling, ids(0), ids(0))
    sampled, _ = run([LOGITS, LOGITS], [(0, sampling, 0, 0), (NONE, GREEDY, 0, 0)], lanes=lanes)
    assert sampled.tokens.tolist() == [3, 2]
    assert float(sampled.logprob[0]) == pytest.approx(np.log(0.2), abs=1e-6)
    assert sampled.top_ids[0].tolist() == [2, 0, 3, 1, 4, 5, 6, 7] + [-1] * 12
    np.testing.assert_allclose(sampled.top_logprobs[0, :4], np.log([0.4, 0.3, 0.2, 0.1]), atol=1e-6)
    assert (np.asarray(sampled.top_logprobs[0, 4:]) == -np.inf).all()


def test_the_twenty_likeliest_are_told_in_order_with_ties():
    wanted = Sampling(temperature=0, logprobs=0)
    for modulus in (1, 7, 70, LARGER):
        logits = (np.arange(LARGER) * 67 % modulus).astype(np.float32)
        sampled, _ = run([logits, -logits], [(NONE, wanted, 0, 0)] * 2)
        for row, raw in enumerate((logits, -logits)):
            order = np.argsort(-raw, kind="stable")[:MAX_LOGPROBS]
            assert sampled.top_ids[row].tolist() == order.tolist()
            raw = raw.astype(np.float64)
            exact = raw - raw.max() - np.log(np.exp(raw - raw.max()).sum())
            np.testing.assert_allclose(sampled.top_logprobs[row], exact[order], rtol=1e-5)
            assert sampled.logprob[row] == sampled.top_logprobs[row, 0]


def test_log_probabilities_far_apart_are_exact():
    logits = np.array([1000, -1000] + [-np.inf] * 6)
    sampled, _ = run([logits], [(NONE, Sampling(temperature=0, logprobs=1), 0, 0)])
    assert sampled.top_logprobs[0, :2].tolist() == [0, -2000]


# Compilation and errors.


def test_nothing_compiles_after_the_warm_up():
    lanes = warm_up(Lanes.zeros(LANES, 40), [2, 8])
    compiled = sample._cache_size(), sampler._set._cache_size()
    for length in (0, 1, 2000):
        for lane, sampling in enumerate(kinds()):
            tokens = np.arange(length, dtype=np.int32) % 40
            lanes = begin(lanes, lane, sampling, tokens, tokens[:length // 2])
    rows = [(lane, sampling, 2**63 + lane, 5) for lane, sampling in enumerate(kinds())]
    for size in (2, 8):
        for count in (0, 1, size):
            logits = jnp.zeros((size, 40), jnp.float32)
            _, lanes = sample(lanes, logits, Batch.of(rows[:count], size))
    assert (sample._cache_size(), sampler._set._cache_size()) == compiled


@pytest.mark.parametrize("rows, message", [
    ([(NONE, GREEDY, 0, 0)] * 3, "3 rows do not fit into size=2"),
    ([(NONE, Sampling(presence_penalty=1.0), 0, 0)], "lane is -1"),
    ([(NONE, Sampling(stop_ids=frozenset(range(65))), 0, 0)], "stop_ids may be 64 at most, got 65"),
])
def test_a_batch_that_cannot_be_is_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        Batch.of(rows, 2)


@pytest.mark.parametrize("lane, fields, prompt, answer, message", [
    (8, {}, NOTHING, NOTHING, "lane must be between 0 and 7, got 8"),
    (-1, {}, NOTHING, NOTHING, "lane must be between 0 and 7, got -1"),
    (0, dict(logit_bias=((8, 1.0),)), NOTHING, NOTHING, "logit_bias has the token id 8"),
    (0, {}, ids(1, 9), NOTHING, "prompt has the token id 9"),
    (0, {}, ids(1), ids(-1), "answer has the token id -1")])
def test_a_lane_that_cannot_be_is_refused(lane, fields, prompt, answer, message):
    with pytest.raises(ValueError, match=message):
        begin(Lanes.zeros(LANES, VOCAB), lane, Sampling(**fields), prompt, answer)


def test_lanes_without_size_are_refused():
    with pytest.raises(ValueError, match="lanes must be at least 1, got 0"):
        Lanes.zeros(0, VOCAB)
