"""The embedded model behind real HTTP: what the README promises to an agent builder."""

import concurrent.futures
import contextlib
import json
import logging
import pathlib
import socket
import threading
import uuid

import httpx
import jax.numpy as jnp
import openai
import pytest

from kvfunc.models.load import load
from kvfunc.serve import cli, replay
from kvfunc.serve.app import create_app
from kvfunc.serve.client import Client, Refused
from kvfunc.serve.engine import Engine
from kvfunc.serve.requestlog import LOGGER

from .test_engine import assert_nothing_leaks
from .test_operations import assert_agree, eventually, scraped

# The first rounds of five agent runs without their system message, from tau-bench (MIT).
FIVE_RUNS = pathlib.Path(__file__).parents[1] / "data" / "five_runs.jsonl"
LONG_RUN = "airline-2-1"  # 62 messages, longer than the model's context of 8,192 tokens


@pytest.fixture(scope="module")
def engine():
    """The embedded model in float32."""
    return Engine(load(None, jnp.float32), kv_tokens=16384, chunk=256)


@pytest.fixture(scope="module")
def url(engine):
    """A server of it."""
    app = create_app(engine, load(None, jnp.float32).chat)
    ready = threading.Event()
    found = []

    def on_ready(line):
        found.append(line.rpartition(" ")[2])
        ready.set()

    # A daemon: uvicorn ends with the process.
    threading.Thread(target=cli.run, args=(app, cli._bind("127.0.0.1", 0), on_ready),
                     daemon=True).start()
    assert ready.wait(30)
    return found[0]


@pytest.fixture(scope="module")
def client(url):
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0,
                       http_client=http) as made:
        yield made


@pytest.fixture(scope="module")
def long_run(agent_runs):
    return replay.select_runs(replay.read_runs(agent_runs), [LONG_RUN])[0]


def ask(client, messages, **cache):
    return client.chat.completions.create(
        model="SmolLM2-135M-Instruct", messages=messages,
        max_tokens=8, temperature=0, extra_body={"cache": cache})


def counters(answer):
    details = answer.usage.prompt_tokens_details
    return (answer.usage.prompt_tokens, details.cached_tokens, details.repos_tokens,
            details.drop_skipped_tokens)


def test_the_model_says_what_it_says_elsewhere(client):
    answer = client.completions.create(model="SmolLM2-135M-Instruct", temperature=0, max_tokens=24,
                                       prompt="The capital of France is")
    assert answer.choices[0].text == " Paris.\n\nThe answer is: 2018-01-22 12:1"


def test_an_edited_conversation_answers_warm_as_it_does_cold(client):
    messages = [{"role": "system", "content": "Answer briefly."},
                {"role": "user", "content": "Remember: the password is swordfish."},
                {"role": "assistant", "content": "I will."},
                {"role": "user", "content": "Name a fish that swims up rivers."}]
    edits = {"drop": {"2": [1]}, "reposition": [2]}
    ordinary = ask(client, messages)
    edited = ask(client, messages, **edits)
    again = ask(client, messages, **edits)
    cold = ask(client, messages, **edits, salt="nobody else's")
    assert edited.choices[0].message == again.choices[0].message == cold.choices[0].message

    prompt, cached, repos, skipped = counters(edited)
    assert prompt == counters(ordinary)[0]
    assert cached > 0  # an ordinary request and an edited one share what stands before the events
    assert counters(cold) == (prompt, 0, 0, 0)
    prompt, cached, repos, skipped = counters(again)
    assert prompt - cached - repos - skipped == 1  # a full hit leaves one token to compute
    assert repos > 0 and skipped > 0


def test_a_stream_says_what_the_plain_answer_says(client):
    asked = dict(model="SmolLM2-135M-Instruct", max_tokens=12, temperature=0, messages=[
        {"role": "user", "content": "Write two emoji, then the word naïve."}])
    plain = client.chat.completions.create(**asked).choices[0].message.content
    with client.chat.completions.create(**asked, stream=True) as stream:
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert streamed == plain


