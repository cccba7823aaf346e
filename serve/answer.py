"""One request's answers, token by token: from the engine's tokens to text and finish reasons."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Sequence

from .engine import Engine
from .interface import End, Generation, Job, TimedOut, Token, Usage
from .requestlog import RequestRecord
from .text import Decoder, Piece, TextStream


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """One answer that a request asks for: a job, the texts that end it, and what is shown."""

    job: Job
    stop: tuple[str, ...] = ()
    has_own_prompt: bool = True  # whether no choice before it has the same prompt
    shown: tuple[str, ...] = ()  # control tokens whose text is part of the answer's


@dataclasses.dataclass(frozen=True)
class Step:
    """What one more token brought."""

    choice: int
    piece: Piece
    finish_reason: str | None  # None until the choice is complete
    usage: Usage
    generated: int  # tokens of this choice so far
    dropped: int | None = None  # of these, as thinking; None where that stays


async def answer(engine: Engine, choices: Sequence[Choice], record: RequestRecord,
                 timeout: float | None = None) -> AsyncIterator[Step]:
    """Run all choices at once; their steps come as the engine makes them.

    There is a step for every token, so that whoever iterates can stop at any of them, also where
    the text is held back. Whatever is unfinished is cancelled when this is closed.

    Args:
      engine: runs the choices.
      choices: as many as there are answers.
      record: is told what happens.
      timeout: seconds that the request may take from its arrival; None for no end.

    Raises:
      QueueFull: if there is no place for all choices; then none runs.
      TimedOut: when the time is over.
      Exception: what `Engine.submit` raises, or the error that one of the choices ended with.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[tuple[int, Token | End, float] | None] = asyncio.Queue()
    growing: dict[int, _Growing] = {}

    def deliver(index: int, item: Token | End) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            loop.call_soon_threadsafe(arrived.put_nowait, (index, item, time.perf_counter()))

    def cancel() -> None:
        for unfinished in growing.values():
            unfinished.generation.cancel()

    def expire() -> None:
        cancel()  # at once, also where the client is slow to read what has come
        arrived.put_nowait(None)

    engine.check_queue(len(choices))
    timer = None if timeout is None else loop.call_later(max(timeout - record.age, 0), expire)
    try:
        for index, choice in enumerate(choices):
            generation = engine.submit(choice.job, functools.partial(deliver, index))
            decoder = engine.tokenizer.stream(choice.shown)
            growing[index] = _Growing(index, generation, choice, decoder)
            record.submitted(generation, choice.has_own_prompt)
        while growing:
            came = await arrived.get()
            if came is None:
                raise TimedOut(_timed_out(timeout, record))
            index, item, at = came
            if index not in growing:
                continue  # underway when a stop string ended the choice
            if isinstance(item, Token):
                record.token(index, at)
            step = growing[index].step(item)
            if step.dropped:
                record.dropped(index, step.dropped)
            if step.finish_reason:
                growing.pop(index).generation.cancel()
                record.finished(index, step.finish_reason)
            yield step
    finally:
        if timer is not None:
            timer.cancel()
        cancel()


def _timed_out(timeout: float, record: RequestRecord) -> str:
    waited = record.queue_seconds
    if waited is None:
        spent = "all of it waiting for its turn: ask again later, or allow more time"
    else:
        spent = (f"{waited:.1f} s of it waiting for its turn, and generated "
                 f"{record.generated} tokens: allow more time, or ask for fewer tokens")
    return (f"the request took its {timeout:g} s, {spent} (with the request's timeout, or the "
            "server's --request-timeout)")


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
