"""The engine under pressure: no page is ever lost, whatever breaks off and whenever.

The device is a stand-in that chooses random tokens, so that steps are cheap: what is tested is the
bookkeeping. One test at the end does the same with a real network.
"""

import asyncio
import collections
import contextlib
import logging

import numpy as np
import pytest

from kvfunc.history import Drop, Repos
from kvfunc.serve.answer import Choice, answer
from kvfunc.serve.engine import Engine
from kvfunc.serve.interface import (
    EngineFailed,
    Job,
    QueueFull,
    Sampling,
    ShuttingDown,
    TimedOut,
    Token,
)
from kvfunc.serve.metrics import Metrics
from kvfunc.serve.requestlog import RequestRecord

from . import test_engine
from .test_engine import CONFIG, Request, assert_nothing_leaks, run, text

model = test_engine.model
VOCABULARY = CONFIG.vocab_size
STOP = 5


class Fault(Exception):
    """Of the device, or of a receiver."""


class StandIn:
    """Instead of the device: random tokens, and a fault with some probability."""

    def __init__(self, engine, rng, faults=0.0):
        self.rng, self.faults, self.raised = rng, faults, 0
        engine._call_step = self._call_step
        engine._choose = self._choose

    def _call_step(self, work, size, rows):
        assert sum(len(part.queries) for part in work) <= size
        assert sum(part.table.shape[1] for part in work) <= rows
        if self.rng.random() < self.faults:
            self.raised += 1
            raise Fault("of the device")

    def _choose(self, logits, sequences):
        return [Token(int(self.rng.integers(VOCABULARY)), None, ()) for _ in sequences]


def make(model, *, pages=24, page_size=4, lanes=4, **options):
    return Engine(model, kv_tokens=pages * page_size, chunk=16, page_size=page_size,
                  max_num_seqs=lanes, **options)


def random_request(rng, longest=60):
    """Requests that share prefixes of three texts, some with a drop and a repos."""
    tokens = text(int(rng.integers(1, longest)), seed=int(rng.integers(3)))
    at = int(rng.integers(1, len(tokens) + 1))
    events = (Drop(at, ((0, int(rng.integers(1, at + 1))),)), Repos(at))
    return Request(tokens, events[: int(rng.integers(3))], new=int(rng.integers(0, 40)))


def job_of(request, rng):
    return Job(np.array(request.tokens, np.int32), request.history, "ab"[int(rng.integers(2))],
               request.new, Sampling(temperature=0.0, stop_ids=frozenset({STOP})))


def sequences(engine):
    return [*engine.scheduler.running, *engine.scheduler.waiting]


