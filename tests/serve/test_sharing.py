"""Texts that prompts share, in the engine on a tiny random model: taught, estimated, kept apart."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfunc
from kvfunc import anchors
from kvfunc.history import Drop, History
from kvfunc.models.llama import Llama
from kvfunc.segments import read, splice
from kvfunc.serve.bases import Base, Bases
from kvfunc.serve.engine import Engine
from kvfunc.serve.interface import End, Job, Share
from kvfunc.serve.pages import Pages
from kvfunc.serve.radix import Tree
from kvfunc.serve.sharing import Settings, Sharing

from .test_engine import (
    CONFIG,
    GREEDY,
    Asked,
    Request,
    assert_nothing_leaks,
    assert_same,
    cold,  # noqa: F401
    emptied,
    model,  # noqa: F401
    run,
    text,
    usage_of,
)

TEXTS = 3  # that teach a reader
FIRST = 8  # tokens of a text that are computed always
ONE, OTHER = text(20, 1), text(37, 2)  # two prompts before a text
TAIL = text(5, 3)


@pytest.fixture(scope="module")
def warm(model):  # noqa: F811
    engine = Engine(model, kv_tokens=1024, chunk=64, page_size=16, max_num_seqs=4,
                    sharing=Sharing(CONFIG, {}, Settings(texts=TEXTS, projection=None)))
    engine.warm_up()
    return engine


@pytest.fixture
def engine(warm):
    """Nothing is resident and nobody has learned anything."""
    warm.sharing._readers.clear()
    return emptied(warm)


def prompt(*parts, new=4, salt="a"):
    """A job; a part is static text, or a shared one if it comes with a name."""
    tokens, shares = [], []
    for part in parts:
        content, name = part if isinstance(part[0], tuple) else (part, None)
        start, stop = len(tokens), len(tokens) + len(content)
        tokens += content
        if name is not None:
            shares.append(Share(name, start, stop, (start, stop)))
    return Job(np.array(tokens, np.int32), History(len(tokens)), salt, new, GREEDY, None,
               tuple(shares))


def exactly(job):
    return dataclasses.replace(job, shares=())


def ask(engine, job):
    """Usage and answer of a request that is alone, which must be as planned."""
    planned = engine.plan(job).usage
    asked = Asked(engine, job)
    run(engine)
    assert asked.end == End("length")
    assert dataclasses.replace(asked.usage, predicted_error=None) == planned
    return asked.usage, asked.tokens


def teach(engine, before=OTHER, texts=TEXTS, name="document", tail=TAIL):
    """Let one prompt read so many texts that another has read before."""
    for seed in range(texts):
        content = text(40, seed=100 + seed)
        ask(engine, prompt(ONE, (content, name), tail))
        ask(engine, prompt(before, (content, name), tail))


def readers(engine):
    return [reader.texts for reader in engine.sharing._readers.values()]


def approximate(usage):
    return usage.approximate_tokens, usage.cached_tokens, usage.computed_tokens


# What is taught, and what is estimated then


def test_a_new_prompt_is_computed_exactly_until_it_has_read_enough_texts(engine):
    teach(engine, texts=TEXTS - 1)
    assert readers(engine) == [TEXTS - 1]  # whoever reads a text first is nobody's pupil
    document = text(40, seed=50)
    ask(engine, prompt(ONE, (document, "document"), TAIL))
    usage, _ = ask(engine, prompt(OTHER, (document, "document"), TAIL))
    assert approximate(usage) == (0, 37, 45)
    assert readers(engine) == [TEXTS]
    document = text(40, seed=51)
    ask(engine, prompt(ONE, (document, "document"), TAIL))
    usage, _ = ask(engine, prompt(OTHER, (document, "document"), TAIL))
    assert approximate(usage) == (40 - FIRST, 37, FIRST + len(TAIL))
    assert usage.predicted_error > 0
    assert engine.counters.estimated == 40 - FIRST


def test_an_estimate_is_that_of_the_library(engine, model):  # noqa: F811
    """The same lessons and the same splice, by the library's verbs, with a shift for relocation."""
    teach(engine)
    document = text(40, seed=50)
    ask(engine, prompt(ONE, (document, "document"), TAIL))
    _, answer = ask(engine, prompt(OTHER, (document, "document"), TAIL))

    network, size = Llama(CONFIG, jnp.float32), 128

    def compute(cache, tokens):
        cache, new = kvfunc.reserve(cache, len(tokens))
        logits, kv = network.forward(model.params, jnp.array(tokens), new.births, new.slots,
                                     cache.kv, kvfunc.rows_for(cache, new))
        return dataclasses.replace(cache, kv=kv), logits

    def empty():
        return kvfunc.init(CONFIG.layers, size, CONFIG.kv_heads, CONFIG.head_dim, jnp.float32)

    def behind(before, content):
        cache, _ = compute(empty(), [*before, *content])
        return read(cache.kv, len(before) + jnp.arange(40, dtype=jnp.int32), len(before),
                    CONFIG.rope)

    pool = anchors.init(CONFIG.layers, CONFIG.kv_heads, CONFIG.head_dim, consumers=1, anchors=0,
                        tokens=40)
    for seed in range(TEXTS):
        content = text(40, seed=100 + seed)
        pool, _ = anchors.observe(pool, behind(ONE, content), behind(OTHER, content), 0)
    base = behind(ONE, document)
    offsets, _ = anchors.estimate(pool, base, 0)
    estimated = anchors.apply(base, offsets.text)
    rest = jax.tree.map(lambda x: x[:, FIRST:] if x.ndim else x - FIRST, estimated)
    cache, _ = compute(empty(), [*OTHER, *document[:FIRST]])
    cache, new = splice(cache, rest, FIRST)
    assert cache.shift[new.slots].tolist() == [-len(OTHER)] * (40 - FIRST)
    cache, logits = compute(cache, TAIL)
    for token in answer:
        top = jax.nn.log_softmax(logits[-1])
        assert int(top.argmax()) == token.id
        np.testing.assert_allclose(token.logprob, top[token.id], atol=1e-3)
        cache, logits = compute(cache, [token.id])


