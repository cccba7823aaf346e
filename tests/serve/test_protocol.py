import json

import pytest

from kvfunc.policies import Part, Schedule
from kvfunc.serve.errors import ApiError, read_json
from kvfunc.serve.interface import Sampling
from kvfunc.serve.protocol import ChatRequest, CompletionRequest

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"}, {"role": "user", "content": "d"}]


def chat(**fields):
    return ChatRequest.parse({"messages": MESSAGES, **fields})


def edits(**fields):
    return chat(**fields).edits()


def fault(call, *arguments, **fields) -> ApiError:
    with pytest.raises(ApiError) as raised:
        call(*arguments, **fields)
    assert raised.value.status == 400
    return raised.value


# Bodies


@pytest.mark.parametrize("body, said", [
    (b"{", "Expecting property name"),
    (b'{"temperature": NaN}', "NaN is not a JSON number"),
    (b'{"drop": {"3": [1], "3": [2]}}', 'the key "3" stands twice'),
    (b'{"salt": "\\ud800"}', "surrogates not allowed"),
    (b'{"salt": "\xed\xa0\x80"}', "can't decode byte"),
    (b'{"salt": "\xff"}', "can't decode byte"),
    (b"[" * 100_000, "recursion"),
    (b"9" * 5000, "limit"),
])
def test_a_body_that_is_not_json_is_refused(body, said):
    refused = fault(read_json, body)
    assert said in str(refused)
    assert refused.code == "invalid_json"


def test_a_body_that_is_no_object_is_refused():
    assert str(fault(read_json, b"[1]")) == "the body is [1]: send a JSON object"


# OpenAI's parameters


def test_defaults_are_openais():
    request = chat()
    assert request.samplings({7}) == [Sampling(
        temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=None, logprobs=None,
        presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, logit_bias=(),
        min_tokens=0, stop_ids=frozenset({7}))]
    assert (request.token_limit, request.stop_strings, request.salt) == (None, (), "")
    assert not request.explain
    assert request.edits() is None


def test_null_means_left_out():
    names = ("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens",
             "max_completion_tokens", "logprobs", "top_logprobs", "stream", "stream_options",
             "tools", "tool_choice", "chat_template_kwargs", "n", "best_of", "logit_bias",
             "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens",
             "stop_token_ids", "ignore_eos", "response_format", "cache", "drop_message",
             "drop_rule", "reposition")
    request = chat(**dict.fromkeys(names))
    assert request.samplings({7}) == chat().samplings({7})
    assert request.edits() is None


def test_parameters_reach_the_sampler():
    request = chat(temperature=0, top_p=0.5, top_k=-1, min_p=0.25, seed=7, logprobs=True,
                   top_logprobs=3, stop="x", max_tokens=5)
    assert request.samplings(()) == [Sampling(0.0, 0.5, 0, 0.25, 7, 3)]
    assert (request.token_limit, request.stop_strings) == (5, ("x",))
    assert chat(logprobs=True).samplings(())[0].logprobs == 0
    (penalised,) = chat(presence_penalty=-2, frequency_penalty=0.5, repetition_penalty=1.1,
                        logit_bias={"5": 100, "0": -1.5}, min_tokens=4).samplings(())
    assert penalised == Sampling(
        presence_penalty=-2.0, frequency_penalty=0.5, repetition_penalty=1.1,
        logit_bias=((5, 100.0), (0, -1.5)), min_tokens=4)
    assert chat(max_tokens=5, max_completion_tokens=6).token_limit == 6
    assert chat(stop=["x", "y"]).stop_strings == ("x", "y")


def test_each_answer_of_a_prompt_has_the_next_seed():
    assert [s.seed for s in chat(n=3, seed=-1).samplings(())] == [-1, 0, 1]
    assert [s.seed for s in chat(n=2).samplings(())] == [None, None]
    assert len(chat(n=128, best_of=128).samplings(())) == 128
    assert chat(best_of=1).choices == 1


def test_the_models_ends_and_those_of_the_request_end_the_answer():
    def ends(**fields):
        return chat(**fields).samplings({1, 2})[0].stop_ids

    assert ends(stop_token_ids=[2, 3]) == {1, 2, 3}
    assert ends(stop_token_ids=[3], ignore_eos=True) == {3}
    assert ends(ignore_eos=True) == set()


