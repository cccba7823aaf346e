"""Which slots of the pool are in use, and by whom: handed out page by page.

Pages are the unit of allocation and nothing else: what reads KV knows slots only. A page is free
when no running request holds any of its slots and the tree keeps none.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int

from kvfunc.history import HOLE

Slots = Int[np.ndarray, " n"]


class Pages:
    """Slots with a count of the requests that hold each, and whether the tree keeps it.

    Args:
      count: how many pages there are.
      size: slots of a page.
    """

    def __init__(self, count: int, size: int):
        self.count, self.size = count, size
        self._holders = np.zeros((count, size), np.int32)
        self._kept = np.zeros((count, size), bool)
        self._is_free = np.ones(count, bool)
        self._is_held = np.zeros(count, bool)

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return self.count * self.size

    @property
    def free(self) -> int:
        """Pages that nothing is in."""
        return int(self._is_free.sum())

    @property
    def held(self) -> int:
        """Pages in which a running request holds a slot."""
        return int(self._is_held.sum())

    @property
    def evictable(self) -> int:
        """Pages that only the tree keeps slots of."""
        return self.count - self.free - self.held

    @property
    def evictable_pages(self) -> Bool[np.ndarray, " pages"]:
        """Which pages only the tree keeps slots of."""
        return ~self._is_free & ~self._is_held

    def take(self, pages: int, after: int = HOLE) -> Slots:
        """The slots of free pages, held once; of as few separate runs as can be had.

        Args:
          pages: how many; not more than are free.
          after: a slot that the new ones should follow, if that can be.
        """
        free = np.flatnonzero(self._is_free)
        if pages > len(free):
            raise ValueError(f"{pages} pages are wanted and {len(free)} are free: evict first")
        chosen = []
        follows = after // self.size + 1
        if after != HOLE and follows < self.count and self._is_free[follows]:
            place = int(np.searchsorted(free, follows))
            run = free[place:place + pages]
            run = run[run == follows + np.arange(len(run))]
            chosen.append(run)
            free = np.delete(free, slice(place, place + len(run)))
        runs = np.split(free, np.flatnonzero(np.diff(free) != 1) + 1)
        missing = pages - sum(map(len, chosen))
        while missing:
            enough = [run for run in runs if len(run) >= missing]
            best = min(enough, key=len) if enough else max(runs, key=len)
            chosen.append(best[:missing])
            missing -= len(chosen[-1])
            runs = [run for run in runs if run is not best]
        taken = np.concatenate(chosen) if chosen else free[:0]
        slots = (taken[:, None] * self.size + np.arange(self.size)).reshape(-1).astype(np.int32)
        self.hold(slots)
        return slots

    def hold(self, slots: Slots) -> None:
        """Count one more request that needs these different slots; holes are passed over."""
        slots = slots[slots != HOLE]
        self._holders.reshape(-1)[slots] += 1
        self._update(slots)

    def release(self, slots: Slots) -> None:
        """Count one request less; holes are passed over."""
        slots = slots[slots != HOLE]
        self._holders.reshape(-1)[slots] -= 1
        self._update(slots)

    def keep(self, slots: Slots) -> None:
        """The tree keeps these slots from now on; holes are passed over."""
        slots = slots[slots != HOLE]
        self._kept.reshape(-1)[slots] = True
        self._update(slots)

    def forget(self, slots: Slots) -> None:
        """The tree lets go of these slots; holes are passed over."""
        slots = slots[slots != HOLE]
        self._kept.reshape(-1)[slots] = False
        self._update(slots)

    def _update(self, slots: Slots) -> None:
        touched = np.zeros(self.count, bool)
        touched[slots // self.size] = True
        pages = np.flatnonzero(touched)
        self._is_held[pages] = (self._holders[pages] > 0).any(-1)
        self._is_free[pages] = ~self._is_held[pages] & ~self._kept[pages].any(-1)
