"""Spans of thinking between two tags, found in text that comes token by token.

One rule serves messages and answers, so that the next turn's history has the events that the answer
had. A span reaches from an opening tag to the nearest closing tag behind it, in the bytes of the
tokens, and the next one is looked for behind that. It is complete with the token that completes
its closing tag, also where that token goes on; tokens wholly inside, tags included, are dropped.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
from jaxtyping import Int

Piece = Callable[[int], bytes]  # the bytes of a token (`Tokenizer.piece`)


@dataclasses.dataclass(frozen=True)
class Thinking:
    """What an answer drops of itself while it is generated."""

    tags: tuple[str, str]
    piece: Piece
    start: int  # raw index of the first token of the text that is searched: the generation header's

    def scanner(self, prompt: Int[np.ndarray, " tokens"]) -> Scanner:
        """A scanner that has read the prompt's part of that text."""
        scanner = Scanner(self.tags, self.piece, self.start)
        scanner.push(prompt[self.start:].tolist())
        return scanner


@dataclasses.dataclass(frozen=True)
class Span:
    """A complete span of thinking, in raw indices."""

    start: int
    stop: int  # behind the last token that lies wholly inside; `start` if none does
    at: int  # behind the token that completes the closing tag


class Scanner:
    """Reads tokens and finds the spans of thinking in their text.

    Args:
      tags: the opening and the closing tag.
      piece: the bytes of a token.
      start: raw index of the first token.
    """

    def __init__(self, tags: tuple[str, str], piece: Piece, start: int = 0):
        self._open, self._close = (tag.encode() for tag in tags)
        self._piece, self._first = piece, start
        self._text, self._ends = bytearray(), [0]  # of the tokens, in bytes
        self._opened: int | None = None  # where the span begins that is not complete
        self._at = 0  # from where the next tag is looked for

    def push(self, tokens: Iterable[int]) -> list[Span]:
        """The spans that these next tokens complete."""
        for token in tokens:
            self._text += self._piece(token)
            self._ends.append(len(self._text))
        found: list[Span] = []
        while True:
            tag = self._open if self._opened is None else self._close
            place = self._text.find(tag, self._at)
            if place < 0:
                self._at = max(self._at, len(self._text) - len(tag) + 1)
                return found
            self._at = place + len(tag)
            if self._opened is None:
                self._opened = place
            else:
                found.append(self._span(self._opened, self._at))
                self._opened = None

    def _span(self, start: int, stop: int) -> Span:
        at = bisect.bisect_left(self._ends, stop)
        inside = bisect.bisect_left(self._ends, start)
        last = at if self._ends[at] == stop else at - 1
        return Span(self._first + inside, self._first + max(inside, last), self._first + at)