def test_token_ids_must_be_in_the_vocabulary():
    chat(logit_bias={"9": 1}, stop_token_ids=[9]).check_token_ids(10)
    refused = fault(chat(logit_bias={"9": 1, "50000000": 2}).check_token_ids, 10)
    assert refused.param == 'logit_bias["50000000"]'
    assert "give token ids below 10" in str(refused)
    refused = fault(chat(stop_token_ids=[3, 10]).check_token_ids, 10)
    assert (refused.param, str(refused)) == (
        "stop_token_ids[1]", "stop_token_ids[1] is 10: give token ids below 10")


@pytest.mark.parametrize("fields, param, said", [
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 129}, "n", "less than or equal to 128"),
    ({"n": True}, "n", "n is true: input should be a valid integer"),
    ({"best_of": 3}, "best_of", "send 1, which is n, or leave it out"),
    ({"n": 2, "best_of": 1}, "best_of", "send 2, which is n, or leave it out"),
    ({"best_of": True}, "best_of", "valid integer"),
    ({"presence_penalty": 2.1}, "presence_penalty", "less than or equal to 2"),
    ({"frequency_penalty": -2.1}, "frequency_penalty", "greater than or equal to -2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty", "less than or equal to 1000000"),
    ({"logit_bias": [5]}, "logit_bias", "dictionary"),
    ({"logit_bias": {"5": "1"}}, 'logit_bias["5"]', 'logit_bias["5"] is "1": input should be'),
    ({"logit_bias": {"5": True}}, 'logit_bias["5"]', "valid number"),
    ({"logit_bias": {"5": 101}}, 'logit_bias["5"]', "less than or equal to 100"),
    ({"logit_bias": {"5": -101}}, 'logit_bias["5"]', "greater than or equal to -100"),
    ({"logit_bias": {"05": 1}}, 'logit_bias["05"]', "without leading zeros"),
    ({"logit_bias": {"-1": 1}}, 'logit_bias["-1"]', "must be a token id"),
    ({"logit_bias": {"the": 1}}, 'logit_bias["the"]', "must be a token id"),
    ({"logit_bias": {"": 1}}, 'logit_bias[""]', "must be a token id"),
    ({"logit_bias": {"5\n": 1}}, 'logit_bias["5\\n"]', "must be a token id"),
    ({"logit_bias": {"٣": 1}}, 'logit_bias["٣"]', "must be a token id"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "at most 1024 items"),
    ({"min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
    ({"min_tokens": 2**31}, "min_tokens", "less than 2147483648"),
    ({"top_k": 2**31}, "top_k", "less than 2147483648"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "min_tokens is 6: the answer has at most 5"),
    ({"min_tokens": 6, "max_tokens": 9, "max_completion_tokens": 5}, "min_tokens", "at most 5"),
    ({"stop_token_ids": 5}, "stop_token_ids", "valid list"),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]", "greater than or equal to 0"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]", "valid integer"),
    ({"stop_token_ids": [1] * 33}, "stop_token_ids", "at most 32 items"),
    ({"temperature": 3}, "temperature", "temperature is 3: input should be less than or equal"),
    ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    ({"temperature": "1"}, "temperature", 'temperature is "1": input should be a valid number'),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
    ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    ({"top_k": 1.5}, "top_k", "valid integer"),
    ({"min_p": 1.5}, "min_p", "less than or equal to 1"),
    ({"seed": 2**63}, "seed", "less than 9223372036854775808"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": True}, "max_tokens", "max_tokens is true: input should be a valid integer"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "greater than or equal to 1"),
    ({"stop": ""}, "stop", 'stop is "": string should have at least 1 character'),
    ({"stop": ["a", ""]}, "stop[1]", "at least 1 character"),
    ({"stop": ["a"] * 17}, "stop", "at most 16 items"),
    ({"stop": 5}, "stop", "valid string or input should be a valid list"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", '"stream": true'),
    ({"logprobs": 3}, "logprobs", "valid boolean"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"top_logprobs": 2}, "top_logprobs", '"logprobs": true'),
    ({"model": 3}, "model", "valid string"),
    ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools", "the server sets it"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "dictionary"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type", "'function'"),
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": None}, "messages", "valid list"),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "is missing"),
    ({"messages": [{"role": "bot", "content": "a"}]}, "messages[0].role", "'assistant'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "valid string or"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
     "messages[0].content[0].type", "should be 'text'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
     "messages[0].content[0].text", "is missing"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
     "messages[0].tool_calls[0].function.name", "is missing"),
])
def test_a_bad_value_is_named_with_its_remedy(fields, param, said):
    refused = fault(chat, **fields)
    assert refused.param == param
    assert said in str(refused)
    assert str(refused).startswith(param)


