"""How models write reasoning and tool calls; the chat template tells which way is a model's.

Gemma 3 has no format for calls, only code in a fence: its calls stay content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

from kvfunc.models.chat import ChatTemplate

from .harmony import Harmony
from .parsing import (
    Call,
    Calls,
    Content,
    Event,
    Reader,
    Reasoning,
    closing,
    is_object,
    read_call,
    read_calls,
    skip_space,
)
from .text import claimed

LONGEST_NAME = 256  # characters between a marker and the arguments


class Reading(NamedTuple):
    """How the answers to one request are read."""

    markers: tuple[str, ...]  # control tokens whose text readers need
    reader: Callable[[], Reader]  # makes one for an answer


def reading(template: ChatTemplate, prompt: str, with_calls: bool) -> Reading | None:
    """How an answer is read; None where all of it is content.

    Args:
      template: of the model.
      prompt: the rendered text before the answer.
      with_calls: whether calls may come: else what looks like one is content.
    """
    source = template.source
    if "<|channel|>" in source and "<|message|>" in source:
        return Reading(Harmony.MARKERS, lambda: Harmony(with_calls))
    tags = template.thinking if template.thinking[1] in source else None
    kind = next((kind for kind in (Mistral, Hermes, Llama)
                 if any(sign in source for sign in kind.SIGNS)), None) if with_calls else None
    if tags is None:
        return kind and Reading(kind.MARKERS, kind)
    opened = prompt.rstrip().endswith(tags[0])
    return Reading((*tags, *(kind.MARKERS if kind else ())),
                   lambda: Thinking(tags, opened, kind() if kind else Plain()))


class Plain:
    """All of the answer is content."""

    def push(self, text: str) -> list[Event]:
        """The text as content."""
        return [Content(text)] if text else []

    def end(self) -> list[Event]:
        """Nothing is held back."""
        return []


class Thinking:
    """Reasoning between two tags at the answer's start; what follows is for another reader.

    Beside the tags, the newline behind the first, that before the second and up to two behind it
    are taken for markers, as templates print them. Without the second tag all is reasoning.

    Args:
      tags: around the reasoning.
      opened: whether the prompt ends with the first.
      rest: reads what follows.
    """

    def __init__(self, tags: tuple[str, str], opened: bool, rest: Reader):
        self._open, self._close = tags
        self._rest = rest
        self._held = ""
        self._state = self._opened if opened else self._before

    def push(self, text: str) -> list[Event]:
        """What became certain with this text."""
        return self._read(text, last=False)

    def end(self) -> list[Event]:
        """What is left when no text follows."""
        return [*self._read("", last=True), *self._rest.end()]

    def _read(self, text: str, last: bool) -> list[Event]:
        self._held += text
        events: list[Event] = []
        state = None
        while state != self._state:
            state = self._state
            events += state(last)
        return events

    def _before(self, last: bool) -> list[Event]:
        begun = self._held.lstrip()
        if begun.startswith(self._open):
            self._held = begun[len(self._open):]
            self._state = self._opened
        elif last or not self._open.startswith(begun):
            self._state = self._behind
        return []

    def _opened(self, last: bool) -> list[Event]:
        if self._held or last:
            self._held = self._held.removeprefix("\n")
            self._state = self._inside
        return []

    def _inside(self, last: bool) -> list[Event]:
        thought, tag, behind = self._held.partition(self._close)
        if tag:
            self._held, self._state = behind, self._closed
            thought = thought.removesuffix("\n")
        else:
            keep = 0 if last else claimed(self._held, (self._close, "\n" + self._close))
            thought = self._held[:len(self._held) - keep]
            self._held = self._held[len(thought):]
        return [Reasoning(thought)] if thought else []

    def _closed(self, last: bool) -> list[Event]:
        begun = self._held.lstrip("\n")
        newlines = len(self._held) - len(begun)
        if last or begun or newlines >= 2:
            self._held = self._held[min(newlines, 2):]
            self._state = self._behind
        return []

    def _behind(self, last: bool) -> list[Event]:
        text, self._held = self._held, ""
        return self._rest.push(text)


class More(Exception):
    """Whether this is a call depends on what follows."""


class Marked:
    """Content, and blocks of calls behind a marker.

    White space between calls, and behind the last if nothing else follows, goes with the markers.
    """

    SIGNS: ClassVar[tuple[str, ...]]  # in the source of a template: its model writes so
    MARKERS: ClassVar[tuple[str, ...]]  # that may be control tokens
    OPENING: ClassVar[str]  # of a block
    LEAD: ClassVar[str] = ""  # goes with the opening where it stands before it
    SHORT_IDS: ClassVar[bool] = False

    def __init__(self) -> None:
        self._calls = Calls(self.SHORT_IDS)
        self._held = ""
        self._is_open = False  # what is held begins a block
        self._after_call = False
        self._searched: tuple[int, int] | None = None  # how far the block's end was looked for

    def push(self, text: str) -> list[Event]:
        """What became certain with this text."""
        self._held += text
        if self._is_open and len(self._held) > LONGEST_NAME and not set(text) & set("}]>"):
            return []  # it ends no block: do not read from its start again
        return self._read(last=False)

    def end(self) -> list[Event]:
        """What is left when no text follows."""
        return self._read(last=True)

    def _read(self, last: bool) -> list[Event]:
        events: list[Event] = []
        while self._held:
            space = len(self._held) - len(self._held.lstrip()) if self._after_call else 0
            mark = self._held.find(self.OPENING, space)
            if self._after_call and mark != space:
                if self.OPENING.startswith(self._held[space:]) and not last:
                    break
                if space == len(self._held):
                    self._held = ""
                self._after_call = False
                continue
            if mark < 0:
                keep = 0 if last else claimed(self._held, (self.OPENING, self.LEAD + self.OPENING))
                events += self._content(len(self._held) - keep)
                break
            if not self._after_call:
                start = mark - len(self.LEAD) * self._held[:mark].endswith(self.LEAD)
                events += self._content(start)
                mark -= start
            try:
                found = self._block(self._held, mark + len(self.OPENING))
            except More:
                found = None
                self._is_open = not last
                if not last:
                    break
            self._is_open, self._after_call = False, found is not None
            self._searched = None
            if found is None:
                events += self._content(mark + len(self.OPENING))
                continue
            calls, stop = found
            for call in calls:
                events += self._calls.events(call)
            self._held = self._held[stop:]
        return events

    def _closed(self, text: str, at: int, bracket: str) -> int | None:
        """Behind what the bracket at this place opens; None if there is none.

        Raises:
          More: if it is not closed yet.
        """
        if at >= len(text):
            raise More
        if text[at] != bracket:
            return None
        self._searched = closing(text, *(self._searched or (at, 0)))
        stop, depth = self._searched
        if depth:
            raise More
        return stop

    def _content(self, length: int) -> list[Event]:
        text, self._held = self._held[:length], self._held[length:]
        return [Content(text)] if text else []

    def _block(self, text: str, at: int) -> tuple[Sequence[Call], int] | None:
        """The calls of the block at the text's start, and where it ends; None if it is none.

        Raises:
          More: if that is not known yet.
        """
        raise NotImplementedError


class Hermes(Marked):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, also of Qwen2.5 and Qwen3."""

    SIGNS = ("<tool_call>",)
    MARKERS = ("<tool_call>", "</tool_call>")
    OPENING, LEAD = "<tool_call>", "\n"

    def _block(self, text: str, at: int) -> tuple[Sequence[Call], int] | None:
        start = skip_space(text, at)
        stop = self._closed(text, start, "{")
        if stop is None:
            return None
        tag, end = "</tool_call>", skip_space(text, stop)
        if tag != text[end:] and tag.startswith(text[end:]):
            raise More
        call = read_call(text[start:stop]) if text.startswith(tag, end) else None
        return call and ([call], end + len(tag))


