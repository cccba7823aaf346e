"""Agents over a server of their own that answers in OpenAI's event stream as a test tells it."""

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import threading
from decimal import Decimal

import httpx
import pytest
import uvicorn
from rich.console import Console
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from kvfunc.serve import agents, agents_report
from kvfunc.serve.agents import AgentClient, Mode, Part, Record, Role, Settings, Task
from kvfunc.serve.client import Refused, ServerBroke, Usage
from kvfunc.serve.topologies import build

ROOT = pathlib.Path(__file__).parents[2]
DATA = ROOT.parent / "shared" / "data"

ROLES = [Role("Solver", "You solve.", "Others were here."), Role("Critic", "You criticise.")]
TASKS = [Task("one", "gsm8k", "What is 1 + 1?", "2"), Task("two", "gsm8k", "What is 4 + 3?", "7")]
SETTINGS = Settings("stub", max_tokens=9)


class Server:
    """Answers with `say(body)`; its usage and the rest of its last chunk can be set.

    Attributes:
      bodies: the requests so far.
      details: `prompt_tokens_details`.
      extra: what the chunk with the usage has besides.
      ending: replaces all behind the text, if it is set.
      refusal: (status, code), answered from the request of that number on.
      together: how many requests wait for each other before any is answered.
      most: the most requests that were there at once.
    """

    def __init__(self):
        self.bodies, self.here, self.most = [], 0, 0
        self.say = lambda body: "so"
        self.prompt_tokens = 100
        self.details, self.extra, self.ending, self.refusal = None, {}, None, None
        self.together = threading.Barrier(1)
        self.app = Starlette(routes=[
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ])

    def models(self, request):
        return JSONResponse({"data": [{"id": "stub"}, {"id": "other"}]})

    async def chat(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.here += 1
        self.most = max(self.most, self.here)
        try:
            await asyncio.to_thread(self.together.wait, 10)
        finally:
            self.here -= 1
        if self.refusal and len(self.bodies) >= self.refusal[0]:
            error = {"message": "too long", "code": self.refusal[2]}
            return JSONResponse({"error": error}, self.refusal[1])
        return StreamingResponse(self.events(body), media_type="text/event-stream")

    async def events(self, body):
        def event(value):
            # As servers do that escape nothing: a text may then hold other line separators.
            return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"

        yield ": hello\n\n"
        yield event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for piece in self.say(body).split("|"):
            yield event({"choices": [{"delta": {"content": piece}, "finish_reason": None}]})
        if self.ending is not None:
            yield self.ending
            return
        yield event({"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": None})
        usage = {"prompt_tokens": self.prompt_tokens, "completion_tokens": 3}
        if self.details is not None:
            usage["prompt_tokens_details"] = self.details
        yield event({"choices": [], "usage": usage, **self.extra})
        yield "data: [DONE]\n\n"


@contextlib.contextmanager
def serving(app):
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def running():
    server = Server()
    with serving(server.app) as url, AgentClient(url) as client:
        yield server, client


@pytest.fixture
def server(running):
    there = running[0]
    app = there.app
    there.__init__()
    there.app = app
    return there


@pytest.fixture
def client(running, server):
    return running[1]


def content(body):
    """(share, text) of the user message's parts."""
    return [(part.get("cache", {}).get("share"), part["text"])
            for part in body["messages"][1]["content"]]


def run(client, name="chain", count=2, tasks=TASKS, settings=SETTINGS, **options):
    return agents.run(client, build(name, count), ROLES, tasks, settings, **options)


def said_by_role(body):
    return body["messages"][0]["content"].split()[1]


def test_an_answer_is_its_pieces_with_its_counters(server, client):
    server.say = lambda body: "a| b\u2028c"
    server.details = {"cached_tokens": 40, "approximate_tokens": 30, "repos_tokens": 2,
                      "drop_skipped_tokens": 1}
    server.extra = {"cache": {"predicted_error": 0.25}}
    answer = client.answer({"messages": []})
    assert answer.text == "a b\u2028c"
    assert answer.finish_reason == "stop"
    assert answer.usage == Usage(prompt=100, generated=3, cached=40, repos=2, drop_skipped=1,
                                 approximate=30)
    assert answer.predicted_error == 0.25
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


def test_time_to_first_token_ends_with_the_first_text(monkeypatch):
    chunks = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]},
              {"choices": [{"delta": {"content": "first"}}]},
              {"choices": [{"delta": {"content": "second"}, "finish_reason": "length"}]},
              {"choices": [{"delta": {}, "finish_reason": None}],
               "usage": {"prompt_tokens": 1, "completion_tokens": 2}},
              {"choices": [], "usage": None}]
    sent = []

    def events():
        for chunk in chunks:
            sent.append(chunk)
            yield b"data: " + json.dumps(chunk).encode() + b"\n\n"

    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=events()))
    monkeypatch.setattr(agents.time, "perf_counter", lambda: float(len(sent)))
    with AgentClient("http://here", transport) as client:
        answer = client.answer({})
    assert (answer.ttft_seconds, answer.seconds) == (2, 5)
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_stream_may_be_cut_anywhere(size):
    events = [{"choices": [{"delta": {"content": "a ü "}}]},
              {"choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}],
               "usage": {"prompt_tokens": 1, "completion_tokens": 2}}, "[DONE]"]
    text = "".join(
        f"data:{event if event == '[DONE]' else json.dumps(event, ensure_ascii=False)}\r\n\r\n"
        for event in events).encode()
    pieces = (text[at:at + size] for at in range(0, len(text), size))
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=pieces))
    with AgentClient("http://here", transport) as client:
        assert client.answer({}).text == "a ü b"


