"""The server under load: throughput, time to first token, and the time between tokens.

Work, by a client in a process of its own, streaming, at 1, 4, 8 and 16 requests in flight:
  chat: questions of GSM8K, 64 tokens each. Short prompts, so decoding is nearly all of it.
  agents: recorded runs of agents, one round after the other with 16 tokens each, rolling tool
    outputs (keep 4) and reposition; every agent waits for its answer before its next round.
Limit of decoding: each step reads every weight once, and each answer its live KV, at the bandwidth
of summing a large array in this run. Host share: the part of the steps' time in which the device
waits for the server.
"""

import argparse
import asyncio
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
from common import copy_bandwidth, report
from rich.console import Console

from kvfunc.serve.client import serve_command, started_server
from kvfunc.serve.replay import read_runs

CONCURRENT = (1, 4, 8, 16)
WEIGHTS = 134.5e6  # SmolLM2-135M-Instruct


class Load:
    """Requests that were sent, and when their tokens came."""

    def __init__(self, url: str):
        self._url = url
        self.first: list[float] = []  # seconds to the first token
        self.between: list[float] = []  # seconds from one token to the next
        self.prompt = self.computed = self.generated = 0

    async def ask(self, client: httpx.AsyncClient, messages: Sequence[Any], max_tokens: int,
                  cache: dict[str, Any]) -> None:
        """One streamed request."""
        body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "cache": cache,
                "ignore_eos": True, "stream": True}
        start = last = time.perf_counter()
        async with client.stream("POST", f"{self._url}/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError((await answer.aread()).decode())
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                now = time.perf_counter()
                if any(choice["delta"].get("content") for choice in chunk["choices"]):
                    (self.first if last == start else self.between).append(now - last)
                    last = now
                if chunk.get("usage"):
                    details = chunk["usage"]["prompt_tokens_details"]
                    self.prompt += chunk["usage"]["prompt_tokens"]
                    self.computed += chunk["usage"]["prompt_tokens"] - sum(details.values())
                    self.generated += chunk["usage"]["completion_tokens"]


async def chat(load: Load, questions: list[str], concurrent: int, salt: str) -> None:
    """Each worker takes the next question until none is left."""
    left = iter(questions)
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        async def work() -> None:
            for question in left:
                await load.ask(client, [{"role": "user", "content": question}], 64, {"salt": salt})

        await asyncio.gather(*(work() for _ in range(concurrent)))


async def agents(load: Load, runs: list, rounds: int, salt: str) -> None:
    """Every run at the pace of its answers."""
    policy = {"type": "rolling_tool_outputs", "keep": 4, "reposition_above_tokens": 4096}
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        async def work(run) -> None:
            for message in run.rounds[:rounds]:
                await load.ask(client, run.messages[:message], 16,
                               {"policy": policy, "salt": salt})

        await asyncio.gather(*(work(run) for run in runs))


def milliseconds(values: list[float], quantile: float) -> float:
    return 1e3 * float(np.quantile(values, quantile))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=pathlib.Path, required=True, help="agent runs, JSON lines")
    parser.add_argument("--questions", type=pathlib.Path, required=True, help="GSM8K, JSON lines")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each agent run")
    parser.add_argument("--kv-dtype", default="bfloat16")
    args = parser.parse_args()
    console = Console()
    questions = [json.loads(line)["question"] for line in args.questions.open()]
    runs = read_runs(args.runs)
    bandwidth = copy_bandwidth()
    rows = []
    command = [*serve_command(None), "--kv-tokens", "65536", "--kv-dtype", args.kv_dtype]
    with console.status("starting a server"), started_server(command) as url:
        kv_bytes = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0][
            "kv_bytes_per_token"]

        def stats() -> dict[str, float]:
            return httpx.get(f"{url}/health", trust_env=False).json()["engine"]

        for concurrent in CONCURRENT:
            for name in ("chat", "agents"):
                load, before, start = Load(url), stats(), time.perf_counter()
                if name == "chat":
                    some = questions[:8 * concurrent] if concurrent < 8 else questions[:64]
                    asyncio.run(chat(load, some, concurrent, f"chat {concurrent}"))
                else:
                    asyncio.run(agents(load, runs[:concurrent], args.rounds,
                                       f"agents {concurrent}"))
                seconds, after = time.perf_counter() - start, stats()
                spent = {key: after[key] - before[key] for key in before}
                context = load.prompt / len(load.first)
                step = WEIGHTS * 2 + min(concurrent, len(load.first)) * context * kv_bytes
                limit = concurrent * bandwidth / step
                host = spent["host_seconds"] / (spent["host_seconds"] + spent["device_seconds"])
                rows.append([name, concurrent, load.generated / seconds, limit,
                             load.computed / seconds, milliseconds(load.first, 0.5),
                             milliseconds(load.first, 0.99), milliseconds(load.between, 0.5),
                             milliseconds(load.between, 0.99), 100 * host,
                             100 * (1 - load.computed / load.prompt), int(spent["compilations"])])
                console.print(rows[-1])
    report("serve", f"SmolLM2-135M, bfloat16, KV {args.kv_dtype}",
           ["work", "in flight", "tok/s", "limit of decoding, tok/s", "prompt tok/s computed",
            "TTFT p50 ms", "TTFT p99 ms", "between p50 ms", "between p99 ms", "host %",
            "prompt reused %", "compilations"], rows, bandwidth_gb_per_s=bandwidth / 1e9)


if __name__ == "__main__":
    main()
