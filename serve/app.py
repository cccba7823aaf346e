"""The HTTP application: OpenAI's API over one engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Send

from kvfunc.history import Event, History
from kvfunc.models.chat import ChatTemplate, Rendered
from kvfunc.policies import Schedule

from . import events as message_events
from . import protocol
from .answer import Job, Step, answer
from .engine import Engine
from .errors import ApiError, invalid, read_json
from .interface import CapacityExceeded, ContextLengthExceeded
from .protocol import ChatRequest, CompletionRequest
from .responses import ChatReply, CompletionReply, Reply, usage
from .turns import Turns

RETRY_AFTER_SECONDS = "5"

_log = logging.getLogger(__name__)
# A thread of the engine's may wait for its turn; the one whose turn it is must get its thread.
_no_limit = anyio.CapacityLimiter(math.inf)
_T = TypeVar("_T")


def create_app(engine: Engine, chat: ChatTemplate, *, warnings: Sequence[str] = ()) -> Starlette:
    """The application.

    Args:
      engine: generates tokens; its blocking methods are called in worker threads.
      chat: renders messages to tokens and their owners.
      warnings: what every answer's `warnings` shall say, such as a model loaded with a reservation.
    """
    api = _Api(engine, chat, tuple(warnings))
    return Starlette(
        routes=[
            Route("/health", _health),
            Route("/v1/models", api.models),
            Route("/v1/models/{name:path}", api.model),
            Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
            Route("/v1/completions", api.completions, methods=["POST"]),
        ],
        exception_handlers={HTTPException: _http_error},
    )


def _guarded(endpoint: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """Answer every failure in OpenAI's envelope."""

    @functools.wraps(endpoint)
    async def guarded(api: _Api, request: Request) -> Response:
        try:
            return await endpoint(api, request)
        except ClientDisconnect:
            return _nobody_listens()
        except Exception as error:
            fault = _as_api_error(error)
            return JSONResponse(fault.body(), fault.status, headers=fault.headers)

    return guarded


class _Api:
    def __init__(self, engine: Engine, chat: ChatTemplate, warnings: tuple[str, ...]):
        self._engine, self._chat, self._warnings = engine, chat, warnings
        self._created = int(time.time())
        self._turns = Turns()

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    @_guarded
    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    @_guarded
    async def chat_completions(self, request: Request) -> Response:
        body = await _json_body(request)
        asked, job, warnings, plan = await _in_thread(self._prepare_chat, body)
        if plan is not None:
            return JSONResponse(plan)
        reply = ChatReply(self._engine.name, self._engine.tokenizer, asked.logprobs or False)
        return await self._respond(request, asked, [job], reply, warnings)

    @_guarded
    async def completions(self, request: Request) -> Response:
        body = await _json_body(request)
        asked, jobs = await _in_thread(self._prepare_completion, body)
        reply = CompletionReply(self._engine.name, self._engine.tokenizer,
                                asked.logprobs is not None)
        return await self._respond(request, asked, jobs, reply, self._warnings)

    def _card(self) -> dict[str, Any]:
        engine = self._engine
        return {"id": engine.name, "object": "model", "created": self._created,
                "owned_by": "kvfunc", "max_model_len": engine.context_length,
                "kv_bytes_per_token": engine.kv_bytes_per_token}

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._engine.name):
            raise ApiError(f"the model {name!r} is not served here: use {self._engine.name!r}",
                           param="model", code="model_not_found", status=404)

    def _prepare_chat(self, body: dict[str, Any]) -> tuple[
            ChatRequest, Job, list[str], dict[str, Any] | None]:
        asked = ChatRequest.parse(body)
        self._check_model(asked.model)
        edits = asked.edits()
        messages = body["messages"]
        rendered = self._render(asked, body)
        setting = [asked.salt, body.get("tools"), body.get("chat_template_kwargs")]
        warnings = [*self._warnings, *rendered.warnings,
                    *([] if asked.explain else
                      self._turns.check(setting, messages, rendered.tokens))]
        schedule = Schedule()
        if edits and not rendered.monotonic:
            raise ApiError("this model's chat template moves messages, so that events have no "
                           "place between them: leave out drop, reposition and policy",
                           param="cache", code="unsupported_value")
        if isinstance(edits, Schedule):
            schedule = edits
            warnings += message_events.broken_calls(schedule, messages)
        elif edits is not None:  # a policy, which breaks calls from their results knowingly
            schedule = edits(message_events.units(messages, rendered.owner))
        events = message_events.events(schedule, len(messages), rendered.owner)
        job = self._job(asked, rendered.tokens, events, "messages")
        plan = None
        if asked.explain:
            described = self._engine.plan(job.tokens, job.history, job.salt)
            plan = {"model": self._engine.name, **message_events.describe(
                described, job.history, messages, rendered.owner, warnings)}
        return asked, job, warnings, plan

    def _render(self, asked: ChatRequest, body: dict[str, Any]) -> Rendered:
        try:
            return self._chat.render(body["messages"], tools=body.get("tools") or None,
                                     **asked.chat_template_kwargs or {})
        except (ValueError, TypeError, RecursionError) as error:
            raise ApiError(f"{error}: change the messages, the tools or chat_template_kwargs",
                           param="messages", code="invalid_value") from error

    def _prepare_completion(self, body: dict[str, Any]) -> tuple[CompletionRequest, list[Job]]:
        asked = CompletionRequest.parse(body)
        self._check_model(asked.model)
        return asked, [self._job(asked, self._encode(prompt, param), [], param)
                       for param, prompt in asked.prompts.items()]

    def _encode(self, prompt: str | list[int], param: str) -> np.ndarray:
        tokenizer = self._engine.tokenizer
        if isinstance(prompt, str):
            ids = tokenizer.encode(prompt)
            if tokenizer.adds_bos and ids[:1] != [tokenizer.bos_id]:
                ids = [tokenizer.bos_id, *ids]
            return np.array(ids, np.int32)
        for place, token_id in enumerate(prompt):
            if token_id >= tokenizer.vocab_size:
                raise invalid(f"{param}[{place}]", token_id,
                              f"give token ids below {tokenizer.vocab_size}")
        return np.array(prompt, np.int32)

    def _job(self, asked: ChatRequest | CompletionRequest, tokens: np.ndarray,
             events: list[Event], param: str) -> Job:
        if not len(tokens):
            raise ApiError(f"{param} has no tokens: give some text", param=param,
                           code="invalid_value")
        history = History(len(tokens), events)
        try:
            self._engine.check(history)
        except ContextLengthExceeded as error:
            raise ApiError(str(error), param=param, code="context_length_exceeded") from error
        room = self._engine.max_new_tokens(history)
        return Job(tokens, history, asked.salt, min(asked.token_limit or room, room),
                   asked.sampling, asked.stop_strings, bool(asked.ignore_eos))

    async def _respond(self, request: Request, asked: protocol.Request, jobs: Sequence[Job],
                       reply: Reply, warnings: Sequence[str]) -> Response:
        steps = answer(self._engine, jobs)
        if asked.stream:
            first = await _in_thread(next, steps)  # what fails before it is a plain HTTP error
            return _EventStream(
                _stream(steps, first, len(jobs), reply, asked.wants_usage_chunk, warnings),
                headers={"Cache-Control": "no-cache"})
        done = await _collect(request, steps)
        return _nobody_listens() if done is None else JSONResponse(reply.whole(done, warnings))


