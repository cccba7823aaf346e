"""What an operator relies on: limits, keys, health, the end of a server, metrics and the log."""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import logging
import re
import threading
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvfunc.serve.answer import Choice, answer
from kvfunc.serve.interface import TimedOut
from kvfunc.serve.metrics import Metrics
from kvfunc.serve.prepare import MAX_ANSWERS
from kvfunc.serve.requestlog import LOGGER, RequestRecord

from .fake import FakeEngine, Served, read_events, serving

HI = [{"role": "user", "content": "hi"}]
KEY = "a-key-that-nobody-guesses"


@contextlib.contextmanager
def server(**options):
    """A server of its own, and the lines of its request log."""
    engine = FakeEngine()
    with serving(engine, **options) as (chat, url), httpx.Client(
            base_url=url, trust_env=False, timeout=10) as client:
        yield Served(engine, chat, url, client)


@pytest.fixture
def log(caplog):
    """The request log's lines, once there are so many."""
    caplog.set_level(logging.INFO, LOGGER)

    def lines(count):
        eventually(lambda: len(told()) >= count)
        return told()

    def told():
        return [json.loads(record.message) for record in caplog.records if record.name == LOGGER]

    return lines


def eventually(holds, seconds=60):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def error(response, status):
    assert response.status_code == status, response.text
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    return response.json()["error"]


def in_background(call):
    got = []
    thread = threading.Thread(target=lambda: got.append(call()))
    thread.start()
    return thread, got


# Limits


def test_a_full_queue_is_a_503_that_says_when_to_come_again(served):
    served.engine.most_open = 3
    served.engine.say("a", served.engine.WAIT, "b<|im_end|>")
    thread, got = in_background(lambda: served.ask(n=2))
    assert served.engine.reached.wait(10)
    for stream in (False, True):  # both answers of n find a place, or none does
        response = served.ask(n=2, stream=stream)
        assert error(response, 503)["code"] == "queue_full"
        assert response.headers["retry-after"] == "7"
    assert len(served.engine.submitted) == 2
    served.engine.gate.set()
    thread.join()
    assert got[0].status_code == 200
    assert served.ask(n=2).status_code == 200


@pytest.mark.parametrize("most, bound", [(10**6, MAX_ANSWERS), (5, 5)])
def test_a_request_for_more_answers_than_can_ever_be_is_a_400(served, most, bound):
    served.engine.most_open = most
    refused = error(served.post("/v1/completions", prompt=["x"] * bound, n=2), 400)
    assert (refused["param"], refused["code"]) == ("prompt", "invalid_value")
    assert f"prompt is {2 * bound}: this server takes at most {bound} answers" in refused["message"]
    assert served.engine.submitted == []
    if bound == 5:
        assert error(served.ask(n=6), 400)["param"] == "n"
        assert served.ask(n=5).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waits_too_long_is_a_504(served, stream):
    served.engine.seats = 0
    told = error(served.ask(timeout=0.2, stream=stream, n=2), 504)
    assert (told["code"], told["type"]) == ("timeout", "server_error")
    assert told["message"].startswith("the request took its 0.2 s, all of it waiting for its turn")
    assert served.engine.open == 0 and served.engine.cancelled.is_set()
    assert len(served.engine.submitted) == 2


def test_an_answer_that_takes_too_long_is_a_504_and_ends_in_the_engine(served):
    served.engine.say("abc", served.engine.WAIT, "d" * 900)
    told = error(served.ask(timeout=2), 504)
    assert told["code"] == "timeout"
    assert re.search(r"\d s of it waiting for its turn, and generated 3 tokens", told["message"])
    assert served.engine.open == 0
    served.engine.gate.set()


def test_a_stream_that_takes_too_long_ends_with_the_error(served):
    served.engine.say("abc", served.engine.WAIT, "d" * 900)
    *chunks, last = served.stream(timeout=2)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "abc"
    assert last["error"]["code"] == "timeout" and "generated 3 tokens" in last["error"]["message"]
    assert served.engine.open == 0
    served.engine.gate.set()


