"""How faithful KV is that another prompt made: every method on the same prompts, beside exact.

Model: SmolLM2-135M in float32. A *content* is 256 tokens of real text: questions of GSM8K, or what
tools returned to real agents. A *consumer* is an agent's prompt in front of it; behind it stand a
question and what exact prefill makes the model say, 16 greedy tokens: 17 next-token distributions
count, computed in one pass. `KL` is the mean of KL(exact || method) over these, over test contents
and over consumers; `flips` are changed top tokens; `paper` is KVCOMM's rules on its own base, on
the same cases. What is learned comes from other contents than those tested.

 base     the KV that is moved: `neutral`, behind 3 tokens; `long`, behind another agent's prompt
 computed share of the content that is computed and not reused; what stands behind it always is,
          except in the paper's whole path
 near     the pool also holds the content with eight numbers or words replaced, seen in the same
          prompt
 numbers  of questions of GSM8K, each behind the 3 tokens before it: is its first digit right?
 signal   relative error of the ridge at the first 8 tokens, which are computed all the same, and
          the gap of the two largest logits: does it rank the true KL?
 memory   bytes of an anchor and of a consumer's sums; error of offsets as they are stored

`python benchmarks/fidelity.py GSM8K.jsonl AGENT_RUNS.jsonl` writes results/fidelity.json and
docs/fidelity.png.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from common import report
from lab import (
    LENGTH,
    LONG,
    PROMPTS,
    Case,
    Exact,
    Lab,
    World,
    divergence,
    near_copy,
    numbers,
    world,
)
from matplotlib.figure import Figure
from rich.progress import track
from scipy.stats import spearmanr

from kvfunc import anchors, ridge
from kvfunc.anchors import PAPER, AnchorPool, Estimated, Options
from kvfunc.models.load import load
from kvfunc.segments import Segment

FIRST = tuple(range(8))
CONTINUED = 16  # greedy tokens whose distributions count
LATE = slice(15, 25)  # layers that carry most of the KL
OURS, ANCHORS = Options(), Options(estimator="anchors")
TO_15 = ("largest move", "attention x move", "first tokens")  # choices for 15 % as well as 5 %
BITE, NUMBERS = 3, 12  # tokens given before a number that is asked for; numbers of a content
NUMBERED = ("moved only", "paper's rules", "ridge, first 8", "near copy seen, paper's rules",
            "near copy seen, ridge")  # asked for the content's numbers; the paper's on its base

observe = jax.jit(anchors.observe)
grow = jax.jit(anchors.observe, donate_argnums=0)
estimate = jax.jit(anchors.estimate, static_argnames="options")
fit = jax.jit(anchors.fit, static_argnames="options")


@dataclasses.dataclass(frozen=True)
class Learned:
    """What a consumer's training contents left."""

    pools: dict[str, AnchorPool]  # by base, with anchors; "narrow": long base, 128 features, none
    maps: dict[str, ridge.Weights]  # of the ridge, by what they were fitted with


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to the content's KV in one case."""

    name: str
    base: str
    content: Segment
    computed: tuple[int, ...] = ()
    behind: Segment | None = None


def teach(lab: Lab, world: World, before: tuple[int, ...], bases: dict[str, list[Segment]],
          alone: Segment, train: int) -> Learned:
    """Observe the training contents behind one prompt; the ridge is fitted on the way and after."""
    c = lab.model.config
    sizes = dict(consumers=1, tokens=LENGTH, following=len(world.ask), dtype=jnp.float32)
    new = functools.partial(anchors.init, c.layers, c.kv_heads, c.head_dim, **sizes)
    pools = {"neutral": new(anchors=train + 1), "long": new(anchors=train + 1),
             "narrow": new(anchors=0, projection=128)}
    maps = {}
    for i, content in enumerate(world.contents[:train]):
        exact = lab.exact(Case(before, content, world.ask, ()))
        for name, pool in pools.items():
            base = bases["long" if name == "narrow" else name][i]
            pools[name] = grow(pool, base, exact.content, 0, (alone, exact.behind))[0]
        if i + 1 in (4, 8, 12):
            maps[f"of {i + 1} texts"] = fit(pools["long"], 0)
    maps |= {name: fit(pool, 0) for name, pool in pools.items()}
    maps["rank 16"] = fit(pools["long"], 0, options=Options(rank=16))
    for penalty in (0.01, 0.1):
        maps[f"penalty {penalty}"] = fit(pools["long"], 0, options=Options(penalty=penalty))
    return Learned(pools, maps)