@pytest.mark.parametrize("details", [None, {}, {"cached_tokens": None}])
def test_counters_that_a_server_has_not_are_zero(server, client, details):
    server.details = details
    answer = client.answer({})
    assert answer.usage == Usage(100, 3, 0, 0, 0, 0)
    assert answer.predicted_error is None


def test_an_answer_without_text_has_its_first_token_at_its_end(server, client):
    server.say = lambda body: ""
    answer = client.answer({})
    assert (answer.text, answer.finish_reason) == ("", "stop")
    assert answer.ttft_seconds is not None


@pytest.mark.parametrize(
    ("ending", "complaint"),
    [
        ("", "broke off"),
        ('data: {"error": {"message": "lost the device"}}\n\n', "lost the device"),
        ('data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n',
         "no usage"),
    ],
)
def test_a_stream_without_its_end_or_usage_is_a_broken_server(server, client, ending, complaint):
    server.ending = ending
    with pytest.raises(ServerBroke, match=f"one, Solver: .*{complaint}"):
        run(client)


def test_a_refusal_names_task_and_agent_and_keeps_its_code(server, client):
    server.refusal = (2, 400, "context_length_exceeded")
    with pytest.raises(Refused, match="one, Critic: too long") as refused:
        run(client)
    assert refused.value.code == "context_length_exceeded"


def test_the_first_model_is_the_one_that_the_server_lists_first(client):
    assert client.first_model() == "stub"


def test_contents_are_named_parts_between_static_text(server, client):
    server.say = lambda body: " 1 + 1 |is 2. \n"
    run(client, "full", 3, TASKS[:1])
    assert [body["messages"][0] for body in server.bodies] == [
        {"role": "system", "content": text}
        for text in ("You solve.", "You criticise.", "You solve.")]
    closing = (None, agents.CLOSING["gsm8k"])
    task = [(None, "Task:\n"), ("task", "What is 1 + 1?")]
    assert content(server.bodies[0]) == [*task, closing]
    assert content(server.bodies[1]) == [
        *task, (None, "\n\nAnswer of Solver 1:\n"), ("answer:Solver 1", "1 + 1 is 2."), closing]
    assert content(server.bodies[2]) == [
        *task, (None, "\n\nOthers were here.\n\nAnswer of Solver 1:\n"),
        ("answer:Solver 1", "1 + 1 is 2."), (None, "\n\nAnswer of Critic:\n"),
        ("answer:Critic", "1 + 1 is 2."), closing]


def test_names_and_static_text_are_the_same_for_every_task(server, client):
    server.say = lambda body: f"{len(server.bodies)}"
    run(client, "debate", 3)
    first, second = server.bodies[:6], server.bodies[6:]
    for before, after in zip(first, second, strict=True):
        assert content(before) != content(after)
        assert [part for part in content(before) if part[0] is None] == [
            part for part in content(after) if part[0] is None]
        assert [name for name, _ in content(before)] == [name for name, _ in content(after)]


