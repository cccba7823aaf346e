"""One pass over a history equals living it, through a whole model (Laws 7, 8, 11)."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import HEAD_DIM, HEADS, KV_HEADS, QUERIES, ROPES, ROWS, SLOTS, padded, verbs

import kvfunc
from kvfunc import Drop, History, Rope
from kvfunc.history import HOLE
from kvfunc.models.config import ModelConfig
from kvfunc.models.llama import Llama
from kvfunc.models.moe import MoE

pytestmark = pytest.mark.usefixtures("each_attention")

LAYERS, VOCABULARY = 2, 61
# All in which families differ from Llama, some of it in each.
RELATIVES = {
    "llama": {},
    "GPT-OSS": {"windowed": (True, False), "biases": "qkvo", "sinks": True,
                "activation": "clamped_swiglu",
                "moe": MoE(experts=4, chosen=2, width=12, scores="softmax_of_chosen",
                           biases=True, shared_width=8)},
    "Gemma 3": {"windowed": (False, True), "window_rope": Rope.default(HEAD_DIM, 100.0),
                "qk_norm": "all", "softcap": 5.0, "logit_softcap": 3.0, "gemma_norms": True,
                "attention_scale": 0.5, "embed_scale": 2.0, "activation": "gelu_tanh"},
}


def weight(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Random matrices that keep the size of a vector; norms of ones."""
    if len(like.shape) == 1:
        return jnp.ones(like.shape, like.dtype)
    numbers = np.random.default_rng(like.shape).standard_normal(like.shape)
    return jnp.asarray(numbers / like.shape[-1] ** 0.5, like.dtype)


@functools.lru_cache
class TinyLlama:
    """Two layers with random weights, compiled for one shape."""

    def __init__(self, rope: str, dtype, window: int | None, tolerance: float, kv_dtype=None,
                 relative: str = "llama"):
        config = ModelConfig(
            vocab_size=VOCABULARY, width=32, layers=LAYERS, heads=HEADS, kv_heads=KV_HEADS,
            head_dim=HEAD_DIM, mlp_width=48, norm_eps=1e-5, tied=False, rope=ROPES[rope],
            context_length=64, window=window, **RELATIVES[relative])
        model = Llama(config, dtype)
        self.kv_dtype, self.tolerance = kv_dtype or dtype, tolerance
        some, nobody = np.zeros(QUERIES, np.int32), kvfunc.Rows.empty().pad(ROWS, QUERIES)
        kv = kvfunc.KV.zeros(LAYERS, SLOTS, KV_HEADS, HEAD_DIM, self.kv_dtype)
        shapes = jax.eval_shape(model.init, jax.random.key(0), some, some, some, kv, nobody)
        self.params = jax.tree.map(weight, shapes["params"])
        self.forward = jax.jit(model.forward)

    def empty_cache(self):
        return programs.empty_cache(self.kv_dtype, LAYERS)

    def run(self, tokens, births, slots, kv, rows):
        """Logits [tokens, vocabulary] and the storage."""
        logits, kv = self.forward(self.params, padded(tokens, 0), padded(births, 0),
                                  padded(slots, SLOTS), kv, rows.pad(ROWS, QUERIES))
        return np.asarray(logits)[:len(tokens)], kv

    def close(self, found, expected):
        np.testing.assert_allclose(found, expected, rtol=0, atol=self.tolerance)


every_model = pytest.mark.parametrize("model", [
    pytest.param(("yarn", jnp.float32, None, 1e-5), id="float32"),
    pytest.param(("llama3", jnp.bfloat16, 12, 1e-1), id="bfloat16, window"),
    # Where sums in another order cross the border of a step, a key or value differs by a step.
    pytest.param(("default", jnp.float32, None, 1e-1, jnp.int8), id="int8 KV"),
    # Norms that scale by two and products with biases round a little more.
    pytest.param(("yarn", jnp.float32, 9, 5e-5, None, "GPT-OSS"), id="as GPT-OSS"),
    pytest.param(("linear", jnp.float32, 9, 5e-5, None, "Gemma 3"), id="as Gemma 3"),
])


class Computed(NamedTuple):
    logits: np.ndarray  # [tokens, vocabulary]
    k: list[np.ndarray]  # by layer [tokens, KV_HEADS, HEAD_DIM] float64
    v: list[np.ndarray]

    @classmethod
    def of(cls, logits, kv, slots) -> "Computed":
        return cls(logits, *([programs.numbers(x)[slots] for x in stored]
                             for stored in (kv.k, kv.v)))

    def check(self, model: TinyLlama, other: "Computed", tokens=slice(None)):
        for mine, theirs in zip(jax.tree.leaves(self), jax.tree.leaves(other), strict=True):
            model.close(mine[tokens], theirs[tokens])


def live_through(model: TinyLlama, ops, tokens) -> Computed:
    """Stage by stage on a KVCache."""
    cache, first, logits = model.empty_cache(), 0, []
    for op in ops:
        match op:
            case "append", count:
                cache, new = verbs.reserve(cache, count=np.int32(count))
                out, kv = model.run(tokens[first:first + count], new.births[:count],
                                    new.slots[:count], cache.kv, verbs.rows(cache, new))
                cache = kvfunc.KVCache(kv, cache.birth, cache.position, cache.next_position)
                logits.append(out)
                first += count
            case "drop", which:
                cache, _ = verbs.drop(cache, programs.raw_mask(oracle.covered(which)))
            case ("repos",):
                cache, _ = verbs.repos(cache)
    return Computed.of(np.concatenate(logits), cache.kv, np.arange(first))


