"""What the host does before a long, much edited request can run, without any device.

Work: a history with an event every 128 tokens (four drops, then a repos), all of whose KV but that
of the last 512 tokens is resident. Planning it means compiling its events, the queries to compute,
what becomes of every token (the usage counters), and the rows of the first chunk; limit asked for:
20 ms for 128,000 tokens and 1,000 events, and linear growth. Admission does the same once more and
besides finds what is resident in the tree, holds it, and makes room. Times are the least of nine:
the machine is shared.
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
    missing = np.arange(tokens) >= resident
    queries = timed(steps, "queries", lambda: history.needed(missing, [tokens - 1]))
    timed(steps, "counters", lambda: history.classify(queries))
    timed(steps, "rows", lambda: history.rows(queries[:CHUNK], np.arange(tokens, dtype=np.int32)))
    sequence = Sequence(Job(ids, history, "", 256, Sampling(seed=0)), lambda _: None, 0)
    scheduler.add(sequence)
    work = timed(steps, "admission", scheduler.plan)
    assert len(work) == 1 and sequence.usage is not None
    return len(history.events), steps


def main() -> None:
    rows = []
    for tokens in (16_000, 32_000, 64_000, 128_000, 256_000, 512_000):
        runs = [plan(tokens) for _ in range(9)]
        steps = {name: 1e3 * min(seconds[name] for _, seconds in runs) for name in runs[0][1]}
        planning = sum(steps.values()) - steps["admission"]
        rows.append([tokens, runs[0][0], *steps.values(), planning, 1e3 * planning / tokens])
    report("planning", "Planning a request on the host",
           ["tokens", "events", *(f"{name} ms" for name in steps), "planning ms", "us a token"],
           rows, limit_ms_at_128000=20)


if __name__ == "__main__":
    main()