def corrected(pool: AnchorPool, base: Segment, options: Options = OURS,
              maps: ridge.Weights | None = None) -> tuple[Segment, anchors.Offsets, Estimated]:
    """The base with its estimated offset, the offsets, and what they rest on."""
    offsets, info = estimate(pool, base, 0, options, maps)
    return anchors.apply(base, offsets.text), offsets, info


def methods(lab: Lab, world: World, learned: Learned, case: Case, bases: dict[str, Segment],
            alone: Segment) -> Iterator[Method]:
    """Everything that is compared, but near copies."""
    for name, base in bases.items():
        pool = learned.pools[name]
        content, offsets, _ = corrected(pool, base, PAPER)
        yield Method("moved only", name, base)
        yield Method("paper's rules", name, content)
        if name == "neutral":
            yield Method("paper's whole path", name, content,
                         behind=anchors.apply(alone, offsets.following))
        yield Method("anchors", name, corrected(pool, base, ANCHORS)[0])
        content, offsets, info = corrected(pool, base, OURS, learned.maps[name])
        yield Method("ridge", name, content)
        yield Method("ridge, first 8", name, content, FIRST)
    # Of the long base, as all below.
    for choice, score in choices(lab, world, case, offsets, content, info).items():
        first = "" if choice == "first tokens" else "first 8, "
        for share in (0.05, 0.15)[:2 if choice in TO_15 else 1]:
            yield Method(f"ridge, {first}{choice} to {share:.0%}", name, content,
                         computed(score, share))
    info = corrected(pool, base, Options(recompute_first=20, recompute=0.15), learned.maps[name])[2]
    yield Method("ridge, first 20, largest move to 15%", name, content,
                 tuple(np.nonzero(info.recompute)[0]))
    content = corrected(learned.pools["narrow"], base, OURS, learned.maps["narrow"])[0]
    yield Method("ridge of 128 features, first 8", name, content, FIRST)
    for which, maps in learned.maps.items():
        if which not in learned.pools:
            content = corrected(pool, base, OURS, maps)[0]
            yield Method(f"ridge {which}, first 8", name, content, FIRST)


