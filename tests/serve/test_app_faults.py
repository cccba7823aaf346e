import dataclasses
import threading

import httpx
import pytest

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
    ({"n": 2}, "n"), ({"drop_message": {}, "cache": {"drop": {}}}, "drop_message"),
])
def test_a_bad_parameter_is_a_400_and_nothing_runs(served, fields, param):
    assert error(served.ask(**fields))["param"] == param
    assert served.engine.calls == []


def test_a_template_that_moves_messages_serves_only_ordinary_requests(served, monkeypatch):
    render = served.chat.render
    monkeypatch.setattr(served.chat, "render", lambda *a, **k: dataclasses.replace(
        render(*a, **k), monotonic=False))
    for cache in ({"drop": {"0": [0]}}, {"reposition": [0]},
                  {"policy": {"type": "rolling_tool_outputs"}}):
        refused = error(served.ask(cache=cache))
        assert (refused["param"], refused["code"]) == ("cache", "unsupported_value")
        assert "leave out drop, reposition and policy" in refused["message"]
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


# Threads and clients that leave


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


def test_many_waiting_requests_do_not_keep_the_one_that_runs_from_its_thread(served):
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


@pytest.mark.parametrize("before", ["", "a"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_generation(served, stream, before):
    served.engine.say(before, served.engine.WAIT, "b" * 900)
    body = {"messages": RUN, "stream": stream}
    with httpx.Client(base_url=served.url, trust_env=False, timeout=0.3) as client, pytest.raises(
            httpx.ReadTimeout), client.stream("POST", "/v1/chat/completions", json=body) as got:
        got.read()
    wait_for(served.engine.reached)
    threading.Event().wait(0.1)  # for the server to see the closed socket
    served.engine.gate.set()
    wait_for(served.engine.closed)
    assert served.engine.yielded < 100
    served.engine.say("fine<|im_end|>")
    assert served.ask().json()["choices"][0]["message"]["content"] == "fine"
