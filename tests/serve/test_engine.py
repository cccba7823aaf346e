"""The engine on a tiny random model: whatever is resident, an answer is the one of the library.

Temperature 0 in float32. The pool holds NaN before each test, so that a slot which is read before
it is written shows; after every step each slot's holders are counted again.
"""

import dataclasses
import functools
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfunc
from kvfunc.history import HOLE, Drop, History, Repos, Run
from kvfunc.models.chat import ChatTemplate
from kvfunc.models.config import ModelConfig
from kvfunc.models.llama import Llama
from kvfunc.models.load import LoadedModel
from kvfunc.models.params import fill, shapes
from kvfunc.rope import Rope
from kvfunc.serve.engine import Engine
from kvfunc.serve.interface import (
    CapacityExceeded,
    ContextLengthExceeded,
    End,
    Job,
    Sampling,
    Token,
    Usage,
)
from kvfunc.serve.scheduler import Counters

from .fake import TEMPLATE, byte_tokenizer

CONFIG = ModelConfig(vocab_size=97, width=32, layers=2, heads=4, kv_heads=2, head_dim=8,
                     mlp_width=48, norm_eps=1e-5, tied=False, rope=Rope.default(8, 1000.0),
                     context_length=512)
POOL, CHUNK = 128, 16
GREEDY = Sampling(temperature=0.0, logprobs=5)
TOLERANCE = 1e-5  # of a log-probability
GAP = 1e-4  # between the two likeliest tokens of every prompt here


@dataclasses.dataclass(frozen=True)
class Request:
    tokens: tuple[int, ...]
    events: tuple[Drop | Repos, ...] = ()
    new: int = 4

    @property
    def history(self):
        return History(len(self.tokens), self.events)

    def job(self, salt, sampling=GREEDY):
        return Job(np.array(self.tokens, np.int32), self.history, salt, self.new, sampling)

    def submit(self, engine, salt="a", sampling=GREEDY):
        return Asked(engine, self.job(salt, sampling))

    def plan(self, engine, salt="a"):
        return engine.plan(self.job(salt))

    def then(self, answer, more, *events, new=4):
        """The next turn: the answer, `more` tokens, and further events."""
        ids = tuple(token.id for token in answer)
        return Request(self.tokens + ids + text(more, seed=len(self.tokens)),
                       (*self.events, *events), new)


class Asked:
    """A request on its way, and what has come of it."""

    def __init__(self, engine, job):
        self.tokens, self.end = [], None
        self.generation = engine.submit(job, self._deliver)

    def _deliver(self, what):
        assert self.end is None
        if isinstance(what, End):
            self.end = what
        else:
            assert self.usage is not None
            self.tokens.append(what)

    @property
    def usage(self):
        return self.generation.usage

    @property
    def ids(self):
        return [token.id for token in self.tokens]


def text(count, seed=0):
    return tuple(np.random.default_rng(seed).integers(0, CONFIG.vocab_size, count).tolist())


@pytest.fixture(scope="module")
def model():
    rng = np.random.default_rng(7)

    def read(place):
        shape = shapes(CONFIG)[place]
        if len(shape) == 1:
            return np.ones(shape)
        # Sharp attention: a wrong position or a lost token changes every answer.
        sharp = {"q": 2.0, "head": 2.0, "embed": shape[-1] ** 0.5}.get(place.module, 1.0)
        return rng.normal(size=shape) * sharp / shape[-1] ** 0.5

    tokenizer = byte_tokenizer()
    return LoadedModel("tiny", CONFIG, fill(CONFIG, str, read, jnp.float32), tokenizer,
                       ChatTemplate(TEMPLATE, tokenizer))


@pytest.fixture(scope="module")
def compiled(model):
    """A pool of 128 slots in pages of 16, chunks of 16, four requests at once."""
    engine = Engine(model, kv_tokens=POOL, chunk=CHUNK, page_size=16, max_num_seqs=4)
    engine.warm_up()
    return engine


@pytest.fixture(scope="module", params=[1, 4, 16], ids="page of {}".format)
def small(model, compiled, request):
    """The same in pages of other sizes, which no compiled code knows of."""
    engine = Engine(model, kv_tokens=POOL, chunk=CHUNK, page_size=request.param, max_num_seqs=4)
    engine._step = compiled._step
    return engine


@pytest.fixture
def engine(small):
    """The same with nothing resident."""
    return emptied(small)


@pytest.fixture(scope="module")
def cold(model):
    return answers_of_the_library(model)


