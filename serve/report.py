"""What a replay took: tables on the screen, figures in JSON, and a picture."""

import datetime
import importlib.metadata
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from .client import Card
from .replay import Replayed, Round, Run

# Two of Okabe and Ito's colours, which colour-blind eyes tell apart; a policy each.
COLOURS = ("#D55E00", "#0072B2")
GREY = "#777777"
LETTERS = "AB"


def totals(rounds: Sequence[Round]) -> dict[str, int | float]:
    """Sums over rounds: tokens sent, computed and generated, KV bytes read, seconds."""
    names = ("prompt_tokens", "computed_tokens", "generated_tokens", "kv_bytes_read", "seconds")
    return {name: sum(getattr(round, name) for round in rounds) for name in names}


def show(run: Run, card: Card, replayed: Sequence[Replayed], console: Console) -> None:
    """Print the rounds of all policies side by side, the refusals, and what was saved."""
    console.rule(f"{run.id} ({run.source}) on {card.name}")
    for letter, one in zip(LETTERS, replayed, strict=False):
        console.print(f"{letter}: {one.policy}")
    console.print(_rounds_table(replayed))
    console.print()
    console.print(_totals_table(replayed))
    for letter, one in zip(LETTERS, replayed, strict=False):
        console.print(f"{letter} {_ending(one)}")
    for warning in dict.fromkeys(warning for one in replayed for warning in one.warnings):
        console.print(f"The server warns: {warning}")
    console.print(_saving(replayed))


def save(
    run: Run,
    card: Card,
    replayed: Sequence[Replayed],
    max_tokens: int,
    out: Path,
    console: Console,
) -> None:
    """Write `out`/RUN.json and `out`/RUN.png, and say so."""
    out.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^\w.-]+", "-", run.id)
    figures = {
        "run": run.id,
        "source": run.source,
        "model": asdict(card),
        "max_tokens": max_tokens,
        "kvfunc": importlib.metadata.version("kvfunc"),
        "date": datetime.date.today().isoformat(),
        "policies": [
            {
                "policy": str(one.policy),
                "cache": one.policy.cache,
                "totals": totals(one.rounds),
                "refusal": asdict(one.refusal) if one.refusal else None,
                "warnings": one.warnings,
                "rounds": [asdict(round) for round in one.rounds],
            }
            for one in replayed
        ],
    }
    (out / f"{stem}.json").write_text(json.dumps(figures, indent=1) + "\n")
    picture(run, card, replayed).savefig(out / f"{stem}.png")
    console.print(f"Picture: {out / stem}.png", soft_wrap=True)
    console.print(f"Figures: {out / stem}.json", soft_wrap=True)


def picture(run: Run, card: Card, replayed: Sequence[Replayed]) -> Figure:
    """Four panels over the rounds: live tokens, computed tokens, KV bytes read, time."""
    figure = Figure(figsize=(10, 6.4), dpi=120, layout="constrained")
    figure.suptitle(f"Agent run {run.id} ({len(run.messages)} messages) on {card.name}")
    live, computed, read, seconds = figure.subplots(2, 2, sharex=True).flat
    longest = max(replayed, key=lambda one: len(one.rounds)).rounds
    x = [round.round for round in longest]
    live.plot(x, [round.prompt_tokens for round in longest], ":", color=GREY, label="whole history")
    live.axhline(card.max_model_len, color=GREY, lw=1)
    live.annotate(
        f"the model's context, {card.max_model_len:,}",
        (0, card.max_model_len),
        xycoords=("axes fraction", "data"),
        xytext=(6, 4),
        textcoords="offset points",
        color=GREY,
        fontsize="small",
    )
    for one, colour, width in zip(replayed, COLOURS, (3, 1.5), strict=False):
        x = [round.round for round in one.rounds]
        style = {"color": colour, "lw": width, "marker": "o", "ms": width + 1.5}
        style["label"] = f"policy {one.policy}"
        live.plot(x, [round.live_tokens for round in one.rounds], **style)
        computed.plot(x, [round.computed_tokens for round in one.rounds], **style)
        read.plot(x, [round.kv_bytes_read / 1e9 for round in one.rounds], **style)
        seconds.plot(x, [round.seconds for round in one.rounds], **style)
        if one.refusal:
            _mark_refusal(live, one.refusal.round, longest, card, colour)
    _label(live, "Live tokens", "tokens")
    _label(computed, "Prompt tokens computed", "tokens")
    _label(read, "KV bytes read", "GB")
    _label(seconds, "Time", "seconds")
    for axes in (read, seconds):
        axes.set_xlabel("round (one request each)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    handles, labels = live.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    return figure


def _rounds_table(replayed: Sequence[Replayed]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    names = ["round", "prompt"]
    for letter, _ in zip(LETTERS, replayed, strict=False):
        names += [f"{letter} live", "computed", "KV GB", "secs"]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for place in range(max(len(one.rounds) + bool(one.refusal) for one in replayed)):
        prompts = [one.rounds[place].prompt_tokens for one in replayed if place < len(one.rounds)]
        row = [str(place + 1), f"{prompts[0]:,}" if prompts else ""]
        for one in replayed:
            if place < len(one.rounds):
                round = one.rounds[place]
                row += [f"{round.live_tokens:,}", f"{round.computed_tokens:,}"]
                row += [f"{round.kv_bytes_read / 1e9:.2f}", f"{round.seconds:.2f}"]
            else:
                row += ["refused" if place == len(one.rounds) and one.refusal else "", "", "", ""]
        table.add_row(*row)
    return table


def _completed_by_all(replayed: Sequence[Replayed]) -> int:
    return min(len(one.rounds) for one in replayed)


def _totals_table(replayed: Sequence[Replayed]) -> Table:
    count = _completed_by_all(replayed)
    title = f"Sums over the {count} rounds that every policy completed"
    table = Table(title=title, title_justify="left", box=None)
    for name in ("", "tokens sent", "computed", "generated", "KV bytes read", "time"):
        table.add_column(name, justify="right")
    for letter, one in zip(LETTERS, replayed, strict=False):
        total = totals(one.rounds[:count])
        tokens = (f"{total[f'{key}_tokens']:,}" for key in ("prompt", "computed", "generated"))
        size = decimal(int(total["kv_bytes_read"]))
        table.add_row(letter, *tokens, size, f"{total['seconds']:.1f} s")
    return table


def _ending(one: Replayed) -> str:
    if one.refusal is None:
        return f"went through all {len(one.rounds)} rounds"
    place = f"round {one.refusal.round} (before message {one.refusal.message})"
    return f"was refused in {place}, {one.refusal.code}: {one.refusal.reason}"


def _saving(replayed: Sequence[Replayed]) -> str:
    count = _completed_by_all(replayed)
    if len(replayed) < 2 or not count:
        return ""
    before, after = (totals(one.rounds[:count]) for one in replayed)
    change = {key: after[key] / before[key] - 1 for key in ("kv_bytes_read", "seconds")}
    return (
        f"B against A, rounds 1 to {count}: "
        f"KV bytes read {change['kv_bytes_read']:+.0%}, time {change['seconds']:+.0%}"
    )


def _mark_refusal(axes: Axes, at: int, longest: Sequence[Round], card: Card, colour: str) -> None:
    tokens = longest[at - 1].prompt_tokens if at <= len(longest) else card.max_model_len
    axes.plot([at], [tokens], "X", color=colour, ms=9, zorder=3)
    axes.annotate(
        "refused",
        (at, tokens),
        xytext=(-8, 4),
        textcoords="offset points",
        ha="right",
        color=colour,
    )


def _label(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
