"""What the host does before a long, much edited request can run, without any device.

Work: a history with an event every 128 tokens (four drops, then a repos), all of whose KV but that
of the last 512 tokens is resident. Planning it means compiling its events, finding what is resident
in the tree, the queries to compute, what becomes of every token (the usage counters), admission,
and the rows of the first chunk. Limit asked for: 20 ms for 128,000 tokens and 1,000 events, and
linear growth.
"""

import time

import numpy as np
from common import report

from kvfunc.history import Drop, Event, History, Repos
from kvfunc.serve.eviction import by_worth
from kvfunc.serve.interface import Job, Sampling
from kvfunc.serve.pages import Pages
from kvfunc.serve.radix import Tree
from kvfunc.serve.scheduler import Scheduler
from kvfunc.serve.sequence import Sequence

EVERY, CHUNK, PAGE = 128, 512, 16


def events_of(tokens: int) -> list[Event]:
    """An event every EVERY tokens: drops of half a stretch, each fifth a repos."""
    made: list[Event] = []
    for number, at in enumerate(range(EVERY, tokens, EVERY)):
        start = at - EVERY
        made.append(Repos(at) if number % 5 == 4 else Drop(at, ((start, start + EVERY // 2),)))
    return made


def timed(steps: dict[str, float], name: str, function):
    """Call it, and note the seconds."""
    start = time.perf_counter()
    result = function()
    steps[name] = time.perf_counter() - start
    return result


def plan(tokens: int) -> tuple[int, dict[str, float]]:
    """How many events there are, and the seconds of each part."""
    events = events_of(tokens)
    ids = np.random.default_rng(0).integers(1000, 40000, tokens).astype(np.int32)
    pages = Pages(tokens // PAGE + 64, PAGE)
    tree = Tree(pages, by_worth)
    scheduler = Scheduler(pages, tree, lanes=1, sizes=[1, CHUNK], rows=1 << 20, most_rows=1 << 20)
    resident = tokens - CHUNK
    slots = pages.take(-(-resident // PAGE))
    tree.insert("", ids[:resident], History(tokens, events), slots[:resident])
    pages.release(slots)
    steps: dict[str, float] = {}
    history = timed(steps, "events", lambda: History(tokens, events))
    sequence = timed(steps, "request", lambda: Sequence(
        Job(ids, history, "", 256, Sampling(seed=0)), lambda _: None, 0))
    scheduler.add(sequence)
    work = timed(steps, "admission and first chunk", scheduler.plan)
    assert len(work) == 1 and sequence.usage is not None
    return len(history.events), steps


def main() -> None:
    rows = []
    for tokens in (16_000, 32_000, 64_000, 128_000, 256_000, 512_000):
        runs = [plan(tokens) for _ in range(7)]
        steps = {name: 1e3 * float(np.median([seconds[name] for _, seconds in runs]))
                 for name in runs[0][1]}
        total = sum(steps.values())
        rows.append([tokens, runs[0][0], *steps.values(), total, 1e3 * total / tokens])
    report("planning", "Planning a request on the host",
           ["tokens", "events", *(f"{name} ms" for name in steps), "total ms",
            "us a token"], rows, limit_ms_at_128000=20)


if __name__ == "__main__":
    main()
