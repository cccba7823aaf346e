"""Requests that are broken at random: a bad one is a 4xx that says why, and the server goes on."""

import copy
import json

import httpx
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfunc.models.chat import ChatTemplate
from kvfunc.models.config import ModelConfig
from kvfunc.models.load import LoadedModel
from kvfunc.models.params import fill, shapes
from kvfunc.rope import Rope
from kvfunc.serve.engine import Engine

from .fake import TEMPLATE, byte_tokenizer, serving

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
MESSAGES = [{"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "look, "},
                                         {"type": "text", "text": "look it up"}]},
            {"role": "assistant", "content": "<think>so</think>on it", "tool_calls": [CALL]},
            {"role": "tool", "content": "found", "tool_call_id": "1", "name": "f"},
            {"role": "user", "content": "and?"}]
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "n": 2,
            "best_of": 2, "presence_penalty": 0.1, "frequency_penalty": -0.1,
            "repetition_penalty": 1.1, "logit_bias": {"5": -1.5}, "min_tokens": 1,
            "stop_token_ids": [7], "stop": ["zz", "yy"], "max_tokens": 4, "ignore_eos": False,
            "stream": True, "stream_options": {"include_usage": True}}
CHATS = {"tools": [TOOL], "tool_choice": "auto", "chat_template_kwargs": {"x": 1},
         "max_completion_tokens": 4, "logprobs": True, "top_logprobs": 2}
PARTS = [1, "0", 2.0, {"message": 1, "text": "look", "occurrence": 2},
         {"message": 2, "part": "thinking"}]
SELECTED = [{"role": "system", "content": None}, {"role": "user", "content": ["look", "up"]},
            {"role": "assistant", "content": "on it", "occurrence": 1},
            {"role": "tool", "content": ""}, {"role": "user", "content": None}]

# Every documented field, in requests that are good.
GOOD = [
    (CHAT, {"model": "fake", "messages": MESSAGES, **SAMPLING, **CHATS, "cache": {
        "drop": {"4": PARTS, "9": [0]}, "reposition": [1, 4], "salt": "t", "exact": True,
        "explain": False, "drop_thinking": True}}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 2, "cache": {"drop_thinking": True, "policy": {
        "type": "rolling_tool_outputs", "keep": 1, "reposition_above_tokens": 10}}}),
    (CHAT, {"messages": MESSAGES, "cache": {"explain": True, "drop": {"4": PARTS}}}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 2, "drop_message": {"3": [1, 2]},
            "reposition": [3], "cache": {"drop_thinking": True}}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 2, "reposition": [0, 3], "drop_rule": {
        "type": "message_drop", "drop_messages": {"3": [1, 2]}}}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 2, "drop_rule": {
        "type": "text_drop", "drop_messages": SELECTED}}),
    (CHAT, {"messages": [{"role": "user", "content": "look"}, MESSAGES[4]], "max_tokens": 2,
            "drop_rule": {"type": "keep_text_drop", "full_messages": MESSAGES, "force": False}}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 2, "drop_rule": {"type": "thinking_drop"}}),
    (COMPLETION, {"model": "fake", "prompt": ["a", "bc"], **SAMPLING, "logprobs": 2,
                  "cache": {"salt": "t", "exact": True}}),
    (COMPLETION, {"prompt": [[1, 2], [3]], "max_tokens": 2, "echo": False, "suffix": ""}),
]


def nested(depth, opening, closing):
    return opening * depth + "1" + closing * depth


# As JSON text.
ODD = ["null", "true", "false", "0", "1", "-1", str(2**31), str(2**63), str(-(2**63) - 1),
       str(10**30), "0.5", "-0.5", "1e308", "1e999", '""', '"x"', '"0"', '"03"', '"٣"', '"\\u0000"',
       '"😀"', '"e\u0301"', '"\ufffd"', f'"{"a" * 300}"', "[]", "{}", "[[]]", "[null]", "[-1]",
       '["x"]', '{"a": 1}', '{"": null}', '{"message": 0}', '{"type": "x"}', '{"0": [0]}',
       '[{"role": "user"}]', "NaN", "-Infinity", '"\\ud800"', *(
           nested(depth, *braces) for depth in (40, 400, 900, 960)
           for braces in (("[", "]"), ('{"x": ', "}")))]
KEYS = ["", "x", "_x", "role", "content", "cache", "drop", "share", "text", "part", "message",
        "type", "tool_calls", "reposition", "drop_message", "drop_rule", "😀", "0"]
MARK = "(odd)"


def paths(value, at=()):
    """The places of all values inside a JSON value."""
    yield at
    inside = value.items() if isinstance(value, dict) else (
        enumerate(value) if isinstance(value, list) else ())
    for key, item in inside:
        yield from paths(item, (*at, key))


