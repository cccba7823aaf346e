"""The device side of the server: all that runs goes through one jitted, donating step.

A step is some queries of some requests: chunks of prompts, recovered KV and newest tokens alike,
packed one behind the other, with the rows through which they read the pool. Its shapes come from a
short list, all compiled before the first request.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvfunc.attention import choose
from kvfunc.history import HOLE, History
from kvfunc.models.llama import Llama
from kvfunc.models.load import LoadedModel
from kvfunc.models.params import Progress, shapes
from kvfunc.rows import Rows
from kvfunc.storage import KV, fastest_dtype

from . import eviction, sampler
from .interface import (
    CapacityExceeded,
    ContextLengthExceeded,
    Deliver,
    End,
    EngineFailed,
    Job,
    Plan,
    QueueFull,
    ShuttingDown,
    Token,
    Usage,
)
from .pages import Pages
from .radix import Tree
from .scheduler import Counters, Scheduler, Work
from .sequence import Sequence, most_slots
from .sharing import Estimate, Lesson, Sharing, estimated_by

ROWS = 8192  # of a compiled step; a request that needs more runs alone, in a step of its own
ROWS_OF_ONE = 1024  # of the smallest step, whose time goes with its rows too
BETWEEN = (64, 128, 256)  # compiled numbers of queries between one a request and a whole chunk
SERVICE_WEIGHT = 0.1  # of the newest answer in the mean time that answers take

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Seconds:
    """Where the time of steps went."""

    host: float = 0.0  # planning, packing and delivering
    device: float = 0.0  # from the call of the step to its tokens


def jitted_step(network: Llama, traced: Callable[[], None]) -> Callable[..., Any]:
    """The step of a model: its logits, and the KV that it is given, in place.

    Args:
      network: the model.
      traced: called whenever the step is traced, that is once for each shape.
    """
    def step(params, kv, packed, table, at):
        traced()
        tokens, births, slots, query_raw = packed
        rows = Rows(*table, query_raw=query_raw)
        return network.forward(params, tokens, births, slots, kv, rows, at)

    return jax.jit(step, donate_argnames="kv")


class Engine:
    """Runs many requests at once over one pool, and keeps their KV while there is room.

    `start` lets a thread of its own run steps while there is work, until `close`. Without it,
    whoever submits calls `step`.

    Args:
      model: weights, configuration and tokenizer.
      kv_dtype: number format of the KV; None is that of the weights.
      context_length: positions a request may use; None is the model's own limit.
      kv_tokens: slots of the pool, all requests together, in whole pages.
      page_size: slots that are allocated at a time, 1 to 128.
      max_num_seqs: requests that run at once; others wait.
      chunk: the most queries of a step, so the longest that a running answer waits.
      policy: what is evicted first, one of `eviction.POLICIES`.
      max_queue: how many requests may be there beyond those that run at once.
      attention: the implementation, as `segment_attention` takes it. The attribute of this name
        is what was chosen, never "auto".
      sharing: estimates of texts that prompts share (sharing.py); None: everything is exact.

    Raises:
      ValueError: for sizes out of range, a context beyond the model's, or an unknown `attention`.
      NotImplementedError: if `attention` cannot be used here, or not with this type of KV.
    """

    def __init__(self, model: LoadedModel, *, kv_dtype: DTypeLike | None = None,
                 context_length: int | None = None, kv_tokens: int = 32768, page_size: int = 16,
                 max_num_seqs: int = 16, chunk: int = 512, policy: str = "worth",
                 max_queue: int = 256, attention: str = "auto", sharing: Sharing | None = None):
        config = model.config
        weights_dtype = model.dtype
        _check(config.context_length, context_length, kv_tokens, page_size, max_num_seqs, chunk,
               policy, max_queue)
        self.name, self.config, self.tokenizer = model.name, config, model.tokenizer
        self.context_length = context_length or config.context_length
        self.compilations = 0
        self.seconds = Seconds()
        self._stored = fastest_dtype(weights_dtype if kv_dtype is None else kv_dtype)
        self.attention = choose(attention, self._stored)

        # XLA's CPU products of one row of bfloat16 or int8 fall off the fast path.
        least = 1 if model.params["embed"]["weight"].dtype == jnp.float32 else 2
        self._most = max(max_num_seqs, least)  # tokens chosen in a step
        chunk = max(chunk, self._most)
        self._sizes = sorted({least, self._most, chunk,
                              *(size for size in BETWEEN if self._most < size < chunk)})
        self.kv_tokens = kv_tokens // page_size * page_size
        # The keys that one query sees have positions of their own, so they are never more.
        most_rows = min(self.context_length, self.kv_tokens)
        self._rows = min(ROWS, most_rows)
        self.shapes = [(size, self._rows) for size in self._sizes]  # (tokens, rows) of steps
        if len(self.shapes) > 1:  # a larger one takes what has more rows
            self.shapes[0] = least, min(ROWS_OF_ONE, self._rows)
        if most_rows > self._rows:
            self.shapes.append((least, most_rows))
        work_of_token = sum(math.prod(shape) for place, shape in shapes(config).items()
                            if place != (None, "embed"))
        attention_of_key = 2 * config.layers * config.heads * config.head_dim

        def make_scheduler() -> Scheduler:
            pages = Pages(self.kv_tokens // page_size, page_size)
            tree = Tree(pages, eviction.POLICIES[policy], -(-work_of_token // attention_of_key))
            return Scheduler(pages, tree, lanes=max_num_seqs, sizes=self._sizes, rows=self._rows,
                             most_rows=most_rows, sharing=sharing, estimate=self._estimate)

        self.sharing = sharing
        self._make_scheduler = make_scheduler
        self.scheduler = make_scheduler()
        self._params = model.params
        self._reset_device()
        self.kv_bytes_per_token = self._kv.bytes_per_token
        self._lock = threading.Lock()  # of the scheduler and what hangs on it
        self.most_open = max_num_seqs + max_queue  # requests that run or wait
        self._max_num_seqs = max_num_seqs
        self._open: set[Sequence] = set()  # neither ended nor cancelled
        self._service = 0.0  # seconds from an answer's turn to its end, the mean of late
        self._inbox: queue.SimpleQueue[Sequence] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._wake, self._stopping = threading.Event(), False
        self._thread: threading.Thread | None = None
        self._failed = False

        def traced() -> None:
            self.compilations += 1

        self._step = jitted_step(Llama(config, weights_dtype, self.attention), traced)

    @property
    def shares_messages(self) -> bool:
        """Whether whole messages are shared that no part names."""
        return self.sharing is not None and self.sharing.settings.automatic

    @property
    def counters(self) -> Counters:
        """What happened since the start."""
        return self.scheduler.counters

    def stats(self) -> dict[str, int | float]:
        """What runs, what the pool holds, and the counters; any thread may ask."""
        sharing = self.sharing
        readers, of_readers = (0, 0) if sharing is None else (len(sharing), sharing.bytes)
        with self._lock:
            pages = self.scheduler.pages
            waiting = len(self.scheduler.waiting) + self._inbox.qsize()
            return {"running": len(self.scheduler.running), "waiting": waiting,
                    "free_pages": pages.free, "held_pages": pages.held,
                    "evictable_pages": pages.evictable, **dataclasses.asdict(self.counters),
                    "readers": readers, "reader_bytes": of_readers,
                    "compilations": self.compilations, "host_seconds": self.seconds.host,
                    "device_seconds": self.seconds.device}

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every shape, so that no request waits for a compiler.

        Args:
          progress: called after each with what it was, how many are done, how many there are.
        """
        heads = sorted({self._heads(size) for size in self._sizes})
        total = len(self.shapes) + len(heads) + (self.sharing is not None)

        def tell(what: str, done: int) -> None:
            _log.info("compiled: %s", what)
            if progress is not None:
                progress(what, done, total)

        for done, (size, rows) in enumerate(self.shapes, start=1):
            self._call_step([], size, rows)
            tell(f"step of {size} tokens, {rows} rows", done)
        for done, head in enumerate(heads, start=len(self.shapes) + 1):
            self._lanes = sampler.warm_up(self._lanes, [head])
            tell(f"sampler of {head} tokens", done)
        if self.sharing is not None:
            self._kv = self.sharing.warm_up(self._kv)
            tell("estimates of shared texts", total)

    def check(self, history: History) -> None:
        """Refuse a prompt that can never run.

        Raises:
          ValueError: if it has no tokens.
          ContextLengthExceeded: if a position lies beyond the context, in any stage.
          CapacityExceeded: if its KV does not fit into the pool.
        """
        if not history.tokens:
            raise ValueError("the prompt has no tokens: give at least one")
        longest = max(history.largest_birth, history.next_position) + 1
        if longest > self.context_length:
            raise ContextLengthExceeded(
                f"the prompt of {history.tokens} tokens needs {longest} positions, one for the "
                f"answer included, and the context has {self.context_length}: shorten it, or drop "
                "messages and reposition earlier in the history")
        queries = history.needed(np.ones(history.tokens, bool), [history.tokens - 1])
        slots = most_slots(history, queries[:0], queries, history.tokens, self.scheduler.chunk)
        if slots > self.kv_tokens:
            raise CapacityExceeded(
                f"the prompt needs {slots} KV slots and the pool has {self.kv_tokens}: shorten it, "
                "or restart the server with a larger --kv-tokens")

    def check_queue(self, count: int) -> None:
        """Refuse so many further answers while there is no place for them in the queue.

        Raises:
          QueueFull: if more than `most_open` would run and wait.
          EngineFailed: if its thread has died.
        """
        if self._failed:
            raise EngineFailed("the engine has failed and runs nothing any more: restart the "
                               "server; its log says what happened")
        there = len(self._open)
        if there + count <= self.most_open:
            return
        waiting = max(there - self._max_num_seqs, 0) + count
        seconds = max(math.ceil(self._service * waiting / self._max_num_seqs), 1)
        raise QueueFull(
            f"{there} answers run and wait, and {count} more would pass the {self.most_open} that "
            f"may: ask again in {seconds} s, or restart the server with a larger --max-queue",
            seconds)

    def max_new_tokens(self, history: History) -> int:
        """How many tokens the context has left for an answer."""
        return self.context_length - history.next_position

    def plan(self, job: Job) -> Plan:
        """What a request would find, estimate and compute; nothing is run and nothing is taken."""
        sequence = Sequence(job, lambda _: None, -1)
        with self._lock:
            resident = self.scheduler.tree.find(job.salt, job.tokens, job.history)
            resident, rests, estimates = self.scheduler.share(sequence, resident)
        sequence.place(resident, rests, estimated_by(estimates))
        return Plan.of(job.history, sequence.queries, sequence.approximate[:sequence.prompt])

    def submit(self, job: Job, deliver: Deliver) -> Answer:
        """Let a request wait for its turn; any thread may.

        Args:
          job: the request. Its answer ends at the context's end at the latest.
          deliver: called from the engine's thread with each token and, last, an `End`; it must
            not block.

        Raises:
          ValueError, ContextLengthExceeded, CapacityExceeded: as `check`.
          QueueFull, EngineFailed: as `check_queue`.
        """
        self.check(job.history)
        self.check_queue(1)
        room = self.max_new_tokens(job.history)
        if job.max_tokens > room:
            job = dataclasses.replace(job, max_tokens=room)
        sequence = Sequence(job, deliver, next(self._numbers))
        self._open.add(sequence)
        self._inbox.put(sequence)
        self._wake.set()
        return Answer(sequence, self._open, self._wake)

    @property
    def alive(self) -> bool:
        """Whether its thread runs, and so whether anything will be answered."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Run steps in a thread whenever there is work."""
        if self._thread is None:
            self._stopping = self._failed = False
            self._thread = threading.Thread(target=self._loop, name="kvfunc-engine", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread after the step that runs; answers that are not complete end with it."""
        if self._thread is not None:
            self._stopping = True
            self._wake.set()
            self._thread.join()
            self._thread = None
        self._end_all(ShuttingDown("the engine was closed before this answer was complete"))

    def clear(self) -> None:
        """Forget all KV that no running request holds."""
        with self._lock:
            self.scheduler.tree.clear()

    def step(self) -> bool:
        """Run one step; False if nothing is left to do.

        A fault of the device ends every answer that runs or waits, and the engine goes on empty.
        """
        start, before = time.perf_counter(), self.seconds.device
        try:
            with self._lock:
                self._receive()
                work = self.scheduler.plan()
                ended, self.scheduler.ended = self.scheduler.ended, []
            for sequence, end in ended:
                self._deliver(sequence, end)
            if work:
                self._run(work)
        except Exception as error:
            _log.exception("a step failed")
            self._end_all(error)
            self._reset_device()
        waited = self.seconds.device - before
        self.seconds.host += time.perf_counter() - start - waited
        return bool(self.scheduler.running or self.scheduler.waiting or not self._inbox.empty())

    def _loop(self) -> None:
        try:
            while not self._stopping:
                self._wake.wait()
                self._wake.clear()
                while not self._stopping and self.step():
                    pass
        except Exception as error:  # not even the recovery of a step was possible
            _log.critical("the engine has failed", exc_info=error)
            self._failed = True  # from here on nothing is submitted any more
            self._end_all(EngineFailed("the engine failed on this request: restart the server"))

    def _receive(self) -> None:
        scheduler = self.scheduler
        while not self._inbox.empty():
            scheduler.add(self._inbox.get())
        for sequence in [*scheduler.waiting, *scheduler.running]:
            if sequence.cancelled:
                scheduler.remove(sequence)

    def _run(self, work: list[Work]) -> None:
        """Compute, choose tokens and hand them out."""
        count = sum(len(part.queries) for part in work)
        rows = sum(part.table.shape[1] for part in work)
        size, rows = next((size, most) for size, most in self.shapes
                          if size >= count and most >= rows)
        choosing = [part.sequence for part in work if _chooses(part)]
        self._begin_lanes(choosing)
        start = time.perf_counter()
        logits = self._call_step(work, size, rows)
        chosen = self._choose(logits, choosing)
        self.seconds.device += time.perf_counter() - start
        ended: list[tuple[Sequence, End]] = []
        lessons: list[tuple[Sequence, Lesson]] = []
        with self._lock:
            self.scheduler.done(work)
            for part in work:
                if part.is_last and not part.sequence.job.max_tokens:
                    self.scheduler.remove(part.sequence)
                    ended.append((part.sequence, End("length")))
            for sequence, token in zip(choosing, chosen, strict=True):
                sequence.append(token.id)
                if token.id in sequence.job.sampling.stop_ids:
                    end = End("stop")
                elif sequence.generated == sequence.job.max_tokens:
                    end = End("length")
                else:
                    continue
                if self.sharing is not None:
                    lessons += [(sequence, lesson) for lesson in self.sharing.lessons(
                        sequence, self.scheduler.bases)]
                self.scheduler.remove(sequence)
                ended.append((sequence, end))
        for sequence, token in zip(choosing, chosen, strict=True):
            self._deliver(sequence, token)
        if self.sharing is not None:
            self._predict_errors(choosing, logits)
        for sequence, end in ended:
            self._deliver(sequence, end)
        # What is read here is resident still: only the next plan may evict it.
        for sequence, lesson in lessons:
            self.sharing.learn(self._kv, lesson, int(sequence.history.births[lesson.share.start]))

    def _estimate(self, sequence: Sequence, estimates: list[Estimate]) -> None:
        """Make the KV of an admitted request's estimates."""
        targets = np.split(sequence.take_estimates(),
                           np.cumsum([len(estimate.raw) for estimate in estimates])[:-1])
        for estimate, mine in zip(estimates, targets, strict=True):
            birth = int(sequence.history.births[estimate.share.start])
            self._kv, too = self.sharing.run(self._kv, estimate, mine, birth)
            sequence.compute_too(too)

    def _predict_errors(self, choosing: list[Sequence], logits: jax.Array) -> None:
        """Say of prompts with estimates that have just been computed how good those may be."""
        for place, sequence in enumerate(choosing):
            if sequence.generated == 1 and sequence.approximate[:sequence.prompt].any():
                with self._lock:  # of the bases
                    error = self.sharing.predicted_error(
                        self._kv, sequence, self.scheduler.bases, np.asarray(logits)[place])
                sequence.usage = dataclasses.replace(sequence.usage, predicted_error=error)

    def _call_step(self, work: list[Work], size: int, rows: int) -> jax.Array:
        """Pack the work and run it; the logits of each part's last query, in order."""
        discard = self.kv_tokens
        packed = np.zeros((4, size), np.int32)
        packed[2], packed[3] = discard, Rows.NO_QUERY
        table = np.zeros((len(Rows.COLUMNS), rows), np.int32)
        at = np.zeros(self._heads(size), np.int32)
        query = row = head = 0
        for part in work:
            sequence, queries = part.sequence, part.queries
            stop = query + len(queries)
            packed[:, query:stop] = (
                sequence.tokens[queries], sequence.history.births[queries],
                np.where(part.targets == HOLE, discard, part.targets), queries)
            mine = table[:, row:row + part.table.shape[1]]
            mine[:] = part.table
            mine[0] += query
            if _chooses(part):
                at[head] = stop - 1
                head += 1
            query, row = stop, row + part.table.shape[1]
        logits, self._kv = self._step(self._params, self._kv, packed, table, at)
        return logits

    def _heads(self, size: int) -> int:
        """How many tokens a step of this size can choose."""
        return min(size, self._most)

    def _begin_lanes(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sampling = sequence.job.sampling
            if not sequence.lane_is_set and sampler.needs_lane(sampling):
                self._lanes = sampler.begin(
                    self._lanes, sequence.lane, sampling, sequence.job.tokens,
                    sequence.stream[sequence.prompt:])
            sequence.lane_is_set = True

    def _choose(self, logits: jax.Array, sequences: list[Sequence]) -> list[Token]:
        if not sequences:
            jax.block_until_ready(logits)
            return []
        batch = sampler.Batch.of([(s.lane, s.job.sampling, s.seed, s.generated)
                                  for s in sequences], logits.shape[0])
        chosen, self._lanes = sampler.sample(self._lanes, logits, batch)
        columns = (np.asarray(x).tolist() for x in (
            chosen.tokens, chosen.logprob, chosen.top_ids, chosen.top_logprobs))
        return [_token(s.job.sampling.logprobs, *row)
                for s, *row in zip(sequences, *columns, strict=False)]  # the rest is padding

    def _end_all(self, error: Exception) -> None:
        """End whatever runs or waits, and forget all KV."""
        with self._lock:
            self._receive()
            before, self.scheduler = self.scheduler, self._make_scheduler()
            self.scheduler.counters = before.counters
        for sequence in [*before.running, *before.waiting]:
            self._deliver(sequence, End("error", error))

    def _deliver(self, sequence: Sequence, what: Token | End) -> None:
        """Hand over; a receiver that fails is none of the others' business."""
        if isinstance(what, End):
            self._open.discard(sequence)
            if sequence.admitted is not None:
                took = time.perf_counter() - sequence.admitted
                self._service += SERVICE_WEIGHT * (took - self._service) if self._service else took
        try:
            sequence.deliver(what)
        except Exception:
            _log.exception("a receiver failed")
            sequence.cancelled = True
            self._open.discard(sequence)

    def _reset_device(self) -> None:
        """A new pool, and nothing in it."""
        config = self.config
        self._kv = KV.zeros(config.layers, self.kv_tokens, config.kv_heads, config.head_dim,
                            self._stored)
        self._lanes = sampler.Lanes.zeros(self._most, config.vocab_size)


class Answer:
    """A request that waits for its turn or is being answered (`interface.Generation`)."""

    def __init__(self, sequence: Sequence, open_: set[Sequence], wake: threading.Event):
        self._sequence, self._open, self._wake = sequence, open_, wake

    @property
    def usage(self) -> Usage | None:
        """The prompt's counters; None until it is admitted."""
        return self._sequence.usage

    @property
    def admitted(self) -> float | None:
        """When its turn came, on the clock of `time.perf_counter`; None before."""
        return self._sequence.admitted

    @property
    def preempted(self) -> int:
        """How many times it has made way for another."""
        return self._sequence.preempted

    def cancel(self) -> None:
        """End it before the next step; its KV stays for later requests."""
        self._sequence.cancelled = True
        self._open.discard(self._sequence)
        self._wake.set()


def _check(most: int, context_length: int | None, kv_tokens: int, page_size: int,
           max_num_seqs: int, chunk: int, policy: str, max_queue: int) -> None:
    if context_length is not None and not 1 <= context_length <= most:
        raise ValueError(f"max_model_len must be between 1 and {most}, the model's own context, "
                         f"got {context_length}")
    if not 1 <= page_size <= 128:
        raise ValueError(f"page_size must be between 1 and 128 slots, got {page_size}")
    if kv_tokens < page_size:
        raise ValueError(f"kv_tokens must be at least page_size={page_size}, got {kv_tokens}")
    if max_num_seqs < 1 or chunk < 1:
        raise ValueError("max_num_seqs and chunk must be at least 1, "
                         f"got {max_num_seqs} and {chunk}")
    if max_queue < 0:
        raise ValueError(f"max_queue must be at least 0, got {max_queue}")
    if policy not in eviction.POLICIES:
        raise ValueError(f"policy must be one of {', '.join(eviction.POLICIES)}, got {policy!r}")


def _chooses(part: Work) -> bool:
    return part.is_last and part.sequence.job.max_tokens > 0


def _token(wanted: int | None, token: int, logprob: float, top_ids: list[int],
           top: list[float]) -> Token:
    if wanted is None:
        return Token(token, None, ())
    return Token(token, logprob, tuple(zip(top_ids[:wanted], top[:wanted], strict=True)))
