"""Thinking that is dropped as soon as it is complete, on the embedded model in float32.

SmolLM2 never thinks; the tags here are words that it says.
"""

import itertools
import re

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfunc.history import HOLE, Drop, History, Repos
from kvfunc.models.load import load
from kvfunc.serve.engine import Engine
from kvfunc.serve.interface import End, Job, Sampling
from kvfunc.serve.thinking import Scanner, Span, Thinking

GREEDY = Sampling(temperature=0.0, logprobs=5)
TOLERANCE = 1e-4  # of a log-probability
QUESTION = [{"role": "user", "content": "What is the capital of France? And of Italy?"}]


# The scanner

texts = st.lists(st.sampled_from(["<t>", "</t>", "<", "t>", "/", "é", "😀", "x"]), max_size=14).map(
    "".join)


@settings(deadline=None)
@given(texts, st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any))
def test_spans_are_those_of_a_regular_expression_however_the_text_is_cut(text, sizes):
    """Also in the middle of a character, and with tokens that have no text."""
    text = text.encode()
    pieces, at = [], 0
    for size in itertools.cycle(sizes):
        if at >= len(text):
            break
        pieces.append(text[at:at + size])
        at += size
    ends = np.cumsum([0, *map(len, pieces)])
    tokens = range(len(pieces))
    expected = []
    for match in re.finditer(rb"<t>.*?</t>", text, re.DOTALL):
        inside = [7 + token for token in tokens if pieces[token] and (
            match.start() <= ends[token] and ends[token + 1] <= match.end())]
        last = min(token for token in tokens if ends[token + 1] >= match.end())
        expected.append((inside, 7 + last + 1))

    scanner = Scanner(("<t>", "</t>"), pieces.__getitem__, start=7)
    one_by_one = [span for token in tokens for span in scanner.push([token])]
    assert one_by_one == Scanner(("<t>", "</t>"), pieces.__getitem__, start=7).push(tokens)
    assert [([token for token in range(span.start, span.stop) if pieces[token - 7]], span.at)
            for span in one_by_one] == expected
    assert all(span.start <= span.stop <= span.at for span in one_by_one)


def spans(*pieces):
    return Scanner(("<t>", "</t>"), [piece.encode() for piece in pieces].__getitem__).push(
        range(len(pieces)))


def test_a_token_that_reaches_beyond_a_tag_stays():
    assert spans("a<t>", "b", "</t>c", "d") == [Span(1, 2, 3)]
    assert spans("<t>", "b", "</t>") == [Span(0, 3, 3)]
    assert spans("a<t></t>b") == [Span(1, 1, 1)]


def test_a_span_that_is_not_closed_or_not_opened_is_none():
    assert spans("<t>", "b", "</t") == spans("b", "</t>") == []
    assert spans("</t>", "<t>", "<t>", "</t>", "</t>") == [Span(1, 4, 4)]


# While it is generated


@pytest.fixture(scope="module")
def model():
    return load(None, jnp.float32)


@pytest.fixture(scope="module")
def compiled(model):
    engine = Engine(model, kv_tokens=512, context_length=512, chunk=64, max_num_seqs=4)
    engine.warm_up()
    return engine


@pytest.fixture(scope="module", params=[1, 16], ids="page of {}".format)
def engine(model, compiled, request):
    made = Engine(model, kv_tokens=512, context_length=512, chunk=64, max_num_seqs=4,
                  page_size=request.param)
    made._step = compiled._step
    return made


class Asked:
    def __init__(self, engine, tokens, events=(), new=24, tags=None, salt="a", sampling=GREEDY):
        self.tokens, self.end = [], None
        prompt = engine.chat.render(QUESTION)
        start = int(np.flatnonzero(prompt.owner == 1)[0])
        thinking = tags and Thinking(tags, engine.tokenizer.piece, start)
        history = History(len(tokens), events)
        self.generation = engine.submit(Job(np.array(tokens, np.int32), history, salt, new,
                                            sampling, thinking), self._deliver)

    def _deliver(self, what):
        if isinstance(what, End):
            self.end = what
        else:
            self.tokens.append(what)

    @property
    def ids(self):
        return [token.id for token in self.tokens]


@pytest.fixture
def ask(model, engine):
    """Submit requests; `run` runs them to their end."""
    engine.chat = model.chat
    engine.clear()

    def ask(tokens, *events, **fields):
        return Asked(engine, tokens, events, **fields)

    ask.prompt = model.chat.render(QUESTION).tokens.tolist()
    return ask


def run(engine):
    while engine.step():
        pass


def text(engine, ids):
    return engine.tokenizer.decode(ids, skip_special=False)


def assert_same(got, expected):
    assert [token.id for token in got] == [token.id for token in expected]
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose([p for _, p in one.top], [p for _, p in other.top], rtol=0,
                                   atol=TOLERANCE)


