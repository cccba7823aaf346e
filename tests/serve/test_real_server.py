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
def model():
    return load(None, jnp.float32)


@pytest.fixture(scope="module")
def engine(model):
    """The embedded model in float32."""
    return Engine(model, kv_tokens=16384, chunk=256)


@pytest.fixture(scope="module")
def url(engine, model):
    """A server of it."""
    app = create_app(engine, model.chat)
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


TALK = [{"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "Remember: the password is swordfish."},
        {"role": "assistant", "content": "I will."},
        {"role": "user", "content": "My dog is called Otto, and the cat is Mia."},
        {"role": "assistant", "content": "Good names."},
        {"role": "user", "content": "Name a fish that swims up rivers."}]


def test_whoever_changes_their_mind_gets_the_cold_answer_and_what_is_still_true(client):
    """Each schedule finds all that stands before its first difference from one before it."""
    salt = str(uuid.uuid4())
    plan = ask_plan(client, TALK)
    end = [span["range"][1] for span in plan["messages"] if span["owner"] == "message"]
    prompt = plan["prompt_tokens"]
    part = {"message": 3, "text": ", and the cat is Mia"}
    said = {}
    for drops, first_new in [
            ({}, 0),
            ({"2": [1]}, end[2]),
            ({"2": [1], "4": [1]}, prompt - 1),  # dropped already
            ({"2": [1], "4": [1, part]}, end[4]),
            ({"4": [1, part]}, end[4]),
            ({"2": [1], "4": [3]}, end[4]),
            ({"3": [1]}, end[3]),
            ({"2": [1]}, prompt - 1),
            ({}, prompt - 1)]:
        asked = {"drop": drops} if drops else {}
        answer = ask(client, TALK, **asked, salt=salt)
        cold = ask(client, TALK, **asked, salt=str(uuid.uuid4()))
        assert answer.choices[0].message == cold.choices[0].message
        assert computed(answer) == prompt - first_new
        said[str(drops)] = answer.choices[0].message.content
    assert len(set(said.values())) > 1
    moved = {"drop": {"2": [1]}, "reposition": [4]}
    answer = ask(client, TALK, **moved, salt=salt)
    cold = ask(client, TALK, **moved, salt=str(uuid.uuid4()))
    assert answer.choices[0].message == cold.choices[0].message
    assert computed(answer) == prompt - end[4]
    assert counters(answer)[2] > 0
    assert computed(ask(client, TALK, **moved, salt=salt)) == 1


def ask_plan(client, messages, **cache):
    """What `explain` tells."""
    return client.post("/chat/completions", cast_to=dict, body={
        "messages": messages, "cache": {**cache, "explain": True}})


def computed(answer):
    prompt, *found = counters(answer)
    return prompt - sum(found)


def test_a_plan_is_what_then_happens(client):
    salt = str(uuid.uuid4())
    ask(client, TALK, salt=salt)
    for cache in ({"drop": {"4": [3, {"message": 1, "text": "the password"}]}, "reposition": [4]},
                  {"drop_thinking": True, "reposition": [2]}):
        plan = ask_plan(client, TALK, **cache, salt=salt)
        tokens = dict.fromkeys(("computed", "cached", "repos", "drop_skipped"), 0)
        for run in plan["runs"]:
            tokens[run["class"]] += run["range"][1] - run["range"][0]
        answer = ask(client, TALK, **cache, salt=salt)
        assert (computed(answer), *counters(answer)[1:]) == tuple(tokens.values())


def test_both_spellings_say_the_same(client):
    salt = str(uuid.uuid4())
    text = {"message": 3, "text": " Otto"}
    one = ask(client, TALK, drop={"5": [text]}, salt=salt)
    selectors = [{"role": m["role"], "content": " Otto" if "Otto" in m["content"] else None}
                 for m in TALK]
    other = client.chat.completions.create(
        model="SmolLM2-135M-Instruct", messages=TALK, max_tokens=8, temperature=0, extra_body={
            "drop_rule": {"type": "text_drop", "drop_messages": selectors},
            "cache": {"salt": salt}})
    assert one.choices[0].message == other.choices[0].message
    assert computed(other) == 1 and counters(other)[3] > 0


@pytest.mark.parametrize("tags, said, in_header, in_answer", [
    ((" capital", " Paris"), "The capital of France is Paris", 0, 5),
    (("assistant\n", " is"), "The capital of France is", 3, 5),  # the header opens the span
])
def test_the_turn_after_dropped_thinking_computes_what_is_new(
        client, model, monkeypatch, tags, said, in_header, in_answer):
    """The tags are words that SmolLM2 says."""
    monkeypatch.setattr(model.chat, "thinking", tags)
    messages = [{"role": "user", "content": "What is the capital of France? And of Italy?"}]
    cache = {"drop_thinking": True, "salt": str(uuid.uuid4())}
    asked = dict(model="SmolLM2-135M-Instruct", temperature=0, max_tokens=12)
    first = client.chat.completions.create(**asked, messages=messages, extra_body={"cache": cache})
    text = first.choices[0].message.content
    assert text.startswith(said)
    assert first.usage.completion_tokens_details.dropped_tokens == in_answer
    dropped = in_header + in_answer

    messages += [{"role": "assistant", "content": text},
                 {"role": "user", "content": "And of Spain?"}]
    second = client.chat.completions.create(**asked, messages=messages, extra_body={"cache": cache})
    prompt, cached, repos, skipped = counters(second)
    known = first.usage.prompt_tokens + first.usage.completion_tokens - 1  # the last has no KV yet
    assert (cached, repos, skipped) == (known - dropped, 0, dropped)
    cold = client.chat.completions.create(**asked, messages=messages, extra_body={
        "cache": {**cache, "salt": str(uuid.uuid4())}})
    assert counters(cold) == (prompt, 0, 0, dropped)  # only the thinking itself ever saw it
    assert second.choices[0].message == cold.choices[0].message
    again = client.chat.completions.create(**asked, messages=messages, extra_body={"cache": cache})
    assert computed(again) == 1

    # Whoever wants the thinking back finds what was computed before it went.
    kept = client.chat.completions.create(**asked, messages=messages, extra_body={
        "cache": {"salt": cache["salt"]}})
    closed = first.usage.prompt_tokens + len(model.tokenizer.encode(said))
    assert computed(kept) == prompt - closed


def test_each_of_several_answers_drops_its_own_thinking(client, model, monkeypatch):
    monkeypatch.setattr(model.chat, "thinking", ("a", "e"))
    asked = dict(model="SmolLM2-135M-Instruct", temperature=0.7, max_tokens=16, messages=[
        {"role": "user", "content": "What is the capital of France? And of Italy?"}],
        extra_body={"cache": {"drop_thinking": True}})
    both = client.chat.completions.create(**asked, n=3, seed=1)
    alone = [client.chat.completions.create(**asked, seed=seed) for seed in (1, 2, 3)]
    assert [choice.message for choice in both.choices] == [
        one.choices[0].message for one in alone]
    dropped = [one.usage.completion_tokens_details.dropped_tokens for one in alone]
    assert both.usage.completion_tokens_details.dropped_tokens == sum(dropped) > 0


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
    # A step is noted when it has ended, which is after its sequences have gone.
    eventually(lambda: any(given_up for given_up, _ in steps))
    eventually(lambda: not engine._open and not engine.scheduler.running)
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
