"""Agents that read the same texts behind different prompts: TTFT, reuse, memory, and a warm start.

One real server, over HTTP, on the embedded model. Agents are fully connected: agent i reads the
task and the answers of the agents before it. Work:
  ttft: a prompt of its own of `--prefix` tokens for each agent, a task of `--input` tokens, answers
    of `--output` tokens; TTFT of each agent. Answers are real text given as assistant messages, so
    that their KV is the producer's without the time of decoding. Every system has the same prompts:
    `naive` finds nothing, `prefix` finds its own prompt (exact KV, prefix caching), `ours` is at
    full pools: it was taught by `--teach` tasks that come before and are not counted. `paper` is
    what KVCOMM's rules cost at 20 anchors: matching, blending and splicing every text that an agent
    reads, static text included, measured by the library on the same sizes, and one step for the
    last token; its agent 1 computes the task, as ours does.
  scaling: the same for more agents, ours only: TTFT, reuse, and memory of what was learned.
  reuse: `kvfunc agents` over GSM8K questions with generated answers: tokens and calls reused.
    then again, with what the first run wrote to its `--anchor-pool`: requests until 70 % of the
    tokens of four requests in a row were reused.
  given: reuse over 100 requests with longer answers, which are given as in ttft.
All overheads are inside TTFT: looking up, estimating, splicing, and the response's first byte.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import RESULTS, report, seconds
from matplotlib.figure import Figure
from rich.console import Console

from kvfunc import anchors
from kvfunc.models.load import embedded_path
from kvfunc.models.load_gguf import open_gguf
from kvfunc.models.tokenizer import Tokenizer
from kvfunc.segments import Segment
from kvfunc.serve import agents, topologies
from kvfunc.serve.client import serve_command, started_server

LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64  # of SmolLM2-135M-Instruct
ANCHORS = 20  # KVCOMM's default
WARM = 0.7  # reuse that makes a pool warm
WINDOW = 4  # requests over which it is told
# Of Okabe and Ito's, which colour-blind eyes tell apart.
COLOURS = ("#D55E00", "#E69F00", "#56B4E9", "#0072B2")

Json = dict[str, Any]


class Material:
    """Real text in pieces of so many tokens; none comes twice."""

    def __init__(self, path: pathlib.Path):
        self._tokenizer = Tokenizer.from_gguf(open_gguf(embedded_path()))
        lines = [json.loads(line) for line in path.open()]
        self._texts = itertools.cycle(
            [f"{line['question']}\n{line['answer']}\n\n" for line in lines])
        self._held: list[int] = []

    def take(self, tokens: int) -> str:
        """The next text of about so many tokens."""
        while len(self._held) < tokens:
            self._held += self._tokenizer.encode(next(self._texts))
        taken, self._held = self._held[:tokens], self._held[tokens:]
        return self._tokenizer.decode(taken).strip()


def part(text: str, share: str | None = None) -> Json:
    return {"type": "text", "text": text} | ({"cache": {"share": share}} if share else {})


@dataclass(frozen=True)
class Round:
    """One task through all agents: the messages of each, and what it answers."""

    messages: list[list[Json]]
    answers: list[str]

    @classmethod
    def of(cls, systems: Sequence[str], task: str, answers: Sequence[str]) -> "Round":
        """Agents with these prompts, fully connected."""
        messages = []
        for agent, system in enumerate(systems):
            content = [part("Task:\n"), part(task, "task")]
            for other in range(agent):
                content += [part(f"\n\nAnswer of agent {other + 1}:\n"),
                            part(answers[other], f"answer {other + 1}")]
            content.append(part("\n\nNow give your own answer.\n"))
            messages.append([{"role": "system", "content": system},
                             {"role": "user", "content": content}])
        return cls(messages, list(answers))

    def produced(self, agent: int) -> list[Json]:
        """The messages behind which the agent's answer stands."""
        name = f"answer {agent + 1}"
        return [*self.messages[agent],
                {"role": "assistant", "content": [part(self.answers[agent], name)]},
                {"role": "user", "content": "Thank you."}]


