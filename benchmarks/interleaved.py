"""Agents that share too little memory: is every answer what it is with nothing cached?

Work: real agent runs, all at once, in float32. Each waits for its answer before its next round;
rolling tool outputs (keep 1) with reposition drop and close gaps on the way. The pool holds a fifth
of what the runs hold at their ends, so that KV is evicted and recovered all the time and requests
make way for others. Then every request is sent again to the emptied engine, alone: the peer, and
the answers to compare with.
"""

import argparse
import pathlib
import time

import jax.numpy as jnp
from common import report
from rich.progress import Progress

from kvfunc import models
from kvfunc.history import History
from kvfunc.models.chat import ChatTemplate
from kvfunc.policies import rolling_tool_outputs
from kvfunc.serve import events as message_events
from kvfunc.serve.engine import Engine
from kvfunc.serve.eviction import POLICIES
from kvfunc.serve.interface import End, Job, Sampling
from kvfunc.serve.replay import Run, read_runs

ANSWER = 8


def jobs_of(run: Run, rounds: int, chat: ChatTemplate) -> list[Job]:
    """The requests of a run's rounds."""
    policy, jobs = rolling_tool_outputs(1, 1536), []
    for message in run.rounds[:rounds]:
        messages = run.messages[:message]
        rendered = chat.render(messages)
        schedule = policy(message_events.units(messages, rendered.owner))
        history = History(len(rendered.tokens), message_events.events(
            schedule, len(messages), rendered.owner))
        jobs.append(Job(rendered.tokens, history, run.id, ANSWER, Sampling(temperature=0.0)))
    return jobs


class Agent:
    """Sends its next request when the one before is answered."""

    def __init__(self, engine: Engine, jobs: list[Job], done):
        self._engine, self._left, self._done = engine, [*reversed(jobs)], done
        self.answers: list[list[int]] = []
        self._next()

    def _next(self) -> None:
        if self._left:
            self.answers.append([])
            self._engine.submit(self._left.pop(), self._deliver)

    def _deliver(self, what) -> None:
        if not isinstance(what, End):
            self.answers[-1].append(what.id)
            return
        if what.error is not None:
            raise what.error
        self._done()
        self._next()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=pathlib.Path, help="agent runs, one JSON object a line")
    parser.add_argument("--count", type=int, default=30, help="how many of them")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of each")
    parser.add_argument("--policy", choices=list(POLICIES), default="worth")
    args = parser.parse_args()
    model = models.load(dtype=jnp.float32)
    runs = [jobs_of(run, args.rounds, model.chat) for run in read_runs(args.runs)[:args.count]]
    live = sum(run[-1].history.live + ANSWER for run in runs)
    engine = Engine(model, kv_tokens=live // 5, policy=args.policy)
    requests = sum(map(len, runs))
    rows = []

    def note(name: str, seconds: float) -> None:
        counters = engine.counters
        rows.append([name, seconds, counters.computed, counters.recovered, counters.evicted,
                     counters.preempted])

    with Progress() as progress:
        compiling = progress.add_task("compiling", total=None)
        engine.warm_up(lambda what, done, total: progress.update(
            compiling, description=f"compiled: {what}", completed=done, total=total))
        task = progress.add_task("all at once", total=requests)
        start = time.perf_counter()
        agents = [Agent(engine, jobs, lambda: progress.advance(task)) for jobs in runs]
        while engine.step():
            pass
        note("all at once", time.perf_counter() - start)

        task = progress.add_task("each alone, nothing cached", total=requests)
        engine.scheduler.counters.__init__()
        start = time.perf_counter()
        cold = []
        for jobs in runs:
            cold.append([])
            for job in jobs:
                engine.clear()
                agent = Agent(engine, [job], lambda: progress.advance(task))
                while engine.step():
                    pass
                cold[-1] += agent.answers
        note("each alone, nothing cached", time.perf_counter() - start)

    equal = sum(one == other for agent, mine in zip(agents, cold, strict=True)
                for one, other in zip(agent.answers, mine, strict=True))
    report("interleaved", f"{len(runs)} agent runs, {engine.kv_tokens:,} slots for {live:,} live "
           f"tokens, float32: {equal} of {requests} answers equal their cold answers",
           ["", "seconds", "computed", "recovered", "evicted", "preempted"], rows,
           equal_answers=equal, requests=requests, slots=engine.kv_tokens, policy=args.policy)
    if equal != requests:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
