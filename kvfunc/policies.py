"""What to drop and when: policies are values of one signature.

A policy reads a history as far as it has come and returns the whole schedule of its events. It is
deterministic and looks backwards only, so that earlier events never change while a conversation
grows: *the schedule of a prefix is the prefix of the schedule*. The KV cache keeps its hits by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Unit:
    """One message of a history, as a policy sees it."""

    role: str
    tokens: int  # that a drop of this message removes
    end: int  # raw index behind its last token; text that belongs to nobody may stand between units


@dataclasses.dataclass(frozen=True)
class Part:
    """Less than a whole message: its header, its footer and the rest of it stay."""

    message: int
    chars: tuple[int, int] | None = None  # of its content, half-open; None: its thinking


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Events by message index: what leaves the context, and where its gaps are closed.

    At one message its drops come first, then the repos.
    """

    drop: Mapping[int, tuple[int | Part, ...]] = dataclasses.field(default_factory=dict)
    """Trigger -> messages, or parts, that are dropped behind the trigger's last token."""
    reposition: tuple[int, ...] = ()
    """Messages behind whose last token the live tokens are renumbered; strictly increasing."""

    def __bool__(self) -> bool:
        return bool(self.drop or self.reposition)


Policy = Callable[[Sequence[Unit]], Schedule]


def rolling_tool_outputs(keep: int = 12, reposition_above_tokens: int | None = None) -> Policy:
    """Drop every tool output but the newest `keep`.

    The arrival of tool output number `keep + i` (in order, from 0) drops number `i`, one by one
    also where a turn has several calls. The arriving output itself is computed with number `i`
    still visible.

    Args:
      keep: how many tool outputs stay visible.
      reposition_above_tokens: close the gaps behind the first message at whose end the next
        position is larger than this, provided that something was dropped since the last time.
        None: never.

    Raises:
      ValueError: for `keep` below 1 or a negative `reposition_above_tokens`.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}: no answer would ever see the tool "
                         "output it answers")
    if reposition_above_tokens is not None and reposition_above_tokens < 0:
        raise ValueError("reposition_above_tokens must be at least 0, or None for never, "
                         f"got {reposition_above_tokens}")

    def schedule(units: Sequence[Unit]) -> Schedule:
        drop: dict[int, tuple[int, ...]] = {}
        reposition: list[int] = []
        outputs: list[int] = []
        gap = closed = 0  # tokens dropped since the last repos, and closed by all of them
        for index, unit in enumerate(units):
            if unit.role == "tool":
                outputs.append(index)
                if len(outputs) > keep:
                    oldest = outputs[-keep - 1]
                    drop[index] = (oldest,)
                    gap += units[oldest].tokens
            if (reposition_above_tokens is not None and gap
                    and unit.end - closed > reposition_above_tokens):
                reposition.append(index)
                closed, gap = closed + gap, 0
        return Schedule(drop, tuple(reposition))

    return schedule