def test_a_debater_reads_the_answers_of_the_round_before(server, client):
    answers = iter("abcd")
    server.say = lambda body: next(answers)
    run(client, "debate", 2, TASKS[:1])
    read = [[text for name, text in content(body) if (name or "").startswith("answer:")]
            for body in server.bodies]
    assert read == [[], [], ["a", "b"], ["a", "b"]]


def test_an_empty_answer_is_still_a_content(server, client):
    server.say = lambda body: " "
    run(client, tasks=TASKS[:1])
    assert ("answer:Solver", "(none)") in content(server.bodies[1])


def test_plain_is_the_same_text_without_any_cache_field(server, client):
    run(client)
    run(client, settings=dataclasses.replace(SETTINGS, mode=Mode.plain))
    shared, plain = server.bodies[:4], server.bodies[4:]
    for parts, text in zip(shared, plain, strict=True):
        assert text["messages"][1]["content"] == "".join(text for _, text in content(parts))
    assert '"cache"' in json.dumps(shared)
    assert '"cache"' not in json.dumps(plain)


def test_exact_differs_in_one_field(server, client):
    run(client)
    run(client, settings=dataclasses.replace(SETTINGS, mode=Mode.exact))
    for share, exact in zip(server.bodies[:4], server.bodies[4:], strict=True):
        assert "cache" not in share
        assert exact.pop("cache") == {"exact": True}
        assert exact == share


