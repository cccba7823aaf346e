"""Reads which messages are dropped, and which parts of them, and where gaps are closed (api.md)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvfunc.policies import Part

from .errors import ApiError, invalid, shown

CANONICAL = re.compile("0|[1-9][0-9]{0,18}")
MOST_SEARCHED = 2**26  # characters compared to count the occurrences of one text
PART_KEYS = {"text": ("message", "text", "occurrence"), "part": ("message", "part")}

Dropped = dict[int, tuple[int | Part, ...]]  # by trigger
Messages = Sequence[Mapping[str, Any]]  # as `models.chat.normalised` makes them


def read_drop(drop: Mapping[str, Any], param: str, messages: Messages,
              with_parts: bool = False) -> Dropped:
    """What an object of triggers and lists of message ids drops.

    Args:
      drop: as the client sent it.
      param: what errors call it.
      messages: the history.
      with_parts: whether an id may also be an object that names a part of a message.

    Raises:
      ApiError: for the first id that is none, or that names a text which its message lacks.
    """
    read: Dropped = {}
    for key, ids in drop.items():
        at = f"{param}[{shown(key)}]"
        trigger = _index(key, at)
        if not isinstance(ids, list):
            raise invalid(at, ids, "give a list of message indices")
        found = [_dropped(value, trigger, f"{at}[{place}]", messages, with_parts)
                 for place, value in enumerate(ids)]
        read[trigger] = tuple(item for item in found if item is not None)
    return read


def read_reposition(reposition: Iterable[Any], param: str, messages: int) -> tuple[int, ...]:
    """The messages behind which gaps are closed, of a history of so many messages."""
    before = -1
    for place, value in enumerate(reposition):
        at = f"{param}[{place}]"
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < messages:
            raise invalid(at, value, f"give the index of a message, 0 to {messages - 1}")
        if value <= before:
            raise invalid(at, value, f"indices must increase strictly, and {before} stands before")
        before = value
    return tuple(reposition)


def find_text(text: str, occurrence: int, message: int, content: str, param: str) -> Part:
    """The part of a message that is some text, the so manyeth of those that may overlap."""
    if min(occurrence, len(content)) * len(text) > MOST_SEARCHED:
        raise invalid(param, text, f"occurrence {shown(occurrence)} of a text of {len(text)} "
                                   "characters takes too long to find; give a longer text that "
                                   "occurs less often")
    start = -1
    for _ in range(occurrence):
        start = content.find(text, start + 1)
        if start < 0:
            times = "" if occurrence == 1 else f" {occurrence} times"
            raise invalid(param, text, f"message {message} does not have this text{times}; give a "
                                       "text of its content as it is")
    return Part(message, (start, start + len(text)))


def _dropped(value: Any, trigger: int, param: str, messages: Messages,
             with_parts: bool) -> int | Part | None:
    """The message or its part; None for a part of the future, whose text is not known yet."""
    is_part = with_parts and isinstance(value, dict)
    at = f"{param}.message" if is_part else param
    index = _index(value.get("message") if is_part else value, at)
    if index > trigger:
        raise invalid(at, index if is_part else value,
                      f"message {trigger} cannot drop a later message; give an index up to "
                      f"{trigger}, or use a later trigger")
    return _part(value, index, param, messages, trigger) if is_part else index


def _part(value: dict[str, Any], message: int, param: str, messages: Messages,
          trigger: int) -> Part | None:
    kind = next((kind for kind in PART_KEYS if kind in value), None)
    if kind is None:
        raise invalid(param, value, 'give {"message": 1, "text": "substring", "occurrence": 1} or '
                                    '{"message": 1, "part": "thinking"} for a part of a message')
    for key in value.keys() - {*PART_KEYS[kind]}:
        raise invalid(f"{param}.{key}", value[key],
                      f"beside {kind} there is no such key; leave it out", "unknown_parameter")
    if kind == "part":
        if value["part"] != "thinking":
            raise invalid(f"{param}.part", value["part"], 'give "thinking", or a text')
        return Part(message) if trigger < len(messages) else None
    text, occurrence = value["text"], value.get("occurrence", 1)
    if not isinstance(text, str) or not text:
        raise invalid(f"{param}.text", text, "give some text of the message's content")
    if isinstance(occurrence, bool) or not isinstance(occurrence, int) or occurrence < 1:
        raise invalid(f"{param}.occurrence", occurrence, "give a number from 1")
    if trigger >= len(messages):
        return None
    return find_text(text, occurrence, message, messages[message]["content"], f"{param}.text")


def _index(value: Any, param: str) -> int:
    """A message index: an integer, an integral float or a canonical decimal string."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str) and CANONICAL.fullmatch(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise invalid(param, value, "give a message index: an integer from 0 without leading zeros")
    return value


def hidden(part: Part, messages: Messages, param: str) -> ApiError:
    """The 400 for a part that is in the history and not in the prompt."""
    what = "thinking"
    if part.chars is not None:
        what = f"the text {shown(messages[part.message]['content'][slice(*part.chars)])}"
    return ApiError(f"{param}: message {part.message} is printed without {what} by the chat "
                    "template, so that there is nothing to drop; leave it out", param=param,
                    code="invalid_value")