def test_a_stream_that_nobody_reads_still_ends_in_the_engine_when_its_time_is_over(served):
    """Also where a client is so slow that the next token is not even waited for."""
    served.engine.say("a", served.engine.WAIT, "b" * 900)
    served.ask(max_tokens=1)
    (job,) = served.engine.submitted
    record = RequestRecord("id", "/", "fake", Metrics("fake", served.engine.stats))

    async def ask():
        job_of_many = dataclasses.replace(job, max_tokens=900)
        steps = answer(served.engine, [Choice(job_of_many)], record, timeout=0.3)
        assert (await anext(steps)).generated == 1
        for _ in range(500):
            await asyncio.sleep(0.01)
            if not served.engine.open:
                break
        assert not served.engine.open
        with pytest.raises(TimedOut):
            await anext(steps)

    asyncio.run(ask())
    served.engine.gate.set()


def test_a_request_can_only_shorten_the_servers_timeout():
    with server(request_timeout=0.3) as served:
        served.engine.seats = 0
        assert "took its 0.3 s" in error(served.ask(timeout=60), 504)["message"]
        assert "took its 0.1 s" in error(served.ask(timeout=0.1), 504)["message"]
        assert "took its 0.3 s" in error(served.ask(), 504)["message"]
        served.engine.seats = 8
        assert served.ask().status_code == 200


@pytest.mark.parametrize("timeout", [0, -1, True, "1", 1e999])
def test_a_timeout_is_a_positive_number(served, timeout):
    body = json.dumps({"messages": HI, "timeout": timeout}).replace("Infinity", "1e999")
    refused = error(served.client.post("/v1/chat/completions", content=body), 400)
    assert refused["param"] == "timeout"


# Keys


def test_only_who_has_a_key_is_answered(log, caplog):
    with server(api_keys=["another", KEY]) as served:
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"},
                      {"Authorization": KEY}, {"Authorization": "Bearer"},
                      {"Authorization": f"Bearer {KEY}x"}, {"Authorization": "Bearer gr\xfc\xdfe"}):
            given = {name: value.encode("latin-1") for name, value in given.items()}
            for method, path in (("POST", "/v1/chat/completions"), ("POST", "/v1/completions"),
                                 ("GET", "/v1/models"), ("GET", "/v1/nothing")):
                response = served.client.request(method, path, headers=given)
                assert error(response, 401)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/health/live", "/health/ready", "/metrics"):
            assert served.client.get(path).status_code == 200
        assert served.engine.submitted == []
        for key in (KEY, "another"):
            served.client.headers["Authorization"] = f"bearer {key}"
            assert served.ask().status_code == 200
        assert KEY not in served.ask(temperature=KEY[:5]).text + served.client.get("/metrics").text
    lines = log(31)
    assert collections.Counter(line["error"] for line in lines) == {
        "invalid_api_key": 28, None: 2, "invalid_value": 1}
    assert KEY not in caplog.text and "wrong" not in caplog.text


# Ids


def test_a_sane_request_id_is_echoed_and_another_replaced(served, log):
    def ask(given):
        response = served.client.post("/v1/chat/completions", json={"messages": HI},
                                      headers={"x-request-id": given})
        return response.headers["x-request-id"]

    odd = ("with space", "x" * 129, '"quoted"', "gr\xfc\xdfe".encode("latin-1"), "")
    ids = [ask(given) for given in ("trace/7:a.b_c-d=+@", *odd)]
    assert ids[0] == "trace/7:a.b_c-d=+@"
    assert all(len(made) == 32 and made.isalnum() for made in ids[1:]) and len(set(ids)) == len(ids)
    assert {line["id"] for line in log(len(ids))} == set(ids)
    for response in (served.client.get("/v1/nothing"), served.client.get("/health"),
                     served.ask(n=0), served.ask(stream=True)):
        assert response.headers["x-request-id"]


# Health and the end


