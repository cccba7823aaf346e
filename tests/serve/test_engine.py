"""The engine on a tiny random model: whatever is resident, an answer is the one of the library.

Temperature 0 in float32. The pool holds NaN before each test, so that a slot which is read before
it is written shows; after a request each slot's users are counted among the conversations.
"""

import contextlib
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
from kvfunc.history import Drop, History, Repos, Run
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
    Sampling,
    Token,
    Usage,
)
from kvfunc.serve.store import Store

from .fake import TEMPLATE, byte_tokenizer

CONFIG = ModelConfig(vocab_size=97, width=32, layers=2, heads=4, kv_heads=2, head_dim=8,
                     mlp_width=48, norm_eps=1e-5, tied=False, rope=Rope.default(8, 1000.0),
                     context_length=512)
POOL, CHUNK = 128, 16
GREEDY = Sampling(temperature=0.0, logprobs=5)
TOLERANCE = 1e-4  # of a log-probability


@dataclasses.dataclass(frozen=True)
class Request:
    tokens: tuple[int, ...]
    events: tuple[Drop | Repos, ...] = ()
    new: int = 4

    @property
    def history(self):
        return History(len(self.tokens), self.events)

    def begin(self, engine, salt="a", sampling=GREEDY):
        return engine.generate(np.array(self.tokens, np.int32), self.history, salt=salt,
                               max_tokens=self.new, sampling=sampling)

    def plan(self, engine, salt="a"):
        return engine.plan(np.array(self.tokens, np.int32), self.history, salt)

    def then(self, answer, more, *events, new=4):
        """The next turn: the answer, `more` tokens, and further events."""
        ids = tuple(token.id for token in answer)
        return Request(self.tokens + ids + text(more, seed=len(self.tokens)),
                       (*self.events, *events), new)


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
        sharp = {"q": 2.0, "head": 2.0, "embed": shape[-1] ** 0.5}.get(place[1], 1.0)
        return rng.normal(size=shape) * sharp / shape[-1] ** 0.5

    tokenizer = byte_tokenizer()
    return LoadedModel("tiny", CONFIG, fill(CONFIG, str, read, jnp.float32), tokenizer,
                       ChatTemplate(TEMPLATE, tokenizer))


@pytest.fixture(scope="module")
def small(model):
    engine = Engine(model, kv_tokens=POOL, chunk=CHUNK)
    engine.warm_up()
    return engine


@pytest.fixture
def engine(small):
    """An engine with a pool of 128 slots and chunks of 16, with nothing resident."""
    return emptied(small)


@pytest.fixture(scope="module")
def cold(model):
    """Answers by the library's verbs, one event after the other; nothing is ever found again."""
    network = Llama(CONFIG, jnp.float32)
    size, capacity = 32, 192

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
        cache = kvfunc.init(CONFIG.layers, capacity, CONFIG.kv_heads, CONFIG.head_dim, jnp.float32)
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
    engine._store = Store(engine.kv_tokens)
    engine._kv = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), engine._kv)
    return engine


def ask(engine, request, salt="a"):
    """Usage and answer, which must be as planned and must leak no slot."""
    planned = request.plan(engine, salt).usage
    with contextlib.closing(request.begin(engine, salt)) as generation:
        assert generation.usage == planned
        tokens = list(generation)
    assert_no_slot_leaks(engine)
    return planned, tokens


def assert_no_slot_leaks(engine):
    store, users = engine._store, np.zeros(engine.kv_tokens, np.int32)
    for conversation in store._conversations:
        users[conversation.slots[conversation.slots >= 0]] += 1
    np.testing.assert_array_equal(store._users, users)


def assert_same(answer, expected):
    """Equal tokens and log-probabilities; an answer may be cut short for lack of slots."""
    for got, want in zip(answer, expected, strict=False):
        (_, first), (_, second), *_ = want.top
        assert first - second > TOLERANCE, "no clear winner: choose another prompt"
        assert got.id == want.id
        np.testing.assert_allclose([p for _, p in got.top], [p for _, p in want.top], rtol=0,
                                   atol=TOLERANCE)


def usage_of(prompt, cached=0, repos=0, skipped=0):
    return Usage(prompt, cached, repos, skipped, 0)


