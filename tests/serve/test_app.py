import dataclasses
import json

import numpy as np
import pytest

from kvfunc.history import Drop, Repos
from kvfunc.serve.interface import Sampling
from kvfunc.serve.turns import PREFIX_BROKEN, Turns

DETAILS = {"cached_tokens": 23, "repos_tokens": 0, "drop_skipped_tokens": 0,
           "approximate_tokens": 0}
# "PRE\n" + "[user]hi\n" + "[assistant]": 4, 9 and 11 tokens; the scripted engine computes the last.
USAGE = {"prompt_tokens": 24, "completion_tokens": 6, "total_tokens": 30,
         "prompt_tokens_details": DETAILS}

RUN = [{"role": "system", "content": "s"}, {"role": "user", "content": "uu"},
       {"role": "assistant", "content": "aaa"}, {"role": "user", "content": "u"}]


# Answers


def test_a_chat_answer(served):
    response = served.ask("hi", model="fake").json()
    assert response.pop("id").startswith("chatcmpl-")
    assert response.pop("created") > 1_700_000_000
    assert response == {
        "object": "chat.completion", "model": "fake", "usage": USAGE,
        "choices": [{"index": 0, "finish_reason": "stop", "logprobs": None,
                     "message": {"role": "assistant", "content": "hello", "refusal": None}}],
    }


def test_a_completion(served):
    response = served.post("/v1/completions", prompt="abc").json()
    assert response.pop("id").startswith("cmpl-")
    del response["created"]
    assert response == {
        "object": "text_completion", "model": "fake",
        "choices": [{"index": 0, "text": "hello", "finish_reason": "stop", "logprobs": None}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9,
                  "prompt_tokens_details": DETAILS | {"cached_tokens": 2}},
    }


def test_several_prompts_are_choices_in_order(served):
    response = served.post("/v1/completions", prompt=["a", "bcd"], max_tokens=2).json()
    assert [(c["index"], c["text"], c["finish_reason"]) for c in response["choices"]] == [
        (0, "he", "length"), (1, "he", "length")]
    assert (response["usage"]["prompt_tokens"], response["usage"]["completion_tokens"]) == (4, 4)
    assert [len(call["tokens"]) for call in served.engine.calls] == [1, 3]


def test_a_prompt_of_token_ids_is_taken_as_it_is(served):
    served.post("/v1/completions", prompt=[[3, 1, 2], [5]])
    assert [call["tokens"].tolist() for call in served.engine.calls] == [[3, 1, 2], [5]]


def test_bos_begins_a_bare_prompt_once_where_the_model_wants_it(served, monkeypatch):
    (bos,) = served.engine.tokenizer.encode("<|im_end|>")
    monkeypatch.setattr(served.engine.tokenizer, "adds_bos", True)
    monkeypatch.setattr(served.engine.tokenizer, "bos_id", bos)
    for prompt in ("a", "<|im_end|>a", [7]):
        served.post("/v1/completions", prompt=prompt)
    (a,) = served.engine.tokenizer.encode("a")
    assert [call["tokens"].tolist() for call in served.engine.calls] == [[bos, a], [bos, a], [7]]


def test_the_engine_gets_what_was_asked(served):
    served.ask("hi", temperature=0.5, seed=3, max_tokens=7, cache={"salt": "t"})
    (call,) = served.engine.calls
    assert (call["salt"], call["max_tokens"]) == ("t", 7)
    assert call["sampling"] == Sampling(temperature=0.5, seed=3)
    assert served.engine.tokenizer.decode(call["tokens"].tolist()) == "PRE\n[user]hi\n[assistant]"


def test_max_tokens_is_clipped_to_the_room_left(served):
    for limit in ({}, {"max_tokens": 5000}):
        served.ask("hi", **limit)
        assert served.engine.calls[-1]["max_tokens"] == 1000 - 24
    served.ask("hi", max_tokens=2)
    assert served.engine.calls[-1]["max_tokens"] == 2


def test_models_and_health(served):
    card = served.client.get("/v1/models").json()["data"][0]
    assert card == served.client.get("/v1/models/fake").json()
    assert card.pop("created") > 1_700_000_000
    assert card == {"id": "fake", "object": "model", "owned_by": "kvfunc", "max_model_len": 1000,
                    "kv_bytes_per_token": 64}
    assert served.client.get("/health").json() == {"status": "ok"}


# Ends


