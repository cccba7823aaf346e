"""One request's answers, token by token: from the engine's tokens to text and finish reasons."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int

from kvfunc.history import History

from .engine import Engine
from .interface import Sampling, Usage
from .text import Piece, TextStream


@dataclasses.dataclass(frozen=True)
class Job:
    """A prompt that has passed every check, and how to go on from it."""

    tokens: Int[np.ndarray, " tokens"]
    history: History
    salt: str
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    ignore_eos: bool


@dataclasses.dataclass(frozen=True)
class Step:
    """What one more token brought."""

    choice: int
    piece: Piece
    finish_reason: str | None  # None until the choice is complete
    usage: Usage
    generated: int  # tokens of this choice so far


def answer(engine: Engine, jobs: Sequence[Job]) -> Iterator[Step]:
    """Run the jobs one after the other; the engine is left in order whenever this is closed.

    Iterating blocks: a worker thread does it. There is a step for every token, so that whoever
    iterates can stop at any of them, also where the text is held back.
    """
    for choice, job in enumerate(jobs):
        text = TextStream(engine.tokenizer.stream(), job.stop)
        generated, reason = 0, "length"
        with contextlib.closing(engine.generate(
                job.tokens, job.history, salt=job.salt, max_tokens=job.max_tokens,
                sampling=job.sampling)) as generation:
            usage = generation.usage
            for token in generation:
                generated += 1
                if token.id in engine.tokenizer.stop_ids and not job.ignore_eos:
                    reason = "stop"
                    break
                piece = text.push(token)
                if text.stopped:
                    break
                yield Step(choice, piece, None, usage, generated)
            if not text.stopped:
                piece = text.end()
        yield Step(choice, piece, "stop" if text.stopped else reason, usage, generated)
