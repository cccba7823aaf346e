"""How anchors are stored: what each type and rank loses and takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import same_bits

from kvfunc.packed import Packed

from .anchor_oracle import CHANNELS, HEAD_DIM, HEADS, LAYERS, TOKENS, text

RANK = 5
put = jax.jit(Packed.put)
numbers = jax.jit(Packed.numbers)


def empty(dtype, rank=None, entries=(3,), tokens=TOKENS):
    return Packed.zeros(entries, LAYERS, tokens, 2 * HEADS, HEAD_DIM, dtype, rank)


def best_of_rank(flat, rank: int) -> np.ndarray:
    u, s, v = np.linalg.svd(np.asarray(flat, float), full_matrices=False)
    return (u * s[:, None])[..., :rank] @ v[:, :rank]


@pytest.mark.parametrize(("dtype", "tolerance"), [
    (jnp.float32, 0), (jnp.bfloat16, 2**-8), (jnp.float16, 2**-11), (jnp.int8, 1 / 253)])
def test_an_entry_comes_back_within_the_rounding_of_its_type(dtype, tolerance):
    flat = text(0).flat
    packed = put(empty(dtype, entries=(2, 3)), (1, 2), flat)
    of_head = np.abs(flat).reshape(LAYERS, TOKENS, -1, HEAD_DIM).max(-1, keepdims=True)
    error = np.abs(np.asarray(numbers(packed)[1, 2]) - flat)
    assert (error.reshape(*of_head.shape[:3], HEAD_DIM) <= tolerance * of_head).all()
    np.testing.assert_array_equal(packed.entry((1, 2)).numbers(), numbers(packed)[1, 2])


@pytest.mark.parametrize(("dtype", "tolerance"), [
    (jnp.float32, 1e-5), (jnp.bfloat16, 0.02), (jnp.int8, 0.02)])
def test_an_entry_of_a_rank_comes_back_as_the_best_of_that_rank(dtype, tolerance):
    flat = text(0).flat
    back = numbers(put(empty(dtype, RANK), (1,), flat))[1]
    expected = best_of_rank(flat, RANK)
    assert np.linalg.norm(back - expected) <= tolerance * np.linalg.norm(expected)


def test_what_is_of_the_rank_comes_back_whole():
    flat = jnp.asarray(best_of_rank(text(0).flat, RANK), jnp.float32)
    np.testing.assert_allclose(numbers(put(empty(jnp.float32, RANK), (0,), flat))[0], flat,
                               rtol=0, atol=2e-5)


@pytest.mark.parametrize("rank", [6, CHANNELS + 3])
def test_a_text_of_fewer_tokens_than_the_rank_comes_back_whole(rank):
    flat = text(0).flat[:, :4]
    packed = put(empty(jnp.float32, rank, tokens=4), (2,), flat)
    np.testing.assert_allclose(numbers(packed)[2], flat, rtol=0, atol=2e-5)
    assert jax.tree.map(jnp.shape, packed) == jax.tree.map(
        jnp.shape, empty(jnp.float32, rank, tokens=4))


@pytest.mark.parametrize("rank", [None, RANK])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8])
def test_other_entries_stay_bit_for_bit_and_a_place_outside_changes_nothing(dtype, rank):
    packed = put(empty(dtype, rank), (0,), text(0).flat)
    both = put(packed, (1,), text(1).flat)
    assert same_bits(both.entry((0,)), packed.entry((0,)))
    assert same_bits(both.entry((2,)), empty(dtype, rank).entry((2,)))
    assert same_bits(put(both, (3,), text(2).flat), both)


@pytest.mark.parametrize(("dtype", "rank", "size"), [
    (jnp.float32, None, 3 * 32 * 4), (jnp.bfloat16, None, 3 * 32 * 2),
    (jnp.int8, None, 3 * (32 + 4 * 4)),  # a scale for each of 4 heads
    (jnp.float32, 2, 3 * (2 * 4 + 2 * 32 * 4 / 24)),
    (jnp.int8, 2, 3 * (2 + 4 + 2 * (32 + 4 * 4) / 24))])
@pytest.mark.parametrize("entries", [(), (3,), (3, 2)])
def test_bytes_per_token(entries, dtype, rank, size):
    assert empty(dtype, rank, entries).bytes_per_token == pytest.approx(size)
    leaves = jax.tree.leaves(empty(dtype, rank, entries))
    assert sum(x.nbytes for x in leaves) == pytest.approx(size * TOKENS * np.prod(entries))


@pytest.mark.parametrize("tokens", [0, 1])
def test_room_for_no_text_is_no_error(tokens):
    packed = empty(jnp.int8, entries=(0,), tokens=tokens)
    assert packed.numbers().shape == (0, LAYERS, tokens, CHANNELS)
    assert packed.bytes_per_token >= 0


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.float8_e4m3fn, jnp.bool_])
def test_other_types_are_refused(dtype):
    with pytest.raises(ValueError, match=f"or int8, got {jnp.dtype(dtype)}"):
        empty(dtype)


def test_a_rank_below_1_is_refused():
    with pytest.raises(ValueError, match="rank must be at least 1, or None for all, got 0"):
        empty(jnp.float32, 0)
