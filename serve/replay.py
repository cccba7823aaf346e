"""`kvfunc replay`: recorded agent runs through a server, one request a round, under a policy.

A round is the history up to just before a recorded assistant message. The request's answer is
thrown away and the recorded message goes on into the history, so that every policy is measured on
the same text.

Live tokens come from the server's plan (`explain`), asked for before each round: the usage
counters alone cannot tell them, since a dropped token that a computed query still reads is counted
as cached or repositioned. **KV bytes read** are counted, not measured. A decode step reads the keys
and values of every live token: live tokens times the model's KV bytes per token (`/v1/models`). A
round reads so much once for its prompt, the least that any chunking can do, and again, one token
longer each time, for every generated token but the first, which the prompt's last query gives. The
count is for `max_tokens` tokens, and the server is asked not to stop before (`ignore_eos`): answers
of different lengths would hide what the policies differ in.
"""

import json
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .client import Client, Message, Refused


@dataclass(frozen=True)
class Run:
    """A recorded agent run."""

    id: str
    source: str
    messages: tuple[Message, ...]

    @property
    def rounds(self) -> list[int]:
        """The messages to be answered: every assistant message that has a history."""
        roles = [message["role"] for message in self.messages]
        return [index for index, role in enumerate(roles) if role == "assistant" and index]


@dataclass(frozen=True)
class Policy:
    """How the server keeps the history short (api.md, `policy`)."""

    name: str
    keep: int
    reposition_above_tokens: int | None

    def __str__(self) -> str:
        if self.name == "none":
            return "none"
        above = self.reposition_above_tokens
        closing = "never repositioned" if above is None else f"reposition above {above:,} tokens"
        return f"{self.name}, keep {self.keep}, {closing}"

    @property
    def cache(self) -> dict[str, Any]:
        """The request's `cache` object."""
        if self.name == "none":
            return {}
        policy: dict[str, Any] = {"type": self.name, "keep": self.keep}
        if self.reposition_above_tokens is not None:
            policy["reposition_above_tokens"] = self.reposition_above_tokens
        return {"policy": policy}


@dataclass(frozen=True)
class Round:
    """What one request took. Tokens are of the prompt, except those generated."""

    round: int
    message: int
    prompt_tokens: int
    live_tokens: int
    computed_tokens: int
    cached_tokens: int
    repos_tokens: int
    drop_skipped_tokens: int
    generated_tokens: int
    kv_bytes_per_step: int
    kv_bytes_read: int
    seconds: float


@dataclass(frozen=True)
class Refusal:
    """The round that the server refused, and why."""

    round: int
    message: int
    code: str
    reason: str


@dataclass(frozen=True)
class Replayed:
    """One run under one policy."""

    policy: Policy
    rounds: tuple[Round, ...]
    refusal: Refusal | None
    warnings: tuple[str, ...] = ()
    """The server's, on the last round that it planned."""


def read_runs(path: Path) -> list[Run]:
    """Read agent runs, one JSON object a line. Raises ValueError naming the line that is none."""
    runs = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            run = json.loads(line)
            runs.append(Run(run["id"], run["source"], tuple(run["messages"])))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number}: not an agent run ({error!r}). "
                'Each line is an object {"id", "source", "messages"}.'
            ) from error
    return runs


def select_runs(runs: Sequence[Run], wanted: Sequence[str]) -> list[Run]:
    """The runs of these ids or places, all if none is wanted. Raises ValueError on any other."""
    known = {str(place): run for place, run in enumerate(runs)} | {run.id: run for run in runs}
    for name in wanted:
        if name not in known:
            ids = ", ".join(run.id for run in runs)
            raise ValueError(f"--run {name!r}: no such run. Take 0 to {len(runs) - 1}, or: {ids}")
    return [known[name] for name in wanted] or list(runs)


def kv_tokens_read(live: int, generated: int) -> int:
    """Live tokens that a round reads, summed over its passes (module docstring)."""
    return sum(range(live, live + generated))


def replay_run(
    client: Client,
    run: Run,
    policy: Policy,
    *,
    rounds: int | None = None,
    max_tokens: int = 16,
    kv_bytes_per_token: int,
    tick: Callable[[], None] = lambda: None,
) -> Replayed:
    """Replay `run` under `policy` until its end, `rounds`, or a refusal; `tick` every round.

    A namespace of its own (`salt`) lets every policy begin with nothing cached.
    """
    cache = {**policy.cache, "salt": f"replay-{uuid.uuid4()}"}
    done: list[Round] = []
    warnings: tuple[str, ...] = ()
    for number, message in enumerate(run.rounds[:rounds], 1):
        history = run.messages[:message]
        try:
            plan = client.plan(history, cache)
            start = time.perf_counter()
            usage = client.complete(history, cache, max_tokens=max_tokens, ignore_eos=True)
            seconds = time.perf_counter() - start
        except Refused as refusal:
            refused = Refusal(number, message, refusal.code, str(refusal))
            return Replayed(policy, tuple(done), refused, warnings)
        live, warnings = plan["live_tokens"], tuple(plan["warnings"])
        done.append(
            Round(
                round=number,
                message=message,
                prompt_tokens=usage.prompt,
                live_tokens=live,
                computed_tokens=usage.computed,
                cached_tokens=usage.cached,
                repos_tokens=usage.repos,
                drop_skipped_tokens=usage.drop_skipped,
                generated_tokens=usage.generated,
                kv_bytes_per_step=live * kv_bytes_per_token,
                kv_bytes_read=kv_tokens_read(live, max_tokens) * kv_bytes_per_token,
                seconds=seconds,
            )
        )
        tick()
    return Replayed(policy, tuple(done), None, warnings)


def replay(
    client: Client,
    run: Run,
    policies: Iterable[Policy],
    console: Console,
    *,
    rounds: int | None = None,
    max_tokens: int = 16,
    kv_bytes_per_token: int,
) -> list[Replayed]:
    """Replay `run` under one policy after the other, with a progress bar."""
    total = len(run.rounds[:rounds])
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    replayed = []
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        for policy in policies:
            start = time.perf_counter()
            task = progress.add_task(f"{run.id}: {policy.name}", total=total)
            one = replay_run(
                client,
                run,
                policy,
                rounds=rounds,
                max_tokens=max_tokens,
                kv_bytes_per_token=kv_bytes_per_token,
                tick=lambda task=task: progress.advance(task),
            )
            seconds = time.perf_counter() - start
            console.print(
                f"{run.id}, {policy.name}: {len(one.rounds)} of {total} rounds, {seconds:.0f} s"
            )
            replayed.append(one)
    return replayed