def choices(lab: Lab, world: World, case: Case, offsets: anchors.Offsets, content: Segment,
            info: Estimated) -> dict[str, np.ndarray]:
    """Scores by which tokens may be chosen to be computed, the largest first."""
    offset, base = (np.square(np.asarray(x.flat)) for x in (offsets.text, content))
    attention = lab.attention(case, content)
    moved = np.sqrt(offset.sum(-1) / base.sum(-1).mean(-1, keepdims=True))  # [layers, tokens]
    return {"largest move": np.asarray(info.moved),
            "late V": offset[LATE, :, offset.shape[-1] // 2:].sum((0, 2)),
            "digits": world.is_digit[list(case.content)] * 1e6 + np.asarray(info.moved),
            "attention": attention.mean(0),
            "attention x move": (attention * moved).sum(0),
            "first tokens": -np.arange(len(case.content))}


def computed(score: np.ndarray, share: float) -> tuple[int, ...]:
    """The first 8 tokens, and those of the highest scores, to a share of all."""
    others = [int(token) for token in np.argsort(-score, kind="stable") if token not in FIRST]
    return (*FIRST, *others[:math.ceil(share * len(score)) - len(FIRST)])


def near_methods(learned: Learned, bases: dict[str, Segment], copies: dict[str, Segment],
                 copy: Segment) -> Iterator[Method]:
    """As `methods`, after a near copy was seen; nothing of the content is computed."""
    for name, base in bases.items():
        pool = observe(learned.pools[name], copies[name], copy, 0)[0]
        for label, options in (("paper's rules", PAPER), ("ridge", OURS)):
            content, _, info = corrected(pool, base, options, learned.maps[name])
            assert options != OURS or info.rule == Estimated.NEAR_COPY
            yield Method(f"near copy seen, {label}", name, content)


def quoted(lab: Lab, world: World, case: Case, copy: tuple[int, ...],
           ways: list[Method]) -> Iterator[dict]:
    """The content's own numbers behind the few tokens before each: a record by method and number.

    All of them are asked for in one pass, the right numbers going on from one to the next.
    """
    places = [int(p) for p in numbers(world, case.content) if p >= BITE][:NUMBERS]
    bites = [(*world.dash, *case.content[p - BITE:p + 1]) for p in places]
    after = [token for bite in bites for token in bite]
    ends = np.cumsum([len(bite) for bite in bites]) - 1  # logits here are of the number
    after += [after[-1]] * (NUMBERS * (len(world.dash) + BITE + 1) - len(after))
    asked = dataclasses.replace(case, behind=world.quote, after=tuple(after))
    for way in ways:
        logits = lab.given(asked, way.content, way.computed)
        for place, here in zip(places, logits[ends], strict=True):
            true, other = case.content[place], copy[place]
            yield {"method": way.name, "base": way.base, "right": bool(here.argmax() == true),
                   "log_prob": float(here[true] - np.logaddexp.reduce(here)),
                   "changed": other != true,
                   "from_copy": other != true and bool(here.argmax() == other)}


def signals(exact: Exact, way: Method, logits: np.ndarray, mass: float) -> dict[str, float]:
    """What one pass with a method's KV knows of its error, where the first tokens are computed."""
    true, mine = (np.asarray(x.flat)[1:, :len(FIRST)] for x in (exact.content, way.content))
    off = np.sqrt(np.square(true - mine).sum((1, 2)) / np.square(true).sum((1, 2)))
    last = logits[0] - np.logaddexp.reduce(logits[0])
    second, first = np.sort(last)[-2:]
    return {"r": float(off.mean()), "r late": float(off[LATE].mean()),
            "g": float(first - second), "entropy": float(-(np.exp(last) * last).sum()),
            "attention": mass}


def ranked(found: list[dict]) -> dict:
    """How well signals rank the true KL, within consumers; and the fit of log KL."""
    value = {key: np.array([x[key] for x in found]) for key in found[0]}
    r, gap, kl = value["r"], value["g"] + 0.1, value["kl"]
    tried = {"r * g^-0.1": r * gap**-0.1, "r": r, "1 / g": 1 / gap, "r late": value["r late"],
             "entropy": value["entropy"], "attention": value["attention"],
             "r * attention": r * value["attention"],
             "r * attention * g^-0.1": r * value["attention"] * gap**-0.1}
    within = {name: [float(spearmanr(x[value["consumer"] == k], kl[value["consumer"] == k])[0])
                     for k in PROMPTS] for name, x in tried.items()}
    design = np.stack([np.ones(len(kl)), np.log(r), np.log(gap)], -1)
    fitted, *_ = np.linalg.lstsq(design, np.log(kl), rcond=None)
    left = np.log(kl) - design @ fitted
    return {"spearman": {name: float(np.mean(x)) for name, x in within.items()},
            "spearman_by_consumer": within, "a": float(fitted[0]), "b": float(fitted[1]),
            "c": float(fitted[2]), "r_squared": float(1 - left.var() / np.log(kl).var()),
            "left_over_sd": float(left.std()), "cases": len(kl)}


def memory(lab: Lab, base: Segment, exact: Segment) -> tuple[list[dict], dict[str, float]]:
    """Bytes of one anchor with one consumer and the error of its stored offset; MB of sums."""
    c = lab.model.config
    new = functools.partial(anchors.init, c.layers, c.kv_heads, c.head_dim, consumers=1,
                            following=0, tokens=LENGTH)
    stored = []
    for dtype, rank in itertools.product((jnp.float32, jnp.bfloat16, jnp.int8), (None, 32)):
        pool, told = observe(new(anchors=1, dtype=dtype, rank=rank), base, exact, 0)
        stored.append({"dtype": jnp.dtype(dtype).name, "rank": rank,
                       "MB": float(pool.bytes_of_anchors[0]) / 1e6,
                       "error": float(told.storage_error)})
    sums = {str(projection): sum(x.nbytes for x in jax.tree.leaves(
        new(anchors=0, projection=projection).sums)) / 1e6 for projection in (None, 256, 128)}
    return stored, sums


def grouped(found: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """Records by method and base."""
    groups = collections.defaultdict(list)
    for record in found:
        groups[record["method"], record["base"]].append(record)
    return groups


def mean(found: list[dict], key: str) -> float:
    return float(np.mean([record[key] for record in found]))


def table(groups: dict[tuple[str, str], list[dict]]) -> list[list]:
    """Means over cases, and against the paper's rules on the same ones."""
    paper = groups["paper's rules", "neutral"]
    return [[*way, 100 * mean(group, "computed"), mean(group, "kl"),
             mean(group, "kl") / mean(paper, "kl"), 100 * mean(group, "flips"),
             100 * float(np.mean([x["kl"] < y["kl"] for x, y in zip(group, paper, strict=True)]))]
            for way, group in groups.items()]


def table_of_numbers(groups: dict[tuple[str, str], list[dict]]) -> list[dict]:
    """Shares over the numbers quoted, and over those that the near copy has otherwise."""
    rows = []
    for (method, base), group in groups.items():
        changed = [x for x in group if x["changed"]]
        rows.append({"method": method, "base": base, "numbers": len(group),
                     "right %": 100 * mean(group, "right"), "log prob": mean(group, "log_prob"),
                     "changed": len(changed), "changed right %": 100 * mean(changed, "right"),
                     "copy's %": 100 * mean(changed, "from_copy")})
    return rows


def draw(rows: list[list], path: pathlib.Path) -> None:
    """KL by method, one line each; the base by colour and by mark."""
    rows = [row for row in rows if not any(x in row[0] for x in (" of ", "rank", "penalty"))]
    names = list(dict.fromkeys(row[0] for row in rows))
    best = {name: min(row[3] for row in rows if row[0] == name) for name in names}
    names.sort(key=best.get)
    figure = Figure((8, 0.3 * len(names) + 1.4), layout="constrained")
    axes = figure.add_subplot()
    for base, colour, mark in (("neutral", "#d55e00", "o"), ("long", "#0072b2", "s")):
        mine = [row for row in rows if row[1] == base]
        axes.plot([row[3] for row in mine], [names.index(row[0]) for row in mine], mark,
                  color=colour, label=f"{base} base", ms=7)
    paper = next(row[3] for row in rows if row[:2] == ["paper's rules", "neutral"])
    axes.axvline(paper, color="#555", ls=":", lw=1)
    axes.text(paper, len(names) - 0.3, "the paper's ", ha="right", color="#555")
    axes.set(xscale="log", xlabel="mean KL(exact || method), nats", yticks=range(len(names)),
             yticklabels=names)
    axes.grid(axis="y", color="#ddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("questions", type=pathlib.Path)
    parser.add_argument("runs", type=pathlib.Path)
    parser.add_argument("--contents", type=int, default=30)
    parser.add_argument("--train", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="six contents, four of them teach")
    options = parser.parse_args()
    count, train = (6, 4) if options.quick else (options.contents, options.train)
    model = load(dtype=jnp.float32)
    lab, here = Lab(model), world(model, options.questions, options.runs, count)
    contents, tested = here.contents, range(train, len(here.contents))
    if len(contents) < count:
        raise SystemExit(f"the data hold {len(contents)} contents, not {count}")
    copies = {i: near_copy(here, contents[i], i) for i in tested}
    alone = lab.exact(Case(here.bases["neutral"], here.ask, (), ())).content
    bases, copied = collections.defaultdict(list), collections.defaultdict(dict)
    for name, before in here.bases.items():
        for content in track(contents, f"base KV, {name}"):
            bases[name].append(lab.exact(Case(before, content, (), ())).content)
        for i, copy in copies.items():
            copied[name][i] = lab.exact(Case(before, copy, (), ())).content

    rows, quotes, told = [], [], []
    for consumer, before in here.consumers.items():
        learned = teach(lab, here, before, bases, alone, train)
        for i in track(tested, consumer):
            case = lab.going_on(Case(before, contents[i], here.ask, ()), CONTINUED)
            exact = lab.exact(case)
            mine = {name: bases[name][i] for name in bases}
            near = lab.exact(Case(before, copies[i], (), ())).content
            ways = {}
            for way in itertools.chain(
                    methods(lab, here, learned, case, mine, alone),
                    near_methods(learned, mine, {name: copied[name][i] for name in copied}, near)):
                logits = lab.given(case, way.content, way.computed, way.behind)
                kl, flips = divergence(exact.logits, logits)
                rows.append({"method": way.name, "base": way.base, "consumer": consumer,
                             "content": i, "computed": len(way.computed) / LENGTH, "kl": kl,
                             "flips": flips})
                if (way.name, way.base) == ("ridge, first 8", "long"):
                    mass = float(lab.attention(case, way.content).sum(-1).mean())
                    told.append({"consumer": consumer, "kl": kl,
                                 **signals(exact, way, logits, mass)})
                if way.name in NUMBERED and ("paper" not in way.name or way.base == "neutral"):
                    ways[way.name, way.base] = way
            if i % 2 == 0:  # a stretch of questions
                ways["exact", "-"] = Method("exact", "-", exact.content)
                quotes += quoted(lab, here, case, copies[i], list(ways.values()))
    stored, sums = memory(lab, bases["long"][train], exact.content)
    by_numbers, signal = table_of_numbers(grouped(quotes)), ranked(told)
    rows_of_table = table(grouped(rows))
    report("fidelity", "KV behind another prompt, against exact prefill (SmolLM2-135M, float32)",
           ["method", "base", "computed %", "KL", "/ paper", "flips %", "wins %"], rows_of_table,
           parameters=dict(contents=count, train=train, length=LENGTH, prompts=PROMPTS, long=LONG),
           numbers=by_numbers, signal=signal, signal_cases=told, storage=stored, sums_mb=sums)
    for extra in (*by_numbers, signal, *stored, sums):
        print(extra)
    draw(rows_of_table, pathlib.Path(__file__).parent.parent / "docs" / "fidelity.png")


if __name__ == "__main__":
    main()