def answers_of_the_library(model, size=32, capacity=192):
    """Answers by the library's verbs, one event after the other; nothing is ever found again."""
    config = model.config
    network = Llama(config, jnp.float32)

    @jax.jit
    def step(cache, tokens, count):
        cache, new = kvfunc.reserve(cache, size, count)
        logits, kv = network.forward(model.params, tokens, new.births, new.slots, cache.kv,
                                     kvfunc.rows_for(cache, new))
        top, ids = jax.lax.top_k(jax.nn.log_softmax(logits[count - 1]), 5)
        return dataclasses.replace(cache, kv=kv), top, ids

    drop, repos = jax.jit(kvfunc.drop), jax.jit(kvfunc.repos)

    def append(cache, ids):
        padded = np.pad(np.array(ids, np.int32), (0, size - len(ids)))
        cache, top, ids = step(cache, padded, np.int32(len(ids)))
        top = tuple(zip(ids.tolist(), top.tolist(), strict=True))
        return cache, Token(*top[0], top)

    @functools.cache
    def answer(request):
        cache = kvfunc.init(config.layers, capacity, config.kv_heads, config.head_dim, jnp.float32)
        at = 0
        for event in (*request.events, Repos(len(request.tokens))):
            while at < event.at:
                stop = min(at + size, event.at)
                cache, token = append(cache, request.tokens[at:stop])
                at = stop
            if isinstance(event, Drop):
                gone = np.zeros(capacity, bool)
                for start, stop in event.ranges:
                    gone[start:stop] = True
                cache, _ = drop(cache, gone)
            elif event in request.events:
                cache, _ = repos(cache)
        tokens = [token]
        while len(tokens) < request.new:
            cache, token = append(cache, [token.id])
            tokens.append(token)
        return tokens

    return answer


def emptied(engine):
    engine.close()  # hypothesis breaks examples off: their requests must not run on
    engine.scheduler.counters = Counters()
    engine._kv = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), engine._kv)
    return engine


def run(engine, steps=None):
    """Run so many steps, or until nothing is left; nothing leaks on the way."""
    for _ in itertools.count() if steps is None else range(steps):
        more = engine.step()
        assert_nothing_leaks(engine)
        if not more:
            return


def ask(engine, request, salt="a"):
    """Usage and answer of a request that is alone, which must be as planned."""
    planned = request.plan(engine, salt).usage
    asked = request.submit(engine, salt)
    run(engine)
    assert asked.end in (End("stop"), End("length")) and asked.usage == planned
    return planned, asked.tokens


def assert_nothing_leaks(engine):
    """Free, held and evictable pages are all pages, and held is what running requests hold."""
    pages, scheduler = engine.scheduler.pages, engine.scheduler
    holders, kept = np.zeros(pages.slots, np.int32), np.zeros(pages.slots, bool)
    for sequence in scheduler.running:
        holders[sequence.slots[sequence.slots != HOLE]] += 1
        holders[sequence.spare] += 1
    for node in scheduler.tree._nodes():
        slots = node.slots[node.slots != HOLE]
        assert not kept[slots].any()
        kept[slots] = True
    np.testing.assert_array_equal(pages._holders.reshape(-1), holders)
    np.testing.assert_array_equal(pages._kept.reshape(-1), kept)
    held = (holders.reshape(-1, pages.size) > 0).any(-1)
    used = held | kept.reshape(-1, pages.size).any(-1)
    assert (pages.free, pages.held) == (int((~used).sum()), int(held.sum()))
    assert pages.free + pages.held + pages.evictable == pages.count
    assert len({s.lane for s in scheduler.running}) == len(scheduler.running)


def assert_same(answer, expected, tolerance=TOLERANCE):
    """Equal tokens and log-probabilities; an answer may be cut short for lack of slots."""
    for got, want in zip(answer, expected, strict=False):
        (_, first), (_, second), *_ = want.top
        assert first - second > GAP, "no clear winner: choose another prompt"
        assert got.id == want.id
        np.testing.assert_allclose([p for _, p in got.top], [p for _, p in want.top], rtol=0,
                                   atol=tolerance)


def usage_of(prompt, cached=0, repos=0, skipped=0):
    return Usage(prompt, cached, repos, skipped, 0)


def test_nothing_is_compiled_in_500_mixed_steps(compiled):
    """First in this file, so that no other test compiles what `warm_up` forgot."""
    engine = emptied(compiled)
    assert engine.compilations == len(engine.shapes)
    rng, compiled, asked = np.random.default_rng(3), [], []

    def listen(event, duration, **_):
        if "compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        index = steps = 0
        while steps < 500:
            if rng.random() < 0.4:
                tokens = text(int(rng.integers(1, 100)), seed=int(rng.integers(3)))
                at = int(rng.integers(1, len(tokens) + 1))
                events = (Drop(at, ((0, int(rng.integers(1, at + 1))),)), Repos(at))
                request = Request(tokens, events[: index % 3], new=index % 9)
                sampling = Sampling(
                    temperature=float(index % 2), top_p=1 - 0.1 * (index % 4), top_k=index % 7,
                    min_p=0.01 * (index % 2), seed=index,
                    logprobs=None if index % 3 else index % 20,
                    presence_penalty=0.5 * (index % 4 == 0),
                    frequency_penalty=0.1 * (index % 5 == 0),
                    repetition_penalty=1.1 if index % 6 == 0 else 1.0, min_tokens=index % 2,
                    logit_bias=((3, 1.0),) * (index % 4 == 1), stop_ids=frozenset({index % 97}))
                asked.append(request.submit(engine, "ab"[index % 2], sampling))
                index += 1
            if asked and rng.random() < 0.02:
                asked[int(rng.integers(len(asked)))].generation.cancel()
            before = engine.counters.steps
            engine.step()
            steps += engine.counters.steps - before
            assert_nothing_leaks(engine)
    finally:
        jax.monitoring.clear_event_listeners()
    run(engine)
    assert engine.counters.evicted > 0 and engine.counters.found > 0
    assert engine.compilations == len(engine.shapes)
    assert compiled == []