def test_what_rests_on_an_estimate_is_found_again_by_those_who_take_estimates(engine):
    teach(engine)
    document = (text(40, seed=50), "document")
    ask(engine, prompt(ONE, document, TAIL))
    asked = prompt(OTHER, document, TAIL)
    first, answer = ask(engine, asked)
    before = engine.counters.estimated
    again, same = ask(engine, asked)
    assert (again.computed_tokens, engine.counters.estimated) == (1, before)
    assert again.approximate_tokens == 40 - FIRST + len(TAIL) - 1
    assert again.predicted_error == pytest.approx(first.predicted_error, rel=1e-3)
    assert_same(same, answer)
    longer = prompt(OTHER, document, TAIL, tuple(token.id for token in answer)[:3], text(4, 9))
    usage, _ = ask(engine, longer)
    assert usage.computed_tokens == 4


def test_estimates_never_enter_what_is_exact(engine, cold):  # noqa: F811
    teach(engine)
    document = (text(40, seed=50), "document")
    ask(engine, prompt(ONE, document, TAIL))
    asked = prompt(OTHER, document, TAIL)
    estimated, approximate_answer = ask(engine, asked)
    usage, answer = ask(engine, exactly(asked))
    # The prompt, and the text's first tokens, were computed on nothing but exact KV.
    assert approximate(usage) == (0, 37 + FIRST, 40 - FIRST + len(TAIL))
    expected = cold(Request(tuple(asked.tokens.tolist()), (), 4))
    assert_same(answer, expected)
    assert estimated.approximate_tokens > 0
    assert [t.logprob for t in approximate_answer] != [t.logprob for t in answer]


def test_exact_kv_is_taken_where_it_is_resident(engine):
    teach(engine)
    document = (text(40, seed=50), "document")
    asked = prompt(OTHER, document, TAIL)
    ask(engine, exactly(asked))
    usage, _ = ask(engine, asked)
    assert approximate(usage) == (0, 81, 1)


