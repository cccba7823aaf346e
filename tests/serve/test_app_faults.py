import asyncio
import dataclasses
import threading

import httpx
import pytest

from kvfunc.serve.app import _EventStream
from kvfunc.serve.interface import CapacityExceeded

RUN = [{"role": "system", "content": "s"}, {"role": "user", "content": "uu"},
       {"role": "assistant", "content": "aaa"}, {"role": "user", "content": "u"}]


def wait_for(event: threading.Event):
    assert event.wait(10)


def error(response: httpx.Response, status: int = 400) -> dict:
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    return response.json()["error"]


def test_the_servers_own_refusals_are_in_the_envelope(served):
    unknown = error(served.client.get("/v1/nothing"), 404)
    assert (unknown["code"], unknown["type"]) == ("not_found", "invalid_request_error")
    assert "POST /v1/chat/completions" in unknown["message"]
    response = served.client.get("/v1/chat/completions")
    assert error(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_body_that_is_not_json_is_refused(served, path):
    post = served.client.post
    assert error(post(path, content=b"{", headers={"content-type": "application/json"}))[
        "code"] == "invalid_json"
    refused = error(post(path, content=b"{}", headers={"content-type": "text/plain"}))
    assert refused["code"] == "invalid_content_type"
    assert "'text/plain'" in refused["message"]
    assert error(post(path, json={}))["code"] == "missing_required_parameter"


def test_another_model_is_not_found(served):
    for refused in (served.ask(model="gpt-4o"), served.client.get("/v1/models/gpt-4o"),
                    served.post("/v1/completions", prompt="a", model="gpt-4o")):
        told = error(refused, 404)
        assert (told["param"], told["code"]) == ("model", "model_not_found")
        assert told["message"] == "the model 'gpt-4o' is not served here: use 'fake'"


def test_what_the_template_refuses_is_a_400(served):
    refused = error(served.ask("refuse me"))
    assert refused["param"] == "messages"
    assert refused["message"].startswith("the chat template refuses these messages: I refuse")
    assert error(served.ask(chat_template_kwargs={"self": 1}))["param"] == "messages"


def test_too_long_a_context_is_refused_and_drops_make_room(served):
    messages = [{"role": "user", "content": "x" * 700}, {"role": "user", "content": "y" * 400}]
    refused = error(served.ask(messages=messages))
    assert (refused["param"], refused["code"]) == ("messages", "context_length_exceeded")
    refused = error(served.post("/v1/completions", prompt=["x", "x" * 1000]))
    assert (refused["param"], refused["code"]) == ("prompt[1]", "context_length_exceeded")
    cache = {"drop": {"0": [0]}, "reposition": [0]}
    assert served.ask(messages=messages, cache=cache).status_code == 200
    assert error(served.ask(messages=messages, cache={"explain": True}))[
        "code"] == "context_length_exceeded"


def test_empty_prompts_and_unknown_tokens_are_refused(served):
    refused = error(served.post("/v1/completions", prompt=""))
    assert (refused["param"], refused["message"]) == (
        "prompt", "prompt has no tokens: give some text")
    refused = error(served.post("/v1/completions", prompt=[5, 257]))
    assert (refused["param"], refused["message"]) == (
        "prompt[1]", "prompt[1] is 257: give token ids below 257")
    refused = error(served.post("/v1/completions", prompt="a", logit_bias={"50000000": 1}))
    assert (refused["param"], refused["message"]) == (
        'logit_bias["50000000"]',
        'logit_bias["50000000"] is 1.0: there is no such token; give token ids below 257')


def test_too_small_a_pool_is_a_503(served):
    served.engine.failure = CapacityExceeded("needs 5000 KV tokens of 4096: use --kv-tokens")
    for stream in (False, True):
        response = served.ask(stream=stream)
        refused = error(response, 503)
        assert (refused["type"], refused["code"]) == ("server_error", "capacity_exceeded")
        assert int(response.headers["retry-after"]) > 0


def test_the_server_goes_on_after_a_fault_of_its_own(served, caplog):
    served.engine.failure = RuntimeError("boom")
    refused = error(served.ask(), 500)
    assert (refused["type"], refused["code"]) == ("server_error", "internal_error")
    assert "boom" not in refused["message"]
    assert "RuntimeError: boom" in caplog.text
    served.engine.failure = None
    assert served.ask().status_code == 200


@pytest.mark.parametrize("fields, param", [
    ({"temperature": 3}, "temperature"), ({"cache": {"drop": {"0": [1]}}}, 'cache.drop["0"][0]'),
    ({"n": 0}, "n"), ({"drop_message": {}, "cache": {"drop": {}}}, "drop_message"),
    ({"logit_bias": {"256": 1, "257": 1}}, 'logit_bias["257"]'),
    ({"stop_token_ids": [256, 257]}, "stop_token_ids[1]"),
])
def test_a_bad_parameter_is_a_400_and_nothing_runs(served, fields, param):
    assert error(served.ask(**fields))["param"] == param
    assert served.engine.submitted == []


def test_a_template_that_moves_messages_serves_only_ordinary_requests(served, monkeypatch):
    render = served.chat.render
    monkeypatch.setattr(served.chat, "render", lambda *a, **k: dataclasses.replace(
        render(*a, **k), monotonic=False))
    for cache in ({"drop": {"0": [0]}}, {"reposition": [0]},
                  {"policy": {"type": "rolling_tool_outputs"}}, {"drop_thinking": True}):
        refused = error(served.ask(cache=cache))
        assert (refused["param"], refused["code"]) == ("cache", "unsupported_value")
        assert "leave out drop, reposition, policy and drop_thinking" in refused["message"]
    assert served.ask(cache={"drop": {}, "salt": "t"}).status_code == 200


def test_an_error_before_the_first_token_is_a_plain_http_error(served):
    served.engine.say(RuntimeError("boom"))
    assert error(served.ask(stream=True), 500)["code"] == "internal_error"


def test_an_error_within_a_stream_ends_it(served):
    served.engine.say("ab", RuntimeError("boom"))
    *chunks, last = served.stream()
    assert last["error"]["code"] == "internal_error"
    assert "boom" not in last["error"]["message"]
    assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == ["", "a", "b"]
    served.engine.say("fine<|im_end|>")
    assert served.ask().json()["choices"][0]["message"]["content"] == "fine"


@pytest.mark.parametrize("stream", [True, False])
def test_one_choice_that_fails_ends_all(served, stream):
    served.engine.say_in_turn(["ab", RuntimeError("boom")], ["xy", served.engine.WAIT, "z" * 900])
    got = []
    thread = threading.Thread(target=lambda: got.append(served.ask(n=2, stream=stream)))
    thread.start()
    wait_for(served.engine.cancelled)
    assert served.engine.open == 0
    served.engine.gate.set()
    thread.join()
    if stream:
        assert "internal_error" in got[0].text.split("\n\n")[-2]
    else:
        assert error(got[0], 500)["code"] == "internal_error"


@pytest.mark.parametrize("stream", [True, False])
def test_a_choice_that_finds_no_place_takes_back_those_before_it(served, stream, monkeypatch):
    submit, full = served.engine.submit, CapacityExceeded("no room for this prompt")

    def submit_two(job, deliver):
        if len(served.engine.submitted) == 2:
            raise full
        return submit(job, deliver)

    served.engine.say(served.engine.WAIT, "a" * 900)
    monkeypatch.setattr(served.engine, "submit", submit_two)
    assert error(served.ask(n=3, stream=stream), 503)["code"] == "capacity_exceeded"
    assert served.engine.open == 0
    served.engine.gate.set()


# Clients that leave


def test_health_answers_while_an_answer_is_generated(served):
    served.engine.say("a", served.engine.WAIT, "b<|im_end|>")
    got = []
    thread = threading.Thread(target=lambda: got.append(served.ask().json()))
    thread.start()
    wait_for(served.engine.reached)
    assert served.client.get("/health").status_code == 200
    assert served.client.get("/v1/models").status_code == 200
    served.engine.gate.set()
    thread.join()
    assert got[0]["choices"][0]["message"]["content"] == "ab"


def test_many_requests_can_wait_at_once(served):
    served.engine.seats = 1
    served.engine.say("a", served.engine.WAIT, "b<|im_end|>")
    got = []
    threads = [threading.Thread(target=lambda: got.append(served.stream()[-1]))
               for _ in range(60)]
    limits = httpx.Limits(max_connections=100)
    served.client = httpx.Client(base_url=served.url, trust_env=False, timeout=20, limits=limits)
    with served.client:
        for thread in threads:
            thread.start()
        wait_for(served.engine.reached)
        served.engine.gate.set()
        for thread in threads:
            thread.join()
    assert got == ["[DONE]"] * 60


def leave(served, path, **body):
    """Ask, and hang up 0.3 s later."""
    with httpx.Client(base_url=served.url, trust_env=False, timeout=0.3) as client, pytest.raises(
            httpx.ReadTimeout), client.stream("POST", path, json=body) as got:
        got.read()


@pytest.mark.parametrize("before", ["", "a"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_generation(served, caplog, stream, before):
    served.engine.say(before, served.engine.WAIT, "b" * 900)
    body = {"messages": RUN, "stream": stream}
    leave(served, "/v1/chat/completions", **body)
    wait_for(served.engine.reached)
    wait_for(served.engine.cancelled)
    served.engine.gate.set()
    served.engine.say("fine<|im_end|>")
    assert served.ask().json()["choices"][0]["message"]["content"] == "fine"
    assert served.engine.delivered == len(before) + len("fine") + 1
    assert not [record for record in caplog.records if record.name.startswith("kvfunc")]


@pytest.mark.parametrize("stream", [True, False])
def test_a_queued_request_of_a_client_that_leaves_never_runs(served, stream):
    served.engine.seats = 1
    served.engine.say("a", served.engine.WAIT, "b<|im_end|>")
    got = []
    thread = threading.Thread(target=lambda: got.append(served.ask().json()))
    thread.start()
    wait_for(served.engine.reached)
    leave(served, "/v1/completions", prompt=["x", "y"], n=2, stream=stream)
    assert len(served.engine.submitted) == 5
    wait_for(served.engine.cancelled)
    while served.engine.open > 1:
        threading.Event().wait(0.01)
    served.engine.gate.set()
    thread.join()
    assert got[0]["choices"][0]["message"]["content"] == "ab"
    assert len(served.engine.admitted) == 1


def test_what_a_client_asked_that_left_in_the_meantime_is_not_submitted(served, monkeypatch):
    render, reached, gate = served.chat.render, threading.Event(), threading.Event()

    def slow(*arguments, **fields):
        reached.set()
        wait_for(gate)
        return render(*arguments, **fields)

    monkeypatch.setattr(served.chat, "render", slow)
    leave(served, "/v1/chat/completions", messages=RUN)
    wait_for(reached)
    monkeypatch.undo()
    for _ in range(2):  # once it answers, it has seen the socket that was closed before
        served.client.get("/health")
    gate.set()
    assert served.ask("another").status_code == 200
    assert len(served.engine.submitted) == 1


def test_a_stream_whose_client_has_left_before_it_begins_is_closed():
    closed = []

    async def steps():
        try:
            yield "first"
            yield "second"
        finally:
            closed.append(True)

    async def events():
        yield "never sent"

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        await asyncio.sleep(10)

    async def respond():
        begun = steps()
        assert await anext(begun) == "first"
        await _EventStream(begun, events())({"type": "http"}, receive, send)
        assert closed

    asyncio.run(respond())
