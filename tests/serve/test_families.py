"""Every family through the engine: whatever is found or edited, the answer is the library's.

The models are those of tests/goldens, in float32 at temperature 0. What the library computes of
them is held against transformers in tests/models.
"""

import json
import pathlib

import jax.numpy as jnp
import pytest

from kvfunc.history import Drop, Repos
from kvfunc.models.chat import ChatTemplate
from kvfunc.models.load import LoadedModel
from kvfunc.models.load_hf import load_hf
from kvfunc.serve.engine import Engine

from .fake import TEMPLATE, byte_tokenizer
from .test_engine import Request, answers_of_the_library, ask, assert_same, emptied, text

GOLDENS = pathlib.Path(__file__).parents[1] / "goldens"
NAMES = {json.loads(path.read_text())["model_type"]: path.parent.name
         for path in sorted(GOLDENS.glob("*/config.json"))}
TOLERANCE = 5e-5  # of a log-probability
POOL = 256


@pytest.fixture(scope="module", params=sorted(NAMES))
def family(request):
    """An engine with a model of this type, and the answers of the library."""
    tokenizer = byte_tokenizer()
    config, params = load_hf(GOLDENS / NAMES[request.param], jnp.float32)
    model = LoadedModel("golden", config, params, tokenizer, ChatTemplate(TEMPLATE, tokenizer))
    engine = Engine(model, kv_tokens=POOL, chunk=32, page_size=4, max_num_seqs=2)
    return emptied(engine), answers_of_the_library(model, size=64)


def test_turns_with_drop_and_repos_cold_warm_and_recovered(family):
    engine, cold = family
    engine.clear()
    first = Request(text(90, 1), (Drop(30, ((4, 21),)),), 3)  # longer than the window of 64
    usage, answer = ask(engine, first)
    assert_same(answer, cold(first), TOLERANCE)
    assert usage.cached_tokens == 0

    second = first.then(answer, 17, Drop(93, ((40, 70),)), Repos(93), new=3)
    usage, answer = ask(engine, second)
    assert_same(answer, cold(second), TOLERANCE)
    assert usage.cached_tokens > 30  # what the first turn wrote, read across the repos
    warm = answer

    engine.clear()
    assert_same(ask(engine, second)[1], warm, TOLERANCE)

    before = engine.counters.evicted
    ask(engine, Request(text(POOL - 20, 5), new=2), "another")
    assert engine.counters.evicted > before
    usage, answer = ask(engine, second)
    assert_same(answer, warm, TOLERANCE)
