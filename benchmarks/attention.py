"""How near segment attention comes to what the device allows.

Work, a layer a call: decode of many requests, prefill of one, and both with the context cut into 64
runs of slots that have shifts of their own and holes between them. The floor is the larger of two
times. Bytes: K and V of each slot that some query sees, once a KV head, and all queries and
outputs, at the bandwidth of copying a large array. FLOPs: two products for each pair of a query and
a key that it sees, at the speed of one large matrix product. Both speeds are of the same run. On
CPUs bandwidth is the faster of copying and summing, since a write reads first, and int8 is
multiplied as float32.

Calls take turns over so many pools that no cache holds them. Kernels of GPUs and TPUs run several
layers in one program, as a model does, which has one plan for all of them. XLA's own estimate is
printed for "xla" alone: the others are opaque to it, and of a loop it counts one turn. Peers, on
contiguous KV: cuDNN through `jax.nn.dot_product_attention` on GPUs, torch on CPUs.

With `--check` every implementation is compared with dense attention in float64 instead. With
`--for h200` the floors are printed by that device's data sheet, and nothing runs.
"""

import argparse
import dataclasses
import functools
import importlib.util
import itertools
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp
import numpy as np
from attention_check import LLAMA_3_1_8B, SMOLLM2_135M, Shape, check_all, console
from common import report
from rich.progress import Progress
from rich.table import Table

from kvfunc import KV, Rows, fastest_dtype
from kvfunc.attention import IMPLEMENTATIONS, choose, segment_attention
from kvfunc.linear import product
from kvfunc.storage import write_layer

LLAMA_3_1_70B = Shape(64, 8, 128)
ALL = [name for name in IMPLEMENTATIONS if name != "auto"]
MADE_FOR = {"cpu": "cpu", "pallas": "tpu", "triton": "gpu"}  # JAX's backend; "xla" is for all
PEERS = {"cpu": "torch", "gpu": "cudnn"}
HOLE = 16  # slots between two runs
CACHES = 2**29  # bytes; no cache has more
LAYERS, IN_FLIGHT = 8, 8  # of a program of kernels at least; programs
# Bytes and bfloat16 FLOPs a second. A chip of tpu7x is two devices to JAX.
DATA_SHEETS = {"a800": (2.039e12, 312e12), "h200": (4.8e12, 989e12), "v5e": (0.819e12, 197e12),
               "v6e": (1.638e12, 918e12), "tpu7x": (7.38e12, 2307e12)}


class Work(NamedTuple):
    """What a table of rows asks for."""

    queries: int
    pairs: int  # of a query and a key that it sees
    keys: int  # slots that some query sees


def work_of(rows: Rows, births: np.ndarray, window: int | None = None) -> Work:
    """Count it. A slot that several rows read is one key, and makes pairs in each of them."""
    edges = np.zeros(int((rows.slot + rows.length).max(initial=0)) + 1, np.int64)
    pairs = 0
    for q_start, q_len, slot, length, raw, birth, shift, until in zip(
            *(getattr(rows, name) for name in Rows.COLUMNS), strict=True):
        own = slice(q_start, q_start + q_len)
        query_raw = rows.query_raw[own]
        stop = np.where(query_raw < until, np.clip(query_raw - raw + 1, 0, length), 0)
        start = np.zeros_like(stop)
        if window is not None:
            start = np.clip(births[own] - (window - 1) - (birth - shift), 0, stop)
        pairs += int((stop - start).sum())
        np.add.at(edges, slot + start, 1)
        np.add.at(edges, slot + stop, -1)
    return Work(int((rows.query_raw != Rows.NO_QUERY).sum()), pairs,
                int((np.cumsum(edges) > 0).sum()))


