"""Reuse across prompts: what the Anchor Pool knows of each reader, and what it does for a request.

A *reader* is a prompt up to a shared text, known by its static tokens and the names of the texts
before (`anchors.consumer_key`). While a reader is new, its prompts are computed exactly, and each
teaches it; from then on the texts that it shares are estimated, and only the first tokens of each
and whatever stands between them are computed.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from kvfunc import anchors, ridge
from kvfunc.anchors import AnchorPool
from kvfunc.history import HOLE
from kvfunc.models.config import ModelConfig
from kvfunc.segments import read
from kvfunc.storage import KV

from .bases import Base, Bases, Found, approximate
from .interface import Share
from .sequence import Sequence

CALLS = (128, 256)  # tokens of a compiled call, increasing
# log KL = KL[0] + KL[1] log(deviation of the first tokens) + KL[2] log(0.1 + gap between the two
# largest logits): fitted to 40 prompts of SmolLM2 and their own continuations.
KL = (-1.8, 1.7, -0.4)
GROWTH = 1.3  # how much more a reader must have seen until its maps are made anew
FIRST = 0  # the pool of a reader has one consumer


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the server shares.

    Attributes:
      automatic: whether whole messages are shared that no part names.
      texts: how many texts teach a reader before its next ones are estimated.
      recompute: share of a text that is computed, its first tokens included.
      bound: error of a reader's estimates, relative to the offsets, above which its texts are
        computed after all.
      base_bound: predicted error of a prompt above which its answer is no base for others: errors
        would add up along a chain of answers.
      readers: how many are remembered, the latest used kept longest.
      projection: of the KV, for the ridge; None is all of it (`anchors.init`).
    """

    automatic: bool = False
    texts: int = 8
    recompute: float = 0.0
    bound: float = 1.0
    base_bound: float = 0.5
    readers: int = 64
    projection: int | None = 128


@dataclasses.dataclass
class Reader:
    """What is known of one prompt up to a shared text."""

    pool: AnchorPool
    texts: int = 0  # that taught it
    weights: ridge.Weights | None = None
    fitted: float = 0.0  # tokens that it had seen when they were made
    error: float = 0.0  # what they left of the offsets that taught them, relative


@dataclasses.dataclass(frozen=True, eq=False)
class Estimate:
    """The KV of some tokens of a shared text, to be made from a base."""

    share: Share
    reader: Reader
    base: Found
    first: int  # token of the text from which on it is estimated, half-open
    last: int

    @property
    def raw(self) -> Int[np.ndarray, " tokens"]:
        """Raw indices of these tokens."""
        return np.arange(self.share.start + self.first, self.share.start + self.last)

    def without(self, resident: Bool[np.ndarray, " prompt"]) -> Iterator[Estimate]:
        """The parts of it that are not resident yet."""
        lacks = ~resident[self.raw[0]:self.raw[-1] + 1]
        edges = np.flatnonzero(np.diff(lacks, prepend=False, append=False))
        for start, stop in edges.reshape(-1, 2).tolist():
            yield dataclasses.replace(self, first=self.first + start, last=self.first + stop)

    @property
    def sources(self) -> Int[np.ndarray, " tokens"]:
        """Where their base stands."""
        return self.base.slots[self.first - self.base.start:self.last - self.base.start]


def estimated_by(estimates: list[Estimate]) -> Int[np.ndarray, " n"]:
    """Raw indices of all tokens of some estimates, in their order."""
    return np.concatenate([np.zeros(0, np.int64), *(estimate.raw for estimate in estimates)])


@dataclasses.dataclass(frozen=True, eq=False)
class Lesson:
    """A text computed exactly behind a reader, and its base."""

    reader: Reader
    share: Share
    base: Found
    slots: Int[np.ndarray, " tokens"]  # of the exact KV, for the base's tokens


