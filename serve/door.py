"""What every HTTP request passes first: its id, its record, the key, and the end of the server."""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Sequence

from anyio.to_thread import run_sync
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .engine import Engine
from .errors import ApiError
from .metrics import Metrics
from .requestlog import RequestRecord

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/metrics"})
RETRY_AFTER_SECONDS = "5"
SANE_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class Drain:
    """The end of a server: first no new requests, then none at all.

    Attributes:
      begun: whether new requests are refused.
      ended: whether those that were there are ended too.
      open: requests that are there.
    """

    def __init__(self, engine: Engine):
        self.begun = self.ended = False
        self.open = 0
        self._engine = engine

    def begin(self) -> None:
        """Refuse new requests; those that are there go on."""
        self.begun = True

    async def end(self) -> None:
        """End whatever still runs or waits; it gets `shutting_down`."""
        self.ended = True
        await run_sync(self._engine.close)


class Door:
    """ASGI middleware in front of all that costs something or is logged.

    Args:
      app: what is behind it.
      keys: one of these must be sent as a bearer token to /v1; none: everyone may come in.
      model: the name of the model served.
      metrics: what requests are counted in.
      drain: whether the server is about to end.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], model: str, metrics: Metrics,
                 drain: Drain):
        self._app, self._keys = app, [key.encode() for key in keys]
        self._model, self._metrics, self._drain = model, metrics, drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        given = headers.get("x-request-id", "")
        record = RequestRecord(given if SANE_ID.fullmatch(given) else uuid.uuid4().hex, path,
                               self._model, self._metrics)
        scope.setdefault("state", {})["record"] = record

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.id
            await send(message)

        if path in OPEN_PATHS:
            await self._app(scope, receive, answer)
            return
        self._drain.open += 1
        try:
            fault = self._refusal(headers)
            if fault is None:
                await self._app(scope, receive, answer)
            else:
                await refusal(record, fault)(scope, receive, answer)
        finally:
            self._drain.open -= 1
            record.close()

    def _refusal(self, headers: Headers) -> ApiError | None:
        if self._keys and not self._is_known(headers.get("authorization", "")):
            return ApiError("the API key is missing or wrong: send one that the server was started "
                            "with, as Authorization: Bearer KEY", code="invalid_api_key",
                            status=401, headers={"WWW-Authenticate": "Bearer"})
        return shutting_down() if self._drain.begun else None

    def _is_known(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        offered, known = given.strip().encode("latin-1"), False
        for key in self._keys:  # all of them, so that the time tells nothing
            known |= hmac.compare_digest(key, offered)
        return known and scheme.lower() == "bearer"


def shutting_down() -> ApiError:
    """The 503 of a server that ends."""
    return ApiError(f"the server is shutting down: send the request again in "
                    f"{RETRY_AFTER_SECONDS} s", code="shutting_down", status=503,
                    headers={"Retry-After": RETRY_AFTER_SECONDS})


def refusal(record: RequestRecord, fault: ApiError) -> JSONResponse:
    """A fault as the whole answer, noted in the request's record."""
    record.failed(fault.code or f"http_{fault.status}")
    return JSONResponse(fault.body(), fault.status, headers=fault.headers)
