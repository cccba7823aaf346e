"""Which slot holds whose KV: the last conversations, found again by their longest shared prefix.

A conversation is a stream of (events standing before the token, token), and its KV is a function of
that stream, so whatever two streams begin with in common is shared: by reference, never by copy.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from kvfunc.history import HOLE, History


@dataclasses.dataclass(frozen=True, eq=False)
class Conversation:
    """A finished request's tokens and where their KV stands."""

    salt: str
    tokens: np.ndarray  # int32 [n]
    history: History  # of n tokens
    slots: np.ndarray  # int32 [n], HOLE where the token has no KV


@dataclasses.dataclass(frozen=True)
class Match:
    """The longest prefix of a request that some conversation shares."""

    slots: np.ndarray  # int32 [length], HOLE where the token has no KV

    @property
    def length(self) -> int:
        """How many tokens are shared."""
        return len(self.slots)


class Store:
    """Slots with a count of users each, and the conversations that use them, oldest use first."""

    def __init__(self, slots: int):
        self._users = np.zeros(slots, np.int32)
        self._conversations: list[Conversation] = []

    @property
    def free(self) -> int:
        """How many slots nobody uses."""
        return int((self._users == 0).sum())

    def find(self, salt: str, tokens: np.ndarray, history: History) -> Match:
        """The longest shared prefix of (events, token) under the same salt; nothing is taken.

        May be called while another thread changes the store.
        """
        best = Match(np.zeros(0, np.int32))
        for other in tuple(self._conversations):
            if other.salt != salt:
                continue
            length = _shared(tokens, history, other)
            if length >= best.length:
                best = Match(other.slots[:length])
        return best

    def hold(self, slots: np.ndarray) -> None:
        """Count one more user for each slot; holes are passed over."""
        self._users[slots[slots != HOLE]] += 1

    def release(self, slots: np.ndarray) -> None:
        """Count one user less for each slot; holes are passed over."""
        self._users[slots[slots != HOLE]] -= 1

    def take(self, count: int) -> np.ndarray:
        """`count` free slots in increasing order, held; old conversations make room for them.

        Returns:
          Fewer than `count` if there is no more room even so.
        """
        while self.free < count and self._conversations:
            self.release(self._conversations.pop(0).slots)
        slots = np.flatnonzero(self._users == 0)[:count].astype(np.int32)
        self.hold(slots)
        return slots

    def keep(self, conversation: Conversation) -> None:
        """Remember a conversation whose slots are held; what it extends is forgotten."""
        for other in [*self._conversations]:
            if other.salt == conversation.salt and len(other.tokens) == _shared(
                    conversation.tokens, conversation.history, other):
                self._conversations.remove(other)
                self._adopt(conversation, other)
        self._conversations.append(conversation)

    def _adopt(self, conversation: Conversation, other: Conversation) -> None:
        """Fill the conversation's holes from one that it extends, and let the rest of that go."""
        own = conversation.slots[: len(other.slots)]
        useful = (own == HOLE) & (other.slots != HOLE)
        own[useful] = other.slots[useful]
        self.release(np.where(useful, HOLE, other.slots))


def _shared(tokens: np.ndarray, history: History, other: Conversation) -> int:
    """How many (events, token) a stream and a conversation begin with in common."""
    length = history.common_prefix(other.history)
    differs = np.flatnonzero(tokens[:length] != other.tokens[:length])
    return int(differs[0]) if len(differs) else length
