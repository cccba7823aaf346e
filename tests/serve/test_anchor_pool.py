"""`kvfunc serve --anchor-pool`: what is learned over HTTP survives kill -9 and a restart."""

import signal
import subprocess
import sys

import openai
import pytest

from kvfunc.checkpoint import Checkpoints

from .test_operations import eventually, scraped
from .test_process import Process

ROLES = ("You are a careful reader.", "You translate manuals. Keep every number and every unit.")
TEXTS = 2  # that teach a reader
MODEL = "SmolLM2-135M-Instruct"


def serve(pool, *options):
    return Process([
        sys.executable, "-m", "kvfunc.serve.cli", "serve", "--port", "0", "--kv-tokens", "2048",
        "--max-model-len", "1024", "--max-num-seqs", "2", "--max-num-batched-tokens", "64",
        "--share-texts", str(TEXTS), "--anchor-pool", str(pool), "--anchor-pool-interval", "1",
        *options])


def document(number):
    return " ".join(f"Valve {number * 7 + line} of line {line} opens at {number + 3 * line} bar."
                    for line in range(6))


def ask(server, reader, number, stream=False, **cache):
    """Let a role read a document, by OpenAI's client: the answer, or the chunks of a stream."""
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{server.client.base_url}/v1", api_key="none", max_retries=0,
                       http_client=http) as client:
        answer = client.chat.completions.create(
            model=MODEL, max_tokens=4, temperature=0, stream=stream, messages=[
                {"role": "system", "content": ROLES[reader]},
                {"role": "user", "content": [
                    {"type": "text", "text": "Read this:\n"},
                    {"type": "text", "text": document(number), "cache": {"share": "manual"}},
                    {"type": "text", "text": "\nSay what is most important.\n"}]}],
            extra_body={"cache": cache} if cache else {})
        return [*answer] if stream else answer


def approximate(answer):
    return answer.usage.prompt_tokens_details.approximate_tokens


def read_by_both(server, number):
    """Tokens of a document that the second role did not compute, as it was the second to read."""
    assert approximate(ask(server, 0, number)) == 0
    return approximate(ask(server, 1, number))


def saved(pool):
    return Checkpoints(pool, {}).latest() or 0


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The pool of a server that was killed between two saves, and what its clients saw."""
    pool = tmp_path_factory.mktemp("anchors")
    with serve(pool) as server:
        seen = [read_by_both(server, number) for number in range(TEXTS + 1)]
        plain = ask(server, 1, TEXTS + 1)
        assert approximate(ask(server, 0, TEXTS + 2)) == 0
        answer = ask(server, 1, TEXTS + 2)
        stream = ask(server, 1, TEXTS + 2, stream=True)
        exact = ask(server, 1, TEXTS + 2, exact=True)
        metrics = scraped(server.client, MODEL)
        eventually(lambda: saved(pool) > 0)
        server.process.send_signal(signal.SIGKILL)
        server.end()
    return pool, seen, (plain, answer, stream, exact), metrics


def test_a_document_is_estimated_behind_another_prompt_once_that_has_been_taught(killed):
    _, seen, (plain, answer, stream, exact), metrics = killed
    assert seen[:TEXTS] == [0] * TEXTS and seen[TEXTS] > 60
    assert approximate(plain) == 0  # nobody had read that one
    assert approximate(answer) > 60 and answer.cache["predicted_error"] > 0
    last = stream[-1]
    assert approximate(last) > 60 and last.cache["predicted_error"] > 0
    assert not any("cache" in chunk.model_extra for chunk in stream[:-1])
    assert approximate(exact) == 0 and "cache" not in exact.model_extra
    assert metrics["kvfunc:approximate_tokens_total",] > 120
    assert metrics["kvfunc:estimated_tokens_total",] > 120
    assert metrics["kvfunc:anchor_pool_readers",] > 0
    assert metrics["kvfunc:anchor_pool_bytes",] > 1e6 * metrics["kvfunc:anchor_pool_readers",]


def test_after_kill_9_the_next_server_estimates_at_once(killed):
    with serve(killed[0]) as server:
        assert "1 readers known" in "".join(server.before)
        assert read_by_both(server, 20) > 60
        before = saved(killed[0])
        server.process.send_signal(signal.SIGTERM)
        printed, status = server.end()
        assert (status, saved(killed[0])) == (0, before), printed  # nothing new was learned


def test_another_models_pool_is_refused_with_both_values(killed):
    server = [sys.executable, "-m", "kvfunc.serve.cli", "serve", "--port", "0", "--dtype",
              "float32", "--anchor-pool", str(killed[0])]
    done = subprocess.run(server, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    said = " ".join(done.stderr.split())
    assert "--anchor-pool" in said and "weights is" in said and "here; start with what" in said


def test_what_was_learned_last_is_saved_at_the_end(tmp_path):
    with serve(tmp_path, "--anchor-pool-interval", "3600") as server:
        read_by_both(server, 1)
        assert saved(tmp_path) == 0
        server.process.send_signal(signal.SIGTERM)
        printed, status = server.end()
    assert (status, saved(tmp_path)) == (0, 1), printed
