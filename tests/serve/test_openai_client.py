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