def test_a_chunked_answer_is_the_answer_of_one_step(engine, cold):
    request = Request(text(60), new=8)
    usage, answer = ask(engine, request)
    assert usage == usage_of(60) and usage.computed_tokens == 60
    assert len(answer) == 8
    assert_same(answer, cold(request))


def test_a_full_hit_leaves_one_token_to_compute(engine, cold):
    request = Request(text(60), new=8)
    ask(engine, request)
    for _ in range(2):
        usage, answer = ask(engine, request)
        assert usage == usage_of(60, cached=59) and usage.computed_tokens == 1
        assert len(answer) == 8
        assert_same(answer, cold(request))


def test_the_next_turn_computes_what_is_new(engine, cold):
    first = Request(text(30), new=5)
    second = first.then(ask(engine, first)[1], 10)
    usage, answer = ask(engine, second)
    assert usage == usage_of(45, cached=34)  # the last generated token has no KV yet
    assert_same(answer, cold(second))
    third = second.then(answer, 10, Drop(45, ((5, 20),)), Repos(45))
    usage, answer = ask(engine, third)
    assert usage == usage_of(59, cached=5, repos=25, skipped=15)
    assert_same(answer, cold(third))
    fourth = third.then(answer, 10, Drop(63, ((22, 40),)))
    usage, answer = ask(engine, fourth)
    # Token 62, the answer's last, still reads 22-39 at their shift; 45-61 were born behind them.
    assert usage == usage_of(73, cached=5 + 17, repos=25, skipped=15)
    assert_same(answer, cold(fourth))


def test_the_worked_example_sent_again(engine, cold):
    request = Request(text(15), (Drop(13, ((4, 10),)), Repos(13)))
    usage, answer = ask(engine, request)
    assert usage == usage_of(15)
    assert_same(answer, cold(request))
    usage, answer = ask(engine, request)
    assert usage == usage_of(15, cached=5, repos=3, skipped=6) and usage.computed_tokens == 1
    assert_same(answer, cold(request))
    assert request.plan(engine).runs == (
        Run(0, 4, "cached", 0), Run(4, 10, "drop_skipped", None), Run(10, 13, "repos", 4),
        Run(13, 14, "cached", 7), Run(14, 15, "computed", 8))


def test_another_schedule_shares_what_stands_before_its_first_difference(engine, cold):
    tokens = text(50)
    plain = Request(tokens)
    ask(engine, plain)
    dropped = Request(tokens, (Drop(30, ((10, 20),)),))
    usage, answer = ask(engine, dropped)
    assert usage == usage_of(50, cached=20, skipped=10)
    assert_same(answer, cold(dropped))
    moved = Request(tokens, (Drop(30, ((10, 20),)), Repos(40)))
    usage, answer = ask(engine, moved)
    assert usage == usage_of(50, cached=10, repos=20, skipped=10)
    assert_same(answer, cold(moved))
    assert {tuple(t.id for t in cold(r)) for r in (plain, dropped, moved)} != {
        tuple(t.id for t in answer)}
    for request in (plain, dropped, moved):
        usage, answer = ask(engine, request)
        assert usage.computed_tokens == 1
        assert_same(answer, cold(request))


def test_another_salt_finds_nothing(engine, cold):
    request = Request(text(40))
    ask(engine, request, salt="a")
    usage, answer = ask(engine, request, salt="b")
    assert usage == usage_of(40)
    assert_same(answer, cold(request))
    assert ask(engine, request, salt="a")[0] == usage_of(40, cached=39)


def test_tokens_that_nobody_reads_are_never_computed_and_recovered_when_needed(engine, cold):
    tokens = text(40)
    dropped_at_once = Request(tokens, (Drop(20, ((8, 20),)),))
    usage, answer = ask(engine, dropped_at_once)
    assert usage == usage_of(40, skipped=12) and usage.computed_tokens == 28
    assert_same(answer, cold(dropped_at_once))
    kept = Request(tokens)
    usage, answer = ask(engine, kept)
    assert usage == usage_of(40, cached=8)
    assert_same(answer, cold(kept))
    later = Request(tokens[:20], (Drop(15, ((2, 5),)),))
    usage, answer = ask(engine, later)
    assert usage == usage_of(20, cached=12, skipped=3)
    assert_same(answer, cold(later))


def test_a_hole_in_the_middle_of_a_hit_is_recovered(engine, cold):
    first = Request(text(40), (Drop(20, ((8, 20),)),), new=3)
    holes = first.then(ask(engine, first)[1], 10)
    ask(engine, holes)
    # Dropping less at token 20 than before: 8-13 are read again, and all from 20 on is new.
    less = Request(holes.tokens, (Drop(20, ((14, 20),)),))
    usage, answer = ask(engine, less)
    assert usage == usage_of(53, cached=8, skipped=6)
    assert_same(answer, cold(less))
    usage, answer = ask(engine, holes)
    assert usage == usage_of(53, cached=40, skipped=12)
    assert_same(answer, cold(holes))


