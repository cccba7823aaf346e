"""The rules of AKV's spelling, by what they become."""

import pytest

from kvfunc.policies import Part, Schedule
from kvfunc.serve.errors import ApiError
from kvfunc.serve.protocol import ChatRequest

USER, SYSTEM = {"role": "user", "content": "aXbXc"}, {"role": "system", "content": "be brief"}
CALL = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]}
RESULT = {"role": "tool", "content": "one two three", "tool_call_id": "1"}
ANSWER = {"role": "assistant", "content": "done"}
RUN = [SYSTEM, USER, CALL, RESULT, ANSWER, {"role": "user", "content": "more"}]


def edits(messages=RUN, **fields):
    return ChatRequest.parse({"messages": messages, **fields}).edits()


def fault(messages=RUN, **rule) -> ApiError:
    with pytest.raises(ApiError) as raised:
        edits(messages, drop_rule=rule)
    assert raised.value.status == 400
    return raised.value


def rule(messages=RUN, **fields) -> Schedule:
    return edits(messages, drop_rule=fields)


# text_drop


def selectors(*contents, messages=RUN):
    """One for each message; those left out select nothing."""
    chosen = dict(contents)
    return [{"role": message["role"], **chosen.get(index, {"content": None})}
            for index, message in enumerate(messages)]


def test_texts_go_behind_the_latest_user_message():
    made = rule(type="text_drop", drop_messages=selectors(
        (1, {"content": "X"}), (3, {"content": ["two", "one"], "occurrence": [1, 1]})))
    assert made == Schedule({5: (Part(1, (1, 2)), Part(3, (4, 7)), Part(3, (0, 3)))})
    earlier = rule(RUN[:4], type="text_drop", drop_messages=selectors(
        (1, {"content": "X", "occurrence": 2}), messages=RUN[:4]))
    assert earlier == Schedule({1: (Part(1, (3, 4)),)})


def test_a_text_that_is_a_whole_content_drops_its_message():
    assert rule(type="text_drop", drop_messages=selectors(
        (0, {"content": "be brief"}), (1, {"content": ["aXbXc"]}))) == Schedule({5: (0, 1)})


def test_selecting_nothing_drops_nothing():
    for nothing in ({"content": None}, {"content": ""}, {"content": []}, {"content": ["", ""]}, {}):
        assert rule(type="text_drop", drop_messages=selectors((1, nothing))) == Schedule()


@pytest.mark.parametrize("chosen, param, said", [
    ((1, {"content": "x"}), "[1].content", 'is "x": message 1 does not have this text'),
    ((1, {"content": ["X", "x"]}), "[1].content[1]", "does not have this text"),
    ((1, {"content": "X", "occurrence": 3}), "[1].content", "this text 3 times"),
    ((1, {"content": "X", "occurrence": 0}), "[1].occurrence", "a number from 1"),
    ((1, {"content": ["X"], "occurrence": [0]}), "[1].occurrence[0]", "a number from 1"),
    ((1, {"content": "X", "occurrence": True}), "[1].occurrence", "valid integer"),
    ((1, {"content": "X", "occurrence": [1]}), "[1].occurrence", "one number for a text"),
    ((1, {"content": ["X"], "occurrence": 1}), "[1].occurrence", "one number for a text"),
    ((1, {"content": ["X", "a"], "occurrence": [1]}), "[1].occurrence", "as long as the list"),
    ((1, {"content": None, "occurrence": 1}), "[1].occurrence", "it goes with content"),
    ((1, {"content": ["X", ""]}), "[1].content", "leave out the empty texts"),
    ((1, {"content": 5}), "[1].content", "valid string or input should be a valid list"),
    ((1, {"content": "X", "places": 1}), "[1].places", "no such parameter"),
    ((1, {"role": "tool", "content": "X"}), "[1].role", "message 1 has the role user; give that"),
    ((1, {"content": ["X"] * 1025}), "[1].content", "at most 1024 items"),
])
def test_a_bad_selector_is_named_with_its_remedy(chosen, param, said):
    refused = fault(type="text_drop", drop_messages=selectors(chosen))
    assert refused.param == f"drop_rule.drop_messages{param}"
    assert said in str(refused)


