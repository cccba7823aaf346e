"""A history of events, compiled to integers: who sees what, and at which position.

A history is a number of tokens and the events standing between them. From it follow, in linear
time and without touching any KV, the birth of every token, the stage it is computed in, the first
query that may not see it, and the rows of any chunk of queries. NumPy on the host.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Int, Integer

from kvfunc.rows import Rows

NEVER = Rows.NEVER
HOLE = -1  # in an array of slots: this token has no KV
DROPPED = -1  # in an array of positions: this token is not live

Range = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Drop:
    """Before token `at`, the tokens of the half-open raw `ranges` leave the attention."""

    at: int
    ranges: tuple[Range, ...]


@dataclasses.dataclass(frozen=True)
class Repos:
    """Before token `at`, the live tokens are renumbered 0, 1, 2, …"""

    at: int


Event = Drop | Repos


@dataclasses.dataclass(frozen=True)
class Run:
    """Neighbouring tokens of one class; see `History.classify`."""

    start: int
    stop: int
    kind: str  # one of History.KINDS
    position: int | None  # of the first token at the history's end; None where dropped


class History:
    """`tokens` tokens and the events between them, normalised and compiled.

    Attributes:
      tokens: how many.
      events: the effective ones, in order: drops hold net ranges, merged and sorted; drops that
        follow one another at one boundary are one; a repos that changes nothing is left out.
      births: [tokens] int32, the RoPE position that each key is written at.
      stage: [tokens] int32, how many effective repos events stand before the token.
      visible_until: [tokens] int32, raw index of the first query that may not see the token.
      live: how many tokens are live at the end.
      next_position: where the next token would be born.
      largest_birth: the largest position ever given out, -1 for no tokens.

    Raises:
      ValueError: for events out of order or outside the history, and for a drop of tokens that do
        not stand before the event.
    """

    KINDS = ("computed", "cached", "repos", "drop_skipped", "approximate")

    def __init__(self, tokens: int, events: Iterable[Event] = ()):
        if tokens < 0:
            raise ValueError(f"tokens must be at least 0, got {tokens}")
        self.tokens = tokens
        effective: list[Event] = []
        dropped_by = np.full(tokens, NEVER, np.int32)  # index of the event, for order at a boundary
        self._stage_start, self._stage_event, stage_base = [0], [-1], [0]
        seen = live = next_position = 0
        for event in events:
            if not seen <= event.at <= tokens:
                raise ValueError(
                    f"{event} must stand at or after token {seen} (events are given in order) and "
                    f"not after token {tokens}, the history's end")
            live += event.at - seen
            next_position += event.at - seen
            seen = event.at
            if isinstance(event, Repos):
                if next_position != live:
                    self._stage_start.append(event.at)
                    self._stage_event.append(len(effective))
                    stage_base.append(live)
                    next_position = live
                    effective.append(event)
                continue
            merges = bool(effective) and isinstance(effective[-1], Drop) and (
                effective[-1].at == event.at)
            index = len(effective) - merges
            net = _take_live(dropped_by, event, index)
            live -= sum(stop - start for start, stop in net)
            if net:
                before = effective[-1].ranges if merges else ()
                effective[index:] = [Drop(event.at, _union([*before, *net]))]
        self.events = tuple(effective)
        self.live = live + tokens - seen
        self.next_position = next_position + tokens - seen

        self._event_at = [event.at for event in effective]
        event_at = np.array(self._event_at, np.int32)
        dropped = dropped_by != NEVER
        self.visible_until = np.full(tokens, NEVER, np.int32)
        self.visible_until[dropped] = event_at[dropped_by[dropped]]
        stage_lengths = np.diff([*self._stage_start, tokens])
        self.stage = np.repeat(np.arange(len(stage_base), dtype=np.int32), stage_lengths)
        offset = np.array(stage_base) - np.array(self._stage_start)
        self.births = (np.arange(tokens) + np.repeat(offset, stage_lengths)).astype(np.int32)
        self.largest_birth = int(self.births.max(initial=-1))

        breaks = np.ones(tokens, bool)
        breaks[1:] = (np.diff(dropped_by) != 0) | (np.diff(self.stage) != 0)
        self._segment_breaks = breaks
        self._segments = np.flatnonzero(breaks)
        self._segment_dropped_by = dropped_by[self._segments]

    def __repr__(self) -> str:
        return f"History({self.tokens}, {list(self.events)})"

    def extend(self, tokens: int) -> History:
        """The same history with `tokens` further tokens at its end."""
        if tokens < 0:
            raise ValueError(f"tokens must be at least 0, got {tokens}")
        longer = copy.copy(self)
        longer.tokens, longer.live = self.tokens + tokens, self.live + tokens
        longer.next_position = self.next_position + tokens
        new = np.arange(tokens, dtype=np.int32)
        stage = len(self._stage_start) - 1

        def grown(old: np.ndarray, more: np.ndarray) -> np.ndarray:
            return np.concatenate([old, more.astype(old.dtype)])

        longer.births = grown(self.births, self.next_position + new)
        longer.stage = grown(self.stage, np.full(tokens, stage))
        longer.visible_until = grown(self.visible_until, np.full(tokens, NEVER))
        if tokens:
            longer.largest_birth = max(self.largest_birth, int(longer.births[-1]))
            goes_on = (self.tokens > 0 and self.stage[-1] == stage
                       and self.visible_until[-1] == NEVER)
            first = (new == 0) & (not goes_on)
            longer._segment_breaks = grown(self._segment_breaks, first)
            started = new[first]
            longer._segments = grown(self._segments, self.tokens + started)
            longer._segment_dropped_by = grown(self._segment_dropped_by,
                                               np.full(len(started), NEVER))
        return longer

    def events_between(self, start: int, stop: int) -> tuple[Event, ...]:
        """The effective events that stand before one of the tokens [start, stop)."""
        first = bisect.bisect_left(self._event_at, start)
        return self.events[first:bisect.bisect_left(self._event_at, stop, first)]

    def common_prefix(self, other: History) -> int:
        """How many tokens both histories begin with, as far as events go (token ids aside).

        KV at a token is a function of the tokens and of the events before it: the two may differ
        in any later event (semantics, "the radix key").
        """
        return min(self.tokens, other.tokens, first_difference(self.events, other.events))

    def positions(self, stage: int | None = None) -> Int[np.ndarray, " tokens"]:
        """The position of every token: at the end, or as the queries of one stage see it.

        Args:
          stage: None for the history's end; otherwise tokens that were dropped within that stage
            still have their position, since its earlier queries see them.

        Returns:
          [tokens] int32, `DROPPED` where the token is not live, or not yet written in that stage.
        """
        last = len(self._stage_start) - 1
        starts = self._of_tokens(self._segment_positions(last if stage is None else stage))
        positions = starts + np.arange(self.tokens) - self._of_tokens(self._segments)
        gone = starts == DROPPED
        if stage is None:
            gone |= self.visible_until != NEVER
        else:
            gone |= self.stage > stage
        positions[gone] = DROPPED
        return positions.astype(np.int32)

    def needed(self, missing: Bool[np.ndarray, " tokens"],
               wanted: Sequence[int]) -> Integer[np.ndarray, " queries"]:
        """The tokens to compute so that the queries `wanted` can run: the reverse closure.

        A missing token is computed only if some query that is computed can read it.

        Args:
          missing: which tokens have no KV.
          wanted: raw indices of the queries whose outputs are wanted; they are computed always.

        Returns:
          Raw indices, increasing.
        """
        must = np.zeros(self.tokens, bool)
        must[list(wanted)] = True
        breaks = self._segment_breaks.copy()
        breaks[1:] |= (missing[1:] != missing[:-1]) | (must[1:] != must[:-1])
        starts = np.flatnonzero(breaks)
        stops = [*starts[1:].tolist(), self.tokens]
        chosen = np.zeros(self.tokens, bool)
        next_query = NEVER  # the nearest computed query behind the run
        runs = zip(starts.tolist(), stops, missing[starts].tolist(), must[starts].tolist(),
                   self.visible_until[starts].tolist(), strict=True)
        for start, stop, is_missing, is_wanted, until in reversed(list(runs)):
            if is_wanted or (is_missing and next_query < until):
                chosen[start:stop] = True
                next_query = start
        return np.flatnonzero(chosen)

    def rows(self, queries: Integer[np.ndarray, " queries"],
             slots: Integer[np.ndarray, " tokens"]) -> Rows:
        """The rows through which these queries read the keys they may see.

        Args:
          queries: raw indices of the packed queries, increasing.
          slots: [tokens] where each token's KV stands or will have been written, `HOLE` for none.

        Returns:
          Rows in NumPy, neither padded nor bounded.

        Raises:
          ValueError: if a query may see a token that is a hole.
        """
        queries = np.asarray(queries)
        if not len(queries):
            return Rows.empty()
        cuts = self._segment_breaks.copy()
        cuts[1:] |= np.diff(slots) != 1
        every_start = np.flatnonzero(cuts)
        every_stop = np.append(every_start[1:], self.tokens)
        tables = []
        stages, group_starts = np.unique(self.stage[queries], return_index=True)
        for stage, first, last in zip(stages, group_starts, [*group_starts[1:], len(queries)],
                                      strict=True):
            group = queries[first:last]
            seen = (every_start <= group[-1]) & (self.visible_until[every_start] > group[0])
            start = every_start[seen]
            stop = np.minimum(every_stop[seen], group[-1] + 1)
            hole = slots[start] == HOLE
            self._check_holes(start[hole], group)
            start, stop = start[~hole], stop[~hole]
            segment = np.searchsorted(self._segments, start, side="right") - 1
            shift = self._segment_shifts(int(stage))[segment]
            count = len(start)
            tables.append(Rows(
                q_start=np.full(count, first, np.int32), q_len=np.full(count, len(group), np.int32),
                slot=slots[start].astype(np.int32), length=(stop - start).astype(np.int32),
                raw=start.astype(np.int32), birth=self.births[start], shift=shift.astype(np.int32),
                visible_until=self.visible_until[start], query_raw=np.zeros(0, np.int32)))
        joined = {name: np.concatenate([getattr(table, name) for table in tables])
                  for name in Rows.COLUMNS}
        return Rows(**joined, query_raw=queries.astype(np.int32))

    def read_by(self, queries: Integer[np.ndarray, " queries"]) -> Bool[np.ndarray, " tokens"]:
        """Which tokens some of these queries may see.

        Args:
          queries: raw indices, increasing.
        """
        return self._of_tokens(self._last_readers(queries)) >= np.arange(self.tokens)

    def classify(self, computed: Integer[np.ndarray, " queries"],
                 approximate: Bool[np.ndarray, " tokens"] | None = None) -> list[Run]:
        """What a request that computes these queries does with each token (usage counters).

        Each token falls into the first class that fits: computed; `approximate` (its KV rests on an
        estimate); `drop_skipped` (dropped at the end, and no computed query sees it); `repos` (a
        computed query reads it at a shift other than 0); `cached`.

        Args:
          computed: raw indices of the queries that run, increasing.
          approximate: which tokens' KV rests on an estimate; None: that of none.
        """
        computed = np.asarray(computed, np.int64)
        last = self._last_readers(computed)
        reads = last > self._segments
        moved = np.zeros(len(self._segments), bool)
        moved[reads] = self._has_moved(np.flatnonzero(reads), self.stage[last[reads]])
        seen = self._of_tokens(last) > np.arange(self.tokens)
        kind = np.full(self.tokens, self.KINDS.index("cached"), np.int8)
        kind[~seen & (self.visible_until != NEVER)] = self.KINDS.index("drop_skipped")
        kind[seen & self._of_tokens(moved)] = self.KINDS.index("repos")
        if approximate is not None:
            kind[approximate] = self.KINDS.index("approximate")
        kind[computed] = self.KINDS.index("computed")
        positions = self.positions()
        dropped = positions == DROPPED
        breaks = np.ones(self.tokens, bool)
        breaks[1:] = (np.diff(kind) != 0) | (dropped[1:] != dropped[:-1])
        breaks[1:] |= ~dropped[1:] & (np.diff(positions) != 1)
        starts = np.flatnonzero(breaks)
        columns = (starts, np.append(starts[1:], self.tokens), kind[starts], positions[starts])
        return [Run(start, stop, self.KINDS[which], None if position == DROPPED else position)
                for start, stop, which, position in zip(*(x.tolist() for x in columns),
                                                        strict=True)]

    def _of_tokens(self, of_segments: np.ndarray) -> np.ndarray:
        return np.repeat(of_segments, np.diff(self._segments, append=self.tokens))

    def _last_readers(self, queries: np.ndarray) -> np.ndarray:
        """For each segment the last of some queries that its drop does not come before, or -1.

        It sees those tokens of the segment that do not stand behind it.
        """
        last = np.searchsorted(queries, self.visible_until[self._segments]) - 1
        return np.append(queries, -1)[last]

    def _has_moved(self, segments: np.ndarray, stages: np.ndarray) -> np.ndarray:
        """Which segments stand elsewhere than where they were born, each as seen from a stage.

        Such a one has a token before it whose gap was closed since its birth.
        """
        closed_in = np.searchsorted(self._stage_event, self._segment_dropped_by, side="right")
        first_closed = np.full(len(self._stage_event) + 1, NEVER, np.int64)
        np.minimum.at(first_closed, closed_in, self._segments)
        # level[i][c]: the first token among those closed in the 2^i stages from c on.
        level = [first_closed]
        while 2 ** len(level) <= len(first_closed):
            half = 2 ** (len(level) - 1)
            level.append(np.minimum(level[-1][:-half], level[-1][half:]))
        born = self.stage[self._segments[segments]]
        since = stages - born
        moved = np.zeros(len(segments), bool)
        for i, first in enumerate(level):
            here = np.flatnonzero((since > 0) & (np.log2(np.maximum(since, 1)).astype(int) == i))
            earliest = np.minimum(first[born[here] + 1], first[stages[here] - 2**i + 1])
            moved[here] = earliest < self._segments[segments[here]]
        return moved

    def _segment_positions(self, stage: int) -> Int[np.ndarray, " segments"]:
        """Where the first token of each segment stands in a stage; DROPPED if gone before it.

        A segment is a run of tokens of one stage that one event (or none) drops.
        """
        lengths = np.diff([*self._segments, self.tokens])
        older = self._segments < self._stage_start[stage]
        survives = older & (self._segment_dropped_by > self._stage_event[stage])
        rank = np.cumsum(lengths * survives) - lengths * survives
        born = self.births[self._segments]
        return np.where(older, np.where(survives, rank, DROPPED), born)

    def _segment_shifts(self, stage: int) -> Int[np.ndarray, " segments"]:
        return self.births[self._segments] - self._segment_positions(stage)

    def _check_holes(self, holes: np.ndarray, queries: np.ndarray) -> None:
        first = np.searchsorted(queries, holes)
        reads = queries[np.minimum(first, len(queries) - 1)]
        bad = (reads >= holes) & (reads < self.visible_until[holes])
        if bad.any():
            raise ValueError(
                f"query {reads[bad][0]} may see token {holes[bad][0]}, which has no slot; compute "
                "the tokens that History.needed lists first")


def first_difference(mine: Iterable[Event], theirs: Iterable[Event]) -> int:
    """The raw index before which two streams have the same events; `NEVER` if they all agree."""
    for pair in itertools.zip_longest(mine, theirs):
        if pair[0] != pair[1]:
            return min(event.at for event in pair if event is not None)
    return NEVER


def _take_live(dropped_by: np.ndarray, event: Drop, index: int) -> list[Range]:
    """Mark the live tokens of a drop as dropped by event `index`; return their ranges."""
    net: list[Range] = []
    for start, stop in _union(event.ranges):
        if not 0 <= start < stop <= event.at:
            raise ValueError(
                f"range ({start}, {stop}) of {event} must be non-empty and end at or before token "
                f"{event.at}: a token that is not written yet cannot be dropped")
        live = dropped_by[start:stop] == NEVER
        if live.all():
            net.append((start, stop))
            dropped_by[start:stop] = index
            continue
        edges = np.flatnonzero(np.diff(np.concatenate([[False], live, [False]])))
        net += [(start + int(a), start + int(b)) for a, b in edges.reshape(-1, 2)]
        dropped_by[start:stop][live] = index
    return net


def _union(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sorted, with touching and overlapping ranges merged."""
    merged: list[Range] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)
