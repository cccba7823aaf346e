"""The Anchor Pool: what another prompt in front of a text does to the text's KV, learned and added.

The KV of a text behind one prompt (`base`) becomes that behind another (`exact`) by an *offset*.
Every exact prefill of a text in a prompt teaches: it adds to the sums of a ridge regression from
base to offset, one for each *consumer* (a prompt up to the text) and layer, and it may be kept as
an *anchor*, a text with its offsets. For the next text `estimate` predicts the offset, and `apply`
adds it. Layer 0 is never changed: its KV depends on token and position alone.

All functions are pure and work under jit and vmap; a pool's shapes never change. Bases, offsets and
distances live in the frame of the text (`segments.Segment`). `Options(estimator="paper")` has the
rules of KVCOMM (arXiv 2510.12872) as its public implementation has them, in that frame.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kvfunc import matching, ridge
from kvfunc.linear import product
from kvfunc.matching import resized
from kvfunc.packed import Packed
from kvfunc.segments import Ropes, Segment, numbers, turned, turns
from kvfunc.storage import KV, number_dtype, write_layer

FIRST = 16  # tokens whose index is a feature of its own: prompts move the first tokens most
SAME = 1e-3  # a distance that two different texts do not come to

Scalar = Int[Array, ""] | int


@dataclasses.dataclass(frozen=True)
class Options:
    """How offsets are estimated, and what is kept. A static value.

    Attributes:
      estimator: "ridge", with the offset of a near copy where the pool has one; "anchors", weighted
        by distance; or "paper", KVCOMM's weights: per token by the mean absolute difference for
        the text, and per layer, head and channel by the norm of it for what follows.
      penalty: of the ridge, in units of a standardised feature's variance.
      rank: of the ridge's maps.
      near: relative distance below which an anchor is a near copy.
      tau: temperature of the weights; None is the median distance of anchors to their nearest.
      weighting: "softmax" of -distance / tau, or "confidence", one over the squared distance.
      decay: the offset of layer l is multiplied by decay^l.
      recompute_first: tokens at the start that are to be computed, not estimated.
      recompute: share of all tokens that is to be computed: beyond the first, those of which the
        estimate moves most.
      gate: what refuses a text. "bound": a predicted error above `bound`; "entropy": of the
        weights above `gamma` log2 of their number; "entropy_paper": that, of KVCOMM's unscaled
        distances.
      bound: largest `Estimated.error` that the gate "bound" lets pass.
      gamma: see `gate`.
      eviction: "lru", "value" (uses by age and byte) or "windowed_lfu" (KVCOMM's: of the `window`
        oldest the least used).
      window: see `eviction`.
      max_bytes: bound on the anchors kept; None is what the pool has room for.

    Raises:
      ValueError: for an unknown name or a number out of range.
    """

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        "estimator": ("ridge", "anchors", "paper"), "weighting": ("softmax", "confidence"),
        "gate": ("bound", "entropy", "entropy_paper"),
        "eviction": ("lru", "value", "windowed_lfu")}

    estimator: str = "ridge"
    penalty: float = 0.03
    rank: int = 32
    near: float = 0.5
    tau: float | None = 0.1
    weighting: str = "softmax"
    decay: float = 1.0
    recompute_first: int = 8
    recompute: float = 0.0
    gate: str = "bound"
    bound: float = 1.0
    gamma: float = 0.3
    eviction: str = "value"
    window: int = 5
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in self.CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, "
                                 f"got {getattr(self, name)!r}")
        for name in ("penalty", "near", "decay", "bound", "gamma"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("rank", "window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.tau is not None and not self.tau > 0:
            raise ValueError(f"tau must be above 0, or None for the pool's own, got {self.tau}")
        if self.recompute_first < 0 or not 0 <= self.recompute <= 1:
            raise ValueError("recompute_first must be at least 0 and recompute a share from 0 to "
                             f"1, got {self.recompute_first} and {self.recompute}")


PAPER = Options(estimator="paper", tau=1.0, recompute_first=0, gate="entropy_paper",
                eviction="windowed_lfu")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AnchorPool:
    """What was learned. Capacities are shapes: consumers C, anchors A, tokens T, following P."""

    sums: ridge.Sums  # [C, layers - 1, …], from features of the base to the offset
    base: Packed  # [A, layers, T, channels], of the anchors
    offset: Packed  # [A, C, layers, T, channels]
    following: Packed  # [A, C, layers, P, channels], offset of the static text behind
    sketch: Float[Array, "A T sketch"]  # of the bases
    length: Int[Array, " A"]  # int32, tokens of an anchor; 0 where there is none
    following_length: Int[Array, "A C"]  # int32
    seen: Bool[Array, "A C"]  # which offsets there are
    approximate: Bool[Array, " A"]  # whether the base was computed on top of estimates
    uses: Int[Array, " A"]  # int32, estimates that it weighed in
    inserted: Int[Array, " A"]  # int32, the clock then
    used: Int[Array, " A"]  # int32, the clock when it was used last
    clock: Int[Array, ""]  # int32, counts what was observed or used

    @property
    def is_there(self) -> Bool[Array, " A"]:
        """Which places hold an anchor."""
        return self.length > 0

    @property
    def bytes_of_anchors(self) -> Float[Array, " A"]:
        """What each anchor takes: its base, and offsets for each consumer that has been seen."""
        length, behind = (x.astype(jnp.float32) for x in (self.length, self.following_length))
        offsets = jnp.where(self.seen, length[:, None] * self.offset.bytes_per_token
                            + behind * self.following.bytes_per_token, 0)
        return length * self.base.bytes_per_token + offsets.sum(-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Offsets:
    """What `apply` adds: to the text, and to the static text behind it."""

    text: Segment
    following: Segment


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Observed:
    """What `observe` tells."""

    anchor: Int[Array, ""]  # int32, where it stands; the number of anchors if it is not kept
    evicted: Int[Array, ""]  # int32, how many made room
    storage_error: Float[Array, ""]  # of the stored offset, relative to the offset


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Estimated:
    """What `estimate` and `predict` tell."""

    NOTHING: ClassVar[int] = 0  # rules: no offset is known, the estimate is 0
    NEAR_COPY: ClassVar[int] = 1
    RIDGE: ClassVar[int] = 2
    ANCHORS: ClassVar[int] = 3

    rule: Int[Array, ""]  # int32, one of the above
    weights: Float[Array, " A"]  # of the anchors, 0 where one is not used
    counted: Bool[Array, " A"]  # anchors that `use` counts
    distance: Float[Array, ""]  # relative, to the nearest anchor; infinite without one
    # Expected, relative: what the ridge leaves of offsets, or the distance of the anchors used; 1
    # where nothing is known.
    error: Float[Array, ""]
    unreliable: Int[Array, ""]  # int32, tokens that no anchor covers
    moved: Float[Array, " tokens"]  # mean square of what is added, over that of the base
    recompute: Bool[Array, " tokens"]  # which tokens are to be computed
    refused: Bool[Array, ""]  # whether the gate wants an exact prefill, which would teach


def init(layers: int, kv_heads: int, head_dim: int, *, consumers: int, anchors: int = 20,
         tokens: int = 1024, following: int = 64, dtype: DTypeLike = jnp.bfloat16,
         rank: int | None = None, projection: int | None = None) -> AnchorPool:
    """An empty pool.

    Args:
      layers: of the model that keep KV, at least 2.
      kv_heads: KV heads a layer.
      head_dim: dims a head.
      consumers: how many prompts have an estimate of their own.
      anchors: texts that are kept with their offsets; 0 keeps none.
      tokens: of an anchor, at most; of a longer text the first are kept.
      following: tokens of static text behind a text, at most.
      dtype: what anchors are stored as: float32, bfloat16 or int8 with scales.
      rank: store offsets of anchors as two factors of this rank a layer; None stores them whole.
      projection: how many fixed random directions of the KV are features of the ridge; None is
        all of the KV. The sums grow with its square.

    Raises:
      ValueError: for a size that is out of range.
    """
    sizes = dict(layers=layers - 1, kv_heads=kv_heads, head_dim=head_dim, consumers=consumers,
                 tokens=tokens)
    for name, value in sizes.items():
        if value < 1:
            least = 2 if name == "layers" else 1
            raise ValueError(f"{name} must be at least {least}, got {value + (name == 'layers')}")
    if anchors < 0 or following < 0:
        raise ValueError(f"anchors and following must be at least 0, got {anchors}, {following}")
    channels = 2 * kv_heads * head_dim
    if projection is not None and not 1 <= projection <= channels:
        raise ValueError(f"projection must be between 1 and the {channels} channels of a token, "
                         f"got {projection}")
    features = (projection or channels) + FIRST + 2
    each = anchors, consumers
    packed = functools.partial(Packed.zeros, layers=layers, heads=2 * kv_heads, dim=head_dim,
                               dtype=dtype)
    return AnchorPool(
        sums=ridge.Sums.zeros((consumers, layers - 1), features, channels),
        base=packed((anchors,), tokens=tokens),
        offset=packed(each, tokens=tokens, rank=rank), following=packed(each, tokens=following),
        sketch=jnp.zeros((anchors, tokens, matching.SKETCH)), length=jnp.zeros(anchors, jnp.int32),
        following_length=jnp.zeros(each, jnp.int32), seen=jnp.zeros(each, jnp.bool_),
        approximate=jnp.zeros(anchors, jnp.bool_), uses=jnp.zeros(anchors, jnp.int32),
        inserted=jnp.zeros(anchors, jnp.int32), used=jnp.zeros(anchors, jnp.int32),
        clock=jnp.int32(0))


def consumer_key(fingerprint: str, salt: str, before: Sequence[int | str],
                 source: Sequence[int | str] | None = None) -> str:
    """The consumer that a prompt is of what stands in it: a digest, the same in every process.

    Args:
      fingerprint: of the model.
      salt: separates pools.
      before: the prompt up to the text: ids of static tokens, and names of shared texts.
      source: the same of the prompt that the base comes from, for offsets of pairs of prompts.
    """
    parts = [[fingerprint, salt], list(before), [] if source is None else [list(source)]]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def apply(base: Segment, offset: Segment) -> Segment:
    """The KV to splice: base and offset, but layer 0 of the base as it is."""
    corrects = jnp.arange(base.k.shape[-4]) > 0
    k, v = (jnp.where(corrects[:, None, None, None], old + more, old)
            for old, more in ((base.k, offset.k), (base.v, offset.v)))
    return Segment(k, v, base.length)


def features(base: Segment, first: Scalar = 0) -> Float[Array, "corrected tokens features"]:
    """What the ridge is told of each token: its base KV, its index and the constant 1.

    Args:
      base: the text's KV elsewhere, or a part of it.
      first: index in the text of the first token in `base`.
    """
    flat, place = base.flat[1:], _place(base.size, first)
    return jnp.concatenate([flat, jnp.broadcast_to(place, (len(flat), *place.shape))], -1)


def _place(tokens: int, first: Scalar) -> Float[Array, "tokens features"]:
    index = first + jnp.arange(tokens)
    logarithm = jnp.log1p(index.astype(jnp.float32))[:, None]
    return jnp.concatenate([jax.nn.one_hot(index, FIRST), logarithm, jnp.ones((tokens, 1))], -1)


def _projected(pool: AnchorPool,
               x: Float[Array, "corrected tokens features"]) -> Float[Array, " ..."]:
    """The features as the pool's sums have them."""
    directions, channels = pool.sums.gram.shape[-1] - FIRST - 2, pool.sums.cross.shape[-1]
    if directions == channels:
        return x
    kv, place = jnp.split(x, [channels], axis=-1)
    return jnp.concatenate([kv @ jnp.asarray(_projection(channels, directions)), place], -1)