class _EventStream(StreamingResponse):
    """Server-sent events; the generator behind them is closed at once when the client leaves."""

    media_type = "text/event-stream"

    async def stream_response(self, send: Send) -> None:
        async with contextlib.aclosing(self.body_iterator):
            await super().stream_response(send)


async def _stream(steps: Iterator[Step], first: Step, choices: int, reply: Reply,
                  with_usage: bool, warnings: Sequence[str]) -> AsyncIterator[str]:
    more = {"usage": None} if with_usage else {}
    closing = {"warnings": list(warnings)} if warnings else {}
    done: list[Step] = []
    step: Step | None = first
    opened = -1
    try:
        while step is not None:
            chunks = reply.chunks(step, first=step.choice > opened)
            opened = step.choice
            if step.finish_reason:
                done.append(step)
            for place, chunk in enumerate(chunks):
                last = len(done) == choices and place == len(chunks) - 1
                yield _event(reply.chunk(chunk, **more, **(
                    closing if last and not with_usage else {})))
            step = await _in_thread(next, steps, None)
        if with_usage:
            yield _event(reply.chunk([], usage=usage(done), **closing))
        yield "data: [DONE]\n\n"
    except Exception as error:
        yield _event(_as_api_error(error).body())
    finally:
        with anyio.CancelScope(shield=True):
            await _in_thread(steps.close)


async def _collect(request: Request, steps: Iterator[Step]) -> list[Step] | None:
    """All steps, or None when the client left before the last."""
    gone = threading.Event()

    def collect() -> list[Step] | None:
        done = []
        with contextlib.closing(steps):
            for step in steps:
                if gone.is_set():
                    return None
                done.append(step)
        return done

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone.set()

    watcher = asyncio.create_task(watch())
    try:
        return await _in_thread(collect)
    finally:
        watcher.cancel()


async def _in_thread(function: Callable[..., _T], *arguments: Any) -> _T:
    return await anyio.to_thread.run_sync(functools.partial(function, *arguments),
                                          limiter=_no_limit)


async def _json_body(request: Request) -> dict[str, Any]:
    kind = request.headers.get("content-type", "application/json")
    if kind.split(";")[0].strip().lower() != "application/json":
        raise ApiError(f"the content type is {kind!r}: send JSON, and Content-Type: "
                       "application/json", code="invalid_content_type")
    return read_json(await request.body())


def _as_api_error(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, CapacityExceeded):
        return ApiError(str(error), code="capacity_exceeded", status=503,
                        headers={"Retry-After": RETRY_AFTER_SECONDS})
    _log.error("a request failed", exc_info=error)
    return ApiError("the server failed on this request; its log says where", code="internal_error",
                    status=500)


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _http_error(request: Request, error: Exception) -> Response:
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    fault = ApiError(f"{request.method} {request.url.path}: {error.detail}. POST "
                     "/v1/chat/completions or /v1/completions, GET /v1/models or /health",
                     code=code, status=error.status_code, headers=error.headers)
    return JSONResponse(fault.body(), fault.status, headers=fault.headers)


def _nobody_listens() -> Response:
    return Response(status_code=499)


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"
