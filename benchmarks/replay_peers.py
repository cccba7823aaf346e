"""An agent run longer than the context: KV edited by ours, old text deleted for other servers.

Work: a recorded run, as `kvfunc replay` sends it: round by round, each asks for 16 tokens behind
the recorded history, which goes on with the recorded message. Every server keeps the newest tool
outputs and loses the older:
  edited: ours, with the policy rolling_tool_outputs and reposition, on the whole history.
  deleted: the text of each older tool output is replaced by a placeholder, in every round. What
    stands behind it has to be computed again; what stands before is found by the prefix cache.
  deleted when full: the same, but only in the round that would not fit the context otherwise, so
    that the rounds between extend each other; at the price of a longer context.
Tokens in the middle of a history are what the first can spare and the others cannot. Systems take
turns, round by round, in an order that rotates; all are resident, and all but one stopped. Each
contender's first message begins with digits of its own: nothing is found that another one left.
"""

import argparse
import asyncio
import contextlib
import pathlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from common import report
from matplotlib.figure import Figure
from peers import Answer, System, add_arguments, ask, client, plain, systems
from rich.console import Console
from rich.progress import Progress

from kvfunc.models.chat import ChatTemplate
from kvfunc.models.load import embedded_path
from kvfunc.models.load_gguf import open_gguf
from kvfunc.models.tokenizer import Tokenizer
from kvfunc.serve.replay import Policy, read_runs, select_runs

CONTEXT = 8192
PLACEHOLDER = "[deleted]"
# Okabe and Ito's colours, which colour-blind eyes tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

Messages = list[dict[str, str]]
Edit = Callable[[Messages], Messages]


def deleted(messages: Messages, count: int) -> Messages:
    """The history without the text of its first `count` tool outputs."""
    tools = [place for place, message in enumerate(messages) if message["role"] == "tool"]
    return [{**message, "content": PLACEHOLDER} if place in tools[:count] else message
            for place, message in enumerate(messages)]


def each_round(keep: int) -> Edit:
    """Delete all tool outputs but the newest `keep`."""
    def edit(messages: Messages) -> Messages:
        return deleted(messages, max(0, _tools(messages) - keep))

    return edit


def when_full(keep: int, tokens: Callable[[Messages], int], room: int) -> Edit:
    """Delete all but the newest `keep` once the history has more than `room` tokens."""
    count = 0

    def edit(messages: Messages) -> Messages:
        nonlocal count
        if tokens(deleted(messages, count)) > room:
            count = max(0, _tools(messages) - keep)
        return deleted(messages, count)

    return edit


def _tools(messages: Messages) -> int:
    return sum(message["role"] == "tool" for message in messages)


@dataclass
class Contender:
    """A way to go through the run on one system, and how its rounds went."""

    system: System
    way: str
    edit: Edit
    cache: dict[str, Any] = field(default_factory=dict)
    mark: str = ""
    answers: list[Answer] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.system.name}: {self.way}"

    async def round(self, http: httpx.AsyncClient, messages: Messages, max_tokens: int) -> None:
        """One request, and its answer kept."""
        first, *rest = self.edit(messages)
        first = {**first, "content": f"{self.mark} {first['content']}"}
        with self.system.awake():
            self.answers.append(
                await ask(http, self.system, [first, *rest], max_tokens, self.cache))


def token_counter() -> Callable[[Messages], int]:
    """Length of a prompt, in tokens."""
    reader = open_gguf(embedded_path())
    chat = ChatTemplate.from_gguf(reader, Tokenizer.from_gguf(reader))
    return lambda messages: len(chat.render(messages).tokens)


def contenders(found: Sequence[System], args: argparse.Namespace,
               tokens: Callable[[Messages], int]) -> list[Contender]:
    """The first is the one that the others are held against."""
    policy = Policy("rolling_tool_outputs", args.keep, args.reposition_above_tokens)
    made = []
    for system in found:
        if system.ours:
            made.append(Contender(system, "edited", lambda messages: messages, policy.cache))
        if not system.ours or args.ours_deleted:
            made.append(Contender(system, "deleted", each_round(args.keep)))
            # The mark in front of the first message takes some tokens too.
            full = when_full(args.keep, tokens, CONTEXT - args.max_tokens - 16)
            made.append(Contender(system, "deleted when full", full))
    for contender in made:
        contender.mark = f"{random.randrange(10**8):08}"
    return made


