"""AKV's spelling of events (`drop_message`, `drop_rule`, `reposition`), read into a `Schedule`.

Wherever that project's rules and ours differ (what a preamble is, which keys the cache has), ours
hold; how a request is written, and what is refused in it, is theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from kvfunc.policies import Part

from .drops import Dropped, Messages, find_text, read_drop
from .errors import invalid
from .messages import Closed, Message

TYPES = ("message_drop", "text_drop", "keep_text_drop", "thinking_drop")
MOST_MESSAGES = 4096
MOST_SELECTORS = 1024  # of one message
MOST_PATTERNS, MOST_PATTERN_BYTES, MOST_TEXT_BYTES = 4096, 2**20, 2**24  # of one request
FINGERPRINT = ("role", "reasoning_content", "tool_calls", "name", "tool_call_id")


class MessageDrop(Closed):
    """Whole messages, each by its index."""

    type: Literal["message_drop"]
    drop_messages: dict[str, Any]


class Selector(Closed):
    """What is dropped of one message: texts of its content."""

    role: str
    content: str | Annotated[list[str], Field(max_length=MOST_SELECTORS)] | None = None
    occurrence: int | list[int] | None = None


class TextDrop(Closed):
    """Texts, one entry for each message."""

    type: Literal["text_drop"]
    drop_messages: Annotated[list[Selector], Field(max_length=MOST_MESSAGES)]


class KeptMessage(Message):
    """A message of the whole history."""

    role: Literal["system", "user", "assistant", "tool"]


class KeepTextDrop(Closed):
    """Everything but what the request's `messages` still show of `full_messages`."""

    type: Literal["keep_text_drop"]
    full_messages: Annotated[list[KeptMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    force: bool = False


class ThinkingDrop(Closed):
    """The thinking of every assistant message, at that message's end."""

    type: Literal["thinking_drop"]


DropRule = Annotated[MessageDrop | TextDrop | KeepTextDrop | ThinkingDrop,
                     Field(discriminator="type")]


def check_rule(rule: Any) -> None:
    """Refuse a rule of no known type, and keys that are reserved."""
    if not isinstance(rule, dict):
        return
    if rule.get("type") not in TYPES:
        raise invalid("drop_rule.type", rule.get("type"), f"use {', '.join(TYPES[:-1])} or "
                                                          f"{TYPES[-1]}")
    for key in rule:
        if key.startswith("_"):
            raise invalid(f"drop_rule.{key}", rule[key], "keys that begin with _ are reserved; "
                                                         "leave it out", "unknown_parameter")


def read_rule(rule: DropRule, messages: Messages, visible: Messages,
              tags: tuple[str, str]) -> Dropped:
    """What a rule drops, by trigger.

    Args:
      rule: of the right form.
      messages: the history that the rule is about, as `models.chat.normalised` makes it.
      visible: the request's own messages: the same, or what a keep_text_drop keeps of them.
      tags: the model's own around its thinking.

    Raises:
      ApiError: for a rule that does not fit the history.
    """
    match rule:
        case MessageDrop():
            return read_drop(rule.drop_messages, "drop_rule.drop_messages", messages)
        case TextDrop():
            return _text_drop(rule.drop_messages, messages)
        case KeepTextDrop():
            return _keep_text(aligned(visible, messages) or {}, messages)
        case ThinkingDrop():
            return _thinking_drop(messages, tags)


def _text_drop(selectors: list[Selector], messages: Messages) -> Dropped:
    """The texts go behind the latest user message."""
    param = "drop_rule.drop_messages"
    if len(selectors) != len(messages):
        raise invalid(param, [selector.role for selector in selectors],
                      f"it must have an entry for each message, and there are {len(messages)}")
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise invalid("messages", [message["role"] for message in messages],
                      "text_drop drops behind the latest user message, and there is none; add one, "
                      "or use cache.drop")
    dropped: list[int | Part] = []
    patterns: list[str] = []
    for index, (selector, message) in enumerate(zip(selectors, messages, strict=True)):
        at = f"{param}[{index}]"
        if selector.role != message["role"]:
            raise invalid(f"{at}.role", selector.role, f"message {index} has the role "
                                                       f"{message['role']}; give that")
        for text, occurrence, where in _selected(selector, at):
            if index > users[-1]:
                raise invalid(where, text, f"the latest user message, {users[-1]}, cannot drop of "
                                           "a later message; leave it out")
            patterns.append(text)
            part = find_text(text, occurrence, index, message["content"], where)
            dropped.append(index if text == message["content"] else part)
    _check_size(patterns, messages, param)
    return {users[-1]: tuple(dropped)} if dropped else {}


def _selected(selector: Selector, param: str) -> list[tuple[str, int, str]]:
    """(text, occurrence, what errors call it) of each text of a selector."""
    content, occurrence = selector.content, selector.occurrence
    if occurrence is not None and content is None:
        raise invalid(f"{param}.occurrence", occurrence, "it goes with content; give that too, or "
                                                         "leave it out")
    several = isinstance(content, list)
    texts = content if several else [content or ""]
    if occurrence is None:
        occurrence = [1] * len(texts) if several else 1
    if several != isinstance(occurrence, list) or (several and len(texts) != len(occurrence)):
        raise invalid(f"{param}.occurrence", occurrence,
                      "give one number for a text, and a list as long as the list of texts")
    counts = occurrence if several else [occurrence]
    for place, count in enumerate(counts):
        if count < 1:
            raise invalid(f"{param}.occurrence" + f"[{place}]" * several, count,
                          "give a number from 1")
    if any(texts) and not all(texts):
        raise invalid(f"{param}.content", texts, "leave out the empty texts")
    return [(text, count, f"{param}.content" + f"[{place}]" * several)
            for place, (text, count) in enumerate(zip(texts, counts, strict=True)) if text]


def _check_size(patterns: list[str], messages: Messages, param: str) -> None:
    if not patterns:
        return
    for what, got, most in (
            ("texts to drop", len(patterns), MOST_PATTERNS),
            ("bytes of texts to drop", sum(len(p.encode()) for p in patterns), MOST_PATTERN_BYTES),
            ("bytes of messages", sum(len(m["content"].encode()) for m in messages),
             MOST_TEXT_BYTES)):
        if got > most:
            raise invalid(param, patterns, f"the request has {got} {what}, and {most} is the most; "
                                           "drop whole messages instead")


def _thinking_drop(messages: Messages, tags: tuple[str, str]) -> Dropped:
    """The thinking of each assistant message goes behind that message."""
    thoughts = [index for index, message in enumerate(messages)
                if message["role"] == "assistant" and _thinks(message, f"messages[{index}]", tags)]
    if not thoughts:
        raise invalid("drop_rule.type", "thinking_drop",
                      "no assistant message has thinking; give it as reasoning_content or as a "
                      f"leading {tags[0]}…{tags[1]} of the content, or leave the rule out")
    return {index: (Part(index),) for index in thoughts}


def _thinks(message: Mapping[str, Any], param: str, tags: tuple[str, str]) -> bool:
    """Whether a message has thinking, in one of the two forms."""
    reasoning, content = message.get("reasoning_content"), message["content"]
    if reasoning is not None and not isinstance(reasoning, str):
        raise invalid(f"{param}.reasoning_content", reasoning, "give a string or null")
    counts = [content.count(tag) for tag in tags]
    leads = content.lstrip().startswith(tags[0])
    if any(counts) and not (leads and counts == [1, 1]):
        raise invalid(f"{param}.content", content,
                      f"its thinking must be one leading {tags[0]}…{tags[1]}, which is closed and "
                      "has none inside; correct it")
    if reasoning and leads:
        raise invalid(f"{param}.reasoning_content", reasoning,
                      "the content has thinking as well; leave out one of the two")
    return bool(reasoning) or leads


def aligned(visible: Messages, full: Messages) -> dict[int, tuple[int, int]] | None:
    """Which messages of a whole history are visible, and which characters of their contents.

    From the last message on, each visible one is the latest that has its fingerprint and its text.
    None if some are not to be found.
    """
    kept: dict[int, tuple[int, int]] = {}
    before = len(full)
    for message in reversed(visible):
        text = message["content"]
        before = next((index for index in reversed(range(before))
                       if text in full[index]["content"] and _is_alike(message, full[index])), -1)
        if before < 0:
            return None
        start = full[before]["content"].rfind(text)
        kept[before] = (start, start + len(text))
    return kept


def _is_alike(message: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(message.get(field) == other.get(field) for field in FINGERPRINT)


def _keep_text(kept: Mapping[int, tuple[int, int]], full: Messages) -> Dropped:
    """Drop, behind the last message, all that is not kept."""
    dropped: list[int | Part] = []
    for index, message in enumerate(full):
        start, stop = kept.get(index, (0, 0))
        if index not in kept:
            dropped.append(index)
            continue
        dropped += [Part(index, chars) for chars in ((0, start), (stop, len(message["content"])))
                    if chars[0] < chars[1]]
    return {len(full) - 1: tuple(dropped)} if dropped else {}
