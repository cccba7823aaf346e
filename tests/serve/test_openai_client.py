"""The official client against the server."""

import collections

import openai
import pytest

from kvfunc.serve.interface import Sampling


@pytest.fixture
def client(served):
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0,
                       http_client=http) as made:
        yield made


def test_openais_client_reads_answers(served, client):
    message = {"role": "user", "content": "hi"}
    answer = client.chat.completions.create(model="fake", messages=[message], logprobs=True,
                                            extra_body={"cache": {"salt": "t"}})
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].logprobs.content[0].token == "h"
    assert answer.usage.prompt_tokens_details.cached_tokens == 23
    assert answer.usage.prompt_tokens_details.repos_tokens == 0
    assert client.completions.create(model="fake", prompt="x").choices[0].text == "hello"
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"


def test_openais_client_reads_streams(served, client):
    with client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}], stream=True,
            stream_options={"include_usage": True}) as stream:
        *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage.prompt_tokens_details.drop_skipped_tokens == 0
    with client.completions.create(model="fake", prompt="x", stream=True) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == "hello"


def test_openais_client_reads_several_choices(served, client):
    asked = dict(model="fake", messages=[{"role": "user", "content": "hi"}], n=3, seed=1)
    texts = ["one", "two", "three"]
    served.engine.say_in_turn(*([text, "<|im_end|>"] for text in texts))
    answer = client.chat.completions.create(**asked)
    assert [choice.message.content for choice in answer.choices] == texts
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (24, 14)
    said, ends = collections.defaultdict(str), {}
    with client.chat.completions.create(**asked, stream=True) as stream:
        for choice in (choice for chunk in stream for choice in chunk.choices):
            said[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason
    assert [said[index] for index in range(3)] == texts
    assert ends == dict.fromkeys(range(3), "stop")
    answer = client.completions.create(model="fake", prompt=["x", "y"], n=2, best_of=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_openais_client_sets_penalties_and_biases(served, client):
    client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], logit_bias={"7": -100, "8": 5},
        presence_penalty=0.5, frequency_penalty=-0.5,
        extra_body={"repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [9]})
    assert served.engine.submitted[0].sampling == Sampling(
        presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.1,
        logit_bias=((7, -100.0), (8, 5.0)), min_tokens=2, stop_ids=frozenset({9, 256}))
    with pytest.raises(openai.BadRequestError, match="give token ids below 257") as raised:
        client.completions.create(model="fake", prompt="x", logit_bias={"50000000": 1})
    assert raised.value.param == 'logit_bias["50000000"]'


def test_openais_client_reads_errors(served, client):
    def ask(**fields):
        return client.chat.completions.create(**{
            "model": "fake", "messages": [{"role": "user", "content": "hi"}], **fields})

    with pytest.raises(openai.BadRequestError, match="temperature is 3") as raised:
        ask(temperature=3)
    assert (raised.value.param, raised.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError):
        ask(model="other")
    served.engine.say("ab", RuntimeError("boom"))
    with pytest.raises(openai.APIError, match="the server failed"), ask(stream=True) as stream:
        list(stream)


TOOL = {"type": "function", "function": {
    "name": "height", "description": "of a mountain", "parameters": {
        "type": "object", "properties": {"of": {"type": "string"}}}}}
TOOL_TALK = [
    {"role": "user", "content": "How high is K2?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": name, "type": "function", "function": {
            "name": "height", "arguments": f'{{"of": "{name}"}}'}} for name in "ab"]},
    {"role": "tool", "tool_call_id": "a", "content": "8611 m"},
    {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "unknown"}]},
    {"role": "developer", "content": "Answer in feet."}]


@pytest.mark.parametrize("choice", ["auto", "none", openai.omit])
def test_openais_client_sends_tools_calls_and_results(served, client, choice):
    asked = dict(model="fake", messages=TOOL_TALK, tools=[TOOL], tool_choice=choice,
                 parallel_tool_calls=True)
    answer = client.chat.completions.create(**asked)
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    with client.chat.completions.create(**asked, stream=True) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "hello"
    prompt = served.engine.tokenizer.decode(served.engine.submitted[0].tokens.tolist())
    assert "[tool]8611 m\n[tool]unknown\n[developer]Answer in feet.\n" in prompt