def test_a_server_that_drains_says_so_and_finishes_what_it_has():
    with server() as served:
        drain = served.engine.app.state.drain
        served.engine.say("a", served.engine.WAIT, "b<|im_end|>")
        thread, got = in_background(lambda: served.ask(n=2))
        assert served.engine.reached.wait(10)
        assert served.client.get("/health/ready").json() == {"status": "ok"}
        assert drain.open == 1
        drain.begin()
        ready = served.client.get("/health/ready")
        assert (ready.status_code, ready.json()) == (503, {
            "status": "unavailable", "reason": "the server is shutting down"})
        assert served.client.get("/health/live").status_code == 200
        health = served.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "draining")
        response = served.ask()
        assert error(response, 503)["code"] == "shutting_down"
        assert int(response.headers["retry-after"]) > 0
        served.engine.gate.set()
        thread.join()
        assert [c["message"]["content"] for c in got[0].json()["choices"]] == ["ab", "ab"]
        eventually(lambda: drain.open == 0)


def test_what_is_left_when_the_server_ends_gets_a_503_or_the_error_event(log):
    with server() as served:
        served.engine.seats = 1
        served.engine.say("a", served.engine.WAIT, "b" * 900)
        stream = in_background(lambda: served.stream())
        assert served.engine.reached.wait(10)
        plain = in_background(served.ask)
        eventually(lambda: len(served.engine.submitted) == 2)
        drain = served.engine.app.state.drain
        drain.begin()
        ending = in_background(lambda: asyncio.run(drain.end()))
        eventually(lambda: not served.engine.alive)
        served.engine.gate.set()
        for thread, _ in (stream, plain, ending):
            thread.join()
        assert stream[1][0][-1]["error"]["code"] == "shutting_down"
        assert error(plain[1][0], 503)["code"] == "shutting_down"
        assert int(plain[1][0].headers["retry-after"]) > 0
    assert [line["error"] for line in log(2)] == ["shutting_down"] * 2


def test_an_engine_whose_thread_died_fails_every_check_of_health():
    with server() as served:
        served.engine.die()
        for path in ("/health", "/health/live", "/health/ready"):
            assert served.client.get(path).status_code == 503
        assert served.client.get("/health").json()["status"] == "failed"
        assert served.client.get("/health/ready").json()["reason"] == (
            "the engine's thread has died")


# Metrics and the log


COUNTED = {  # a counter of the metrics, and the field of the log that it sums
    "vllm:prompt_tokens_total": lambda line: line["prompt_tokens"],
    "vllm:generation_tokens_total": lambda line: line["generated_tokens"],
    "vllm:prefix_cache_queries_total": lambda line: line["prompt_tokens"],
    "vllm:prefix_cache_hits_total": lambda line: line["cached_tokens"] + line["repos_tokens"],
    "kvfunc:dropped_tokens_total": lambda line: line["drop_skipped_tokens"],
    "kvfunc:dropped_generation_tokens_total": lambda line: line["generated_dropped_tokens"],
    "kvfunc:repositioned_tokens_total": lambda line: line["repos_tokens"],
    "vllm:num_preemptions_total": lambda line: line["preempted"],
}


def scraped(client, model="fake"):
    """Every sample of /metrics by name and labels."""
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == model
            samples[sample.name, *labels.values()] = sample.value
    return samples


def recomputed(lines):
    """The same from the log, but for buckets and for what only the engine knows."""
    made = {(name,): sum(map(field, lines)) for name, field in COUNTED.items()}
    well = [line for line in lines if line["error"] is None and line["finish_reasons"]]
    reasons = collections.Counter(
        reason for line in well for reason in line["finish_reasons"])
    failures = collections.Counter(line["error"] for line in lines if line["error"])
    made |= {("vllm:request_success_total", reason): n for reason, n in reasons.items()}
    made |= {("kvfunc:requests_failed_total", code): n for code, n in failures.items()}
    times = {
        "vllm:e2e_request_latency_seconds": [line["e2e_s"] for line in well],
        "vllm:request_queue_time_seconds": [line["queue_s"] for line in lines],
        "vllm:time_to_first_token_seconds": [line["ttft_s"] for line in lines]}
    for name, values in times.items():
        values = [value for value in values if value is not None]
        made |= {(f"{name}_count",): len(values), (f"{name}_sum",): sum(values)}
    between = [line["inter_token"] for line in lines]
    name = "vllm:inter_token_latency_seconds"
    return made | {(f"{name}_count",): sum(one["count"] for one in between),
                   (f"{name}_sum",): sum(one["sum_s"] for one in between)}