@functools.lru_cache(maxsize=8)
def _projection(channels: int, directions: int) -> np.ndarray:
    """Fixed orthonormal directions, so that the sums of different pools fit together."""
    noise = np.random.default_rng(1).normal(size=(channels, directions))
    return np.linalg.qr(noise)[0].astype(np.float32)


def deviation(estimated: Segment, exact: Segment) -> Float[Array, ""]:
    """How far an estimate is from exact KV: relative, root-mean-square, the mean over layers.

    Layer 0, which is never estimated, is left out. Tokens of both that hold one count.
    """
    both = (estimated.valid & exact.valid)[None, :, None]
    wrong = jnp.where(both, estimated.flat - exact.flat, 0)[1:]
    size = jnp.where(both, exact.flat, 0)[1:]
    squares = [jnp.square(x).sum((1, 2)) for x in (wrong, size)]
    return jnp.sqrt(squares[0] / jnp.maximum(squares[1], 1e-30)).mean()


def observe(pool: AnchorPool, base: Segment, exact: Segment, consumer: Scalar,
            following: tuple[Segment, Segment] | None = None, options: Options = Options(),
            approximate: bool | Bool[Array, ""] = False,
            first: Scalar = 0) -> tuple[AnchorPool, Observed]:
    """Learn from an exact prefill how this text's KV differs behind the consumer's prompt.

    The sums grow; and the text becomes an anchor, or an anchor's offset for this consumer is
    written. Where anchors are full or too large together, others make way (`evict`).

    Args:
      pool: what is known.
      base: the text's KV elsewhere.
      exact: the text's KV in the prompt.
      consumer: which prompt, 0 to C - 1.
      following: base and exact KV of the static text behind; None: nothing is learned of it.
      options: see there.
      approximate: whether the base was computed on top of estimates.
      first: index in the text of the first token given, for a long text in parts; pools without
        anchors only.

    Raises:
      ValueError: outside of a trace, if the consumer is none of the pool's; inside, nothing is
        learned.
    """
    _check(pool, consumer)
    consumers = pool.sums.gram.shape[0]
    is_known = jnp.asarray((consumer >= 0) & (consumer < consumers))
    consumer = jnp.where(is_known, consumer, consumers)  # what is written there is dropped
    both = base.valid & exact.valid
    offset = jnp.where(both[None, :, None], exact.flat - base.flat, 0.0)
    taught = jax.tree.map(lambda x: x.at[consumer].get(mode="clip"), pool.sums).add(
        _projected(pool, features(base, first)), offset[1:], both)
    pool = dataclasses.replace(
        pool, clock=pool.clock + 1,
        sums=jax.tree.map(lambda old, new: old.at[consumer].set(new, mode="drop"), pool.sums,
                          taught))
    capacity, tokens = pool.sketch.shape[:2]
    if not capacity:
        return pool, Observed(jnp.int32(0), jnp.int32(0), jnp.float32(0))

    length = jnp.minimum(base.length, tokens)
    same = (_distances(pool, base) < SAME) & (pool.length == length)
    most = pool.following.u.shape[-3]
    behind_length = jnp.int32(0) if following is None else jnp.minimum(following[0].length, most)
    old = same[:, None] & pool.seen & (jnp.arange(consumers) == consumer)[None]
    growth = jnp.stack([
        jnp.where(same.any(), 0, length), jnp.where(old.any(), 0, length),
        behind_length - jnp.where(old, pool.following_length, 0).sum()]).astype(jnp.float32)
    growth = growth @ jnp.array([part.bytes_per_token for part in (
        pool.base, pool.offset, pool.following)])
    pool, evicted, fits = _make_room(pool, growth, same, is_known, options)
    free = jnp.where(fits, jnp.argmin(pool.is_there), capacity)
    new = jnp.where(same.any(), capacity, free)  # where a new anchor goes
    place = jnp.where(same.any() & fits, jnp.argmax(same), new).astype(jnp.int32)

    def put(old: Array, at: tuple[Array | int, ...], value: Array | int | bool) -> Array:
        return old.at[at].set(value, mode="drop")

    kept = resized(offset, tokens)
    offsets = pool.offset.put((place, consumer), kept)
    stored = offsets.entry((jnp.minimum(place, capacity - 1), consumer)).numbers()
    behind, behind_lengths = pool.following, put(pool.following_length, (new,), 0)
    if following is not None:
        difference = following[1].flat - following[0].flat
        behind = behind.put((place, consumer), resized(difference, most))
        behind_lengths = put(behind_lengths, (place, consumer), behind_length)
    pool = dataclasses.replace(
        pool, base=pool.base.put((new,), resized(base.flat, tokens)), offset=offsets,
        following=behind, sketch=put(pool.sketch, (new,), _sketch(pool, base)),
        length=put(pool.length, (new,), length), uses=put(pool.uses, (new,), 0),
        following_length=behind_lengths, seen=put(pool.seen, (place, consumer), True),
        approximate=put(pool.approximate, (new,), approximate),
        inserted=put(pool.inserted, (new,), pool.clock), used=put(pool.used, (place,), pool.clock))
    return pool, Observed(place, evicted, _relative(stored - kept, kept))


