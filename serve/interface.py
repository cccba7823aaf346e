"""What the HTTP layer and an engine tell each other: the seam between the two."""

from __future__ import annotations

import dataclasses

from kvfunc.history import Run

MAX_LOGPROBS = 20  # alternatives that can be reported, as in OpenAI's API


class ContextLengthExceeded(ValueError):
    """The request needs a position that the model's context does not have."""


class CapacityExceeded(ValueError):
    """The KV pool is too small for this request, ever."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int | None = None
    logprobs: int | None = None  # how many alternatives to report; None: no log-probabilities


@dataclasses.dataclass(frozen=True)
class Token:
    """A generated token."""

    id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Usage:
    """The usage counters of a prompt, in tokens (semantics.md, "Usage counters")."""

    prompt_tokens: int
    cached_tokens: int
    repos_tokens: int
    drop_skipped_tokens: int
    approximate_tokens: int

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