def test_many_conversations_in_a_small_pool(engine, cold):
    conversations = [Request(text(30, seed=seed)) for seed in range(8)]
    hits = 0
    for turn in range(3):
        for index, request in enumerate(conversations):
            events = (Drop(len(request.tokens), ((3, 9),)),) if index == turn else ()
            usage, answer = ask(engine, request)
            hits += usage.cached_tokens > 0
            assert len(answer) == 4
            assert_same(answer, cold(request))
            conversations[index] = request.then(answer, 3, *events)
            if index % 2:  # one more time at once: this one is resident
                assert ask(engine, request)[0].computed_tokens == 1
    assert hits < 24


def test_room_for_a_prompt_is_made_of_its_own_dropped_tokens(engine, cold):
    first = Request(text(100), new=1)
    ask(engine, first)
    dropped = Drop(100, ((20, 100),))
    second = Request(text(160), (dropped,))
    usage, answer = ask(engine, second)
    assert usage == usage_of(160, cached=20, skipped=80)
    assert_same(answer, cold(second))
    assert engine.counters.evicted > 0  # some of the 80 dropped ones have lost their KV


def test_a_prompt_longer_than_the_pool_runs_if_it_drops_on_the_way(engine, cold):
    request = Request(text(180), (Drop(80, ((5, 75),)), Repos(80), Drop(150, ((80, 145),))))
    usage, answer = ask(engine, request)
    assert usage == usage_of(180) and len(answer) == 4
    assert_same(answer, cold(request))
    with pytest.raises(CapacityExceeded):
        Request(text(160), (Drop(120, ((20, 100),)),)).submit(engine)


def test_an_answer_ends_where_no_slot_is_left(engine, cold):
    request = Request(text(engine.kv_tokens - 8), new=20)
    for _ in range(2):
        _, answer = ask(engine, request)
        assert len(answer) == 9  # 8 slots are left, and the last token needs none
        assert_same(answer, cold(request))
    engine.clear()
    full = Request(text(engine.kv_tokens), new=20)
    _, answer = ask(engine, full)
    assert len(answer) == 1
    assert_same(answer, cold(full))


def test_an_answer_ends_with_the_context(engine, monkeypatch):
    monkeypatch.setattr(engine, "context_length", 40)
    assert engine.max_new_tokens(History(37)) == 3
    assert len(ask(engine, Request(text(37), new=20))[1]) == 3
    moved = Request(text(37), (Drop(20, ((3, 8),)), Repos(20)), new=20)
    assert engine.max_new_tokens(moved.history) == 8
    assert len(ask(engine, moved)[1]) == 8


def test_no_new_tokens_fill_the_cache_and_say_nothing(engine):
    assert ask(engine, Request(text(20), new=0))[1] == []
    assert ask(engine, Request(text(20)))[0] == usage_of(20, cached=19)


def test_prompts_that_can_never_run_are_refused(model):
    engine = Engine(model, context_length=32, kv_tokens=24, chunk=8, page_size=1, max_num_seqs=8)

    def check(tokens, *events):
        engine.check(History(tokens, events))

    check(24)
    with pytest.raises(CapacityExceeded, match="needs 25 KV slots and the pool has 24: shorten it, "
                                               "or restart the server with a larger --kv-tokens"):
        check(25)
    check(30, Drop(10, ((2, 10),)))  # nobody reads 2-9: 22 slots
    check(31, Drop(10, ((2, 10),)))
    with pytest.raises(ContextLengthExceeded, match="the prompt of 32 tokens needs 33 positions, "
                                                    "one for the answer included, and the context "
                                                    "has 32"):
        check(32, Drop(10, ((2, 10),)))
    check(34, Drop(10, ((0, 10),)), Repos(10))
    with pytest.raises(ContextLengthExceeded, match="needs 34 positions"):
        # Positions run beyond the context before the repos brings them back.
        check(40, Drop(33, ((0, 33),)), Repos(34))
    with pytest.raises(CapacityExceeded):
        Request(text(25)).submit(engine)
    assert Request(text(25)).plan(engine).usage == usage_of(25)
    with pytest.raises(ValueError, match="the prompt has no tokens: give at least one"):
        check(0)


@pytest.mark.parametrize("sizes, message", [
    (dict(context_length=513), "max_model_len must be between 1 and 512, the model's own context, "
                               "got 513"),
    (dict(context_length=0), "got 0"),
    (dict(kv_tokens=7, page_size=8), "kv_tokens must be at least page_size=8, got 7"),
    (dict(page_size=0), "page_size must be between 1 and 128 slots, got 0"),
    (dict(page_size=129), "page_size must be between 1 and 128 slots, got 129"),
    (dict(chunk=0), "max_num_seqs and chunk must be at least 1, got 16 and 0"),
    (dict(max_num_seqs=0), "max_num_seqs and chunk must be at least 1, got 0 and 512"),
    (dict(policy="mru"), "policy must be one of worth, lru, dropped_first, got 'mru'")])
def test_sizes_that_cannot_be_are_named(model, sizes, message):
    with pytest.raises(ValueError, match=message):
        Engine(model, **sizes)


