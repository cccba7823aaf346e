"""What is evicted first: policies are functions of one signature, from columns to a cost a page.

The pages of lowest cost go first. A page is as dear as what evicting it costs the future: the work
of computing its tokens again, times the chance that somebody will need them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Int

ENDS = 0.1  # how many of the requests are taken to be their conversation's last
FIRST_GAP = 64.0  # requests between two of one conversation, before any was seen
MEMORY = 0.1  # weight of the newest gap in the running mean


@dataclasses.dataclass(frozen=True)
class Columns:
    """The resident tokens, an entry each."""

    page: Int[np.ndarray, " tokens"]  # that holds it
    raw: Float[np.ndarray, " tokens"]  # its place in its history
    last_use: Float[np.ndarray, " tokens"]  # number of the last request that came for it
    worth: Float[np.ndarray, " tokens"]  # work that it may be expected to save, 0 if dropped


Policy = Callable[[Columns, int], Float[np.ndarray, " pages"]]


class Gap:
    """How many requests pass between two of one conversation, and what follows for the next."""

    def __init__(self) -> None:
        self._mean = FIRST_GAP

    def observe(self, requests: int) -> None:
        """A conversation went on after so many requests."""
        self._mean += MEMORY * (requests - self._mean)

    def chance(self, age: int) -> float:
        """That a conversation that was last used `age` requests ago will go on.

        By Bayes' rule, where one in ten requests is a conversation's last and the others are
        followed by the next after a time with the mean seen so far.
        """
        waits = (1 - ENDS) * math.exp(-age / max(self._mean, 1.0))
        return waits / (waits + ENDS)


def by_worth(columns: Columns, pages: int) -> Float[np.ndarray, " pages"]:
    """What saves least work first, dropped KV before all, and of one conversation its beginning."""
    return _dearest(columns, pages, columns.worth * (1 + 1e-9 * columns.raw))


def lru(columns: Columns, pages: int) -> Float[np.ndarray, " pages"]:
    """The least recently used first, and of one conversation its end."""
    return _dearest(columns, pages, columns.last_use + 1 / (2 + columns.raw))


def dropped_first(columns: Columns, pages: int) -> Float[np.ndarray, " pages"]:
    """What no conversation will see again first, then as `lru`."""
    last = columns.last_use.max(initial=0) + 1
    return _dearest(columns, pages,
                    columns.last_use + 1 / (2 + columns.raw) + last * (columns.worth > 0))


def _dearest(columns: Columns, pages: int, cost: np.ndarray) -> Float[np.ndarray, " pages"]:
    of_page = np.zeros(pages)
    np.maximum.at(of_page, columns.page, cost)
    return of_page


POLICIES: dict[str, Policy] = {"worth": by_worth, "lru": lru, "dropped_first": dropped_first}
