"""The contract of segment_attention, for every implementation of it.

A backend's test is a subclass that names its `implementation`; that of Triton is run by
test_triton.py. Whatever the problem, padding
queries must give exactly 0, and NaN outside of the rows must not show: `attend` checks that always.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfunc.attention import Partial, segment_attention
from kvfunc.rows import Rows

from .conftest import INTERPRETED
from .shapes import (
    GEMMA_2_2B,
    GEMMA_2_27B,
    GPT_OSS_20B,
    LLAMA_2_7B,
    LLAMA_3_1_8B,
    PHI_2_OF_EIGHT,
    PHI_3_MINI_OF_EIGHT,
    QWEN3_0_6B,
    QWEN3_8B,
    SMOLLM2_135M,
    Request,
    Run,
    Shape,
    bits,
    dense,
    dense_partial,
    problem,
    with_numbers,
)

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
BFLOAT16 = ml_dtypes.bfloat16
NEVER = Rows.NEVER


@functools.cache
def compiled(implementation, shape, **options):
    """The implementation under jit for one shape, and a list that grows when it is traced."""
    traces = []

    @jax.jit
    def attend(q, k, v, rows, births, sinks):
        traces.append(q.shape)
        return implementation(q, k, v, rows, births, shape.rope.rotation(rows.shift), sinks=sinks,
                              **shape.options, **options)

    return attend, traces


def rows_of(*columns, query_raw):
    """A table from rows as tuples, in the order of `Rows.COLUMNS`."""
    table = dict(zip(Rows.COLUMNS, np.array(columns, np.int32).T, strict=True))
    return Rows(**table, query_raw=np.array(query_raw, np.int32))


def numbered(shape, rows, births):
    """A problem whose scores are all 0 and whose values are their slots: outputs are means."""
    made = with_numbers(shape, rows, np.array(births, np.int32))
    slot = np.broadcast_to(np.arange(shape.slots, dtype=np.float32)[:, None, None], made.v.shape)
    return dataclasses.replace(made, q=np.zeros_like(made.q),
                               v=np.where(np.isnan(made.v), np.nan, slot))


class SegmentAttentionContract:
    implementation = None

    def run(self, made, **options):
        attend, _ = compiled(type(self).implementation, made.shape, **options)
        return attend(made.q, made.k, made.v, made.rows, made.births, made.sinks)

    def attend(self, made):
        out = np.asarray(self.run(made))
        assert out.dtype == np.float32
        np.testing.assert_array_equal(out[made.is_padding], 0.0)
        return out

    def assert_right(self, made):
        tolerance = TOLERANCE[str(made.k.dtype)]
        np.testing.assert_allclose(self.attend(made), dense(made), rtol=0, atol=tolerance)

    @pytest.mark.parametrize("shape, dtype", [
        pytest.param(SMOLLM2_135M, np.float32, id="SmolLM2-135M-float32"),
        pytest.param(LLAMA_3_1_8B, BFLOAT16, id="Llama-3.1-8B-bfloat16"),
        pytest.param(QWEN3_8B, np.float32, id="Qwen3-8B-float32"),
        pytest.param(GPT_OSS_20B, np.float32, id="GPT-OSS-20B-float32"),
        pytest.param(GEMMA_2_27B, np.float32, id="Gemma-2-27B-float32"),
        pytest.param(GEMMA_2_2B, BFLOAT16, id="Gemma-2-2B-bfloat16"),
        pytest.param(PHI_2_OF_EIGHT, BFLOAT16, id="Phi-2-bfloat16"),
        pytest.param(PHI_3_MINI_OF_EIGHT, np.float32, id="Phi-3-mini-float32")])
    def test_mixed_decode_and_prefill_equal_the_dense_answer(self, shape, dtype):
        self.assert_right(problem(
            shape,
            Request(1, [Run(70), Run(33, shift=20)]),
            Request(129, [Run(64), Run(40, shift=900, until=65), Run(1, shift=950)]),
            Request(7, [Run(130, until=3)]),
            Request(9, [Run(257, shift=4)]),
            dtype=dtype))

    @pytest.mark.parametrize("keys", [0, 1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 512, 513])
    def test_lengths_around_the_borders_of_blocks_and_tiles(self, keys):
        for packed in ([1, 7, 8, 9, 127, 128], [129, 9, 1]):
            self.assert_right(problem(
                SMOLLM2_135M, *(Request(queries, [Run(keys, shift=17)]) for queries in packed)))

    @pytest.mark.parametrize("queries", [1, 8, 9, 255, 256, 257, 300])
    def test_many_keys(self, queries):
        self.assert_right(problem(
            SMOLLM2_135M, Request(queries, [Run(1100), Run(1025, shift=300)]), at_end=True))

    @pytest.mark.parametrize("queries", [1, 9])
    def test_runs_that_end_with_the_pool(self, queries):
        for keys in (1, 63, 65, 257):
            context = [Run(keys), Run(64), Run(keys, shift=3)]
            self.assert_right(problem(SMOLLM2_135M, Request(queries, context), at_end=True))

    def test_one_query_alone(self):
        for keys in (0, 1, 64, 1400):
            self.assert_right(problem(QWEN3_0_6B, Request(1, [Run(keys, shift=5)]), at_end=True))

    @pytest.mark.parametrize("queries", [1, 40])
    def test_hundreds_of_rows_of_one_token(self, queries):
        context = [Run(1, shift=index // 2, until=None if index % 3 else queries // 2)
                   for index in range(400)]
        self.assert_right(problem(SMOLLM2_135M, Request(queries, context), gap=1))

    def test_a_query_may_stand_in_rows_of_few_and_of_many_queries(self):
        # The last three of twenty queries see one more run than the others do.
        self.assert_right(with_numbers(SMOLLM2_135M, rows_of(
            (0, 20, 10, 300, 0, 5, 5, NEVER),
            (17, 3, 500, 70, 300, 450, 150, NEVER),
            (0, 20, 600, 20, 370, 370, 0, NEVER),
            query_raw=range(370, 390)), np.arange(370, 390)))

    def test_rows_may_read_the_same_slots_at_different_shifts(self):
        self.assert_right(with_numbers(SMOLLM2_135M, rows_of(
            (0, 1, 100, 200, 0, 50, 50, NEVER),
            (1, 1, 100, 200, 0, 50, 40, NEVER),
            (2, 10, 150, 150, 0, 100, -7, NEVER),
            query_raw=[200, 200, *[150] * 10]), np.array([200, 210, *[300] * 10])))

    def test_who_sees_what(self):
        made = numbered(SMOLLM2_135M, rows_of(
            (0, 4, 10, 2, 0, 0, 0, 4),  # slots 10 and 11 are gone for the third query
            (0, 4, 20, 1, 2, 2, 0, NEVER),
            (0, 4, 30, 4, 3, 3, 0, NEVER),  # the queries' own
            (2, 1, 99, 1, 1, 1, 0, NEVER),  # slot 99 is read by the third query alone
            query_raw=[2, 3, 4, 6]), [2, 3, 4, 6])
        expected = [(10 + 11 + 20) / 3, (10 + 11 + 20 + 30) / 4, (20 + 30 + 31 + 99) / 4,
                    (20 + 30 + 31 + 32 + 33) / 5]
        np.testing.assert_allclose(self.attend(made)[:4, 0, 0], expected, rtol=1e-6)

    def test_a_window_counts_positions_not_births(self):
        shape = GPT_OSS_20B
        made = numbered(shape, rows_of(
            (0, 3, 10, 3, 0, 1000, 990, NEVER),  # positions 10, 11, 12
            (0, 3, 20, 1, 3, 20, 0, NEVER),
            query_raw=[9, 9, 9]), [137, 138, 148])
        made = dataclasses.replace(made, sinks=np.full(shape.heads, -np.inf, np.float32))
        expected = [(10 + 11 + 12 + 20) / 4, (11 + 12 + 20) / 3, 0]
        np.testing.assert_allclose(self.attend(made)[:3, 0, 0], expected, rtol=1e-6)

    def test_a_sink_takes_its_share_of_the_softmax(self):
        shape = GPT_OSS_20B
        made = numbered(shape, rows_of((0, 1, 10, 3, 0, 0, 0, NEVER), query_raw=[2, 2]), [2, 2])
        made = dataclasses.replace(made, sinks=np.log(np.arange(64, dtype=np.float32) + 1))
        out = self.attend(made)[:, :, 0]
        np.testing.assert_allclose(out[0], 33 / (3 + np.arange(1, 65)), rtol=1e-6)
        np.testing.assert_array_equal(out[1], 0)  # in no row: a sink alone has no value

    def test_softcap_bounds_large_scores(self):
        made = problem(GEMMA_2_27B, Request(1, [Run(3)]))
        self.assert_right(dataclasses.replace(made, q=made.q * 100))

    def test_large_scores_do_not_overflow(self):
        made = problem(SMOLLM2_135M, Request(20, [Run(300)]))
        made = dataclasses.replace(made, q=made.q * 1000)
        np.testing.assert_allclose(self.attend(made), dense(made), rtol=0, atol=2e-3)

    def test_empty_rows_add_nothing(self):
        made = problem(SMOLLM2_135M, Request(9, [Run(70)]), Request(3, [Run(70)]))
        garbage = rows_of((0, 0, 10**6, 50, -9, -9, 10**6, 0), (0, 12, 10**6, 0, 0, 9, -9, NEVER),
                          (2, 3, 10**6, 0, 10**6, 9, -9, NEVER), query_raw=[])
        columns = {}
        for name in Rows.COLUMNS:
            old, new = getattr(made.rows, name), getattr(garbage, name)
            columns[name] = np.concatenate([new, old[:1], new, old[1:-6]])
        salted = dataclasses.replace(made, rows=dataclasses.replace(made.rows, **columns))
        # Between rows of the same queries they part the sum, so equal up to its order.
        np.testing.assert_allclose(self.attend(salted), self.attend(made), rtol=0, atol=1e-6)

    def test_nothing_to_do_gives_zeros(self):
        empty = with_numbers(SMOLLM2_135M, Rows.empty(), np.zeros(0, np.int32))
        np.testing.assert_array_equal(self.attend(empty), np.zeros((300, 9, 64)))

    @pytest.mark.parametrize("queries, rows, slots", [(0, 3, 9), (3, 0, 9), (3, 3, 0), (0, 0, 0)])
    def test_without_queries_rows_or_slots_nothing_is_seen(self, queries, rows, slots):
        shape = Shape(4, 2, 16, queries=queries, rows=rows, slots=slots)
        np.testing.assert_array_equal(
            self.attend(with_numbers(shape, Rows.empty(), np.zeros(0, np.int32))),
            np.zeros((queries, 4, 16)))

    def test_bits_of_bfloat16_are_read_as_bfloat16(self):
        made = problem(LLAMA_3_1_8B, Request(129, [Run(300, shift=9)]), Request(2, [Run(65)]),
                       dtype=BFLOAT16)
        as_bits = dataclasses.replace(made, k=bits(made.k), v=bits(made.v))
        np.testing.assert_array_equal(self.attend(as_bits), self.attend(made))

    def test_a_second_run_gives_the_same_bits(self):
        made = problem(SMOLLM2_135M, Request(129, [Run(300, shift=9)]), Request(2, [Run(1000)]))
        np.testing.assert_array_equal(self.attend(made), self.attend(made))

    def test_one_compiled_program_serves_every_length(self):
        attend, traces = compiled(type(self).implementation, SMOLLM2_135M)
        self.attend(problem(SMOLLM2_135M, Request(1)))
        before, programs = len(traces), attend._cache_size()
        for queries, keys in ((1, 1), (1, 1400), (30, 0), (190, 1300)):
            self.attend(problem(SMOLLM2_135M, Request(queries, [Run(keys)])))
        assert (len(traces), attend._cache_size()) == (before, programs)

    @pytest.mark.parametrize("at_end", [False, True])
    @pytest.mark.parametrize("queries", [1, 8, 9, 12])
    def test_partials_are_sums_that_are_not_normalised(self, queries, at_end):
        """Out of a pool that is smaller than a block."""
        made = problem(LLAMA_2_7B, Request(queries, [Run(7, shift=3), Run(9, until=5)]),
                       at_end=at_end)
        part = self.run(made, partials=True)
        for got, want in zip((part.m, part.l, part.acc), dense_partial(made), strict=True):
            assert got.dtype == jnp.float32
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        assert np.all(part.m[queries:] == -np.inf)
        assert not part.l[queries:].any() and not part.acc[queries:].any()
        np.testing.assert_allclose(part.finish(), dense(made), rtol=0, atol=1e-5)

    def test_partials_of_parts_of_the_table_merge_to_the_whole(self):
        made = problem(LLAMA_2_7B, Request(10, [Run(7, shift=3), Run(9, until=5)]), Request(1),
                       gap=2)
        parts = []
        for keep in ([0], [1, 3], [], [2]):
            kept = np.isin(np.arange(LLAMA_2_7B.rows), keep)
            rows = dataclasses.replace(made.rows, q_len=np.where(kept, made.rows.q_len, 0))
            parts.append(self.run(dataclasses.replace(made, rows=rows), partials=True))
        whole = functools.reduce(Partial.merge, parts).finish()
        np.testing.assert_allclose(whole, dense(made), rtol=0, atol=1e-5)

    runs = st.builds(Run, st.sampled_from([0, 1, 2, 63, 64, 65, 100]), st.integers(-50, 3000),
                     st.none() | st.integers(0, 12))
    requests = st.builds(Request, st.sampled_from([1, 2, 8, 9, 50]), st.lists(runs, max_size=3))

    # Every subclass runs it; derandomized, none replays another's examples.
    @settings(max_examples=25, deadline=None, derandomize=True,
              suppress_health_check=[HealthCheck.differing_executors])
    @given(st.lists(requests, min_size=1, max_size=3), st.booleans(), st.sampled_from([0, 1, 70]))
    def test_any_requests_equal_the_dense_answer(self, requests, at_end, gap):
        self.assert_right(problem(SMOLLM2_135M, *requests, at_end=at_end, gap=gap))


class TestXLA(SegmentAttentionContract):
    implementation = staticmethod(functools.partial(segment_attention, implementation="xla"))


class TestCPU(SegmentAttentionContract):
    implementation = staticmethod(functools.partial(segment_attention, implementation="cpu"))


class TestPallas(SegmentAttentionContract):
    implementation = staticmethod(functools.partial(segment_attention, implementation="pallas"))


if INTERPRETED:
    class TestTriton(SegmentAttentionContract):
        implementation = staticmethod(functools.partial(segment_attention, implementation="triton"))


@pytest.mark.parametrize("change, message", [
    (dict(heads=8), "q has 8 heads, which is no multiple of k's 3 KV heads"),
    (dict(window=0), "window must be at least 1 position or None, got 0"),
    (dict(softcap=0.0), "softcap must be positive or None, got 0.0"),
    (dict(softcap=-2.0), "softcap must be positive or None, got -2.0")])
def test_wrong_arguments_are_named(change, message):
    made = problem(SMOLLM2_135M, Request(1))
    q, k, v, births, shift = map(jnp.asarray, (
        made.q[:, : change.pop("heads", 9)], made.k, made.v, made.births, made.rows.shift))
    with pytest.raises(ValueError, match=re.escape(message)):
        segment_attention(q, k, v, made.rows, births, made.shape.rope.rotation(shift), **change)


def test_merged_partials_weigh_by_their_largest_score():
    one = Partial(m=jnp.array([[0.0]]), l=jnp.array([[1.0]]), acc=jnp.array([[[10.0]]]))
    other = Partial(m=jnp.log(jnp.array([[3.0]])), l=jnp.array([[2.0]]), acc=jnp.array([[[2.0]]]))
    # 1 key of weight 1 and value 10; 2 keys of weight 3 whose values sum to 2.
    np.testing.assert_allclose(one.merge(other).finish(), [[[16 / 7]]], rtol=1e-6)
    np.testing.assert_allclose(one.merge(other).finish(jnp.zeros(1)), [[[16 / 8]]], rtol=1e-6)