@st.composite
def broken(draw):
    """(path, JSON text) of a good request with up to three things changed."""
    path, body = draw(st.sampled_from(GOOD))
    body = copy.deepcopy(body)
    odd = []
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from([*paths(body)][1:] or [("messages",)]))
        holder = body
        for key in way:
            holder = holder[key]
        change = draw(st.sampled_from(["replace", "remove", "add", "rename", "twice"]))
        if change in ("replace", "add"):
            odd.append(draw(st.sampled_from(ODD)))
        if change == "remove":
            del holder[last]
        elif change == "replace":
            holder[last] = f"{MARK}{len(odd) - 1}"
        elif isinstance(holder, list):
            holder.insert(last, f"{MARK}{len(odd) - 1}" if change == "add" else holder[last])
        elif change == "add":
            holder[draw(st.sampled_from(KEYS))] = f"{MARK}{len(odd) - 1}"
        elif change == "rename":
            holder[draw(st.sampled_from(KEYS))] = holder.pop(last)
        if not body:
            break
    raw = json.dumps(body)
    for place, text in enumerate(odd):
        raw = raw.replace(f'"{MARK}{place}"', text)
    return path, raw.encode()


@st.composite
def broken_bytes(draw):
    """(path, bytes) of a good request whose JSON is damaged."""
    path, body = draw(st.sampled_from(GOOD))
    raw = json.dumps(body).encode()
    at = draw(st.integers(0, len(raw)))
    damage = draw(st.sampled_from([
        b"", b"\x00", b"\xff", b"\xed\xa0\x80", b"NaN", b"-Infinity", b"1e999", b"\\ud800", b"{",
        b"]", b'"', b",", b'"model": 1, "model": 2,', b"[" * 5000, b"9" * 5000]))
    return path, raw[:at] + damage + (raw[at:] if draw(st.booleans()) else b"")


def send(client, path, raw):
    return client.post(path, content=raw, headers={"content-type": "application/json"})


def assert_well_answered(response):
    """Either an answer, or a 4xx in OpenAI's envelope that says why."""
    if response.status_code == 200:
        assert '"error"' not in response.text
        return
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and len(error["message"]) > 10
    assert isinstance(error["code"], str)
    assert (error["param"] is None) == (error["code"] == "invalid_json"), error


@pytest.mark.parametrize("path, body", GOOD)
def test_a_request_with_every_documented_field_is_answered(served, path, body):
    for stream in (True, False):
        asked = {**body, "stream": stream}
        if not stream:
            asked.pop("stream_options", None)
        response = served.post(path, **asked)
        assert response.status_code == 200, response.text
        assert '"error"' not in response.text


over_a_server = settings(max_examples=250, deadline=None, suppress_health_check=[
    HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large])


@pytest.mark.parametrize("kind", [broken, broken_bytes])
@over_a_server
@given(st.data())
def test_a_broken_request_is_refused_and_the_next_one_answered(served, kind, data):
    path, raw = data.draw(kind())
    assert_well_answered(send(served.client, path, raw))
    assert served.ask(max_tokens=1).status_code == 200


@pytest.mark.parametrize("field, value", [
    ("cache", {"unknown": 1}), ("messages", 5), ("messages", [{"role": "wizard", "content": ""}]),
    ("messages", [5]), ("n", 2**70), ("temperature", -1e300), ("max_tokens", -1), ("stop", [None]),
    ("cache", {"drop": {"0": [5]}}), ("drop_rule", {"type": "text_drop", "drop_messages": [[]]}),
    ("messages", [{"role": "user", "content": [
        {"type": "text", "text": "a", "cache": {"share": ""}}]}]),
])
def test_what_is_surely_bad_is_surely_refused(served, field, value):
    response = served.post(CHAT, **{"messages": MESSAGES, field: value})
    assert response.status_code == 400
    assert_well_answered(response)


# Over the real engine


CONFIG = ModelConfig(vocab_size=257, width=16, layers=1, heads=2, kv_heads=1, head_dim=8,
                     mlp_width=16, norm_eps=1e-5, tied=False, rope=Rope.default(8, 1000.0),
                     context_length=400)


@pytest.fixture(scope="module")
def tiny():
    """A client of the real engine with a tiny random model."""
    rng = np.random.default_rng(7)
    tokenizer = byte_tokenizer()
    params = fill(CONFIG, str, lambda place: rng.normal(size=shapes(CONFIG)[place]), jnp.float32)
    model = LoadedModel("fake", CONFIG, params, tokenizer, ChatTemplate(TEMPLATE, tokenizer))
    engine = Engine(model, kv_tokens=2048, chunk=64, max_num_seqs=8)
    engine.warm_up()
    with serving(engine) as (_, url), httpx.Client(
            base_url=url, trust_env=False, timeout=60) as client:
        yield client


@pytest.mark.parametrize("path, body", GOOD)
def test_the_engine_answers_every_documented_field(tiny, path, body):
    response = tiny.post(path, json=body)
    assert response.status_code == 200, response.text
    assert '"error"' not in response.text


@settings(over_a_server, max_examples=60)
@given(broken() | broken_bytes())
def test_no_broken_request_harms_the_engine(tiny, asked):
    path, raw = asked
    assert_well_answered(send(tiny, path, raw))
    good = tiny.post(COMPLETION, json={"prompt": "a", "max_tokens": 1})
    assert good.status_code == 200
    assert tiny.get("/health").json()["engine"]["running"] == 0