def rounds(material: Material, count: int, agents_: int, args: argparse.Namespace) -> list[Round]:
    systems = [f"You are agent {agent + 1}.\n{material.take(args.prefix - 20)}"
               for agent in range(agents_)]
    return [Round.of(systems, material.take(args.input),
                     [material.take(args.output) for _ in range(agents_)]) for _ in range(count)]


def ask(client: agents.AgentClient, messages: list[Json], **cache: Any) -> agents.Answer:
    body = {"model": client.first_model(), "messages": messages, "max_tokens": 1, "temperature": 0}
    return client.answer({**body, "cache": cache})


def through(client: agents.AgentClient, one: Round, **cache: Any) -> list[agents.Answer]:
    """Ask every agent, and let its answer be there for the next."""
    answers = []
    for agent, messages in enumerate(one.messages):
        answers.append(ask(client, messages, **cache))
        if agent + 1 < len(one.messages):
            ask(client, one.produced(agent), **cache)
    return answers


def medians(answers: list[list[agents.Answer]]) -> list[float]:
    """TTFT in ms of each agent."""
    return [1e3 * float(np.median([each.ttft_seconds for each in column]))
            for column in zip(*answers, strict=True)]


def reuse(answers: Sequence[agents.Answer]) -> float:
    """Part of the prompts' tokens that was not computed."""
    usages = [answer.usage for answer in answers]
    return 1 - sum(usage.computed for usage in usages) / sum(usage.prompt for usage in usages)


def paper_seconds(args: argparse.Namespace, behind: int = 16) -> dict[int, float]:
    """What KVCOMM's rules take for a text of the task's and of an answer's size, at full pools."""
    taken = {}
    for tokens in {args.input, args.output}:
        pool = anchors.init(LAYERS, KV_HEADS, HEAD_DIM, consumers=1, anchors=ANCHORS,
                            tokens=tokens, following=behind)
        shape = LAYERS, tokens, KV_HEADS, HEAD_DIM
        noise = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        base = Segment(jnp.asarray(noise), jnp.asarray(noise), jnp.int32(tokens))
        ones = functools.partial(jnp.full_like, fill_value=True)
        pool = dataclasses.replace(pool, length=jnp.full(ANCHORS, tokens, jnp.int32),
                                   seen=ones(pool.seen))

        @jax.jit
        def blended(pool, base):
            offsets, info = anchors.estimate(pool, base, 0, anchors.PAPER)
            return anchors.apply(base, offsets.text), offsets.following, info.refused

        taken[tokens] = seconds(lambda pool=pool, base=base: blended(pool, base), 3)
    return taken


@contextlib.contextmanager
def server(*options: str) -> Iterator[agents.AgentClient]:
    command = [*serve_command(None), "--kv-tokens", "65536", *options]
    with started_server(command) as url, agents.AgentClient(url) as client:
        yield client


def ttft(args: argparse.Namespace, console: Console) -> None:
    """TTFT of five agents, four systems, the same prompts."""
    material = Material(args.questions)
    everything = rounds(material, args.teach + args.repeats, 5, args)
    with console.status("measuring KVCOMM's rules"):
        of_text = paper_seconds(args)
    with server("--share-texts", str(args.teach)) as client:
        for place, one in enumerate(everything[:args.teach]):
            console.print(f"teaching: task {place + 1} of {args.teach}")
            through(client, one)
        for messages in everything[0].messages:
            ask(client, messages, exact=True, salt="prefix")
        measured: dict[str, list[list[agents.Answer]]] = {}
        for place, one in enumerate(everything[args.teach:]):
            console.print(f"measuring: task {place + 1} of {args.repeats}")
            # In turns, so that all systems meet the machine in the same state.
            measured.setdefault("ours", []).append(through(client, one))
            measured.setdefault("prefix", []).append(
                [ask(client, messages, exact=True, salt="prefix") for messages in one.messages])
            measured.setdefault("naive", []).append(
                [ask(client, messages, exact=True, salt=f"{place} {agent}")
                 for agent, messages in enumerate(one.messages)])
        step = ask(client, everything[-1].messages[0], exact=True, salt="prefix").ttft_seconds
    times = {name: medians(answers) for name, answers in measured.items()}
    times["paper"] = [times["ours"][0]] + [
        1e3 * (step + of_text[args.input] + agent * of_text[args.output]) for agent in range(1, 5)]
    rows = [[name, *times[name], times["naive"][-1] / times[name][-1],
             times["prefix"][-1] / times[name][-1],
             reuse([answers[-1] for answers in measured[name]]) if name in measured else None]
            for name in ("naive", "prefix", "paper", "ours")]
    report("anchors_ttft", "TTFT in ms of agents 1 to 5, fully connected", (
        "system", *(f"agent {agent}" for agent in range(1, 6)), "naive / it at 5",
        "prefix / it at 5", "reuse at 5"), rows, prefix=args.prefix, input=args.input,
        output=args.output, taught_by=args.teach, repeats=args.repeats,
        predicted_errors=[[each.predicted_error for each in answers]
                          for answers in measured["ours"]])


