"""A history compiled to integers, against a history lived through token by token."""

import dataclasses

import numpy as np
import oracle
import programs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfunc.history import DROPPED, HOLE, Drop, History, Repos

POOL = 64


@st.composite
def streams(draw, tokens: int = 24):
    """A number of tokens and raw events between them, any number at one boundary."""
    count = draw(st.integers(1, tokens))
    boundaries = draw(st.lists(st.integers(0, count), max_size=8).map(sorted))
    events = []
    for at in boundaries:
        if at and draw(st.booleans()):
            events.append(Drop(at, draw(programs.ranges(at))))
        else:
            events.append(Repos(at))
    return count, events


@st.composite
def token_sets(draw, tokens: int):
    return sorted(draw(st.sets(st.integers(0, tokens - 1), min_size=1)))


@settings(max_examples=200)
@given(stream=streams())
def test_births_stages_and_ends_of_visibility_are_those_of_the_life(stream):
    history, life = History(*stream), oracle.Simulation(*stream)
    assert history.births.tolist() == life.births
    assert history.stage.tolist() == life.stage
    assert history.visible_until.tolist() == life.visible_until
    assert history.live == len(life.positions)
    assert history.next_position == life.next_position
    assert history.largest_birth == max(life.births)


@settings(max_examples=200)
@given(stream=streams())
def test_events_that_change_nothing_are_left_out_and_drops_hold_net_ranges(stream):
    history = History(*stream)
    assert list(history.events) == oracle.Simulation(*stream).events
    assert History(history.tokens, history.events).events == history.events


@settings(max_examples=200)
@given(stream=streams())
def test_positions_at_the_end_and_in_every_stage_are_those_of_the_life(stream):
    history, life = History(*stream), oracle.Simulation(*stream)
    tokens = range(history.tokens)
    assert history.positions().tolist() == [life.positions.get(t, DROPPED) for t in tokens]
    for stage, at_start in enumerate(life.at_stage_start):
        own = {t: life.births[t] for t in tokens if life.stage[t] == stage}
        expected = at_start | own
        assert history.positions(stage).tolist() == [expected.get(t, DROPPED) for t in tokens]
    for query, seen in enumerate(life.seen):
        in_stage = history.positions(life.stage[query])
        assert {t: int(in_stage[t]) for t in seen} == seen


@settings(max_examples=100)
@given(stream=streams(), more=st.integers(0, 9))
def test_extending_a_history_appends_tokens_behind_all_events(stream, more):
    tokens, events = stream
    extended, whole = History(tokens, events).extend(more), History(tokens + more, events)
    for name in ("births", "stage", "visible_until"):
        np.testing.assert_array_equal(getattr(extended, name), getattr(whole, name))
    assert extended.events == whole.events
    assert extended.next_position == History(tokens, events).next_position + more


def read(rows, queries) -> list[dict[int, tuple[int, int]]]:
    """Query by query: raw index -> (slot, position) of the keys that a table of rows shows it."""
    seen = []
    for packed, query in enumerate(queries):
        keys = [(int(raw + i), (int(slot + i), int(birth + i - shift)))
                for q_start, q_len, slot, length, raw, birth, shift, until in zip(
                    *(getattr(rows, name) for name in rows.COLUMNS), strict=True)
                if q_start <= packed < q_start + q_len
                for i in range(length) if raw + i <= query < until]
        assert len(keys) == len(dict(keys)), "a key is read twice"
        seen.append(dict(keys))
    return seen


@settings(max_examples=200)
@given(stream=streams(), data=st.data())
def test_rows_show_every_query_what_it_sees_where_it_counts_as_being(stream, data):
    history, life = History(*stream), oracle.Simulation(*stream)
    queries = data.draw(token_sets(history.tokens), label="queries")
    order = data.draw(st.permutations(range(history.tokens)), label="order")
    first = data.draw(st.integers(0, POOL - history.tokens), label="first")
    slots = first + np.array(data.draw(st.sampled_from([sorted(order), order]), label="slots"))
    holes = data.draw(st.sets(st.integers(0, history.tokens - 1), max_size=4), label="holes")
    slots[list(holes)] = HOLE
    if any(holes & set(life.seen[query]) for query in queries):
        with pytest.raises(ValueError, match="has no slot; compute the tokens"):
            history.rows(np.array(queries), slots)
        return
    rows = history.rows(np.array(queries), slots)
    assert rows.query_raw.tolist() == queries
    assert read(rows, queries) == [
        {t: (slots[t], position) for t, position in life.seen[query].items()} for query in queries]
    assert all(getattr(rows, field.name).dtype == np.int32 for field in dataclasses.fields(rows))


def test_the_rows_of_one_contiguous_request_are_few():
    history = History(100, [Drop(60, ((10, 20), (30, 40))), Repos(60)])
    rows = history.rows(np.arange(60, 100), np.arange(100) + 7)
    table = list(zip(rows.slot, rows.length, rows.birth, rows.shift, rows.q_len, strict=True))
    assert table == [(7, 10, 0, 0, 40), (27, 10, 20, 10, 40), (47, 20, 40, 20, 40),
                     (67, 40, 40, 0, 40)]


