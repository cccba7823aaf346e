"""Keeps what was learned for estimates on disk: at the start, now and then, and at the end."""

from __future__ import annotations

import logging
import threading

from kvfunc.checkpoint import Checkpoints

from .sharing import Sharing

_log = logging.getLogger(__name__)


class PoolKeeper:
    """Writes the readers of a server to checkpoints, from a thread of its own.

    A save copies the arrays and writes them behind the back of whoever serves; only what is new is
    written.

    Args:
      sharing: whose readers.
      checkpoints: where to.
      interval: seconds between two saves.
    """

    def __init__(self, sharing: Sharing, checkpoints: Checkpoints, interval: float):
        self._sharing, self._checkpoints, self._interval = sharing, checkpoints, interval
        self._saved = sharing.lessons_learned
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvfunc-anchor-pool", daemon=True)

    @property
    def where(self) -> str:
        """The directory."""
        return str(self._checkpoints.directory)

    def restore(self) -> int:
        """Begin with the newest checkpoint there is; the number of readers that it brought.

        Raises:
          ValueError: if there are checkpoints and none can be used; says why.
        """
        found = self._checkpoints.restore(self._sharing.like)
        if found is not None:
            self._sharing.load(*found)
            self._saved = self._sharing.lessons_learned
        return len(self._sharing)

    def start(self) -> None:
        """Save from now on."""
        self._thread.start()

    def close(self) -> None:
        """Save what is new, and end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._save()
        try:
            self._checkpoints.close()
        except OSError:  # it is logged where it happened
            _log.warning("the Anchor Pool in %s lacks what was learned last", self.where)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._save()

    def _save(self) -> None:
        learned = self._sharing.lessons_learned
        if learned != self._saved:
            self._checkpoints.save(*self._sharing.state())
            self._saved = learned