@pytest.mark.parametrize("fields, remedy", [
    ({"echo": True}, "send false, or"), ({"echo": 0}, "send false, or"),
    ({"suffix": "x"}, 'send "", or'),
    ({"tool_choice": "required"}, 'send "auto" or "none", or'),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, 'send "auto" or "none", or'),
    ({"response_format": {"type": "json_object"}}, 'send {"type": "text"}, or'),
    ({"functions": [{"name": "f"}]}, "send [], or"),
    ({"continue_final_message": True}, "send false, or"),
    ({"add_generation_prompt": False}, "send true, or"),
])
def test_what_would_change_the_answer_and_is_not_built_is_refused(fields, remedy):
    refused = fault(chat, **fields)
    (name,) = fields
    assert (refused.param, refused.code) == (name, "unsupported_value")
    assert f"not supported yet; {remedy} leave it out" in str(refused)


def test_neutral_values_and_unknown_parameters_are_accepted():
    request = chat(n=1, echo=False, presence_penalty=0.0, frequency_penalty=0, logit_bias={},
                   tool_choice="none", response_format={"type": "text"}, user="u", store=True,
                   metadata={"a": "b"}, parallel_tool_calls=True, service_tier="auto")
    assert request.edits() is None


def test_null_content_and_parts_and_tool_calls_are_messages():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    read = chat(messages=[{"role": "user", "content": None},
                          {"role": "user", "content": [{"type": "text", "text": "a"}]},
                          {"role": "assistant", "tool_calls": [call]},
                          {"role": "assistant", "content": None, "tool_calls": [call]},
                          {"role": "tool", "content": "x", "tool_call_id": "1", "name": "f"}])
    assert [len(message.tool_calls or ()) for message in read.messages] == [0, 0, 1, 1, 0]


def test_real_agent_runs_are_accepted(agent_runs):
    for line in agent_runs.read_text().splitlines():
        messages = json.loads(line)["messages"]
        assert len(ChatRequest.parse({"messages": messages}).messages) == len(messages)


# The cache object


def test_a_drop_of_a_part_is_its_characters_counted_with_overlaps():
    messages = [{"role": "user", "content": [{"type": "text", "text": "xaa"},
                                             {"type": "text", "text": "aab"}]}]

    def part(**fields):
        drop = {"0": [{"message": 0, **fields}]}
        return edits(messages=messages, cache={"drop": drop}).drop[0]

    assert part(text="aa") == (Part(0, (1, 3)),)
    assert part(text="aa", occurrence=3) == (Part(0, (3, 5)),)
    assert part(text="xaaaab") == (Part(0, (0, 6)),)
    assert part(part="thinking") == (Part(0, None),)


def test_parts_of_a_trigger_in_the_future_are_ignored():
    drop = {"9": [{"message": 1, "text": "not yet"}, {"message": 8, "part": "thinking"}, 2]}
    assert edits(cache={"drop": drop}) == Schedule({9: (2,)})


def test_counting_occurrences_takes_no_more_than_a_moment():
    messages = [{"role": "user", "content": "a" * 100_000}]
    drop = {"0": [{"message": 0, "text": "a" * 50_000, "occurrence": 50_000}]}
    refused = fault(edits, messages=messages, cache={"drop": drop})
    assert refused.param == 'cache.drop["0"][0].text'
    assert "takes too long to find" in str(refused)


def test_drop_takes_integers_integral_floats_and_canonical_strings():
    drop = {"3": [1, 2.0, "0"], "2": [2], "9": [7]}
    assert edits(cache={"drop": drop, "reposition": [0, 3]}) == Schedule(
        {3: (1, 2, 0), 2: (2,), 9: (7,)}, (0, 3))
    assert edits(cache={"drop": {str(2**63 - 1): [3]}}) == Schedule({2**63 - 1: (3,)})


