import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfunc.history import Drop, History, Repos
from kvfunc.models.chat import NOBODY
from kvfunc.policies import Schedule, Unit, rolling_tool_outputs
from kvfunc.serve.events import broken_calls, describe, events, units
from kvfunc.serve.interface import Plan, Usage


def owners(*runs: tuple[int, int]) -> np.ndarray:
    """An owner array from (owner, tokens)."""
    return np.concatenate([np.full(tokens, owner, np.int32) for owner, tokens in runs])


def messages(*roles: str) -> list[dict]:
    return [{"role": role, "content": ""} for role in roles]


WORKED = owners((0, 4), (1, 3), (2, 3), (3, 3), (4, 2))


def test_the_worked_example():
    history = History(15, events(Schedule({3: (1, 2)}, (3,)), 4, WORKED))
    assert history.events == (Drop(13, ((4, 10),)), Repos(13))
    assert history.positions().tolist() == [0, 1, 2, 3, *[-1] * 6, 4, 5, 6, 7, 8]
    assert history.visible_until[4:10].tolist() == [13] * 6
    assert history.next_position == 9
    counts = {}
    for run in history.classify(np.array([14])):
        counts[run.kind] = counts.get(run.kind, 0) + run.stop - run.start
    assert counts == {"cached": 5, "repos": 3, "drop_skipped": 6, "computed": 1}


def test_a_trigger_may_drop_itself():
    assert events(Schedule({1: (1,)}), 4, WORKED) == [Drop(7, ((4, 7),))]


def test_a_trigger_past_the_history_is_ignored():
    assert events(Schedule({3: (0,), 4: (1,), 9: (2,)}), 4, WORKED) == [Drop(13, ((0, 4),))]


def test_a_second_drop_changes_nothing():
    assert History(15, events(Schedule({2: (1,), 3: (1,)}), 4, WORKED)).events == (
        Drop(10, ((4, 7),)),)


def test_triggers_need_not_come_in_order():
    assert [event.at for event in events(Schedule({3: (2,), 1: (0,)}), 4, WORKED)] == [7, 13]


def test_text_of_nobody_stays():
    owner = owners((NOBODY, 2), (0, 2), (NOBODY, 3), (0, 1), (1, 2), (2, 1))
    assert events(Schedule({0: (0,)}), 2, owner) == [Drop(8, ((2, 4), (7, 8)))]


def test_an_event_stands_right_behind_the_last_token_of_its_message():
    owner = owners((0, 2), (NOBODY, 3), (1, 2), (2, 1))
    assert events(Schedule({0: (0,)}, (0,)), 2, owner) == [Drop(2, ((0, 2),)), Repos(2)]


def test_events_at_one_boundary_are_one_drop_and_then_the_repos():
    owner = owners((0, 2), (1, 2), (3, 2), (4, 1))  # message 2 prints nothing
    made = events(Schedule({1: (0,), 2: (1, 2)}, (1, 2)), 4, owner)
    assert made == [Drop(4, ((0, 2), (2, 4))), Repos(4)]
    assert History(7, made).events == (Drop(4, ((0, 4),)), Repos(4))


def test_a_message_that_prints_nothing_is_nothing_to_drop():
    owner = owners((0, 2), (2, 2), (3, 1))
    assert events(Schedule({1: (1,), 2: (1,)}), 3, owner) == []


def test_the_events_of_a_message_that_prints_nothing_stand_before_the_next():
    owner = owners((0, 2), (NOBODY, 3), (2, 2), (3, 1))
    assert events(Schedule({1: (0,)}), 3, owner) == [Drop(5, ((0, 2),))]
    assert events(Schedule({2: (0,)}), 3, owners((0, 2), (NOBODY, 3))) == [Drop(5, ((0, 2),))]


def test_units_tell_what_a_drop_removes_and_where_a_message_ends():
    owner = owners((NOBODY, 2), (0, 2), (NOBODY, 3), (0, 1), (2, 2), (3, 1))
    assert units(messages("system", "user", "tool"), owner) == [
        Unit("system", 3, 8), Unit("user", 0, 8), Unit("tool", 2, 10)]


