"""The format in which GPT-OSS answers: messages on channels, some of them to functions."""

from __future__ import annotations

import re
from typing import NamedTuple

from .parsing import Call, Calls, Content, Event, Reasoning, is_object
from .text import claimed


class _Message(NamedTuple):
    """A message of Harmony whose header has been read."""

    header: str
    function: str | None  # whom it calls
    made: type[Content] | type[Reasoning]  # of its body
    is_raw: bool = False  # markers are content too


class Harmony:
    """GPT-OSS: messages of a header, which names a channel and perhaps a function, and a body.

    Reasoning is what comes on the channel `analysis`. A message to something else than a function,
    or with a header of another form, is given back as it is.

    Args:
      with_calls: whether messages to functions are calls.
    """

    MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>",
               "<|return|>")
    _BEGINNINGS = ("<|start|>", "<|channel|>", "to=")  # of a header; the first begins in the prompt
    _ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")  # of a body
    _ROLE, _TO = r"\s*(?:<\|start\|>(?:assistant)?)?", r"(?:\s*to=([^\s<]+))?\s*"
    _CHANNEL = r"(?:<\|channel\|>(analysis|commentary|final)?)?"
    _FORM = r"(?:<\|constrain\|>[a-z]+|json|code)?\s*"
    _HEADER = re.compile(_ROLE + _TO + _CHANNEL + _TO + _FORM + r"<\|message\|>")
    _BROKEN_OFF = re.compile(_ROLE + r"\s*" + _CHANNEL + r"\s*")  # nothing but markers
    _FUNCTION = re.compile(r"functions\.(.+)")

    def __init__(self, with_calls: bool):
        self._with_calls = with_calls
        self._calls = Calls()
        self._held = ""
        self._message: _Message | None = None  # None before its header is complete

    def push(self, text: str) -> list[Event]:
        """What became certain with this text."""
        self._held += text
        return self._read(last=False)

    def end(self) -> list[Event]:
        """What is left when no text follows."""
        return self._read(last=True)

    def _read(self, last: bool) -> list[Event]:
        events: list[Event] = []
        while self._held or (last and self._message):
            found = self._begin(last) if self._message is None else self._body(last)
            if found is None:
                break
            events += found
        return events

    def _begin(self, last: bool) -> list[Event] | None:
        """Read a header; None if more of it must come."""
        begun = self._held.lstrip()
        if not begun.startswith(self._BEGINNINGS):
            if not last and any(mark.startswith(begun) for mark in self._BEGINNINGS):
                return None
            if not begun:
                self._held = ""
                return []
            self._message = _Message("", None, Content)
            return []
        header, mark, behind = self._held.partition("<|message|>")
        if not mark:
            if not last:
                return None
            self._held = ""
            return [] if self._BROKEN_OFF.fullmatch(header) else [Content(header)]
        header, self._held = header + mark, behind
        found = self._HEADER.fullmatch(header)
        to = found and (found[1] or found[3])
        function = to and self._with_calls and self._FUNCTION.fullmatch(to)
        if found is None or (to and not function):
            self._message = _Message(header, None, Content, is_raw=True)
            return [Content(header)]
        name = function[1] if function else None
        is_thought = found[2] == "analysis" and not name
        self._message = _Message(header, name, Reasoning if is_thought else Content)
        return []

    def _body(self, last: bool) -> list[Event] | None:
        """Read of a body what is certain; None if that is nothing."""
        message = self._message
        places = [(place, mark) for mark in self._ENDS if (place := self._held.find(mark)) >= 0]
        place, mark = min(places, default=(len(self._held), ""))
        is_whole = last or bool(mark)
        if not is_whole:
            place -= claimed(self._held, self._ENDS)
            if message.function or not place:
                return None
        text, self._held = self._held[:place], self._held[place:]
        if mark != "<|start|>":  # that one belongs to the next header
            self._held = self._held.removeprefix(mark)
            text += mark if message.is_raw else ""
        if is_whole:
            self._message = None
        if message.function:
            if is_object(text):
                return self._calls.events(Call(message.function, text.strip()))
            text = message.header + text + mark.removeprefix("<|start|>")
        return [message.made(text)] if text else []
