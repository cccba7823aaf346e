"""Parts of messages through HTTP, over the scripted engine: one token is one byte."""

import pytest

from kvfunc.history import Drop, Repos
from kvfunc.models.chat import ChatTemplate
from kvfunc.serve.events import broken_calls
from kvfunc.serve.prepare import NOT_SHARED
from kvfunc.serve.protocol import ChatRequest

from .fake import byte_tokenizer

THOUGHT = "<think>hm</think>"
RUN = [{"role": "system", "content": "abcab"}, {"role": "user", "content": "uu"},
       {"role": "assistant", "content": f"{THOUGHT}yes"}, {"role": "user", "content": "u"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def place(text, messages=RUN, occurrence=1):
    """The raw range of a text of the rendered prompt."""
    prompt = "PRE\n" + "".join(f"[{m['role']}]{m['content']}\n" for m in messages)
    start = -1
    for _ in range(occurrence):
        start = prompt.index(text, start + 1)
    return start, start + len(text)


def end_of(index, messages=RUN):
    return place(f"[{messages[index]['role']}]{messages[index]['content']}\n", messages)[1]


def events(served, **fields):
    response = served.ask(**{"messages": RUN, **fields})
    assert response.status_code == 200, response.text
    return served.engine.submitted[-1].history.events


def refusal(served, **fields):
    response = served.ask(**{"messages": RUN, **fields})
    assert response.status_code == 400
    return response.json()["error"]


@pytest.mark.parametrize("fields", [
    {"cache": {"drop": {"3": [{"message": 0, "text": "ab", "occurrence": 2}]}}},
    {"drop_rule": {"type": "text_drop", "drop_messages": [
        {"role": "system", "content": "ab", "occurrence": 2}, {"role": "user", "content": None},
        {"role": "assistant", "content": None}, {"role": "user", "content": None}]}},
    {"messages": [{**RUN[0], "content": "abc"}, *RUN[1:]],
     "drop_rule": {"type": "keep_text_drop", "full_messages": RUN}},
])
def test_a_dropped_text_is_its_tokens_in_every_spelling(served, fields):
    (start, stop) = place("ab", occurrence=2)
    assert events(served, **fields) == (Drop(end_of(3), ((start, stop),)),)


def test_dropped_thinking_is_its_tokens_in_every_spelling(served):
    (span, at) = place(THOUGHT), end_of(2)
    assert events(served, cache={"drop": {"3": [{"message": 2, "part": "thinking"}]}}) == (
        Drop(end_of(3), (span,)),)
    assert events(served, drop_rule={"type": "thinking_drop"}) == (Drop(at, (span,)),)
    assert events(served, cache={"drop_thinking": True}) == (Drop(span[1], (span,)),)
    assert events(served, cache={"drop_thinking": False}) == ()


def test_parts_and_whole_messages_and_repositions_go_together(served):
    (thought, user, at) = place(THOUGHT), place("[user]uu\n"), end_of(2)
    assert events(served, cache={"drop_thinking": True, "reposition": [2], "drop": {
        "2": [1, {"message": 2, "text": "yes"}, {"message": 1, "text": "u"}]}}) == (
        Drop(thought[1], (thought,)), Drop(at, (user, place("yes"))), Repos(at))
    assert events(served, cache={"drop_thinking": True}, drop_rule={
        "type": "message_drop", "drop_messages": {"3": [2]}}, reposition=[3]) == (
        Drop(thought[1], (thought,)),
        Drop(end_of(3), ((place("[assistant]")[0], thought[0]), (thought[1], end_of(2)))),
        Repos(end_of(3)))


def test_thinking_and_a_drop_at_one_boundary_are_one_event(served):
    messages = [RUN[0], {"role": "assistant", "content": THOUGHT[:-1]}]
    served.chat.thinking, before = ("hm", "</think\n"), served.chat.thinking
    try:
        span, at = place("hm</think\n", messages), end_of(1, messages)
        assert span[1] == at
        assert events(served, messages=messages, cache={
            "drop_thinking": True, "drop": {"1": [0]}, "reposition": [1]}) == (
            Drop(at, (place("[system]abcab\n", messages), span)), Repos(at))
    finally:
        served.chat.thinking = before


def test_a_policy_goes_with_dropped_thinking(served):
    messages = [RUN[1], {"role": "tool", "content": "1"}, RUN[2], {"role": "tool", "content": "2"}]
    thought = place(THOUGHT, messages)
    assert events(served, messages=messages, cache={
        "drop_thinking": True, "policy": {"type": "rolling_tool_outputs", "keep": 1}}) == (
        Drop(thought[1], (thought,)), Drop(end_of(3, messages), (place("[tool]1\n", messages),)))


def test_thinking_of_others_stays(served):
    messages = [{"role": "user", "content": THOUGHT}, {"role": "system", "content": THOUGHT}]
    assert events(served, messages=messages, cache={"drop_thinking": True}) == ()


@pytest.mark.parametrize("fields, param, said", [
    ({"cache": {"drop": {"3": [0, {"message": 1, "part": "thinking"}]}}}, 'cache.drop["3"][1]',
     "message 1 is printed without thinking by the chat template"),
    ({"cache": {"drop": {"3": [{"message": 0, "text": "x"}]}}}, 'cache.drop["3"][0].text',
     "message 0 does not have this text"),
    ({"messages": [*RUN, {"role": "assistant", "content": "x", "reasoning_content": "so"}],
      "drop_rule": {"type": "thinking_drop"}}, "drop_rule",
     "message 4 is printed without thinking by the chat template"),
])
def test_what_is_not_there_is_refused_by_name(served, fields, param, said):
    refused = refusal(served, **fields)
    assert refused["param"] == param
    assert said in refused["message"]
    assert served.engine.submitted == []


def test_what_the_template_does_not_print_is_refused_by_name(served, monkeypatch):
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
    monkeypatch.setattr(served.chat, "render", ChatTemplate(source, byte_tokenizer()).render)
    messages = [{"role": "user", "content": "  x"}, {"role": "user", "content": ""}]
    refused = refusal(served, messages=messages, cache={"drop": {"1": [
        {"message": 0, "text": "x"}, {"message": 0, "text": " "}]}})
    assert refused["param"] == 'cache.drop["1"][1]'
    assert 'message 0 is printed without the text " " by the chat' in refused["message"]
    visible = [{"role": "user", "content": "x"}]
    assert events(served, messages=visible, drop_rule={
        "type": "keep_text_drop", "full_messages": messages[:1]}) == ()
    source = "{% for m in messages if m.content %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    monkeypatch.setattr(served.chat, "render", ChatTemplate(source, byte_tokenizer()).render)
    refused = refusal(served, messages=messages, reposition=[0, 1])
    assert refused["param"] == "reposition[1]"
    assert served.ask(messages=messages, cache={"reposition": [0, 1]}).status_code == 200


def test_the_full_history_is_what_runs_and_what_is_explained(served):
    visible = [{**RUN[3]}]
    rule = {"type": "keep_text_drop", "full_messages": RUN}
    plan = served.ask(messages=visible, drop_rule=rule, cache={"explain": True}).json()
    dropped = place("[system]abcab\n")[0], end_of(2)
    assert plan["events"] == [{"kind": "drop", "at": end_of(3), "ranges": [list(dropped)]}]
    assert [m["role"] for m in plan["messages"]] == [
        None, "system", "user", "assistant", "user", "assistant"]
    usage = served.ask(messages=visible, drop_rule=rule).json()["usage"]
    assert usage["prompt_tokens"] == plan["prompt_tokens"] == end_of(3) + len("[assistant]")
    assert usage["prompt_tokens_details"]["drop_skipped_tokens"] == dropped[1] - dropped[0]


@pytest.mark.parametrize("fields", [
    {"cache": {"drop": {"3": [{"message": 2, "part": "thinking"}, {"message": 0, "text": "ca"}]}}},
    {"cache": {"drop_thinking": True}}, {"drop_rule": {"type": "thinking_drop"}},
    {"drop_message": {"3": [1]}, "reposition": [3], "cache": {"drop_thinking": True}},
])
def test_explain_lists_every_event_of_every_spelling(served, fields):
    made = events(served, **fields)
    plan = served.ask(messages=RUN, **fields | {
        "cache": {**fields.get("cache", {}), "explain": True}}).json()
    assert plan["object"] == "cache.plan"
    assert plan["events"] == [
        {"kind": "drop", "at": event.at, "ranges": [list(span) for span in event.ranges]}
        if isinstance(event, Drop) else {"kind": "repos", "at": event.at} for event in made]
    dropped = sum(b - a for event in made if isinstance(event, Drop) for a, b in event.ranges)
    assert plan["live_tokens"] == plan["prompt_tokens"] - dropped
    assert sum(b - a for run in plan["runs"] if run["class"] == "drop_skipped"
               for a, b in [run["range"]]) == dropped


# What an answer drops of itself


def test_the_answers_dropped_tokens_are_counted(served):
    served.engine.say(f"{THOUGHT}yes<think>", "<|im_end|>")
    details = {"dropped_tokens": len(THOUGHT)}
    cache = {"drop_thinking": True}
    answer = served.ask(cache=cache).json()
    assert answer["usage"]["completion_tokens_details"] == details
    assert answer["choices"][0]["message"]["content"] == f"{THOUGHT}yes<think>"
    for fields in ({"stream_options": {"include_usage": True}}, {}):
        last = served.stream(cache=cache, **fields)[-2]
        assert last["usage"]["completion_tokens_details"] == details
    assert served.ask(cache=cache, n=2).json()["usage"]["completion_tokens_details"] == {
        "dropped_tokens": 2 * len(THOUGHT)}
    for fields in ({}, {"cache": {}}, {"cache": {"drop_thinking": False}}):
        assert "completion_tokens_details" not in served.ask(**fields).json()["usage"]


def test_the_headers_part_of_a_span_is_not_the_answers(served):
    served.chat.thinking, before = ("[assistant]", "!"), served.chat.thinking
    try:
        served.engine.say("ab!cd<|im_end|>")
        answer = served.ask(cache={"drop_thinking": True}).json()
        assert answer["usage"]["completion_tokens_details"] == {"dropped_tokens": 3}
        (job,) = served.engine.submitted
        assert job.thinking.start == len("PRE\n[user]hi\n")
        assert job.history.events == ()
    finally:
        served.chat.thinking = before


def test_a_span_that_the_generation_header_completes_is_dropped_before_the_answer(served):
    served.chat.thinking, before = ("[assis", "nt]"), served.chat.thinking
    try:
        served.engine.say("ab[assistant]<|im_end|>")
        header = len("PRE\n[user]hi\n"), len("PRE\n[user]hi\n[assistant]")
        answer = served.ask(cache={"drop_thinking": True}).json()
        (job,) = served.engine.submitted
        assert job.history.events == (Drop(header[1], (header,)),)
        assert answer["usage"]["completion_tokens_details"] == {
            "dropped_tokens": len("[assistant]")}
    finally:
        served.chat.thinking = before


def test_a_stop_string_within_thinking_leaves_it_open(served):
    served.engine.say(f"{THOUGHT}yes<|im_end|>")
    answer = served.ask(cache={"drop_thinking": True}, stop="hm").json()
    assert answer["usage"]["completion_tokens_details"] == {"dropped_tokens": 0}


# Calls and their results

RESULT = {"role": "tool", "content": "y"}
ASKING = {"role": "assistant", "content": "x", "tool_calls": [CALL]}


def warned(messages, **fields):
    request = ChatRequest.parse({"messages": messages, **fields})
    return broken_calls(request.edits(), request.conversation)


@pytest.mark.parametrize("fields, broken", [
    ({"cache": {"drop": {"1": [1]}}}, True), ({"drop_message": {"1": [0]}}, True),
    ({"cache": {"drop": {"1": [0, 1]}}}, False), ({"drop_message": {"5": [0]}}, False),
    ({"cache": {"drop": {"1": [{"message": 1, "text": "y"}]}}}, True),  # nothing is left of it
    ({"cache": {"drop": {"1": [{"message": 0, "text": "x"}]}}}, False),  # the call stays
    ({"cache": {"drop": {"1": [{"message": 1, "part": "thinking"}]}}}, False),
    ({"cache": {"drop": {"1": [0, {"message": 1, "text": "y"}]}}}, False),
    ({"messages": [ASKING], "drop_rule": {
        "type": "keep_text_drop", "full_messages": [ASKING, {**RESULT, "tool_call_id": "1"}]}},
     True),
])
def test_calls_and_results_are_torn_apart_in_every_spelling(fields, broken):
    messages = fields.pop("messages", [ASKING, {**RESULT, "tool_call_id": "1"}])
    assert bool(warned(messages, **fields)) is broken


def test_text_drop_of_a_whole_result_tears_it_from_its_call():
    messages = [ASKING, {**RESULT, "tool_call_id": "1"}, {"role": "user", "content": "u"}]
    chosen = [{"role": m["role"], "content": "y" if m["role"] == "tool" else None}
              for m in messages]
    assert warned(messages, drop_rule={"type": "text_drop", "drop_messages": chosen}) == [
        "tool results are dropped, but their calls are not: "
        "the call in message 0 and its result in message 1"]


@pytest.mark.parametrize("calls, result, told", [
    ([{**CALL, "id": None}], RESULT, 0), ([{**CALL, "id": None}], {"tool_call_id": "z"}, 0),
    ([CALL], RESULT, 0), ([CALL], {"tool_call_id": "z"}, None),
    ([CALL, {**CALL, "id": None}], {"tool_call_id": "z"}, 0),
])
def test_calls_and_results_without_ids(calls, result, told):
    """A result of a call that nobody made belongs to none."""
    messages = [{**ASKING, "tool_calls": calls}, {**RESULT, **result}]
    assert len(warned(messages, cache={"drop": {"1": [1]}})) == (told is not None)


# Shared texts

SHARED = [{"role": "user", "content": [
    {"type": "text", "text": "see "},
    {"type": "text", "text": "the document", "cache": {"share": "document"}},
    {"type": "text", "text": "!"}]}, {"role": "assistant", "content": "yes"}]


def shares(served, **fields):
    response = served.ask(**{"messages": SHARED, **fields})
    assert response.status_code == 200, response.text
    return served.engine.submitted[-1].shares, response.json()


def test_a_named_part_is_shared(served):
    found, answer = shares(served)
    text = "PRE\n[user]see the document!"
    start = text.index("the document")
    assert [(s.name, s.start, s.stop, s.outer) for s in found] == [
        ("document", start, start + 12, (start, start + 12))]
    assert "warnings" not in answer and "cache" not in answer


def test_nothing_is_shared_in_an_exact_request(served):
    assert shares(served, cache={"exact": True})[0] == ()


@pytest.mark.parametrize("cache", [
    {"drop": {"1": [0]}}, {"reposition": [0], "drop": {"0": [0]}}, {"drop_thinking": True}])
def test_nothing_is_shared_in_a_request_with_events_and_it_says_so(served, cache):
    found, answer = shares(served, cache=cache)
    assert found == () and answer["warnings"] == [NOT_SHARED]


def test_whole_messages_are_shared_where_that_is_on(served, monkeypatch):
    monkeypatch.setattr(type(served.engine), "shares_messages", True)
    messages = [{"role": "system", "content": "be kind"}, *SHARED,
                {"role": "user", "content": "and this"}]
    found, _ = shares(served, messages=messages)
    assert [s.name for s in found] == ["document", "assistant message", "user message"]
    assert [s.stop - s.start for s in found] == [12, 3, 8]
