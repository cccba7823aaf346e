"""Where messages, and parts of them, stand in a rendered prompt: as ranges of its tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int

from kvfunc.history import Range
from kvfunc.models.chat import Rendered
from kvfunc.policies import Part

from .interface import Share
from .thinking import Piece, Scanner, Span

Owners = Int[np.ndarray, " tokens"]


class Layout:
    """The messages of one prompt.

    Args:
      rendered: the prompt.
      tags: those around the model's thinking.
      piece: the bytes of a token.
    """

    def __init__(self, rendered: Rendered, tags: tuple[str, str], piece: Piece):
        self._rendered, self._tags, self._piece = rendered, tags, piece
        self._owned = spans(rendered.owner)

    def part(self, part: Part) -> list[Range] | None:
        """The tokens that lie wholly inside a part of a message; None if it is not printed."""
        if part.chars is None:
            found = self._spans(part.message)
            return [piece for span in found for piece in self._inside(part.message, span)] if (
                found) else None
        chars = list(self._printed(part.message, *part.chars))
        ranges = [self._tokens(start, stop) for start, stop in chars]
        return [span for span in ranges if span[0] < span[1]] if chars else None

    def share(self, name: str, part: Part) -> Share | None:
        """A shared part as tokens; None where it is not printed in one piece."""
        chars = list(self._printed(part.message, *part.chars))
        if len(chars) != 1:
            return None
        (start, stop), (first, last) = self._tokens(*chars[0]), chars[0]
        starts, stops = self._rendered.offsets.T
        outer = int(np.searchsorted(stops, first, "right")), int(np.searchsorted(starts, last))
        return Share(name, start, stop, outer) if start < stop else None

    def _tokens(self, start: int, stop: int) -> Range:
        """The tokens that lie wholly inside some characters of the text."""
        starts, stops = self._rendered.offsets.T
        return int(np.searchsorted(starts, start)), int(np.searchsorted(stops, stop, "right"))

    def thinking(self, owner: int) -> Iterator[tuple[int, Range]]:
        """(boundary, tokens) of what an assistant's message drops as soon as it is complete."""
        for span in self._spans(owner):
            for piece in self._inside(owner, span):
                yield span.at, piece

    def prints(self, message: int) -> bool:
        """Whether a message has any token."""
        return message in self._owned

    def start(self, owner: int) -> int:
        """Raw index of the first token of a message; the prompt's end if it has none."""
        ranges = self._owned.get(owner)
        return ranges[0][0] if ranges else len(self._rendered.tokens)

    def _spans(self, owner: int) -> list[Span]:
        if owner not in self._owned:
            return []
        start, stop = self._owned[owner][0][0], self._owned[owner][-1][1]
        scanner = Scanner(self._tags, self._piece, start)
        return scanner.push(self._rendered.tokens[start:stop].tolist())

    def _inside(self, owner: int, span: Span) -> list[Range]:
        """What of a span is the message's: text of nobody stays."""
        cut = [(max(start, span.start), min(stop, span.stop)) for start, stop in self._owned[owner]]
        return [piece for piece in cut if piece[0] < piece[1]]

    def _printed(self, message: int, start: int, stop: int) -> Iterator[Range]:
        """Where characters of a content stand in the prompt's text, in as few pieces as can be."""
        piece = None
        for run in self._rendered.printed:
            low = max(start, run.at)
            high = min(stop, run.at + run.stop - run.start)
            if run.message != message or low >= high:
                continue
            here = run.start + low - run.at, run.start + high - run.at
            if piece is not None and piece[1] == here[0]:
                piece = piece[0], here[1]
                continue
            if piece is not None:
                yield piece
            piece = here
        if piece is not None:
            yield piece


def spans(owner: Owners) -> dict[int, list[Range]]:
    """The stretches of tokens of each owner, in order."""
    found: dict[int, list[Range]] = {}
    for index, start, stop in runs(owner):
        found.setdefault(index, []).append((start, stop))
    return found


def runs(owner: Owners) -> list[tuple[int, int, int]]:
    """(owner, start, stop) of every stretch of one owner."""
    edges = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(owner)]
    return [(int(owner[start]), start, stop)
            for start, stop in itertools.pairwise(edges) if start < stop]
