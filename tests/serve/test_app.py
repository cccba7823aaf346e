import asyncio
import dataclasses
import threading
import types

import numpy as np
import pytest

from kvfunc.history import Drop, Repos
from kvfunc.serve.answer import Step
from kvfunc.serve.app import create_app
from kvfunc.serve.interface import End, Sampling, Token, Usage
from kvfunc.serve.responses import CompletionReply
from kvfunc.serve.text import Piece
from kvfunc.serve.turns import PREFIX_BROKEN, Turns

from .fake import byte_tokenizer, read_events

DETAILS = {"cached_tokens": 23, "repos_tokens": 0, "drop_skipped_tokens": 0,
           "approximate_tokens": 0}
# "PRE\n" + "[user]hi\n" + "[assistant]": 4, 9 and 11 tokens; the scripted engine computes the last.
USAGE = {"prompt_tokens": 24, "completion_tokens": 6, "total_tokens": 30,
         "prompt_tokens_details": DETAILS}

LETTER_L, LETTER_X = byte_tokenizer().encode("lx")

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
    assert [len(job.tokens) for job in served.engine.submitted] == [1, 3]


def test_a_prompt_of_token_ids_is_taken_as_it_is(served):
    served.post("/v1/completions", prompt=[[3, 1, 2], [5]])
    assert [job.tokens.tolist() for job in served.engine.submitted] == [[3, 1, 2], [5]]


def test_bos_begins_a_bare_prompt_once_where_the_model_wants_it(served, monkeypatch):
    (bos,) = served.engine.tokenizer.encode("<|im_end|>")
    monkeypatch.setattr(served.engine.tokenizer, "adds_bos", True)
    monkeypatch.setattr(served.engine.tokenizer, "bos_id", bos)
    for prompt in ("a", "<|im_end|>a", [7]):
        served.post("/v1/completions", prompt=prompt)
    (a,) = served.engine.tokenizer.encode("a")
    assert [job.tokens.tolist() for job in served.engine.submitted] == [[bos, a], [bos, a], [7]]


def test_the_engine_gets_what_was_asked(served):
    served.ask("hi", temperature=0.5, seed=3, max_tokens=7, cache={"salt": "t"})
    (job,) = served.engine.submitted
    assert (job.salt, job.max_tokens) == ("t", 7)
    assert job.sampling == Sampling(temperature=0.5, seed=3, stop_ids=frozenset({256}))
    assert served.engine.tokenizer.decode(job.tokens.tolist()) == "PRE\n[user]hi\n[assistant]"


def test_max_tokens_is_clipped_to_the_room_left(served):
    for limit in ({}, {"max_tokens": 5000}):
        served.ask("hi", **limit)
        assert served.engine.submitted[-1].max_tokens == 1000 - 24
    served.ask("hi", max_tokens=2)
    assert served.engine.submitted[-1].max_tokens == 2


def test_the_engine_runs_as_long_as_the_application(served):
    engine = type(served.engine)()

    async def live():
        web = create_app(engine, served.chat)
        async with web.router.lifespan_context(web):
            assert engine.running
        assert not engine.running

    assert not engine.running
    asyncio.run(live())


def test_models_and_health(served):
    card = served.client.get("/v1/models").json()["data"][0]
    assert card == served.client.get("/v1/models/fake").json()
    assert card.pop("created") > 1_700_000_000
    assert card == {"id": "fake", "object": "model", "owned_by": "kvfunc", "max_model_len": 1000,
                    "kv_bytes_per_token": 64}
    health = served.client.get("/health").json()
    assert health["status"] == "ok" and health["engine"]["running"] == 0


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


@pytest.mark.parametrize("fields, text, reason", [
    ({"stop_token_ids": [LETTER_L]}, "he", "stop"),
    ({"stop_token_ids": [LETTER_L], "ignore_eos": True}, "he", "stop"),
    ({"stop_token_ids": [LETTER_X]}, "hello", "stop"),
    ({"stop_token_ids": [LETTER_X], "ignore_eos": True}, "hello rest", "length"),
    ({"min_tokens": 3, "stop": "l"}, "hel", "stop"),
    ({"min_tokens": 4, "stop": ["l", " "]}, "hello", "stop"),
    ({"min_tokens": 3, "stop": "ll"}, "he", "stop"),
])
def test_ends_that_a_request_names(served, fields, text, reason):
    served.engine.say("hello<|im_end|> rest")
    choice = served.ask(**fields).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, reason)


# Several choices


def test_choices_come_with_their_own_text_and_the_prompt_counts_once(served):
    served.engine.say_in_turn(["one<|im_end|>"], ["twelve"], ["three<|im_end|>"])
    response = served.ask(n=3, max_tokens=5).json()
    assert [(choice["index"], choice["message"]["content"], choice["finish_reason"])
            for choice in response["choices"]] == [
        (0, "one", "stop"), (1, "twelv", "length"), (2, "three", "length")]
    assert response["usage"] == {**USAGE, "completion_tokens": 14, "total_tokens": 38}