def steps_of(engine, monkeypatch):
    """(queries of each request) of every step from now on."""
    steps, run_step = [], engine._run

    def noting(work):
        steps.append([len(part.queries) for part in work])
        run_step(work)

    monkeypatch.setattr(engine, "_run", noting)
    return steps


@pytest.mark.parametrize("tokens, pieces", [
    (1, [1]), (2, [2]), (64, [64]), (65, [64, 1]), (180, [180]), (300, [256, 44]), (512, [512]),
    (590, [512, 64, 14]), (600, [512, 88])])
def test_a_prompt_is_cut_so_that_compiled_steps_are_filled(model, tokens, pieces, monkeypatch):
    engine = Engine(model, kv_tokens=1024, chunk=512, context_length=512)
    steps = steps_of(engine, monkeypatch)
    monkeypatch.setattr(engine, "check", lambda history: None)
    monkeypatch.setattr(engine, "max_new_tokens", lambda history: 1)
    monkeypatch.setattr(engine, "_call_step", lambda *args: jnp.zeros((16, 97)))
    Request(text(tokens), new=1).submit(engine)
    run(engine)
    assert steps == [[piece] for piece in pieces]


def test_prompts_and_newest_tokens_share_a_step(engine, cold, monkeypatch):
    first, second = Request(text(20), new=6), Request(text(40, seed=1), new=3)
    steps = steps_of(engine, monkeypatch)
    one = first.submit(engine)
    run(engine, 2)
    other = second.submit(engine)
    run(engine)
    assert steps == [[16], [4], [1, 15], [1, 15], [1, 10], [1, 1], [1, 1]]
    for asked, request in ((one, first), (other, second)):
        assert_same(asked.tokens, cold(request))


def test_a_batch_of_unequal_lengths_is_as_each_alone(engine, cold):
    requests = [Request(text(n, seed=n), new=new) for n, new in ((3, 9), (33, 2), (17, 5), (1, 7))]
    asked = [request.submit(engine) for request in requests]
    run(engine)
    assert engine.counters.preempted == 0
    for one, request in zip(asked, requests, strict=True):
        assert one.end == End("length")
        assert_same(one.tokens, cold(request))


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_prompts_at_the_borders_of_pages_and_steps(engine, cold, length):
    request = Request(text(length, seed=3), new=3)
    for cached in (0, length - 1):
        usage, answer = ask(engine, request)
        assert usage == usage_of(length, cached=cached)
        assert_same(answer, cold(request))
    longer = Request(request.tokens + text(4, seed=8), new=3)
    assert ask(engine, longer)[0].cached_tokens == length
    assert_same(ask(engine, longer)[1], cold(longer))


def test_more_requests_than_can_run_wait_for_their_turn(engine, cold):
    requests = [Request(text(10, seed=seed), new=5) for seed in range(11)]
    asked = [request.submit(engine) for request in requests]
    most = 0
    while engine.step():
        assert_nothing_leaks(engine)
        most = max(most, len(engine.scheduler.running))
    assert most == 4
    for one, request in zip(asked, requests, strict=True):
        assert_same(one.tokens, cold(request))


def test_equal_prompts_at_once_are_computed_once(engine, cold):
    request = Request(text(100), new=3)
    asked = [request.submit(engine) for _ in range(4)]
    run(engine)
    assert engine.counters.computed == 100 + 3 + 4 * 2
    assert engine.counters.preempted == 0
    assert [one.usage.computed_tokens for one in asked] == [100, 1, 1, 1]
    for one in asked:
        assert_same(one.tokens, cold(request))


def test_whoever_shares_most_with_what_is_resident_comes_first_but_nobody_waits_for_ever(model):
    engine = Engine(model, kv_tokens=1024, chunk=CHUNK, max_num_seqs=4)
    known = Request(text(60), new=1)
    ask(engine, known)
    busy = [Request(text(9, seed=40 + i), new=60).submit(engine) for i in range(3)]
    run(engine, 2)
    stranger = Request(text(9, seed=50), new=20).submit(engine)
    friends = [Request((*known.tokens, i), new=2).submit(engine) for i in range(12)]
    run(engine, 2)
    assert friends[0].tokens and not stranger.tokens
    while not stranger.tokens:
        run(engine, 1)
    assert sum(friend.end is not None for friend in friends) == 8  # that is the bound
    for one in busy:
        one.generation.cancel()
    run(engine)
    assert all(friend.end for friend in friends)


def test_a_request_makes_way_and_loses_nothing(engine, cold):
    requests = [Request(text(30, seed=seed), new=40) for seed in range(3)]
    asked = [request.submit(engine) for request in requests]
    run(engine)
    assert engine.counters.preempted > 0
    for one, request in zip(asked, requests, strict=True):
        assert one.end == End("length") and one.usage == usage_of(30)
        assert_same(one.tokens, cold(request))


def test_scattered_kv_is_laid_out_anew_where_it_would_not_fit(model, cold):
    engine = Engine(model, kv_tokens=POOL, chunk=CHUNK, page_size=16, max_num_seqs=4)
    tokens = text(120)
    for stop in range(10, 120, 10):  # every stretch of ten in a page of its own
        Request(tokens[:stop], new=0).submit(engine)
        run(engine)
    request = Request(tokens, new=8)
    asked = request.submit(engine)
    run(engine)
    assert len(asked.tokens) == 8
    assert_same(asked.tokens, cold(request))