def test_a_text_that_is_not_known_is_computed_alone_and_the_others_are_estimated(engine):
    for seed in range(TEXTS):
        one, two = text(40, seed=100 + seed), text(30, seed=200 + seed)
        for job in (prompt(ONE, (one, "a"), TAIL), prompt(ONE, (two, "b"), TAIL),
                    prompt(OTHER, (one, "a"), TAIL, (two, "b"), TAIL)):
            ask(engine, job)
    assert sorted(readers(engine)) == [TEXTS, TEXTS]
    known, new = text(40, seed=50), text(30, seed=60)
    ask(engine, prompt(ONE, (known, "a"), TAIL))
    usage, _ = ask(engine, prompt(OTHER, (known, "a"), TAIL, (new, "b"), TAIL))
    assert usage.approximate_tokens == 40 - FIRST
    assert usage.computed_tokens == FIRST + 30 + 2 * len(TAIL)
    assert sorted(readers(engine)) == [TEXTS, TEXTS]  # behind an estimate nothing is exact


def test_an_answer_is_a_base_for_those_who_read_it(engine):
    def answered(seed):
        asked = prompt(ONE, text(10, seed=seed), new=24)
        return tuple(token.id for token in ask(engine, asked)[1])

    for seed in range(TEXTS):
        ask(engine, prompt(OTHER, (answered(seed), "answer"), TAIL))
    usage, _ = ask(engine, prompt(OTHER, (answered(70), "answer"), TAIL))
    # The last token of an answer was never computed.
    assert usage.approximate_tokens == 24 - FIRST - 1


@pytest.mark.parametrize("bound, reused", [(np.inf, True), (0.0, False)])
def test_an_answer_behind_poor_estimates_is_no_base(engine, monkeypatch, bound, reused):
    monkeypatch.setattr(engine.sharing, "settings",
                        dataclasses.replace(engine.sharing.settings, base_bound=bound))
    teach(engine)
    teach(engine, text(50, 60), name="answer")
    document = (text(40, seed=50), "document")
    ask(engine, prompt(ONE, document, TAIL))
    usage, answer = ask(engine, prompt(OTHER, document, TAIL, new=24))
    assert usage.approximate_tokens > 0
    answer = tuple(token.id for token in answer)
    usage, _ = ask(engine, prompt(text(50, 60), (answer, "answer"), TAIL))
    assert (usage.approximate_tokens > 0) == reused