@pytest.mark.parametrize("cache, param, said", [
    ({"drop": {"03": [1]}}, 'cache.drop["03"]', "without leading zeros"),
    ({"drop": {"-1": [1]}}, 'cache.drop["-1"]', "an integer from 0"),
    ({"drop": {"x": [1]}}, 'cache.drop["x"]', "an integer from 0"),
    ({"drop": {"3.0": [1]}}, 'cache.drop["3.0"]', "an integer from 0"),
    ({"drop": {"٣": [1]}}, 'cache.drop["٣"]', "an integer from 0"),
    ({"drop": {str(2**63): [1]}}, f'cache.drop["{2**63}"]', "an integer from 0"),
    ({"drop": {"9" * 30: [1]}}, f'cache.drop["{"9" * 30}"]', "an integer from 0"),
    ({"drop": {"3": 1}}, 'cache.drop["3"]', "give a list of message indices"),
    ({"drop": {"3": [True]}}, 'cache.drop["3"][0]', 'cache.drop["3"][0] is true: give a message'),
    ({"drop": {"3": [1, "02"]}}, 'cache.drop["3"][1]', "without leading zeros"),
    ({"drop": {"3": [1.5]}}, 'cache.drop["3"][0]', "an integer from 0"),
    ({"drop": {"3": [float("inf")]}}, 'cache.drop["3"][0]', "an integer from 0"),
    ({"drop": {"3": [-1]}}, 'cache.drop["3"][0]', "an integer from 0"),
    ({"drop": {"3": [None]}}, 'cache.drop["3"][0]', "an integer from 0"),
    ({"drop": {"3": [4]}}, 'cache.drop["3"][0]', "message 3 cannot drop a later message"),
    ({"drop": {"8": [9]}}, 'cache.drop["8"][0]', "message 8 cannot drop a later message"),
    ({"drop": {"3": [{"text": "a"}]}}, 'cache.drop["3"][0].message', "an integer from 0"),
    ({"drop": {"3": [{"message": 4, "text": "a"}]}}, 'cache.drop["3"][0].message', "later message"),
    ({"drop": {"3": [{"message": 1}]}}, 'cache.drop["3"][0]', '"text": "substring"'),
    ({"drop": {"3": [{"message": 1, "text": ""}]}}, 'cache.drop["3"][0].text', "some text"),
    ({"drop": {"3": [{"message": 1, "text": ["b"]}]}}, 'cache.drop["3"][0].text', "some text"),
    ({"drop": {"3": [{"message": 1, "text": "a"}]}}, 'cache.drop["3"][0].text',
     'is "a": message 1 does not have this text; give a text of its content'),
    ({"drop": {"3": [{"message": 1, "text": "b", "occurrence": 2}]}}, 'cache.drop["3"][0].text',
     "this text 2 times"),
    ({"drop": {"3": [{"message": 1, "text": "b", "occurrence": 0}]}},
     'cache.drop["3"][0].occurrence', "a number from 1"),
    ({"drop": {"3": [{"message": 1, "text": "b", "occurrence": True}]}},
     'cache.drop["3"][0].occurrence', "a number from 1"),
    ({"drop": {"3": [{"message": 1, "text": "b", "occurrence": 1.0}]}},
     'cache.drop["3"][0].occurrence', "a number from 1"),
    ({"drop": {"3": [{"message": 1, "part": "answer"}]}}, 'cache.drop["3"][0].part', '"thinking"'),
    ({"drop": {"3": [{"message": 1, "part": "thinking", "occurrence": 1}]}},
     'cache.drop["3"][0].occurrence', "beside part there is no such key"),
    ({"drop": {"3": [{"message": 1, "text": "b", "part": "thinking"}]}},
     'cache.drop["3"][0].part', "beside text there is no such key"),
    ({"drop": [1]}, "cache.drop", "dictionary"),
    ({"reposition": [4]}, "cache.reposition[0]", "0 to 3"),
    ({"reposition": [-1]}, "cache.reposition[0]", "0 to 3"),
    ({"reposition": [True]}, "cache.reposition[0]", "0 to 3"),
    ({"reposition": [1.0]}, "cache.reposition[0]", "0 to 3"),
    ({"reposition": ["1"]}, "cache.reposition[0]", "0 to 3"),
    ({"reposition": [2, 2]}, "cache.reposition[1]", "increase strictly, and 2 stands before"),
    ({"reposition": [2, 1]}, "cache.reposition[1]", "increase strictly"),
    ({"reposition": 3}, "cache.reposition", "valid list"),
    ({"policy": "rolling"}, "cache.policy", "valid dictionary"),
    ({"policy": {"type": "other"}}, "cache.policy.type", "'rolling_tool_outputs'"),
    ({"policy": {}}, "cache.policy.type", "is missing"),
    ({"policy": {"type": "rolling_tool_outputs", "keep": 0}}, "cache.policy.keep", "equal to 1"),
    ({"policy": {"type": "rolling_tool_outputs", "keep": "2"}}, "cache.policy.keep", "integer"),
    ({"policy": {"type": "rolling_tool_outputs", "reposition_above_tokens": -1}},
     "cache.policy.reposition_above_tokens", "equal to 0"),
    ({"policy": {"type": "rolling_tool_outputs", "n": 1}}, "cache.policy.n", "no such parameter"),
    ({"policy": {"type": "rolling_tool_outputs"}, "drop": {}}, "cache.policy", "leave out"),
    ({"policy": {"type": "rolling_tool_outputs"}, "reposition": []}, "cache.policy", "leave out"),
    ({"salt": 5}, "cache.salt", "valid string"),
    ({"explain": 1}, "cache.explain", "valid boolean"),
    ({"exact": "no"}, "cache.exact", "valid boolean"),
    ({"drop_thinking": 1}, "cache.drop_thinking", "valid boolean"),
    ({"share": "a"}, "cache.share", "no such parameter"),
    ({"drops": {}}, "cache.drops", "no such parameter"),
    ([], "cache", "valid dictionary"),
])
def test_a_bad_cache_field_is_named_with_its_remedy(cache, param, said):
    refused = fault(edits, cache=cache)
    assert refused.param == param
    assert said in str(refused)