@pytest.mark.parametrize("script, stop, text, reason, tokens", [
    (["hello<|im_end|>rest"], None, "hello", "stop", 6),
    (["hello"], None, "hello", "length", 5),
    (["hello world"], "lo w", "hel", "stop", 7),
    (["hello"], ["x", "lo"], "hel", "stop", 5),
    (["hello wo"], ["world"], "hello wo", "length", 8),
    (["wor<|im_end|>"], ["world"], "wor", "stop", 4),
    (["grüße €<|im_end|>"], "ß", "grü", "stop", 6),
])
def test_streamed_or_not_the_answer_ends_alike(served, script, stop, text, reason, tokens):
    served.engine.say(*script)
    choice = (whole := served.ask(stop=stop).json())["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, reason)
    assert whole["usage"]["completion_tokens"] == tokens
    *chunks, last, done = served.stream(stop=stop, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert last["usage"] == whole["usage"]
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(deltas) == text
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + [
        reason]


def test_ignore_eos_goes_on_behind_the_end_of_turn(served):
    served.engine.say("hello<|im_end|>rest")
    answer = served.ask(ignore_eos=True).json()
    assert answer["choices"][0]["message"]["content"] == "hellorest"
    assert answer["usage"]["completion_tokens"] == 10


def test_half_a_character_at_the_end_is_not_given_out_as_half(served):
    euro = served.engine.tokenizer.encode("€")
    served.engine.say("a", *euro[:2])
    contents = [chunk["choices"][0]["delta"].get("content") for chunk in served.stream()[:-1]]
    assert contents[:2] == ["", "a"]
    assert "".join(filter(None, contents)) == served.ask().json()["choices"][0]["message"][
        "content"] == "a\ufffd"


# Streams


def test_a_stream_is_role_deltas_reason_and_done(served):
    served.engine.say("h€<|im_end|>")
    *chunks, done = served.stream()
    assert done == "[DONE]"
    heads = [{key: chunk.pop(key) for key in ("id", "created", "model", "object")}
             for chunk in chunks]
    assert heads.count(heads[0]) == len(heads)
    assert (heads[0]["model"], heads[0]["object"]) == ("fake", "chat.completion.chunk")

    def choices(delta, reason=None):
        return {"choices": [{"index": 0, "delta": delta, "logprobs": None,
                             "finish_reason": reason}]}

    assert chunks == [choices({"role": "assistant", "content": ""}), choices({"content": "h"}),
                      choices({"content": "€"}), choices({}, "stop")]


def test_the_usage_chunk_comes_last_when_asked_for(served):
    *chunks, usage, done = served.stream(stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (usage["choices"], usage["usage"]) == ([], USAGE)


def test_a_cache_field_brings_the_usage_chunk(served):
    for fields in ({"cache": {}}, {"reposition": []}, {"drop_message": {"0": [0]}}):
        assert served.stream(**fields)[-2]["usage"]["prompt_tokens"] == 24
    assert all("usage" not in chunk for chunk in served.stream()[:-1])


def test_completions_stream_choice_by_choice(served):
    served.engine.say("ab<|im_end|>")
    response = served.post("/v1/completions", prompt=["x", "y"], stream=True,
                           stream_options={"include_usage": True})
    data = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
    assert [(c["index"], c["text"], c["finish_reason"]) for chunk in data
            for c in chunk["choices"]] == [
        (0, "a", None), (0, "b", None), (0, "", "stop"),
        (1, "a", None), (1, "b", None), (1, "", "stop")]
    assert data[-1]["usage"]["completion_tokens"] == 6
    assert response.text.endswith("data: [DONE]\n\n")


# Log-probabilities


def test_chat_logprobs(served):
    served.engine.say("h€<|im_end|>")
    fields = {"logprobs": True, "top_logprobs": 2}
    content = served.ask(**fields).json()["choices"][0]["logprobs"]["content"]
    first = {"token": "h", "logprob": -0.5, "bytes": [104]}
    least = {"token": "!", "logprob": -9999.0, "bytes": [33]}
    assert content[0] == {**first, "top_logprobs": [first, least]}
    assert [entry["bytes"] for entry in content[1:]] == [None] * 3
    streamed = [chunk["choices"][0]["logprobs"] for chunk in served.stream(**fields)[:-1]]
    assert [entry for part in streamed if part for entry in part["content"]] == content
    assert served.ask().json()["choices"][0]["logprobs"] is None
    alone = served.ask(logprobs=True).json()["choices"][0]["logprobs"]["content"][0]
    assert alone == {**first, "top_logprobs": []}


def test_logprobs_tell_nothing_of_the_stop_string(served):
    served.engine.say("heSTOP")
    logprobs = served.ask(logprobs=True, stop="STOP").json()["choices"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs["content"]] == ["h", "e"]


def test_completion_logprobs(served):
    served.engine.say("ab<|im_end|>")
    choice = served.post("/v1/completions", prompt="x", logprobs=1).json()["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["a", "b"], "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5}, {"b": -0.5}], "text_offset": [0, 1]}
    choice = served.post("/v1/completions", prompt="x", logprobs=2).json()["choices"][0]
    assert choice["logprobs"]["top_logprobs"][0] == {"a": -0.5, "!": -9999.0}


# Events


def ranges(served, messages=RUN):
    spans, at = [], len("PRE\n")
    for message in messages:
        end = at + len(f"[{message['role']}]{message['content']}\n")
        spans.append((at, end))
        at = end
    return spans


@pytest.mark.parametrize("fields", [
    {"cache": {"drop": {"3": [1, 2]}, "reposition": [3]}},
    {"drop_message": {"3": [1, 2]}, "reposition": [3]},
    {"drop_rule": {"type": "message_drop", "drop_messages": {"3": [1, 2]}}, "reposition": [3]},
])
def test_drop_and_reposition_reach_the_engine_as_events(served, fields):
    (_, (start, _), (_, stop), (_, at)) = ranges(served)
    response = served.ask(messages=RUN, **fields).json()
    assert served.engine.calls[0]["history"].events == (Drop(at, ((start, stop),)), Repos(at))
    assert response["usage"]["prompt_tokens_details"] == {
        "cached_tokens": start + len("[assistant]") - 1, "repos_tokens": at - stop,
        "drop_skipped_tokens": stop - start, "approximate_tokens": 0}


def test_a_policy_reaches_the_engine_as_events(served):
    messages = [{"role": "user", "content": "u"}, {"role": "tool", "content": "1"},
                {"role": "tool", "content": "2"}]
    policy = {"type": "rolling_tool_outputs", "keep": 1, "reposition_above_tokens": 0}
    response = served.ask(messages=messages, cache={"policy": policy}).json()
    (_, dropped, (_, at)) = ranges(served, messages)
    assert served.engine.calls[0]["history"].events == (Drop(at, (dropped,)), Repos(at))
    assert "warnings" not in response


def test_explain_generates_nothing(served):
    plan = served.ask(messages=RUN, stream=True, cache={
        "drop": {"3": [1, 2]}, "reposition": [3], "explain": True}).json()
    (system, (start, _), (_, stop), (_, at)) = ranges(served)
    assert (plan["object"], plan["model"]) == ("cache.plan", "fake")
    assert plan["messages"][0] == {"index": None, "role": None, "tokens": 4, "range": [0, 4],
                                   "owner": "nobody"}
    assert plan["messages"][1]["range"] == list(system)
    assert plan["events"] == [{"kind": "drop", "at": at, "ranges": [[start, stop]]},
                              {"kind": "repos", "at": at}]
    assert [run["class"] for run in plan["runs"]] == ["cached", "drop_skipped", "repos", "cached",
                                                      "computed"]
    assert plan["next_position"] == plan["live_tokens"] == plan["prompt_tokens"] - (stop - start)
    assert plan["warnings"] == []
    assert served.engine.calls == []


# Warnings


def test_a_dropped_result_is_told_in_the_answer_and_in_the_last_chunk(served):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "content": "x", "tool_calls": [call]},
                {"role": "tool", "content": "y", "tool_call_id": "1"}]
    fields = {"messages": messages, "cache": {"drop": {"1": [1]}}}
    told = served.ask(**fields).json()["warnings"]
    assert ("tool results are dropped, but their calls are not: "
            "the call in message 0 and its result in message 1") in told
    *chunks, last, _ = served.stream(**fields)
    assert last["warnings"] == told
    assert last["usage"]
    assert not any("warnings" in chunk for chunk in chunks)
    assert served.ask(messages=messages).json()["warnings"] == [
        warning for warning in told if "results" not in warning]


def test_warnings_are_in_the_last_chunk_also_without_usage(served, monkeypatch):
    render = served.chat.render
    monkeypatch.setattr(served.chat, "render", lambda *a, **k: dataclasses.replace(
        render(*a, **k), warnings=("beware",)))
    *chunks, last, _ = served.stream()
    assert last["warnings"] == ["beware"]
    assert last["choices"][0]["finish_reason"] == "stop"
    assert not any("warnings" in chunk for chunk in chunks)


def test_a_template_that_rewrites_earlier_turns_is_told_once():
    turns = Turns()
    first, second = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    for _ in range(2):
        assert turns.check([], [first], np.array([1, 2])) == []
        assert turns.check([], [first, second], np.array([1, 2, 3])) == []
    assert turns.check(["other"], [first, second, first], np.array([5])) == []
    assert turns.check([], [first, second, first], np.array([1, 9, 3, 4])) == [PREFIX_BROKEN]
    assert turns.check([], [first, second, first, first], np.array([5])) == []
