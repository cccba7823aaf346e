"""The contract in plain Python and float64: slow, obvious, and independent of the library."""

import dataclasses

import numpy as np

from kvfunc.history import Drop, Repos

NEVER = np.iinfo(np.int32).max


@dataclasses.dataclass
class Slot:
    raw: int
    birth: int
    position: int
    live: bool = True


class ListModel:
    """A cache as a list of slots in history order (semantics, "The three transforms")."""

    def __init__(self):
        self.slots: list[Slot] = []
        self.next_position = 0
        self.tokens = 0

    def append(self, count: int) -> None:
        for _ in range(count):
            self.slots.append(Slot(self.tokens, self.next_position, self.next_position))
            self.next_position += 1
            self.tokens += 1

    def drop(self, raw: set[int]) -> None:
        for slot in self.slots:
            slot.live = slot.live and slot.raw not in raw

    def repos(self) -> None:
        for position, slot in enumerate(self.live):
            slot.position = position
        self.next_position = len(self.live)

    def compact(self) -> None:
        self.slots = self.live

    @property
    def live(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.live]

    @property
    def positions(self) -> dict[int, int]:
        """Raw index -> position of what is live."""
        return {slot.raw: slot.position for slot in self.live}


def covered(ranges) -> set[int]:
    return {token for start, stop in ranges for token in range(start, stop)}


def as_ranges(tokens) -> tuple[tuple[int, int], ...]:
    """The maximal half-open ranges of a set of tokens."""
    tokens = set(tokens)
    starts = sorted(token for token in tokens if token - 1 not in tokens)
    stops = sorted(token + 1 for token in tokens if token + 1 not in tokens)
    return tuple(zip(starts, stops, strict=True))


class Simulation:
    """A history lived through token by token."""

    def __init__(self, tokens: int, events=()):
        model = ListModel()
        self.events = []  # those that change something
        self.births, self.stage = [], []
        self.seen: list[dict[int, int]] = []  # by query: raw index -> position of what it sees
        self.at_stage_start: list[dict[int, int]] = [{}]
        self.visible_until = [NEVER] * tokens
        events = list(events)
        for token in range(tokens + 1):
            while events and events[0].at == token:
                self._happen(model, events.pop(0))
            if token < tokens:
                model.append(1)
                self.births.append(model.slots[-1].birth)
                self.stage.append(len(self.at_stage_start) - 1)
                self.seen.append(model.positions)
        self.positions, self.next_position = model.positions, model.next_position

    def _happen(self, model: ListModel, event) -> None:
        if isinstance(event, Repos):
            if model.next_position != len(model.live):
                model.repos()
                self.events.append(event)
                self.at_stage_start.append(model.positions)
            return
        net = covered(event.ranges) & set(model.positions)
        model.drop(net)
        for token in net:
            self.visible_until[token] = event.at
        last = self.events[-1] if self.events else None
        if net and isinstance(last, Drop) and last.at == event.at:
            net |= covered(self.events.pop().ranges)
        if net:
            self.events.append(Drop(event.at, as_ranges(net)))


def rotate(rope, x, positions, magnitude=None):
    """R(p) x in float64 for x [n, heads, head_dim], times the magnitude (the rope's own if None).

    A pair is a complex number that is multiplied by exp(i p f).
    """
    x = np.array(x, np.float64)
    half, dims = len(rope.inv_freq), rope.rotary_dim
    pairs = (slice(0, dims, 2), slice(1, dims, 2)) if rope.interleaved else (
        slice(0, half), slice(half, dims))
    angles = np.asarray(positions, np.float64)[:, None, None] * np.asarray(rope.inv_freq)
    turned = (x[..., pairs[0]] + 1j * x[..., pairs[1]]) * np.exp(1j * angles)
    turned *= rope.magnitude if magnitude is None else magnitude
    x[..., pairs[0]], x[..., pairs[1]] = turned.real, turned.imag
    return x


def unrotate(rope, x, births):
    """What `rotate` made x from."""
    return rotate(rope, x, -np.asarray(births), 1 / rope.magnitude)


def attend(q, k, v, *, softcap=None, sinks=None):
    """One query [heads, head_dim] over keys and values [n, kv_heads, head_dim] that it sees."""
    group = q.shape[0] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(np.asarray(v, np.float64), group, axis=1)
    scores = np.einsum("hd,nhd->hn", q, k) * q.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    if sinks is not None:
        scores = np.concatenate([scores, np.asarray(sinks, np.float64)[:, None]], axis=1)
        v = np.concatenate([v, np.zeros_like(v[:1])])
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("hn,nhd->hd", weights / weights.sum(axis=1, keepdims=True), v)


def attend_as_seen(life: Simulation, rope, q, k, v, *, window=None, **options):
    """Every query of a history over the keys it sees: Law 6's right side.

    Queries and keys are un-rotated, [tokens, heads, head_dim]; they are rotated to where they are.
    """
    outputs = []
    for query, seen in enumerate(life.seen):
        near = {raw: position for raw, position in seen.items()
                if window is None or life.births[query] - position < window}
        turned = rotate(rope, q[query, None], [life.births[query]])[0]
        keys = rotate(rope, k[list(near)], list(near.values()))
        outputs.append(attend(turned, keys, v[list(near)], **options))
    return np.array(outputs)