def evict(pool: AnchorPool, options: Options = Options(),
          spared: Bool[Array, " A"] | None = None) -> tuple[AnchorPool, Int[Array, ""]]:
    """Forget one anchor, by the rule of the options; the sums keep what it taught.

    Args:
      pool: what is known.
      options: see there.
      spared: anchors that stay; None: none is.

    Returns:
      The pool, and where the anchor stood: int32, the number of anchors if there was none.
    """
    if not len(pool.length):
        return pool, jnp.int32(0)
    there = pool.is_there if spared is None else pool.is_there & ~spared
    place = matching.first_to_go(
        options.eviction, options.window, there, pool.uses, pool.inserted, pool.used, pool.clock,
        pool.bytes_of_anchors)
    place = jnp.where(there.any(), place, pool.length.shape[0])
    return dataclasses.replace(
        pool, length=pool.length.at[place].set(0, mode="drop"),
        seen=pool.seen.at[place].set(False, mode="drop")), place.astype(jnp.int32)


def _make_room(pool: AnchorPool, growth: Array, same: Array, wanted: Array,
               options: Options) -> tuple[AnchorPool, Array, Array]:
    """Evict others until a text, an anchor already or not, may take so many bytes more.

    Returns:
      The pool, how many were evicted, and whether there is room now.
    """
    def is_full(pool: AnchorPool) -> Array:
        full = ~same.any() & pool.is_there.all()
        if options.max_bytes is not None:
            full |= pool.bytes_of_anchors.sum() + growth > options.max_bytes
        return full

    def goes_on(state: tuple[AnchorPool, Array]) -> Array:
        fits_alone = options.max_bytes is None or growth <= options.max_bytes
        return wanted & fits_alone & is_full(state[0]) & (state[0].is_there & ~same).any()

    pool, evicted = lax.while_loop(
        goes_on, lambda state: (evict(state[0], options, same)[0], state[1] + 1),
        (pool, jnp.int32(0)))
    return pool, evicted, wanted & ~is_full(pool)