class Sharing:
    """The readers of one model.

    Args:
      config: of the model.
      fingerprint: of the model and how its prompts are made (`LoadedModel.fingerprint`).
      settings: see there.
    """

    def __init__(self, config: ModelConfig, fingerprint: Mapping[str, str | int],
                 settings: Settings):
        self.settings, self._fingerprint = settings, json.dumps(fingerprint)
        self._readers: collections.OrderedDict[str, Reader] = collections.OrderedDict()
        self._lock = threading.Lock()  # of the table: a checkpoint reads it from another thread
        self.lessons_learned = 0
        self.options = anchors.Options(recompute=settings.recompute)
        make = functools.partial(anchors.init, config.layers, config.kv_heads, config.head_dim,
                                 consumers=1, anchors=0, tokens=1, following=0,
                                 projection=settings.projection)
        self._empty = jax.eval_shape(make)
        options, rope = self.options, tuple(map(config.rope_of, range(config.layers)))

        def estimate(kv: KV, weights, sources, targets, births, first):
            kv, moved = anchors.correct(kv, weights, sources, targets, births, first, rope)
            return kv, moved if settings.recompute else None  # it costs time

        def observe(kv: KV, pool, sources, targets, births, first):
            base, exact = (read(kv, slots, birth, rope)
                           for slots, birth in zip((sources, targets), births, strict=True))
            return anchors.observe(pool, base, exact, FIRST, options=options, first=first)[0]

        def deviation(kv: KV, pool, weights, sources, targets, births, first):
            base, exact = (read(kv, slots, birth, rope)
                           for slots, birth in zip((sources, targets), births, strict=True))
            offsets, _ = anchors.estimate(pool, base, FIRST, options, weights, first)
            return anchors.deviation(anchors.apply(base, offsets.text), exact)

        self._estimate = jax.jit(estimate, donate_argnums=0)
        self._deviation = jax.jit(deviation)
        self._observe = jax.jit(observe, donate_argnums=1)
        self._fit = jax.jit(functools.partial(anchors.fit, consumer=FIRST, options=options))

    def plan(self, sequence: Sequence, missing: Int[np.ndarray, " n"],
             bases: Bases) -> list[Estimate] | None:
        """What of a prompt is estimated; None if all of it is to be computed, which teaches.

        Args:
          sequence: the request.
          missing: raw indices of its tokens without exact KV.
          bases: what is resident.
        """
        planned = []
        for share, key in self._shares(sequence):
            lacking = missing[(missing >= share.start) & (missing < share.stop)]
            found = bases.find(sequence.job.salt, sequence.tokens[share.start:share.stop])
            if not len(lacking) or found is None:
                continue
            reader = self._readers.get(key)
            if reader is None or reader.texts < self.settings.texts:
                return None
            self._reader(key)  # it is in use
            if reader.error > self.settings.bound:
                continue
            first = max(self.options.recompute_first, found.start,
                        int(lacking[0]) - share.start)
            # The last token of a prompt is computed always: its logits are wanted.
            last = min(found.stop, int(lacking[-1]) + 1 - share.start,
                       sequence.length - 1 - share.start)
            if first < last:
                planned.append(Estimate(share, reader, found, first, last))
        return planned

    def run(self, kv: KV, estimate: Estimate, targets: Int[np.ndarray, " tokens"],
            birth: int) -> tuple[KV, Int[np.ndarray, " chosen"]]:
        """Make the KV of an estimate.

        Args:
          kv: the storage, which is donated.
          estimate: what `plan` gave.
          targets: slots for its tokens.
          birth: position of the text's first token in the prompt.

        Returns:
          The storage, and the raw indices of tokens that are to be computed all the same.
        """
        reader, moved = estimate.reader, []
        births = np.array([estimate.base.birth, birth], np.int32)
        for first, sources, mine in _calls(estimate.first, kv.slots, estimate.sources, targets):
            kv, some = self._estimate(kv, reader.weights, sources, mine, births, first)
            moved.append(some)
        text = estimate.share.stop - estimate.share.start
        most = math.ceil(self.settings.recompute * text) - self.options.recompute_first
        if most <= 0:
            return kv, estimate.raw[:0]
        moved = np.concatenate([np.asarray(some) for some in moved])[:len(targets)]
        return kv, estimate.raw[np.sort(np.argsort(-moved)[:most])]

    def predicted_error(self, kv: KV, sequence: Sequence, bases: Bases,
                        logits: Float[np.ndarray, " vocab"]) -> float | None:
        """What a request's estimates are expected to do to its next tokens: a KL in nats.

        The first tokens of a text are computed always: how far its estimate lies from them tells
        how good it is behind them. And the less sure the model is, the more an error matters.

        Args:
          kv: the storage, with the prompt's KV.
          sequence: the request.
          bases: what is resident.
          logits: of the prompt's last token.

        Returns:
          None if no base is resident any more.
        """
        deviations = []
        for share, key in self._shares(sequence):
            first = share.start + self.options.recompute_first
            found = bases.find(sequence.job.salt, sequence.tokens[share.start:share.stop])
            reader, count = self._readers.get(key), self.options.recompute_first
            if (found is None or reader is None or reader.weights is None
                    or not sequence.approximate[first:share.stop].any()):
                continue
            births = np.array([found.birth, sequence.history.births[share.start]], np.int32)
            at, sources, mine = next(_calls(
                found.start, kv.slots, found.slots[:count - found.start],
                sequence.slots[share.start + found.start:first], sizes=(count,)))
            deviations.append(self._deviation(kv, reader.pool, reader.weights, sources, mine,
                                              births, at))
        if not deviations:
            return None
        second, best = np.partition(logits, -2)[-2:]
        worst = max(float(x) for x in deviations)
        scale, of_deviation, of_gap = KL
        return float(np.exp(scale) * worst**of_deviation * (best - second + 0.1)**of_gap)

    def lessons(self, sequence: Sequence, bases: Bases) -> list[Lesson]:
        """What a request can teach: its shared texts whose KV is exact, and most of it new.

        Its texts, and its answer, are known as bases from now on.
        """
        lessons = []
        job, computed = sequence.job, sequence.computed
        for share, key in self._shares(sequence):
            if share.stop > computed:
                break
            inside = slice(share.start, share.stop)
            found = bases.find(job.salt, sequence.tokens[inside])
            if found is None:
                bases.add(self._base(sequence, share.start, share.stop))
                continue
            slots = sequence.slots[inside][found.start:found.stop]
            new = np.isin(np.arange(share.start, share.stop), sequence.asked)
            # Other texts may begin with the same tokens, which were found then.
            if (new.mean() > 0.5 and not sequence.approximate[inside].any()
                    and not (slots == HOLE).any() and not np.isin(slots, found.slots).any()):
                lessons.append(Lesson(self._reader(key), share, found, slots))
        error = sequence.usage.predicted_error
        if sequence.generated and (error is None or error <= self.settings.base_bound):
            bases.add(self._base(sequence, sequence.prompt, computed))
        return lessons

    def learn(self, kv: KV, lesson: Lesson, birth: int) -> None:
        """Let a reader see how a text's KV differs behind it.

        Args:
          kv: the storage.
          lesson: what `lessons` gave.
          birth: position of the text's first token in the prompt.
        """
        reader = lesson.reader
        reader.pool, reader.texts = self._taught(kv, lesson, birth), reader.texts + 1
        self._refit(reader)
        self.lessons_learned += 1

    def _taught(self, kv: KV, lesson: Lesson, birth: int) -> AnchorPool:
        births = np.array([lesson.base.birth, birth], np.int32)
        pool = jax.tree.map(jnp.copy, lesson.reader.pool)  # a checkpoint may be reading that one
        for first, sources, mine in _calls(lesson.base.start, kv.slots, lesson.base.slots,
                                           lesson.slots):
            pool = self._observe(kv, pool, sources, mine, births, first)
        return pool

    def __len__(self) -> int:
        """How many readers have learned something."""
        with self._lock:
            return sum(reader.texts > 0 for reader in self._readers.values())

    @property
    def bytes(self) -> int:
        """What they take, sums and weights."""
        with self._lock:
            known = [(reader.pool, reader.weights) for reader in self._readers.values()]
        return sum(x.nbytes for x in jax.tree.leaves(known))

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What was learned, for a checkpoint: arrays and what is said of them."""
        with self._lock:
            readers = {key: (reader.pool.sums, reader.texts)
                       for key, reader in self._readers.items() if reader.texts}
        return ({key: sums for key, (sums, _) in readers.items()},
                {"texts": {key: texts for key, (_, texts) in readers.items()}})

    def like(self, meta: dict[str, Any]) -> dict[str, Any]:
        """The form of the arrays that go with what is said of them."""
        return dict.fromkeys(meta["texts"], self._empty.sums)

    def load(self, tree: dict[str, Any], meta: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        for key, texts in meta["texts"].items():  # in order of use
            reader = self._reader(key)
            reader.pool = dataclasses.replace(reader.pool, sums=tree[key])
            reader.texts = texts
            self._refit(reader)

    def warm_up(self, kv: KV) -> KV:
        """Compile all that runs later."""
        reader = Reader(self._zeros())
        reader.weights = self._fit(reader.pool)
        for size in CALLS:
            nowhere = np.full(size, kv.slots, np.int32)
            share, base = Share("", 0, size, (0, size)), Found(0, size, nowhere, 0)
            self._taught(kv, Lesson(reader, share, base, nowhere), 0)
            kv = self.run(kv, Estimate(share, reader, base, 0, size), nowhere, 0)[0]
        nowhere = nowhere[:self.options.recompute_first]
        self._deviation(kv, reader.pool, reader.weights, nowhere, nowhere, np.zeros(2, np.int32),
                        np.int32(0))
        return kv

    def _refit(self, reader: Reader) -> None:
        seen = float(reader.pool.sums.count[FIRST, 0])
        if reader.texts >= self.settings.texts and seen >= GROWTH * reader.fitted:
            reader.weights, reader.fitted = self._fit(reader.pool), seen
            reader.error = float(np.sqrt(np.asarray(reader.weights.noise).mean()))

    def _zeros(self) -> AnchorPool:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._empty)

    def _shares(self, sequence: Sequence) -> Iterator[tuple[Share, str]]:
        """The shared texts of a prompt, each with the key of its reader."""
        before: list[int | str] = []
        at, job = 0, sequence.job
        for share in job.shares:
            before += job.tokens[at:share.outer[0]].tolist()
            yield share, anchors.consumer_key(self._fingerprint, job.salt, before)
            before.append(share.name)
            at = share.outer[1]

    def _reader(self, key: str) -> Reader:
        with self._lock:
            reader = self._readers.pop(key, None) or Reader(self._zeros())
            self._readers[key] = reader  # the latest used
            while len(self._readers) > self.settings.readers:
                self._readers.popitem(last=False)
        return reader

    def _base(self, sequence: Sequence, start: int, stop: int) -> Base:
        salt = sequence.job.salt
        rests = bool(sequence.approximate[start:stop].any())
        return Base(salt, approximate(salt) if rests else salt, sequence.tokens[:stop].copy(),
                    sequence.history, start, stop)


def _calls(first: int, nowhere: int, *slots: np.ndarray,
           sizes: tuple[int, ...] = CALLS) -> Iterator[tuple]:
    """Arrays of slots cut into compiled sizes, each cut with the place of its first token."""
    count, start = len(slots[0]), 0
    while start < count:
        size = next((size for size in sizes if size >= count - start), sizes[-1])
        cut = [some[start:start + size].astype(np.int32) for some in slots]
        yield (np.int32(first + start), *(np.pad(some, (0, size - len(some)),
                                                 constant_values=nowhere) for some in cut))
        start += size
