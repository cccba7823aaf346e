"""Reasoning and tool calls through HTTP, over the scripted engine: one token is one byte."""

import collections
import json

import pytest
import tokenizers

from kvfunc.models.tokenizer import Tokenizer

from .fake import byte_tokenizer

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ARGUMENTS = '{"a":  "é"}'
CALL = f'<tool_call>{{"name": "f", "arguments": {ARGUMENTS}}}</tool_call>'
SOURCE = "{{ '</think><tool_call>' }}"
END = "<|im_end|>"


@pytest.fixture
def calling(served, monkeypatch):
    """A server whose template has reasoning and tool calls."""
    monkeypatch.setattr(served.chat, "source", SOURCE)
    return served


def choice_of(served, **fields):
    response = served.ask(**fields)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


def gathered(chunks):
    """By choice: content, reasoning, the calls' arguments, and the finish reason."""
    said, reasons = collections.defaultdict(lambda: ["", "", []]), {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        content, reasoning, calls = said[choice["index"]]
        delta = choice["delta"]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["type"] == "function" and call["function"]["name"] == "f"
                assert call["index"] == len(calls)
                calls.append("")
            calls[call["index"]] += call["function"]["arguments"]
        said[choice["index"]][:2] = (content + delta.get("content", ""),
                                     reasoning + delta.get("reasoning_content", ""))
        reasons[choice["index"]] = choice["finish_reason"]
    return {index: (*said[index], reasons[index]) for index in said}


def test_an_answer_of_calls_alone_has_no_content(calling):
    calling.engine.say(CALL, END)
    choice = choice_of(calling, tools=TOOLS)
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
    assert choice["finish_reason"] == "tool_calls"
    assert gathered(calling.stream(tools=TOOLS)[:-1]) == {0: ("", "", [ARGUMENTS], "tool_calls")}


@pytest.mark.parametrize("fields", [
    {}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_a_call_is_content(calling, fields):
    calling.engine.say(f"<think>Hm.</think>{CALL}", END)
    choice = choice_of(calling, **fields)
    assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None,
                                 "reasoning_content": "Hm."}
    assert choice["finish_reason"] == "stop"
    assert gathered(calling.stream(**fields)[:-1]) == {0: (CALL, "Hm.", [], "stop")}


def test_without_reasoning_and_calls_in_the_template_all_is_content(served):
    text = f"<think>Hm.</think>{CALL}"
    served.engine.say(text, END)
    choice = choice_of(served, tools=TOOLS)
    assert choice == {"index": 0, "message": {"role": "assistant", "content": text,
                                              "refusal": None},
                      "logprobs": None, "finish_reason": "stop"}
    assert gathered(served.stream(tools=TOOLS)[:-1]) == {0: (text, "", [], "stop")}


def test_every_choice_is_read_by_itself(calling):
    scripts = [[CALL, END], ["<think>Hm.</think>", "Yes.", END], ["<think>so"]]
    expected = [("", "", [ARGUMENTS], "tool_calls"), ("Yes.", "Hm.", [], "stop"),
                ("", "so", [], "length")]
    calling.engine.say_in_turn(*scripts)
    assert gathered(calling.stream(tools=TOOLS, n=3)[:-1]) == dict(enumerate(expected))
    choices = calling.ask(tools=TOOLS, n=3).json()["choices"]
    for choice, (content, reasoning, calls, reason) in zip(choices, expected, strict=True):
        message = choice["message"]
        assert (message["content"] or "", message.get("reasoning_content", "")) == (
            content, reasoning)
        assert [call["function"]["arguments"] for call in message.get("tool_calls", ())] == calls
        assert choice["finish_reason"] == reason


def test_a_call_that_breaks_off_is_content(calling):
    calling.engine.say(CALL)
    limit = len(CALL.encode()) - 3
    expected = {0: (CALL[:-3], "", [], "length")}
    assert gathered(calling.stream(tools=TOOLS, max_tokens=limit)[:-1]) == expected
    assert choice_of(calling, tools=TOOLS, max_tokens=limit)["message"]["content"] == CALL[:-3]


def test_a_stop_string_ends_the_text_before_it_is_read(calling):
    calling.engine.say(f"<think>Hm.</think>a{CALL}STOP{CALL}", END)
    assert gathered(calling.stream(tools=TOOLS, stop="STOP")[:-1]) == {
        0: ("a", "Hm.", [ARGUMENTS], "tool_calls")}
    assert gathered(calling.stream(tools=TOOLS, stop="m.")[:-1]) == {0: ("", "H", [], "stop")}


def test_log_probabilities_are_of_all_tokens_in_both_modes(calling):
    text = f"<think>Hm.</think>\n\na{CALL}"
    calling.engine.say(text, END)
    whole = choice_of(calling, tools=TOOLS, logprobs=True)["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"] or b"?") for entry in whole).startswith(b"<think>Hm.")
    streamed = [entry for chunk in calling.stream(tools=TOOLS, logprobs=True)[:-1]
                for choice in chunk["choices"]
                for entry in (choice["logprobs"] or {}).get("content", ())]
    assert streamed == whole


def test_dropped_thinking_is_counted_and_read(calling):
    calling.engine.say("<think>Hm.</think>Yes.", END)
    answer = calling.ask(cache={"drop_thinking": True}).json()
    assert answer["usage"]["completion_tokens_details"] == {
        "dropped_tokens": len("<think>Hm.</think>")}
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")


@pytest.fixture
def with_control_tokens(served, monkeypatch):
    """The markers are control tokens, and so is one that is not a marker."""
    backend = byte_tokenizer()._backend
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in (
        "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[OTHER]")])
    made = Tokenizer(backend, stop_ids=served.engine.tokenizer.stop_ids)
    monkeypatch.setattr(served.engine, "tokenizer", made)
    monkeypatch.setattr(served.chat, "source", "[/THINK][TOOL_CALLS]")
    monkeypatch.setattr(served.chat, "thinking", ("[THINK]", "[/THINK]"))
    served.engine.say("[THINK]Hm.[/THINK][OTHER]a[TOOL_CALLS]f[ARGS]{}", END)
    return served


def test_markers_that_are_control_tokens_are_read_and_others_not_shown(with_control_tokens):
    served = with_control_tokens
    assert gathered(served.stream(tools=TOOLS)[:-1]) == {0: ("a", "Hm.", ["{}"], "tool_calls")}
    message = choice_of(served, tools=TOOLS)["message"]
    assert len(message["tool_calls"][0]["id"]) == 9
    assert choice_of(served)["message"]["content"] == "af{}"
    text = served.post("/v1/completions", prompt="x").json()["choices"][0]["text"]
    assert text == "Hm.af{}"


def test_a_call_broken_off_is_shown_with_its_marker(with_control_tokens):
    served = with_control_tokens
    served.engine.say("a[TOOL_CALLS]f[ARGS][OTHER]{", END)
    assert choice_of(served, tools=TOOLS)["message"]["content"] == "a[TOOL_CALLS]f[ARGS]{"


@pytest.mark.parametrize("value", ["required", {"type": "function", "function": {"name": "f"}}])
def test_other_choices_of_tools_are_refused_by_name(calling, value):
    response = calling.ask(tools=TOOLS, tool_choice=value)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("tool_choice", "unsupported_value")
    assert 'send "auto" or "none", or leave it out' in error["message"]
    assert (json.dumps(value) if isinstance(value, str) else "function") in error["message"]