def fit(pool: AnchorPool, consumer: Scalar, options: Options = Options()) -> ridge.Weights:
    """The ridge's maps of one consumer, by layer from 1 on; worth keeping while the sums stay."""
    directions, channels = pool.sums.gram.shape[-1] - FIRST - 2, pool.sums.cross.shape[-1]
    weights = ridge.fit(jax.tree.map(lambda x: x[consumer], pool.sums), options.penalty,
                        min(options.rank, channels))
    if directions == channels:
        return weights
    # Maps of the projected KV, made such that they take the KV itself.
    of_kv, of_place = jnp.split(weights.left, [directions], axis=-1)
    unprojected = of_kv @ jnp.asarray(_projection(channels, directions)).T
    return dataclasses.replace(weights, left=jnp.concatenate([unprojected, of_place], -1))


def estimate(pool: AnchorPool, base: Segment, consumer: Scalar, options: Options = Options(),
             weights: ridge.Weights | None = None,
             first: Scalar = 0) -> tuple[Offsets, Estimated]:
    """What to add to a text's KV, and to that of the static text behind, in a consumer's prompt.

    Args:
      pool: what is known.
      base: the text's KV elsewhere.
      consumer: which prompt, 0 to C - 1.
      options: see there.
      weights: what `fit` gave for this consumer; None: it is called, where the ridge is used.
      first: index in the text of the first token given, for a long text in parts; pools without
        anchors only.

    Returns:
      The offsets, zero where nothing is known, and what they rest on: an estimate that rests on
      nothing, or that the gate refuses, has `info.refused`.

    Raises:
      ValueError: outside of a trace, if the consumer is none of the pool's.
    """
    _check(pool, consumer)
    by = _weigh(pool, base, consumer, options)
    text, following = _blended(pool, by, consumer, base.size)
    covered = by.covers.any(0) & base.valid
    unreliable = (base.valid & ~covered).sum(dtype=jnp.int32)
    rule = jnp.where(covered.any(), Estimated.ANCHORS, Estimated.NOTHING)
    weighed = jnp.where(by.anchor > 0, by.distance, 0.0) @ by.anchor
    error = jnp.where(covered.any(), weighed, 1.0)
    if options.estimator == "ridge":
        weights = fit(pool, consumer, options) if weights is None else weights
        by_ridge = weights(features(base, first))
        by_ridge = jnp.concatenate([jnp.zeros_like(by_ridge[:1]), by_ridge])
        text = jnp.where(covered[None, :, None], text, by_ridge)
        taught = pool.sums.count[consumer, 0] > 0
        rule = jnp.where(covered.any(), Estimated.NEAR_COPY,
                         jnp.where(taught, Estimated.RIDGE, Estimated.NOTHING))
        unreliable = jnp.where(taught, 0, unreliable)
        error = jnp.where(covered.any() | ~taught, error, jnp.sqrt(weights.noise.mean()))
    scale = (options.decay ** jnp.arange(len(text), dtype=jnp.float32)).at[0].set(0)
    text, following = (x * scale[:, None, None] for x in (text, following))
    moved = jnp.where(base.valid, jnp.square(text).sum((0, 2)) / jnp.maximum(
        jnp.square(base.flat).sum((0, 2)), 1e-30), 0.0)
    refused, counted = _gate(pool, base, by, error, options)
    refused |= rule == Estimated.NOTHING
    heads = base.k.shape[-2]
    behind = jnp.int32(following.shape[1])
    return (Offsets(Segment.of_flat(text, base.length, heads),
                    Segment.of_flat(following, behind, heads)),
            Estimated(rule=rule.astype(jnp.int32), weights=by.anchor, counted=counted & ~refused,
                      distance=by.distance.min(initial=jnp.inf), error=error,
                      unreliable=unreliable, moved=moved,
                      recompute=_recompute(base, moved, options), refused=refused))


