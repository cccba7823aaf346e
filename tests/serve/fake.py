"""A server over a scripted engine: one token is one byte, and the answer is what a test says."""

import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers

from kvfunc.history import Run
from kvfunc.models.chat import ChatTemplate
from kvfunc.models.tokenizer import Tokenizer
from kvfunc.serve.app import create_app
from kvfunc.serve.engine import (
    ContextLengthExceeded,
    Engine,
    Generation,
    Plan,
    Sampling,
    Token,
    Usage,
)

TEMPLATE = """PRE
{% for message in messages -%}
{% if message.content == 'refuse me' %}{{ raise_exception('I refuse') }}{% endif -%}
[{{ message.role }}]{{ message.content }}
{% endfor -%}
{% if add_generation_prompt %}[assistant]{% endif %}"""


def byte_tokenizer() -> Tokenizer:
    """One token a byte, and an end of turn."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<|im_end|>", special=True)])
    return Tokenizer(backend, stop_ids=[backend.token_to_id("<|im_end|>")])


class FakeGeneration(Generation):
    def __init__(self, engine, usage, max_tokens, sampling):
        self.usage = usage
        self._engine, self._max_tokens, self._sampling = engine, max_tokens, sampling

    def __iter__(self) -> Iterator[Token]:
        for token in self._engine.script[: self._max_tokens]:
            if isinstance(token, Exception):
                raise token
            if token is self._engine.WAIT:
                self._engine.reached.set()
                assert self._engine.gate.wait(10), "nobody opened the gate"
                continue
            count = self._sampling.logprobs
            self._engine.yielded += 1
            if count is None:
                yield Token(token, None, ())
            else:
                yield Token(token, -0.5, ((token, -0.5), (0, float("-inf")))[:count])

    def close(self):
        self._engine.open -= 1
        self._engine.closed.set()
        self._engine.turn.release()


class FakeEngine(Engine):
    """Says its script; there a WAIT waits for `gate`, and an exception is raised."""

    WAIT = object()

    def __init__(self):
        self.name, self.context_length, self.kv_bytes_per_token = "fake", 1000, 64
        self.tokenizer = byte_tokenizer()
        self.reset()

    def reset(self):
        self.say("hello<|im_end|>")
        self.calls, self.yielded, self.open, self.turn = [], 0, 0, threading.Lock()
        self.gate, self.reached, self.closed = (threading.Event() for _ in range(3))
        self.failure: Exception | None = None

    def say(self, *script: str | int | object):
        """Texts, token ids, WAIT or an exception, in order; "<|im_end|>" ends the turn."""
        self.script = [token for part in script for token in (
            self.tokenizer.encode(part) if isinstance(part, str) else [part])]

    def check(self, history):
        if max(history.largest_birth, history.next_position + 1) > self.context_length:
            raise ContextLengthExceeded(
                f"needs position {history.next_position + 1} of {self.context_length}: drop more")

    def max_new_tokens(self, history):
        return self.context_length - history.next_position

    def plan(self, tokens, history, salt):
        runs = tuple(history.classify(np.array([history.tokens - 1])))
        return Plan(self._usage(runs), runs)

    def generate(self, tokens, history, *, salt: str, max_tokens: int, sampling: Sampling):
        if self.failure:
            raise self.failure
        self.turn.acquire()
        self.open += 1
        self.calls.append({"tokens": tokens, "history": history, "salt": salt,
                           "max_tokens": max_tokens, "sampling": sampling})
        usage = self._usage(history.classify(np.array([history.tokens - 1])))
        return FakeGeneration(self, usage, max_tokens, sampling)

    def _usage(self, runs: list[Run] | tuple[Run, ...]) -> Usage:
        counts = dict.fromkeys(("cached", "repos", "drop_skipped", "computed"), 0)
        for run in runs:
            counts[run.kind] += run.stop - run.start
        return Usage(sum(counts.values()), counts["cached"], counts["repos"],
                     counts["drop_skipped"], 0)


class Served:
    """The application behind a real socket, and a client of it."""

    def __init__(self, engine: FakeEngine, chat: ChatTemplate, url: str, client: httpx.Client):
        self.engine, self.chat, self.url, self.client = engine, chat, url, client

    def post(self, path: str, **body) -> httpx.Response:
        return self.client.post(path, json=body)

    def stream(self, content: str = "hi", **fields) -> list[Any]:
        """The objects of a stream's data lines; the last is "[DONE]" where it came."""
        return read_events(self.ask(content, stream=True, **fields))

    def ask(self, content: str = "hi", **fields) -> httpx.Response:
        messages = fields.pop("messages", [{"role": "user", "content": content}])
        return self.post("/v1/chat/completions", messages=messages, **fields)


def read_events(response: httpx.Response) -> list[Any]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    data = [block.removeprefix("data: ") for block in blocks]
    return [block if block == "[DONE]" else json.loads(block) for block in data]


@contextlib.contextmanager
def serving(engine: FakeEngine) -> Iterator[tuple[ChatTemplate, str]]:
    """Serve it on a free port of this machine, from a thread; the chat template and the URL."""
    chat = ChatTemplate(TEMPLATE, engine.tokenizer)
    server = uvicorn.Server(uvicorn.Config(create_app(engine, chat), port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.01)
    yield chat, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()