def test_requests_have_the_settings(server, client):
    run(client, settings=Settings("stub", max_tokens=9, seed=5, ignore_eos=True, salt="mine"))
    for body in server.bodies:
        assert body | {"messages": []} == {
            "model": "stub", "messages": [], "temperature": 0, "seed": 5, "max_tokens": 9,
            "ignore_eos": True, "cache": {"salt": "mine"}, "stream": True,
            "stream_options": {"include_usage": True}}
    run(client)
    assert "ignore_eos" not in server.bodies[-1]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_tokens": 0}, "max_tokens is 0: take at least 1"),
        ({"concurrency": 0}, "concurrency is 0: take at least 1"),
        ({"salt": "x", "mode": Mode.plain}, "salt is 'x': leave it out"),
    ],
)
def test_bad_settings_are_named(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        Settings("stub", **options)


def test_calls_that_need_not_wait_run_at_once_up_to_concurrency(server, client):
    server.together = threading.Barrier(3)
    server.say = lambda body: str(len(content(body)))
    concurrent = dataclasses.replace(SETTINGS, concurrency=3)
    records = run(client, "debate", 3, TASKS[:1], concurrent)
    assert server.most == 3
    assert [(record.call, record.answer.text) for record in records] == [
        (0, "3"), (1, "3"), (2, "3"), (3, "9"), (4, "9"), (5, "9")]


def test_one_call_runs_at_a_time_by_default(server, client):
    run(client, "star", 4)
    assert server.most == 1


def test_records_are_in_order_with_names_rounds_and_judgement(server, client):
    server.say = lambda body: "#### 2" if said_by_role(body) == "solve." else "#### 3"
    ticks = []
    records = run(client, "debate", 2, tick=lambda: ticks.append(1))
    assert [(r.task, r.call, r.agent, r.round, r.correct) for r in records] == [
        ("one", 0, "Solver", 0, True), ("one", 1, "Critic", 0, False),
        ("one", 2, "Solver", 1, True), ("one", 3, "Critic", 1, False),
        ("two", 0, "Solver", 0, False), ("two", 1, "Critic", 0, False),
        ("two", 2, "Solver", 1, False), ("two", 3, "Critic", 1, False)]
    assert len(ticks) == 8
    assert {record.parses for record in records} == {None}


def test_the_log_has_a_line_a_call_as_soon_as_it_is_done(server, client, tmp_path):
    log = tmp_path / "new" / "log.jsonl"
    lines = []
    records = run(client, log=log, tick=lambda: lines.append(len(log.read_text().splitlines())))
    assert lines == [2, 3, 4, 5]
    first, *others = map(json.loads, log.read_text().splitlines())
    assert first["run"]["topology"]["calls"][1] == {"agent": 1, "round": 0, "reads": [0]}
    assert [Record.from_json(line) for line in others] == records


def test_a_run_goes_on_behind_its_finished_tasks(server, client, tmp_path):
    log = tmp_path / "log.jsonl"
    server.refusal = (4, 503, "capacity_exceeded")
    with pytest.raises(Refused):
        run(client, log=log)
    log.write_text(log.read_text() + '{"task": "tw')  # killed while it wrote
    server.refusal, server.say = None, lambda body: "#### 7"
    ticks = []
    records = run(client, log=log, tick=lambda: ticks.append(1))
    assert [record.answer.text for record in records] == ["so", "so", "#### 7", "#### 7"]
    assert len(server.bodies) == 4 + 2
    assert len(ticks) == 4
    assert run(client, log=log) == records
    assert len(server.bodies) == 4 + 2


@pytest.mark.parametrize(
    ("name", "change"),
    [("max_tokens", {"max_tokens": 8}), ("mode", {"mode": Mode.exact}), ("model", {"model": "b"})],
)
def test_the_log_of_another_run_is_refused_and_left_alone(client, tmp_path, name, change):
    log = tmp_path / "log.jsonl"
    run(client, log=log)
    before = log.read_bytes()
    with pytest.raises(ValueError, match=f"of another run, whose {name} is .* Give another file"):
        run(client, log=log, settings=dataclasses.replace(SETTINGS, **change))
    with pytest.raises(ValueError, match="of another run, whose topology is"):
        run(client, "star", log=log, count=3)
    assert log.read_bytes() == before
    run(client, log=log, settings=dataclasses.replace(SETTINGS, concurrency=2))


@pytest.mark.parametrize("text", ["notes", "notes\n", "[]\n", '{"run": {}}\n{"task": 1}\n'])
def test_a_file_that_is_no_log_is_refused_and_left_alone(client, tmp_path, text):
    log = tmp_path / "notes.txt"
    log.write_text(text)
    with pytest.raises(ValueError, match=r"notes.txt: (no log|of another run)"):
        run(client, log=log)
    assert log.read_text() == text


def record(computed, *, prompt=100, approximate=0, below=50.0, ttft=1.0, call=0, task="t",
           correct=None, parses=None, error=None):
    usage = Usage(prompt, 5, prompt - computed - approximate, 0, 0, approximate)
    answer = agents.Answer("x", "stop", usage, error, ttft, 2 * ttft)
    return Record(task, call, "A", 0, answer, below, correct, parses)


def test_a_call_is_reused_if_it_computed_less_than_one_content_would_have_taken():
    # Of 200 characters and 100 tokens: 80 static behind the task, which has 60.
    role, task = Role("Solver", "s" * 54), Task("t", "gsm8k", "t" * 60, "1")
    closing = "c" * 80
    assert len("Task:\n") == 6
    parts = [Part("Task:\n"), Part(task.text, "task"), Part(closing)]
    assert agents.reused_below(role, parts, 100) == 40 + 15 + 8
    # An answer of 40 and a heading of 20 more, at the same tokens a character.
    more = [*parts[:2], Part("h" * 20), Part("a" * 40, "answer:A"), parts[2]]
    assert agents.reused_below(role, more, 130) == 50 + 10 + 2 * 8
    assert record(62, below=63).reused
    assert not record(63, below=63).reused


def test_a_runs_bound_is_of_its_own_prompt(server, client):
    server.prompt_tokens = 1000
    (first, second) = run(client, tasks=TASKS[:1])
    assert first.reused_below != second.reused_below
    parts = [Part(text, name) for name, text in content(server.bodies[1])]
    assert second.reused_below == agents.reused_below(ROLES[1], parts, 1000)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7\n#### 7", 7),
        ("#### 1,234,567.", 1234567),
        ("#### $-10", -10),
        ("5-10 cost $12.50 each.", Decimal("12.50")),
        ("first #### 3, no: #### 4 apples of 5", 4),
        ("of 3 apples 4", 4),
        ("it is 8 ####", 8),
        ("I have 10-3", 3),
        ("18.0", 18),
        ("none", None),
    ],
)
def test_the_answer_of_gsm8k_is_behind_its_mark_or_the_last_number(text, number):
    assert agents.gsm8k_number(text) == number


@pytest.mark.parametrize(
    ("text", "parses"),
    [
        ("Here:\n```python\ndef f(x):\n    return '\\d'\n```\nThat is it (is it not?).", True),
        ("```\ndef f():\n    pass\n```", True),
        ("```py\ndef f():\n    pass", True),
        ("def f(): pass", True),
        ("def g(): pass", False),
        ("Here is f: def f(): pass", False),
        ("```python\ndef f(:\n```\ndef f(): pass", False),
        ("def f():\n    '\0'", False),
        ("", False),
    ],
)
def test_code_parses_if_it_is_python_with_the_function(text, parses):
    assert agents.defines(text, "f") is parses


