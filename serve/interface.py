"""What the HTTP layer and an engine tell each other: the seam between the two."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int, Integer

from kvfunc.history import History, Run

from .thinking import Thinking

MAX_LOGPROBS = 20  # alternatives that can be reported, as in OpenAI's API
MAX_STOP_IDS = 64  # token ids that can end one answer


class ContextLengthExceeded(ValueError):
    """The request needs a position that the model's context does not have."""


class CapacityExceeded(ValueError):
    """The KV pool is too small for this request, ever."""


class QueueFull(Exception):
    """As many requests run and wait as may; `retry_after` says in how many seconds to ask again."""

    def __init__(self, message: str, retry_after: int):
        super().__init__(message)
        self.retry_after = retry_after


class TimedOut(Exception):
    """The request has had all the time that it was given."""


class ShuttingDown(Exception):
    """The server ends, and the request with it."""


class EngineFailed(Exception):
    """The engine can run nothing any more."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and which tokens end the answer."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None  # how many alternatives to report; None: no log-probabilities
    presence_penalty: float = 0.0  # taken off the logit of every token that the answer has
    frequency_penalty: float = 0.0  # taken off for each time that the answer has it
    repetition_penalty: float = 1.0  # divides the logits of tokens of prompt and answer
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    min_tokens: int = 0  # before so many tokens none of stop_ids is chosen
    stop_ids: frozenset[int] = frozenset()  # tokens that end the answer, at most MAX_STOP_IDS


@dataclasses.dataclass(frozen=True)
class Share:
    """A text of a prompt whose KV may come from another prompt."""

    name: str  # which text of many requests this is one of
    start: int  # raw index of the first token wholly inside, half-open
    stop: int
    outer: tuple[int, int]  # with the tokens that reach over its borders


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """A prompt that has passed every check, and how to go on from it."""

    tokens: Int[np.ndarray, " tokens"]  # int32 ids
    history: History
    salt: str  # namespace of the cache; other salts never share KV
    max_tokens: int
    sampling: Sampling
    thinking: Thinking | None = None  # what the answer drops of itself; None: nothing
    shares: tuple[Share, ...] = ()  # in order; none may be estimated if there are events


@dataclasses.dataclass(frozen=True)
class Token:
    """A generated token."""

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class End:
    """The last thing that an answer delivers."""

    reason: str  # "stop": the last token is one of stop_ids; "length"; "error"
    error: Exception | None = None


Deliver = Callable[[Token | End], None]


@runtime_checkable
class Generation(Protocol):
    """An answer that is waiting for its turn or being generated."""

    usage: Usage | None
    """The prompt's counters; set before the first token is delivered."""
    admitted: float | None
    """When its turn came, on the clock of `time.perf_counter`; None before."""
    preempted: int
    """How many times it has made way for another."""

    def cancel(self) -> None:
        """End the answer if it has not ended; its KV stays for later requests."""
        ...


@dataclasses.dataclass(frozen=True)
class Usage:
    """The usage counters of a prompt, in tokens (semantics.md, "Usage counters")."""

    prompt_tokens: int
    cached_tokens: int
    repos_tokens: int
    drop_skipped_tokens: int
    approximate_tokens: int
    predicted_error: float | None = None  # of what was estimated for this prompt; None: nothing

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that a query ran for."""
        return (self.prompt_tokens - self.cached_tokens - self.repos_tokens
                - self.drop_skipped_tokens - self.approximate_tokens)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a request would compute and reuse."""

    usage: Usage
    runs: tuple[Run, ...]

    @classmethod
    def of(cls, history: History, queries: Integer[np.ndarray, " queries"],
           approximate: Bool[np.ndarray, " tokens"] | None = None) -> Plan:
        """The plan that computes these queries of a prompt and reuses the rest.

        Args:
          history: of the prompt.
          queries: raw indices of what is computed, increasing.
          approximate: which tokens' KV rests on an estimate; None: that of none.
        """
        runs = history.classify(queries, approximate)
        count = dict.fromkeys(History.KINDS, 0)
        for run in runs:
            count[run.kind] += run.stop - run.start
        return cls(Usage(prompt_tokens=history.tokens, cached_tokens=count["cached"],
                         repos_tokens=count["repos"], drop_skipped_tokens=count["drop_skipped"],
                         approximate_tokens=count["approximate"]), tuple(runs))