def assert_agree(samples, lines, tolerance=1e-9):
    expected = recomputed(lines)
    for name, value in expected.items():
        exactly = not name[0].endswith("seconds_sum")
        value = value if exactly else pytest.approx(value, rel=tolerance)
        assert samples.get(name, 0) == value, name
    labelled = {name for name, value in samples.items() if value and name[0] in (
        "vllm:request_success_total", "kvfunc:requests_failed_total")}
    assert labelled <= expected.keys()


def test_the_metrics_are_what_the_request_log_says(log):
    with server(api_keys=[KEY]) as served:
        engine, client = served.engine, served.client
        assert error(served.ask(), 401)
        client.headers["Authorization"] = f"Bearer {KEY}"
        asked = ["without a key"]

        def ask(*wants, **fields):
            asked.append(fields)
            response = served.ask(**fields)
            assert response.status_code in wants, response.text

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            good = [pool.submit(ask, 200, content="x" * i, n=1 + i % 3, stream=i % 4 == 0,
                                max_tokens=2 + i % 5) for i in range(24)]
            assert [one.result() for one in good] == [None] * 24
        edited = {"messages": HI * 4, "cache": {"drop": {"1": [0]}, "reposition": [2]}}
        ask(200, **edited)
        ask(200, **edited, n=2, stop="l")
        ask(200, cache={"explain": True})
        ask(400, temperature=9)
        ask(404, model="gpt-4o")
        ask(400, content="x" * 2000)
        assert client.get("/v1/models").status_code == 200
        assert client.get("/v1/nothing").status_code == 404
        assert served.post("/v1/completions", prompt=["a", "bb"], n=2).status_code == 200
        asked += ["models", "nothing", "prompts"]
        engine.say("ab", RuntimeError("boom"))
        ask(500)
        ask(200, stream=True)
        engine.seats, engine.most_open = 0, 1
        thread, _ = in_background(lambda: ask(504, timeout=0.5))
        eventually(lambda: engine.open == 1)
        ask(503)
        thread.join()
        for stream in (False, True):
            leave(served, messages=HI, stream=stream)
            asked.append("left")
            eventually(lambda: engine.open == 0)
        engine.seats, engine.most_open = 8, 1000
        for fields in (dict(timeout=0.2), dict(timeout=0.2, stream=True, n=2)):
            engine.say("abc", engine.WAIT, "d" * 900)
            ask(200, 504, **fields)
            eventually(lambda: engine.open == 0)
            engine.gate.set()
            engine.gate.clear()
        for stream in (False, True):
            engine.say("abc", engine.WAIT, "d" * 900)
            leave(served, messages=HI, stream=stream)
            eventually(lambda: engine.open == 0)
            engine.gate.set()
            engine.gate.clear()
            asked.append("left")
        lines = log(len(asked))
        assert len(lines) == len(asked)
        assert_agree(scraped(client), lines)
    codes = collections.Counter(line["error"] for line in lines if line["error"])
    assert codes == dict(invalid_api_key=1, invalid_value=1, model_not_found=1, not_found=1,
                         context_length_exceeded=1, internal_error=2, timeout=3, queue_full=1,
                         client_closed_request=4)
    assert {reason for line in lines for reason in line["finish_reasons"]} == {
        "stop", "length", None}
    for name, field in COUNTED.items():
        assert sum(map(field, lines)) > 0 or name in (
            "vllm:num_preemptions_total", "kvfunc:dropped_generation_tokens_total")


def leave(served, **body):
    """Ask, and hang up 0.3 s later."""
    with httpx.Client(base_url=served.url, headers=served.client.headers, trust_env=False,
                      timeout=0.3) as client, pytest.raises(
            httpx.ReadTimeout), client.stream("POST", "/v1/chat/completions", json=body) as got:
        got.read()