def correct(kv: KV, weights: ridge.Weights, sources: Int[Array, " tokens"],
            targets: Int[Array, " tokens"], births: Int[Array, " 2"], first: Scalar,
            rope: Ropes) -> tuple[KV, Float[Array, " tokens"]]:
    """`read`, the ridge's `estimate`, `apply` and `place` in one, a layer at a time.

    The same numbers, and no more memory than a layer takes: for splicing into storage that serves.

    Args:
      kv: the storage; donate it.
      weights: what `fit` gave for the consumer.
      sources: int32, slots of the text's KV elsewhere.
      targets: int32, slots of its KV in the prompt; beyond the storage, nothing is written.
      births: int32, position of the text's first token there and here.
      first: index in the text of the first of these tokens.
      rope: of the model, or of each layer.

    Returns:
      The storage, and of each token the mean square of what was added over that of the base.
    """
    heads, dim = kv.k[0].shape[-2:]
    tokens, half = len(sources), heads * dim
    ways = zip(*(turns(rope, position, len(kv.k), dim)
                 for position in (births[0], births[1], births[1] - births[0])), strict=True)
    dtype = number_dtype(kv.k[0])  # what is added need not be more exact than what is stored

    def times(x: Array, matrix: Array) -> Array:
        return product(x.reshape(tokens, -1).astype(dtype), matrix.astype(dtype), jnp.float32)

    place = _place(tokens, first)
    added, size, layers = jnp.zeros(tokens), jnp.zeros(tokens), []
    for layer, (stored, way) in enumerate(zip(zip(kv.k, kv.v, strict=True), ways, strict=True)):
        there, here, across = way
        k, v = (numbers(x, sources) for x in stored)
        new_k, new_v = turned(k, across), v
        size += jnp.square(k).sum((1, 2)) + jnp.square(v).sum((1, 2))
        if layer:
            # Keys are turned once, from there to here; to the text's own frame go the weights.
            left, right, bias = (x[layer - 1] for x in (weights.left, weights.right, weights.bias))
            of_k, of_v, of_place = jnp.split(left, [half, 2 * half], axis=-1)
            of_k = turned(of_k.reshape(-1, heads, dim), there).reshape(-1, half)
            to_k = jnp.einsum("hdr,de->her", right[:half].reshape(heads, dim, -1), here)
            bias_k = turned(bias[None, :half].reshape(1, heads, dim), here)
            inner = times(k, of_k) + times(v, of_v) + place @ of_place.T
            offset_k = times(inner, to_k.reshape(half, -1)).reshape(k.shape) + bias_k
            offset_v = (times(inner, right[half:]) + bias[None, half:]).reshape(v.shape)
            added += jnp.square(offset_k).sum((1, 2)) + jnp.square(offset_v).sum((1, 2))
            new_k += offset_k
            new_v += offset_v
        layers.append([write_layer(x, targets, new)
                       for x, new in zip(stored, (new_k, new_v), strict=True)])
    k, v = zip(*layers, strict=True)
    return KV(k=k, v=v), added / jnp.maximum(size, 1e-30)


