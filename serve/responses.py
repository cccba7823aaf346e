"""The JSON objects of OpenAI's API: answers, stream chunks, log-probabilities, usage."""

from __future__ import annotations

import collections
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from .answer import Step
from .dialects import Plain, Reading
from .interface import Token
from .parsing import CallArguments, CallStart, Content, Event, Reader, Reasoning
from .text import Placed

LOWEST_LOGPROB = -9999.0  # JSON has no infinity

Json = dict[str, Any]


class Reply:
    """One answer's objects; the two APIs differ in a choice's shape only.

    Args:
      model: its name.
      tokenizer: gives the text of single tokens.
      logprobs: whether log-probabilities were asked for.
      choices: how many each prompt has; they stand one behind the other.
    """

    PREFIX: ClassVar[str]
    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]

    def __init__(self, model: str, tokenizer: Any, logprobs: bool, choices: int = 1):
        self._head = {"id": self.PREFIX + uuid.uuid4().hex, "created": int(time.time()),
                      "model": model}
        self._tokenizer = tokenizer
        self._wants_logprobs = logprobs
        self._choices = choices

    def whole(self, steps: Sequence[Step], warnings: Sequence[str]) -> Json:
        """The answer in one piece."""
        by_choice: dict[int, list[Step]] = collections.defaultdict(list)
        for step in steps:
            by_choice[step.choice].append(step)
        return {**self._head, "object": self.WHOLE,
                "choices": [self._choice(by_choice[index]) for index in sorted(by_choice)],
                "usage": self.usage(steps), **self.cache(steps), **_warned(warnings)}

    def _choice(self, steps: Sequence[Step]) -> Json:
        last = steps[-1]
        content = self._content(last.choice, "".join(step.piece.text for step in steps))
        tokens = [token for step in steps for token in step.piece.tokens]
        return {"index": last.choice, **content, "logprobs": self._logprobs(tokens),
                "finish_reason": self._finish_reason(last)}

    def chunks(self, step: Step, first: bool) -> list[list[Json]]:
        """The chunks' `choices` for one step: any number, the last with the finish reason."""
        made = []
        if first:
            made += self._opening()
        deltas = self._deltas(step)
        if not deltas and self._wants_logprobs and step.piece.tokens:
            deltas = [self._delta("")]
        for place, delta in enumerate(deltas):
            logprobs = self._logprobs(step.piece.tokens) if place == 0 else None
            made.append({**delta, "logprobs": logprobs, "finish_reason": None})
        if step.finish_reason:
            made.append({**self._delta(""), "logprobs": None,
                         "finish_reason": self._finish_reason(step)})
        return [[{"index": step.choice, **choice}] for choice in made]

    def chunk(self, choices: list[Json], **more: Any) -> Json:
        """A stream's chunk."""
        return {**self._head, "object": self.CHUNK, "choices": choices, **more}

    def usage(self, steps: Iterable[Step]) -> Json:
        """OpenAI's `usage`, with the counters of semantics.md: each prompt counts once."""
        done = [step for step in steps if step.finish_reason]
        prompts = [step.usage for step in done if step.choice % self._choices == 0]
        prompt = sum(usage.prompt_tokens for usage in prompts)
        generated = sum(step.generated for step in done)
        dropped = [step.dropped for step in done if step.dropped is not None]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {
                "cached_tokens": sum(usage.cached_tokens for usage in prompts),
                "repos_tokens": sum(usage.repos_tokens for usage in prompts),
                "drop_skipped_tokens": sum(usage.drop_skipped_tokens for usage in prompts),
                "approximate_tokens": sum(usage.approximate_tokens for usage in prompts),
            },
            **({"completion_tokens_details": {"dropped_tokens": sum(dropped)}} if dropped else {}),
        }

    def cache(self, steps: Iterable[Step]) -> Json:
        """The `cache` object, where some prompt has KV that rests on estimates."""
        done = [step.usage for step in steps if step.finish_reason]
        if not any(usage.approximate_tokens for usage in done):
            return {}
        errors = [usage.predicted_error for usage in done if usage.predicted_error is not None]
        return {"cache": {"predicted_error": max(errors, default=None)}}

    def _opening(self) -> list[Json]:
        raise NotImplementedError

    def _content(self, choice: int, text: str) -> Json:
        raise NotImplementedError

    def _deltas(self, step: Step) -> list[Json]:
        return [self._delta(step.piece.text)] if step.piece.text else []

    def _finish_reason(self, step: Step) -> str | None:
        return step.finish_reason

    def _delta(self, text: str) -> Json:
        raise NotImplementedError

    def _logprobs(self, tokens: Iterable[Placed]) -> Json | None:
        raise NotImplementedError

    def _text(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special=False)


