"""RoPE tables against transformers' own, and rotations against float64."""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvfunc.rope import Rope

TABLES = json.loads((pathlib.Path(__file__).parents[1] / "goldens" / "rope.json").read_text())

BASE = {"head_dim": 16, "hidden_size": 64, "num_attention_heads": 4,
        "max_position_embeddings": 1024}
YARN = {"factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 256}
ROPES = {
    "default": Rope.default(16, 10_000.0),
    "linear": Rope.linear(16, 10_000.0, factor=4.0),
    "llama3": Rope.llama3(16, 500_000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                          original_context=256),
    "yarn": Rope.yarn(16, 10_000.0, factor=4.0, original_context=256),
}


rotate = jax.jit(Rope.rotate, static_argnums=0)
rotation = jax.jit(Rope.rotation, static_argnums=0)


def every_type(test):
    return pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)(test)


def unit_circle(rope: Rope, positions) -> np.ndarray:
    """exp(i p f) in float64."""
    return np.exp(1j * np.asarray(positions, np.float64)[..., None] * np.array(rope.inv_freq))


def as_complex(turn) -> np.ndarray:
    return np.asarray(turn.cos, np.float64) + 1j * np.asarray(turn.sin, np.float64)


def vectors(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def int32(*positions):
    return jnp.array(positions, jnp.int32)


# Tables


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table["name"])
def test_table_equals_transformers(table):
    rope = Rope.from_config(table["config"])
    # transformers computes in float32
    np.testing.assert_allclose(rope.inv_freq, table["inv_freq"], rtol=1e-6)
    assert rope.magnitude == pytest.approx(table["attention_scaling"], rel=1e-7)


def test_default_table_in_figures():
    np.testing.assert_allclose(Rope.default(4, 10_000.0).inv_freq, [1.0, 0.01], rtol=1e-15)


def test_linear_table_in_figures():
    rope = Rope.linear(4, 10_000.0, factor=4.0)
    np.testing.assert_allclose(rope.inv_freq, [0.25, 0.0025], rtol=1e-15)


def test_llama3_keeps_short_waves_divides_long_ones_and_blends_between():
    # 256 tokens hold 40.7, 4.07, 0.407, 0.0407 turns; the ramp goes from 0.2 (divided) to 2.2.
    rope = Rope.llama3(8, 10_000.0, factor=10.0, low_freq_factor=0.2, high_freq_factor=2.2,
                       original_context=256)
    keep = (256 * 0.01 / (2 * math.pi) - 0.2) / 2.0
    np.testing.assert_allclose(
        rope.inv_freq, [1.0, 0.1, 0.01 * keep + 0.001 * (1 - keep), 0.0001], rtol=1e-14)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    rope = Rope.yarn(8, 10_000.0, factor=4.0, original_context=256)
    # The ramp goes from pair 0 (32 turns in 256 tokens) to pair 2 (one turn).
    np.testing.assert_allclose(
        rope.inv_freq, [1.0, (0.1 + 0.025) / 2, 0.01 / 4, 0.001 / 4], rtol=1e-14)


@pytest.mark.parametrize(("extra", "magnitude"), [
    ({}, 1.1386294361119891),  # 0.1 ln 4 + 1
    ({"attention_factor": None}, 1.1386294361119891),
    ({"attention_factor": 1.0}, 1.0),
    ({"attention_factor": 0.75}, 0.75),
    ({"mscale": 2.0}, 1.1386294361119891),
    ({"mscale": 2.0, "mscale_all_dim": 1.0}, 1.2772588722239782 / 1.1386294361119891),
    ({"mscale": 2.0, "mscale_all_dim": 1.0, "attention_factor": 1.0}, 1.0),
])
def test_yarn_magnitude_is_attention_factor_where_given(extra, magnitude):
    rope = Rope.from_config(BASE | {"rope_scaling": YARN | {"type": "yarn"} | extra})
    assert rope.magnitude == pytest.approx(magnitude, rel=1e-15)


@pytest.mark.parametrize("name", ["default", "linear", "llama3"])
def test_only_yarn_has_a_magnitude(name):
    assert ROPES[name].magnitude == 1.0


# Spellings


