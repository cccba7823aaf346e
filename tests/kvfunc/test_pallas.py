"""The Pallas kernel in JAX's simulator of a TPU.

Its memory begins as NaN, a read outside of it raises, a copy lands when it is waited for, and what
is read or written too early is a race, which JAX 0.10.2 prints and later ones raise.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvfunc import pallas, xla
from kvfunc.contract import Options
from kvfunc.quantize import quantize

from .shapes import Request, Run, Shape, problem

SIMULATED = pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise",
                                  uninitialized_memory="nan")
SHAPE = Shape(6, 2, 32, queries=5, slots=2300, rows=10)
TWO_TILES = dataclasses.replace(SHAPE, queries=140)
SMALL = dataclasses.replace(SHAPE, slots=60)
GEMMA = dataclasses.replace(SHAPE, window=70, softcap=5.0, queries=24)
# A block has 512 keys, a large tile 128 queries.
DECODE = [Request(1, [Run(1100, shift=8)]), Request(1, [Run(40), Run(130, shift=900)]), Request(1)]
CONTEXT = [Run(130, shift=5), Run(1, until=3), Run(600, shift=-9)]


@pytest.fixture(autouse=True)
def forgetting():
    """What a fault leaves in the simulator."""
    yield
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize("dtype, made", [
    pytest.param("float32", problem(SHAPE, *DECODE), id="decode"),
    pytest.param("int8", problem(SHAPE, *DECODE), id="decode-of-int8"),
    pytest.param("float32", problem(TWO_TILES, Request(130, CONTEXT), *DECODE),
                 id="prefill-and-decode"),
    pytest.param("int8", problem(GEMMA, Request(20, CONTEXT), DECODE[1]),
                 id="window-and-softcap-of-int8"),
    pytest.param("float32", problem(GEMMA, Request(20, CONTEXT), DECODE[1], at_end=True),
                 id="runs-that-end-with-the-pool"),
    pytest.param("float32", problem(SMALL, Request(2, [Run(9, shift=3)]), Request(1, [Run(30)])),
                 id="pool-smaller-than-a-block")])
def test_there_is_no_race_and_what_xla_gives(dtype, made, capfd):
    """Slots outside of the runs hold NaN, and every token and head has a scale of its own."""
    shape = made.shape
    options = Options(shape.head_dim**-0.5, shape.window, shape.softcap)
    q, k, v, births = map(jnp.asarray, (made.q, made.k, made.v, made.births))
    if dtype == "int8":
        k, v = (jax.jit(quantize, static_argnums=1)(x, jnp.int8) for x in (k, v))
    turn = shape.rope.rotation(jnp.asarray(made.rows.shift))
    args = q, k, v, made.rows, births, turn
    simulated = jax.jit(lambda *args: pallas.forward(options, *args, interpret=SIMULATED))
    mine = jax.block_until_ready(simulated(*args))
    assert capfd.readouterr() == ("", "")  # races, and semaphores that are not 0 at the end
    right = jax.jit(lambda *args: xla.forward(options, *args))(*args)
    np.testing.assert_allclose(mine.m, right.m, rtol=0, atol=1e-5)
    np.testing.assert_allclose(mine.finish(), right.finish(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("hasty, said", [(True, "RACE DETECTED"), (False, "")])
def test_a_block_that_is_read_before_it_arrived_is_a_race(hasty, said, capfd):
    def kernel(x, out, block, arrived):
        copy = pltpu.make_async_copy(x, block, arrived)
        copy.start()
        if not hasty:
            copy.wait()
        out[...] = block[...]
        if hasty:
            copy.wait()

    x = jnp.ones((8, 128))
    call = pl.pallas_call(
        kernel, out_shape=x, in_specs=[pl.BlockSpec(memory_space=pl.ANY)], interpret=SIMULATED,
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA])
    raised = ""
    try:
        np.testing.assert_array_equal(call(x), np.full(x.shape, np.nan if hasty else 1.0))
    except jax.errors.JaxRuntimeError as error:
        raised = str(error)
    heard = raised + "".join(capfd.readouterr())
    assert said in heard and bool(heard) == hasty


def test_a_table_that_is_longer_than_smem_runs_in_parts(monkeypatch):
    made = problem(SHAPE, *DECODE, dtype=np.float32)
    options = Options(SHAPE.head_dim**-0.5, SHAPE.window, SHAPE.softcap)
    q, k, v, rows, births = jax.tree.map(
        jnp.asarray, (made.q, made.k, made.v, made.rows, made.births))
    args = q, k, v, rows, births, SHAPE.rope.rotation(rows.shift)
    calls = []

    def counted(*args, attend=pallas._pass, **kwargs):
        calls.append(args[4].q_len.shape)
        return attend(*args, **kwargs)

    monkeypatch.setattr(pallas, "_pass", counted)
    monkeypatch.setattr(pallas, "MOST_ROWS", 4)
    parts = pallas.forward(options, *args, interpret=True)
    assert calls == [(4,), (4,), (2,)]
    np.testing.assert_allclose(parts.finish(), xla.forward(options, *args).finish(), rtol=0,
                               atol=1e-5)