class ChatReply(Reply):
    """An answer of /v1/chat/completions.

    Args:
      model: its name.
      tokenizer: gives the text of single tokens.
      logprobs: whether log-probabilities were asked for.
      choices: how many there are.
      reading: how their text is read; None where all of it is content.
    """

    PREFIX, WHOLE, CHUNK = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, tokenizer: Any, logprobs: bool, choices: int = 1,
                 reading: Reading | None = None):
        super().__init__(model, tokenizer, logprobs, choices)
        make = reading.reader if reading else Plain
        self._readers: dict[int, Reader] = collections.defaultdict(make)
        self._calling: set[int] = set()  # choices that have called a tool

    def _opening(self) -> list[Json]:
        return [{"delta": {"role": "assistant", "content": ""}, "logprobs": None,
                 "finish_reason": None}]

    def _content(self, choice: int, text: str) -> Json:
        events = self._read(choice, text, last=True)
        content, reasoning = ("".join(event.text for event in events if isinstance(event, kind))
                              for kind in (Content, Reasoning))
        calls: list[Json] = []
        for event in events:
            if isinstance(event, CallStart):
                calls.append({"id": event.id, "type": "function",
                              "function": {"name": event.name, "arguments": ""}})
            elif isinstance(event, CallArguments):
                calls[event.index]["function"]["arguments"] += event.text
        return {"message": {
            "role": "assistant", "content": content or (None if calls else ""), "refusal": None,
            **({"reasoning_content": reasoning} if reasoning else {}),
            **({"tool_calls": calls} if calls else {})}}

    def _deltas(self, step: Step) -> list[Json]:
        events = self._read(step.choice, step.piece.text, bool(step.finish_reason))
        return [{"delta": _delta_of(event)} for event in events]

    def _read(self, choice: int, text: str, last: bool) -> list[Event]:
        reader = self._readers[choice]
        events = [*reader.push(text), *(reader.end() if last else ())]
        if any(isinstance(event, CallStart) for event in events):
            self._calling.add(choice)
        return events

    def _finish_reason(self, step: Step) -> str | None:
        called = step.finish_reason == "stop" and step.choice in self._calling
        return "tool_calls" if called else step.finish_reason

    def _delta(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, tokens: Iterable[Placed]) -> Json | None:
        if not self._wants_logprobs:
            return None
        return {"content": [
            {**self._entry(placed.token.id, placed.token.logprob),
             "top_logprobs": [self._entry(*alternative) for alternative in placed.token.top]}
            for placed in tokens], "refusal": None}

    def _entry(self, token_id: int, logprob: float | None) -> Json:
        text = self._text(token_id)
        whole = "\ufffd" not in text  # else the token is not a whole number of characters
        return {"token": text, "logprob": _finite(logprob),
                "bytes": list(text.encode()) if whole else None}


class CompletionReply(Reply):
    """An answer of /v1/completions."""

    PREFIX, WHOLE, CHUNK = "cmpl-", "text_completion", "text_completion"

    def _opening(self) -> list[Json]:
        return []

    def _content(self, choice: int, text: str) -> Json:
        return {"text": text}

    def _delta(self, text: str) -> Json:
        return {"text": text}

    def _logprobs(self, tokens: Iterable[Placed]) -> Json | None:
        if not self._wants_logprobs:
            return None
        tokens = list(tokens)
        return {"tokens": [self._text(placed.token.id) for placed in tokens],
                "token_logprobs": [_finite(placed.token.logprob) for placed in tokens],
                "top_logprobs": [self._top(placed.token) for placed in tokens],
                "text_offset": [placed.offset for placed in tokens]}

    def _top(self, token: Token) -> dict[str, float]:
        return {self._text(token_id): _finite(logprob)
                for token_id, logprob in (*token.top, (token.id, token.logprob))}


def _delta_of(event: Event) -> Json:
    match event:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, call_id, name):
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function",
                                    "function": {"name": name, "arguments": ""}}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _warned(warnings: Sequence[str]) -> Json:
    return {"warnings": list(warnings)} if warnings else {}


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(float(logprob), LOWEST_LOGPROB)