async def replay(run: list[Messages], made: list[Contender], max_tokens: int,
                 tick: Callable[[], None]) -> None:
    """All rounds, each by all contenders before the next."""
    async with client() as http:
        for number, messages in enumerate(run):
            turn = number % len(made)
            for contender in made[turn:] + made[:turn]:
                await contender.round(http, messages, max_tokens)
                tick()


def seconds_of(contender: Contender) -> list[float]:
    """Seconds of each round."""
    return [answer.end - answer.start for answer in contender.answers]


def picture(made: Sequence[Contender], title: str) -> Figure:
    """Time of each round, and of all rounds so far."""
    figure = Figure(figsize=(10, 3.8), dpi=120, layout="constrained")
    figure.suptitle(title)
    each, summed = figure.subplots(1, 2, sharex=True)
    for contender, colour in zip(made, COLOURS, strict=False):
        seconds = seconds_of(contender)
        rounds = range(1, len(seconds) + 1)
        style = {"color": colour, "marker": "o", "ms": 3, "label": contender.name}
        each.plot(rounds, seconds, **style)
        summed.plot(rounds, np.cumsum(seconds), **style)
    for axes, name in ((each, "Time of each round"), (summed, "Time of all rounds so far")):
        axes.set_title(name, loc="left", fontsize="medium")
        axes.set_xlabel("round (one request each)")
        axes.set_ylabel("seconds")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = each.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=pathlib.Path, help="agent runs, one JSON object a line")
    parser.add_argument("--run", default="airline-2-1", help="a run's id")
    parser.add_argument("--rounds", type=int, help="stop after so many; default: all")
    parser.add_argument("--max-tokens", type=int, default=16, help="tokens of each round")
    parser.add_argument("--keep", type=int, default=4, help="tool outputs that stay")
    parser.add_argument("--reposition-above-tokens", type=int, default=4096)
    parser.add_argument("--ours-deleted", action="store_true",
                        help="let ours go through the deleted text too")
    parser.add_argument("--picture", type=pathlib.Path, help="where to draw the rounds, as PNG")
    add_arguments(parser)
    args = parser.parse_args()
    console = Console()
    (run,) = select_runs(read_runs(args.runs), [args.run])
    tokens = token_counter()
    rounds = [plain(run.messages[:message]) for message in run.rounds[:args.rounds]]
    with contextlib.ExitStack() as stack:
        with console.status("starting the servers"):
            found = stack.enter_context(systems(args))
        progress = stack.enter_context(Progress(console=console))
        # Before it counts, under other marks: a server may have yet to compile.
        rehearsal = contenders(found, args, tokens)
        task = progress.add_task("warming up", total=2 * len(rehearsal))
        asyncio.run(replay(rounds[:2], rehearsal, args.max_tokens, lambda: progress.advance(task)))
        made = contenders(found, args, tokens)
        task = progress.add_task(run.id, total=len(rounds) * len(made))
        asyncio.run(replay(rounds, made, args.max_tokens, lambda: progress.advance(task)))
    rows, first = [], sum(seconds_of(made[0]))
    for contender in made:
        seconds = seconds_of(contender)
        ttft = [answer.first for answer in contender.answers]
        prompts = [answer.prompt for answer in contender.answers]
        cached = [answer.cached for answer in contender.answers]
        rows.append([contender.name, sum(seconds), sum(seconds) / first,
                     *(float(np.quantile(ttft, at)) for at in (0.5, 0.95)),
                     float(np.median(seconds)), max(seconds), sum(prompts), max(prompts),
                     None if None in cached else sum(prompts) - sum(cached)])
    title = (f"{run.id}: {len(rounds)} rounds of {args.max_tokens} tokens, "
             f"keeping {args.keep} tool outputs")
    report("replay_peers", title,
           ["", "seconds", "/ first", "TTFT p50 s", "TTFT p95 s", "round p50 s", "longest round s",
            "prompt tokens", "longest prompt", "computed tokens"], rows,
           keep=args.keep, reposition_above_tokens=args.reposition_above_tokens,
           placeholder=PLACEHOLDER, ours=args.ours_args or [""],
           round_seconds={contender.name: seconds_of(contender) for contender in made})
    if args.picture:
        picture(made, title).savefig(args.picture)


if __name__ == "__main__":
    main()
