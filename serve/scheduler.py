"""Who runs next: admission, the work of the next step, and who makes way when room is short.

Every running request that can choose its next token is in every step, and what is left of the step
goes to prompts, the earliest request first. Of those that wait, the one that shares most with what
is resident comes next, so that KV is used while it is there; but nobody is passed over for ever.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from collections.abc import Sequence as Several

import numpy as np

from kvfunc.history import HOLE

from .bases import Bases, approximate
from .interface import CapacityExceeded, End, Plan
from .pages import Pages
from .radix import Tree
from .sequence import Indices, Mask, Sequence, Slots, Table
from .sharing import Estimate, Sharing, estimated_by

FAIRNESS = 8  # how many later requests may be admitted before one that waits
LOOKAHEAD = 64  # how many of those that wait are compared
WORTH_WAITING = 0.5  # part of a prompt's work that a running request is about to do
SLOTS_AT_ONCE = 64  # how many slots a growing answer takes at a time, so that its rows are few
EVICTED_AT_ONCE = 1 / 64  # part of the pool, since choosing what to evict takes its time
PADDING_WORTH = 1.5  # how much larger a step may be than what is left to run in it


@dataclasses.dataclass
class Counters:
    """What happened since the start."""

    steps: int = 0
    computed: int = 0  # queries that ran
    found: int = 0  # tokens of admitted requests that were resident
    estimated: int = 0  # tokens whose KV was estimated
    recovered: int = 0  # tokens computed again though what follows them was resident
    evicted: int = 0  # tokens that lost their KV to make room
    preempted: int = 0  # requests that made way for an earlier one


@dataclasses.dataclass(frozen=True)
class Work:
    """A request's part of a step."""

    sequence: Sequence
    queries: Indices
    targets: Slots  # where each writes, HOLE for KV that is resident
    table: Table  # its rows
    is_last: bool  # whether the request's next token can be chosen after it