@pytest.mark.parametrize("tags, dropped, closing", [
    ((" capital", " Paris"), " capital of France is Paris", " Paris"),
    (("capital", " Par"), " of France is", " Paris"),  # both border tokens reach beyond the tags
    (("assistant\n", " is"), "assistant\nThe capital of France is", " is"),  # from the header on
])
def test_from_the_closing_tag_on_the_answer_is_that_of_the_edited_history(
        engine, ask, tags, dropped, closing):
    plain, edited = ask(ask.prompt), ask(ask.prompt, tags=tags, salt="b")
    run(engine)
    stream = ask.prompt + edited.ids
    pieces = [text(engine, [token]) for token in stream]
    at = pieces.index(closing, len(ask.prompt)) + 1
    start, stop = next((i, j) for i in range(at) for j in range(i, at + 1)
                       if text(engine, stream[i:j]) == dropped and j >= at - 1)
    seen = at - len(ask.prompt)
    assert_same(edited.tokens[:seen], plain.tokens[:seen])
    fresh = ask(stream[:at], Drop(at, ((start, stop),)), new=24 - seen, salt="c")
    run(engine)
    assert_same(edited.tokens[seen:], fresh.tokens)
    assert edited.ids != plain.ids
    assert edited.generation.usage == plain.generation.usage  # the prompt's


def test_every_later_span_is_dropped_too_and_an_open_one_is_not(engine, ask):
    tags = (" the", " of")
    edited = ask(ask.prompt, tags=tags, new=30)
    run(engine)
    stream = ask.prompt + edited.ids
    scanner = Scanner(tags, engine.tokenizer.piece, len(ask.prompt))
    found = scanner.push(edited.ids)
    assert len(found) == 2
    last = found[-1].at
    fresh = ask(stream[:last], *(Drop(span.at, ((span.start, span.stop),)) for span in found),
                new=30 + len(ask.prompt) - last, salt="c")
    run(engine)
    assert_same(edited.tokens[last - len(ask.prompt):], fresh.tokens)
    unclosed = ask(ask.prompt, tags=(" the", "never said"), salt="d")
    plain = ask(ask.prompt, salt="e")
    run(engine)
    assert_same(unclosed.tokens, plain.tokens)


def test_events_of_the_prompt_stay_beside_those_of_the_answer(engine, ask):
    prompt = ask.prompt
    events = (Drop(20, ((3, 9),)), Repos(20))
    edited = ask(prompt, *events, tags=("assistant\n", " is"), new=20)
    run(engine)
    stream = prompt + edited.ids
    scanner = Scanner(("assistant\n", " is"), engine.tokenizer.piece, len(prompt) - 4)
    spans = scanner.push(stream[len(prompt) - 4:])
    assert spans and spans[0].start < len(prompt) < spans[0].at
    drops = [Drop(span.at, ((span.start, span.stop),)) for span in spans]
    seen = spans[-1].at - len(prompt)
    fresh = ask(stream[:spans[-1].at], *events, *drops, new=20 - seen, salt="c")
    run(engine)
    assert_same(edited.tokens[seen:], fresh.tokens)


def test_what_was_dropped_is_not_held_any_longer_but_can_be_found(engine, ask):
    edited = ask(ask.prompt, tags=(" capital", " Paris"), new=20)
    while len(edited.tokens) < 12:
        engine.step()
    (sequence,) = engine.scheduler.running
    (event,) = sequence.history.events
    ((start, stop),) = event.ranges
    assert stop - start == 5 and (sequence.slots[start:stop] == HOLE).all()
    assert (sequence.slots[:start] != HOLE).all()
    assert (sequence.slots[stop:sequence.computed] != HOLE).all()
    run(engine)
    stream = np.array(ask.prompt + edited.ids, np.int32)
    resident = engine.scheduler.tree.find("a", stream, History(len(stream), (event,)))
    assert (resident[:-1] != HOLE).all()


def test_an_answer_that_made_way_drops_as_if_it_had_not(engine, ask):
    tags = (" capital", " Paris")
    alone = ask(ask.prompt, tags=tags, new=40, salt="alone")
    run(engine)
    engine.clear()
    preempted = engine.counters.preempted
    with engine._lock:
        pages = engine.scheduler.pages
        taken = pages.take(pages.free - 128 // pages.size)
    try:
        asked = [ask(ask.prompt, tags=tags, new=40, salt=str(i)) for i in range(4)]
        run(engine)
    finally:
        engine.clear()
        with engine._lock:
            pages.release(taken)
    assert engine.counters.preempted > preempted
    for one in asked:
        assert_same(one.tokens, alone.tokens)


@pytest.mark.parametrize("evicting", [False, True])
def test_an_answer_goes_on_behind_its_thinking_wherever_it_is_interrupted(engine, ask, evicting):
    tags = (" capital", " Paris")
    alone = ask(ask.prompt, tags=tags, new=14)
    run(engine)
    for interrupted in range(4, 11):
        engine.clear()
        asked = ask(ask.prompt, tags=tags, new=14)
        while len(asked.tokens) < interrupted:
            engine.step()
        with engine._lock:
            engine.scheduler._preempt(engine.scheduler.running[0])
            if evicting:
                engine.scheduler.tree.clear()
        run(engine)
        assert_same(asked.tokens, alone.tokens)


@pytest.mark.parametrize("ends", ["length", "stop"])
def test_an_answer_may_end_with_the_token_that_completes_its_thinking(engine, ask, ends):
    plain = ask(ask.prompt, new=6)
    run(engine)
    assert text(engine, plain.ids).endswith(" Paris")
    sampling = GREEDY if ends == "length" else Sampling(
        temperature=0.0, logprobs=5, stop_ids=frozenset({plain.ids[-1]}))
    asked = ask(ask.prompt, tags=(" capital", " Paris"), sampling=sampling, salt="b",
                new=6 if ends == "length" else 20)
    run(engine)
    assert asked.end == End(ends)
    assert_same(asked.tokens, plain.tokens)
    assert not engine.scheduler.running and not engine.scheduler.pages.held
