"""The server under load, beside others: throughput, time to first token, time between tokens.

Work, by one client in a process of its own, streaming, greedy, all answers of a kind equally long:
  chat: questions of GSM8K, 64 tokens each. Short prompts, so decoding is nearly all of it.
  agents: recorded runs of agents, one round after the other with 16 tokens each, the whole history
    unedited, every agent waiting for its answer. So prompts are long, and mostly a prefix seen.
  prompt: a prompt of 2,048 tokens of which nothing is cached, 4 tokens; five of them.
  again: the same five prompts, each right behind its first time.
  decode: eight answers of 128 tokens at once, from the first text of the last to begin.
Chat and agents have 1, 4, 8 and 16 requests in flight. No conversation is begun twice.
Systems run one after the other in the same run, each alone on the machine and freshly started, and
all do the same work in the same order.

tok/s is generated tokens over the whole time, but for decode. Prompt tok/s is prompt tokens, cached
ones too, over the whole time; for prompt and again, over the median time to the first text. Limits
of decoding: each step reads every weight once, in two bytes or in one, and each answer its live KV
in bfloat16, at the bandwidth of summing a large array in this run. Host %: the part of the steps'
time in which the device waits for the server; other servers do not tell.
"""

import argparse
import asyncio
import contextlib
import json
import pathlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from common import copy_bandwidth, report
from peers import Answer, System, add_arguments, ask, client, launches, plain
from rich.console import Console

from kvfunc.models.chat import ChatTemplate
from kvfunc.models.load import embedded_path
from kvfunc.models.load_gguf import open_gguf
from kvfunc.models.tokenizer import Tokenizer
from kvfunc.serve.replay import Run, read_runs

CONCURRENT = (1, 4, 8, 16)
KINDS = ("chat", "agents", "prompt", "decode")
WEIGHTS, KV_BYTES = 134.5e6, 30 * 2 * 3 * 64 * 2  # SmolLM2-135M-Instruct
PROMPT = 2048
COLUMNS = ("work", "in flight", "system", "tok/s", "/ first", "prompt tok/s", "prompt / first",
           "limit 2 B", "limit 1 B", "TTFT p50 ms", "TTFT p99 ms", "between p50 ms",
           "between p99 ms", "reused %", "host %", "compilations")

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Work:
    """Conversations, each a list of requests of which one waits for the other."""

    kind: str
    in_flight: int
    max_tokens: int
    conversations: list[list[Messages]]

    async def run(self, system: System) -> list[Answer]:
        """Begin a conversation whenever one is through, until none is left."""
        left, answers = iter(self.conversations), []
        async with client() as http:
            async def converse() -> None:
                for conversation in left:
                    for messages in conversation:
                        answers.append(await ask(http, system, messages, self.max_tokens))

            await asyncio.gather(*(converse() for _ in range(self.in_flight)))
        return answers


class Material:
    """Questions, runs and prompts; what was handed out does not come again."""

    def __init__(self, questions: Sequence[str], runs: Sequence[Run], rounds: int):
        reader = open_gguf(embedded_path())
        self._tokenizer = Tokenizer.from_gguf(reader)
        self._chat = ChatTemplate.from_gguf(reader, self._tokenizer)
        self._questions, self._runs, self._rounds = iter(questions), iter(runs), rounds

    def questions(self, count: int) -> list[list[Messages]]:
        """Conversations of one request."""
        return [[[{"role": "user", "content": next(self._questions)}]] for _ in range(count)]

    def runs(self, count: int) -> list[list[Messages]]:
        """Rounds of agents."""
        return [[plain(run.messages[:message]) for message in run.rounds[:self._rounds]]
                for run in (next(self._runs) for _ in range(count))]

    def prompt(self) -> Messages:
        """A request of exactly PROMPT tokens."""
        words: list[int] = []
        while len(words) < PROMPT:
            words += self._tokenizer.encode(next(self._questions) + "\n")
        for length in range(PROMPT, 0, -1):
            messages = [{"role": "user", "content": self._tokenizer.decode(words[:length])}]
            if len(self._chat.render(messages).tokens) == PROMPT:
                return messages
        raise ValueError(f"no beginning of these questions makes {PROMPT} tokens: take others")


def work(kinds: Sequence[str], concurrent: Sequence[int], material: Material) -> Iterator[Work]:
    """All work of these kinds, in the order in which it is done."""
    for count in concurrent:
        if "chat" in kinds:
            yield Work("chat", count, 64, material.questions(min(8 * count, 64)))
        if "agents" in kinds:
            yield Work("agents", count, 16, material.runs(count))
    if "prompt" in kinds:
        prompts = [material.prompt() for _ in range(5)]
        yield Work("prompt", 1, 4, [[prompt, prompt] for prompt in prompts])
    if "decode" in kinds:
        yield Work("decode", 8, 128, material.questions(8))


