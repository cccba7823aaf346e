"""The device side of the server: one request at a time through one jitted, donating step.

A request is a history; what is resident of it is found in the store, the tokens that must be
computed follow from it, holes included, and they run in chunks of a few compiled sizes.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvfunc.history import HOLE, History, Run
from kvfunc.models.llama import Llama
from kvfunc.models.load import LoadedModel
from kvfunc.models.params import Progress
from kvfunc.storage import KV, fastest_dtype

from . import sampler
from .interface import (
    CapacityExceeded,
    ContextLengthExceeded,
    Plan,
    Sampling,
    Token,
    Usage,
)
from .store import Conversation, Store

ROWS = 1024  # rows of a compiled step; a longer table compiles one of 16 times as many
SIZES = (64, 256)  # compiled numbers of queries between one token and a whole chunk
PADDING_WORTH = 1.5  # how much larger a step may be than what is left to run in it
SLOTS_AT_ONCE = 64  # how many slots a growing answer takes at a time


class Engine:
    """Runs one request at a time and keeps the KV of the last conversations.

    Args:
      model: weights, configuration and tokenizer.
      kv_dtype: number format of the KV; None is that of the weights.
      context_length: positions a request may use; None is the model's own limit.
      kv_tokens: slots of the pool, all conversations together.
      chunk: largest number of prompt tokens in one step.

    Raises:
      ValueError: for sizes that are not positive, or a context beyond the model's.
    """

    def __init__(self, model: LoadedModel, *, kv_dtype: DTypeLike | None = None,
                 context_length: int | None = None, kv_tokens: int = 32768, chunk: int = 512):
        config = model.config
        weights_dtype = model.params["embed"]["weight"].dtype
        if context_length is not None and not 1 <= context_length <= config.context_length:
            raise ValueError(f"max_model_len must be between 1 and {config.context_length}, the "
                             f"model's own context, got {context_length}")
        if kv_tokens < 1 or chunk < 1:
            raise ValueError(f"kv_tokens and chunk must be at least 1, got {kv_tokens} and {chunk}")
        self.name, self.config, self.tokenizer = model.name, config, model.tokenizer
        self.context_length = context_length or config.context_length
        self.kv_tokens = kv_tokens
        self.compilations = 0
        stored = fastest_dtype(weights_dtype if kv_dtype is None else kv_dtype)
        self.kv_bytes_per_token = (2 * config.layers * config.kv_heads * config.head_dim
                                   * stored.itemsize)
        # XLA's CPU products of one bfloat16 row fall off the fast path.
        least = 1 if weights_dtype == jnp.float32 else 2
        chunk = max(chunk, least)
        between = (size for size in SIZES if least < size < chunk)
        self._query_sizes = sorted({least, *between, chunk})
        self._least = least
        self._params = model.params
        self._kv = KV.zeros(config.layers, kv_tokens, config.kv_heads, config.head_dim, stored)
        self._store = Store(kv_tokens)
        self._busy = threading.Lock()
        network = Llama(config, weights_dtype)

        def step(params, kv, batch):
            self.compilations += 1  # runs when traced, that is once for each new shape
            return network.forward(params, kv=kv, **batch)

        self._step = jax.jit(step, donate_argnames="kv")

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile every size of step, so that no request waits for a compiler.

        Args:
          progress: called after each with what it was, how many are done, how many there are.
        """
        history = History(0)
        with self._busy:
            for done, size in enumerate(self._query_sizes, start=1):
                nothing = np.zeros(0, np.int32)
                self._run(history, nothing, nothing, nothing, nothing, size)
                if progress is not None:
                    progress(f"step of {size} tokens", done, len(self._query_sizes))
            logits = jnp.zeros(self.config.vocab_size, jnp.float32)
            sampler.logprobs(logits, sampler.choose(logits, Sampling(), 0, 0))

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
        slots = len(history.needed(np.ones(history.tokens, bool), [history.tokens - 1]))
        if slots > self.kv_tokens:
            raise CapacityExceeded(
                f"the prompt needs {slots} KV slots and the pool has {self.kv_tokens}: shorten it, "
                "or restart the server with a larger --kv-tokens")

    def max_new_tokens(self, history: History) -> int:
        """How many tokens the context has left for an answer."""
        return self.context_length - history.next_position

    def plan(self, tokens: np.ndarray, history: History, salt: str) -> Plan:
        """What a request would find and compute; nothing is run and nothing is taken."""
        _, _, runs = self._work(tokens, history, salt)
        return Plan(_usage(history, runs), tuple(runs))

    def generate(self, tokens: np.ndarray, history: History, *, salt: str, max_tokens: int,
                 sampling: Sampling) -> Generation:
        """Begin an answer; waits until the one before has been closed.

        Args:
          tokens: int32 ids of the prompt.
          history: its events.
          salt: namespace of the cache; other salts never share KV.
          max_tokens: longest answer in tokens.
          sampling: how tokens are chosen.

        Raises:
          ValueError, ContextLengthExceeded, CapacityExceeded: as `check`.
        """
        self.check(history)
        self._busy.acquire()
        try:
            return Generation(self, tokens, history, salt, max_tokens, sampling)
        except BaseException:
            self._busy.release()
            raise

    def _work(self, tokens: np.ndarray, history: History,
              salt: str) -> tuple[np.ndarray, np.ndarray, list[Run]]:
        """Slots of what is resident, with holes; the queries to compute; every token's class."""
        match = self._store.find(salt, tokens, history)
        resident = np.full(history.tokens, HOLE, np.int32)
        resident[: match.length] = match.slots
        queries = history.needed(resident == HOLE, [history.tokens - 1])
        return resident, queries, history.classify(queries)

    def _chunks(self, queries: np.ndarray) -> Iterator[np.ndarray]:
        """Cut the queries so that each piece nearly fills a compiled size."""
        while len(queries):
            fits = [size for size in self._query_sizes if size >= len(queries)]
            below = [size for size in self._query_sizes[1:] if size < len(queries)]
            if not fits or (below and fits[0] > PADDING_WORTH * len(queries)):
                size = max(below, default=self._query_sizes[0])
            else:
                size = len(queries)
            yield queries[:size]
            queries = queries[size:]

    def _run(self, history: History, tokens: np.ndarray, queries: np.ndarray, slots: np.ndarray,
             targets: np.ndarray, size: int | None = None) -> jax.Array:
        """One step for these queries; the logits of the last one, on the device.

        Args:
          history: of all tokens, later ones included.
          tokens: [queries] ids.
          queries: [queries] raw indices.
          slots: [tokens of the history] where KV stands.
          targets: [queries] where to write; HOLE for what is resident already.
          size: compiled number of queries, by default the smallest that fits.
        """
        count = len(queries)
        size = size or next(s for s in self._query_sizes if s >= count)
        rows = history.rows(queries, slots)
        capacity = ROWS
        while capacity < len(rows.q_start):
            capacity *= 16

        def padded(values: Any, fill: int) -> np.ndarray:
            return np.pad(np.asarray(values, np.int32), (0, size - count), constant_values=fill)

        discard = self._kv.slots
        batch = dict(
            tokens=padded(tokens, 0), births=padded(history.births[queries], 0),
            slots=padded(np.where(targets == HOLE, discard, targets), discard),
            rows=rows.pad(capacity, size), at=np.full(self._least, max(count - 1, 0), np.int32))
        logits, self._kv = self._step(self._params, self._kv, batch)
        return logits[0]