def test_a_fault_ends_what_runs_and_the_engine_goes_on(engine, cold, monkeypatch, caplog):
    request = Request(text(60))
    asked = [request.submit(engine), Request(text(9, seed=1)).submit(engine)]
    run(engine, 2)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_step", lambda *args: 1 / 0)
        engine.step()
    assert [type(one.end.error) for one in asked] == [ZeroDivisionError] * 2
    assert "a step failed" in caplog.text
    assert_nothing_leaks(engine)
    assert engine.scheduler.pages.free == engine.scheduler.pages.count
    usage, answer = ask(engine, request)
    assert usage == usage_of(60)
    assert_same(answer, cold(request))


def test_a_receiver_that_fails_ends_alone(engine, cold, caplog):
    request, calls = Request(text(30)), []

    def failing(what):
        calls.append(what)
        raise ZeroDivisionError

    engine.submit(Job(np.array(request.tokens, np.int32), request.history, "a", 4, GREEDY), failing)
    other = Request(text(20, seed=1)).submit(engine)
    run(engine)
    assert len(calls) == 1 and "a receiver failed" in caplog.text
    assert_same(other.tokens, cold(Request(text(20, seed=1))))


def test_a_prompt_that_is_cancelled_keeps_what_it_computed(engine, cold):
    request = Request(text(60))
    asked = request.submit(engine)
    run(engine, 2)
    asked.generation.cancel()
    run(engine)
    assert asked.tokens == [] and asked.usage == usage_of(60)
    assert engine.scheduler.pages.held == 0
    usage, answer = ask(engine, request)
    assert usage == usage_of(60, cached=2 * CHUNK)
    assert_same(answer, cold(request))


def test_an_answer_that_is_cancelled_gives_its_pages_back_with_the_next_step(engine, cold):
    request = Request(text(50), new=10)
    asked = request.submit(engine)
    asked.generation.cancel()
    run(engine)
    assert asked.tokens == [] and engine.scheduler.pages.free == engine.scheduler.pages.count
    asked = request.submit(engine)
    while len(asked.tokens) < 3:
        run(engine, 1)
    asked.generation.cancel()
    asked.generation.cancel()
    run(engine, 1)
    assert engine.scheduler.pages.held == 0
    assert len(asked.tokens) == 3 and not engine.scheduler.running
    assert_same(asked.tokens, cold(request))
    usage, answer = ask(engine, request.then(asked.tokens, 0, new=7))
    assert usage == usage_of(53, cached=52)  # the third token has no KV yet
    assert_same(answer, cold(request)[3:])


def test_a_shorter_request_does_not_forget_the_longer_one(engine):
    longer, shorter = Request(text(60)), Request(text(60)[:30], new=0)
    ask(engine, longer)
    assert ask(engine, shorter)[0] == usage_of(30, cached=29)
    assert ask(engine, longer)[0] == usage_of(60, cached=59)


def test_the_same_seed_gives_the_same_answer_alone_and_in_a_batch(engine):
    def answers(*seeds, salt="a", **fields):
        asked = [Request(text(20), new=12).submit(engine, salt, Sampling(seed=seed, **fields))
                 for seed in seeds]
        run(engine)
        return [one.ids for one in asked]

    (first,) = answers(5)
    assert answers(5) == answers(5, salt="b") == [first]
    assert answers(7, 5, 6)[1] == first
    assert answers(6) != [first]
    assert answers(None) != answers(None)
    assert len(set(answers(5, temperature=1e4)[0])) > 6  # each token has a draw of its own
    assert answers(5, top_k=1) == [[token.id for token in ask(
        engine, Request(text(20), new=12))[1]]]


def test_the_same_seed_gives_the_same_answer_when_the_request_made_way(engine):
    sampling = [Sampling(seed=seed, repetition_penalty=1.2, presence_penalty=0.3)
                for seed in range(3)]
    requests = [Request(text(30, seed=seed), new=40) for seed in range(3)]
    alone = []
    for request, how in zip(requests, sampling, strict=True):
        asked = request.submit(engine, "alone", how)
        run(engine)
        alone.append(asked.ids)
    assert engine.counters.preempted == 0
    engine.clear()
    asked = [request.submit(engine, "a", how)
             for request, how in zip(requests, sampling, strict=True)]
    run(engine)
    assert engine.counters.preempted > 0
    assert [one.ids for one in asked] == alone


def test_a_stop_id_ends_the_answer_but_not_before_the_least_number_of_tokens(engine):
    request = Request(text(20), new=10)
    free = [token.id for token in ask(engine, request)[1]]
    stop = free[3]

    def answer(**fields):
        asked = request.submit(engine, "a", dataclasses.replace(GREEDY, **fields))
        run(engine)
        return asked

    first = free.index(stop)
    ended = answer(stop_ids=frozenset({stop}))
    assert ended.ids == free[:first + 1] and ended.end == End("stop")
    later = answer(stop_ids=frozenset({stop}), min_tokens=first + 2)
    assert later.ids[:first] == free[:first] and later.ids[first] != stop
    assert len(later.ids) >= first + 2