def predict(pool: AnchorPool, base: Segment, consumer: Scalar, options: Options = Options(),
            weights: ridge.Weights | None = None) -> Estimated:
    """What `estimate` would tell; under jit, without the work that only the offsets need.

    `info.refused` is the gate's word: compute this text exactly, and `observe` it.
    """
    return estimate(pool, base, consumer, options, weights)[1]


class _Weights(NamedTuple):
    """How loudly anchors speak."""

    distance: Float[Array, " A"]  # infinite to those without an offset for the consumer
    covers: Bool[Array, "A tokens"]  # which may speak for a token
    token: Float[Array, "A 2 tokens"]  # weights for the text, of K and of V
    channel: Float[Array, "A layers channels"]  # weights for what follows
    anchor: Float[Array, " A"]  # for the text, in sum
    is_own: Bool[Array, ""]  # whether the text itself is an anchor


def _weigh(pool: AnchorPool, base: Segment, consumer: Scalar, options: Options) -> _Weights:
    known = pool.is_there & pool.seen[:, consumer]
    distance = jnp.where(known, _distances(pool, base), jnp.inf)
    tau = options.tau
    if tau is None:
        tau = matching.temperature(pool.sketch, pool.length)
    weigh = functools.partial(matching.weights, distance, tau=tau, weighting=options.weighting)
    follows = pool.following_length[:, consumer] > 0
    same = distance < SAME  # also a longer text that begins with this one
    own = same & (pool.length == jnp.minimum(base.length, pool.sketch.shape[1]))
    if options.estimator == "paper":
        whole = known & (pool.length >= base.length)
        token, channel = (matching.paper_weights(
            base.flat, base.length, pool.base, pool.length, allowed)[kind]
            for kind, allowed in enumerate((whole, whole & follows)))
        covers = jnp.broadcast_to(whole[:, None], (len(whole), base.size))
        return _Weights(distance, covers, token, channel, weigh(allowed=whole), own.any())
    # A text's own offset speaks alone.
    known = jnp.where(own.any(), own, jnp.where(same.any(), same, known))
    speaks = known & (distance < options.near) if options.estimator == "ridge" else known
    covers = (jnp.arange(base.size)[None] < pool.length[:, None]) & speaks[:, None]
    token, channel = weigh(allowed=covers), weigh(allowed=known & follows)
    layers, _, channels = base.flat.shape
    return _Weights(distance, covers,
                    jnp.broadcast_to(token[:, None], (len(token), 2, base.size)),
                    jnp.broadcast_to(channel[:, None, None], (len(channel), layers, channels)),
                    weigh(allowed=speaks), own.any())


