import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfunc.policies import Schedule, Unit, rolling_tool_outputs


def units(*described: tuple[str, int]) -> list[Unit]:
    """Units from (role, tokens), back to back."""
    made, end = [], 0
    for role, tokens in described:
        end += tokens
        made.append(Unit(role, tokens, end))
    return made


RUN = units(("system", 5), ("user", 5), ("assistant", 2), ("tool", 10), ("assistant", 2),
            ("tool", 20), ("tool", 30), ("assistant", 2), ("tool", 40))


def test_the_arriving_tool_output_drops_the_one_that_is_keep_older():
    assert rolling_tool_outputs(keep=2)(RUN) == Schedule(drop={6: (3,), 8: (5,)})
    assert rolling_tool_outputs(keep=3)(RUN) == Schedule(drop={8: (3,)})


def test_twelve_outputs_are_kept_unless_told_otherwise():
    history = units(("user", 1), *[("tool", 1)] * 13)
    assert rolling_tool_outputs()(history) == Schedule(drop={13: (1,)})


def test_gaps_are_closed_when_the_next_position_exceeds_the_threshold():
    # Positions at the ends: 5 10 12 22 24 44 74 (10 dropped) 76 116 (20 dropped).
    def closed(above):
        return rolling_tool_outputs(keep=2, reposition_above_tokens=above)(RUN).reposition

    assert closed(60) == (6, 8)  # 76 - 10 > 60 too, but nothing was dropped since
    assert closed(73) == (6, 8)  # 74 > 73; then 116 - 10 > 73
    assert closed(74) == (7, 8)  # 76 > 74; then 116 - 10 > 74
    assert closed(105) == (8,)
    assert closed(116) == ()


def test_nothing_is_closed_where_nothing_was_dropped():
    assert rolling_tool_outputs(keep=3, reposition_above_tokens=0)(RUN[:8]) == Schedule()


def test_text_of_nobody_counts_for_the_position_and_stays():
    history = [Unit("tool", 10, 110), Unit("tool", 10, 120), Unit("assistant", 5, 125)]
    policy = rolling_tool_outputs(keep=1, reposition_above_tokens=119)
    assert policy(history) == Schedule(drop={1: (0,)}, reposition=(1,))


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.integers(0, 50)),
                max_size=30),
       st.integers(1, 4), st.none() | st.integers(0, 300))
def test_the_schedule_of_a_prefix_is_the_prefix_of_the_schedule(described, keep, above):
    policy = rolling_tool_outputs(keep, above)
    whole = policy(units(*described))
    for count in range(len(described) + 1):
        assert policy(units(*described[:count])) == Schedule(
            {trigger: ids for trigger, ids in whole.drop.items() if trigger < count},
            tuple(index for index in whole.reposition if index < count))


def test_a_policy_that_keeps_nothing_is_refused():
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        rolling_tool_outputs(keep=0)


def test_a_negative_threshold_is_refused():
    with pytest.raises(ValueError, match=r"reposition_above_tokens must be at least 0, .* got -1"):
        rolling_tool_outputs(reposition_above_tokens=-1)