def test_text_drop_needs_an_entry_for_each_message_and_a_user():
    refused = fault(type="text_drop", drop_messages=selectors()[1:])
    assert refused.param == "drop_rule.drop_messages"
    assert "an entry for each message, and there are 6" in str(refused)
    refused = fault(RUN[:1], type="text_drop", drop_messages=selectors(messages=RUN[:1]))
    assert (refused.param, "there is none" in str(refused)) == ("messages", True)
    refused = fault(RUN[:4], type="text_drop", drop_messages=selectors(
        (3, {"content": "one"}), messages=RUN[:4]))
    assert refused.param == "drop_rule.drop_messages[3].content"
    assert "the latest user message, 1, cannot drop of a later message" in str(refused)
    assert fault(type="text_drop").param == "drop_rule.drop_messages"
    assert fault(type="text_drop", drop_messages={}).param == "drop_rule.drop_messages"


@pytest.mark.parametrize("content, chosen, said", [
    ("ab" * 5000, ["ab"] * 1024, "5120 texts to drop, and 4096 is the most"),
    ("ä" * 2**19, ["ä" * 2**18], "2621440 bytes of texts to drop, and 1048576 is the most"),
    ("a" * 2**22, ["a"], "20971520 bytes of messages, and 16777216 is the most"),
])
def test_text_drop_has_bounds(content, chosen, said):
    messages = [{"role": "user", "content": content}] * 5
    refused = fault(messages, type="text_drop", drop_messages=[
        {"role": "user", "content": chosen}] * 5)
    assert said in str(refused)


# keep_text_drop


def kept(visible, full=RUN, **fields):
    request = ChatRequest.parse({"messages": visible, "drop_rule": {
        "type": "keep_text_drop", "full_messages": full, **fields}})
    return request.conversation, request.edits()


def test_all_that_is_not_visible_goes_behind_the_last_message():
    visible = [USER, {**RESULT, "content": "two"}, RUN[5]]
    conversation, schedule = kept(visible)
    assert [message["role"] for message in conversation] == [message["role"] for message in RUN]
    assert schedule == Schedule({5: (0, 2, Part(3, (0, 4)), Part(3, (7, 13)), 4)})
    assert kept(RUN)[1] == Schedule()
    assert kept([{**RESULT, "content": ""}])[1].drop[5][3] == Part(3, (0, 13))


def test_of_several_matches_the_latest_is_kept():
    full = [USER, ANSWER, USER, ANSWER]
    assert kept([{**USER, "content": "X"}, ANSWER], full)[1] == Schedule(
        {3: (0, 1, Part(2, (0, 3)), Part(2, (4, 5)))})
    assert kept([USER, USER, ANSWER], full)[1] == Schedule({3: (1,)})


@pytest.mark.parametrize("visible", [
    [RUN[5], USER],  # in another order
    [{**RESULT, "tool_call_id": "2"}], [{**RESULT, "role": "user"}],
    [{**RESULT, "content": "four"}], [{**ANSWER, "reasoning_content": "so"}],
    [{**ANSWER, "tool_calls": CALL["tool_calls"]}], [{**USER, "name": "n"}], [SYSTEM, SYSTEM],
])
def test_what_cannot_be_found_is_refused_or_forced(visible):
    with pytest.raises(ApiError, match="cannot be found") as raised:
        kept(visible)
    assert raised.value.param == "drop_rule.full_messages"
    conversation, schedule = kept(visible, force=True)
    body = {"messages": visible, "reposition": [5], "drop_rule": {
        "type": "keep_text_drop", "full_messages": RUN, "force": True}}
    assert ChatRequest.parse(body).edits() == Schedule()
    assert conversation == ChatRequest.parse({"messages": visible}).conversation
    assert schedule == Schedule()


