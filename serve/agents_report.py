"""What a run of agents took: a table on the screen, a summary in JSON, and a picture."""

import contextlib
import datetime
import importlib.metadata
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from .agents import HEAD_TOKENS, REUSED_BELOW, Record, Settings
from .topologies import Topology

# Two of Okabe and Ito's colours, which colour-blind eyes tell apart.
BLUE, ORANGE = "#0072B2", "#D55E00"
COLOUR_MAP = "cividis"  # of even lightness, and the same to colour-blind eyes

REUSED_MEANS = (
    "call_level_reuse is the share of calls that computed fewer tokens than these together: "
    f"the static text behind the first shared content, {HEAD_TOKENS} tokens of each content, and "
    f"{REUSED_BELOW:.0%} of the shortest content; lengths are estimated from characters"
)


@contextlib.contextmanager
def progress(console: Console, topology: Topology, tasks: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal; yields what to call after each call."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console,
                  transient=True, disable=not console.is_terminal) as bar:
        calls = bar.add_task(f"{topology.name}, {topology.agents} agents: calls",
                             total=tasks * len(topology.calls))
        yield lambda: bar.advance(calls)


def summary(topology: Topology, settings: Settings, records: Sequence[Record]) -> dict[str, Any]:
    """All figures of finished tasks: of all calls, of the final ones, of each call."""
    rows = [[record for record in records if record.call == call]
            for call in range(len(topology.calls))]
    return {
        "topology": topology.name,
        "agents": topology.agents,
        "settings": asdict(settings),
        "kvfunc": importlib.metadata.version("kvfunc"),
        "date": datetime.date.today().isoformat(),
        "tasks": len(rows[-1]),
        "call_level_reuse_means": REUSED_MEANS,
        "all": figures(records),
        "final": figures(rows[-1]),
        "calls": [{"agent": row[0].agent, "round": call.round, "reads": len(call.reads),
                   **figures(row)} for call, row in zip(topology.calls, rows, strict=True)],
    }


def figures(records: Sequence[Record]) -> dict[str, Any]:
    """Tokens, reuse, times and accuracy of some calls; None where a thing is not known."""
    usages = [record.answer.usage for record in records]
    tokens = {name: sum(getattr(usage, name) for usage in usages) for name in (
        "prompt", "cached", "approximate", "repos", "drop_skipped", "computed", "generated")}
    ttft = [record.answer.ttft_seconds for record in records]
    errors = [record.answer.predicted_error for record in records]
    return {
        "calls": len(records),
        **{f"{name}_tokens": count for name, count in tokens.items()},
        "token_level_reuse": (tokens["cached"] + tokens["approximate"]) / tokens["prompt"],
        "call_level_reuse": _mean([record.reused for record in records]),
        "ttft_p50_seconds": float(np.percentile(ttft, 50)),
        "ttft_p95_seconds": float(np.percentile(ttft, 95)),
        "seconds": sum(record.answer.seconds for record in records),
        "predicted_error": _mean(errors),
        "accuracy": _mean([record.correct for record in records]),
        "parses": _mean([record.parses for record in records]),
    }