@pytest.mark.parametrize("seed, page_size, count", [(1, 4, 1000), (2, 1, 250), (3, 16, 250)])
def test_no_page_is_lost_in_many_aborts_faults_and_timeouts(model, caplog, seed, page_size, count):
    """Of a seed: what ends well, is given up, passes its time, or meets a fault, in any order."""
    caplog.set_level(logging.CRITICAL, "kvfunc.serve.engine")
    rng = np.random.default_rng(seed)
    engine = make(model, pages=96 // page_size, page_size=page_size)
    device = StandIn(engine, rng, faults=0.02)
    ends = collections.Counter()
    metrics = Metrics("tiny", engine.stats)

    async def asked(request, patience, timeout):
        """As an HTTP request: one or two answers, perhaps closed or late before their end."""
        record = RequestRecord("id", "/", "tiny", metrics)
        choices = [Choice(job_of(request, rng)) for _ in range(int(rng.integers(1, 3)))]
        steps = answer(engine, choices, record, timeout)
        try:
            async with contextlib.aclosing(steps):
                async for _ in steps:
                    patience -= 1
                    if not patience:
                        ends["closed"] += 1
                        return
            ends["well"] += 1
        except (Fault, TimedOut, QueueFull) as error:
            ends[type(error).__name__] += 1
        finally:
            record.close()

    def raising(left):
        def deliver(what):
            nonlocal left
            left -= 1
            if left == 0:
                ends["receiver"] += 1
                raise Fault("of a receiver")
        return deliver

    async def drive():
        tasks, bare, cancelled = set(), [], 0
        while sum(ends.values()) + cancelled < count:
            if len(tasks) + len(engine._open) < 12:
                request = random_request(rng)
                kind = rng.random()
                if kind < 0.15:
                    engine.submit(job_of(request, rng), raising(int(rng.integers(1, 6))))
                elif kind < 0.3:
                    bare.append(engine.submit(job_of(request, rng), lambda what: None))
                else:
                    patience = int(rng.integers(1, 8)) if kind < 0.6 else 10**6
                    timeout = float(rng.random() * 0.02) if kind > 0.8 else None
                    one = asyncio.ensure_future(asked(request, patience, timeout))
                    tasks.add(one)
                    one.add_done_callback(tasks.discard)
            if bare and rng.random() < 0.3:
                bare.pop(int(rng.integers(len(bare)))).cancel()
                cancelled += 1
            if tasks and rng.random() < 0.1:
                list(tasks)[int(rng.integers(len(tasks)))].cancel()
                cancelled += 1
            await asyncio.sleep(0)
            given_up = [s for s in sequences(engine) if s.cancelled]
            engine.step()
            assert_nothing_leaks(engine)
            assert not {*given_up} & {*sequences(engine)}  # one step, and their pages are back
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in bare:
            one.cancel()

    asyncio.run(drive())
    print(f"seed {seed}: {dict(ends)}, {engine.counters}")
    run(engine)
    pages = engine.scheduler.pages
    assert pages.held == 0 and pages.free + pages.evictable == pages.count
    assert not engine._open
    assert device.raised and engine.counters.evicted
    assert engine.counters.preempted or page_size == 16  # so few pages are given with care
    for end in ("well", "closed", "receiver", "Fault", "TimedOut"):
        assert ends[end], ends
    device.faults = 0.0
    last = Request(text(50, seed=9), new=8).submit(engine, sampling=Sampling(temperature=0.0))
    run(engine)
    assert len(last.tokens) == 8 and last.end.reason == "length"


def test_the_queue_takes_so_many_and_no_more(model):
    engine = make(model, pages=200, lanes=2, max_queue=3)
    StandIn(engine, np.random.default_rng(0))
    asked = [Request(text(9, seed=i), new=30).submit(engine) for i in range(5)]
    with pytest.raises(QueueFull, match="5 answers run and wait, and 1 more would pass the 5") as e:
        Request(text(9)).submit(engine)
    assert e.value.retry_after == 1  # nothing has been measured
    run(engine, 3)
    asked[4].generation.cancel()  # its place is free at once
    Request(text(9, seed=7), new=30).submit(engine)
    with pytest.raises(QueueFull):
        Request(text(9)).submit(engine)
    run(engine)
    assert [one.end is not None for one in asked] == [True] * 4 + [False]
    engine.check_queue(5)
    with pytest.raises(QueueFull):
        engine.check_queue(6)


def test_no_queue_at_all_takes_what_runs_at_once(model):
    engine = make(model, lanes=2, max_queue=0)
    StandIn(engine, np.random.default_rng(0))
    for seed in range(2):
        Request(text(9, seed=seed)).submit(engine)
    with pytest.raises(QueueFull):
        Request(text(9)).submit(engine)
    with pytest.raises(ValueError, match="max_queue must be at least 0, got -1"):
        make(model, max_queue=-1)


def test_when_to_come_again_is_the_measured_time_of_those_that_wait(model, monkeypatch):
    engine = make(model, pages=200, lanes=2, max_queue=4)
    StandIn(engine, np.random.default_rng(0))
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    first = Request(text(9), new=4).submit(engine)
    run(engine, 1)
    now[0] = 40.0
    run(engine)
    assert first.end is not None
    for seed in range(6):
        Request(text(9, seed=seed)).submit(engine)
    with pytest.raises(QueueFull) as full:
        engine.check_queue(1)
    assert full.value.retry_after == 100  # 40 s for each of 5 that wait, over 2 lanes


def test_a_queue_without_a_place_for_all_answers_of_a_request_takes_none(model):
    engine = make(model, lanes=2, max_queue=1)
    StandIn(engine, np.random.default_rng(0))

    async def ask(count):
        record = RequestRecord("id", "/", "tiny", Metrics("tiny", engine.stats))
        choices = [Choice(job_of(Request(text(9)), np.random.default_rng(0)))] * count
        return await anext(answer(engine, choices, record))

    with pytest.raises(QueueFull):
        asyncio.run(ask(4))
    assert not engine._open and not engine.step()


def test_what_is_dropped_takes_no_room_when_a_request_is_admitted(model):
    """Beside 30 tokens, 150 of which 130 are dropped fit into 96 slots, and 70 do not."""
    for request, running in ((Request(text(150), (Drop(140, ((10, 140),)),)), 2),
                             (Request(text(70)), 1)):
        engine = make(model)
        StandIn(engine, np.random.default_rng(0))
        Request(text(30, seed=1)).submit(engine)
        request.submit(engine)
        run(engine, 1)
        assert len(engine.scheduler.running) == running


def test_closing_ends_what_runs_and_waits_as_shutting_down(model):
    engine = make(model, lanes=1)
    StandIn(engine, np.random.default_rng(0))
    asked = [Request(text(9, seed=i), new=40).submit(engine) for i in range(3)]
    run(engine, 2)
    engine.close()
    assert [type(one.end.error) for one in asked] == [ShuttingDown] * 3
    assert_nothing_leaks(engine)


def test_an_engine_that_cannot_recover_ends_what_it_has_and_takes_nothing_more(
        model, monkeypatch, caplog):
    engine = make(model)
    StandIn(engine, np.random.default_rng(0), faults=1.0)
    monkeypatch.setattr(engine, "_reset_device", lambda: 1 / 0)
    assert not engine.alive
    engine.start()
    assert engine.alive
    asked = Request(text(9)).submit(engine)
    engine._thread.join(10)
    assert not engine.alive and isinstance(asked.end.error, Fault)
    with pytest.raises(EngineFailed, match="restart the server"):
        Request(text(9)).submit(engine)
    assert "the engine has failed" in caplog.text
    engine.close()


@pytest.mark.parametrize("seed", [3])
def test_a_real_network_answers_as_before_after_aborts_and_faults(model, monkeypatch, caplog, seed):
    """80 requests of which most break off, on the tiny network of test_engine.py."""
    engine = make(model, pages=32)
    engine.warm_up()
    request = Request(text(40), new=6)
    alone = request.submit(engine)
    run(engine)
    rng, call_step = np.random.default_rng(seed), engine._call_step
    asked = []

    def faulty(*arguments):
        if rng.random() < 0.05:
            raise Fault("of the device")
        return call_step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_call_step", faulty)
        while len(asked) < 80:
            if len(engine._open) < 8:
                asked.append(random_request(rng).submit(engine))
            if rng.random() < 0.5:
                asked[-int(rng.integers(1, min(len(asked), 8) + 1))].generation.cancel()
            engine.step()
            assert_nothing_leaks(engine)
    run(engine)
    assert any(one.end and isinstance(one.end.error, Fault) for one in asked)
    again = request.submit(engine)
    run(engine)
    assert again.ids == alone.ids
    assert engine.scheduler.pages.held == 0
