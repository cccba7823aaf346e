"""Generated text taken apart: content, reasoning and tool calls, in the fields of OpenAI's API.

What a reader gives out depends on the text alone, not on how it is cut into pieces. A call is given
out when it is complete and well formed, its arguments in the very characters that the model wrote;
what only looks like a call, or breaks off, is content. So nothing is lost but the markers around
reasoning and calls. `dialects` has a reader for every format.
"""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from typing import Any, NamedTuple, NoReturn, Protocol, runtime_checkable


@dataclasses.dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclasses.dataclass(frozen=True)
class Reasoning:
    """Text of the model's thinking."""

    text: str


@dataclasses.dataclass(frozen=True)
class CallStart:
    """A tool call begins."""

    index: int  # among the answer's calls
    id: str
    name: str


@dataclasses.dataclass(frozen=True)
class CallArguments:
    """A stretch of a call's arguments, as the model wrote them."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments


@runtime_checkable
class Reader(Protocol):
    """Reads one answer as it comes."""

    def push(self, text: str) -> list[Event]:
        """What became certain with this text."""
        ...

    def end(self) -> list[Event]:
        """What is left when no text follows."""
        ...


class Call(NamedTuple):
    """A call as the model wrote it."""

    name: str
    arguments: str  # a JSON object
    id: str | None = None  # None where the model gave none


class Calls:
    """Numbers an answer's calls and names those that have no id.

    Args:
      short_ids: whether ids are nine letters and digits, as Mistral's templates demand.
    """

    def __init__(self, short_ids: bool = False):
        self._short_ids = short_ids
        self._count = 0

    def events(self, call: Call) -> list[Event]:
        """The events of the next call."""
        index, self._count = self._count, self._count + 1
        made = uuid.uuid4().hex
        call_id = call.id or (made[:9] if self._short_ids else f"call_{made[:24]}")
        return [CallStart(index, call_id, call.name), CallArguments(index, call.arguments)]


def read_call(text: str) -> Call | None:
    """The call that a JSON object describes; None if it is not one.

    Args:
      text: `{"name": ..., "arguments": {...}}`, also with `parameters` and an `id`.
    """
    try:
        members = _members(text, 0)
    except (ValueError, RecursionError):
        return None
    name, call_id = (members.get(key, (None, ""))[0] for key in ("name", "id"))
    arguments, written = members.get("arguments") or members.get("parameters") or (None, "")
    if not _is_word(name) or not isinstance(arguments, dict):
        return None
    return Call(name, written, call_id if _is_word(call_id) else None)


def read_calls(text: str) -> list[Call] | None:
    """The calls in a JSON array; None if it is empty or some entry is not a call."""
    calls, at = [], skip_space(text, 1)
    if text[-1] != "]":
        return None
    while at < len(text) - 1:
        stop, _ = closing(text, at)
        call = read_call(text[at:stop])
        if call is None:
            return None
        calls.append(call)
        at = skip_space(text, stop)
        if text[at] == ",":
            at = skip_space(text, at + 1)
            if text[at] == "]":
                return None
        elif at != len(text) - 1:
            return None
    return calls or None


def is_object(text: str) -> bool:
    """Whether a text is a JSON object and nothing else."""
    try:
        return isinstance(_STRICT.decode(text), dict)
    except (ValueError, RecursionError):
        return False


def closing(text: str, at: int, depth: int = 0) -> tuple[int, int]:
    """Behind the bracket that closes the one at `at`, and 0.

    Where that has not come: from where to search on when it may have, and how deep it is there.
    """
    for found in _STRUCTURE.finditer(text, at):
        mark = found[0]
        if mark[0] == '"':
            if not found[1]:
                return found.start(), depth  # a string that has no end
        else:
            depth += 1 if mark in "{[" else -1
            if depth == 0:
                return found.end(), 0
        at = found.end()
    return at, depth


def skip_space(text: str, at: int) -> int:
    """The next place that is no white space."""
    return _SPACE.match(text, at).end()


def _members(text: str, at: int) -> dict[str, tuple[Any, str]]:
    """The members of a JSON object: of each the value, and the text of it."""
    if not isinstance(_STRICT.decode(text), dict):
        return {}
    found, at = {}, skip_space(text, skip_space(text, at) + 1)
    while text[at] != "}":
        key, at = _STRICT.raw_decode(text, at)
        start = skip_space(text, skip_space(text, at) + 1)  # behind the colon
        value, stop = _STRICT.raw_decode(text, start)
        found[key] = value, text[start:stop]
        at = skip_space(text, stop)
        if text[at] == ",":
            at = skip_space(text, at + 1)
    return found


def _is_word(value: Any) -> bool:
    """Whether it can be a name: what cannot be printed, such as half a surrogate pair, is none."""
    return isinstance(value, str) and value.isprintable() and value.strip() == value != ""


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON: write a number")


_SPACE = re.compile(r"[ \t\r\n]*")
_STRUCTURE = re.compile(r'"(?:[^"\\]++|\\.)*+("?)|[{}\[\]]', re.DOTALL)
_STRICT = json.JSONDecoder(parse_constant=_refuse)
