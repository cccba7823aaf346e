"""`kvfunc serve` as a process of its own: key, metrics, request log, and how it ends."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import httpx
import pytest
from typer.testing import CliRunner

from kvfunc.serve import cli
from kvfunc.serve.client import READY

from .test_operations import assert_agree, eventually, scraped

KEY = "a-key-that-nobody-guesses"
COUNT = {"messages": [{"role": "user", "content": "Count to one hundred thousand."}],
         "temperature": 0, "ignore_eos": True}

# A server over the scripted engine: one token is one byte, and every answer has 40 of them.
SCRIPTED = """
    import sys, time
    from tests.serve.fake import FakeEngine, TEMPLATE
    from kvfunc.models.chat import ChatTemplate
    from kvfunc.serve import cli
    from kvfunc.serve.app import create_app

    class Slow(FakeEngine):
        def _advance(self, generation):
            time.sleep(0.05)
            super()._advance(generation)

    engine = Slow()
    engine.say("x" * 40 + "<|im_end|>")
    web = create_app(engine, ChatTemplate(TEMPLATE, engine.tokenizer))
    say = lambda line: print(line, flush=True)
    cli.run(web, cli._bind("127.0.0.1", 0), say, drain_timeout=float(sys.argv[1]))
    print("stopped")
"""


class Process:
    """A server, its URL, and what it prints after that."""

    def __init__(self, command, **environment):
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **environment})
        self.before = []
        for line in self.process.stdout:
            self.before.append(line)
            if line.startswith(READY):
                break
        assert self.process.poll() is None, "".join(self.before)
        self.client = httpx.Client(base_url=line.removeprefix(READY).strip(), trust_env=False,
                                   timeout=60)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.client.close()
        self.process.kill()
        self.process.communicate()

    def stream(self, **fields):
        """A streamed answer from a thread: the thread, and its chunks so far."""
        chunks, begun = [], threading.Event()

        def read():
            with contextlib.suppress(httpx.HTTPError), self.client.stream(
                    "POST", "/v1/chat/completions",
                    json={**COUNT, "stream": True, **fields}) as response:
                for line in response.iter_lines():
                    if line:
                        chunks.append(line.removeprefix("data: "))
                        begun.set()

        thread = threading.Thread(target=read)
        thread.start()
        assert begun.wait(30)
        return thread, chunks

    def end(self):
        """What it printed, once it is gone, and its exit status."""
        printed, _ = self.process.communicate(timeout=60)
        return printed, self.process.returncode

    def drains(self):
        return self.client.get("/health/ready").status_code == 503


def scripted(drain_timeout):
    return Process([sys.executable, "-c", textwrap.dedent(SCRIPTED), str(drain_timeout)],
                   PYTHONPATH=os.getcwd())


def test_key_metrics_log_and_drain_of_the_embedded_model(tmp_path):
    log = tmp_path / "requests.jsonl"
    command = [
        sys.executable, "-m", "kvfunc.serve.cli", "serve", "--port", "0", "--kv-tokens", "1024",
        "--max-model-len", "1024", "--max-num-seqs", "2", "--max-num-batched-tokens", "64",
        "--max-queue", "3", "--request-timeout", "60", "--request-log", str(log)]
    with Process(command, KVFUNC_API_KEY=f"other,{KEY}",
                 JAX_COMPILATION_CACHE_DIR=str(tmp_path / "jax")) as server:
        client = server.client
        assert client.get("/v1/models").status_code == 401
        client.headers["Authorization"] = f"Bearer {KEY}"
        messages = [{"role": "user", "content": "Name a colour."}]
        for fields in (dict(n=2), dict(cache={"drop": {"0": [0]}}), dict(timeout=1e-6)):
            body = {"messages": messages, "max_tokens": 4, **fields}
            status = client.post("/v1/chat/completions", json=body).status_code
            assert status == (504 if "timeout" in fields else 200)
        tried = client.post("/v1/chat/completions", json={"messages": messages, "n": 6})
        assert tried.status_code == 400 and "at most 5 answers" in tried.text
        thread, chunks = server.stream(max_tokens=30)
        thread.join()
        assert chunks[-1] == "[DONE]"
        eventually(lambda: log.read_text().count("\n") == 6)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        samples = scraped(client, "SmolLM2-135M-Instruct")
        assert_agree(samples, lines)
        assert samples["vllm:generation_tokens_total",] >= 34
        assert samples["kvfunc:steps_total",] > 0 == samples["vllm:num_requests_running",]

        running = [server.stream(max_tokens=200) for _ in range(2)]
        server.process.send_signal(signal.SIGTERM)
        eventually(server.drains)
        refused = client.post("/v1/chat/completions", json=COUNT)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "shutting_down"
        for thread, chunks in running:
            thread.join()
            assert chunks[-1] == "[DONE]"
        printed, status = server.end()
    assert (printed, status) == ("draining: 2 requests, up to 30 s\nstopped\n", 0)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["error"] for line in lines[6:]] == ["shutting_down", None, None]
    told = log.read_text() + "".join(server.before)
    assert KEY not in told and "colour" not in told


def test_what_is_not_done_when_the_drain_is_over_ends_with_its_error():
    with scripted(0.5) as server:
        thread, chunks = server.stream()
        server.process.send_signal(signal.SIGINT)
        printed, status = server.end()
        thread.join()
    assert json.loads(chunks[-1])["error"]["code"] == "shutting_down"
    assert printed == "draining: 1 request, up to 0.5 s\nending what is left: 1 request\nstopped\n"
    assert status == 0


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(kind):
    with scripted(600) as server:
        server.stream(n=100)
        server.process.send_signal(kind)
        eventually(server.drains)
        start = time.monotonic()
        server.process.send_signal(kind)
        printed, status = server.end()
    assert time.monotonic() - start < 60 and status != 0
    assert "stopped" not in printed and "ASGI" not in printed


def test_a_bad_key_log_or_timeout_is_one_line_and_exit_2(tmp_path):
    def refused(*arguments, **environment):
        done = CliRunner(env=environment).invoke(
            cli.app, ["serve", "--port", "0", *map(str, arguments)])
        assert done.exit_code == 2 and done.stderr.count("\n") == 1
        return done.stderr

    for key in ("", "a,", "two words", "grüße", "line\nbreak"):
        told = refused("--api-key", key)
        assert "--api-key (or KVFUNC_API_KEY): a key is empty or has characters" in told
        assert not key or key not in told
    assert "a key is empty" in refused(KVFUNC_API_KEY="one,,two")
    assert "--request-timeout 0: give seconds above 0" in refused("--request-timeout", 0)
    assert f"--request-log '{tmp_path}': Is a directory" in refused("--request-log", tmp_path)


def test_chat_and_replay_send_the_key(tmp_path):
    """To a server that refuses everything and remembers what it was sent."""
    seen = []

    def answer(listener):
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                seen.append(connection.recv(65536).decode())
                connection.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 46\r\n\r\n"
                                   b'{"error": {"message": "no", "code": "no_key"}}')

    runs = tmp_path / "runs.jsonl"
    runs.write_text(json.dumps({"id": "r", "source": "s", "messages": [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for command in (["chat"], ["replay", str(runs), "--out", str(tmp_path)]):
            for given, environment in ((["--api-key", KEY], {}), ([], {"KVFUNC_API_KEY": KEY}),
                                       ([], {"KVFUNC_API_KEY": f"{KEY},second"}),
                                       ([], {"OPENAI_API_KEY": KEY})):
                done = CliRunner(env=environment).invoke(
                    cli.app, [*command, "--url", url, *given])
                assert done.exit_code == 1
                assert (f"authorization: bearer {KEY}\r\n" in seen[-1].lower()) == (
                    "OPENAI_API_KEY" not in environment)
                assert KEY not in done.output
        listener.close()


def test_attention_that_cannot_run_here_is_one_line_and_exit_2():
    done = subprocess.run(
        [sys.executable, "-m", "kvfunc.serve.cli", "serve", "--port", "0", "--attention", "triton"],
        capture_output=True, text=True, timeout=60, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 2
    assert done.stderr == (
        'kvfunc: --attention triton: implementation="triton" cannot be used: it needs an NVIDIA '
        "GPU, and JAX runs on 'cpu' here; use \"xla\"\n")