def _gate(pool: AnchorPool, base: Segment, by: _Weights, error: Array,
          options: Options) -> tuple[Bool[Array, ""], Bool[Array, " A"]]:
    """Whether an exact prefill is wanted, and which anchors count as used."""
    candidates, weights = jnp.isfinite(by.distance), by.anchor
    counted = (weights > 0) & (weights * (weights > 0).sum().astype(jnp.float32) >= 1)
    if options.gate == "bound":
        return error > options.bound, counted
    if options.gate == "entropy_paper":
        candidates = pool.is_there & (pool.length >= base.length)
        weights = matching.paper_gate(base.flat, pool.base, candidates)
        counted = matching.paper_counts(weights, candidates)
    count = candidates.sum()
    most = options.gamma * jnp.log2(jnp.maximum(count, 1).astype(jnp.float32))
    refused = (count < 2) | (matching.entropy(weights) > most)
    return refused & ~(by.is_own & (options.gate == "entropy")), counted


def use(pool: AnchorPool, info: Estimated) -> AnchorPool:
    """Note that an estimate was used, for `evict`: its anchors have one use more."""
    clock = pool.clock + 1
    return dataclasses.replace(pool, clock=clock, uses=pool.uses + info.counted.astype(jnp.int32),
                               used=jnp.where(info.counted, clock, pool.used))