def test_calls_are_alike_however_their_arguments_are_written():
    call = {**CALL["tool_calls"][0], "function": {"name": "f", "arguments": '{"x":1}'}}
    assert kept([{**CALL, "tool_calls": [call]}])[1] == Schedule({5: (0, 1, 3, 4, 5)})


def test_repositions_are_indices_of_the_whole_history():
    body = {"messages": [RUN[5]], "reposition": [5], "drop_rule": {
        "type": "keep_text_drop", "full_messages": RUN}}
    assert ChatRequest.parse(body).edits() == Schedule({5: (0, 1, 2, 3, 4)}, (5,))


@pytest.mark.parametrize("fields, param, said", [
    ({"full_messages": []}, "full_messages", "at least 1 item"),
    ({}, "full_messages", "is missing"),
    ({"full_messages": [{"role": "developer", "content": "x"}]}, "full_messages[0].role", "'user'"),
    ({"full_messages": [{"role": "user"}]}, "full_messages[0].content", "is missing"),
    ({"full_messages": [USER] * 4097}, "full_messages", "at most 4096 items"),
    ({"full_messages": RUN, "force": 1}, "force", "valid boolean"),
    ({"full_messages": RUN, "keep": 1}, "keep", "no such parameter"),
])
def test_a_bad_history_is_named_with_its_remedy(fields, param, said):
    refused = fault(type="keep_text_drop", **fields)
    assert refused.param == f"drop_rule.{param}"
    assert said in str(refused)


# thinking_drop


def test_thinking_goes_at_the_end_of_its_own_message():
    messages = [USER, {**ANSWER, "content": "\n<think>so</think>yes"}, USER, ANSWER, USER,
                {**ANSWER, "reasoning_content": "so"}, {**ANSWER, "reasoning_content": ""}]
    assert rule(messages, type="thinking_drop") == Schedule({1: (Part(1),), 5: (Part(5),)})


@pytest.mark.parametrize("message, param, said", [
    ({"content": "<think>so"}, "messages[1].content", "closed and has none inside"),
    ({"content": "so</think>yes"}, "messages[1].content", "closed"),
    ({"content": "well <think>so</think>yes"}, "messages[1].content", "one leading"),
    ({"content": "<think>a<think>b</think></think>"}, "messages[1].content", "none inside"),
    ({"content": "<think>a</think>x<think>b</think>"}, "messages[1].content", "one leading"),
    ({"content": "<think>a</think>x", "reasoning_content": "b"}, "messages[1].reasoning_content",
     "leave out one of the two"),
    ({"content": "x", "reasoning_content": 5}, "messages[1].reasoning_content", "give a string"),
    ({"content": "x"}, "drop_rule.type", "no assistant message has thinking"),
])
def test_malformed_thinking_is_named_with_its_remedy(message, param, said):
    refused = fault([USER, {"role": "assistant", **message}], type="thinking_drop")
    assert refused.param == param
    assert said in str(refused)


def test_thinking_drop_takes_no_further_keys():
    assert fault(type="thinking_drop", keep=1).param == "drop_rule.keep"


# what all have in common


@pytest.mark.parametrize("field", ["drop_message", "drop_rule", "reposition"])
def test_a_field_that_is_given_brings_the_usage_chunk_even_null(field):
    assert ChatRequest.parse({"messages": RUN, "stream": True, field: None}).wants_usage_chunk


def test_drop_thinking_goes_with_either_spelling():
    for fields in ({"drop_message": {"1": [0]}}, {"cache": {"drop": {"1": [0]}}}):
        cache = {**fields.get("cache", {}), "drop_thinking": True}
        request = ChatRequest.parse({"messages": RUN, **fields, "cache": cache})
        assert request.edits() == Schedule({1: (0,)}) and request.drops_thinking