def test_penalties_and_bias_reach_their_own_request_only(engine, cold):
    request = Request(text(20), new=8)
    plain, biased, unlike = (request.submit(engine, "a", dataclasses.replace(GREEDY, **fields))
                             for fields in ({}, dict(logit_bias=((11, 100.0),)),
                                            dict(frequency_penalty=2.0, presence_penalty=2.0)))
    run(engine)
    assert_same(plain.tokens, cold(request))
    assert biased.ids == [11] * 8
    assert unlike.ids[0] == plain.ids[0]
    again = request.submit(engine)
    run(engine)
    assert again.ids == plain.ids


def test_log_probabilities_come_only_when_asked_for(engine):
    def token(**fields):
        asked = Request(text(9)).submit(engine, "a", Sampling(temperature=0.0, **fields))
        run(engine)
        return asked.tokens[0]

    assert token().logprob is None and token().top == ()
    assert token(logprobs=0).top == () and token(logprobs=0).logprob < 0
    one = token(logprobs=20)
    assert one.top[0] == (one.id, one.logprob) and len(one.top) == 20
    assert sorted((p for _, p in one.top), reverse=True) == [p for _, p in one.top]


def test_its_own_thread_answers_until_it_is_closed(engine, cold):
    requests = [Request(text(30, seed=seed)) for seed in range(6)]
    engine.start()
    engine.start()
    done = threading.Semaphore(0)

    class Waited(Asked):
        def _deliver(self, what):
            super()._deliver(what)
            if isinstance(what, End):
                done.release()

    def ask(request):
        return Waited(engine, Job(np.array(request.tokens, np.int32), request.history, "a",
                                  request.new, GREEDY))

    asked = [ask(request) for request in requests]
    for _ in requests:
        assert done.acquire(timeout=30)
    for one, request in zip(asked, requests, strict=True):
        assert_same(one.tokens, cold(request))
    endless = ask(Request(text(20), new=100))
    engine.close()
    engine.close()
    assert done.acquire(timeout=30)
    assert endless.end.reason in ("error", "length") and not engine.scheduler.running
    engine.start()
    again = ask(requests[0])
    assert done.acquire(timeout=30)
    engine.close()
    assert_same(again.tokens, cold(requests[0]))


STREAMS = [text(150), text(20) + text(130, seed=1), text(47) + text(103, seed=2)]


@st.composite
def schedules(draw):
    """Events over 150 tokens as (at, range to drop or None for a repos)."""
    events = []
    for at in sorted(draw(st.lists(st.integers(1, 140), max_size=4))):
        if draw(st.booleans()):
            start = draw(st.integers(0, at - 1))
            events.append((at, (start, draw(st.just(at) | st.integers(start + 1, at)))))
        else:
            events.append((at, None))
    return events


@st.composite
def conversations(draw):
    """Requests that share prefixes of tokens and events: stream, length, schedule, salt, tokens
    to generate; after how many steps it comes, and after how many more it is cancelled."""
    plans = [[], *draw(st.lists(schedules(), min_size=1, max_size=3))]
    return [(draw(st.integers(0, 2)), draw(st.integers(1, 150)), draw(st.sampled_from(plans)),
             draw(st.sampled_from("aab")), draw(st.integers(0, 5)),
             draw(st.sampled_from([0, 0, 1, 2, 5, 20])),
             draw(st.sampled_from([99, 99, 99, 0, 1, 3, 6])))
            for _ in range(draw(st.integers(2, 7)))]


@settings(max_examples=70, deadline=None, derandomize=True)
@given(conversations(), st.randoms(use_true_random=False))
def test_every_answer_is_the_cold_answer(small, cold, requests, random):
    """Several at once, some cancelled, with any KV that is not held evicted at any time."""
    engine = emptied(small)
    asked = []
    for stream, length, schedule, salt, new, wait, patience in requests:
        run(engine, wait)
        if random.random() < 0.5:
            with engine._lock:
                engine.scheduler.tree.evict(random.randint(0, engine.scheduler.pages.count))
        for one, left, _ in asked:
            if left <= wait:
                one.generation.cancel()
        request = Request(STREAMS[stream][:length], tuple(
            Drop(at, (gone,)) if gone else Repos(at) for at, gone in schedule if at <= length), new)
        try:
            asked.append((request.submit(engine, salt), patience, request))
        except CapacityExceeded:
            readable = request.history.needed(np.ones(length, bool), [length - 1])
            assert len(readable) > engine.kv_tokens
    run(engine)
    assert engine.scheduler.pages.held == 0
    for one, patience, request in asked:
        if patience == 99 and not (one.end.reason == "error" and request.events):
            assert one.end.reason == "length"
            assert len(one.tokens) == request.new or len(request.tokens) + request.new > POOL - 8
        assert_same(one.tokens, cold(request))


BOUNDS = {"bfloat16": 0.05, "int8": 0.05, "float8_e4m3fn": 0.4}


