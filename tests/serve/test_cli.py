"""The `kvfunc` command, on a stand-in for the server that counts words as tokens."""

import contextlib
import http.server
import json
import signal
import socket
import subprocess
import sys
import textwrap
import threading

import httpx
import pytest
from typer.testing import CliRunner

from kvfunc.attention import IMPLEMENTATIONS
from kvfunc.serve import cli
from kvfunc.serve.client import READY, Client, Refused, ServerBroke, started_server

ANSWER = "an answer of five words"
CONTEXT = 40

# `kvfunc serve` whole, but for the parts that need a model.
STUBBED_SERVE = """
    import dataclasses, sys, types
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    class Engine:
        context_length, kv_bytes_per_token, shapes = 40, 1000, [(1, 40), (512, 40)]
        attention = "xla"
        def __init__(self, model, *, kv_tokens, **options):
            self.name = model.name
            self.kv_tokens = kv_tokens
            print("engine", kv_tokens, options)
        def warm_up(self, progress):
            progress("step", 1, 1)
        def close(self):
            pass

    def module(name, **contents):
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(contents)

    def health(request):
        return JSONResponse({})

    @dataclasses.dataclass
    class LoadedModel:
        name: str = "stub"
        chat: object = None
        config: object = None
        fingerprint: object = None

    def load(model, dtype, progress, quantization):
        progress("embed", 1, 1)
        return LoadedModel()

    module("kvfunc.models", load=load)
    module("kvfunc.serve.engine", Engine=Engine)
    module("kvfunc.serve.sharing", Settings=lambda *given, readers: (*given, readers),
           Sharing=lambda config, fingerprint, settings: settings)
    def create_app(engine, chat, **options):
        from kvfunc.serve.door import Drain
        print("app", options)
        web = Starlette(routes=[Route("/health", health)])
        web.state.drain = Drain(engine)
        return web

    module("kvfunc.serve.app", create_app=create_app)
    from kvfunc.serve.cli import main
    main()
"""