def merge(mine: AnchorPool, theirs: AnchorPool) -> AnchorPool:
    """What two pools of equal shapes have seen together: sums add, and anchors stay as in `mine`.

    Raises:
      ValueError: if the shapes of their sums differ.
    """
    if mine.sums.gram.shape != theirs.sums.gram.shape:
        raise ValueError(f"sums of shapes {mine.sums.gram.shape} and {theirs.sums.gram.shape} do "
                         "not add: give pools of the same consumers, layers and features")
    return dataclasses.replace(mine, sums=mine.sums + theirs.sums)


def _blended(pool: AnchorPool, by: _Weights, consumer: Scalar, size: int) -> tuple[Array, Array]:
    """Weighted sums of the anchors' offsets, each anchor read once, and only where it weighs."""
    layers, channels = by.channel.shape[1:]
    behind = pool.following.u.shape[-3]
    zeros = jnp.zeros((layers, size, channels)), jnp.zeros((layers, behind, channels))

    def step(so_far: tuple[Array, Array], anchor: tuple) -> tuple[tuple[Array, Array], None]:
        token, channel, offset, following = anchor

        def add(so_far: tuple[Array, Array]) -> tuple[Array, Array]:
            text, behind = so_far
            of_token = jnp.repeat(token.T, channels // 2, axis=-1)[None]
            text += of_token * resized(offset.entry((consumer,)).numbers(), size)
            return text, behind + channel[:, None] * following.entry((consumer,)).numbers()

        weighs = (token > 0).any() | (channel > 0).any()
        return lax.cond(weighs, add, lambda so_far: so_far, so_far), None

    return lax.scan(step, zeros, (by.token, by.channel, pool.offset, pool.following))[0]


def _recompute(base: Segment, moved: Float[Array, " tokens"],
               options: Options) -> Bool[Array, " tokens"]:
    """The first tokens, and those that the estimate moves most up to the share asked for."""
    index = jnp.arange(base.size)
    first = (index < options.recompute_first) & base.valid
    order = jnp.argsort(jnp.argsort(-jnp.where(base.valid, jnp.where(first, jnp.inf, moved),
                                               -jnp.inf)))
    most = jnp.ceil(options.recompute * base.length.astype(jnp.float32)).astype(jnp.int32)
    return first | (base.valid & (order < most))


def _sketch(pool: AnchorPool, base: Segment) -> Float[Array, "tokens sketch"]:
    return resized(matching.sketch(base.flat)[None], pool.sketch.shape[1])[0]


def _distances(pool: AnchorPool, base: Segment) -> Float[Array, " A"]:
    return matching.distances(_sketch(pool, base), base.length, pool.sketch, pool.length)


def _relative(error: Array, of: Array) -> Float[Array, ""]:
    return jnp.sqrt(jnp.square(error).sum() / jnp.maximum(jnp.square(of).sum(), 1e-30))


def _check(pool: AnchorPool, consumer: Scalar) -> None:
    consumers = pool.sums.gram.shape[0]
    if not isinstance(consumer, jax.core.Tracer) and not 0 <= consumer < consumers:
        raise ValueError(f"consumer must be between 0 and {consumers - 1}, got {consumer}: init "
                         "the pool with more consumers")