def test_openais_client_reads_warnings_and_dropped_tokens(served, client):
    served.engine.say("<think>hm</think>ok<|im_end|>")
    asked = dict(model="fake", messages=TOOL_TALK, tools=[TOOL], extra_body={
        "cache": {"drop": {"3": [2]}, "drop_thinking": True}})
    answer = client.chat.completions.create(**asked)
    torn = ("tool results are dropped, but their calls are not: "
            "the call in message 1 and its result in message 2")
    assert torn in answer.warnings
    assert answer.usage.completion_tokens_details.dropped_tokens == len("<think>hm</think>")
    assert answer.usage.prompt_tokens_details.drop_skipped_tokens == len("[tool]8611 m\n")
    with client.chat.completions.create(**asked, stream=True) as stream:
        *_, last = stream
    assert last.warnings == answer.warnings and last.usage == answer.usage


ARGUMENTS = '{"of":"K2",  "n": 1.0}'
THOUGHT_AND_CALLS = (f'<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{{"name": "height", '
                     f'"arguments": {ARGUMENTS}}}\n</tool_call>\n<tool_call>\n{{"name": "f", '
                     '"arguments": {}}\n</tool_call><|im_end|>')


def test_openais_client_reads_reasoning_and_calls(served, client, monkeypatch):
    monkeypatch.setattr(served.chat, "source", "{{ '</think><tool_call>' }}")
    served.engine.say(THOUGHT_AND_CALLS)
    asked = dict(model="fake", messages=TOOL_TALK, tools=[TOOL])
    (choice,) = client.chat.completions.create(**asked).choices
    message = choice.message
    assert (message.content, message.reasoning_content) == ("I look.", "Hm.")
    assert choice.finish_reason == "tool_calls"
    assert [(call.type, call.function.name, call.function.arguments)
            for call in message.tool_calls] == [
        ("function", "height", ARGUMENTS), ("function", "f", "{}")]
    assert len({call.id for call in message.tool_calls}) == 2

    with client.chat.completions.create(**asked, stream=True) as stream:
        deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "Hm."
    parts = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(part.index, part.function.name) for part in parts if part.id] == [
        (0, "height"), (1, "f")]
    assert ["".join(part.function.arguments for part in parts if part.index == index)
            for index in (0, 1)] == [ARGUMENTS, "{}"]

    answer = client.chat.completions.create(**asked | {"messages": [
        *TOOL_TALK, message.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": call.id, "content": "1"}
          for call in message.tool_calls)]})
    assert answer.choices[0].finish_reason == "tool_calls"


def test_openais_client_accumulates_streamed_calls(served, client, monkeypatch):
    monkeypatch.setattr(served.chat, "source", "{{ '<tool_call>' }}")
    served.engine.say(THOUGHT_AND_CALLS.partition("</think>\n\n")[2])
    with client.chat.completions.stream(model="fake", messages=TOOL_TALK, tools=[TOOL]) as stream:
        (choice,) = stream.get_final_completion().choices
    assert choice.message.content == "I look."
    assert [call.function.arguments for call in choice.message.tool_calls] == [ARGUMENTS, "{}"]
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("fields, param, code", [
    ({"tool_choice": "required"}, "tool_choice", "unsupported_value"),
    ({"tool_choice": {"type": "function", "function": {"name": "height"}}}, "tool_choice",
     "unsupported_value"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content", "missing_required_parameter"),
    ({"extra_body": {"cache": {"drop": {"0": [{"message": 0, "text": "x"}]}}}},
     'cache.drop["0"][0].text', "invalid_value"),
    ({"extra_body": {"cache": {"forget": 1}}}, "cache.forget", "unknown_parameter"),
    ({"extra_body": {"drop_rule": {"type": "thinking_drop"}}}, "drop_rule.type", "invalid_value"),
    ({"messages": [{"role": "user", "content": "x" * 2000}]}, "messages",
     "context_length_exceeded"),
])
@pytest.mark.parametrize("stream", [True, False])
def test_openais_client_raises_what_is_wrong(served, client, fields, param, code, stream):
    asked = {"messages": TOOL_TALK, "tools": [TOOL], **fields}
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="fake", stream=stream, **asked)
    assert (raised.value.param, raised.value.code) == (param, code)
    assert raised.value.type == "invalid_request_error"