def test_a_policy_closes_gaps_where_the_history_says_so():
    roles = messages("user", *["assistant", "tool"] * 3)
    owner = owners((NOBODY, 5), (0, 5), (1, 2), (2, 10), (3, 2), (4, 10), (5, 2), (6, 10), (7, 3))
    policy = rolling_tool_outputs(keep=1, reposition_above_tokens=25)
    schedule = policy(units(roles, owner))
    assert schedule == Schedule({4: (2,), 6: (4,)}, (4, 6))
    assert History(49, events(schedule, 7, owner)).events == (
        Drop(34, ((12, 22),)), Repos(34), Drop(46, ((24, 34),)), Repos(46))


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.integers(0, 5),
                          st.integers(0, 2)), min_size=1, max_size=20),
       st.integers(1, 3), st.none() | st.integers(0, 40))
def test_the_events_of_a_prefix_are_the_prefix_of_the_events(turns, keep, above):
    """Also where messages print nothing and text of nobody stands between them."""
    policy = rolling_tool_outputs(keep, above)

    def compiled(count):
        owner = owners(*[run for index, (_, own, nobody) in enumerate(turns[:count])
                         for run in ((NOBODY, nobody), (index, own))], (count, 2))
        roles = messages(*[role for role, _, _ in turns[:count]])
        return History(len(owner), events(policy(units(roles, owner)), count, owner))

    whole = compiled(len(turns))
    for count in range(len(turns)):
        prefix = compiled(count)
        shared = prefix.tokens - 2  # without the generation header
        assert prefix.common_prefix(whole) >= shared
        assert [e for e in prefix.events if e.at < shared] == [
            e for e in whole.events if e.at < shared]


CALLS = [{"role": "user"},
         {"role": "assistant", "tool_calls": [{"id": "a"}, {"id": "b"}]},
         {"role": "tool", "tool_call_id": "a"},
         {"role": "tool", "tool_call_id": "b"},
         {"role": "assistant", "tool_calls": [{"id": "a"}]},
         {"role": "tool", "tool_call_id": "a"},
         {"role": "tool"}]


@pytest.mark.parametrize("drop, warned", [
    ({}, []),
    ({3: (1, 2, 3)}, []),
    ({3: (0,)}, []),
    ({3: (2,), 9: (3,)}, ["tool results are dropped, but their calls are not: "
                          "the call in message 1 and its result in message 2"]),
    ({3: (1, 2)}, ["tool calls are dropped, but their results are not: "
                   "the call in message 1 and its result in message 3"]),
    ({6: (5, 6)}, ["tool results are dropped, but their calls are not: "
                   "the call in message 4 and its result in message 5, "
                   "the call in message 4 and its result in message 6"]),
])
def test_a_call_without_its_result_is_told(drop, warned):
    assert broken_calls(Schedule(drop), CALLS) == warned


def test_a_plan_shows_messages_events_and_runs():
    history = History(15, events(Schedule({3: (1, 2)}, (3,)), 4, WORKED))
    plan = Plan(Usage(15, 5, 3, 6, 0), tuple(history.classify(np.array([14]))))
    roles = messages("system", "user", "tool", "user")
    assert describe(plan, history, roles, WORKED, ["w"]) == {
        "object": "cache.plan",
        "messages": [
            {"index": 0, "role": "system", "tokens": 4, "range": [0, 4], "owner": "message"},
            {"index": 1, "role": "user", "tokens": 3, "range": [4, 7], "owner": "message"},
            {"index": 2, "role": "tool", "tokens": 3, "range": [7, 10], "owner": "message"},
            {"index": 3, "role": "user", "tokens": 3, "range": [10, 13], "owner": "message"},
            {"index": None, "role": "assistant", "tokens": 2, "range": [13, 15],
             "owner": "generation"},
        ],
        "events": [{"kind": "drop", "at": 13, "ranges": [[4, 10]]}, {"kind": "repos", "at": 13}],
        "runs": [
            {"range": [0, 4], "class": "cached", "position": 0},
            {"range": [4, 10], "class": "drop_skipped", "position": None},
            {"range": [10, 13], "class": "repos", "position": 4},
            {"range": [13, 14], "class": "cached", "position": 7},
            {"range": [14, 15], "class": "computed", "position": 8},
        ],
        "prompt_tokens": 15, "live_tokens": 9, "next_position": 9, "warnings": ["w"],
    }


def test_a_plan_names_text_of_nobody():
    history = History(4)
    plan = Plan(Usage(4, 0, 0, 0, 0), tuple(history.classify(np.arange(4))))
    owner = owners((NOBODY, 1), (0, 2), (1, 1))
    shown = describe(plan, history, messages("user"), owner, [])
    assert shown["messages"][0] == {"index": None, "role": None, "tokens": 1, "range": [0, 1],
                                    "owner": "nobody"}