@pytest.mark.parametrize("config", [
    {"rope_theta": 10_000.0, "rope_scaling": YARN | {"type": "yarn"}},
    {"rope_theta": 10_000.0, "rope_scaling": YARN | {"rope_type": "yarn"}},
    {"rope_theta": 10_000.0, "rope_scaling": YARN | {"rope_type": "yarn", "type": "yarn"}},
    {"rope_scaling": YARN | {"type": "yarn"}},
    {"rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 10_000.0}},
    {"rope_parameters": YARN | {"rope_type": "yarn"}, "rope_theta": 10_000.0},
    {"rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 10_000.0}, "rope_theta": 7.0},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 256},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 256},
    {"rope_scaling": YARN | {"type": "yarn"}, "head_dim": None},
    {"rope_scaling": YARN | {"type": "yarn", "beta_fast": None, "truncate": None}},
])
def test_every_spelling_gives_the_same_rope(config):
    assert Rope.from_config(BASE | config) == ROPES["yarn"]


@pytest.mark.parametrize("config", [
    {}, {"rope_scaling": None}, {"rope_scaling": {}}, {"rope_parameters": None},
    {"rope_scaling": {"type": "default"}}, {"rope_parameters": {"rope_theta": 10_000.0}},
    {"partial_rotary_factor": None}, {"partial_rotary_factor": 1.0},
])
def test_no_scaling_is_the_default_rope(config):
    assert Rope.from_config(BASE | config) == ROPES["default"]


def test_rope_parameters_nested_by_layer_type():
    config = BASE | {"rope_parameters": {
        "full_attention": YARN | {"rope_type": "yarn", "rope_theta": 10_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}}
    assert Rope.from_config(config, layer_type="full_attention") == ROPES["yarn"]
    assert Rope.from_config(config, layer_type="sliding_attention") == ROPES["default"]
    for wrong in (None, "chunked_attention"):
        with pytest.raises(ValueError, match=r"full_attention.*sliding_attention"):
            Rope.from_config(config, layer_type=wrong)


@pytest.mark.parametrize("factor", [{"partial_rotary_factor": 0.5},
                                    {"rope_parameters": {"partial_rotary_factor": 0.5}}])
def test_partial_rotary_factor_in_either_place(factor):
    assert Rope.from_config(BASE | factor) == Rope.default(8, 10_000.0)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "proportional", "Yarn"])
def test_other_types_are_refused_by_name(kind, key):
    with pytest.raises(ValueError, match=f"rope type '{kind}'.*default, linear, llama3, yarn"):
        Rope.from_config(BASE | {"rope_scaling": {key: kind, "factor": 2.0}})


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su"])
def test_refusal_of_length_dependent_types_says_why(kind):
    with pytest.raises(ValueError, match="change with the length"):
        Rope.from_config(BASE | {"rope_scaling": {"type": kind}})


@pytest.mark.parametrize(("kind", "fields", "missing"), [
    ("linear", {"factor": 2.0}, "factor"),
    ("yarn", YARN, "factor"),
    ("llama3", LLAMA3, "factor"),
    ("llama3", LLAMA3, "low_freq_factor"),
    ("llama3", LLAMA3, "high_freq_factor"),
])
def test_missing_field_is_named(kind, fields, missing):
    rest = {name: value for name, value in fields.items() if name != missing}
    with pytest.raises(ValueError, match=rf"{kind}.*\['{missing}'\]"):
        Rope.from_config(BASE | {"rope_scaling": rest | {"type": kind}})


@pytest.mark.parametrize("rotary_dim", [0, 7, -2])
def test_rotary_dim_must_be_even_and_positive(rotary_dim):
    with pytest.raises(ValueError, match=str(rotary_dim)):
        Rope.default(rotary_dim)


# Rotations


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 2**20 - 1), min_size=3, max_size=3))
@example([0, 1, 1023])
@example([1024, 1025, 524_287])
@example([2**20 - 1025, 2**20 - 1024, 2**20 - 1])
def test_error_against_float64_does_not_grow_up_to_a_million(positions):
    for rope in ROPES.values():
        error = as_complex(rotation(rope, int32(*positions))) - unit_circle(rope, positions)
        assert np.abs(error).max() < 1.5e-7  # 1.43e-7 over all of them


@every_type
def test_rotation_holds_for_the_largest_positions(rope):
    positions = [2**30, 2**30 + 1, 2**31 - 1]
    error = as_complex(rotation(rope, int32(*positions))) - unit_circle(rope, positions)
    assert np.abs(error).max() < 1e-6


def test_rotation_in_figures():
    turn = rotation(Rope.default(4, 10_000.0), int32(0, 3, -100))
    np.testing.assert_allclose(
        turn.cos, [[1, 1], [-0.9899925, 0.99955003], [0.86231887, 0.54030231]], atol=1e-7)
    np.testing.assert_allclose(
        turn.sin, [[0, 0], [0.14112001, 0.0299955], [0.50636564, -0.84147098]], atol=1e-7)


@every_type
def test_negative_position_conjugates(rope):
    positions = int32(1, 1024, 2**31 - 1)
    forth, back = rotation(rope, positions), rotation(rope, -positions)
    np.testing.assert_array_equal(back.cos, forth.cos)
    np.testing.assert_array_equal(back.sin, -forth.sin)


@settings(max_examples=40, deadline=None)
@given(st.tuples(*[st.integers(0, 2**20)] * 3), st.tuples(*[st.integers(-(2**20), 2**20)] * 3),
       st.sampled_from(sorted(ROPES)))