def test_choices_of_one_request_are_those_of_requests_with_their_seeds(client):
    asked = dict(model="SmolLM2-135M-Instruct", max_tokens=8, temperature=0.8, messages=[
        {"role": "user", "content": "Name a colour."}])
    both = client.chat.completions.create(**asked, n=2, seed=3)
    alone = [client.chat.completions.create(**asked, seed=seed) for seed in (3, 4)]
    said = [choice.message.content for choice in both.choices]
    assert said == [one.choices[0].message.content for one in alone] and said[0] != said[1]
    assert both.usage.completion_tokens == sum(one.usage.completion_tokens for one in alone)
    assert both.usage.prompt_tokens == alone[0].usage.prompt_tokens


def test_a_run_longer_than_the_context_goes_through_with_drop_and_repos(url, long_run):
    policy = replay.Policy("rolling_tool_outputs", keep=4, reposition_above_tokens=4096)
    with Client(url) as client:
        card = client.card()
        done = replay.replay_run(client, long_run, policy, max_tokens=1,
                                 kv_bytes_per_token=card.kv_bytes_per_token)
        assert done.refusal is None
        assert len(done.rounds) == len(long_run.rounds) == 30
        last = done.rounds[-1]
        assert last.prompt_tokens > card.max_model_len == 8192
        assert max(round.live_tokens for round in done.rounds) < 8192
        # Rounds reuse what stands: all of them together compute the history about once.
        assert sum(round.computed_tokens for round in done.rounds) < 1.1 * last.prompt_tokens


def test_the_same_run_is_refused_clearly_without_them(url, long_run):
    with Client(url) as client, pytest.raises(Refused) as refused:
        client.complete(long_run.messages[:-1], {}, max_tokens=1)
    assert refused.value.code == "context_length_exceeded"
    assert "drop messages and reposition" in str(refused.value)


def test_a_client_that_leaves_makes_room_for_the_next(client):
    asked = dict(model="SmolLM2-135M-Instruct", temperature=0, messages=[
        {"role": "user", "content": "Count to one thousand."}])
    with contextlib.closing(client.chat.completions.create(**asked, stream=True)) as stream:
        next(iter(stream))
    assert client.chat.completions.create(**asked, max_tokens=1).usage.completion_tokens == 1


@pytest.fixture
def steps(engine, monkeypatch):
    """After every step: (sequences that were given up before it, and those that are there)."""
    seen, step = [], engine.step

    def sequences():
        return [*engine.scheduler.running, *engine.scheduler.waiting]

    def watched():
        given_up = {s for s in sequences() if s.cancelled}
        more = step()
        assert_nothing_leaks(engine)
        seen.append((given_up, {*sequences()}))
        return more

    monkeypatch.setattr(engine, "step", watched)
    return seen


def leave(url, until, **body):
    """Ask, and hang up when something holds."""
    content = json.dumps(body).encode()
    with socket.create_connection(url.removeprefix("http://").split(":")) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\n"
                           b"Content-Length: %d\r\n\r\n" % len(content) + content)
        eventually(until, 300)  # steps may have to be compiled


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_gives_the_pages_back_in_one_step_and_leaves_the_kv(
        client, url, engine, steps, stream):
    salt = str(uuid.uuid4())
    messages = [{"role": "user", "content": f"Count to one thousand. {'Go on. ' * 40}"}]
    asked = dict(messages=messages, temperature=0, ignore_eos=True, cache={"salt": salt})
    leave(url, lambda: any(s.generated > 3 for s in engine.scheduler.running), **asked,
          stream=stream)
    eventually(lambda: not engine._open and not engine.scheduler.running)
    assert any(given_up for given_up, _ in steps)
    assert not any(given_up & there for given_up, there in steps)
    pages = engine.scheduler.pages
    assert pages.held == 0 and pages.free + pages.evictable == pages.count
    usage = ask(client, messages, salt=salt).usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_a_fault_of_the_device_is_a_500_and_the_next_request_is_answered(
        url, client, engine, monkeypatch):
    body = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 4,
            "temperature": 0}
    said = client.chat.completions.create(model="SmolLM2-135M-Instruct", **body).choices[0].message
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_call_step", lambda *arguments: 1 / 0)
        for stream in (False, True):
            response = httpx.post(f"{url}/v1/chat/completions", json=body | {"stream": stream},
                                  trust_env=False, timeout=60)
            assert response.status_code == 500
            assert response.json()["error"]["code"] == "internal_error"
    assert httpx.get(f"{url}/health/ready", trust_env=False).status_code == 200
    assert client.chat.completions.create(
        model="SmolLM2-135M-Instruct", **body).choices[0].message == said


