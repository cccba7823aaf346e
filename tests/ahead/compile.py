"""Compile the cases of a platform with its real compilers: a program of its own.

Args: tpu or cuda, and the names of cases, all without. The compilers are on PYTHONPATH. Prints a
line of JSON for each case: name, error or null, seconds; which custom calls were lowered, how many
of them in the compiled program are the kernel, which collectives are in it; its memory.
"""

from __future__ import annotations

import os

os.environ.update(
    JAX_PLATFORMS="cpu", JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost", TPU_WORKER_ID="0", TPU_ACCELERATOR_TYPE="v5litepod-4",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import contextlib
import functools
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import kvfunc.pallas
import kvfunc.triton
from kvfunc import KV, Rows, segment_attention
from kvfunc.models.llama import Llama
from kvfunc.models.params import shapes
from kvfunc.serve.engine import jitted_step

from .cases import CASES, KERNEL, SHAPES, Attention, Step

IMPLEMENTATION = {"tpu": "pallas", "cuda": "triton"}
CAPABILITY = {"a800": 80, "h200": 90}
FAULTS = {  # what is put in whose place
    "blocks-beyond-vmem": (kvfunc.pallas.Config, "of",
                           lambda q, k, few: kvfunc.pallas.Config(queries=128, keys=8192)),
    "blocks-beyond-shared-memory": (
        kvfunc.triton.Config, "of", lambda q, k, few: kvfunc.triton.Config(
            vectors=64, queries=32, keys=64, warps=8, stages=4)),
    "blocks-beyond-registers": (
        kvfunc.triton.Config, "of", lambda q, k, few: kvfunc.triton.Config(
            vectors=64, queries=32, keys=32, warps=4, stages=3)),
    "fp8-as-it-is": (kvfunc.triton, "_parts", lambda stored: (stored.values, stored.scales)),
}
MOST_SPILLED = 1024  # bytes of registers of a thread
COLLECTIVE = r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\("


def target(chip: str) -> str:
    """What XLA knows of a GPU."""
    return pathlib.Path(__file__).with_name(f"{chip}.txtpb").read_text()


def devices(chip: str, count: int) -> list[Any]:
    """One chip, or eight in one slice or on one host."""
    if chip in CAPABILITY:
        return topologies.get_topology_desc("", "cuda", target_config=target(chip),
                                            topology=f"1x1x{count}").devices
    grid = {1: "2x2x1" if chip == "tpu7x" else "2x2", 8: "2x4"}[count]
    return topologies.get_topology_desc(f"{chip}:{grid}", platform="tpu").devices[:count]


def numbers(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def placed(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def pool(case: Attention | Step, layers: int, shape: Any, dtype: str) -> KV:
    return jax.eval_shape(
        lambda: KV.zeros(layers, case.slots, shape.kv_heads, shape.head_dim, dtype))


def attention(case: Attention, implementation: str) -> tuple[Any, tuple[Any, ...]]:
    """The jitted function and its arguments."""
    shape, chips = SHAPES[case.model], devices(case.chip, case.chips)

    def attend(q, k, v, rows, births, sinks):
        return segment_attention(
            q, k, v, rows, births, shape.rope.rotation(rows.shift), sinks=sinks,
            implementation=implementation, **shape.options)

    kv = pool(case, 1, shape, case.dtype)
    args = (numbers(case.queries, shape.heads, shape.head_dim, dtype=jnp.float32), kv.k[0], kv.v[0],
            Rows(*[numbers(case.rows)] * len(Rows.COLUMNS), query_raw=numbers(case.queries)),
            numbers(case.queries),
            numbers(shape.heads, dtype=jnp.float32) if shape.sinks else None)
    if case.chips == 1:
        return jax.jit(attend), placed(args, SingleDeviceSharding(chips[0]))
    mesh, of_heads = Mesh(np.array(chips), ("kv_heads",)), P(None, "kv_heads")
    specs = of_heads, of_heads, of_heads, P(), P(), P("kv_heads")
    attend = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=of_heads, check_vma=False)
    return jax.jit(attend), tuple(placed(arg, NamedSharding(mesh, spec))
                                  for arg, spec in zip(args, specs, strict=True))


def step(case: Step, implementation: str) -> tuple[Any, tuple[Any, ...]]:
    """The engine's jitted step and its arguments."""
    config, params = case.config, {}
    for (layer, module, leaf), shape in shapes(config).items():
        parent = params if layer is None else params.setdefault(f"layer_{layer}", {})
        parent[module] = {leaf: numbers(*shape, dtype=jnp.bfloat16)}
    args = (params, pool(case, case.layers, config, "bfloat16"), numbers(4, case.queries),
            numbers(len(Rows.COLUMNS), case.rows), numbers(16))
    network = Llama(config, jnp.bfloat16, implementation)
    return (jitted_step(network, lambda: None),
            placed(args, SingleDeviceSharding(devices(case.chip, 1)[0])))


def compiled(platform: str, case: Attention | Step) -> dict[str, Any]:
    """Compile it and say what came of it."""
    implementation, make, fault = IMPLEMENTATION[platform], step, contextlib.nullcontext()
    if isinstance(case, Attention):
        implementation, make = "xla" if case.xla else implementation, attention
        fault = mock.patch.object(*FAULTS[case.fault]) if case.fault else fault
    report: dict[str, Any] = dict(name=case.name, error=None)
    jax.clear_caches()  # a trace that is kept knows nothing of faults
    start = time.perf_counter()
    try:
        with fault:
            function, args = make(case, implementation)
            lowered = function.lower(*args)
            program = lowered.compile()
    except Exception as error:
        return report | dict(error=f"{type(error).__name__}: {error}",
                             seconds=time.perf_counter() - start)
    text, memory = program.as_text(), program.memory_analysis()
    return report | dict(
        seconds=time.perf_counter() - start,
        lowered=sorted(set(re.findall(r"custom_call @(\w+)", lowered.as_text()))),
        kernels=text.count(f'custom_call_target="{KERNEL[platform]}"'),
        collectives=sorted(set(re.findall(COLLECTIVE, text))),
        memory={name.removesuffix("_size_in_bytes"): getattr(memory, name) for name in dir(memory)
                if name.endswith("_size_in_bytes") and not name.startswith("host_")})


def with_triton(cases: list[Attention | Step]) -> Iterator[dict[str, Any]]:
    """Let jax-triton compile for GPUs that are not here, and check what is left to the first call.

    XLA takes its kernels as PTX. Only when they are called, they are assembled, by the ptxas that
    comes with `jax[cuda12]`, of CUDA 12.9, and their shared memory is held against the GPU's. What
    does not fit into registers is never refused, only slow.
    """
    import jax_triton.triton_lib
    from jax._src.lib import gpu_triton
    from triton import knobs

    make_ptx = jax_triton.triton_lib.compile_ttir_to_ptx_inplace

    def checked(ttir, backend, options, capability):
        made = make_ptx(ttir, backend, options, capability)
        (chip,) = (chip for chip, its in CAPABILITY.items() if its == capability)
        limit = int(re.search(r"shared_memory_per_block_optin: (\d+)", target(chip))[1])
        if made.shared_mem_bytes > limit:
            raise ValueError(f"a program takes {made.shared_mem_bytes} bytes of shared memory, and "
                             f"{chip} has {limit}")
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
            ptx.write(made.binary)
            ptx.flush()
            name = f"--gpu-name=sm_{capability}" + "a" * (capability >= 90)
            ran = subprocess.run([knobs.nvidia.ptxas.path, "-v", name, ptx.name, "-o", os.devnull],
                                 capture_output=True, text=True)
        if ran.returncode:
            raise ValueError(f"ptxas of CUDA {knobs.nvidia.ptxas.version} failed: {ran.stderr}")
        spilled = int(re.search(r"(\d+) bytes spill stores", ran.stderr)[1])
        if spilled > MOST_SPILLED:
            raise ValueError(f"a program spills {spilled} bytes of registers")
        return made

    with (mock.patch.object(jax_triton.triton_lib, "compile_ttir_to_ptx_inplace", checked),
          mock.patch.object(kvfunc.triton, "unavailable", lambda: None)):
        for case in cases:
            with mock.patch.object(gpu_triton, "get_compute_capability",
                                   lambda _, case=case: CAPABILITY[case.chip]):
                yield compiled("cuda", case)


def main(platform: str, *names: str) -> None:
    cases = [case for case in CASES[platform] if not names or case.name in names]
    reports = with_triton(cases) if platform == "cuda" else map(
        functools.partial(compiled, platform), cases)
    for report in reports:
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