def test_turning_by_a_then_b_is_turning_by_their_sum(a, b, name):
    a, b, x = int32(*a), int32(*b), vectors(3, 2, 16)
    twice = rotation(ROPES[name], b)(rotation(ROPES[name], a)(x))
    np.testing.assert_allclose(twice, rotation(ROPES[name], a + b)(x), atol=2e-6)


@every_type
def test_scores_depend_on_distance_alone(rope):
    x = vectors(3, 2, 16)
    near, far = rotate(rope, x, int32(0, 7, 19)), rotate(rope, x, int32(9, 16, 28) + 1_000_000)
    scores = [np.einsum("qhd,khd->hqk", keys, keys) for keys in (near, far)]
    np.testing.assert_allclose(*scores, atol=2e-5)


def test_a_quarter_turn_in_both_orders():
    x = jnp.arange(1.0, 5.0)[None, None]
    inv_freq = (math.pi / 2, math.pi)  # pair 0 turns a quarter, pair 1 a half
    half_split = rotate(Rope(inv_freq), x, int32(1))
    neighbours = rotate(Rope(inv_freq, interleaved=True), x, int32(1))
    np.testing.assert_allclose(half_split[0, 0], [-3, -2, 1, -4], atol=1e-6)
    np.testing.assert_allclose(neighbours[0, 0], [-2, 1, -3, -4], atol=1e-6)


def test_interleaved_is_half_split_of_permuted_dims():
    order = jnp.array([*range(0, 16, 2), *range(1, 16, 2), *range(16, 24)])
    x, positions = vectors(3, 2, 24), int32(5, 900, 70_000)
    half_split = rotate(Rope.default(16), x[..., order], positions)
    neighbours = rotate(Rope.default(16, interleaved=True), x, positions)
    np.testing.assert_allclose(half_split, neighbours[..., order], atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rotary_leaves_the_rest_untouched(interleaved):
    rope = Rope(ROPES["yarn"].inv_freq, magnitude=1.5, interleaved=interleaved)
    x, positions = vectors(3, 2, 24), int32(5, 900, 70_000)
    out = rotate(rope, x, positions)
    np.testing.assert_array_equal(out[..., 16:], x[..., 16:])
    np.testing.assert_allclose(out[..., :16], rotate(rope, x[..., :16], positions), atol=1e-6)


def test_magnitude_is_applied_at_birth_and_never_in_a_turn():
    rope, x, positions = ROPES["yarn"], vectors(3, 2, 16), int32(0, 9, 700)
    plain = Rope(rope.inv_freq)
    np.testing.assert_allclose(rotate(rope, x, positions),
                               1.1386294 * rotate(plain, x, positions), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(rotation(rope, positions).cos, rotation(plain, positions).cos)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_result_is_float32_of_the_input_rotated_unrounded(dtype):
    x, positions = vectors(3, 2, 16, dtype=dtype), int32(0, 9, 700)
    out = rotate(ROPES["default"], x, positions)
    assert out.dtype == jnp.float32
    exact = rotate(ROPES["default"], x.astype(jnp.float32), positions)
    np.testing.assert_allclose(out, exact, atol=1e-6)


def test_jit_and_vmap_change_nothing():
    x, positions = vectors(2, 3, 2, 16), jnp.array([[0, 9, 700], [-3, 1024, 2**20]], jnp.int32)
    rope = ROPES["yarn"]
    plain = rope.rotate(x, positions)
    np.testing.assert_allclose(rotate(rope, x, positions), plain, atol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.vmap(rope.rotate))(x, positions), plain, atol=1e-6)


def test_rope_is_static_under_jit():
    traced = []

    @jax.jit(static_argnums=0)
    def frequencies(rope):
        traced.append(rope)
        return jnp.array(rope.inv_freq)

    for theta in (10_000.0, 10_000.0, 500_000.0):
        frequencies(Rope.default(16, theta))
    assert traced == [Rope.default(16, 10_000.0), Rope.default(16, 500_000.0)]


@every_type
def test_a_position_rotates_the_same_whatever_else_is_rotated(rope):
    among_small = rotation(rope, int32(0, 12_345, 1))
    among_large = rotation(rope, int32(2**31 - 1, 12_345, 2**20))
    np.testing.assert_array_equal(among_small.cos[1], among_large.cos[1])
    np.testing.assert_array_equal(among_small.sin[1], among_large.sin[1])


@pytest.mark.parametrize("scaling", [None, {"type": "linear", "factor": 4.0},
                                     YARN | {"type": "yarn"}, LLAMA3 | {"type": "llama3"}])
def test_table_does_not_depend_on_the_context_length(scaling):
    short, long = (Rope.from_config(BASE | {"rope_scaling": scaling,
                                            "max_position_embeddings": length})
                   for length in (512, 131_072))
    assert short == long
