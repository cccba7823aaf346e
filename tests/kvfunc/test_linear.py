"""Products of int8: exact sums, whatever the sizes, and the same on every road."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfunc import cpu, linear
from kvfunc.linear import int8_product
from kvfunc.quantize import Quantized

sizes = st.sampled_from([1, 2, 15, 16, 17, 31, 33, 70])


def numbers(rows, columns, seed):
    random = np.random.default_rng(seed)
    values = random.integers(-128, 128, (rows, columns)).astype(np.int8)
    scales = random.uniform(0.01, 2, rows).astype(np.float32)
    return Quantized(jnp.asarray(values), jnp.asarray(scales))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(sizes, st.sampled_from([1, 3, 16, 31, 32, 64, 65, 130]), st.sampled_from([1, 4, 63, 64, 65,
                                                                              200]))
def test_sums_are_exact(tokens, outputs, inner):
    x, weight = numbers(tokens, inner, 1), numbers(outputs, inner, 2)
    sums = np.asarray(x.values, np.int64) @ np.asarray(weight.values, np.int64).T
    wanted = (sums.astype(np.float32) * np.asarray(x.scales)[:, None]
              * np.asarray(weight.scales)[None])
    np.testing.assert_array_equal(int8_product(x, weight), wanted)
    np.testing.assert_array_equal(jax.jit(linear._xla)(x, weight), wanted)


def test_without_amx_xla_does_it(monkeypatch):
    monkeypatch.setattr(cpu, "has_int8", lambda: False)
    monkeypatch.setattr(cpu, "int8_product", None)
    x, weight = numbers(5, 70, 3), numbers(40, 70, 4)
    np.testing.assert_array_equal(int8_product(x, weight), linear._xla(x, weight))


def test_other_types_are_refused():
    x = numbers(2, 8, 0)
    wide = Quantized(x.values.astype(jnp.uint8), x.scales)
    with pytest.raises(ValueError, match="weight must be int8, got uint8"):
        int8_product(x, wide)