class Mistral(Marked):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and `[TOOL_CALLS]name[ARGS]{...}`.

    The name may have `[CALL_ID]` and an id behind it.
    """

    SIGNS = ("[TOOL_CALLS]",)
    MARKERS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    OPENING = "[TOOL_CALLS]"
    SHORT_IDS = True
    _HEAD = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?\s*")

    def _block(self, text: str, at: int) -> tuple[Sequence[Call], int] | None:
        start = skip_space(text, at)
        if text[start:start + 1] == "[":
            stop = self._closed(text, start, "[")
            calls = read_calls(text[start:stop])
            return calls and (calls, stop)
        start = text.find("{", at, at + LONGEST_NAME)
        if start < 0:
            if len(text) - at < LONGEST_NAME:
                raise More
            return None
        head = self._HEAD.fullmatch(text, at, start)
        stop = head and self._closed(text, start, "{")
        if not stop or not is_object(text[start:stop]):
            return None
        return [Call(head[1], text[start:stop], head[2])], stop


class Llama(Marked):
    """`{"name": ..., "parameters": {...}}` as the whole answer, also behind `<|python_tag|>`.

    Calls of its built-in tools, which are code, stay content.
    """

    SIGNS = ("<|python_tag|>", '"parameters": ')
    MARKERS = ("<|python_tag|>",)

    def __init__(self) -> None:
        super().__init__()
        self._is_open = True

    def _read(self, last: bool) -> list[Event]:
        call = None
        if self._is_open:
            try:
                call = self._whole(self._held)
                self._is_open = call is not None
            except More:
                call = None
        if self._is_open and not last:
            return []
        if call is None:
            return self._content(len(self._held))
        return self._calls.events(call)

    def _whole(self, text: str) -> Call | None:
        start, (tag,) = skip_space(text, 0), self.MARKERS
        if tag.startswith(text[start:]):
            raise More
        if text.startswith(tag, start):
            start = skip_space(text, start + len(tag))
        stop = self._closed(text, start, "{")
        return read_call(text[start:stop]) if stop and not text[stop:].strip() else None