@pytest.mark.parametrize("stream", [True, False])
def test_each_prompt_has_its_choices_behind_one_another(served, stream):
    served.engine.say_in_turn(*([letter] for letter in "abcd"))
    fields = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = served.post("/v1/completions", prompt=["x", "yz"], n=2, best_of=2, seed=5, **fields)
    assert [(job.sampling.seed, len(job.tokens)) for job in served.engine.submitted] == [
        (5, 1), (6, 1), (5, 2), (6, 2)]
    if stream:
        *chunks, last, _ = read_events(response)
        choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["text"]]
    else:
        last = response.json()
        choices = last["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == list(enumerate("abcd"))
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 4)
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == 1


def test_streamed_choices_come_interleaved_and_each_opens_and_ends_once(served):
    served.engine.say_in_turn([served.engine.SKIP, "ab<|im_end|>"], ["x"])
    *chunks, last, _ = served.stream(n=2, stream_options={"include_usage": True})
    told = [(choice["index"], choice["delta"].get("role") or choice["delta"].get("content"),
             choice["finish_reason"]) for chunk in chunks for choice in chunk["choices"]]
    assert told == [
        (1, "assistant", None), (1, "x", None), (0, "assistant", None), (0, "a", None),
        (1, None, "length"), (0, "b", None), (0, None, "stop")]
    assert last["usage"] == {**USAGE, "completion_tokens": 4, "total_tokens": 28}


def test_a_choice_that_ends_at_a_stop_string_leaves_the_others_alone(served):
    served.engine.say_in_turn(["ab", served.engine.WAIT, "c" * 900], ["xyz", "w" * 30])
    got = []
    thread = threading.Thread(target=lambda: got.append(served.ask(n=2, stop="b").json()))
    thread.start()
    assert served.engine.cancelled.wait(10)
    assert served.engine.open == 1
    served.engine.gate.set()
    thread.join()
    assert [choice["message"]["content"] for choice in got[0]["choices"]] == ["a", "xyz" + "w" * 30]
    assert served.engine.delivered == 2 + 33


def test_what_is_underway_when_a_stop_string_is_found_is_ignored(served, monkeypatch):
    def submit(job, deliver):
        for token_id in served.engine.tokenizer.encode("abcd"):
            deliver(Token(token_id, None, ()))
        deliver(End("length"))
        usage = served.engine.plan(job).usage
        return types.SimpleNamespace(usage=usage, admitted=0.0, preempted=0, cancel=lambda: None)

    monkeypatch.setattr(served.engine, "submit", submit)
    response = served.ask(n=2, stop="b").json()
    assert [choice["message"]["content"] for choice in response["choices"]] == ["a", "a"]
    assert response["usage"]["completion_tokens"] == 4


def test_choices_stand_in_order_whichever_came_first(served):
    usage = Usage(3, 2, 0, 0, 0)
    steps = [Step(choice, Piece(text), reason, usage, 1) for choice, text, reason in [
        (1, "b", None), (0, "a", None), (0, "", "length"), (1, "", "stop")]]
    told = CompletionReply("m", served.engine.tokenizer, False, choices=2).whole(steps, [])
    assert [(choice["index"], choice["text"], choice["finish_reason"])
            for choice in told["choices"]] == [(0, "a", "length"), (1, "b", "stop")]


def test_choices_without_a_seed_have_none(served):
    served.ask(n=2)
    assert [job.sampling.seed for job in served.engine.submitted] == [None, None]


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


def test_completions_stream_as_their_tokens_come(served):
    served.engine.say("ab<|im_end|>")
    *data, done = read_events(served.post("/v1/completions", prompt=["x", "y"], stream=True,
                                          stream_options={"include_usage": True}))
    choices = [c for chunk in data for c in chunk["choices"]]
    for index in (0, 1):  # which of two answers is ahead of the other is left open
        assert [(c["text"], c["finish_reason"]) for c in choices if c["index"] == index] == [
            ("a", None), ("b", None), ("", "stop")]
    assert data[-1]["usage"]["completion_tokens"] == 6
    assert done == "[DONE]"


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
    assert served.engine.submitted[0].history.events == (Drop(at, ((start, stop),)), Repos(at))
    assert response["usage"]["prompt_tokens_details"] == {
        "cached_tokens": start + len("[assistant]") - 1, "repos_tokens": at - stop,
        "drop_skipped_tokens": stop - start, "approximate_tokens": 0}


def test_a_policy_reaches_the_engine_as_events(served):
    messages = [{"role": "user", "content": "u"}, {"role": "tool", "content": "1"},
                {"role": "tool", "content": "2"}]
    policy = {"type": "rolling_tool_outputs", "keep": 1, "reposition_above_tokens": 0}
    response = served.ask(messages=messages, cache={"policy": policy}).json()
    (_, dropped, (_, at)) = ranges(served, messages)
    assert served.engine.submitted[0].history.events == (Drop(at, (dropped,)), Repos(at))
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
    assert served.engine.submitted == []


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
