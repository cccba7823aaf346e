"""The replay of agent runs, on a stand-in for the server that counts words as tokens."""

import json

import pytest
from rich.console import Console

from kvfunc.serve import replay, report
from kvfunc.serve.client import Card, Client, Refused, Usage

CARD = Card("stub", 100, 10)
ROLES = ("system", "user", "assistant", "tool", "assistant", "tool", "assistant")
RUN = replay.Run("agents/a b", "hand-made", tuple({"role": r, "content": "x y"} for r in ROLES))
NONE = replay.Policy("none", 1, None)
ROLLING = replay.Policy("rolling_tool_outputs", 1, None)


class WordServer(Client):
    """Two tokens a message; the policy drops all but the last tool message; a small context."""

    def __init__(self, context=100):
        self.context = context
        self.requests = []
        self.resident = {}

    def plan(self, messages, cache):
        tools = [message["role"] for message in messages].count("tool")
        dropped = 2 * max(0, tools - 1) if "policy" in cache else 0
        live = 2 * len(messages) - dropped
        if live > self.context:
            raise Refused(f"{live} tokens are too many", "context_length_exceeded")
        return {"live_tokens": live, "warnings": [f"{len(messages)} messages"]}

    def complete(self, messages, cache, max_tokens, ignore_eos):
        self.requests.append((messages, cache))
        prompt = 2 * len(messages)
        resident = self.resident.get(cache["salt"], 0)
        self.resident[cache["salt"]] = prompt
        return Usage(prompt, max_tokens if ignore_eos else 1, resident, 0, 0, 0)


def replayed(server, policy=NONE, **options):
    return replay.replay_run(server, RUN, policy, kv_bytes_per_token=10, max_tokens=3, **options)


def test_a_round_is_the_recorded_history_before_each_assistant_message():
    server = WordServer()
    replayed(server)
    assert [len(messages) for messages, _ in server.requests] == [2, 4, 6]
    assert server.requests[2][0] == RUN.messages[:6]


def test_rounds_and_ticks_stop_at_the_limit():
    ticks = []
    one = replayed(WordServer(), rounds=2, tick=lambda: ticks.append(1))
    assert [round.message for round in one.rounds] == [2, 4]
    assert len(ticks) == 2


def test_a_round_has_the_counters_of_its_answer_and_the_live_tokens_of_its_plan():
    last = replayed(WordServer(), ROLLING).rounds[-1]
    assert (last.round, last.prompt_tokens, last.live_tokens) == (3, 12, 10)
    assert (last.cached_tokens, last.computed_tokens, last.generated_tokens) == (8, 4, 3)


@pytest.mark.parametrize(("generated", "tokens"), [(1, 10), (2, 21), (3, 33)])
def test_a_round_reads_the_live_tokens_once_and_again_for_each_decode_step(generated, tokens):
    assert replay.kv_tokens_read(10, generated) == tokens


def test_kv_bytes_are_tokens_read_times_bytes_per_token():
    last = replayed(WordServer(), ROLLING).rounds[-1]
    assert last.kv_bytes_per_step == 100
    assert last.kv_bytes_read == 330


def test_every_policy_begins_with_nothing_cached():
    server = WordServer()
    first, second = replayed(server), replayed(server)
    assert first.rounds[0].cached_tokens == second.rounds[0].cached_tokens == 0
    assert len({cache["salt"] for _, cache in server.requests}) == 2


def test_a_refusal_ends_the_policy_and_is_kept():
    one = replayed(WordServer(context=11))
    assert len(one.rounds) == 2
    assert one.refusal == replay.Refusal(3, 6, "context_length_exceeded", "12 tokens are too many")


def test_the_last_plans_warnings_are_kept():
    assert replayed(WordServer(context=11)).warnings == ("4 messages",)
    assert replayed(WordServer()).warnings == ("6 messages",)


def test_dropping_gets_through_where_the_whole_history_is_refused():
    assert replayed(WordServer(context=11), ROLLING).refusal is None


def test_policies_become_the_cache_object():
    assert NONE.cache == {}
    assert ROLLING.cache == {"policy": {"type": "rolling_tool_outputs", "keep": 1}}
    above = replay.Policy("rolling_tool_outputs", 6, 3000)
    assert above.cache["policy"]["reposition_above_tokens"] == 3000
    assert str(above) == "rolling_tool_outputs, keep 6, reposition above 3,000 tokens"


def test_the_examples_are_two_runs(agent_runs):
    runs = replay.read_runs(agent_runs)
    assert [(run.id, len(run.messages)) for run in runs] == [
        ("crypto/BabyEncryption", 31),
        ("airline-2-1", 62),
    ]
    assert runs[0].rounds[:3] == [2, 4, 6]


@pytest.mark.parametrize("line", ["", "[]", '{"id": "a", "source": "b"}', "{"])
def test_a_line_that_is_no_run_is_named(tmp_path, line):
    good = json.dumps({"id": "a", "source": "b", "messages": []})
    file = tmp_path / "runs.jsonl"
    file.write_text(f"{good}\n{line}\n")
    with pytest.raises(ValueError, match="line 2: not an agent run"):
        replay.read_runs(file)


def test_runs_are_chosen_by_id_or_place():
    other = replay.Run("other", "hand-made", ())
    assert replay.select_runs([RUN, other], ["other", "0"]) == [other, RUN]
    assert replay.select_runs([RUN, other], []) == [RUN, other]
    with pytest.raises(ValueError, match=r"nobody.*Take 0 to 1, or: agents"):
        replay.select_runs([RUN, other], ["nobody"])


def compared():
    return [replayed(WordServer(context=11), policy) for policy in (NONE, ROLLING)]


def shown(results):
    console = Console(width=80)
    with console.capture() as capture:
        report.show(RUN, CARD, results, console)
    return capture.get()


def test_the_report_compares_the_rounds_that_all_policies_completed():
    text = shown(compared())
    assert "Sums over the 2 rounds that every policy completed" in text
    assert "A was refused in round 3 (before message 6), context_length_exceeded" in text
    assert "B went through all 3 rounds" in text
    assert "B against A, rounds 1 to 2: KV bytes read +0%" in text


def test_the_report_survives_a_policy_that_completed_no_round():
    refused = replayed(WordServer(context=1))
    assert "Sums over the 0 rounds" in shown([refused, replayed(WordServer(), ROLLING)])
    report.picture(RUN, CARD, [refused])


def test_figures_and_picture_are_saved_under_the_runs_name(tmp_path):
    report.save(RUN, CARD, compared(), 3, tmp_path / "out", Console(quiet=True))
    assert (tmp_path / "out/agents-a-b.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((tmp_path / "out/agents-a-b.json").read_text())
    assert saved["model"] == {"name": "stub", "max_model_len": 100, "kv_bytes_per_token": 10}
    none, rolling = saved["policies"]
    assert none["refusal"]["code"] == "context_length_exceeded"
    assert rolling["refusal"] is None
    assert rolling["totals"]["computed_tokens"] == 12
    assert [round["live_tokens"] for round in rolling["rounds"]] == [4, 8, 10]


def test_the_pictures_axes_have_names_and_units():
    figure = report.picture(RUN, CARD, compared())
    named = [(axes.get_title("left"), axes.get_ylabel()) for axes in figure.axes]
    assert named == [
        ("Live tokens", "tokens"),
        ("Prompt tokens computed", "tokens"),
        ("KV bytes read", "GB"),
        ("Time", "seconds"),
    ]
    assert "agents/a b" in figure.get_suptitle()