class Handler(http.server.BaseHTTPRequestHandler):
    """A word is a token, a message has one more; all but the last message's words are cached."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        entry = {"id": "stub", "max_model_len": CONTEXT, "kv_bytes_per_token": 10}
        found = self.path == "/v1/models"
        self.reply(200 if found else 404, {"object": "list", "data": [entry]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        sizes = [1 + len((message["content"] or "").split()) for message in body["messages"]]
        cache = body["cache"]
        gone = {i for ids in cache.get("drop", {}).values() for i in ids}
        live = sum(size for index, size in enumerate(sizes) if index not in gone)
        if self.server.broken:
            self.reply(500, {"error": {"message": "out of order", "code": None}})
        elif live > CONTEXT:
            error = {"message": "too long", "code": "context_length_exceeded"}
            self.reply(400, {"error": error})
        elif cache.get("explain"):
            spans = [{"index": i, "tokens": size} for i, size in enumerate(sizes)]
            spans.append({"index": None, "tokens": 3})
            plan = {"messages": spans, "live_tokens": live, "prompt_tokens": sum(sizes)}
            self.reply(200, {**plan, "warnings": ["careful"]})
        elif body.get("stream"):
            self.stream(self.usage(sizes, live))
        else:
            self.reply(200, {"usage": self.usage(sizes, live)})

    def usage(self, sizes, live):
        details = {
            "cached_tokens": live - sizes[-1],
            "repos_tokens": 0,
            "drop_skipped_tokens": sum(sizes) - live,
            "approximate_tokens": 0,
        }
        return {
            "prompt_tokens": sum(sizes),
            "completion_tokens": 5,
            "prompt_tokens_details": details,
        }

    def stream(self, usage):
        self.send_response(200)
        self.end_headers()
        deltas = [{"role": "assistant"}, *({"content": f"{word} "} for word in ANSWER.split())]
        chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
        for chunk in [*chunks, {"choices": [], "usage": usage}]:
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def reply(self, status, answer):
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        served.bodies, served.broken = [], False
        served.url = f"http://127.0.0.1:{served.server_port}"
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield served
        served.shutdown()
        thread.join()


@pytest.fixture
def runs(tmp_path):
    roles = ("user", "assistant", "tool", "assistant")
    messages = [{"role": role, "content": "one two three four"} for role in roles]
    long = [{"role": "user", "content": "one"}, *messages[1:], *messages * 3]
    file = tmp_path / "runs.jsonl"
    lines = [
        {"id": "short", "source": "hand-made", "messages": messages},
        {"id": "long", "source": "hand-made", "messages": long},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def invoke(*arguments, stdin=None):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], input=stdin)


def chat(server, *lines):
    result = invoke("chat", "--url", server.url, stdin="".join(f"{line}\n" for line in lines))
    assert result.exit_code == 0, result.output
    return result.output


def sent(server):
    """The requests that were to be answered, without those for a plan."""
    return [body for body in server.bodies if not body["cache"].get("explain")]


@contextlib.contextmanager
def stubbed_serve(*arguments):
    command = [sys.executable, "-c", textwrap.dedent(STUBBED_SERVE), "serve", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        yield process
        process.kill()


def test_help_needs_no_jax_and_names_the_commands():
    code = "import sys; from kvfunc.serve.cli import app; app(standalone_mode=False); "
    code += "print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    assert all(command in done.stdout for command in ("serve", "chat", "replay"))
    assert done.stdout.rstrip().endswith("False")


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_a_model_that_is_not_there_is_one_line_and_exit_2(command):
    result = invoke(command, "nowhere.gguf")
    assert result.exit_code == 2
    assert result.stderr.startswith("kvfunc: MODEL 'nowhere.gguf': there is no such file")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("fails", "fault", "complaint"),
    [
        ("return LoadedModel()", "not a GGUF file", "MODEL 'embedded' cannot be served: "),
        ("self.name = model.name", "max_model_len must be at most 40", ""),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_2(fails, fault, complaint):
    code = textwrap.dedent(STUBBED_SERVE.replace(fails, f"raise ValueError({fault!r})"))
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2
    assert done.stderr == f"kvfunc: {complaint}{fault}\n"


def test_every_implementation_of_attention_can_be_named_and_no_other():
    assert tuple(cli.Attention) == IMPLEMENTATIONS
    result = invoke("serve", "nowhere.gguf", "--attention", "cuda")
    assert result.exit_code == 2
    assert "--attention" in result.stderr and "'cuda'" in result.stderr


def test_a_port_in_use_is_named_before_a_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = invoke("serve", "--port", port)
    assert result.exit_code == 2
    assert f"--host 127.0.0.1 --port {port}: Address already in use" in result.stderr


def test_serve_says_when_it_is_ready_and_stops_on_ctrl_c():
    with stubbed_serve(
        *("--port", "0", "--kv-tokens", "5000", "--served-model-name", "mine"),
        *("--kv-dtype", "fp8", "--page-size", "8", "--max-num-seqs", "3"),
        *("--max-num-batched-tokens", "99", "--eviction-policy", "lru", "--max-queue", "7"),
        *("--attention", "pallas", "--share", "auto", "--share-texts", "3", "--share-readers", "5"),
        *("--share-recompute", "0.25"),
        *("--api-key", "one,two", "--api-key", "three", "--request-timeout", "2.5"),
    ) as process:
        printed = []
        for line in process.stdout:
            printed.append(line)
            if line.startswith(READY):
                break
        assert httpx.get(f"{line.removeprefix(READY).strip()}/health").status_code == 200
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=10)
    assert process.returncode == 0
    assert rest == "stopped\n"
    options = {"sharing": (True, 3, 0.25, 5), "kv_dtype": "float8_e4m3fn", "context_length": None,
               "page_size": 8, "max_num_seqs": 3, "chunk": 99, "policy": "lru", "max_queue": 7,
               "attention": "pallas"}
    assert f"engine 5000 {options}\n" in printed
    options = {"api_keys": ["one", "two", "three"], "request_timeout": 2.5}
    assert f"app {options}\n" in printed
    assert "compiled steps (tokens x rows): 1 x 40, 512 x 40\n" in printed
    assert ("mine: context 40 tokens; 3 requests at once; KV cache 5,000 tokens of fp8 in pages of "
            "8, 5.0 MB; attention on xla\n") in printed


def test_a_started_server_ends_with_its_block():
    command = [sys.executable, "-c", textwrap.dedent(STUBBED_SERVE), "serve", "--port", "0"]
    with started_server(command) as url:
        assert httpx.get(f"{url}/health").status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_a_server_that_breaks_is_reported_with_what_it_said():
    command = [sys.executable, "-c", f"print('{READY}http://x\\nout of memory')"]
    complaint = r"no answer. It printed:(?s:.*)out of memory"
    with pytest.raises(ServerBroke, match=complaint), started_server(command):
        raise ServerBroke("no answer")


def test_a_server_that_does_not_start_is_reported_with_what_it_said():
    command = [sys.executable, "-c", "print('no memory')"]
    complaint = "the server did not start. It printed:\nno memory"
    with pytest.raises(ServerBroke, match=complaint), started_server(command):
        pass


def test_chat_and_replay_start_a_server_for_their_model(monkeypatch, server, runs, tmp_path):
    started = []

    @contextlib.contextmanager
    def start(command):
        started.append(command[3:])
        yield server.url

    monkeypatch.setattr("kvfunc.serve.client.started_server", start)
    assert invoke("chat", runs, stdin="/quit\n").exit_code == 0
    assert invoke("replay", runs, "--out", tmp_path).exit_code == 0
    assert started == [["serve", "--port", "0", str(runs)], ["serve", "--port", "0"]]


def test_a_model_and_a_url_exclude_each_other(server):
    result = invoke("chat", "some.gguf", "--url", server.url)
    assert result.exit_code == 2
    assert "MODEL 'some.gguf' and --url" in result.stderr


def test_chat_streams_the_answer_and_shows_the_turns_counters(server):
    output = chat(server, "one two", "three")
    assert ANSWER in output
    assert "live 3 · cached 0 · repositioned 0 · dropped 0 · computed 3 · generated 5" in output
    assert "live 11 · cached 9 · repositioned 0 · dropped 0 · computed 2 · generated 5" in output
    assert [m["role"] for m in sent(server)[1]["messages"]] == ["user", "assistant", "user"]


def test_chat_sends_its_whole_schedule_every_turn(server):
    chat(server, "a", "/drop 0 1", "/repos", "/repos", "b", "/drop 1 2", "c")
    assert [body["cache"] for body in sent(server)] == [
        {"drop": {}, "reposition": []},
        {"drop": {"1": [0, 1]}, "reposition": [1]},
        {"drop": {"1": [0, 1], "3": [2]}, "reposition": [1]},
    ]


def test_chat_shows_the_servers_warnings(server):
    assert "warning: careful" in chat(server, "a")


def test_chat_counts_as_dropped_what_is_not_live(server):
    assert "live 2 · cached 0 · repositioned 0 · dropped 8" in chat(server, "a", "/drop 0 1", "b")


def test_chat_shows_messages_with_numbers_and_tokens(server):
    output = chat(server, "a [b]", "/drop 0", "/show")
    assert "0  user            3  (dropped after 1) a [b]" in output
    assert f"1  assistant       6  {ANSWER}" in output
    assert "6 of 9 tokens are live" in output


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/drop", "/drop takes numbers of messages"),
        ("/drop one", "/drop takes numbers of messages"),
        ("/drop 7", "there is no message 7"),
        ("/repos", "there is no message yet"),
        ("/show", "there is no message yet"),
        ("/frob", "there is no command /frob"),
    ],
)
def test_chat_goes_on_after_a_wrong_command(server, line, complaint):
    output = chat(server, line, "hello")
    assert complaint in output
    assert ANSWER in output


def test_a_refused_turn_leaves_the_conversation_as_it_was(server):
    output = chat(server, "a", "long " * CONTEXT, "b")
    assert "refused: too long" in output
    assert [m["content"] for m in sent(server)[-1]["messages"]][::2] == ["a", "b"]


def test_reset_forgets_all_but_the_system_message(server):
    stdin = "a\n/drop 1\n/reset\nb\n"
    invoke("chat", "--url", server.url, "--system", "be brief", stdin=stdin)
    last = sent(server)[-1]
    assert [m["content"] for m in last["messages"]] == ["be brief", "b"]
    assert last["cache"] == {"drop": {}, "reposition": []}


def test_replay_compares_policies_and_a_refusal_is_a_result(server, runs, tmp_path):
    result = invoke(
        "replay", runs, "--url", server.url, "--run", "long", "--keep", 1, "--out", tmp_path / "out"
    )
    assert result.exit_code == 0, result.output
    assert "long, none: 4 of 8 rounds" in result.output
    assert "A was refused in round 5 (before message 9)" in result.output
    assert (tmp_path / "out/long.png").exists()
    saved = json.loads((tmp_path / "out/long.json").read_text())
    assert [one["cache"] for one in saved["policies"]] == [
        {},
        {"policy": {"type": "rolling_tool_outputs", "keep": 1}},
    ]


def test_replay_passes_its_options_on(server, runs, tmp_path):
    result = invoke(
        *("replay", runs, "--url", server.url, "--run", "0", "--out", tmp_path, "--rounds", 1),
        *("--policy", "rolling_tool_outputs", "--reposition-above-tokens", 7, "--max-tokens", 3),
    )
    assert result.exit_code == 0, result.output
    (body,) = sent(server)
    assert body["max_tokens"] == 3
    assert body["temperature"] == 0
    assert body["cache"]["policy"] == {
        "type": "rolling_tool_outputs",
        "keep": 12,
        "reposition_above_tokens": 7,
    }


def test_replay_fails_when_the_server_breaks(server, runs, tmp_path):
    server.broken = True
    result = invoke("replay", runs, "--url", server.url, "--out", tmp_path)
    assert result.exit_code == 1
    assert result.stderr == "kvfunc: the server failed with 500: out of order\n"


def test_replay_fails_when_nobody_answers(runs, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    result = invoke("replay", runs, "--url", url, "--out", tmp_path)
    assert result.exit_code == 1
    assert f"no answer from the server at {url}" in result.stderr


def test_replay_names_a_run_that_is_not_there(server, runs):
    result = invoke("replay", runs, "--url", server.url, "--run", "lost")
    assert result.exit_code == 2
    assert "--run 'lost': no such run. Take 0 to 1, or: short, long" in result.stderr


def test_the_client_takes_the_url_with_or_without_v1(server):
    for suffix in ("", "/", "/v1", "/v1/"):
        with Client(server.url + suffix) as client:
            assert client.card().name == "stub"


def test_an_answer_in_another_form_means_that_the_server_is_not_ours():
    transport = httpx.MockTransport(lambda _: httpx.Response(404, text="nothing here"))
    with Client("http://elsewhere", transport) as client, pytest.raises(ServerBroke, match="404"):
        client.card()


def test_memory_that_is_short_is_a_refusal_and_not_a_fault():
    error = {"error": {"message": "the pool is too small", "code": "capacity_exceeded"}}
    transport = httpx.MockTransport(lambda _: httpx.Response(503, json=error))
    with Client("http://ours", transport) as client, pytest.raises(Refused, match="too small"):
        client.card()


@pytest.mark.parametrize(
    ("ending", "complaint"),
    [('data: {"error": {"message": "lost the device"}}\n\n', "lost the"), ("", "broke off")],
)
def test_a_stream_without_its_end_is_a_broken_server(ending, complaint):
    text = f'data: {{"choices": [{{"delta": {{"content": "so"}}}}]}}\n\n{ending}'
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=text))
    with Client("http://ours", transport) as client:
        pieces = client.stream([], {})
        assert next(pieces) == "so"
        with pytest.raises(ServerBroke, match=complaint):
            next(pieces)