def test_nothing_is_compiled_after_warm_up(engine):
    """First in this file, so that no other test compiles what `warm_up` forgot."""
    assert engine.compilations == 2
    rng, compiled = np.random.default_rng(3), []

    def listen(event, duration, **_):
        if "compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for index in range(200):
            tokens = text(int(rng.integers(1, 100)), seed=int(rng.integers(3)))
            at = int(rng.integers(1, len(tokens) + 1))
            events = (Drop(at, ((0, int(rng.integers(1, at + 1))),)), Repos(at))
            request = Request(tokens, events[: index % 3], new=index % 5)
            sampling = Sampling(temperature=float(index % 2), top_p=1 - 0.1 * (index % 4),
                                top_k=index % 7, min_p=0.01 * (index % 2), seed=index,
                                logprobs=None if index % 3 else index % 20)
            with contextlib.closing(request.begin(engine, "ab"[index % 2], sampling)) as generation:
                list(itertools.islice(generation, index % 4))
        assert_no_slot_leaks(engine)
    finally:
        jax.monitoring.clear_event_listeners()
    assert engine.compilations == 2
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


def test_the_last_conversations_stay_and_the_oldest_make_room(engine):
    requests = [Request(text(40, seed=seed), new=1) for seed in range(4)]
    for request in requests:
        ask(engine, request)
    assert [r.plan(engine).usage.cached_tokens for r in requests] == [0, 39, 39, 39]


def test_room_for_a_prompt_is_made_of_its_own_dropped_tokens(engine, cold):
    first = Request(text(100), new=1)
    ask(engine, first)
    dropped = Drop(100, ((20, 100),))
    second = Request(text(160), (dropped,))
    usage, answer = ask(engine, second)
    assert usage == usage_of(160, cached=20, skipped=80)
    assert_same(answer, cold(second))
    assert engine._store.free == POOL - 20 - 63  # the 80 dropped ones have lost their KV
    with pytest.raises(CapacityExceeded):
        ask(engine, Request(text(160), (Drop(101, ((20, 100),)),)))  # token 100 reads them


def test_an_answer_ends_where_no_slot_is_left(engine, cold):
    request = Request(text(120), new=20)
    for _ in range(2):
        _, answer = ask(engine, request)
        assert len(answer) == 9  # 8 slots are left, and the last token needs none
        assert_same(answer, cold(request))
    full = Request(text(POOL), new=20)
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
    engine = Engine(model, context_length=32, kv_tokens=24, chunk=8)

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
        engine.generate(np.zeros(25, np.int32), History(25), salt="", max_tokens=1, sampling=GREEDY)
    assert engine.plan(np.zeros(25, np.int32), History(25), "").usage == usage_of(25)
    with pytest.raises(ValueError, match="the prompt has no tokens: give at least one"):
        check(0)


@pytest.mark.parametrize("sizes, message", [
    (dict(context_length=513), "max_model_len must be between 1 and 512, the model's own context, "
                               "got 513"),
    (dict(context_length=0), "got 0"),
    (dict(kv_tokens=0), "kv_tokens and chunk must be at least 1, got 0 and 512"),
    (dict(chunk=0), "must be at least 1, got 32768 and 0")])
def test_sizes_that_cannot_be_are_named(model, sizes, message):
    with pytest.raises(ValueError, match=message):
        Engine(model, **sizes)


@pytest.mark.parametrize("tokens, pieces", [
    (1, [1]), (2, [2]), (64, [64]), (65, [64, 1]), (180, [180]), (300, [256, 44]), (512, [512]),
    (600, [512, 64, 24])])
def test_a_prompt_is_cut_so_that_compiled_steps_are_filled(model, tokens, pieces):
    engine = Engine(model, kv_tokens=8, chunk=512)
    cut = list(engine._chunks(np.arange(tokens)))
    np.testing.assert_array_equal(np.concatenate(cut), np.arange(tokens))
    assert [len(piece) for piece in cut] == pieces


class Broken(Exception):
    pass


@contextlib.contextmanager
def breaking_after(engine, steps):
    """Let the step after so many others fail, as an interrupt would."""
    run, left = engine._run, itertools.count(steps, -1)

    def failing(*args):
        if next(left) <= 0:
            raise Broken
        return run(*args)

    engine._run = failing
    try:
        yield
    finally:
        del engine._run


def test_a_prefill_that_is_cut_off_keeps_what_it_computed(engine, cold):
    request = Request(text(60))
    with contextlib.closing(request.begin(engine)) as generation, breaking_after(engine, 2):
        assert generation.usage == usage_of(60)
        with pytest.raises(Broken):
            next(iter(generation))
    assert_no_slot_leaks(engine)
    assert engine._store.free == POOL - 2 * CHUNK
    usage, answer = ask(engine, request)
    assert usage == usage_of(60, cached=2 * CHUNK)
    assert_same(answer, cold(request))


def test_closing_early_leaks_nothing(engine, cold):
    request = Request(text(50), new=10)
    generation = request.begin(engine)
    generation.close()
    generation.close()
    assert list(generation) == [] and engine._store.free == POOL
    with contextlib.closing(request.begin(engine)) as generation:
        tokens = iter(generation)
        part = [next(tokens), next(tokens), next(tokens)]
    assert_no_slot_leaks(engine)
    assert engine._store.free == POOL - 52  # the third token has no KV yet
    assert_same(part, cold(request))
    usage, answer = ask(engine, request.then(part, 0, new=7))
    assert usage == usage_of(53, cached=52)
    assert_same(answer, cold(request)[3:])


