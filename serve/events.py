"""From messages to tokens: everything a request can drop becomes (boundary, token ranges) here.

Nothing below this file knows messages. A message's events stand right behind its last token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvfunc.history import Drop, Event, History, Range, Repos
from kvfunc.models.chat import NOBODY
from kvfunc.policies import Part, Schedule, Unit

from .interface import Plan
from .spans import Owners, runs, spans

Messages = Sequence[Mapping[str, Any]]


def units(messages: Messages, owner: Owners) -> list[Unit]:
    """What a policy is shown of the messages."""
    counts = np.bincount(owner[owner != NOBODY], minlength=len(messages) + 1)
    ends = _ends(owner, range(len(messages)))
    return [Unit(message["role"], int(count), end)
            for message, count, end in zip(messages, counts, ends, strict=False)]


def events(schedule: Schedule, messages: int, owner: Owners,
           parts: Mapping[Part, Iterable[Range]] | None = None,
           thinking: Iterable[tuple[int, Range]] = ()) -> list[Event]:
    """The events of a schedule over a prompt whose owners increase.

    At one boundary the drops are one, and the repos comes last. Triggers past the last of the
    `messages` are ignored, messages without a token are nothing to drop.

    Args:
      schedule: what is dropped behind which message, and where gaps are closed.
      messages: how many there are.
      owner: of each token.
      parts: the tokens of every part of a message that the schedule drops.
      thinking: (boundary, tokens) of what is dropped besides.
    """
    triggers = sorted(trigger for trigger in schedule.drop if trigger < messages)
    ranges: dict[int, list[Range]] = {}
    tokens = {**spans(owner), **(parts or {})}
    for trigger, at in zip(triggers, _boundaries(owner, triggers), strict=True):
        ranges.setdefault(at, []).extend(
            span for item in schedule.drop[trigger] for span in tokens.get(item, ()))
    for at, span in thinking:
        ranges.setdefault(at, []).append(span)
    moves = set(_boundaries(owner, schedule.reposition))
    made: list[Event] = []
    for at in sorted(ranges.keys() | moves):
        if ranges.get(at):
            made.append(Drop(at, tuple(ranges[at])))
        if at in moves:
            made.append(Repos(at))
    return made


def broken_calls(schedule: Schedule, messages: Messages) -> list[str]:
    """Warnings where a tool call is dropped and its result is not, or the reverse.

    A result without an id, or whose call has none, answers the latest call. A result whose whole
    content is dropped is dropped; other parts of messages break nothing.
    """
    dropped = {item.message if isinstance(item, Part) else item
               for trigger, items in schedule.drop.items() if trigger < len(messages)
               for item in items if not isinstance(item, Part) or _is_result(item, messages)}
    calls: dict[str | None, int] = {}
    unnamed: int | None = None
    broken: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for index, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            calls[call.get("id")] = calls[None] = index
            unnamed = unnamed if call.get("id") else index
        call = calls.get(message.get("tool_call_id"), unnamed)
        if message["role"] == "tool" and call is not None and (call in dropped) != (
                index in dropped):
            broken[call in dropped].append((call, index))
    return [f"{gone} dropped, but {left} not: " + ", ".join(
                f"the call in message {call} and its result in message {index}"
                for call, index in broken[call_is_gone])
            for call_is_gone, gone, left in ((False, "tool results are", "their calls are"),
                                             (True, "tool calls are", "their results are"))
            if broken[call_is_gone]]


def _is_result(part: Part, messages: Messages) -> bool:
    message = messages[part.message]
    return message["role"] == "tool" and part.chars == (0, len(message["content"]))


def describe(plan: Plan, history: History, messages: Messages, owner: Owners,
             warnings: Iterable[str]) -> dict[str, Any]:
    """The `cache.plan` object of api.md."""
    return {
        "object": "cache.plan",
        "messages": [_describe_span(*span, messages) for span in runs(owner)],
        "events": [{"kind": "drop", "at": event.at, "ranges": [list(r) for r in event.ranges]}
                   if isinstance(event, Drop) else {"kind": "repos", "at": event.at}
                   for event in history.events],
        "runs": [{"range": [run.start, run.stop], "class": run.kind, "position": run.position}
                 for run in plan.runs],
        "prompt_tokens": history.tokens,
        "live_tokens": history.live,
        "next_position": history.next_position,
        "warnings": list(warnings),
    }


def _describe_span(owner: int, start: int, stop: int, messages: Messages) -> dict[str, Any]:
    index, role, name = None, None, "nobody"
    if owner == len(messages):
        role, name = "assistant", "generation"
    elif owner != NOBODY:
        index, role, name = owner, messages[owner]["role"], "message"
    return {"index": index, "role": role, "tokens": stop - start, "range": [start, stop],
            "owner": name}


def _ends(owner: Owners, indices: Iterable[int]) -> list[int]:
    """Behind the last token of each message, or of the nearest one before that has a token."""
    owned = np.flatnonzero(owner != NOBODY)
    counts = np.searchsorted(owner[owned], np.array(list(indices), np.int64), side="right")
    return [int(owned[count - 1]) + 1 if count else 0 for count in counts]


def _boundaries(owner: Owners, indices: Sequence[int]) -> list[int]:
    """Behind the last token of each message; before the next one, where it prints nothing.

    Text of nobody may stand between the two, and what a grown history adds stands behind it.
    """
    owned = np.flatnonzero(owner != NOBODY)
    following = np.append(owned, len(owner))[
        np.searchsorted(owner[owned], np.array(indices, np.int64), side="right")]
    return [end if end and owner[end - 1] == index else int(start)
            for index, end, start in zip(indices, _ends(owner, indices), following, strict=True)]
