"""Every fault as an answer in OpenAI's envelope: the parameter, its value and the remedy."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError


class ApiError(Exception):
    """An answer in OpenAI's error envelope."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None,
                 status: int = 400, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.param, self.code, self.status, self.headers = param, code, status, headers

    def body(self) -> dict[str, Any]:
        """The JSON object that the client gets."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param,
                          "code": self.code}}


def invalid(param: str, value: Any, remedy: str, code: str = "invalid_value") -> ApiError:
    """The 400 for one bad value."""
    return ApiError(f"{param} is {shown(value)}: {remedy}", param=param, code=code)


def unsupported(param: str, value: Any, remedy: str) -> ApiError:
    """The 400 for a value that OpenAI's API or api.md knows and this version does not build."""
    return invalid(param, value, f"not supported yet; {remedy}", "unsupported_value")


def read_json(body: bytes) -> dict[str, Any]:
    """The JSON object in a request's body, strictly: no NaN, no key twice, no broken Unicode."""
    try:
        value = json.loads(body.decode(), object_pairs_hook=_unique,
                           parse_constant=_refuse_constant)
        if b"\\u" in body:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(f"the body is {shown(value)}: send a JSON object", code="invalid_json")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {shown(twice)} stands twice in one object, merge the two")
    return made


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def first_fault(error: ValidationError, body: dict[str, Any]) -> ApiError:
    """The deepest fault that pydantic found, with a parameter path that leads through `body`."""
    faults = [(_path(fault["loc"], body), fault) for fault in error.errors(include_url=False)]
    path, fault = max(faults, key=lambda found: len(found[0]))
    param = _param(path)
    if fault["type"] == "missing":
        return ApiError(f"{param} is missing: give it", param=param,
                        code="missing_required_parameter")
    if fault["type"] == "extra_forbidden":
        return invalid(param, fault["input"], "there is no such parameter; leave it out",
                       "unknown_parameter")
    remedies = dict.fromkeys(other["msg"][:1].lower() + other["msg"][1:]
                             for where, other in faults if where == path)
    return invalid(param, fault["input"], " or ".join(remedies))


def _path(loc: tuple[str | int, ...], body: Any) -> list[str | int]:
    """The part of pydantic's location that is in the body: it names branches of unions as well."""
    path: list[str | int] = []
    value = body
    for place, step in enumerate(loc):
        inside = (isinstance(value, dict) and step in value) or (
            isinstance(value, list) and isinstance(step, int))
        if inside:
            value = value[step]
        if inside or (isinstance(value, dict) and place == len(loc) - 1):
            path.append(step)
    return path


def _param(path: list[str | int]) -> str:
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif step.isidentifier():
            text += f".{step}"
        else:
            text += f"[{shown(step)}]"
    return text.removeprefix(".")


def shown(value: Any) -> str:
    """A value as the client wrote it, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False).encode(errors="replace").decode()
    return text if len(text) <= 80 else f"{text[:79]}…"