class Generation:
    """One answer being generated: iterate it for tokens, and close it in any case.

    Attributes:
      usage: the prompt's counters, known at once.
    """

    def __init__(self, engine: Engine, tokens: np.ndarray, history: History, salt: str,
                 max_tokens: int, sampling: Sampling):
        self._engine, self._salt, self._sampling = engine, salt, sampling
        self._prompt = len(tokens)
        self._max_tokens = min(max_tokens, engine.max_new_tokens(history))
        self._history = history.extend(self._max_tokens)
        self._tokens = np.concatenate([tokens, np.zeros(self._max_tokens, np.int32)])
        self._computed = 0  # tokens from the start that are computed or need not be
        self._closed = False
        self._spare = np.zeros(0, np.int32)

        resident, queries, runs = engine._work(tokens, history, salt)
        self.usage = _usage(history, runs)
        engine._store.hold(resident)
        missing = queries[resident[queries] == HOLE]
        new = engine._store.take(len(missing))
        if len(new) < len(missing):
            # Only what some query reads is worth its slot now.
            for run in runs:
                if run.kind == "drop_skipped":
                    engine._store.release(resident[run.start:run.stop])
                    resident[run.start:run.stop] = HOLE
            new = np.concatenate([new, engine._store.take(len(missing) - len(new))])
        self._slots = np.full(self._history.tokens, HOLE, np.int32)
        self._slots[: self._prompt] = resident
        self._slots[missing] = new
        self._targets = np.full(self._history.tokens, HOLE, np.int32)
        self._targets[missing] = new
        self._queries = queries
        self._answer = self._generate()

    def __iter__(self) -> Iterator[Token]:
        return self._answer

    def close(self) -> None:
        """End the answer, keep its KV for later requests and let the next request begin."""
        if self._closed:
            return
        self._closed = True
        self._answer.close()
        engine, count = self._engine, self._computed
        engine._store.release(self._spare)
        engine._store.release(self._slots[count:])
        if count:
            engine._store.keep(Conversation(self._salt, self._tokens[:count],
                                            _shortened(self._history, count), self._slots[:count]))
        engine._busy.release()

    def _generate(self) -> Iterator[Token]:
        engine, sampling = self._engine, self._sampling
        seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        for queries in engine._chunks(self._queries):
            logits = self._step(queries)
            self._computed = int(queries[-1]) + 1
        for index in range(self._max_tokens):
            token = sampler.choose(logits, sampling, seed, index)
            place = self._prompt + index
            self._tokens[place] = int(token)
            yield _token(logits, token, sampling)
            if index + 1 == self._max_tokens or not self._grow(place):
                return
            logits = self._step(np.array([place]))
            self._computed = place + 1

    def _step(self, queries: np.ndarray) -> jax.Array:
        return self._engine._run(self._history, self._tokens[queries], queries, self._slots,
                                 self._targets[queries])

    def _grow(self, place: int) -> bool:
        """Give the token at `place` a slot; False if there is no room left."""
        if not len(self._spare):
            self._spare = self._engine._store.take(
                min(SLOTS_AT_ONCE, self._history.tokens - place))
        if not len(self._spare):
            return False
        self._slots[place] = self._targets[place] = self._spare[0]
        self._spare = self._spare[1:]
        return True


def _usage(history: History, runs: list[Run]) -> Usage:
    count = dict.fromkeys(History.KINDS, 0)
    for run in runs:
        count[run.kind] += run.stop - run.start
    return Usage(prompt_tokens=history.tokens, cached_tokens=count["cached"],
                 repos_tokens=count["repos"], drop_skipped_tokens=count["drop_skipped"],
                 approximate_tokens=0)


def _shortened(history: History, tokens: int) -> History:
    """The history of the first tokens: the events that stand before one of them."""
    return History(tokens, [event for event in history.events if event.at < tokens])


def _token(logits: jax.Array, token: jax.Array, sampling: Sampling) -> Token:
    if sampling.logprobs is None:
        return Token(int(token), None, ())
    own, best, ids = (np.asarray(x) for x in sampler.logprobs(logits, token))
    count = sampling.logprobs
    return Token(int(token), float(own),
                 tuple(zip(ids[:count].tolist(), best[:count].tolist(), strict=True)))