def test_a_shorter_request_does_not_forget_the_longer_one(engine):
    longer, shorter = Request(text(60)), Request(text(60)[:30], new=0)
    ask(engine, longer)
    assert ask(engine, shorter)[0] == usage_of(30, cached=29)
    assert ask(engine, longer)[0] == usage_of(60, cached=59)


def test_the_same_seed_gives_the_same_answer(engine):
    def answer(seed, salt="a", **fields):
        request = Request(text(40), new=12)
        sampling = Sampling(seed=seed, **fields)
        with contextlib.closing(request.begin(engine, salt, sampling)) as generation:
            return [token.id for token in generation]

    first = answer(5)
    assert answer(5) == answer(5, salt="b") == first
    assert answer(6) != first
    assert answer(None) != answer(None)
    assert len(set(answer(5, temperature=1e4))) > 6  # each token has a draw of its own
    assert answer(5, top_k=1) == [token.id for token in ask(engine, Request(text(40), new=12))[1]]


def test_log_probabilities_come_only_when_asked_for(engine):
    def token(**fields):
        sampling = Sampling(temperature=0.0, **fields)
        with contextlib.closing(Request(text(9)).begin(engine, "a", sampling)) as generation:
            return next(iter(generation))

    assert token().logprob is None and token().top == ()
    assert token(logprobs=0).top == () and token(logprobs=0).logprob < 0
    one = token(logprobs=20)
    assert one.top[0] == (one.id, one.logprob) and len(one.top) == 20
    assert sorted((p for _, p in one.top), reverse=True) == [p for _, p in one.top]


def test_a_second_answer_waits_until_the_first_is_closed(engine, cold):
    first, second = Request(text(30)), Request(text(30, seed=1))
    generation = first.begin(engine)
    tokens = iter(generation)
    part, begun, answers = [next(tokens)], threading.Event(), []

    def other():
        with contextlib.closing(second.begin(engine)) as mine:
            begun.set()
            answers.append(list(mine))

    thread = threading.Thread(target=other)
    thread.start()
    assert not begun.wait(0.2)
    assert second.plan(engine).usage == usage_of(30)  # a plan does not wait
    part += tokens
    assert not begun.is_set()
    generation.close()
    thread.join(10)
    assert_same(part, cold(first))
    assert_same(answers[0], cold(second))
    assert_no_slot_leaks(engine)


def test_a_request_that_fails_does_not_block_the_next(engine, monkeypatch):
    def broken(*args):
        raise Broken

    with pytest.raises(CapacityExceeded):
        ask(engine, Request(text(POOL + 1)))
    with monkeypatch.context() as patch, pytest.raises(Broken):
        patch.setattr(engine._store, "find", broken)
        Request(text(10)).begin(engine)
    assert not engine._busy.locked()
    assert len(ask(engine, Request(text(10)))[1]) == 4


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
    """Requests that share prefixes of tokens and events: stream, length, schedule, salt; after
    how many steps to break off, and how many tokens to take of how many."""
    plans = [[], *draw(st.lists(schedules(), min_size=1, max_size=3))]
    return [(draw(st.integers(0, 2)), draw(st.integers(1, 150)), draw(st.sampled_from(plans)),
             draw(st.sampled_from("aab")), draw(st.sampled_from([99, 99, 99, 0, 1, 2, 3, 4, 5])),
             draw(st.sampled_from([9, 9, 0, 1, 2])), draw(st.integers(0, 5)))
            for _ in range(draw(st.integers(2, 7)))]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(conversations())
def test_every_answer_is_the_cold_answer(small, cold, requests):
    engine = emptied(small)
    for stream, length, schedule, salt, steps, taken, new in requests:
        request = Request(STREAMS[stream][:length], tuple(
            Drop(at, (gone,)) if gone else Repos(at) for at, gone in schedule if at <= length), new)
        readable = request.history.needed(np.ones(length, bool), [length - 1])
        if len(readable) > POOL:
            with pytest.raises(CapacityExceeded):
                request.begin(engine, salt)
            continue
        planned, answer = request.plan(engine, salt).usage, []
        assert planned.computed_tokens >= 1
        with contextlib.closing(request.begin(engine, salt)) as generation:
            assert generation.usage == planned
            with contextlib.suppress(Broken), breaking_after(engine, steps):
                answer += itertools.islice(generation, taken)
        assert_no_slot_leaks(engine)
        assert_same(answer, cold(request))