class Scheduler:
    """Requests that wait and requests that run, over one pool.

    Args:
      pages: the pool's slots.
      tree: what is resident.
      lanes: the most requests that run at once.
      sizes: numbers of queries that a step may have, increasing.
      rows: rows of a step.
      most_rows: rows of a step of one query that runs alone.
      sharing: what estimates are made from; None: none are made.
      estimate: makes the KV of an admitted request's estimates, at once.
    """

    def __init__(self, pages: Pages, tree: Tree, *, lanes: int, sizes: Several[int], rows: int,
                 most_rows: int, sharing: Sharing | None = None,
                 estimate: Callable[[Sequence, list[Estimate]], None] | None = None):
        self.pages, self.tree, self.counters = pages, tree, Counters()
        self.waiting: list[Sequence] = []  # in order of arrival
        self.running: list[Sequence] = []
        self.ended: list[tuple[Sequence, End]] = []  # those that a plan found no room for
        self._lanes, self._sizes, self._rows, self._most_rows = lanes, sizes, rows, most_rows
        self.bases = Bases(tree)
        self._sharing, self._estimate = sharing, estimate

    @property
    def chunk(self) -> int:
        """The most queries of a step."""
        return self._sizes[-1]

    def add(self, sequence: Sequence) -> None:
        """A request arrives, or comes back."""
        place = sum(other.number < sequence.number for other in self.waiting)
        self.waiting.insert(place, sequence)

    def remove(self, sequence: Sequence) -> None:
        """A request ends; its KV stays as long as there is room."""
        if sequence in self.running:
            self._retreat(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def plan(self) -> list[Work]:
        """Admit those whom there is room for, and fill the next step."""
        self._admit()
        order = sorted(self.running, key=lambda s: (not s.postponed, s.number))
        room = self._room_for_prompts(order)
        work: list[Work] = []
        rows = 0
        for sequence in order:
            count = 1 if sequence.decodes else min(room, len(sequence.queries))
            if sequence not in self.running or not count or rows > self._rows:
                sequence.postponed = count > 0
                continue
            made = self._work(sequence, sequence.queries[:count], self._rows - rows)
            sequence.postponed = made is None
            if made is not None:
                room -= 0 if sequence.decodes else len(made.queries)
                work.append(made)
            work = [part for part in work if part.sequence in self.running]
            rows = sum(part.table.shape[1] for part in work)
        return work

    def done(self, work: list[Work]) -> None:
        """The step has run: what it computed can be found from now on."""
        self.counters.steps += 1
        for part in work:
            sequence = part.sequence
            goes_on = sequence.decodes and not sequence.drops_behind(int(part.queries[-1]))
            self.counters.computed += len(part.queries)
            sequence.advance(part.queries)
            if not goes_on:
                self._keep(sequence)
                self.pages.release(sequence.let_go())

    def _room_for_prompts(self, order: list[Sequence]) -> int:
        """How many queries of prompts to run: so many that they nearly fill a compiled size."""
        decodes = sum(s.decodes for s in order)
        prompts = sum(len(s.queries) for s in order if not s.decodes)
        wanted = min(decodes + prompts, self.chunk)
        size = next(size for size in self._sizes if size >= wanted)
        # The smallest sizes take as long as each other: there, nothing is gained by a cut.
        below = max((size for size in self._sizes[2:] if decodes < size < wanted), default=0)
        return (below if below and size > PADDING_WORTH * wanted else wanted) - decodes

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._lanes:
            found = self._next()
            if found is None:
                return
            sequence, resident = found
            if self._place(sequence, resident):
                self.waiting.remove(sequence)
                self.running.append(sequence)
                for other in self.waiting:
                    other.passed += other.number < sequence.number
            elif self.running:
                return
            else:
                self.waiting.remove(sequence)
                self._give_up(sequence)

    def _next(self) -> tuple[Sequence, Slots] | None:
        """Whoever shares most with what is resident, unless that will grow; of equals the first.

        With it comes what is resident of it.
        """
        if self.waiting[0].passed >= FAIRNESS:
            return self.waiting[0], self._find(self.waiting[0])
        best, most = None, -1
        for sequence in self.waiting[:LOOKAHEAD]:
            resident = self._find(sequence)
            found = np.flatnonzero(resident != HOLE)
            if len(found) > most and not self._is_coming(sequence, int(found.max(initial=-1)) + 1):
                best, most = (sequence, resident), len(found)
        return best

    def _find(self, sequence: Sequence) -> Slots:
        return self.tree.find(sequence.job.salt, sequence.stream, sequence.history)

    def share(self, sequence: Sequence, resident: Slots) -> tuple[Slots, Mask, list[Estimate]]:
        """What more there is of a request than its exact KV, for one that takes estimates.

        Returns:
          Its resident KV, which of that rests on estimates, and the estimates to be made.
        """
        rests = np.zeros(len(resident), bool)
        if self._sharing is None or not sequence.job.shares:
            return resident, rests, []
        missing = np.flatnonzero(resident == HOLE)
        planned = self._sharing.plan(sequence, missing, self.bases)
        if planned is None:
            return resident, rests, []
        also = self.tree.find(approximate(sequence.job.salt), sequence.stream, sequence.history)
        rests = (resident == HOLE) & (also != HOLE)
        resident = np.where(rests, also, resident)
        planned = [part for estimate in planned for part in estimate.without(resident != HOLE)]
        return resident, rests, planned

    def _is_coming(self, sequence: Sequence, found: int) -> bool:
        """Whether a running prompt is about to compute much of what is missing of this one."""
        for other in self.running:
            if other.decodes or other.job.salt != sequence.job.salt:
                continue
            coming = sequence.shared_with(other) - max(found, other.computed)
            if coming > 0 and coming >= WORTH_WAITING * (sequence.length - found):
                return True
        return False

    def _place(self, sequence: Sequence, resident: Slots) -> bool:
        """Give a request its resident KV, if there is room for the rest.

        Resident KV can lie scattered over more pages than the request would fill by itself; if it
        is alone and has no room for that reason, it is computed from the start.
        """
        nothing = np.full_like(resident, HOLE), np.zeros(len(resident), bool), []
        ways = [nothing] if sequence.cold else [self.share(sequence, resident), nothing]
        for found, rests, estimates in ways:
            sequence.place(found, rests, estimated_by(estimates))
            sources = [estimate.sources for estimate in estimates]
            for slots in (sequence.slots, *sources):
                self.pages.hold(slots)
            if self._has_room(sequence):
                break
            for slots in (sequence.unplace(), *sources):
                self.pages.release(slots)
            if self.running:
                return False
        else:
            return False
        sequence.cold = False
        self._use(sequence)
        if estimates:
            self._make_room(sequence, sequence.lacks(sequence.estimated))
            self._estimate(sequence, estimates)
            self.counters.estimated += len(sequence.estimated)
            for slots in sources:
                self.pages.release(slots)
        if sequence.usage is None:
            sequence.asked = sequence.queries
            sequence.usage = Plan.of(sequence.job.history, sequence.queries,
                                     sequence.approximate[:sequence.prompt]).usage
            sequence.admitted = time.perf_counter()
        last = int(np.flatnonzero(found != HOLE).max(initial=-1))
        self.counters.found += int((found != HOLE).sum())
        self.counters.recovered += int((sequence.queries < last).sum())
        lanes = {other.lane for other in self.running}
        sequence.lane = next(lane for lane in range(self._lanes) if lane not in lanes)
        sequence.lane_is_set = False
        return True

    def _use(self, sequence: Sequence) -> None:
        self.tree.use(sequence.job.salt, sequence.stream, sequence.history)
        if sequence.approximate.any():
            self.tree.use(approximate(sequence.job.salt), sequence.stream, sequence.history)

    def _has_room(self, sequence: Sequence) -> bool:
        promised = sum(self._pages_for(other) for other in self.running)
        growth = len(self.running) + 1 if self.running else 0
        return self._pages_for(sequence) + promised + growth <= (
            self.pages.free + self.pages.evictable)

    def _pages_for(self, sequence: Sequence) -> int:
        return -(-sequence.room(self.chunk) // self.pages.size)

    def _work(self, sequence: Sequence, queries: Indices, rows: int) -> Work | None:
        """These queries of a request, or as many as there are rows for; None if it waits."""
        if not self._make_room(sequence, sequence.lacks(queries)):
            return None
        targets, table = sequence.assign(queries), sequence.table(queries)
        while table.shape[1] > rows and len(queries) > 1:
            queries = queries[:len(queries) // 2]
            table = sequence.table(queries)
        if table.shape[1] > (self._most_rows if rows == self._rows else rows):
            return None
        return Work(sequence, queries, targets[:len(queries)], table,
                    is_last=len(queries) == len(sequence.queries))

    def _make_room(self, sequence: Sequence, lacking: int) -> bool:
        """Give a request further slots: free ones, evicted ones, or a later request's."""
        if lacking <= 0:
            return True
        pages = -(-lacking // self.pages.size)
        while self.pages.free < pages:
            if self.pages.evictable:
                least = int(self.pages.count * EVICTED_AT_ONCE)
                self.counters.evicted += self.tree.evict(max(pages - self.pages.free, least))
                continue
            last = max(self.running, key=lambda s: s.number)
            if len(self.running) == 1:
                self._start_again(sequence)
            else:
                self._preempt(last)
            if last is sequence:
                return False
        if sequence.decodes:
            ahead = min(SLOTS_AT_ONCE, len(sequence.tokens) - sequence.length + 1)
            pages = max(pages, min(-(-ahead // self.pages.size), self.pages.free))
        new = self.pages.take(pages, sequence.last_slot)
        sequence.spare = np.concatenate([sequence.spare, new])
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """A request makes way; it comes back as the next, and goes on where it was."""
        self.counters.preempted += 1
        sequence.preempted += 1
        self._retreat(sequence)
        sequence.passed = FAIRNESS
        self.add(sequence)

    def _start_again(self, sequence: Sequence) -> None:
        """Lay out anew what has no room though it is alone; if it had that before, it ends."""
        self._retreat(sequence)
        sequence.place(np.full(sequence.length, HOLE, np.int32))
        fits = self._pages_for(sequence) <= self.pages.count
        sequence.unplace()
        if fits and not sequence.restarted:
            sequence.cold = sequence.restarted = True
            self.add(sequence)
        else:
            self._give_up(sequence)

    def _give_up(self, sequence: Sequence) -> None:
        """An answer that has begun ends here; a prompt for which there is no room fails."""
        end = End("length") if sequence.generated else End("error", CapacityExceeded(
            f"the prompt of {sequence.prompt} tokens does not fit into the pool of "
            f"{self.pages.slots} KV slots: shorten it, or restart the server with a larger "
            "--kv-tokens"))
        self.ended.append((sequence, end))

    def _retreat(self, sequence: Sequence) -> None:
        self._keep(sequence)
        self.pages.release(sequence.unplace())
        self.running.remove(sequence)
        sequence.lane = None

    def _keep(self, sequence: Sequence) -> None:
        count, salt = sequence.computed, sequence.job.salt
        rests = sequence.approximate[:count]
        for namespace, kept in ((salt, ~rests), (approximate(salt), rests)):
            stop = int(np.flatnonzero(kept).max(initial=-1)) + 1
            if stop:
                slots = np.where(kept, sequence.slots[:count], HOLE)[:stop]
                self.tree.insert(namespace, sequence.tokens[:stop], sequence.history, slots,
                                 is_answer=stop > sequence.prompt)
