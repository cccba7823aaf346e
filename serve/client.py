"""A small client of the server, for `kvfunc chat` and `kvfunc replay`; it needs no JAX."""

import collections
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

READY = "Ready: "
"""How `kvfunc serve` begins the line that names its URL; `started_server` waits for it."""

Message = Mapping[str, Any]


class ServerBroke(RuntimeError):
    """The server could not be started or reached, broke off, or has a fault of its own."""


class Refused(ValueError):
    """The server is well and refused this request: its message, and OpenAI's error code."""

    def __init__(self, message: str, code: str):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Card:
    """What `/v1/models` tells of the model served."""

    name: str
    max_model_len: int
    kv_bytes_per_token: int


@dataclass(frozen=True)
class Usage:
    """The usage counters of one answer, in tokens (semantics.md, "Usage counters")."""

    prompt: int
    generated: int
    cached: int
    repos: int
    drop_skipped: int
    approximate: int

    @classmethod
    def from_json(cls, usage: Mapping[str, Any]) -> "Usage":
        """Read OpenAI's `usage` object with this server's `prompt_tokens_details`."""
        details = usage["prompt_tokens_details"]
        return cls(
            prompt=usage["prompt_tokens"],
            generated=usage["completion_tokens"],
            cached=details["cached_tokens"],
            repos=details["repos_tokens"],
            drop_skipped=details["drop_skipped_tokens"],
            approximate=details["approximate_tokens"],
        )

    @property
    def computed(self) -> int:
        """Prompt tokens a query was run for: what the other counters leave."""
        return self.prompt - self.cached - self.repos - self.drop_skipped - self.approximate


class Client:
    """Requests to one server. Raises `Refused` or `ServerBroke`, nothing of httpx's.

    The environment's proxies are ignored: the server is ours, most often on this very machine.
    """

    def __init__(
        self,
        url: str,
        transport: httpx.BaseTransport | None = None,
        api_key: str | None = None,
    ):
        self._url = url.rstrip("/").removesuffix("/v1")
        timeout = httpx.Timeout(None, connect=10)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(
            timeout=timeout, transport=transport, trust_env=False, headers=headers
        )

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    @contextlib.contextmanager
    def _response(self, method: str, path: str, body: Any = None) -> Iterator[httpx.Response]:
        try:
            with self._http.stream(method, self._url + path, json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise _failure(response)
                yield response
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise ServerBroke(f"no answer from the server at {self._url}: {reason}") from error

    def _json(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        with self._response(method, path, body) as response:
            return json.loads(response.read())

    def card(self) -> Card:
        """The model that the server serves."""
        entry = self._json("GET", "/v1/models")["data"][0]
        return Card(entry["id"], entry["max_model_len"], entry["kv_bytes_per_token"])

    def plan(self, messages: Sequence[Message], cache: Mapping[str, Any]) -> dict[str, Any]:
        """What the request would compute and reuse (api.md, `explain`); nothing is run."""
        body = {"messages": messages, "cache": {**cache, "explain": True}}
        return self._json("POST", "/v1/chat/completions", body)

    def complete(
        self, messages: Sequence[Message], cache: Mapping[str, Any], **options: Any
    ) -> Usage:
        """Run the request, greedily unless told otherwise, and return its counters."""
        body = {"messages": messages, "cache": cache, "temperature": 0, **options}
        return Usage.from_json(self._json("POST", "/v1/chat/completions", body)["usage"])

    def stream(
        self, messages: Sequence[Message], cache: Mapping[str, Any], **options: Any
    ) -> Iterator[str | Usage]:
        """Yield the answer piece by piece and, last, its counters."""
        body = {"messages": messages, "cache": cache, "stream": True, **options}
        body["stream_options"] = {"include_usage": True}
        with self._response("POST", "/v1/chat/completions", body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise ServerBroke(chunk["error"]["message"])
                for choice in chunk["choices"]:
                    if choice["delta"].get("content"):
                        yield choice["delta"]["content"]
                if chunk.get("usage"):
                    yield Usage.from_json(chunk["usage"])
                    return
        raise ServerBroke("the answer broke off")


def _failure(response: httpx.Response) -> Refused | ServerBroke:
    try:
        error = response.json()["error"]
        message, code = error["message"], error.get("code")
    except (ValueError, KeyError, TypeError):
        return ServerBroke(f"{response.url} answered {response.status_code}, not as kvfunc does")
    # 503 says that memory is short: an answer, not a fault.
    if response.status_code < 500 or response.status_code == 503:
        return Refused(message, code or f"http_{response.status_code}")
    return ServerBroke(f"the server failed with {response.status_code}: {message}")


def serve_command(model: str | None) -> list[str]:
    """The command line of a `kvfunc serve` on a free port."""
    command = [sys.executable, "-m", "kvfunc.serve.cli", "serve", "--port", "0"]
    return [*command, model] if model else command


@contextlib.contextmanager
def started_server(command: Sequence[str]) -> Iterator[str]:
    """Run `command`, which is to print a `READY` line; yield the URL it names; end it at the end.

    The command gets a process group of its own, so that Ctrl-C here does not stop the server.
    """
    printed = collections.deque[str](maxlen=30)
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        # A pipe that nobody empties would stop the server once it is full.
        drain = threading.Thread(target=printed.extend, args=(process.stdout,), daemon=True)
        try:
            url = _url_when_ready(process.stdout, printed)
            drain.start()
            yield url
        except ServerBroke as error:
            _end(process, drain)
            raise ServerBroke(f"{error}. It printed:\n{''.join(printed).strip()}") from error
        finally:
            _end(process, drain)


def _url_when_ready(lines: Iterable[str], printed: collections.deque[str]) -> str:
    for line in lines:
        printed.append(line)
        if line.startswith(READY):
            return line.removeprefix(READY).strip()
    raise ServerBroke("the server did not start")


def _end(process: subprocess.Popen[str], drain: threading.Thread) -> None:
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
    if drain.ident is not None:
        drain.join()
