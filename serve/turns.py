"""Notices a chat template that prints earlier turns differently once the conversation grows.

Turn n+1 must extend turn n's prompt, or else the KV behind the first difference is of no use.
"""

from __future__ import annotations

import collections
import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from kvfunc.models.chat import prefix_break

PREFIX_BROKEN = ("the chat template prints earlier turns differently as the conversation grows: "
                 "their KV from the first difference on is computed again in every turn")
REMEMBERED = 32  # conversations


class Turns:
    """The last prompt of some conversations. Threads may share it."""

    def __init__(self) -> None:
        self._prompts: collections.OrderedDict[bytes, np.ndarray] = collections.OrderedDict()
        self._told = False
        self._lock = threading.Lock()

    def check(self, setting: Any, messages: Sequence[Mapping[str, Any]],
              tokens: Int[np.ndarray, " tokens"]) -> list[str]:
        """The warning, the first time that a prompt does not extend the turn before it.

        Args:
          setting: whatever else the prompt depends on, as JSON.
          messages: the conversation so far.
          tokens: its prompt.
        """
        digest = hashlib.sha256(json.dumps(setting).encode())
        turns = []
        for message in messages:
            digest.update(json.dumps(message).encode())
            turns.append(digest.digest())
        with self._lock:
            before = next((self._prompts.pop(turn) for turn in reversed(turns[:-1])
                           if turn in self._prompts), None)
            self._prompts[turns[-1]] = tokens
            while len(self._prompts) > REMEMBERED:
                self._prompts.popitem(last=False)
            if self._told or before is None or prefix_break(before, tokens) is None:
                return []
            self._told = True
            return [PREFIX_BROKEN]
