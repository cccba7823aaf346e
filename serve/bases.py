"""Where the KV of texts stands that prompts may share: each is a range of a stream in the tree.

Nothing is copied and nothing is held: a text whose KV was evicted is no base any more.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Hashable

import numpy as np
from jaxtyping import Int

from kvfunc.history import HOLE, History

from .radix import Tree

MOST = 1024  # texts that are remembered, of all salts together
LOOSE = 4  # tokens at either end that may differ, since a text's borders are tokenised with others
SHORTEST = 16  # tokens of a text worth sharing

Tokens = Int[np.ndarray, " tokens"]


def approximate(salt: str) -> Hashable:
    """The namespace of KV that rests on estimates; nothing that is exact looks there."""
    return salt, "approximate"


@dataclasses.dataclass(frozen=True, eq=False)
class Base:
    """A text somewhere in a stream."""

    salt: str
    namespace: Hashable  # of the tree
    stream: Tokens  # up to the text's end at least
    history: History
    start: int  # of the text, half-open
    stop: int

    @property
    def text(self) -> bytes:
        """Its tokens, by which it is known."""
        return self.stream[self.start:self.stop].tobytes()


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """KV for some of a text's tokens, all of those from `start` to `stop`."""

    start: int  # in the text that was looked for, half-open
    stop: int
    slots: Int[np.ndarray, " tokens"]
    birth: int  # position at which token 0 of the text would have been born there


class Bases:
    """The texts that are known, the latest used kept longest.

    Args:
      tree: where their KV is looked up.
    """

    def __init__(self, tree: Tree):
        self._tree = tree
        self._bases: collections.OrderedDict[tuple[str, bytes], Base] = collections.OrderedDict()

    def add(self, base: Base) -> None:
        """Remember a text, in the place of the same text elsewhere; short ones are passed over."""
        births = base.history.births[base.start:base.stop]
        if len(births) < SHORTEST or (np.diff(births) != 1).any():
            return
        self._bases[base.salt, base.text] = base
        self._bases.move_to_end((base.salt, base.text))
        while len(self._bases) > MOST:
            self._bases.popitem(last=False)

    def find(self, salt: str, text: Tokens) -> Found | None:
        """KV of a text, but for a few tokens at its ends; None if it is not known or not resident.

        Args:
          salt: the namespace.
          text: its tokens.
        """
        if len(text) < SHORTEST:
            return None
        for key, base, at in self._candidates(salt, text):
            found = self._resident(base, text, at)
            if found is not None:
                self._bases.move_to_end(key)
                return found
        return None

    def _candidates(self, salt, text):
        """Texts that have this one in them, each with where: the very same one first."""
        whole = text.tobytes()
        if (salt, whole) in self._bases:
            yield (salt, whole), self._bases[salt, whole], 0
        core = text[LOOSE:-LOOSE].tobytes()
        for key, base in reversed([*self._bases.items()]):
            if key[0] == salt and len(key[1]) >= len(core) and key[1] != whole:
                at = _find_tokens(core, key[1], text.itemsize)
                if at is not None:
                    yield key, base, at - LOOSE

    def _resident(self, base: Base, text: Tokens, at: int) -> Found | None:
        """What of a text stands in its base, where its token 0 is the base's token `at`."""
        first, last = max(-at, 0), min(len(text), base.stop - base.start - at)
        there = base.stream[base.start + at + first:base.start + at + last]
        same = there == text[first:last]
        wrong = np.flatnonzero(~same)  # at the ends only, where it is loose
        first += int(wrong[wrong < LOOSE].max(initial=-1)) + 1
        last -= len(same) - int(wrong[wrong >= LOOSE].min(initial=len(same)))
        slots = self._tree.find(base.namespace, base.stream[:base.stop], base.history)
        slots = slots[base.start + at + first:base.start + at + last]
        if (slots == HOLE).any():
            return None
        birth = int(base.history.births[base.start]) + at
        return Found(first, last, slots, birth)


def _find_tokens(wanted: bytes, text: bytes, size: int) -> int | None:
    """Where some tokens stand in others, in tokens."""
    at = text.find(wanted)
    while at >= 0 and at % size:
        at = text.find(wanted, at + 1)
    return None if at < 0 else at // size