def show(topology: Topology, figures: dict[str, Any], console: Console) -> None:
    """Print the table of a `summary`."""
    kind = "accuracy" if figures["final"]["parses"] is None else "parses"
    table = Table(title=_title(figures), title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("agent")
    for name in ("prompt", "cached", "approx.", "comp.", "token\nreuse", "call\nreuse",
                 "TTFT\np50", "TTFT\np95", "right" if kind == "accuracy" else kind):
        table.add_column(name, justify="right", vertical="bottom", no_wrap=True)
    for row in figures["calls"]:
        table.add_row(_row_name(row, topology), *_cells(row, kind))
    table.add_row("all", *_cells(figures["all"], kind))
    console.print(table)
    console.print("Prompt tokens are means of a call; TTFT is in ms.")


def save(topology: Topology, figures: dict[str, Any], records: Sequence[Record], out: Path,
         console: Console) -> None:
    """Write `out`/agents.json and `out`/agents.png, and say so."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "agents.json").write_text(json.dumps(figures, indent=1) + "\n")
    picture(topology, figures, records).savefig(out / "agents.png")
    console.print(f"Picture: {out / 'agents'}.png", soft_wrap=True)
    console.print(f"Figures: {out / 'agents'}.json", soft_wrap=True)


def picture(topology: Topology, figures: dict[str, Any], records: Sequence[Record]) -> Figure:
    """Reuse and TTFT: of each agent over all tasks on the left, of every request on the right."""
    rows = figures["calls"]
    figure = Figure(figsize=(11, 2 + max(2.8, 0.42 * len(rows))), dpi=120, layout="constrained")
    figure.suptitle(_title(figures))
    (reuse, reuse_map), (ttft, ttft_map) = figure.subplots(
        2, 2, sharey=True, gridspec_kw={"width_ratios": (1, 1.7)})
    _draw_reuse(reuse, rows)
    _draw_ttft(ttft, rows)
    for axes in (reuse, ttft):
        axes.set_yticks(range(len(rows)), [_row_name(row, topology) for row in rows])
    _map(reuse_map, "Tokens reused, every request", _grid(records, topology, _reuse), 1.0, "share")
    _map(ttft_map, "TTFT, every request", _grid(records, topology, _ttft), None, "ms")
    return figure


def _draw_reuse(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    at = range(len(rows))
    axes.plot([row["token_level_reuse"] for row in rows], at, "o", color=BLUE, label="of tokens")
    axes.plot([row["call_level_reuse"] for row in rows], at, "D", color=ORANGE, mfc="none",
              label="of calls")
    axes.set_xlim(-0.04, 1.04)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    _finish(axes, "Reuse by agent", "share")


def _draw_ttft(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    p50, p95 = ([1e3 * row[f"ttft_{name}_seconds"] for row in rows] for name in ("p50", "p95"))
    at = range(len(rows))
    axes.hlines(at, p50, p95, color=BLUE, lw=1)
    axes.plot(p50, at, "o", color=BLUE, label="p50")
    axes.plot(p95, at, "D", color=ORANGE, mfc="none", label="p95")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    _finish(axes, "TTFT by agent", "ms")


def _finish(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_xlabel(unit)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    # Beside the title, where it hides nothing.
    axes.legend(loc="lower right", bbox_to_anchor=(1.03, 0.98), ncols=2, frameon=False,
                fontsize="small", columnspacing=1, handletextpad=0.2)


def _map(axes: Axes, title: str, grid: np.ndarray, top: float | None, unit: str) -> None:
    # Two slow requests, such as the first ones, must not leave one colour for all others.
    vmax = top or float(np.nanpercentile(grid, 98))
    calls, tasks = grid.shape
    image = axes.imshow(grid, aspect="auto", interpolation="nearest", cmap=COLOUR_MAP, vmin=0,
                        vmax=vmax, extent=(0.5, tasks + 0.5, calls - 0.5, -0.5))
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_xlabel("task, in order")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.figure.colorbar(image, ax=axes, label=unit, extend="neither" if top else "max")


def _grid(records: Sequence[Record], topology: Topology,
          value: Callable[[Record], float]) -> np.ndarray:
    tasks = {task: place for place, task in enumerate(dict.fromkeys(r.task for r in records))}
    grid = np.full((len(topology.calls), len(tasks)), np.nan)
    for record in records:
        grid[record.call, tasks[record.task]] = value(record)
    return grid


def _reuse(record: Record) -> float:
    usage = record.answer.usage
    return (usage.cached + usage.approximate) / usage.prompt


def _ttft(record: Record) -> float:
    return 1e3 * record.answer.ttft_seconds


def _title(figures: dict[str, Any]) -> str:
    settings = figures["settings"]
    return (f"{figures['topology']} of {figures['agents']} agents on {settings['model']}, mode "
            f"{settings['mode']}, tasks: {figures['tasks']}")


def _row_name(row: dict[str, Any], topology: Topology) -> str:
    rounds = topology.calls[-1].round
    return f"{row['agent']}, round {row['round'] + 1}" if rounds else row["agent"]


def _cells(row: dict[str, Any], kind: str) -> list[str]:
    tokens = [f"{row[f'{name}_tokens'] / row['calls']:,.0f}"
              for name in ("prompt", "cached", "approximate", "computed")]
    times = [f"{1e3 * row[f'ttft_{name}_seconds']:,.0f}" for name in ("p50", "p95")]
    shares = [f"{row[name]:.0%}" for name in ("token_level_reuse", "call_level_reuse", kind)]
    return [*tokens, *shares[:2], *times, shares[2]]


def _mean(values: Sequence[float | bool | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