def parts(done: Work, answers: list[Answer], seconds: float,
          ) -> Iterator[tuple[str, list[Answer], float, float]]:
    """What is reported of a piece of work: name, answers, tok/s, prompt tok/s."""
    rate = sum(answer.generated for answer in answers) / seconds
    prompts = sum(answer.prompt for answer in answers) / seconds
    match done.kind:
        case "prompt":
            for name, some in (("prompt", answers[::2]), ("again", answers[1::2])):
                rate = sum(answer.generated for answer in some) / sum(
                    answer.end - answer.start for answer in some)
                first = float(np.median([answer.first for answer in some]))
                yield name, some, rate, PROMPT / first
        case "decode":
            begun = max(answer.texts[0] for answer in answers)
            texts = np.concatenate([answer.texts for answer in answers])
            generated = sum(answer.generated for answer in answers) * np.mean(texts > begun)
            yield "decode", answers, float(generated / (texts.max() - begun)), prompts
        case name:
            yield name, answers, rate, prompts


def milliseconds(values: Sequence[float], quantile: float) -> float:
    return 1e3 * float(np.quantile(values, quantile))


def reused(answers: list[Answer]) -> float | None:
    if any(answer.cached is None for answer in answers):
        return None
    return 100 * sum(answer.cached for answer in answers) / sum(
        answer.prompt for answer in answers)


def measure(done: Work, system: System, bandwidth: float) -> list[dict[str, Any]]:
    """Do a piece of work: a row for each of its parts."""
    before, start = system.counters(), time.perf_counter()
    answers = asyncio.run(done.run(system))
    seconds, after = time.perf_counter() - start, system.counters()
    spent = {key: after[key] - before[key] for key in before}
    rows = []
    for name, some, rate, prompts in parts(done, answers, seconds):
        live = done.in_flight * np.mean([answer.prompt for answer in some]) * KV_BYTES
        between = np.concatenate([np.diff(answer.texts) for answer in some])
        rows.append({
            "work": name, "in flight": done.in_flight, "system": system.name, "tok/s": rate,
            "prompt tok/s": prompts,
            "limit 2 B": float(done.in_flight * bandwidth / (2 * WEIGHTS + live)),
            "limit 1 B": float(done.in_flight * bandwidth / (WEIGHTS + live)),
            "TTFT p50 ms": milliseconds([answer.first for answer in some], 0.5),
            "TTFT p99 ms": milliseconds([answer.first for answer in some], 0.99),
            "between p50 ms": milliseconds(between, 0.5),
            "between p99 ms": milliseconds(between, 0.99), "reused %": reused(some),
            "host %": (100 * spent["host_seconds"] / (
                spent["host_seconds"] + spent["device_seconds"])) if spent else None,
            "compilations": int(spent["compilations"]) if spent else None,
            "prompt tokens": sum(answer.prompt for answer in some)})
    return rows


def compare(rows: list[list[dict[str, Any]]]) -> None:
    """Add ratios to the first system, whose prompts all others must have had.

    Raises:
      RuntimeError: if the prompts differ in tokens: then the work was not the same.
    """
    for row in (row for others in rows for row in others):
        first = next(one for one in rows[0] if one["work"] == row["work"])
        if row["prompt tokens"] != first["prompt tokens"]:
            raise RuntimeError(f"{row['system']} read {row['prompt tokens']} prompt tokens where "
                               f"{first['system']} read {first['prompt tokens']}")
        row["/ first"] = row["tok/s"] / first["tok/s"]
        row["prompt / first"] = row["prompt tok/s"] / first["prompt tok/s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=pathlib.Path, required=True, help="agent runs, JSON lines")
    parser.add_argument("--questions", type=pathlib.Path, required=True, help="GSM8K, JSON lines")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each agent run")
    parser.add_argument("--work", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--concurrent", nargs="+", type=int, default=CONCURRENT)
    add_arguments(parser)
    args = parser.parse_args()
    console = Console()
    questions = [json.loads(line)["question"] for line in args.questions.open()]
    material = Material(questions, read_runs(args.runs), args.rounds)
    bandwidth = copy_bandwidth()
    warm_up = [Work("chat", 16, 8, material.questions(16)),
               Work("chat", 1, 8, [[material.prompt()]])]
    pieces = list(work(args.work, args.concurrent, material))
    measured: list[list[list[dict[str, Any]]]] = [[] for _ in pieces]
    for launch in launches(args):
        with contextlib.ExitStack() as stack:
            with console.status("starting a server"):
                system = stack.enter_context(launch())
            with console.status(f"warming up {system.name}"):
                for piece in warm_up:
                    asyncio.run(piece.run(system))
            for piece, so_far in zip(pieces, measured, strict=True):
                with console.status(f"{piece.kind}, {piece.in_flight} in flight: {system.name}"):
                    so_far.append(measure(piece, system, bandwidth))
                compare(so_far)
                for row in so_far[-1]:
                    console.print(f"{row['work']}, {row['in flight']} in flight, {row['system']}: "
                                  f"{row['tok/s']:.3g} tok/s ({row['/ first']:.2f}), prompt "
                                  f"{row['prompt tok/s']:.3g} tok/s ({row['prompt / first']:.2f}), "
                                  f"TTFT {row['TTFT p50 ms']:.0f} ms", soft_wrap=True)
    rows = [[row[column] for column in COLUMNS]
            for so_far in measured for part in zip(*so_far, strict=True) for row in part]
    report("serve", "SmolLM2-135M-Instruct under load", COLUMNS, rows,
           bandwidth_gb_per_s=bandwidth / 1e9, ours=args.ours_args or [""])


if __name__ == "__main__":
    main()