@dataclasses.dataclass(frozen=True)
class Workload:
    """The last `queries` tokens of each request read its `keys` tokens, themselves included."""

    model: str
    shape: Shape
    requests: int
    queries: int
    keys: int
    runs: int = 1
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        kind = f"decode {self.requests} x" if self.queries == 1 else "prefill"
        return "".join([f"{self.model} {kind} {self.keys:,}", ", int8" * (self.dtype == "int8"),
                        f", {self.runs} runs" * (self.runs > 1)])

    @property
    def heads(self) -> str:
        """Query heads, KV heads, head_dim."""
        return f"{self.shape.heads}/{self.shape.kv_heads}/{self.shape.head_dim}"

    def scaled(self, scale: int) -> "Workload":
        """Fewer requests, or fewer heads of a single one; contexts and groups stay."""
        if self.requests > 1:
            return dataclasses.replace(self, requests=max(1, self.requests // scale))
        kv_heads = max(1, self.shape.kv_heads // scale)
        return dataclasses.replace(self, shape=dataclasses.replace(
            self.shape, kv_heads=kv_heads,
            heads=self.shape.heads // self.shape.kv_heads * kv_heads))

    def table(self) -> tuple[Rows, int]:
        """Its rows, and the slots that they need."""
        cuts = np.linspace(0, self.keys, self.runs + 1).astype(np.int32)
        run, raw, zero = np.arange(self.runs, dtype=np.int32), cuts[:-1], np.zeros_like(cuts[:-1])
        size = self.keys + HOLE * self.runs
        tables = [Rows(zero, zero + self.queries, request * size + raw + HOLE * run,
                       np.diff(cuts), raw, raw + 7 * run, 7 * run, zero + Rows.NEVER,
                       np.arange(self.keys - self.queries, self.keys, dtype=np.int32))
                  for request in range(self.requests)]
        return Rows.concatenate(tables), self.requests * size

    def target(self) -> tuple[str, float] | None:
        """Of the kernel for GPUs: which ratio should be at most what."""
        if self.runs > 1:
            return "/ one run", 1.05
        if self.queries > 1:
            return "/ peer", 1.3
        return ("/ floor", 1 / 0.85) if self.requests >= 16 else None


@functools.cache
def cost(workload: Workload) -> tuple[int, int]:
    """Bytes that must move and FLOPs that must be done."""
    rows, _ = workload.table()
    work, shape = work_of(rows, rows.query_raw), workload.shape
    of_vector = shape.head_dim + 4 if workload.dtype == "int8" else 2 * shape.head_dim
    queries_and_outputs = 2 * 4 * work.queries * shape.heads * shape.head_dim
    return (2 * work.keys * shape.kv_heads * of_vector + queries_and_outputs,
            4 * work.pairs * shape.heads * shape.head_dim)


DECODE = [Workload("Llama-3.1-70B", LLAMA_3_1_70B, requests, 1, keys)
          for requests in (16, 32) for keys in (4096, 8192)]
PREFILL = [Workload("Llama-3.1-8B", LLAMA_3_1_8B, 1, keys, keys) for keys in (2048, 8192)]
QUICK = [DECODE[-1], dataclasses.replace(DECODE[-1], runs=64),
         Workload("SmolLM2-135M", SMOLLM2_135M, 8, 1, 2048),
         PREFILL[-1], dataclasses.replace(PREFILL[-1], runs=64)]
WORKLOADS = [*DECODE[:-1], *QUICK[:2], dataclasses.replace(DECODE[-1], dtype="int8"), QUICK[2],
             PREFILL[0], *QUICK[3:]]


class Device(NamedTuple):
    """What a device can do."""

    name: str
    bandwidth: float  # bytes a second
    peaks: dict[str, float]  # FLOPs a second, by the type of what is multiplied

    def floor(self, workload: Workload) -> tuple[float, str]:
        """Seconds, and what they are due to."""
        moved, flops = cost(workload)
        of_float32 = workload.dtype == "int8" and "float32" in self.peaks
        dtype = "float32" if of_float32 else "bfloat16"
        return max((moved / self.bandwidth, "bytes"), (flops / self.peaks[dtype], f"{dtype} FLOPs"))


def measured_device() -> Device:
    """The one that JAX runs on."""
    if jax.default_backend() == "cpu":
        return Device("cpu", max(copy_bandwidth(1), common.copy_bandwidth()),
                      {dtype: matmul_speed(dtype, 4096, 1) for dtype in ("bfloat16", "float32")})
    return Device(jax.devices()[0].device_kind, copy_bandwidth(IN_FLIGHT),
                  {"bfloat16": matmul_speed("bfloat16", 8192, IN_FLIGHT)})


def copy_bandwidth(in_flight: int) -> float:
    """Bytes a second, read and written, of copying a large array into one that is there."""
    # Negated, since XLA would give back a mere copy's source.
    copy = jax.jit(lambda source, target: -source, donate_argnums=1, keep_unused=True)
    source = jnp.ones(2**28, jnp.float32)
    target = jnp.zeros_like(source)

    def run():
        nonlocal target
        target = copy(source, target)
        return target

    return 2 * source.nbytes / median(run, 0.5, in_flight)


def matmul_speed(dtype: str, size: int, in_flight: int) -> float:
    """FLOPs a second of one large product."""
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.dtype(dtype))
    multiply = jax.jit(lambda x: product(x, x, jnp.float32))
    return 2 * size**3 / median(lambda: multiply(x), 0.5, in_flight)


def median(run: Callable[[], Any], least: float, in_flight: int = 1) -> float:
    """Seconds a run, of as many as take `least` seconds, once it is warm."""
    def runs() -> float:
        start = time.perf_counter()
        for _ in range(in_flight):
            out = run()
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / in_flight

    runs()
    times = [runs() for _ in range(3)]
    while len(times) * in_flight * min(times) < least:
        times.append(runs())
    return float(np.median(times))


def in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """Makes another of the calls each time."""
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def copies(pool: list, nbytes: int, count: int = 1) -> list[list]:
    """So many of a pool, or more, that no cache holds them all."""
    count = min(64, max(count, -(-CACHES // nbytes)))
    return [pool, *(jax.tree.map(lambda x: x + 0, pool) for _ in range(count - 1))]


class Timed(NamedTuple):
    """Seconds a layer, and the bytes and FLOPs of the compiler's estimate."""

    seconds: float
    moved: float | None = None
    flops: float | None = None


def time_ours(workload: Workload, implementation: str, least: float) -> Timed:
    """One of the implementations."""
    shape, (rows, slots) = workload.shape, workload.table()
    keys = jax.random.split(jax.random.key(0), 3)
    pool = [_stored(workload, slots, key) for key in keys[:2]]
    nbytes = sum(x.nbytes for x in jax.tree.leaves(pool))
    q = jax.random.normal(keys[2], (len(rows.query_raw), shape.heads, shape.head_dim))
    rows = jax.tree.map(jnp.asarray, rows)
    rest = q, rows, rows.query_raw, shape.rope.rotation(rows.shift)

    def layer(pool, q, *rest):
        return segment_attention(q, *pool, *rest, implementation=implementation)

    if implementation in ("pallas", "triton"):
        return Timed(_time_layers(layer, copies(pool, nbytes, LAYERS), rest, least))
    program = jax.jit(layer).lower(pool, *rest).compile()
    taken = median(in_turn([functools.partial(program, pool, *rest)
                            for pool in copies(pool, nbytes)]), least)
    estimate = (implementation == "xla" and program.cost_analysis()) or {}
    return Timed(taken, estimate.get("bytes accessed"), estimate.get("flops"))


def _stored(workload: Workload, slots: int, key):
    """Keys or values; every thousand slots hold the same."""
    shape, block = workload.shape, 1024
    stored = KV.zeros(1, block, shape.kv_heads, shape.head_dim, fastest_dtype(workload.dtype)).k[0]
    stored = write_layer(stored, jnp.arange(block),
                         jax.random.normal(key, (block, shape.kv_heads, shape.head_dim)))
    return jax.tree.map(lambda x: jnp.tile(x, (-(-slots // block), *[1] * (x.ndim - 1)))[:slots],
                        stored)


def _time_layers(layer: Callable[..., Any], pools: list, rest: Sequence[Any],
                 least: float) -> float:
    """Seconds a layer of one program that has a layer for each pool."""
    program = jax.jit(lambda pools, *rest: [layer(pool, *rest) for pool in pools])
    return median(lambda: program(pools, *rest), least, IN_FLIGHT) / len(pools)


def time_peer(workload: Workload, least: float) -> Timed:
    """The peer, with queries and KV in bfloat16."""
    shape, is_causal = workload.shape, workload.queries > 1
    sizes = [(workload.queries, shape.heads), *[(workload.keys, shape.kv_heads)] * 2]
    nbytes = 2 * 2 * workload.requests * workload.keys * shape.kv_heads * shape.head_dim
    if jax.default_backend() == "gpu":
        keys = jax.random.split(jax.random.key(0), 3)
        q, *pool = (jax.random.normal(key, (workload.requests, *size, shape.head_dim), jnp.bfloat16)
                    for key, size in zip(keys, sizes, strict=True))

        def layer(pool, q):
            return jax.nn.dot_product_attention(q, *pool, is_causal=is_causal,
                                                implementation="cudnn")

        return Timed(_time_layers(layer, copies(pool, nbytes, LAYERS), [q], least))
    import torch

    q, *pool = (torch.randn(workload.requests, heads, tokens, shape.head_dim, dtype=torch.bfloat16)
                for tokens, heads in sizes)
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, q,
                               is_causal=is_causal, enable_gqa=True)
    return Timed(median(in_turn([functools.partial(attend, *pool)
                                 for pool in copies(pool, nbytes)]), least))


def usable(asked: Sequence[str]) -> tuple[list[str], list[str]]:
    """Implementations that run here, and why the others do not; none is interpreted unasked."""
    names, reasons, backend = [], [], jax.default_backend()
    for name in asked or ALL:
        if not asked and MADE_FOR.get(name, backend) != backend:
            reasons.append(f"{name}: it is for {MADE_FOR[name].upper()}s, and JAX runs on "
                           f"{backend!r} here")
            continue
        try:
            names.append(choose(name, jnp.bfloat16))
        except NotImplementedError as error:
            reasons.append(f"{name}: {error}")
    return names, reasons


def peers() -> list[str]:
    """The peer that is here, if there is one."""
    name = PEERS.get(jax.default_backend())
    if name == "torch" and not importlib.util.find_spec("torch"):
        console.print("no peer in this run: torch is not installed")
        name = None
    return [name] if name else []


def measure(workloads: Sequence[Workload], systems: Sequence[str], least: float, limit: float,
            ) -> tuple[dict[tuple[Workload, str], Timed], bool]:
    """All that works and for which there is time, and whether none failed."""
    end, results, is_well = time.monotonic() + limit, {}, True
    # Side by side what is compared; XLA last, since time may run out.
    pairs = [(workload, system) for is_last in (False, True) for workload in workloads
             for system in systems if (system == "xla") is is_last and (
                 system in ALL or (workload.runs, workload.dtype) == (1, "bfloat16"))]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(pairs))
        for workload, system in pairs:
            progress.update(task, description=f"{system}: {workload}")
            if time.monotonic() > end:
                console.print(f"not measured, since time is up: {system}, {workload}")
                continue
            try:
                results[workload, system] = (time_ours(workload, system, least) if system in ALL
                                             else time_peer(workload, least))
            except Exception as error:
                is_well = False
                console.print(f"failed: {system}, {workload}: {str(error)[:400]}")
            progress.advance(task)
    return results, is_well


def rows_of(results: dict[tuple[Workload, str], Timed], device: Device) -> Iterator[dict[str, Any]]:
    """A row for each result, those of the same work together."""
    order = list(dict.fromkeys(workload for workload, _ in results))
    for workload, system in sorted(results, key=lambda pair: order.index(pair[0])):
        timed, (floor, reason) = results[workload, system], device.floor(workload)
        moved, flops = cost(workload)
        peer = next((results[workload, name] for name in PEERS.values() if name != system
                     and (workload, name) in results), None)
        one_run = results.get((dataclasses.replace(workload, runs=1), system))
        row = {"work": str(workload), "heads": workload.heads, "system": system,
               "MB": moved / 1e6, "GFLOP": flops / 1e9, "floor µs": floor * 1e6,
               "floor is": reason,
               "XLA's MB": timed.moved and timed.moved / 1e6,
               "XLA's GFLOP": timed.flops and timed.flops / 1e9,
               "µs": timed.seconds * 1e6, "/ floor": timed.seconds / floor,
               "/ peer": peer and timed.seconds / peer.seconds,
               "/ one run": timed.seconds / one_run.seconds
               if one_run and workload.runs > 1 else None}
        if jax.default_backend() == "gpu":
            name, most = (system == "triton" and workload.target()) or (None, None)
            row["target"] = name and f"{name} <= {most:.2f}"
            row["met"] = row[name] <= most if name and row[name] else None
        yield row


def show_floors(name: str, workloads: Sequence[Workload]) -> None:
    """Print what a data sheet allows."""
    bandwidth, peak = DATA_SHEETS[name]
    device = Device(name, bandwidth, {"bfloat16": peak})
    table = Table("work", "heads", "MB", "GFLOP", "floor µs", "floor is",
                  title=f"{name}, by its data sheet: {bandwidth / 1e12:g} TB/s, "
                        f"{peak / 1e12:g} TFLOP/s in bfloat16")
    for workload in workloads:
        (floor, reason), (moved, flops) = device.floor(workload), cost(workload)
        table.add_row(str(workload), workload.heads, f"{moved / 1e6:,.0f}",
                      f"{flops / 1e9:,.1f}", f"{floor * 1e6:,.1f}", reason)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--implementation", action="append", default=[], choices=ALL,
                        help="may be given several times; by default all that can be used here")
    parser.add_argument("--scale", type=int, metavar="N", help="a part of the requests, or of the "
                        "heads of a single one; by default a fourth on CPUs, an eighth if quick")
    parser.add_argument("--quick", action="store_true", help="half of the work")
    parser.add_argument("--limit", type=float, default=np.inf, metavar="SECONDS",
                        help="begin no measurement after that")
    parser.add_argument("--check", action="store_true", help="compare with float64 instead")
    parser.add_argument("--for", dest="sheet", choices=DATA_SHEETS,
                        help="print the floors of this device instead")
    parser.add_argument("--out", type=pathlib.Path, default=common.RESULTS, help="a folder")
    args = parser.parse_args(arguments)
    workloads = QUICK if args.quick else WORKLOADS
    if args.sheet:
        return show_floors(args.sheet, [workload.scaled(args.scale or 1) for workload in workloads])
    implementations, reasons = usable(args.implementation)
    if args.implementation and reasons:
        parser.error("; ".join(reasons))
    if args.check:
        sys.exit(not check_all(implementations, reasons))
    for reason in reasons:
        console.print(f"not measured: {reason}")
    scale = args.scale or (4 * (1 + args.quick) if jax.default_backend() == "cpu" else 1)
    with console.status("measuring the device"):
        device = measured_device()
    results, is_well = measure([workload.scaled(scale) for workload in workloads],
                               [*implementations, *peers()], 0.2 if args.quick else 1.0, args.limit)
    if rows := [*rows_of(results, device)]:
        common.RESULTS = args.out
        report("attention", f"segment attention, a layer, on {device.name}", [*rows[0]],
               [[*row.values()] for row in rows], device=device.name, scale=scale,
               load=os.getloadavg()[0], bandwidth_gb_per_s=device.bandwidth / 1e9,
               peak_tflop_per_s={name: peak / 1e12 for name, peak in device.peaks.items()})
    sys.exit(not (rows and is_well))


if __name__ == "__main__":
    main()
