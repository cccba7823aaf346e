"""A request on its way: its tokens, where their KV stands, and what is still to be computed."""

from __future__ import annotations

import secrets

import numpy as np
from jaxtyping import Bool, Int, Integer

from kvfunc.history import HOLE, NEVER, Drop, History
from kvfunc.rows import Rows

from .interface import Deliver, Job, Usage
from .thinking import Span

Indices = Integer[np.ndarray, " n"]
Slots = Int[np.ndarray, " n"]
Mask = Bool[np.ndarray, " n"]
Table = Int[np.ndarray, "columns rows"]  # Rows.COLUMNS, one row of the table a column
_COLUMN = {name: index for index, name in enumerate(Rows.COLUMNS)}


class Sequence:
    """One answer: the prompt, what has been generated, and the slots it holds.

    Attributes:
      number: of its arrival.
      passed: how many later requests have been admitted before it.
      admitted: when its turn came first, on the clock of `time.perf_counter`; None before.
      preempted: how many times it has made way.
      tokens: int32 ids of the prompt and of the answer, as far as it goes: `length` of them.
      history: of all `tokens`; an answer that drops its thinking adds to the events.
      slots: int32, where the KV of a token stands that this request holds, HOLE for others.
      spare: slots that it holds and has no token for yet.
      approximate: which tokens' KV rests on an estimate, or will.
      estimated: raw indices of those whose KV is an estimate made for this request.
      asked: raw indices of the prompt that were to be computed when its turn came.
      queries: raw indices that must be computed before the next token can be chosen.
    """

    def __init__(self, job: Job, deliver: Deliver, number: int):
        self.job, self.deliver, self.number = job, deliver, number
        self.passed = self.preempted = 0
        self.admitted: float | None = None
        self.cancelled = False
        self.cold = False  # whether it is to be placed with nothing found
        self.restarted = False  # whether that has been tried
        self.postponed = False  # whether the last step had no room for it
        self.usage: Usage | None = None
        self.asked = np.zeros(0, np.int64)
        self.lane: int | None = None  # of the sampler, while it runs
        self.lane_is_set = False
        self.prompt = self.length = len(job.tokens)
        self.history = job.history.extend(job.max_tokens)
        self.tokens = np.concatenate([job.tokens, np.zeros(job.max_tokens, np.int32)])
        seed = job.sampling.seed
        self.seed = secrets.randbits(63) if seed is None else seed
        self._edited = bool(job.history.events)
        self._scanner = job.thinking and job.thinking.scanner(job.tokens)
        self._clear()

    @property
    def generated(self) -> int:
        """How many tokens the answer has."""
        return self.length - self.prompt

    @property
    def stream(self) -> Slots:
        """The ids of prompt and answer."""
        return self.tokens[:self.length]

    @property
    def computed(self) -> int:
        """Tokens from the start whose KV stands, or need not."""
        return int(self.queries[0]) if len(self.queries) else self.length

    @property
    def decodes(self) -> bool:
        """Whether only its newest token is to be computed, with all others resident."""
        return len(self.queries) == 1 and self.generated > 0

    def shared_with(self, other: Sequence) -> int:
        """How many (events, token) the two begin with in common."""
        stop = min(self.length, other.length, self.history.common_prefix(other.history))
        differs = np.flatnonzero(self.tokens[:stop] != other.tokens[:stop])
        return int(differs[0]) if len(differs) else stop

    @property
    def last_slot(self) -> int:
        """The slot of the token before the next query, HOLE if it has none."""
        return int(self.slots[self.queries[0] - 1]) if self.queries[0] else HOLE

    def _clear(self) -> None:
        self.slots = np.full(len(self.tokens), HOLE, np.int32)
        self._resident = np.zeros(len(self.tokens), bool)
        self.approximate = np.zeros(len(self.tokens), bool)
        self.estimated = np.zeros(0, np.int64)
        self.spare = np.zeros(0, np.int32)
        self.queries = np.zeros(0, np.int64)
        self._table: Table | None = None

    def unplace(self) -> Slots:
        """Forget where the KV stands; the slots that were held."""
        held = np.concatenate([self.slots[self.slots != HOLE], self.spare])
        self._clear()
        return held

    def place(self, resident: Slots, approximate: Mask | None = None,
              estimated: Integer[np.ndarray, " estimated"] | None = None) -> None:
        """Build on resident KV: what is read is taken over, what is missing becomes queries.

        Args:
          resident: where the KV of each token of the stream stands, HOLE for none.
          approximate: which of it rests on an estimate; None: nothing.
          estimated: raw indices of missing tokens that get an estimate; None: none does.
        """
        self.slots[:self.length] = resident
        missing = np.zeros(len(self.tokens), bool)
        missing[:self.length] = resident == HOLE
        if estimated is not None:
            missing[estimated] = False
            self.estimated = estimated
        rests = np.zeros(len(self.tokens), bool)
        rests[:self.length] = False if approximate is None else approximate
        rests[self.estimated] = True
        if rests.any():  # whatever is computed behind an estimate rests on it too
            computed = ~rests
            computed[:self.length] &= resident == HOLE
            self.approximate = rests | (computed & (np.cumsum(rests) > 0))
        self.queries = self.history.needed(missing, [self.length - 1])
        if self._edited:
            read = self.history.read_by(self.queries) | (self.history.visible_until == NEVER)
            self.slots[~read] = HOLE
        self._resident = self.slots != HOLE

    def room(self, chunk: int) -> int:
        """The most slots beyond those it holds that computing its queries takes at any time.

        Args:
          chunk: most queries of a step.
        """
        mine = np.flatnonzero(self.slots[:self.length] != HOLE)
        new = self.queries[self.slots[self.queries] == HOLE]
        new = np.union1d(new, self.estimated[self.slots[self.estimated] == HOLE])
        most = most_slots(self.history, mine, new, self.length, chunk)
        return max(most - len(mine) - len(self.spare), 0)

    def lacks(self, queries: Indices) -> int:
        """How many further slots these queries need."""
        return int((self.slots[queries] == HOLE).sum()) - len(self.spare)

    def assign(self, queries: Indices) -> Slots:
        """Give the queries their slots; where each writes, HOLE for KV that is resident."""
        without = queries[self.slots[queries] == HOLE]
        self.slots[without], self.spare = self.spare[:len(without)], self.spare[len(without):]
        return np.where(self._resident[queries], HOLE, self.slots[queries]).astype(np.int32)

    def take_estimates(self) -> Slots:
        """Give the estimated tokens their slots, where they count as resident."""
        slots = self.assign(self.estimated)
        self._resident[self.estimated] = True
        return slots

    def compute_too(self, queries: Indices) -> None:
        """These tokens have an estimate, and are to be computed all the same."""
        self._resident[queries] = False
        self.queries = np.union1d(self.queries, queries)

    def table(self, queries: Indices) -> Table:
        """The rows of these queries, the first of them at place 0."""
        if not self.decodes:
            rows = self.history.rows(queries, self.slots)
            return np.stack([getattr(rows, name) for name in Rows.COLUMNS])
        query = int(queries[0])
        if self._table is None or self.history.events_between(query, query + 1):
            rows = self.history.rows(queries, self.slots)
            self._table = np.stack([getattr(rows, name) for name in Rows.COLUMNS])
        else:
            self._extend_table(query)
        return self._table

    def _extend_table(self, query: int) -> None:
        """One more token, which sees all that the one before saw, and itself."""
        slot, last = int(self.slots[query]), self._table[:, -1]
        if query < last[_COLUMN["raw"]] + last[_COLUMN["length"]]:
            return  # the query was put off, and has its row
        if slot == last[_COLUMN["slot"]] + last[_COLUMN["length"]] and (
                query == last[_COLUMN["raw"]] + last[_COLUMN["length"]]):
            last[_COLUMN["length"]] += 1
            return
        row = dict(q_start=0, q_len=1, slot=slot, length=1, raw=query,
                   birth=self.history.births[query], shift=0, visible_until=NEVER)
        column = np.array([[row[name]] for name in Rows.COLUMNS], np.int32)
        self._table = np.concatenate([self._table, column], axis=1)

    def advance(self, queries: Indices) -> None:
        """These queries, the next ones, were computed."""
        self.queries = self.queries[len(queries):]

    def drops_behind(self, query: int) -> bool:
        """Whether some KV was read for the last time by this query."""
        return bool(self.history.events_between(query + 1, query + 2))

    def let_go(self) -> Slots:
        """The slots of tokens that nothing will read any more; they are held no longer."""
        if not self._edited:
            return np.zeros(0, np.int32)
        slots = self.slots[:self.length]
        gone = (slots != HOLE) & (self.history.visible_until[:self.length] <= self.computed)
        slots, self.slots[:self.length][gone] = slots[gone], HOLE
        return slots

    def append(self, token: int) -> None:
        """The answer has one more token."""
        self.tokens[self.length] = token
        self.queries = np.array([self.length])
        self.length += 1
        for span in self._scanner.push([token]) if self._scanner else ():
            self._drop(span)

    def _drop(self, span: Span) -> None:
        """The newest token completes a span of thinking: from the next one on nobody sees it."""
        if span.start == span.stop:
            return
        event = Drop(span.at, ((span.start, span.stop),))
        history = History(self.length, [*self.history.events, event])
        self.history = history.extend(len(self.tokens) - self.length)
        self._edited = True


def most_slots(history: History, held: Integer[np.ndarray, " held"],
               new: Integer[np.ndarray, " new"], length: int, chunk: int) -> int:
    """How many slots are held at most while queries run, where KV goes once nothing reads it.

    Args:
      history: of `length` tokens or more.
      held: raw indices of tokens that have a slot from the start.
      new: of those that get one when their query runs.
      length: tokens that are there.
      chunk: most queries of a step; what nothing reads any more goes after each.
    """
    if not history.events or not len(new):
        return len(held) + len(new)
    until = history.visible_until[np.concatenate([held, new])]
    change = np.bincount(new, minlength=length)
    change -= np.bincount(until[until < length], minlength=length)
    return len(held) + min(len(new), int(np.cumsum(change).max()) + chunk)
