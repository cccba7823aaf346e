"""A stretch of text in its own frame: taken out of storage, put back, spliced into a cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import not_a_number, numbers, same_bits

import kvfunc
from kvfunc import KV, Rope, segments
from kvfunc.segments import Segment

from .anchor_oracle import HEAD_DIM, HEADS, LAYERS, flat, text

SLOTS, SIZE, NEW = 48, 8, 4
ROPES = {
    "default": Rope.default(HEAD_DIM),
    "yarn": Rope.yarn(HEAD_DIM, 1e4, factor=4.0, original_context=64),
    "interleaved": Rope.default(HEAD_DIM, interleaved=True),
    "partial": Rope.default(HEAD_DIM // 2),
}
every_rope = pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)

read = jax.jit(segments.read, static_argnames="rope")
place = jax.jit(segments.place, static_argnames="rope")
splice = jax.jit(segments.splice)
append = jax.jit(kvfunc.append)
reserve = functools.partial(jax.jit(kvfunc.reserve, static_argnames="size"), size=NEW)
drop, repos, rows_for = map(jax.jit, (kvfunc.drop, kvfunc.repos, kvfunc.rows_for))


def storage(dtype=jnp.float32) -> KV:
    """NaN in every slot."""
    return jax.tree.map(not_a_number, KV.zeros(LAYERS, SLOTS, HEADS, HEAD_DIM, dtype))


def raw_vectors(seed: int, count: int = SIZE):
    """Keys before rotation, and values: float64 [layers, count, heads, dim]."""
    return np.random.default_rng(seed).normal(size=(2, LAYERS, count, HEADS, HEAD_DIM))


def rotated(rope, k, positions):
    return np.stack([oracle.rotate(rope, layer, positions) for layer in k])


def as_segment(rope, k, v, length: int, first: int = 0) -> Segment:
    """NaN in its padding."""
    k, v = (x.astype(np.float32) for x in (rotated(rope, k, first + np.arange(k.shape[1])), v))
    k[:, length:] = v[:, length:] = np.nan
    return Segment(jnp.asarray(k), jnp.asarray(v), jnp.int32(length))


def int32s(*values):
    return jnp.array(values, jnp.int32)


@pytest.mark.parametrize(("dtype", "tolerance"), [
    (jnp.float32, 2e-6), (jnp.bfloat16, 2**-8), (jnp.uint16, 2**-8), (jnp.int8, 1 / 200)])
def test_what_is_placed_at_a_birth_is_read_back(dtype, tolerance):
    stretch, slots = text(0, 6, SIZE), int32s(9, 3, 4, 40, 41, 0, 20, 21)
    kv = place(storage(dtype), stretch, slots, jnp.int32(1234), ROPES["yarn"])
    back = read(kv, jnp.where(jnp.arange(SIZE) < 6, slots, SLOTS), jnp.int32(1234), ROPES["yarn"])
    assert back.length == 6
    largest = np.abs(flat(stretch)).max()
    np.testing.assert_allclose(flat(back), flat(stretch), rtol=0, atol=tolerance * largest)


@every_rope
def test_what_is_read_from_one_place_and_put_at_another_is_as_if_computed_there(rope):
    (k, v), slots = raw_vectors(0), jnp.arange(SIZE, dtype=jnp.int32)
    there = as_segment(rope, k, v, SIZE, first=700)
    kv = KV(*(tuple(x.at[:SIZE].set(new) for x, new in zip(old, rows, strict=True))
              for old, rows in ((storage().k, there.k), (storage().v, there.v))))
    stretch = read(kv, slots, jnp.int32(700), rope)
    np.testing.assert_allclose(stretch.k, rotated(rope, k, np.arange(SIZE)), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(stretch.v, v.astype(np.float32))
    moved = place(storage(), stretch, slots + 30, jnp.int32(5), rope)
    for layer in range(LAYERS):
        np.testing.assert_allclose(moved.k[layer][30:38],
                                   oracle.rotate(rope, k[layer], 5 + np.arange(SIZE)), atol=1e-5)
        np.testing.assert_array_equal(moved.v[layer][30:38], v[layer].astype(np.float32))


def test_only_the_slots_of_tokens_are_written():
    kv = place(storage(), text(0, 3, SIZE), jnp.arange(SIZE, dtype=jnp.int32) + 4, jnp.int32(0),
               ROPES["default"])
    for stored in (*kv.k, *kv.v):
        assert np.isfinite(stored).all((1, 2)).nonzero()[0].tolist() == [4, 5, 6]


def test_padding_of_a_segment_is_0_in_flat_and_0_when_read():
    stretch = text(0, 3, SIZE)
    assert stretch.valid.tolist() == [True] * 3 + [False] * 5
    assert not np.asarray(stretch.flat)[:, 3:].any()
    kv = place(storage(), stretch, jnp.arange(SIZE, dtype=jnp.int32), jnp.int32(0),
               ROPES["default"])
    back = read(kv, jnp.where(jnp.arange(SIZE) < 3, jnp.arange(SIZE), SLOTS), jnp.int32(0),
                ROPES["default"])
    assert back.length == 3
    assert not np.asarray(back.k)[:, 3:].any()


def test_flat_is_keys_then_values_of_a_token_and_back():
    stretch = text(0, SIZE, SIZE)
    assert stretch.flat[1, 2].tolist() == [*stretch.k[1, 2].ravel().tolist(),
                                           *stretch.v[1, 2].ravel().tolist()]
    assert same_bits(Segment.of_flat(stretch.flat, stretch.length, HEADS), stretch)
    pair = jax.tree.map(lambda x: jnp.stack([x, x]), stretch)
    pair = dataclasses.replace(pair, length=int32s(2, 5))
    assert pair.valid.sum(-1).tolist() == [2, 5]
    assert pair.flat.any((1, 3)).sum(-1).tolist() == [2, 5]


class Life:
    """A cache of NaN beside a list of slots and the vectors that stand in them."""

    def __init__(self, rope: Rope):
        self.rope, self.model = rope, oracle.ListModel()
        self.cache = kvfunc.init(LAYERS, SLOTS, HEADS, HEAD_DIM, jnp.float32)
        self.cache = dataclasses.replace(self.cache, kv=storage())
        self.k, self.v = raw_vectors(7, SLOTS)

    def append(self):
        first = self.model.tokens
        k, v = (x[:, first:first + NEW] for x in (self.k, self.v))
        k = rotated(self.rope, k, self.model.next_position + np.arange(NEW))
        self.cache, new = append(self.cache, *(tuple(jnp.asarray(x, jnp.float32)) for x in (k, v)))
        self.model.append(NEW)
        return new

    def splice(self, length: int, first: int):
        tokens = slice(self.model.tokens, self.model.tokens + SIZE)
        k, v = (np.pad(x[:, tokens], ((0, 0), (0, SIZE - x[:, tokens].shape[1]), (0, 0), (0, 0)))
                for x in (self.k, self.v))
        self.cache, told = splice(self.cache, as_segment(self.rope, k, v, length, first),
                                  jnp.int32(first))
        assert not told.overflow
        self.model.append(length)
        for index, slot in enumerate(self.model.slots[len(self.model.slots) - length:]):
            slot.birth = first + index

    def edit(self, step):
        match step:
            case ("append",):
                self.append()
            case "splice", length, first:
                self.splice(length, first)
            case "drop", mask:
                self.cache, _ = drop(self.cache, jnp.asarray(mask) & self.cache.written)
                self.model.drop(set(np.flatnonzero(mask).tolist()))
            case ("repos",):
                self.cache, _ = repos(self.cache)
                self.model.repos()

    def check_table(self):
        slots = self.model.slots
        assert self.cache.birth[:len(slots)].tolist() == [slot.birth for slot in slots]
        assert self.cache.position[:len(slots)].tolist() == [
            slot.position if slot.live else -1 for slot in slots]
        assert int(self.cache.next_position) == self.model.next_position

    def check_attention(self):
        """The next tokens see keys rotated in float64 to where they now stand."""
        births = self.model.next_position + np.arange(NEW)
        new = self.append()
        raw, positions = (list(x) for x in zip(*self.model.positions.items(), strict=True))
        q = np.random.default_rng(3).normal(size=(NEW, 2 * HEADS, HEAD_DIM))
        rows = rows_for(self.cache, new)
        for layer in range(LAYERS):
            out = kvfunc.segment_attention(
                self.rope.rotate(jnp.asarray(q, jnp.float32), new.births), self.cache.kv.k[layer],
                self.cache.kv.v[layer], rows, new.births, self.rope.rotation(rows.shift))
            keys = oracle.rotate(self.rope, self.k[layer, raw], positions)
            for query, birth in enumerate(births):
                seen = np.array(positions) <= birth
                np.testing.assert_allclose(out[query], oracle.attend(
                    oracle.rotate(self.rope, q[query, None], [birth])[0], keys[seen],
                    self.v[layer, raw][seen]), rtol=0, atol=1e-5)


splices = st.tuples(st.just("splice"), st.integers(0, SIZE), st.sampled_from([0, 0, 3, 1000]))
edits = st.one_of(st.just(("append",)), st.just(("repos",)), splices, st.tuples(
    st.just("drop"), st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS).map(np.array)))


@every_rope
@settings(max_examples=5, deadline=None, derandomize=True)
@given(before=st.lists(edits, max_size=2), spliced=splices, after=st.lists(edits, max_size=2))
def test_a_spliced_text_is_attended_as_if_its_keys_were_rotated_to_where_it_stands(
        rope, before, spliced, after):
    life = Life(rope)
    for step in (*before, spliced, *after):
        life.edit(step)
        life.check_table()
    life.check_attention()


def test_a_splice_is_a_negative_shift_and_repos_moves_it_like_any_text():
    life = Life(ROPES["default"])
    for step in (("append",), ("splice", 5, 0), ("append",)):
        life.edit(step)
    assert life.cache.shift[:13].tolist() == [0] * 4 + [-4] * 5 + [0] * 4
    life.edit(("drop", np.isin(np.arange(SLOTS), [1, 2, 5])))
    life.edit(("repos",))
    assert life.cache.position[:13].tolist() == [0, -1, -1, 1, 2, -1, 3, 4, 5, 6, 7, 8, 9]
    assert life.cache.birth[4:9].tolist() == [0, 1, 2, 3, 4]
    life.check_attention()


def test_a_text_spliced_in_parts_is_the_text_spliced_whole():
    whole, parts = Life(ROPES["yarn"]), Life(ROPES["yarn"])
    for life, steps in ((whole, [("splice", 7, 0)]), (parts, [("splice", 3, 0), ("splice", 4, 3)])):
        life.edit(("append",))
        for step in steps:
            life.edit(step)
        life.check_table()
    assert same_bits((whole.cache.birth, whole.cache.position), (parts.cache.birth,
                                                                 parts.cache.position))
    for mine, theirs in zip(jax.tree.leaves(parts.cache.kv), jax.tree.leaves(whole.cache.kv),
                            strict=True):
        np.testing.assert_array_equal(numbers(mine), numbers(theirs))


def test_what_does_not_fit_is_refused_and_changes_nothing():
    cache = kvfunc.init(LAYERS, 5, HEADS, HEAD_DIM, jnp.float32)
    with pytest.raises(ValueError, match="no room for 6 more tokens: 5 of capacity 5 slots"):
        segments.splice(cache, text(0, 6, SIZE))
    same, told = splice(cache, text(0, 6, SIZE), jnp.int32(0))
    assert told.overflow
    assert same_bits(same, cache)


def test_a_batch_of_texts_is_spliced_like_each_of_them():
    cache = kvfunc.init(LAYERS, SLOTS, HEADS, HEAD_DIM, jnp.float32)
    texts = [text(0, 3, SIZE), text(1, 6, SIZE)]
    batch, _ = jax.jit(jax.vmap(segments.splice, (None, 0)))(
        cache, jax.tree.map(lambda *x: jnp.stack(x), *texts))
    for number, each in enumerate(texts):
        assert same_bits(jax.tree.map(lambda x, number=number: x[number], batch),
                         splice(cache, each, jnp.int32(0))[0])
