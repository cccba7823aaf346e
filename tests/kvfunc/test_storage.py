"""What an element of storage looks like, and that padding is discarded."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvfunc.storage import KV, fastest_dtype, number_dtype, read_block, write_layer


def test_there_is_one_array_of_keys_and_one_of_values_a_layer():
    kv = KV.zeros(layers=2, slots=7, kv_heads=3, head_dim=4)
    assert [x.shape for x in (*kv.k, *kv.v)] == [(7, 3, 4)] * 4
    assert {x.dtype for x in (*kv.k, *kv.v)} == {jnp.dtype(jnp.bfloat16)}
    assert kv.slots == 7


@pytest.mark.parametrize("change, message", [
    (dict(layers=0), "layers must be at least 1, got 0"),
    (dict(slots=-3), "slots must be at least 1, got -3"),
    *((dict(dtype=dtype), "dtype must be a float type of 16 bits or more, int8, float8_e4m3fn, or "
                          "uint16 or uint8 for the bits of bfloat16 or float8_e4m3fn, "
                          f"got {jnp.dtype(dtype)}") for dtype in (jnp.int32, jnp.float8_e5m2))])
def test_storage_that_cannot_be_is_named(change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        KV.zeros(**dict(layers=1, slots=1, kv_heads=1, head_dim=1) | change)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn, jnp.uint8, "int8"])
def test_quantised_layers_are_values_with_a_scale_for_each_token_and_head(dtype):
    kv = KV.zeros(layers=2, slots=7, kv_heads=3, head_dim=4, dtype=dtype)
    for x in (*kv.k, *kv.v):
        assert (x.values.shape, x.values.dtype) == ((7, 3, 4), dtype)
        assert (x.scales.shape, x.scales.dtype) == ((7, 3), jnp.float32)
        assert (x.shape, number_dtype(x)) == ((7, 3, 4), jnp.float32)
    assert kv.slots == 7
    assert not any(x.any() for x in jax.tree.leaves(kv))


@pytest.mark.parametrize("dtype, expected", [
    (jnp.float32, 2 * 2 * 3 * 4 * 4), (jnp.bfloat16, 2 * 2 * 3 * 4 * 2),
    (jnp.int8, 2 * 2 * 3 * (4 + 4)), (jnp.uint8, 2 * 2 * 3 * (4 + 4))])
def test_bytes_per_token_count_all_layers_k_v_and_scales(dtype, expected):
    def storage():
        return KV.zeros(layers=2, slots=7, kv_heads=3, head_dim=4, dtype=dtype)

    kv = storage()
    assert kv.bytes_per_token == expected
    assert kv.bytes_per_token * kv.slots == sum(x.nbytes for x in jax.tree.leaves(kv))
    assert jax.eval_shape(storage).bytes_per_token == expected  # known before there is room
    batch = jax.tree.map(lambda x: jnp.stack([x] * 5), kv)
    assert (batch.bytes_per_token, batch.slots) == (expected, 7)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a rule for the CPU")
def test_the_cpu_keeps_bfloat16_and_fp8_as_bits():
    assert fastest_dtype(jnp.bfloat16) == jnp.uint16
    assert fastest_dtype("float8_e4m3fn") == jnp.uint8
    for dtype in (jnp.float32, jnp.int8, jnp.uint8, jnp.uint16):
        assert fastest_dtype(dtype) == dtype
    assert number_dtype(jnp.zeros(1, jnp.uint16)) == jnp.bfloat16
    assert number_dtype(jnp.zeros(1, jnp.float16)) == jnp.float16


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.uint16, jnp.int8,
                                   jnp.float8_e4m3fn, jnp.uint8])
def test_what_is_written_is_read_back_and_padding_is_discarded(dtype):
    stored = KV.zeros(1, 6, 1, 1, dtype).k[0]
    new = jnp.array([1.0, -2.5, 7.0, 9.0])[:, None, None]
    stored = write_layer(stored, jnp.array([4, 0, 6, 1000]), new)
    assert jax.tree.leaves(stored)[0].dtype == dtype
    block = read_block(stored, jnp.int32(0), 6)
    assert block.dtype == number_dtype(stored)
    # The one dim of a head is the largest of its vector, so quantised too it is off by a last bit.
    np.testing.assert_allclose(block[:, 0, 0], [-2.5, 0, 0, 0, 1, 0], rtol=2e-7)
    np.testing.assert_allclose(read_block(stored, jnp.int32(4), 2)[:, 0, 0], [1, 0], rtol=2e-7)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.uint16])
def test_numbers_are_rounded_to_the_nearest_of_the_stored_type(dtype):
    stored = KV.zeros(1, 3, 1, 1, dtype).k[0]
    new = jnp.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-7])[:, None, None]
    stored = write_layer(stored, jnp.arange(3), new)
    np.testing.assert_array_equal(read_block(stored, jnp.int32(0), 3)[:, 0, 0],
                                  [1, 1 + 2**-6, 1 + 2**-7])


def test_bits_are_those_of_bfloat16():
    stored = write_layer(KV.zeros(1, 2, 1, 1, jnp.uint16).k[0], jnp.arange(2),
                         jnp.array([1.0, -2.0])[:, None, None])
    assert [hex(bits) for bits in stored.ravel().tolist()] == ["0x3f80", "0xc000"]