def recompute(model: TinyLlama, history: History, queries, tokens, slots, kv, cuts=()):
    """The queries in one pass in raw order, cut into chunks; logits [queries, vocabulary], KV."""
    logits = []
    for chunk in np.split(queries, cuts):
        if len(chunk):
            out, kv = model.run(tokens[chunk], history.births[chunk], slots[chunk], kv,
                                history.rows(chunk, slots))
            logits.append(out)
    return np.concatenate(logits), kv


def in_one_pass(model: TinyLlama, history: History, tokens, slots, cuts=()) -> Computed:
    queries = np.arange(history.tokens)
    logits, kv = recompute(model, history, queries, tokens, slots, model.empty_cache().kv, cuts)
    return Computed.of(logits, kv, slots)


def token_ids(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, SLOTS).astype(np.int32)


@st.composite
def chunkings(draw, queries: int):
    return sorted(draw(st.lists(st.integers(0, queries), max_size=3)))


@every_model
@settings(max_examples=20)
@given(ops=programs.programs(repos=3), seed=programs.seeds, data=st.data())
def test_one_pass_over_a_program_equals_living_it_stage_by_stage(model, ops, seed, data):
    model, history, tokens = TinyLlama(*model), programs.history(ops), token_ids(seed)
    slots = data.draw(programs.orders, label="slots")[:history.tokens]
    cuts = data.draw(chunkings(history.tokens), label="cuts")
    lived = live_through(model, ops, tokens)
    in_one_pass(model, history, tokens, slots, cuts).check(model, lived)


@pytest.mark.parametrize("kv_dtype, bound", [(jnp.int8, 0.1), (jnp.float8_e4m3fn, 0.5)])
def test_quantised_kv_moves_logits_a_little_and_chunks_do_not(kv_dtype, bound):
    """Logits are about 1. Chunks would move them as much if a chunk read its own KV unrounded."""
    def logits(dtype, cuts=()):
        model = TinyLlama("llama3", jnp.float32, None, 1e-5, dtype)
        return in_one_pass(model, History(QUERIES), token_ids(0), np.arange(QUERIES), cuts).logits

    def size(difference):
        return np.sqrt(np.square(difference).mean())

    exact, whole = logits(jnp.float32), logits(kv_dtype)
    assert np.abs(whole - exact).max() < bound
    assert size(whole - exact) > 1e-3
    assert size(whole - logits(kv_dtype, cuts=range(1, QUERIES))) < size(whole - exact) / 10


@every_model
@settings(max_examples=20)
@given(ops=programs.programs(repos=3), seed=programs.seeds, data=st.data())
def test_what_is_needed_recovers_any_evicted_tokens_in_one_pass(model, ops, seed, data):
    model, history, tokens = TinyLlama(*model), programs.history(ops), token_ids(seed)
    slots = data.draw(programs.orders, label="slots")[:history.tokens]
    whole = in_one_pass(model, history, tokens, slots)
    evicted = np.array(data.draw(st.lists(st.booleans(), min_size=history.tokens,
                                          max_size=history.tokens), label="evicted"))
    needed = history.needed(evicted, [history.tokens - 1])

    kv = model.empty_cache().kv  # holds NaN where nothing is put back
    resident = slots[~evicted]
    _, full = recompute(model, history, np.arange(history.tokens), tokens, slots, kv)
    kv = programs.only_in(np.isin(np.arange(SLOTS), resident), full)
    known = np.where(evicted, HOLE, slots)
    known[needed] = slots[needed]
    logits, kv = recompute(model, history, needed, tokens, known, kv,
                           data.draw(chunkings(len(needed)), label="cuts"))
    model.close(logits, whole.logits[needed])
    recovered = Computed.of(whole.logits, kv, slots)
    recovered.check(model, whole, tokens=needed)


@every_model
@settings(max_examples=15)
@given(ops=programs.programs(tokens=24, repos=2), seed=programs.seeds, data=st.data())
def test_equal_tokens_and_events_before_a_token_give_it_equal_kv(model, ops, seed, data):
    model, history, tokens = TinyLlama(*model), programs.history(ops), token_ids(seed)
    keep = data.draw(st.integers(1, history.tokens), label="kept")
    events = [event for event in history.events if event.at <= keep]
    if data.draw(st.booleans(), label="drops at the end"):
        events.append(Drop(keep, ((0, 1),)))
    other = History(keep + data.draw(st.integers(0, 8), label="more"), events)
    shared = history.common_prefix(other)
    other_tokens = np.where(np.arange(SLOTS) < shared, tokens, token_ids(seed + 1))
    a = in_one_pass(model, history, tokens, data.draw(programs.orders)[:history.tokens])
    b = in_one_pass(model, other, other_tokens, data.draw(programs.orders)[:other.tokens])
    assert shared >= min(keep, history.tokens)
    a.check(model, b, tokens=slice(shared))
