"""From the body of a request to what the engine is given: prompts with their events, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvfunc.history import Event, History, Range
from kvfunc.models.chat import ChatTemplate, Rendered
from kvfunc.policies import Part, Schedule

from . import events as message_events
from . import protocol
from .answer import Choice
from .dialects import Reading, reading
from .drops import hidden
from .engine import Engine
from .errors import ApiError, invalid
from .interface import ContextLengthExceeded, Job, Share
from .protocol import ChatRequest, CompletionRequest
from .spans import Layout
from .thinking import Thinking
from .turns import Turns

MAX_ANSWERS = 1024  # of one request: prompts times n
AUTOMATIC = ("user", "assistant", "tool")  # roles whose messages are shared without a name
NOT_SHARED = ("shared texts are computed exactly in a request that drops or repositions: leave out "
              "the one or the other")


class PreparedChat(NamedTuple):
    """A chat request that has passed every check."""

    asked: ChatRequest
    choices: list[Choice]
    warnings: list[str]
    plan: dict[str, Any] | None  # the whole answer, where it was asked for
    reading: Reading | None  # how the answers are read; None where all of them is content


class Preparation:
    """Checks requests and makes jobs of them; every fault is an `ApiError`. Threads may share it.

    Args:
      engine: what the jobs are for.
      template: renders messages.
      warnings: what every answer's `warnings` shall say.
    """

    def __init__(self, engine: Engine, template: ChatTemplate, warnings: Sequence[str]):
        self._engine, self._template, self._warnings = engine, template, warnings
        self._turns = Turns()

    def _check(self, asked: protocol.Request) -> None:
        self.check_model(asked.model)
        asked.check_token_ids(self._engine.tokenizer.vocab_size)
        prompts = len(asked.prompts) if isinstance(asked, CompletionRequest) else 1
        most = min(MAX_ANSWERS, self._engine.most_open)
        if prompts * asked.choices > most:
            raise invalid("n" if prompts == 1 else "prompt", prompts * asked.choices,
                          f"this server takes at most {most} answers a request, which is prompts "
                          "times n; send several requests, or restart it with a larger --max-queue")

    def check_model(self, name: str | None) -> None:
        """Refuse another model's name."""
        if name not in (None, self._engine.name):
            raise ApiError(f"the model {name!r} is not served here: use {self._engine.name!r}",
                           param="model", code="model_not_found", status=404)

    def chat(self, body: dict[str, Any]) -> PreparedChat:
        """A chat request: its prompt with its events, or the plan of it."""
        asked = ChatRequest.parse(body)
        self._check(asked)
        edits = asked.edits(self._template.thinking)
        messages = asked.conversation
        rendered = self._render(asked, body)
        setting = [asked.salt, body.get("tools"), body.get("chat_template_kwargs")]
        warnings = [*self._warnings, *rendered.warnings,
                    *([] if asked.explain else
                      self._turns.check(setting, messages, rendered.tokens))]
        schedule = Schedule()
        if (edits or asked.drops_thinking) and not rendered.monotonic:
            raise ApiError("this model's chat template moves messages, so that events have no "
                           "place between them: leave out drop, reposition, policy and "
                           "drop_thinking", param="cache", code="unsupported_value")
        if isinstance(edits, Schedule):
            schedule = edits
            warnings += message_events.broken_calls(schedule, messages)
        elif edits is not None:  # a policy, which breaks calls from their results knowingly
            schedule = edits(message_events.units(messages, rendered.owner))
        events, thinking = self._events(asked, schedule, rendered)
        shares = self._shares(asked, rendered)
        if shares and (events or thinking):
            shares = []
            warnings.append(NOT_SHARED)
        read = reading(self._template, rendered.text, asked.takes_calls)
        choices = self._choices(asked, rendered.tokens, events, "messages", thinking, shares,
                                read.markers if read else ())
        plan = None
        if asked.explain:
            job = choices[0].job
            described = self._engine.plan(job)
            plan = {"model": self._engine.name, **message_events.describe(
                described, job.history, messages, rendered.owner, warnings)}
        return PreparedChat(asked, choices, warnings, plan, read)

    def _events(self, asked: ChatRequest, schedule: Schedule, rendered: Rendered) -> tuple[
            list[Event], Thinking | None]:
        """The prompt's events, and what the answer is to drop of itself."""
        messages, tags = asked.conversation, self._template.thinking
        piece = self._engine.tokenizer.piece
        layout = Layout(rendered, tags, piece)
        parts = _parts(asked, schedule, layout)
        thoughts: list[tuple[int, Range]] = []
        thinking = None
        if asked.drops_thinking:
            header = len(messages)
            speakers = [index for index in range(header) if messages[index]["role"] == "assistant"]
            thoughts = [thought for owner in (*speakers, header)
                        for thought in layout.thinking(owner)]
            thinking = Thinking(tags, piece, layout.start(header))
        return message_events.events(schedule, len(messages), rendered.owner, parts,
                                     thoughts), thinking

    def _shares(self, asked: ChatRequest, rendered: Rendered) -> list[Share]:
        """The texts whose KV may be estimated: those named, and whole messages if that is on."""
        if asked.cache is not None and asked.cache.exact:
            return []
        parts = dict(asked.shares)
        if self._engine.shares_messages:
            named = {part.message for part in parts}
            parts |= {Part(index, (0, len(message["content"]))): f"{message['role']} message"
                      for index, message in enumerate(asked.conversation)
                      if index not in named and message["role"] in AUTOMATIC}
        if not parts:
            return []
        layout = Layout(rendered, self._template.thinking, self._engine.tokenizer.piece)
        found = [layout.share(name, part) for part, name in parts.items()]
        return sorted((share for share in found if share is not None), key=lambda s: s.start)

    def _render(self, asked: ChatRequest, body: dict[str, Any]) -> Rendered:
        try:
            return self._template.render(asked.conversation, tools=body.get("tools") or None,
                                     **asked.chat_template_kwargs or {})
        except (ValueError, TypeError, RecursionError) as error:
            raise ApiError(f"{error}: change the messages, the tools or chat_template_kwargs",
                           param="messages", code="invalid_value") from error

    def completion(self, body: dict[str, Any]) -> tuple[CompletionRequest, list[Choice]]:
        """A completion request, and the answers it asks for."""
        asked = CompletionRequest.parse(body)
        self._check(asked)
        return asked, [choice for param, prompt in asked.prompts.items()
                       for choice in self._choices(asked, self._encode(prompt, param), [], param)]

    def _encode(self, prompt: str | list[int], param: str) -> np.ndarray:
        tokenizer = self._engine.tokenizer
        if isinstance(prompt, str):
            ids = tokenizer.encode(prompt)
            if tokenizer.adds_bos and ids[:1] != [tokenizer.bos_id]:
                ids = [tokenizer.bos_id, *ids]
            return np.array(ids, np.int32)
        protocol.check_token_ids(prompt, param, tokenizer.vocab_size)
        return np.array(prompt, np.int32)

    def _choices(self, asked: protocol.Request, tokens: np.ndarray, events: list[Event],
                 param: str, thinking: Thinking | None = None,
                 shares: Sequence[Share] = (), shown: tuple[str, ...] = ()) -> list[Choice]:
        if not len(tokens):
            raise ApiError(f"{param} has no tokens: give some text", param=param,
                           code="invalid_value")
        history = History(len(tokens), events)
        try:
            self._engine.check(history)
        except ContextLengthExceeded as error:
            raise ApiError(str(error), param=param, code="context_length_exceeded") from error
        room = self._engine.max_new_tokens(history)
        limit = min(asked.token_limit or room, room)
        return [Choice(Job(tokens, history, asked.salt, limit, sampling, thinking, tuple(shares)),
                       asked.stop_strings, has_own_prompt=place == 0, shown=shown)
                for place, sampling in enumerate(asked.samplings(self._engine.tokenizer.stop_ids))]


def _parts(asked: ChatRequest, schedule: Schedule, layout: Layout) -> dict[Part, list[Range]]:
    """The tokens of every part of a message that is dropped; what was named must be printed."""
    for place, message in enumerate(schedule.reposition if asked.reposition else ()):
        if not layout.prints(message):
            raise invalid(f"reposition[{place}]", message, "the chat template prints nothing of "
                          "this message, so that it has no end; give another")
    parts: dict[Part, list[Range]] = {}
    for trigger, items in schedule.drop.items():
        for place, item in enumerate(items):
            if isinstance(item, Part):
                ranges = layout.part(item)
                if ranges is None and asked.names_parts:
                    raise hidden(item, asked.conversation, asked.name_of(trigger, place))
                parts[item] = ranges or []
    return parts
