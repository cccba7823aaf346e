"""What is best evicted first: interleaved agent runs under tight memory, policy after policy.

Work: real agent runs, each with rolling tool outputs (keep 4) and reposition, through the server's
own scheduler, tree and pages; only the device is left out, since what must be computed again does
not depend on it. The pool holds a fifth of what the runs hold at their ends. Three ways of
interleaving: every run in turn; a random run each time; and random runs of which a few are alive at
any time, as when agents come and go.

Figures: tokens computed, and their work (a token's attention grows with its context), over what an
endless pool would take.
"""

import argparse
import pathlib
import random

import numpy as np
from common import report
from rich.progress import track

from kvfunc import models
from kvfunc.history import History
from kvfunc.policies import rolling_tool_outputs
from kvfunc.serve import events as message_events
from kvfunc.serve.eviction import POLICIES
from kvfunc.serve.interface import Job, Sampling
from kvfunc.serve.pages import Pages
from kvfunc.serve.radix import Tree
from kvfunc.serve.replay import read_runs
from kvfunc.serve.scheduler import Scheduler
from kvfunc.serve.sequence import Sequence

ANSWER, CHUNK, ROUNDS, PAGE = 16, 512, 20, 16
DOUBLING = 3072  # SmolLM2-135M
ALIVE = 8


def prompts(path: pathlib.Path, count: int) -> list[list[Job]]:
    """For each run, the requests of its rounds."""
    chat, policy = models.load().chat, rolling_tool_outputs(4, 4096)
    made = []
    for run in track(read_runs(path)[:count], "reading runs"):
        jobs = []
        for message in run.rounds[:ROUNDS]:
            messages = run.messages[:message]
            rendered = chat.render(messages)
            schedule = policy(message_events.units(messages, rendered.owner))
            events = message_events.events(schedule, len(messages), rendered.owner)
            history = History(len(rendered.tokens), events)
            jobs.append(Job(rendered.tokens, history, "", ANSWER, Sampling()))
        made.append(jobs)
    return made


def in_turn(runs: list[list[Job]]) -> list[Job]:
    """Round after round of all."""
    return [run[i] for i in range(ROUNDS) for run in runs if i < len(run)]


def at_random(runs: list[list[Job]], alive: int | None = None) -> list[Job]:
    """The next round of a random run, among those that are alive."""
    rng, waiting = random.Random(0), [[*reversed(run)] for run in runs]
    present = [waiting.pop() for _ in range(min(alive or len(waiting), len(waiting)))]
    order = []
    while present:
        run = rng.choice(present)
        order.append(run.pop())
        if not run:
            present.remove(run)
            present += [waiting.pop()] if waiting else []
    return order


class Replay:
    """Requests one after the other through a scheduler whose device computes nothing."""

    def __init__(self, slots: int, policy):
        pages = Pages(slots // PAGE, PAGE)
        self.scheduler = Scheduler(pages, Tree(pages, policy, DOUBLING), lanes=1, sizes=[1, CHUNK],
                                   rows=1 << 20, most_rows=1 << 20)
        self.work = 0.0
        self.number = 0
        self.rng = np.random.default_rng(0)

    def run(self, job: Job) -> None:
        """One request, until its answer is complete."""
        sequence = Sequence(job, lambda _: None, self.number)
        self.number += 1
        scheduler = self.scheduler
        scheduler.add(sequence)
        while sequence.generated < job.max_tokens:
            work = scheduler.plan()
            assert not scheduler.ended
            for part in work:
                births = sequence.history.births[part.queries]
                self.work += float((1 + births / DOUBLING).sum())
            scheduler.done(work)
            if work[0].is_last:
                sequence.append(int(self.rng.integers(1000, 40000)))
        scheduler.remove(sequence)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=pathlib.Path, help="agent runs, one JSON object a line")
    parser.add_argument("--count", type=int, default=30, help="how many of them")
    args = parser.parse_args()
    runs = prompts(args.runs, args.count)
    total = sum(run[-1].history.live + ANSWER for run in runs)
    rows = []
    for name, order in (("in turn", in_turn(runs)), ("at random", at_random(runs)),
                        (f"{ALIVE} at a time", at_random(runs, ALIVE))):
        endless = Replay(8 * sum(run[-1].history.tokens for run in runs), POLICIES["lru"])
        for job in track(order, f"{name}, endless pool"):
            endless.run(job)
        for policy in POLICIES:
            replay = Replay(total // 5, POLICIES[policy])
            for job in track(order, f"{name}, {policy}"):
                replay.run(job)
            counters = replay.scheduler.counters
            rows.append([name, policy, counters.computed,
                         counters.computed / endless.scheduler.counters.computed,
                         replay.work / endless.work, counters.recovered])
    report("eviction", f"{len(runs)} agent runs, {total // 5} slots of {total} live tokens",
           ["order", "policy", "computed tokens", "computed / endless", "work / endless",
            "recovered"], rows)


if __name__ == "__main__":
    main()
