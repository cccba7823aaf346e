"""The HTTP application: OpenAI's API over one engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from anyio.to_thread import run_sync
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvfunc.models.chat import ChatTemplate

from . import protocol
from .answer import Choice, Step, answer
from .door import RETRY_AFTER_SECONDS, Door, Drain, refusal, shutting_down
from .engine import Engine
from .errors import ApiError, read_json
from .interface import CapacityExceeded, EngineFailed, QueueFull, ShuttingDown, TimedOut
from .metrics import Metrics
from .prepare import Preparation
from .requestlog import CLIENT_LEFT, RequestRecord
from .responses import ChatReply, CompletionReply, Reply

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def create_app(engine: Engine, chat: ChatTemplate, *, warnings: Sequence[str] = (),
               api_keys: Sequence[str] = (), request_timeout: float | None = None) -> Starlette:
    """The application; `state.drain` of it ends it gently.

    Args:
      engine: generates tokens; it is started and closed with the application.
      chat: renders messages to tokens and their owners.
      warnings: what every answer's `warnings` shall say, such as a model loaded with a reservation.
      api_keys: one of them must come with every request except for health and metrics; none:
        everyone is served.
      request_timeout: seconds that a request may take; None for no end. A request may ask for less.
    """
    drain, metrics = Drain(engine), Metrics(engine.name, engine.stats)
    api = _Api(engine, chat, tuple(warnings), drain, metrics, request_timeout)

    @contextlib.asynccontextmanager
    async def running(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await run_sync(engine.close)

    web = Starlette(
        lifespan=running,
        middleware=[Middleware(Door, keys=api_keys, model=engine.name, metrics=metrics,
                               drain=drain)],
        routes=[
            Route("/health", api.health),
            Route("/health/live", api.live),
            Route("/health/ready", api.ready),
            Route("/metrics", api.metrics),
            Route("/v1/models", api.models),
            Route("/v1/models/{name:path}", api.model),
            Route("/v1/chat/completions", api.chat_completions, methods=["POST"]),
            Route("/v1/completions", api.completions, methods=["POST"]),
        ],
        exception_handlers={HTTPException: _http_error},
    )
    web.state.drain = drain
    return web


def _guarded(endpoint: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """Answer every failure in OpenAI's envelope."""

    @functools.wraps(endpoint)
    async def guarded(api: _Api, request: Request) -> Response:
        try:
            return await endpoint(api, request)
        except ClientDisconnect:
            _record(request).failed(CLIENT_LEFT)
            return _nobody_listens()
        except Exception as error:
            return refusal(_record(request), _as_api_error(error))

    return guarded


