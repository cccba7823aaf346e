"""One request's answers, token by token: from the engine's tokens to text and finish reasons."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Sequence

from .engine import Engine
from .interface import End, Generation, Job, Token, Usage
from .text import Decoder, Piece, TextStream


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """One answer that a request asks for: a job, and the texts that end it."""

    job: Job
    stop: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Step:
    """What one more token brought."""

    choice: int
    piece: Piece
    finish_reason: str | None  # None until the choice is complete
    usage: Usage
    generated: int  # tokens of this choice so far
    dropped: int | None = None  # of these, as thinking; None where that stays


async def answer(engine: Engine, choices: Sequence[Choice]) -> AsyncIterator[Step]:
    """Run all choices at once; their steps come as the engine makes them.

    There is a step for every token, so that whoever iterates can stop at any of them, also where
    the text is held back. Whatever is unfinished is cancelled when this is closed.

    Raises:
      Exception: what `Engine.submit` raises, or the error that one of the choices ended with.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[tuple[int, Token | End]] = asyncio.Queue()

    def deliver(index: int, item: Token | End) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(arrived.put_nowait, (index, item))

    growing: dict[int, _Growing] = {}
    try:
        for index, choice in enumerate(choices):
            generation = engine.submit(choice.job, functools.partial(deliver, index))
            growing[index] = _Growing(index, generation, choice, engine.tokenizer.stream())
        while growing:
            index, item = await arrived.get()
            if index not in growing:
                continue  # underway when a stop string ended the choice
            step = growing[index].step(item)
            if step.finish_reason:
                growing.pop(index).generation.cancel()
            yield step
    finally:
        for unfinished in growing.values():
            unfinished.generation.cancel()


class _Growing:
    """One choice's answer as far as it goes."""

    def __init__(self, index: int, generation: Generation, choice: Choice, decoder: Decoder):
        sampling = choice.job.sampling
        self.generation = generation
        self._index, self._stop_ids = index, sampling.stop_ids
        self._text = TextStream(decoder, choice.stop, sampling.min_tokens)
        self._generated = 0
        prompt, thinking = choice.job.tokens, choice.job.thinking
        self._prompt = len(prompt)
        self._scanner = thinking and thinking.scanner(prompt)
        self._dropped = None if thinking is None else 0

    def step(self, item: Token | End) -> Step:
        text, reason = self._text, None
        if isinstance(item, Token):
            self._generated += 1
            for span in self._scanner.push([item.id]) if self._scanner else ():
                self._dropped += span.stop - max(span.start, self._prompt)
            # The engine ends the answer behind a token of stop_ids, which has no text.
            piece = Piece() if item.id in self._stop_ids else text.push(item)
        elif item.error is not None:
            raise item.error
        else:
            piece, reason = text.end(), item.reason
        return Step(self._index, piece, "stop" if text.stopped else reason, self.generation.usage,
                    self._generated, self._dropped)