def test_metrics_and_log_agree_while_clients_leave_and_time_out(url, engine, steps, caplog):
    caplog.set_level(logging.INFO, LOGGER)
    http = httpx.Client(base_url=url, trust_env=False, timeout=60)

    def body(i, **fields):
        return {"messages": [{"role": "user", "content": f"Tell me about the number {i % 5}."}],
                "max_tokens": 4 + i % 9} | fields

    def one(i):
        if i % 6 == 0:
            before = len(steps)
            leave(url, lambda: len(steps) > before + i % 5,
                  **body(i, stream=i % 4 == 0, max_tokens=400, ignore_eos=True))
        elif i % 6 == 1:
            http.post("/v1/chat/completions", json=body(
                i, timeout=0.3, max_tokens=400, ignore_eos=True))
        else:
            http.post("/v1/chat/completions", json=body(
                i, n=1 + i % 3, stream=i % 2 == 0, temperature=i % 8))  # of which 3 and up are bad

    with http:
        eventually(lambda: not engine._open)
        before = scraped(http, engine.name)
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            list(pool.map(one, range(36)))

        def lines():
            return [json.loads(r.message) for r in caplog.records if r.name == LOGGER]

        eventually(lambda: len(lines()) >= 36)
        after = scraped(http, engine.name)
    assert {line["error"] for line in lines()} == {
        None, "invalid_value", "timeout", "client_closed_request"}
    difference = {name: after[name] - before.get(name, 0) for name in after}
    assert_agree(difference, lines(), 1e-6)
    assert not any(given_up & there for given_up, there in steps)
    assert not engine._open and engine.scheduler.pages.held == 0


@contextlib.contextmanager
def little_memory(engine, slots):
    """Leave so many slots to the requests, with nothing resident."""
    engine.clear()
    with engine._lock:
        pages = engine.scheduler.pages
        taken = pages.take(pages.free - slots // pages.size)
    try:
        yield
    finally:
        engine.clear()
        with engine._lock:
            pages.release(taken)


def test_five_agents_in_the_memory_of_one_get_their_cold_answers(engine, url):
    runs = replay.read_runs(FIVE_RUNS)
    policy = {"policy": {"type": "rolling_tool_outputs", "keep": 1, "reposition_above_tokens": 500}}

    def answers(run, fresh):
        """Of every round; what is cached is the run's own, or nothing."""
        salt, said = str(uuid.uuid4()), []
        with Client(url) as client:
            for message in run.rounds:
                cache = {**policy, "salt": str(uuid.uuid4()) if fresh else salt}
                said.append("".join(piece for piece in client.stream(
                    run.messages[:message], cache, temperature=0, max_tokens=6, ignore_eos=True)
                    if isinstance(piece, str)))
        return said

    cold = [answers(run, fresh=True) for run in runs]
    with Client(url) as client:
        plans = [client.plan(run.messages[:run.rounds[-1]], policy) for run in runs]
    assert all(plan["live_tokens"] < plan["prompt_tokens"] for plan in plans)
    slots = max(plan["prompt_tokens"] for plan in plans) + 16
    before = engine.stats()
    with little_memory(engine, slots), concurrent.futures.ThreadPoolExecutor(5) as pool:
        together = list(pool.map(lambda run: answers(run, fresh=False), runs))
    after = engine.stats()
    assert together == cold
    assert all(len(set(said)) > 1 for said in cold)
    for counter in ("found", "evicted", "recovered"):
        assert after[counter] > before[counter]
