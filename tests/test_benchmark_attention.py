"""The benchmark of segment attention counts what must be done; its check finds what is wrong."""

import importlib
import pathlib
import sys

import numpy as np
import pytest

from kvfunc.rows import Rows

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def attention(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("attention")


def one_by_one(rows, births, window):
    """How many queries there are, pairs that see each other, and slots that are seen."""
    seen = np.zeros((len(rows.query_raw), 100), int)
    for q_start, q_len, slot, length, raw, birth, shift, until in zip(
            *(getattr(rows, name) for name in Rows.COLUMNS), strict=True):
        for query in range(q_start, q_start + q_len):
            for key in range(length):
                age = births[query] - (birth - shift + key)
                seen[query, slot + key] += (
                    raw + key <= rows.query_raw[query] < until
                    and (window is None or age < window))
    return (rows.query_raw >= 0).sum(), seen.sum(), seen.any(0).sum()


@pytest.mark.parametrize("window", [None, 1, 9])
def test_work_is_what_one_counts_one_by_one(attention, window):
    rng = np.random.default_rng(0)
    for _ in range(100):
        count, queries = rng.integers(0, 6), 12
        q_start = rng.integers(0, queries, count)
        columns = dict(q_start=q_start, q_len=rng.integers(0, queries - q_start + 1),
                       slot=rng.integers(0, 60, count), length=rng.integers(0, 30, count),
                       raw=rng.integers(0, 40, count), birth=rng.integers(0, 60, count),
                       shift=rng.integers(-9, 20, count),
                       visible_until=rng.choice([25, 30, Rows.NEVER], count))
        rows = Rows(**{name: column.astype(np.int32) for name, column in columns.items()},
                    query_raw=np.arange(20, 20 + queries, dtype=np.int32)).pad(7, queries + 2)
        births = rng.integers(20, 40, queries + 2).astype(np.int32)
        assert attention.work_of(rows, births, window) == one_by_one(rows, births, window)


def test_bytes_and_flops_of_small_work(attention):
    shape = attention.Shape(heads=4, kv_heads=2, head_dim=16)
    decode = attention.Workload("", shape, requests=3, queries=1, keys=10)
    # K and V of 3 x 10 tokens, 2 heads; 3 queries and outputs of 4 heads in float32.
    assert attention.cost(decode) == (2 * 30 * 2 * 32 + 2 * 3 * 4 * 64, 4 * 30 * 4 * 16)
    int8 = attention.Workload("", shape, 3, 1, 10, dtype="int8")
    assert attention.cost(int8) == (2 * 30 * 2 * (16 + 4) + 2 * 3 * 4 * 64, 4 * 30 * 4 * 16)
    prefill = attention.Workload("", shape, requests=1, queries=10, keys=10)
    assert attention.cost(prefill) == (2 * 10 * 2 * 32 + 2 * 10 * 4 * 64, 4 * 55 * 4 * 16)


def test_runs_are_the_same_work_with_shifts_and_holes(attention):
    shape = attention.Shape(heads=4, kv_heads=2, head_dim=16)
    one, many = (attention.Workload("", shape, 2, 1, 128, runs) for runs in (1, 64))
    assert attention.cost(one) == attention.cost(many)
    rows, slots = many.table()
    assert len(rows.slot) == 128 and len(set(rows.shift)) == 64
    assert np.all(np.diff(rows.slot) > rows.length[1:])
    assert rows.slot[-1] + rows.length[-1] < slots
    np.testing.assert_array_equal(rows.birth - rows.shift, rows.raw)


@pytest.mark.parametrize("device", ["a800", "h200", "v5e", "v6e", "tpu7x"])
def test_floors_of_a_data_sheet_need_no_device(attention, monkeypatch, capsys, device):
    monkeypatch.setattr(attention, "segment_attention", None)
    attention.main(["--for", device])
    printed = capsys.readouterr().out
    assert f"{device}, by its data sheet" in printed and "floor µs" in printed
    assert "bytes" in printed and "bfloat16 FLOPs" in printed


def test_the_check_proves_what_runs_here(attention, capsys):
    with pytest.raises(SystemExit) as exit:
        attention.main(["--check"])
    printed = capsys.readouterr().out
    assert not exit.value.code, printed
    assert 'Proven here, on cpu: xla, cpu; "auto" is "cpu".' in printed
    assert "Not proven: triton: it is for GPUs, and JAX runs on 'cpu' here." in printed


def zeros(attend, q, *args, **options):
    return np.zeros_like(q)


def other_bits(attend, q, *args, **options):
    return attend(q, *args, **options) + np.random.default_rng().uniform(0, 1e-6)


def leaking(attend, q, k, *args, **options):
    return attend(q, k, *args, **options) + 1e-6 * np.isnan(k).any()


@pytest.mark.parametrize("wrong, said", [
    (zeros, "off by 3.1e+00"), (other_bits, "a second run gives other bits"),
    (leaking, "unused slots show")])
def test_the_check_fails_where_an_implementation_is_wrong(
        attention, monkeypatch, capsys, wrong, said):
    check = sys.modules["attention_check"]
    right = check.segment_attention
    monkeypatch.setattr(check, "segment_attention",
                        lambda *args, **options: wrong(right, *args, **options))
    monkeypatch.setattr(check, "CASES", check.CASES[:1])
    with pytest.raises(SystemExit) as exit:
        attention.main(["--check", "--implementation", "cpu"])
    printed = capsys.readouterr().out
    assert exit.value.code
    assert f"Not proven: cpu: SmolLM2-135M, decode: {said}." in printed


def test_what_cannot_run_here_is_refused(attention, capsys):
    with pytest.raises(SystemExit) as exit:
        attention.main(["--implementation", "triton"])
    assert exit.value.code
    assert "it needs an NVIDIA GPU, and JAX runs on 'cpu' here" in capsys.readouterr().err