class _Api:
    def __init__(self, engine: Engine, chat: ChatTemplate, warnings: tuple[str, ...], drain: Drain,
                 metrics: Metrics, timeout: float | None):
        self._engine, self._warnings = engine, warnings
        self._prepare = Preparation(engine, chat, warnings)
        self._drain, self._metrics, self._timeout = drain, metrics, timeout
        self._created = int(time.time())

    async def health(self, request: Request) -> Response:
        status = "ok" if self._engine.alive else "failed"
        if status == "ok" and self._drain.begun:
            status = "draining"
        return JSONResponse({"status": status, "engine": await run_sync(self._engine.stats)},
                            503 if status == "failed" else 200)

    async def live(self, request: Request) -> Response:
        return _health(None if self._engine.alive else "the engine's thread has died")

    async def ready(self, request: Request) -> Response:
        if not self._engine.alive:
            return await self.live(request)
        return _health("the server is shutting down" if self._drain.begun else None)

    async def metrics(self, request: Request) -> Response:
        return Response(await run_sync(self._metrics.text), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    @_guarded
    async def model(self, request: Request) -> Response:
        self._prepare.check_model(request.path_params["name"])
        return JSONResponse(self._card())

    @_guarded
    async def chat_completions(self, request: Request) -> Response:
        body = await _json_body(request)
        prepared = await run_sync(self._prepare.chat, body)
        if prepared.plan is not None:
            return JSONResponse(prepared.plan)
        asked = prepared.asked
        reply = ChatReply(self._engine.name, self._engine.tokenizer, asked.logprobs or False,
                          asked.choices, prepared.reading)
        return await self._respond(request, asked, prepared.choices, reply, prepared.warnings)

    @_guarded
    async def completions(self, request: Request) -> Response:
        body = await _json_body(request)
        asked, choices = await run_sync(self._prepare.completion, body)
        reply = CompletionReply(self._engine.name, self._engine.tokenizer,
                                asked.logprobs is not None, asked.choices)
        return await self._respond(request, asked, choices, reply, self._warnings)

    def _card(self) -> dict[str, Any]:
        engine = self._engine
        return {"id": engine.name, "object": "model", "created": self._created,
                "owned_by": "kvfunc", "max_model_len": engine.context_length,
                "kv_bytes_per_token": engine.kv_bytes_per_token}

    async def _respond(self, request: Request, asked: protocol.Request, choices: Sequence[Choice],
                       reply: Reply, warnings: Sequence[str]) -> Response:
        if await request.is_disconnected():  # while the prompt was prepared
            raise ClientDisconnect
        if self._drain.ended:
            raise ShuttingDown
        record = _record(request)
        record.stream = bool(asked.stream)
        limits = [limit for limit in (asked.timeout, self._timeout) if limit is not None]
        steps = answer(self._engine, choices, record, min(limits, default=None))
        if not asked.stream:
            done = await _while_connected(request, _collect(steps))
            return JSONResponse(reply.whole(done, warnings))
        first = await _while_connected(request, anext(steps))  # a failure is a plain HTTP error
        return _EventStream(steps, _stream(steps, first, len(choices), reply,
                                           asked.wants_usage_chunk, warnings, record))


class _EventStream(StreamingResponse):
    """Server-sent events; the steps behind them are closed at once when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, steps: AsyncGenerator[Step], events: AsyncGenerator[str]):
        super().__init__(events, headers={"Cache-Control": "no-cache"})
        self._steps = steps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._steps), contextlib.aclosing(self.body_iterator):
            await super().__call__(scope, receive, send)


async def _stream(steps: AsyncIterator[Step], first: Step, choices: int, reply: Reply,
                  with_usage: bool, warnings: Sequence[str],
                  record: RequestRecord) -> AsyncIterator[str]:
    more = {"usage": None} if with_usage else {}
    closing = {"warnings": list(warnings)} if warnings else {}
    opened: set[int] = set()
    done: list[Step] = []
    step: Step | None = first
    try:
        while step is not None:
            chunks = reply.chunks(step, first=step.choice not in opened)
            opened.add(step.choice)
            if step.finish_reason:
                done.append(step)
            for place, chunk in enumerate(chunks):
                last = len(done) == choices and place == len(chunks) - 1
                yield _event(reply.chunk(chunk, **more, **(
                    closing if last and not with_usage else {})))
            step = await anext(steps, None)
        if with_usage:
            yield _event(reply.chunk([], usage=reply.usage(done), **reply.cache(done), **closing))
        yield "data: [DONE]\n\n"
    except Exception as error:
        fault = _as_api_error(error)
        record.failed(fault.code)
        yield _event(fault.body())


async def _collect(steps: AsyncIterator[Step]) -> list[Step]:
    return [step async for step in steps]


async def _while_connected(request: Request, work: Awaitable[_T]) -> _T:
    """Await the work; if the client leaves first, cancel it and raise ClientDisconnect."""

    async def departure() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watching = asyncio.ensure_future(departure())
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait([watching, working], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.wait([watching, working])


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
    if isinstance(error, QueueFull):
        return ApiError(str(error), code="queue_full", status=503,
                        headers={"Retry-After": str(error.retry_after)})
    if isinstance(error, TimedOut):
        return ApiError(str(error), code="timeout", status=504)
    if isinstance(error, ShuttingDown):
        return shutting_down()
    if isinstance(error, EngineFailed):
        return ApiError(str(error), code="engine_failed", status=503)
    _log.error("a request failed", exc_info=error)
    return ApiError("the server failed on this request; its log says where", code="internal_error",
                    status=500)


async def _http_error(request: Request, error: Exception) -> Response:
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    fault = ApiError(f"{request.method} {request.url.path}: {error.detail}. POST "
                     "/v1/chat/completions or /v1/completions, GET /v1/models or /health",
                     code=code, status=error.status_code, headers=error.headers)
    return refusal(_record(request), fault)


def _record(request: Request) -> RequestRecord:
    return request.state.record


def _health(fault: str | None) -> Response:
    return JSONResponse({"status": "ok"} if fault is None else
                        {"status": "unavailable", "reason": fault}, 200 if fault is None else 503)


def _nobody_listens() -> Response:
    return Response(status_code=499)


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"
