"""Topologies: what each shape is, and what holds for all of them."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfunc.serve import topologies
from kvfunc.serve.topologies import Call, build

# Built in the test: within a strategy hypothesis takes seeded tosses for its own.
ANY = st.builds(
    functools.partial,
    st.just(build),
    st.sampled_from(topologies.NAMES),
    st.integers(topologies.FEWEST, topologies.MOST),
    rounds=st.integers(2, 4),
    width=st.integers(1, 16),
    seed=st.integers(0, 2**32),
)


def reads(name, agents, **options):
    return [call.reads for call in build(name, agents, **options).calls]


@pytest.mark.parametrize(
    ("name", "agents", "options", "expected"),
    [
        ("full", 4, {}, [(), (0,), (0, 1), (0, 1, 2)]),
        ("chain", 4, {}, [(), (0,), (1,), (2,)]),
        ("star", 4, {}, [(), (), (), (0, 1, 2)]),
        ("debate", 2, {"rounds": 3}, [(), (), (0, 1), (0, 1), (2, 3), (2, 3)]),
        ("layered", 6, {}, [(), (), (0, 1), (0, 1), (2, 3), (4,)]),
        ("layered", 7, {"width": 3}, [(), (), (), (0, 1, 2), (0, 1, 2), (0, 1, 2), (3, 4, 5)]),
        ("layered", 2, {"width": 9}, [(), (0,)]),
        ("mesh", 9, {}, [(), (0,), (1,), (0,), (1, 3), (2, 4), (3,), (4, 6), (5, 7)]),
        # 0 1
        # 2      Nobody stands below 1, so the last reads it.
        ("mesh", 3, {}, [(), (0,), (0, 1)]),
    ],
)
def test_each_shape_is_as_its_name_says(name, agents, options, expected):
    assert reads(name, agents, **options) == expected


def test_a_debate_asks_every_agent_once_a_round():
    calls = build("debate", 3, rounds=2).calls
    assert [(call.round, call.agent) for call in calls] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@given(make=ANY)
def test_a_call_reads_earlier_calls_each_once_and_in_order(make):
    topology = make()
    for place, call in enumerate(topology.calls):
        assert all(0 <= read < place for read in call.reads)
        assert list(call.reads) == sorted(set(call.reads))


@given(make=ANY)
def test_every_agent_is_asked_and_the_last_one_ends(make):
    topology = make()
    assert {call.agent for call in topology.calls} == set(range(topology.agents))
    assert topology.calls[-1].agent == topology.agents - 1


@given(make=ANY)
def test_all_is_read_but_the_last_round(make):
    topology = make()
    last = topology.calls[-1].round
    read = {place for call in topology.calls for place in call.reads}
    unread = [topology.calls[place] for place in range(len(topology.calls)) if place not in read]
    assert all(call.round == last for call in unread)
    assert unread == [topology.calls[-1]] or topology.name == "debate"


@given(make=ANY)
def test_levels_hold_every_call_once_and_depend_on_earlier_levels_alone(make):
    topology = make()
    done = set()
    for level in topology.levels:
        assert level
        assert all(set(topology.calls[place].reads) <= done for place in level)
        done |= set(level)
    assert sorted(place for level in topology.levels for place in level) == list(
        range(len(topology.calls)))


def test_levels_let_the_leaves_of_a_star_run_at_once():
    assert build("star", 4).levels == [[0, 1, 2], [3]]
    assert build("chain", 3).levels == [[0], [1], [2]]
    assert build("debate", 2).levels == [[0, 1], [2, 3]]


@given(st.integers(3, 16), st.integers(0, 2**32))
def test_random_is_its_seeds_and_has_a_predecessor_for_all_but_the_first(agents, seed):
    calls = build("random", agents, seed=seed).calls
    assert calls == build("random", agents, seed=seed).calls
    assert calls[0] == Call(0, 0, ())
    assert all(call.reads for call in calls[1:])


def test_another_seed_is_another_random_topology():
    assert len({build("random", 8, seed=seed).calls for seed in range(20)}) > 15


@pytest.mark.parametrize(
    ("arguments", "options", "complaint"),
    [
        (("ring", 3), {}, r"topology is 'ring': take one of full, chain, star"),
        (("full", 1), {}, r"agents is 1: take 2 to 16"),
        (("full", 17), {}, r"agents is 17: take 2 to 16"),
        (("debate", 3), {"rounds": 1}, r"rounds is 1: take at least 2"),
        (("layered", 3), {"width": 0}, r"width is 0: take at least 1"),
    ],
)
def test_a_bad_parameter_is_named_with_its_value_and_the_remedy(arguments, options, complaint):
    with pytest.raises(ValueError, match=complaint):
        build(*arguments, **options)