def test_shared_parts_are_read_by_message_and_characters():
    parts = [{"type": "text", "text": "see "}, {"type": "text", "text": "abc", "cache": {
        "share": "document"}}, {"type": "text", "text": "!"}]
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": parts}]
    request = chat(messages=messages, stream=True)
    assert request.shares == {Part(1, (4, 7)): "document"}
    assert request.conversation[1]["content"] == "see abc!"
    assert request.wants_usage_chunk and not chat(stream=True).wants_usage_chunk


@pytest.mark.parametrize("value, param, said", [
    ({"share": ""}, "cache.share", "at least 1 character"),
    ({"share": 3}, "cache.share", "valid string"),
    ({"share": "x" * 257}, "cache.share", "at most 256 characters"),
    ({}, "cache.share", "give it"),
    ({"share": "x", "salt": "y"}, "cache.salt", "no such parameter"),
    ("x", "cache", "dictionary"),
])
def test_a_part_that_is_shared_wrongly_is_refused(value, param, said):
    part = {"type": "text", "text": "a", "cache": value}
    refused = fault(chat, messages=[{"role": "user", "content": [part]}])
    assert refused.param == f"messages[0].content[0].{param}"
    assert said in str(refused)


def test_salt_explain_and_exact_are_read():
    request = chat(cache={"salt": "t", "explain": True, "exact": True, "drop_thinking": False})
    assert (request.salt, request.explain, request.edits()) == ("t", True, None)


def test_a_policy_becomes_a_function_of_the_history():
    policy = edits(cache={"policy": {"type": "rolling_tool_outputs", "keep": 1}})
    assert policy([]) == Schedule()


# The AKV spelling


@pytest.mark.parametrize("fields", [
    {"drop_message": {"3": [1, 2]}, "reposition": [3]},
    {"drop_rule": {"type": "message_drop", "drop_messages": {"3": [1, 2]}}, "reposition": [3]},
    {"drop_message": {"3": [1, 2]}, "reposition": [3], "cache": {"salt": "t"}},
    {"cache": {"drop": {"3": [1, 2]}, "reposition": [3]}},
])
def test_both_spellings_say_the_same(fields):
    assert edits(**fields) == Schedule({3: (1, 2)}, (3,))


