"""Generated tokens as text: nothing is given away that a stop string could still claim."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from .interface import Token


@runtime_checkable
class Decoder(Protocol):
    """Turns tokens into whole characters (`Tokenizer.stream`)."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token."""
        ...

    def flush(self) -> str:
        """What is left when no token follows."""
        ...


@dataclasses.dataclass(frozen=True)
class Placed:
    """A token, and at which character of the answer it begins."""

    token: Token
    offset: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stretch of the answer that is certain, and the tokens that begin in it."""

    text: str = ""
    tokens: tuple[Placed, ...] = ()


class TextStream:
    """Text of an answer, piece by piece, up to its first stop string.

    The pieces depend on the characters alone, not on where tokens begin: as if every character
    came by itself, the first stop string that is complete ends the answer, and where two end
    together the longer one counts. The stop string and the tokens wholly inside it are left out.
    What is complete within the first `min_tokens` tokens ends nothing, as in vLLM.
    """

    def __init__(self, decoder: Decoder, stop: Iterable[str] = (), min_tokens: int = 0):
        self._decoder = decoder
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._pushed = 0
        self._exempt = 0  # characters of what is held within which no stop string may end
        self._held = ""  # decoded, and perhaps the beginning of a stop string
        self._emitted = 0
        self._waiting: collections.deque[Placed] = collections.deque()
        self.stopped = False
        """Whether a stop string was found; nothing may be pushed afterwards."""

    def push(self, token: Token) -> Piece:
        """The next token's share."""
        self._waiting.append(Placed(token, self._emitted + len(self._held)))
        self._pushed += 1
        self._hold(self._decoder.push(token.id))
        return self._release()

    def end(self) -> Piece:
        """What was held back, when no token follows."""
        self._hold(self._decoder.flush())
        return self._release(last=True)

    def _hold(self, text: str) -> None:
        self._held += text
        if self._pushed <= self._min_tokens:
            self._exempt = len(self._held)

    def _release(self, last: bool = False) -> Piece:
        cut = first_stop(self._held, self._stop, self._exempt)
        if cut is not None:
            self.stopped = True
            text, self._held = self._held[:cut], ""
        else:
            certain = len(self._held) - (0 if last else claimed(self._held, self._stop))
            text, self._held = self._held[:certain], self._held[certain:]
        self._emitted += len(text)
        self._exempt = max(self._exempt - len(text), 0)
        tokens = []
        while self._waiting and (self._waiting[0].offset < self._emitted
                                 or (last and not self.stopped)):
            tokens.append(self._waiting.popleft())
        return Piece(text, tuple(tokens))


def first_stop(text: str, stop: Sequence[str], exempt: int = 0) -> int | None:
    """Where the text is cut: the start of the stop string that is complete first.

    Args:
      text: what is searched.
      stop: the stop strings.
      exempt: within how many characters from the start none may end.
    """
    found = [(start + len(string), start) for string in stop
             if (start := text.find(string, max(exempt + 1 - len(string), 0))) >= 0]
    return min(found)[1] if found else None


def claimed(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of the text that could begin a stop string."""
    longest = 0
    for string in stop:
        for length in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:length]):
                longest = length
                break
    return longest
