"""Planning a long, much edited request on the host takes work in proportion to its length."""

import sys

import numpy as np

from kvfunc.history import Drop, History, Repos
from kvfunc.serve.interface import Job, Sampling
from kvfunc.serve.pages import Pages
from kvfunc.serve.radix import Tree
from kvfunc.serve.scheduler import Scheduler
from kvfunc.serve.sequence import Sequence


def calls_of(function):
    """How many calls of Python and of C it makes."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def calls_of_planning(events):
    every, chunk, page = 64, 128, 16
    tokens, made = every * events, []
    for number, at in enumerate(range(every, tokens, every)):
        made.append(Repos(at) if number % 5 == 4 else Drop(at, ((at - every, at - every // 2),)))
    ids = np.arange(tokens, dtype=np.int32)
    pages = Pages(tokens // page + 64, page)
    tree = Tree(pages)
    slots = pages.take((tokens - chunk) // page)
    tree.insert("", ids[:-chunk], History(tokens, made), slots)
    pages.release(slots)
    scheduler = Scheduler(pages, tree, lanes=1, sizes=[1, chunk], rows=1 << 16, most_rows=1 << 16)

    def plan():
        job = Job(ids, History(tokens, made), "", 8, Sampling())
        scheduler.add(Sequence(job, print, 0))
        (work,) = scheduler.plan()
        assert len(work.queries) == chunk and len(scheduler.running[0].history.events) > events / 2

    return calls_of(plan)


def test_twice_the_tokens_and_events_make_about_twice_the_calls():
    calls_of_planning(20)  # imports, and what is cached for ever
    few, many = calls_of_planning(200), calls_of_planning(400)
    assert 1.5 * few < many < 2.3 * few