def test_code_is_not_run(tmp_path):
    path = tmp_path / "made"
    text = f"```python\nopen({str(path)!r}, 'w')\ndef f(): pass\n```"
    assert agents.defines(text, "f")
    assert not path.exists()


@pytest.mark.parametrize(("roles", "count", "names"), [
    (["A", "B"], 2, ["A", "B"]),
    (["A", "B"], 5, ["A 1", "B 1", "A 2", "B 2", "A 3"]),
    (["A", "B"], 3, ["A 1", "B", "A 2"]),
    (["A", "B", "C"], 2, ["A", "B"]),
])
def test_roles_go_round_and_are_numbered_where_they_come_again(roles, count, names):
    assert agents.agent_names([Role(name, "p") for name in roles], count) == names


def test_two_agents_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two of one name: rename a role"):
        agents.agent_names([Role("A", "p"), Role("A 1", "p")], 3)


def test_the_example_has_roles_for_each_kind_of_task():
    for kind in agents.CLOSING:
        roles = agents.read_roles(ROOT / "examples" / "roles.yaml", kind)
        assert len(roles) >= 3
        assert all(role.prompt and role.reads for role in roles)


def test_roles_may_be_one_list_and_need_no_reads(tmp_path):
    file = tmp_path / "roles.yaml"
    file.write_text("- name: A\n  prompt: |\n    Be brief.\n")
    assert agents.read_roles(file, "gsm8k") == [Role("A", "Be brief.")]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("- name: [", "no YAML"),
        ("", "None is no list of roles for gsm8k"),
        ("humaneval: []", "None is no list of roles for gsm8k"),
        ("gsm8k: []", "is no list of roles"),
        ("hello", "'hello' is no list of roles"),
        ("- name: A", "role 0: .* is no role. Give it a name, a prompt"),
        ("- hello", "role 0: 'hello' is no role"),
        ("- {name: A, prompt: 1}", "role 0: .* is no role"),
        ("- {name: A, prompt: b}\n- {name: ' ', prompt: b}", "role 1: .* is no role"),
        ("- {name: A, prompt: b, read: c}", "role 0: .* is no role"),
        ("- {name: A, prompt: b}\n- {name: A, prompt: c}", "role 1: the name 'A' is taken"),
    ],
)
def test_a_bad_file_of_roles_is_told_what_is_wrong(tmp_path, text, complaint):
    file = tmp_path / "roles.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"roles .*roles.yaml.*{complaint}"):
        agents.read_roles(file, "gsm8k")


def test_tasks_are_known_by_their_keys(tmp_path):
    file = tmp_path / "tasks.jsonl"
    lines = [{"question": "1?\u2028 ", "answer": "so\n#### 1,000"},
             {"prompt": "def f():\n", "entry_point": "f", "name": "HumanEval_1_f"}]
    file.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n")
    number, code = agents.read_tasks(file)
    assert (number.kind, number.text, number.reference) == ("gsm8k", "1?", "1000")
    assert (code.kind, code.text, code.reference) == ("humaneval", "def f():", "f")
    assert number.id.startswith("gsm8k-")
    assert agents.read_tasks(file, 1) == [number]


@pytest.mark.parametrize("line", ["", "[]", "{", '{"question": "a"}', '{"prompt": "a"}',
                                  '{"question": "a", "answer": "none"}', '{"question": 1}'])
def test_a_line_that_is_no_task_is_named(tmp_path, line):
    file = tmp_path / "tasks.jsonl"
    good = '{"question": "%s", "answer": "1"}\n'
    file.write_text(f"{good % 'a'}{line}\n{good % 'b'}")
    with pytest.raises(ValueError, match="line 2: not a task"):
        agents.read_tasks(file)


def test_a_task_that_comes_again_is_named(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"question": "q", "answer": "1"}\n' * 2)
    with pytest.raises(ValueError, match=r"line 2: gsm8k-\w+ was there before"):
        agents.read_tasks(file)


