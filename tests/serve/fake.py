"""A server over a scripted engine: one token is one byte, and the answer is what a test says."""

import contextlib
import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers

from kvfunc.models.chat import ChatTemplate
from kvfunc.models.tokenizer import Tokenizer
from kvfunc.serve.app import create_app
from kvfunc.serve.engine import Engine
from kvfunc.serve.interface import (
    ContextLengthExceeded,
    End,
    Job,
    Plan,
    QueueFull,
    ShuttingDown,
    Token,
    Usage,
)
from kvfunc.serve.scheduler import Counters

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


class FakeGeneration:
    """One answer of the script; `usage` is there once it has been admitted."""

    usage: Usage | None = None
    admitted: float | None = None
    preempted = 0

    def __init__(self, engine, job: Job, deliver, script):
        self.job, self.deliver, self.script = job, deliver, iter(script)
        self.generated, self.ended = 0, False
        self._engine = engine

    def cancel(self):
        self._engine.end(self, cancelled=True)


class FakeEngine(Engine):
    """Says its script from its own thread: a token of each running answer in turn.

    Where the script has a WAIT the whole engine waits for `gate`; at a SKIP that answer leaves
    out its turn, and an exception ends it.

    Attributes:
      seats: how many answers run at once; the others wait in order of arrival.
      most_open: how many may run and wait.
      submitted, admitted: the jobs so far.
      delivered: how many tokens so far.
      open: answers that have not ended.
      app: the application that serves it.
      cancelled: set when an answer is cancelled before its end.
    """

    WAIT, SKIP = object(), object()

    def __init__(self):
        self.name, self.context_length, self.kv_bytes_per_token = "fake", 1000, 64
        self.sharing = None
        self.tokenizer = byte_tokenizer()
        self._changed = threading.Condition()
        self._waiting: list[FakeGeneration] = []
        self._running: list[FakeGeneration] = []
        self._thread: threading.Thread | None = None
        self.reset()

    def reset(self):
        self.say("hello<|im_end|>")
        self.submitted, self.admitted, self.delivered, self.seats = [], [], 0, 8
        self.most_open = 1000
        self.gate, self.reached, self.cancelled = (threading.Event() for _ in range(3))
        self.failure: Exception | None = None

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def open(self) -> int:
        with self._changed:
            return len(self._waiting) + len(self._running)

    def stats(self):
        return {"running": len(self._running), "waiting": len(self._waiting), "free_pages": 3,
                "held_pages": 1, "evictable_pages": 4, "readers": 2,
                "reader_bytes": 9, **dataclasses.asdict(Counters()),
                "compilations": 0, "host_seconds": 0.0, "device_seconds": 0.0}

    def say(self, *script: str | int | object):
        """Texts, token ids, WAIT, SKIP or an exception, in order; "<|im_end|>" ends the turn."""
        self.say_in_turn(script)

    def say_in_turn(self, *scripts):
        """A script for each answer in order of arrival, over again where there are more."""
        self._scripts = itertools.cycle([[token for part in script for token in (
            self.tokenizer.encode(part) if isinstance(part, str) else [part])]
            for script in scripts])

    def check(self, history):
        if max(history.largest_birth, history.next_position + 1) > self.context_length:
            raise ContextLengthExceeded(
                f"needs position {history.next_position + 1} of {self.context_length}: drop more")

    def check_queue(self, count):
        if self.open + count > self.most_open:
            raise QueueFull(f"{self.open} of {self.most_open} are here: come again in 7 s", 7)

    def max_new_tokens(self, history):
        return self.context_length - history.next_position

    def plan(self, job):
        return Plan.of(job.history, np.array([job.history.tokens - 1]))

    def submit(self, job, deliver):
        if self.failure:
            raise self.failure
        with self._changed:
            self.submitted.append(job)
            generation = FakeGeneration(self, job, deliver, next(self._scripts))
            self._waiting.append(generation)
            self._changed.notify()
        return generation

    def start(self):
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self):
        thread, self._thread = self._thread, None
        with self._changed:
            self._changed.notify()
        if thread is not None:
            thread.join()
        for generation in [*self._waiting, *self._running]:
            self.end(generation)
            generation.deliver(End("error", ShuttingDown()))

    def die(self):
        """As if a fault had ended the thread."""
        thread, self._thread = self._thread, None
        thread.join()
        self._thread = thread

    def end(self, generation, cancelled=False):
        with self._changed:
            if not generation.ended:
                generation.ended = True
                (self._running if generation in self._running else self._waiting).remove(generation)
                if cancelled:
                    self.cancelled.set()

    def _run(self):
        while self._thread is not None:
            with self._changed:
                while self._waiting and len(self._running) < self.seats:
                    generation = self._waiting.pop(0)
                    self.admitted.append(generation.job)
                    generation.usage = self.plan(generation.job).usage
                    generation.admitted = time.perf_counter()
                    self._running.append(generation)
                if not self._running:
                    self._changed.wait(0.1)
                turn = list(self._running)
            for generation in turn:
                self._advance(generation)

    def _advance(self, generation):
        token = next(generation.script, None)
        if token is self.WAIT:
            self.reached.set()
            assert self.gate.wait(10), "nobody opened the gate"
            token = next(generation.script, None)
        if generation.ended or token is self.SKIP:
            return
        sampling, end = generation.job.sampling, None
        if isinstance(token, Exception):
            end = End("error", token)
        elif token is not None:
            generation.generated += 1
            self.delivered += 1
            generation.deliver(self._token(token, sampling.logprobs))
            if token in sampling.stop_ids:
                end = End("stop")
        if end is None and (token is None or generation.generated == generation.job.max_tokens):
            end = End("length")
        if end is not None:
            self.end(generation)
            generation.deliver(end)

    def _token(self, token: int, alternatives: int | None) -> Token:
        if alternatives is None:
            return Token(token, None, ())
        return Token(token, -0.5, ((token, -0.5), (0, float("-inf")))[:alternatives])


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
def serving(engine: FakeEngine, **options) -> Iterator[tuple[ChatTemplate, str]]:
    """Serve it on a free port of this machine, from a thread; the chat template and the URL."""
    chat = ChatTemplate(TEMPLATE, engine.tokenizer)
    engine.app = create_app(engine, chat, **options)
    server = uvicorn.Server(uvicorn.Config(engine.app, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.01)
    try:
        yield chat, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        if isinstance(engine, FakeEngine):
            engine.gate.set()
        server.should_exit = True
        thread.join()
