"""Matrices as int8: what is computed, how far it is off, and how little chunks show."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvfunc import models
from kvfunc.history import History
from kvfunc.linear import product
from kvfunc.models.llama import Llama
from kvfunc.quantize import Quantized, quantize
from kvfunc.storage import KV

TEXT = ("The cache of a language model holds the keys and values of every token that it has read. "
        "Reading them again for each new token is most of the cost of a long conversation, and so "
        "it pays to leave out what nobody needs any more.")


def test_a_product_is_the_integers_times_both_scales():
    x = jnp.array([[1.0, -2.0, 4.0], [0.0, 0.0, 0.0]], jnp.float32)
    weight = Quantized(jnp.array([[127, 0, -127], [1, 2, 3]], jnp.int8),
                       jnp.array([0.5, 2.0], jnp.float32))
    rounded = np.round(np.array([1, -2, 4]) * 127 / 4)  # 32, -64, 127
    wanted = [[(127 * rounded[0] - 127 * rounded[2]) * 4 / 127 * 0.5,
               (rounded * [1, 2, 3]).sum() * 4 / 127 * 2], [0, 0]]
    np.testing.assert_allclose(product(x, weight, jnp.float32), wanted, rtol=1e-6)


@pytest.fixture(scope="module")
def loaded():
    return models.load(dtype=jnp.float32), models.load(dtype=jnp.float32, quantization="int8")


def logits(model, chunks, tokens):
    """Logits behind every token, with the prompt cut into chunks."""
    network, history, config = Llama(model.config, model.dtype), History(len(tokens)), model.config
    kv = KV.zeros(config.layers, len(tokens), config.kv_heads, config.head_dim, jnp.float32)
    slots, run, found = np.arange(len(tokens), dtype=np.int32), jax.jit(network.forward), []
    for chunk in chunks:
        rows = jax.tree.map(jnp.asarray, history.rows(chunk, slots))
        at = jnp.asarray(chunk.astype(np.int32))
        out, kv = run(model.params, jnp.asarray(tokens[chunk]), at, at, kv, rows)
        found.append(out)
    return np.concatenate(found)


def test_int8_is_near_and_chunks_hardly_show(loaded):
    exact, int8 = loaded
    tokens = np.array(exact.tokenizer.encode(TEXT), np.int32)
    every = np.arange(len(tokens))
    wanted, got = (logits(model, [every], tokens) for model in loaded)
    loss = [-np.asarray(jax.nn.log_softmax(x[:-1]))[every[:-1], tokens[1:]] for x in (wanted, got)]
    assert loss[0].mean() < 5
    assert abs(loss[1].mean() - loss[0].mean()) < 0.25
    assert (wanted.argmax(-1) == got.argmax(-1)).mean() > 0.7
    assert np.abs(got - wanted).max() > 1e-3  # it is another model
    cut = logits(int8, np.array_split(every, [7, 8, 30]), tokens)
    # What sums in another order can be rounded to the next integer here and there.
    assert np.abs(cut - got).mean() < 0.5 * np.abs(got - wanted).mean()
    assert (cut.argmax(-1) == got.argmax(-1)).mean() > 0.85


def test_matrices_are_int8_and_the_rest_is_not(loaded):
    _, int8 = loaded
    leaf = int8.params["layer_0"]["gate"]["weight"]
    assert leaf.values.dtype == jnp.int8 and leaf.scales.shape == leaf.values.shape[:1]
    assert int8.params["layer_0"]["attn_norm"]["weight"].dtype == int8.dtype == jnp.float32
    exact = loaded[0].params["layer_0"]["gate"]["weight"]
    stored = quantize(exact, jnp.int8)
    np.testing.assert_array_equal(leaf.values, stored.values)


def test_another_quantization_is_named():
    with pytest.raises(ValueError, match="quantization must be \"int8\" or None, got 'int3'"):
        models.load(quantization="int3")