@pytest.mark.parametrize(("name", "kind"), [("gsm8k", "gsm8k"), ("humaneval", "humaneval")])
def test_all_of_the_data_sets_are_read(name, kind):
    file = DATA / f"{name}.jsonl"
    if not file.exists():
        pytest.skip(f"shared/data/{name}.jsonl is not beside the project")
    tasks = agents.read_tasks(file)
    assert len(tasks) > 100
    assert {task.kind for task in tasks} == {kind}
    if kind == "humaneval":
        assert all(agents.defines(task.text + "\n    pass", task.reference) for task in tasks)
    else:
        assert tasks[0].reference == "18"


def test_figures_are_sums_shares_and_percentiles():
    figures = agents_report.figures([
        record(20, approximate=40, below=50, ttft=1, correct=True, error=0.5),
        record(100, prompt=300, approximate=150, below=50, ttft=3, correct=False)])
    assert figures["prompt_tokens"] == 400
    assert figures["computed_tokens"] == 120
    assert figures["approximate_tokens"] == 190
    assert figures["cached_tokens"] == 90
    assert figures["token_level_reuse"] == 280 / 400
    assert figures["call_level_reuse"] == 0.5
    assert figures["ttft_p50_seconds"] == 2
    assert figures["ttft_p95_seconds"] == pytest.approx(2.9)
    assert figures["seconds"] == 8
    assert figures["predicted_error"] == 0.5
    assert figures["accuracy"] == 0.5
    assert figures["parses"] is None


def reported(kind="correct"):
    topology = build("debate", 2)
    records = [dataclasses.replace(
        record(100 - 30 * call.round, approximate=10 * call.round, call=place, task=task,
               **{kind: call.agent == 1}),
        agent="AB"[call.agent], round=call.round)
        for task in ("t", "u") for place, call in enumerate(topology.calls)]
    return topology, records, agents_report.summary(topology, SETTINGS, records)


def test_the_summary_has_every_agent_in_every_round_and_the_final_answers():
    _, _, summary = reported()
    assert [(row["agent"], row["round"], row["reads"], row["token_level_reuse"], row["accuracy"])
            for row in summary["calls"]] == [
        ("A", 0, 0, 0, 0), ("B", 0, 0, 0, 1), ("A", 1, 2, 0.3, 0), ("B", 1, 2, 0.3, 1)]
    assert summary["final"]["accuracy"] == 1
    assert summary["all"]["accuracy"] == 0.5
    assert (summary["tasks"], summary["all"]["calls"]) == (2, 8)
    assert summary["settings"]["max_tokens"] == 9


@pytest.mark.parametrize(("kind", "name"), [("correct", "right"), ("parses", "parses")])
def test_the_table_fits_a_terminal_and_names_what_is_judged(kind, name):
    topology, _, summary = reported(kind)
    console = Console(width=80)
    with console.capture() as capture:
        agents_report.show(topology, summary, console)
    lines = capture.get().splitlines()
    assert lines[0].rstrip() == "debate of 2 agents on stub, mode share, tasks: 2"
    assert lines[2].split()[-1] == name
    assert lines[-2].split() == [
        "all", "100", "10", "5", "85", "15%", "0%", "1,000", "1,000", "50%"]
    assert lines[3].startswith("A, round 1")
    assert "…" not in capture.get()


def test_figures_and_picture_are_saved(tmp_path):
    topology, records, summary = reported()
    agents_report.save(topology, summary, records, tmp_path / "out", Console(quiet=True))
    assert (tmp_path / "out" / "agents.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "out" / "agents.json").read_text()) == summary


def test_the_picture_shows_every_request_at_its_agent_and_task():
    topology, records, summary = reported()
    figure = agents_report.picture(topology, summary, records)
    titles = [axes.get_title("left") for axes in figure.axes[:4]]
    assert titles == ["Reuse by agent", "Tokens reused, every request", "TTFT by agent",
                      "TTFT, every request"]
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["A, round 1", "B, round 1", "A, round 2", "B, round 2"]
    shown = figure.axes[1].images[0].get_array()
    assert shown.tolist() == [[0, 0], [0, 0], [0.3, 0.3], [0.3, 0.3]]


def test_the_bar_counts_calls():
    console = Console(force_terminal=True, width=80)
    with console.capture() as capture, agents_report.progress(console, build("star", 3), 2) as tick:
        for _ in range(4):
            tick()
    assert "star, 3 agents: calls" in capture.get()
    assert "4/6" in capture.get()
