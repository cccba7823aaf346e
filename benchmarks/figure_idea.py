"""Draw docs/idea.png, the README's figure of the idea: keys stay, queries turn.

Run with `python benchmarks/figure_idea.py [FILE.png]`.
"""

import math
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle

BIRTHS = list(range(10))
MESSAGES = {"system": (0, 3), "tool result": (3, 7), "assistant": (7, 10)}
DROPPED = range(3, 7)
AFTER_DROP = {slot: slot for slot in BIRTHS if slot not in DROPPED}
AFTER_REPOS = {slot: position for position, slot in enumerate(AFTER_DROP)}
QUERY = len(AFTER_REPOS)

INK, FAINT = "#1f2933", "#9aa5b1"
KEY, GONE, EDITED, TURNED = "#cfe3f5", "#f0f1f3", "#ffe2b8", "#d55e00"
LEFT = 3.4  # where slot 0 begins


def cell(axes: Axes, slot: int, y: float, text: str, colour: str, height: float = 0.5) -> None:
    axes.add_patch(Rectangle((LEFT + slot, y), 1, height, fc=colour, ec="white", lw=2))
    ink = FAINT if text == "–" else INK
    axes.text(LEFT + slot + 0.5, y + height / 2, text, ha="center", va="center", color=ink)


def dial(axes: Axes, x: float, y: float, angle: int, colour: str, radius: float = 0.3) -> None:
    """A RoPE angle as a clock's hand: a position each twelfth of a turn."""
    axes.add_patch(Circle((x, y), radius, fc="white", ec=colour, lw=1.5))
    turn = 2 * math.pi * angle / 12
    tip = (x + 0.8 * radius * math.sin(turn), y + 0.8 * radius * math.cos(turn))
    axes.plot((x, tip[0]), (y, tip[1]), color=colour, lw=2.5, solid_capstyle="round")


def label(axes: Axes, y: float, text: str, **style: object) -> None:
    axes.text(LEFT - 0.2, y, text, ha="right", va="center", **{"color": INK, **style})


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=16, color=colour, lw=1.8)
    )


def queries(axes: Axes) -> None:
    """The query in the middle, and each run's turned copy of it above that run."""
    y, middle = 7.3, LEFT + 5
    label(axes, y + 0.2, "Queries", weight="bold")
    label(axes, y - 0.2, "turned by the keys' shift")
    axes.text(middle, y + 0.62, f"next query, at position {QUERY}", ha="center", color=INK)
    dial(axes, middle, y, QUERY, INK, 0.42)
    for first, colour in ((0, INK), (7, TURNED)):
        x = LEFT + first + 1.5
        shift = first - AFTER_REPOS[first]
        side = 1 if x > middle else -1
        arrow(axes, (middle + side * 0.5, y), (x - side * 0.5, y), colour)
        text = f"turned by {shift}" if shift else "as it is"
        axes.text((middle + x) / 2, y + 0.14, text, ha="center", color=colour)
        dial(axes, x, y, QUERY + shift, colour, 0.42)
        axes.text(x, y + 0.62, f"{QUERY} + {shift} = {QUERY + shift}", ha="center", color=colour)
        arrow(axes, (x, y - 0.46), (x, y - 1.05), colour)


def keys(axes: Axes) -> None:
    y = 4.85
    label(axes, y + 0.64, "Keys and values", weight="bold")
    label(axes, y + 0.24, "written once, never moved")
    for name, (start, stop) in MESSAGES.items():
        gone = start in DROPPED
        for slot in range(start, stop):
            cell(axes, slot, y, "", GONE if gone else KEY, 0.85)
            dial(axes, LEFT + slot + 0.5, y + 0.42, BIRTHS[slot], FAINT if gone else INK)
        box = FancyBboxPatch((LEFT + start + 0.06, y + 0.93), stop - start - 0.12, 0, fc="none")
        box.set(ec=FAINT if gone else INK, lw=1.2, boxstyle="square,pad=0")
        axes.add_patch(box)
        text = f"{name}, dropped" if gone else name
        colour = FAINT if gone else INK
        axes.text(LEFT + (start + stop) / 2, y + 1.02, text, ha="center", color=colour)


def table(axes: Axes) -> None:
    axes.text(LEFT, 4.15, "The integer table", weight="bold", color=INK)
    axes.text(LEFT + 2.3, 4.15, "all that drop and repos edit", color=INK)
    shifts = {slot: BIRTHS[slot] - position for slot, position in AFTER_REPOS.items()}
    rows = {
        "birth": (dict(enumerate(BIRTHS)), ()),
        "position after drop": (AFTER_DROP, DROPPED),
        "position after repos": (AFTER_REPOS, range(7, 10)),
        "shift = birth − position": (shifts, range(7, 10)),
    }
    for place, (name, (values, edited)) in enumerate(rows.items()):
        y = 3.4 - 0.58 * place
        label(axes, y + 0.25, name)
        for slot in BIRTHS:
            colour = EDITED if slot in edited else "#f7f8fa"
            cell(axes, slot, y, str(values.get(slot, "–")), colour)


def draw() -> Figure:
    figure = Figure(figsize=(12, 6.8), dpi=100, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-0.7, 13.7), ylim=(0.38, 8.54), aspect="equal")
    axes.axis("off")
    queries(axes)
    keys(axes)
    table(axes)
    axes.text(
        6.5,
        0.9,
        "A hand is a RoPE angle, and a score depends on the difference of two hands only. The key "
        f"born at 9 now\ncounts as 5, which is {QUERY} − 5 = 1 away from the query; "
        f"from the turned query it is {QUERY + 4} − 9 = 1 away.",
        ha="center",
        va="center",
        color=INK,
        linespacing=1.5,
    )
    return figure


if __name__ == "__main__":
    default = Path(__file__).parents[1] / "docs" / "idea.png"
    with mpl.rc_context({"font.size": 12.5}):
        draw().savefig(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
