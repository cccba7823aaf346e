"""Random programs, and how the library plays them. One shape for all: compilation is what costs."""

import dataclasses
import functools
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
from hypothesis import strategies as st

import kvfunc
from kvfunc import Drop, History, Repos, Rope, Rows

SLOTS, QUERIES, ROWS = 48, 32, 128
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16

ROPES = {
    "default": Rope.default(HEAD_DIM),
    "linear": Rope.linear(HEAD_DIM, 1e4, factor=4.0),
    "llama3": Rope.llama3(HEAD_DIM, 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                          original_context=64),
    "yarn": Rope.yarn(HEAD_DIM, 1e4, factor=4.0, original_context=64),
    "partial": Rope.default(HEAD_DIM // 2),
    "interleaved": Rope.default(HEAD_DIM, interleaved=True),
}
FLOATS = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
QUANTIZED = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
DTYPES = FLOATS | QUANTIZED
SINKS = np.linspace(-1, 2, HEADS, dtype=np.float32)
OPTIONS = {"plain": {}, "window": dict(window=5), "all": dict(window=5, softcap=2.0, sinks=SINKS)}
# storage.fastest_dtype
AS_BITS = {"bits of bfloat16": jnp.uint16, "bits of fp8": jnp.uint8}
FLOAT_OF_BITS = {np.uint16: ml_dtypes.bfloat16, np.uint8: ml_dtypes.float8_e4m3fn}

seeds = st.integers(0, 2**31 - 1)


@st.composite
def ranges(draw, tokens: int):
    """One to three non-empty ranges within [0, tokens); they may overlap."""
    starts = draw(st.lists(st.integers(0, tokens - 1), min_size=1, max_size=3))
    return tuple((start, draw(st.integers(start + 1, tokens))) for start in starts)


@st.composite
def programs(draw, tokens: int = 32, events: int = 8, repos: int = 8):
    """("append", n), ("drop", raw ranges) and ("repos",) in any order; append first and last.

    At most so many tokens, events and repos among them.
    """
    written = draw(st.integers(1, 8))
    ops = [("append", written)]
    kinds = st.sampled_from(["drop", "drop", "repos"])
    for kind in draw(st.lists(kinds, min_size=min(4, events), max_size=events)):
        if kind == "drop":
            ops.append(("drop", draw(ranges(written))))
        elif repos:
            ops.append(("repos",))
            repos -= 1
        count = draw(st.integers(0, min(8, tokens - 1 - written)))
        if count:
            ops.append(("append", count))
            written += count
    return [*ops, ("append", draw(st.integers(1, min(8, tokens - written))))]


def as_events(ops) -> tuple[int, list[kvfunc.history.Event]]:
    """The same program as the number of its tokens and the events between them."""
    tokens, events = 0, []
    for op in ops:
        match op:
            case "append", count:
                tokens += count
            case "drop", which:
                events.append(Drop(tokens, which))
            case ("repos",):
                events.append(Repos(tokens))
    return tokens, events


def history(ops) -> History:
    return History(*as_events(ops))


def life(ops) -> oracle.Simulation:
    return oracle.Simulation(*as_events(ops))


# Physical orders of all slots: tokens in one run, in one that goes on from the pool's end at its
# beginning, backwards, and scattered.
orders = st.one_of(st.integers(0, SLOTS - 1).map(lambda first: np.roll(np.arange(SLOTS), first)),
                   st.just(np.arange(SLOTS)[::-1]),
                   st.permutations(range(SLOTS)).map(np.array))


class Vectors(NamedTuple):
    """Un-rotated queries, keys and values, one for each token of any program."""

    q: np.ndarray  # [tokens, HEADS, HEAD_DIM] float32
    k: np.ndarray  # [tokens, KV_HEADS, HEAD_DIM] float32
    v: np.ndarray  # as k

    @classmethod
    def random(cls, seed: int) -> "Vectors":
        rng = np.random.default_rng(seed)
        return cls(*(rng.standard_normal((SLOTS + QUERIES, heads, HEAD_DIM)).astype(np.float32)
                     for heads in (HEADS, KV_HEADS, KV_HEADS)))


verbs = types.SimpleNamespace(
    reserve=functools.partial(jax.jit(kvfunc.reserve, static_argnames="size"), size=QUERIES),
    write=jax.jit(kvfunc.write), drop=jax.jit(kvfunc.drop), keep=jax.jit(kvfunc.keep),
    repos=jax.jit(kvfunc.repos), compact=jax.jit(kvfunc.compact), rows=jax.jit(kvfunc.rows_for))


@functools.partial(jax.jit, static_argnums=0)
def rotations(rope: Rope, q, k, births, shift):
    """Queries and keys rotated to their births, and the turn of every row."""
    return rope.rotate(q, births), rope.rotate(k, births), rope.rotation(shift)


def empty_cache(dtype, layers: int = 1) -> kvfunc.KVCache:
    """No token, and NaN in every slot: what is not written must never be read."""
    cache = kvfunc.init(layers, SLOTS, KV_HEADS, HEAD_DIM, dtype)
    return dataclasses.replace(cache, kv=jax.tree.map(not_a_number, cache.kv))


def not_a_number(stored):
    """NaN in an array of storage; of int8, whose scales hold the NaN, garbage."""
    kind = stored.dtype.type
    if kind == np.int8:
        nan = np.int8(77)
    else:
        nan = np.array(np.nan, FLOAT_OF_BITS.get(kind, kind)).view(kind)
    return jnp.full(stored.shape, nan)


def numbers(stored) -> np.ndarray:
    """What a layer's K or V holds, in float64."""
    if isinstance(stored, kvfunc.Quantized):
        return numbers(stored.values) * numbers(stored.scales)[..., None]
    stored = np.asarray(stored)
    kind = stored.dtype.type
    return stored.view(FLOAT_OF_BITS.get(kind, kind)).astype(float)


def only_in(slots, kv: kvfunc.KV) -> kvfunc.KV:
    """Storage with NaN outside of a mask over slots."""
    def where(stored):
        mask = np.asarray(slots).reshape(-1, *[1] * (stored.ndim - 1))
        return jnp.where(mask, stored, not_a_number(stored))

    return jax.tree.map(where, kv)


def append(cache, rope: Rope, vectors: Vectors, first: int, count: int, **options):
    """Tokens `first`, … into the cache; also their attention, [count, heads, dim]."""
    q, k, v = (x[first:first + QUERIES] for x in vectors)
    cache, new = verbs.reserve(cache, count=np.int32(count))
    assert not new.overflow
    rows = verbs.rows(cache, new).pad(ROWS, QUERIES)
    q, k, turn = rotations(rope, q, k, new.births, rows.shift)
    cache = verbs.write(cache, new.slots, (k,), (v,))
    out = kvfunc.segment_attention(q, cache.kv.k[0], cache.kv.v[0], rows, new.births, turn,
                                   **options)
    return cache, np.asarray(out)[:count]


def raw_mask(raw) -> np.ndarray:
    """A mask over slots, for caches in which token i stands in slot i."""
    mask = np.zeros(SLOTS, bool)
    mask[list(raw)] = True
    return mask


def play(ops, rope: Rope, vectors: Vectors, dtype, **options):
    """The program on a KVCache: the cache, and the attention of every token."""
    outputs = []

    def attended(cache, first, count):
        cache, out = append(cache, rope, vectors, first, count, **options)
        outputs.append(out)
        return cache

    return _played(ops, dtype, attended), np.concatenate(outputs)


def build(ops, dtype) -> kvfunc.KVCache:
    """The cache after a program, with random KV and nothing computed."""
    _, k, v = Vectors.random(0)

    def written(cache, first, count):
        cache, new = verbs.reserve(cache, count=np.int32(count))
        end = first + QUERIES
        return verbs.write(cache, new.slots, (k[first:end],), (v[first:end],))

    return _played(ops, dtype, written)


def _played(ops, dtype, append) -> kvfunc.KVCache:
    cache, tokens = empty_cache(dtype), 0
    for op in ops:
        match op:
            case "append", count:
                cache = append(cache, tokens, count)
                tokens += count
            case "drop", which:
                cache, _ = verbs.drop(cache, raw_mask(oracle.covered(which)))
            case ("repos",):
                cache, _ = verbs.repos(cache)
    return cache


def reordered(cache: kvfunc.KVCache, order) -> kvfunc.KVCache:
    """The same cache with its slots in another physical order."""
    return jax.tree.map(lambda x: x[order] if x.ndim else x, cache)


def pool(rope: Rope, vectors: Vectors, births, slots, dtype):
    """K and V of tokens 0, 1, … in these slots of a pool, and NaN everywhere else."""
    k = rope.rotate(jnp.asarray(vectors.k[:QUERIES]), jnp.asarray(padded(births, 0)))
    cache = verbs.write(empty_cache(dtype), padded(slots, SLOTS), (k,), (vectors.v[:QUERIES],))
    return cache.kv.k[0], cache.kv.v[0]


def attend(rope: Rope, vectors: Vectors, chosen, births, k, v, rows: Rows, **options):
    """The attention of the tokens `chosen` over a pool, [chosen, heads, dim]."""
    rows, births = rows.pad(ROWS, QUERIES), padded(births, 0)
    tokens = padded(chosen, 0)
    q, _, turn = rotations(rope, vectors.q[tokens], vectors.k[tokens], births, rows.shift)
    out = kvfunc.segment_attention(q, k, v, rows, births, turn, **options)
    return np.asarray(out)[:len(chosen)]


def padded(values, filler: int) -> np.ndarray:
    """int32, one for each query that is compiled for."""
    values = np.asarray(values, np.int32)
    return np.pad(values, (0, QUERIES - len(values)), constant_values=filler)


def same_bits(a, b) -> bool:
    """Whether two trees are equal bit for bit, NaN included."""
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