@pytest.mark.parametrize("dtype", BOUNDS)
def test_kv_of_every_type_gives_what_it_gives_cold(model, dtype):
    """Warm, batched, chunked and recovered; a token may differ only where two are as likely."""
    engine = Engine(model, kv_tokens=POOL, chunk=CHUNK, page_size=4, max_num_seqs=4, kv_dtype=dtype)
    tokens = text(60)
    requests = [Request(tokens, new=6), Request(tokens[:47], new=6),
                Request(tokens, (Drop(40, ((10, 30),)), Repos(40)), new=6),
                Request(tokens[:50], (Drop(25, ((3, 20),)), Repos(44)), new=6)]
    cold = []
    for request in requests:
        emptied(engine)
        cold.append(ask(engine, request)[1])
    emptied(engine)
    found = 0
    for times in range(3):
        asked = [request.submit(engine) for request in requests]
        run(engine)
        with engine._lock:
            engine.scheduler.tree.evict(5 + times)
        for one, expected in zip(asked, cold, strict=True):
            assert one.end == End("length")
            assert_alike(one.tokens, expected, BOUNDS[dtype])
            found += one.usage.cached_tokens
    assert found > 0 and engine.counters.evicted > 0 and engine.counters.recovered > 0


def assert_alike(answer, expected, bound):
    for got, want in zip(answer, expected, strict=True):
        likelihood = dict(want.top)
        if got.id != want.id:
            assert want.logprob - likelihood[got.id] < bound
            return
        assert abs(got.logprob - want.logprob) < bound


def test_quantised_kv_takes_less_room(model):
    def bytes_of(dtype):
        return Engine(model, kv_tokens=16, kv_dtype=dtype).kv_bytes_per_token

    elements = 2 * CONFIG.layers * CONFIG.kv_heads * CONFIG.head_dim
    assert bytes_of(None) == 4 * elements and bytes_of("bfloat16") == 2 * elements
    assert bytes_of("int8") == bytes_of("float8_e4m3fn") == elements + 4 * elements // 8


def test_more_rows_than_a_step_has_are_shared_out_over_steps(model, cold, monkeypatch):
    """Queries are put off, chunks are cut, and a query with too many rows runs alone."""
    monkeypatch.setattr("kvfunc.serve.engine.ROWS", 8)
    engine = Engine(model, kv_tokens=POOL * 4, chunk=CHUNK, page_size=4, max_num_seqs=4)
    engine.warm_up()
    compiled = engine.compilations
    holes = tuple((i, i + 1) for i in range(2, 60, 4))
    requests = [Request(text(70, seed=1), (Drop(64, holes[:gaps]), Repos(66)), new=6)
                for gaps in (15, 9, 1, 0)]
    steps = steps_of(engine, monkeypatch)
    asked = [request.submit(engine) for request in requests]
    run(engine)
    for one, request in zip(asked, requests, strict=True):
        assert one.end == End("length")
        assert_same(one.tokens, cold(request))
    assert engine.compilations == compiled == len(engine.shapes)
    assert [1] in steps and any(len(step) > 1 for step in steps)


def test_resident_kv_is_never_written_again(engine):
    """Not even by the last token of a full hit, whose query runs once more."""
    request = Request(text(40), new=1)
    ask(engine, request)
    slots = engine.scheduler.tree.find("a", np.array(request.tokens, np.int32), request.history)
    before = jax.tree.map(lambda x: np.array(x[slots]), engine._kv)
    assert ask(engine, request)[0].computed_tokens == 1
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y[slots]), before, engine._kv)


@pytest.mark.parametrize("attention", ["xla", "cpu", "pallas"])
def test_an_answer_is_the_same_on_every_implementation_of_attention(model, cold, monkeypatch,
                                                                    attention):
    tokens, ran = text(24), set()
    requests = [Request(tokens), Request(tokens, (Drop(18, ((5, 12),)), Repos(20)))]
    expected = [cold(request) for request in requests]
    assert expected[0] != expected[1]

    def noting(*args, implementation, **options):
        ran.add(implementation)
        return kvfunc.segment_attention(*args, implementation=implementation, **options)

    monkeypatch.setattr("kvfunc.models.llama.segment_attention", noting)
    engine = emptied(Engine(model, kv_tokens=64, context_length=64, chunk=8, max_num_seqs=2,
                            attention=attention))
    for cached in 0, len(tokens) - 1:
        asked = [request.submit(engine) for request in requests]
        run(engine)
        for one, answer in zip(asked, expected, strict=True):
            assert one.end == End("length")
            assert_same(one.tokens, answer)
        assert asked[0].usage.cached_tokens == cached
    assert ran == {engine.attention} == {attention}


def test_attention_is_chosen_by_the_type_that_is_stored(model):
    assert Engine(model, kv_tokens=16, kv_dtype="float16").attention == "xla"
    with pytest.raises(NotImplementedError, match="KV of dtype float16 is not built"):
        Engine(model, kv_tokens=16, kv_dtype="float16", attention="cpu")


def test_attention_that_cannot_run_here_is_named(model):
    with pytest.raises(NotImplementedError, match='implementation="triton" cannot be used'):
        Engine(model, attention="triton")
    with pytest.raises(ValueError, match="one of auto, xla, cpu, pallas, triton, got 'cuda'"):
        Engine(model, attention="cuda")