def scaling(args: argparse.Namespace, console: Console) -> None:
    """More agents: TTFT of the last, reuse of all, and memory."""
    rows = []
    for count, output in [*((count, args.output) for count in args.counts), *(
            [(16, args.output // 2)] if not args.quick else [])]:
        material = Material(args.questions)
        sizes = argparse.Namespace(**{**vars(args), "output": output})
        everything = rounds(material, args.teach + 1, count, sizes)
        readers = count * (count + 1) // 2 - 1
        options = ("--kv-tokens", "196608", "--share-texts", str(args.teach),
                   "--share-readers", str(2 * readers))
        with console.status(f"{count} agents"), server(*options) as client:
            for one in everything[:-1]:
                through(client, one)
            answers = through(client, everything[-1])
            naive = ask(client, everything[-1].messages[-1], exact=True, salt="naive")
        shapes = jax.eval_shape(functools.partial(
            anchors.init, LAYERS, KV_HEADS, HEAD_DIM, consumers=1, anchors=0, tokens=1,
            following=0, projection=128))
        size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
        rows.append([count, output, answers[-1].usage.prompt, 1e3 * answers[-1].ttft_seconds,
                     1e3 * naive.ttft_seconds, naive.ttft_seconds / answers[-1].ttft_seconds,
                     reuse(answers), readers, readers * size / 1e6])
        console.print(rows[-1])
    report("anchors_scaling", "More agents, fully connected", (
        "agents", "output", "prompt of the last", "TTFT ms", "naive TTFT ms", "naive / ours",
        "reuse of all", "readers", "sums MB"), rows, prefix=args.prefix, input=args.input,
        taught_by=args.teach)


def given(args: argparse.Namespace, console: Console) -> None:
    """Reuse over 100 requests of four agents, cold and warm, with longer answers, given."""
    rows = []
    for output in (256, 512):
        sizes = argparse.Namespace(**{**vars(args), "prefix": 128, "input": 128, "output": output})
        everything = rounds(Material(args.questions), args.tasks + args.tasks // 5, 4, sizes)
        with tempfile.TemporaryDirectory() as pool:
            for name, some in (("cold", everything[:args.tasks]),
                               ("warm", everything[args.tasks:])):
                with console.status(f"{name}, {output}"), server("--anchor-pool", pool) as client:
                    answers = [answer for one in some for answer in through(client, one)]
                reading = [answer for place, answer in enumerate(answers) if place % 4]
                rows.append([output, name, len(answers), reuse(answers), reuse(reading),
                             float(np.mean([answer.usage.approximate > 0
                                            for answer in reading])),
                             requests_until_warm(answers)])
                console.print(rows[-1])
    report("anchors_given", "Four agents, fully connected, answers given", (
        "output", "start", "requests", "tokens reused", "by those who read answers",
        "of these, with estimates", "requests until 70 %"), rows)


def solved(client: agents.AgentClient, args: argparse.Namespace, tasks: int,
           start: int = 0) -> list[agents.Record]:
    """Tasks of GSM8K through four agents, answers generated."""
    wanted = agents.read_tasks(args.questions, start + tasks)[start:]
    settings = agents.Settings(client.first_model(), max_tokens=args.generated, ignore_eos=True)
    topology = topologies.build("full", 4)
    return agents.run(client, topology, agents.read_roles(args.roles, "gsm8k"), wanted, settings)


def requests_until_warm(answers: Sequence[agents.Answer]) -> int | None:
    """Requests until WINDOW in a row reused enough; None if none ever did."""
    for place in range(WINDOW, len(answers) + 1):
        if reuse(answers[place - WINDOW:place]) >= WARM:
            return place
    return None


def reused(args: argparse.Namespace, console: Console) -> None:
    """Reuse over many requests, and how soon: cold, and with the pool of the run before."""
    rows = []
    with tempfile.TemporaryDirectory() as pool:
        for name, tasks, start in (("cold", args.tasks, 0), ("warm", args.tasks // 5, args.tasks)):
            with console.status(f"{name}: {tasks} tasks"), server("--anchor-pool", pool) as client:
                records = solved(client, args, tasks, start)
            answers = [record.answer for record in records]
            by_agent = [reuse(answers[agent::4]) for agent in range(4)]
            rows.append([name, tasks, len(records), reuse(answers), *by_agent,
                         float(np.mean([record.reused for record in records])),
                         requests_until_warm(answers)])
            console.print(rows[-1])
    report("anchors_reuse", "GSM8K through four agents, fully connected", (
        "start", "tasks", "requests", "tokens reused", *(f"agent {agent}" for agent in range(1, 5)),
        "calls reused", "requests until 70 %"), rows, generated=args.generated)


def picture(path: pathlib.Path) -> None:
    """TTFT of five agents, and of the last of more and more agents, with reuse and memory."""
    by_agent, by_count = (json.loads((RESULTS / f"anchors_{name}.json").read_text())["rows"]
                          for name in ("ttft", "scaling"))
    figure = Figure(figsize=(11, 3.6), dpi=120, layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for place, row in enumerate(by_agent):
        left.plot(range(1, 6), [row[f"agent {agent}"] for agent in range(1, 6)],
                  marker="osD^"[place], color=COLOURS[place], label=row["system"])
    left.set(title="TTFT of each agent", xlabel="agent", ylabel="ms", yscale="log",
             xticks=range(1, 6))
    counts = [row["agents"] for row in by_count]
    for name, colour, column in (("naive", COLOURS[0], "naive TTFT ms"),
                                 ("ours", COLOURS[3], "TTFT ms")):
        middle.plot(counts, [row[column] for row in by_count], marker="o", color=colour, label=name)
    middle.set(title="TTFT of the last agent", xlabel="agents", ylabel="ms", yscale="log")
    right.plot(counts, [100 * row["reuse of all"] for row in by_count], marker="o",
               color=COLOURS[3], label="tokens reused, %")
    right.plot(counts, [row["sums MB"] / 10 for row in by_count], marker="s", color=COLOURS[2],
               label="sums, 10 MB")
    right.set(title="Reuse and memory", xlabel="agents", ylim=(0, None))
    for axes in (left, middle, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


WORK = {"ttft": ttft, "scaling": scaling, "reuse": reused, "given": given}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", nargs="*", help=f"of {', '.join(WORK)}; none: draw only")
    parser.add_argument("--questions", type=pathlib.Path, required=True, help="GSM8K, JSON lines")
    parser.add_argument("--roles", type=pathlib.Path, default=pathlib.Path("examples/roles.yaml"))
    parser.add_argument("--prefix", type=int, default=512)
    parser.add_argument("--input", type=int, default=1024)
    parser.add_argument("--output", type=int, default=512)
    parser.add_argument("--teach", type=int, default=8, help="tasks that come before")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--counts", type=int, nargs="+", default=(2, 4, 8, 13))
    parser.add_argument("--tasks", type=int, default=25, help="of GSM8K, four requests each")
    parser.add_argument("--generated", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--quick", action="store_true", help="few of everything")
    parser.add_argument("--picture", type=pathlib.Path, help="draw what was measured so far there")
    args = parser.parse_args()
    for name in set(args.work) - WORK.keys():
        parser.error(f"work must be of {', '.join(WORK)}, got {name!r}")
    if args.quick:
        args.teach, args.repeats, args.counts, args.tasks = 2, 2, (2, 4), 10
    console = Console()
    for name in args.work:
        WORK[name](args, console)
    if args.picture is not None:
        picture(args.picture)


if __name__ == "__main__":
    main()
