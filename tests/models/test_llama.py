"""The model against transformers' logits, and the embedded one against what other engines say."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvfunc.history import History
from kvfunc.models.llama import Llama
from kvfunc.models.load import load
from kvfunc.models.load_hf import load_hf
from kvfunc.serve.engine import Engine
from kvfunc.serve.interface import End, Job, Sampling
from kvfunc.storage import KV, fastest_dtype

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/expected.npz"))
SIZE, ROWS, SLOTS = 160, 32, 640


class Golden:
    """A model of tests/goldens run through rows, in steps of one size: attention compiles once."""

    def __init__(self, name):
        self.config, self.params = load_hf(GOLDENS / name, jnp.float32)
        self.expected = np.load(GOLDENS / name / "expected.npz")
        self.tokens = self.expected["tokens"]
        self.network = Llama(self.config, jnp.float32)
        c = self.config
        self.kv = KV.zeros(c.layers, SLOTS, c.kv_heads, c.head_dim, jnp.float32)

    def run(self, tokens, chunks, start=0, padding=0):
        """Logits of tokens [start, …) in chunks of these sizes; earlier ones have their KV."""
        history = History(start + len(tokens))
        slots = np.arange(history.tokens, dtype=np.int32)
        logits, done = [], 0
        for count in chunks:
            queries = start + np.arange(done, done + count)
            rows = history.rows(queries, slots).pad(ROWS, SIZE)

            def padded(values, fill, missing=SIZE - count):
                return jnp.asarray(np.pad(values, (0, missing), constant_values=fill), jnp.int32)

            out, self.kv = self.network.forward(
                self.params, padded(tokens[done : done + count], padding),
                padded(history.births[queries], padding), padded(slots[queries], SLOTS), self.kv,
                jax.tree.map(jnp.asarray, rows))
            logits.append(np.asarray(out)[:count])
            done += count
        assert done == len(tokens)
        return np.concatenate(logits)


golden = functools.cache(Golden)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_are_those_of_transformers(name):
    model = golden(name)
    expected = model.expected
    logits = model.run(model.tokens, [150] * 4)
    np.testing.assert_allclose(logits[expected["positions"]], expected["logits"], rtol=0, atol=1e-4)
    greedy = [int(logits[-1].argmax())]
    while len(greedy) < len(expected["greedy"]):
        start = len(model.tokens) + len(greedy) - 1
        greedy.append(int(model.run(np.array(greedy[-1:]), [1], start)[-1].argmax()))
    assert greedy == expected["greedy"].tolist()


def test_experts_in_bfloat16_are_near():
    config, params = load_hf(GOLDENS / "qwen3_moe", jnp.bfloat16)
    assert params["layer_1"]["experts_up"]["weight"].dtype == fastest_dtype(jnp.bfloat16)
    model = Golden("qwen3_moe")
    model.params, model.network = params, Llama(config, jnp.bfloat16)
    logits, expected = model.run(model.tokens[:160], [160]), model.expected["logits"][:7]
    found = logits[model.expected["positions"][:7]]
    assert np.sqrt(np.square(found - expected).mean()) < 0.05 * expected.std()


@pytest.mark.parametrize("chunks", [[160, 160, 160, 120], [1, 7, 8, 9, 127, 128, 129, 63, 64, 64]])
def test_chunks_of_any_size_give_the_same_logits(chunks):
    model = golden("llama3")
    logits = model.run(model.tokens, chunks)
    np.testing.assert_allclose(logits[model.expected["positions"]], model.expected["logits"],
                               rtol=0, atol=1e-4)


def test_padding_changes_nothing():
    model = golden("llama3")
    once, again = (model.run(model.tokens[:130], [100, 30], padding=fill) for fill in (0, 255))
    np.testing.assert_array_equal(once, again)


@pytest.fixture(scope="module")
def embedded(embedded_gguf):
    """SmolLM2-135M-Instruct with float32 weights."""
    return load(embedded_gguf, jnp.float32)


@pytest.mark.parametrize("dtype, chunk", [(jnp.float32, 1), (jnp.bfloat16, 2)])
def test_the_embedded_model_continues_as_it_does_in_other_engines(embedded, dtype, chunk):
    weights = jax.tree.map(lambda x: x.astype(dtype), embedded.params)
    engine = Engine(dataclasses.replace(embedded, params=weights), kv_tokens=64, max_num_seqs=1,
                    chunk=chunk)
    prompt = np.array(embedded.tokenizer.encode("The capital of France is"), np.int32)
    said = []
    engine.submit(Job(prompt, History(len(prompt)), "", 24, Sampling(temperature=0.0)), said.append)
    while engine.step():
        pass
    assert said.pop() == End("length")
    answer = embedded.tokenizer.decode([token.id for token in said])
    assert answer == " Paris.\n\nThe answer is: 2018-01-22 12:1"
    assert engine.compilations == 1