def closure(life, missing, wanted) -> list[int]:
    computed = set(wanted)
    while True:
        read_by_them = {t for query in computed for t in life.seen[query] if t in missing}
        if read_by_them <= computed:
            return sorted(computed)
        computed |= read_by_them


@settings(max_examples=200)
@given(stream=streams(), data=st.data())
def test_a_missing_token_is_needed_only_if_a_computed_query_reads_it(stream, data):
    history, life = History(*stream), oracle.Simulation(*stream)
    wanted = data.draw(token_sets(history.tokens), label="wanted")
    missing = set(data.draw(token_sets(history.tokens), label="missing"))
    flags = np.array([t in missing for t in range(history.tokens)])
    needed = history.needed(flags, wanted)
    assert needed.tolist() == closure(life, missing, wanted)

    slots = np.where(flags, HOLE, np.arange(history.tokens))
    slots[needed] = needed
    history.rows(needed, slots)  # none of the holes that are left can be read


def class_of(life, token, computed) -> str:
    """The first class that fits (semantics, "Usage counters")."""
    readers = [query for query in computed if token in life.seen[query]]
    if token in computed:
        return "computed"
    if token not in life.positions and not readers:
        return "drop_skipped"
    if any(life.births[token] != life.seen[query][token] for query in readers):
        return "repos"
    return "cached"


@settings(max_examples=200)
@given(stream=streams(), data=st.data())
def test_every_token_is_counted_in_the_first_class_that_fits(stream, data):
    history, life = History(*stream), oracle.Simulation(*stream)
    computed = data.draw(token_sets(history.tokens), label="computed")
    runs = history.classify(np.array(computed))
    assert [t for run in runs for t in range(run.start, run.stop)] == list(range(history.tokens))
    for run in runs:
        for t in range(run.start, run.stop):
            assert run.kind == class_of(life, t, computed)
            expected = None if run.position is None else run.position + t - run.start
            assert life.positions.get(t) == expected


def test_the_worked_example_of_the_contract():
    history = History(15, [Drop(13, ((4, 7), (7, 10))), Repos(13)])
    assert history.events == (Drop(13, ((4, 10),)), Repos(13))
    assert history.births.tolist() == [*range(13), 7, 8]
    assert history.positions().tolist() == [0, 1, 2, 3, *[-1] * 6, 4, 5, 6, 7, 8]
    assert history.next_position == 9
    counts = dict.fromkeys(History.KINDS, 0)
    for run in history.classify(np.array([14])):
        counts[run.kind] += run.stop - run.start
    assert counts == {"cached": 5, "repos": 3, "drop_skipped": 6, "computed": 1, "approximate": 0}


def test_the_order_of_events_at_one_boundary_is_kept():
    before, repos, drop = Drop(4, ((2, 3),)), Repos(6), Drop(6, ((0, 2),))
    assert History(8, [before, repos, drop]).events == (before, repos, drop)
    assert History(8, [before, repos, drop]).births.tolist() == [0, 1, 2, 3, 4, 5, 5, 6]
    assert History(8, [before, drop, repos]).births.tolist() == [0, 1, 2, 3, 4, 5, 3, 4]


def test_drops_at_one_boundary_merge_and_empty_events_vanish():
    history = History(10, [Repos(0), Drop(5, ((0, 2),)), Drop(5, ((2, 3), (1, 2))), Repos(5),
                           Repos(5), Drop(7, ((0, 3),)), Repos(7)])
    assert history.events == (Drop(5, ((0, 3),)), Repos(5))


@pytest.mark.parametrize("tokens, events, message", [
    (-1, [], "tokens must be at least 0, got -1"),
    (5, [Repos(6)], "not after token 5, the history's end"),
    (5, [Repos(3), Drop(2, ((0, 1),))], "must stand at or after token 3"),
    (5, [Drop(3, ((2, 4),))], "a token that is not written yet cannot be dropped"),
    (5, [Drop(3, ((-1, 2),))], "must be non-empty"),
    (5, [Drop(3, ((1, 1),))], "must be non-empty"),
])
def test_impossible_histories_are_refused(tokens, events, message):
    with pytest.raises(ValueError, match=message):
        History(tokens, events)


@st.composite
def pairs_of_streams(draw):
    """Two streams that share some of their events, those in the front more often."""
    tokens, events = draw(streams())
    other_tokens, other_events = draw(streams())
    cut = draw(st.integers(0, max(tokens, other_tokens)))
    shared = [event for event in events if event.at <= min(cut, other_tokens)]
    return (tokens, events), (other_tokens, shared + [
        event for event in other_events if event.at >= cut])


@settings(max_examples=200)
@given(pair=pairs_of_streams())
def test_the_common_prefix_is_the_longest_with_equal_events_before_each_token(pair):
    (tokens, events), (other_tokens, other_events) = pair
    mine, others = (oracle.Simulation(*stream).events for stream in pair)
    expected = 0
    for length in range(min(tokens, other_tokens) + 1):
        if [event for event in mine if event.at < length] == [
                event for event in others if event.at < length]:
            expected = length
    a, b = History(tokens, events), History(other_tokens, other_events)
    assert a.common_prefix(b) == b.common_prefix(a) == expected
    for name in ("births", "stage"):
        np.testing.assert_array_equal(getattr(a, name)[:expected], getattr(b, name)[:expected])