def test_a_line_of_the_log_tells_all_but_the_text(served, log, caplog):
    served.engine.say("secret answer<|im_end|>")
    served.ask("secret prompt", n=2, stream=True)
    (line,) = log(1)
    assert "secret" not in caplog.text
    assert line.pop("id") and line.pop("time").endswith("+00:00")
    assert 0 <= line.pop("queue_s") <= line.pop("ttft_s") <= line.pop("e2e_s")
    gaps = line.pop("inter_token")
    assert gaps["count"] == 2 * (len("secret answer") + 1 - 1) and gaps["sum_s"] > 0
    assert line == {
        "endpoint": "/v1/chat/completions", "model": "fake", "stream": True, "status": 200,
        "error": None, "finish_reasons": ["stop", "stop"], "prompt_tokens": 35,
        "cached_tokens": 34, "repos_tokens": 0, "drop_skipped_tokens": 0, "approximate_tokens": 0,
        "computed_tokens": 1, "generated_tokens": 28, "generated_dropped_tokens": 0,
        "preempted": 0}


def test_thinking_dropped_while_generating_is_counted(served, log):
    name = "kvfunc:dropped_generation_tokens_total",
    before = scraped(served.client)[name]
    served.engine.say("<think>ab</think>x<|im_end|>")
    served.ask("?", cache={"drop_thinking": True})
    (line,) = log(1)
    assert line["generated_dropped_tokens"] == len("<think>ab</think>")
    assert scraped(served.client)[name] - before == len("<think>ab</think>")


def test_a_refusal_at_the_door_is_logged_with_its_code(served, log):
    served.ask(temperature=9)
    (line,) = log(1)
    assert (line["status"], line["error"], line["finish_reasons"]) == (400, "invalid_value", [])
    assert (line["queue_s"], line["ttft_s"], line["prompt_tokens"]) == (None, None, 0)


def test_who_leaves_before_the_turn_and_in_a_stream_is_logged(served, log):
    served.engine.seats = 0
    leave(served, messages=HI)
    served.engine.seats = 8
    served.engine.say("abc", served.engine.WAIT, "d" * 900)
    with served.client.stream("POST", "/v1/chat/completions",
                              json={"messages": HI, "stream": True}) as response:
        lines = (line for line in response.iter_lines() if line)
        assert '"c"' in list(itertools.islice(lines, 4))[-1]
    eventually(lambda: served.engine.open == 0)
    served.engine.gate.set()
    plain, streamed = log(2)
    assert (plain["status"], plain["error"], plain["queue_s"]) == (
        499, "client_closed_request", None)
    assert (streamed["status"], streamed["error"]) == (200, "client_closed_request")
    assert streamed["generated_tokens"] == 3 and streamed["finish_reasons"] == [None]


def test_scrapes_and_checks_of_health_are_not_logged(served, log):
    for path in ("/metrics", "/health", "/health/ready"):
        served.client.get(path)
    served.ask()
    assert [line["endpoint"] for line in log(1)] == ["/v1/chat/completions"]


def test_gauges_and_the_engines_counters_are_read_at_the_scrape(served):
    samples = scraped(served.client)
    assert samples["vllm:kv_cache_usage_perc",] == 1 / 8  # of 3 free, 1 held and 4 evictable pages
    served.engine.seats = 2
    served.engine.say("a", served.engine.WAIT, "b<|im_end|>")
    thread, _ = in_background(lambda: served.ask(n=5))
    assert served.engine.reached.wait(10)
    samples = scraped(served.client)
    assert samples["vllm:num_requests_running",] == 2
    assert samples["vllm:num_requests_waiting",] == 3
    served.engine.gate.set()
    thread.join()
    for name in ("preemptions", "steps", "recovered_tokens", "evicted_tokens", "compilations",
                 "host_seconds", "device_seconds"):
        assert any(key[0].endswith(f":num_{name}_total") or key[0] == f"kvfunc:{name}_total"
                   for key in samples), name


def test_two_applications_in_one_process_count_apart():
    with server() as one, server() as other:
        one.ask()
        assert scraped(one.client)["vllm:generation_tokens_total",] == 6
        assert scraped(other.client)["vllm:generation_tokens_total",] == 0
        assert read_events(one.ask(stream=True))[-1] == "[DONE]"