def test_exact_kv_in_the_middle_of_a_text_is_not_estimated_again(engine):
    teach(engine)
    document = (text(90, seed=50), "document")
    ask(engine, prompt(ONE, document, TAIL))
    asked = prompt(OTHER, document, TAIL)
    ask(engine, exactly(asked))
    tree, pages = engine.scheduler.tree, engine.scheduler.pages
    slots = tree.find("a", asked.tokens, asked.history)
    gone = slots[[60, 110]] // pages.size  # with exact KV between
    for node in tree._nodes():
        lost = np.isin(node.slots // pages.size, gone) & np.isin(node.slots, slots)
        pages.forget(node.slots[lost])
        node.slots[lost] = -1
    missing = int((tree.find("a", asked.tokens, asked.history) == -1).sum())
    assert 16 < missing <= 32
    usage, _ = ask(engine, asked)
    assert usage.approximate_tokens == missing
    assert usage.computed_tokens == 1


def test_a_prompt_that_nobody_teaches_takes_no_readers_place(engine):
    for seed in range(3):
        ask(engine, prompt(text(20, 90 + seed), (text(40, seed=100 + seed), "document"), TAIL))
    assert readers(engine) == []


def test_more_tokens_are_computed_where_that_is_asked_for(model):  # noqa: F811
    engine = Engine(model, kv_tokens=1024, chunk=64, max_num_seqs=4,
                    sharing=Sharing(CONFIG, {}, Settings(texts=1, recompute=0.5, projection=None)))
    teach(engine, texts=1)
    document = (text(40, seed=50), "document")
    ask(engine, prompt(ONE, document, TAIL))
    asked = Asked(engine, prompt(OTHER, document, TAIL))
    run(engine)
    assert approximate(asked.usage) == (20, 37, 20 + len(TAIL))


# Readers


@pytest.mark.parametrize("changed", [
    dict(salt="b"), dict(before=text(37, 8)), dict(name="other"),
])
def test_a_reader_is_known_by_salt_static_text_and_names_before(engine, changed):
    teach(engine)
    salt = changed.get("salt", "a")
    before = changed.get("before", OTHER)
    first = ((text(20, 30), changed["name"]),) if "name" in changed else ()
    document = (text(40, seed=50), "document")
    ask(engine, prompt(ONE, document, TAIL, salt=salt))
    usage, _ = ask(engine, prompt(before, *first, document, TAIL, salt=salt))
    assert usage.approximate_tokens == 0


def test_what_stands_behind_a_text_and_its_own_name_are_no_part_of_the_reader(engine):
    teach(engine)
    content = text(40, seed=50)
    ask(engine, prompt(ONE, (content, "document"), TAIL))
    usage, _ = ask(engine, prompt(OTHER, (content, "renamed"), text(9, 40)))
    assert usage.approximate_tokens == 40 - FIRST


def test_tokens_over_a_border_belong_to_no_reader(engine):
    def with_border(seed, content):
        job = prompt(OTHER, text(1, seed), (content, "document"), text(1, seed + 1), TAIL)
        share = job.shares[0]
        return dataclasses.replace(job, shares=(dataclasses.replace(
            share, outer=(share.start - 1, share.stop + 1)),))

    for seed in range(TEXTS + 1):
        content = text(40, seed=100 + seed)
        ask(engine, prompt(ONE, (content, "document"), TAIL))
        usage, _ = ask(engine, with_border(seed, content))
    assert usage.approximate_tokens == 40 - FIRST


def test_a_request_that_was_found_whole_teaches_nothing(engine):
    teach(engine, texts=1)
    content = text(40, seed=100)
    for _ in range(3):
        ask(engine, prompt(OTHER, (content, "document"), TAIL))
    assert readers(engine) == [1]


def test_the_least_recently_used_reader_is_forgotten(model):  # noqa: F811
    engine = Engine(model, kv_tokens=1024, chunk=64, max_num_seqs=4,
                    sharing=Sharing(CONFIG, {}, Settings(texts=2, readers=2, projection=None)))
    for before in (text(17, 20), text(17, 21), text(17, 22)):
        teach(engine, before, texts=1)
    assert readers(engine) == [1, 1]


def test_what_was_learned_goes_on_in_another_engine(engine, model):  # noqa: F811
    teach(engine)
    document = (text(40, seed=50), "document")
    ask(engine, prompt(ONE, document, TAIL))
    _, expected = ask(engine, prompt(OTHER, document, TAIL))
    second = Sharing(CONFIG, {}, engine.sharing.settings)
    tree, meta = engine.sharing.state()
    assert jax.tree.structure(second.like(meta)) == jax.tree.structure(tree)
    second.load(tree, meta)
    assert len(second) == len(engine.sharing) == 1
    again = Engine(model, kv_tokens=1024, chunk=64, max_num_seqs=4, sharing=second)
    ask(again, prompt(ONE, document, TAIL))
    usage, answer = ask(again, prompt(OTHER, document, TAIL))
    assert usage.approximate_tokens == 40 - FIRST
    assert_same(answer, expected)


# Under load


def test_nothing_is_compiled_after_warm_up(engine):
    compiled = []

    def listen(event, duration, **_):
        if "compile" in event:
            compiled.append(event)

    teach(engine)  # the first texts go through NumPy's and JAX's small operations too
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for seed in range(4):
            document = (text(40 + 9 * seed, seed=50 + seed), "document")
            ask(engine, prompt(ONE, document, TAIL))
            usage, _ = ask(engine, prompt(OTHER, document, TAIL))
            assert usage.approximate_tokens > 0
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []


@settings(max_examples=8, deadline=None)
@given(st.data())
def test_a_pool_that_is_too_small_for_all_serves_all_and_leaks_nothing(small, data):
    engine = emptied(small)
    engine.sharing._readers.clear()
    befores = [ONE, OTHER, text(3, 4)]
    jobs = []
    for _ in range(data.draw(st.integers(4, 10))):
        parts = [data.draw(st.sampled_from(befores))]
        for _ in range(data.draw(st.integers(1, 2))):
            seed = data.draw(st.integers(0, 3))
            parts += [(text(16 + 6 * seed, seed=seed), data.draw(st.sampled_from("ab"))), TAIL]
        job = prompt(*parts)
        jobs.append(job if data.draw(st.integers(0, 3)) else exactly(job))
    asked = []
    for job in jobs:
        asked.append(Asked(engine, job))
        for _ in range(data.draw(st.integers(0, 3))):
            engine.step()
            assert_nothing_leaks(engine)
    run(engine)
    for one, job in zip(asked, jobs, strict=True):
        assert one.end == End("length") and len(one.tokens) == 4
        assert all(np.isfinite(token.logprob) for token in one.tokens)
        usage = one.usage
        assert usage.computed_tokens >= 1 and usage.prompt_tokens == len(job.tokens)
        assert usage.approximate_tokens == 0 or job.shares


@pytest.fixture(scope="module")
def small(model, warm):  # noqa: F811
    engine = Engine(model, kv_tokens=160, chunk=64, page_size=16, max_num_seqs=4,
                    sharing=Sharing(CONFIG, {}, Settings(texts=1, projection=None)))
    return engine


def test_exact_requests_are_what_they_are_without_sharing(engine, cold):  # noqa: F811
    request = Request(text(60), (Drop(30, ((3, 9),)),), 4)
    job = Job(np.array(request.tokens, np.int32), request.history, "a", 4, GREEDY)
    usage, answer = ask(engine, job)
    assert usage == usage_of(60)
    assert_same(answer, cold(request))


# Where bases stand


class World:
    def __init__(self):
        self.pages = Pages(64, 4)
        self.tree = Tree(self.pages)
        self.bases = Bases(self.tree)

    def keep(self, stream, start, stop, salt="a"):
        """Let a stream be resident, and part of it a base; the slots of the stream."""
        stream = np.array(stream, np.int32)
        slots = self.pages.take(-(-len(stream) // 4))[:len(stream)]
        self.tree.insert(salt, stream, History(len(stream)), slots)
        self.bases.add(Base(salt, salt, stream, History(len(stream)), start, stop))
        self.pages.release(slots)
        return slots


CONTENT = text(30, 5)


def test_a_text_is_found_where_it_stands():
    world = World()
    slots = world.keep([*text(7, 6), *CONTENT], 7, 37)
    found = world.bases.find("a", np.array(CONTENT, np.int32))
    assert (found.start, found.stop, found.birth) == (0, 30, 7)
    assert found.slots.tolist() == slots[7:].tolist()
    assert world.bases.find("b", np.array(CONTENT, np.int32)) is None


def test_other_tokens_at_its_borders_do_not_hide_a_text():
    world = World()
    slots = world.keep([*text(7, 6), *CONTENT], 7, 37)
    found = world.bases.find("a", np.array([95, 96, *CONTENT[3:-1], 94], np.int32))
    assert (found.start, found.stop, found.birth) == (2, 28, 8)
    assert found.slots.tolist() == slots[10:36].tolist()
    inside = world.bases.find("a", np.array(CONTENT[2:28], np.int32))
    assert (inside.start, inside.stop, inside.birth) == (0, 26, 9)


@pytest.mark.parametrize("other", [
    [*CONTENT[:15], 96, *CONTENT[16:]], CONTENT[:14], [*CONTENT, *text(20, 8)],
])
def test_another_or_a_short_text_is_not_found(other):
    world = World()
    world.keep([*text(7, 6), *CONTENT], 7, 37)
    assert world.bases.find("a", np.array(other, np.int32)) is None


def test_an_evicted_text_is_no_base_until_it_is_resident_again():
    world = World()
    world.keep([*text(7, 6), *CONTENT], 7, 37)
    world.tree.evict(64)
    wanted = np.array(CONTENT, np.int32)
    assert world.bases.find("a", wanted) is None
    slots = world.keep([*text(12, 7), *CONTENT], 12, 42)
    assert world.bases.find("a", wanted).slots.tolist() == slots[12:].tolist()