@pytest.mark.parametrize("fields, param, said", [
    ({"drop_message": {"03": [1]}}, 'drop_message["03"]', "leading zeros"),
    ({"drop_message": [1]}, "drop_message", "dictionary"),
    ({"reposition": [3, 2]}, "reposition[1]", "increase strictly"),
    ({"reposition": {}}, "reposition", "valid list"),
    ({"drop_message": {"3": [{"message": 1, "text": "b"}]}}, 'drop_message["3"][0]',
     "give a message index"),
    ({"drop_message": {}, "drop_rule": {"type": "thinking_drop"}}, "drop_rule", "use one"),
    ({"drop_rule": {"type": "other"}}, "drop_rule.type", "use message_drop, text_drop, keep_text"),
    ({"drop_rule": {}}, "drop_rule.type", "or thinking_drop"),
    ({"drop_rule": {"type": ["text_drop"]}}, "drop_rule.type", "or thinking_drop"),
    ({"drop_rule": []}, "drop_rule", "valid dictionary"),
    ({"drop_rule": {"type": "message_drop"}}, "drop_rule.drop_messages", "is missing"),
    ({"drop_rule": {"type": "message_drop", "drop_messages": []}}, "drop_rule.drop_messages",
     "valid dictionary"),
    ({"drop_rule": {"type": "message_drop", "drop_messages": {}, "_x": 1}}, "drop_rule._x",
     "reserved; leave it out"),
    ({"drop_rule": {"type": "message_drop", "drop_messages": {}, "x": 1}}, "drop_rule.x",
     "leave it out"),
    ({"drop_rule": {"type": "message_drop", "drop_messages": {"3": [4]}}},
     'drop_rule.drop_messages["3"][0]', "later message"),
    ({"drop_message": {}, "cache": {"drop": {}}}, "drop_message", "two spellings"),
    ({"reposition": [1], "cache": {"drop": {"1": [0]}}}, "reposition", "two spellings"),
    ({"drop_message": {}, "cache": {"policy": {"type": "rolling_tool_outputs"}}}, "drop_message",
     "two spellings"),
])
def test_a_bad_akv_field_is_named_with_its_remedy(fields, param, said):
    refused = fault(edits, **fields)
    assert refused.param == param
    assert said in str(refused)


@pytest.mark.parametrize("fields, wants", [
    ({}, False), ({"stream_options": {"include_usage": True}}, True), ({"cache": {}}, True),
    ({"cache": None}, True), ({"drop_message": None}, True), ({"reposition": []}, True),
    ({"stream_options": {}}, False),
])
def test_a_cache_field_brings_the_usage_chunk(fields, wants):
    assert chat(stream=True, **fields).wants_usage_chunk is wants


# /v1/completions


def test_a_prompt_is_text_or_token_ids_or_several_of_either():
    def prompts(prompt):
        return CompletionRequest.parse({"prompt": prompt}).prompts

    assert prompts("a") == {"prompt": "a"}
    assert prompts(["a", "b"]) == {"prompt[0]": "a", "prompt[1]": "b"}
    assert prompts([1, 2]) == {"prompt": [1, 2]}
    assert prompts([[1, 2], [3]]) == {"prompt[0]": [1, 2], "prompt[1]": [3]}


def test_sixteen_tokens_unless_told_otherwise():
    assert CompletionRequest.parse({"prompt": "a"}).token_limit == 16
    assert CompletionRequest.parse({"prompt": "a", "max_tokens": 3}).token_limit == 3
    assert CompletionRequest.parse({"prompt": "a", "logprobs": 2}).samplings(())[0].logprobs == 2
    assert CompletionRequest.parse({"prompt": "a", "min_tokens": 16}).token_limit == 16


@pytest.mark.parametrize("fields, param, said", [
    ({}, "prompt", "is missing"),
    ({"prompt": 5}, "prompt", "valid string or"),
    ({"prompt": []}, "prompt", "at least 1 item"),
    ({"prompt": [[]]}, "prompt[0]", "at least 1 item"),
    ({"prompt": [-1]}, "prompt[0]", "greater than or equal to 0"),
    ({"prompt": [True]}, "prompt[0]", "valid integer"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"prompt": "a", "logprobs": True}, "logprobs", "valid integer"),
    ({"prompt": "a", "echo": True}, "echo", "not supported yet"),
    ({"prompt": "a", "n": 2, "best_of": 3}, "best_of", "not supported yet; send 2"),
    ({"prompt": "a", "min_tokens": 17}, "min_tokens", "at most 16 tokens"),
    ({"prompt": "a", "cache": {"drop": {"0": [0]}}}, "cache.drop", "/v1/chat/completions"),
    ({"prompt": "a", "cache": {"explain": True}}, "cache.explain", "/v1/chat/completions"),
    ({"prompt": "a", "drop_message": {"0": [0]}}, "drop_message", "/v1/chat/completions"),
])
def test_a_bad_completion_is_named_with_its_remedy(fields, param, said):
    refused = fault(CompletionRequest.parse, fields)
    assert refused.param == param
    assert said in str(refused)


def test_the_envelope_is_openais():
    refused = fault(chat, temperature=3)
    assert json.loads(json.dumps(refused.body())) == {"error": {
        "message": "temperature is 3: input should be less than or equal to 2",
        "type": "invalid_request_error", "param": "temperature", "code": "invalid_value"}}


def test_long_values_are_cut():
    refused = fault(chat, temperature="x" * 500)
    assert len(str(refused)) < 150
