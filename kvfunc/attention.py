"""Segment attention: packed queries read runs of slots, each run at its own shift.

This is the contract; xla.py, cpu/ and pallas/ carry it out. For a key born at b that now counts as
position n, `R(p) q . R(n) k = R(p + (b - n)) q . R(b) k`: so the keys are read exactly as they were
written and the query block is turned by the row's shift.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from kvfunc import cpu, xla
from kvfunc.contract import KERNEL_TYPES, Options, Partial
from kvfunc.quantize import Quantized, no_gradient
from kvfunc.rope import Rotation
from kvfunc.rows import Rows
from kvfunc.storage import number_dtype

IMPLEMENTATIONS = ("auto", "xla", "cpu", "pallas")


@functools.partial(jax.jit, static_argnames=("scale", "window", "softcap", "partials",
                                             "implementation"))
def segment_attention(
    q: Float[Array, "queries heads head_dim"],
    k: Shaped[Array, "slots kv_heads head_dim"] | Quantized,
    v: Shaped[Array, "slots kv_heads head_dim"] | Quantized,
    rows: Rows,
    births: Int[Array, " queries"],
    turn: Rotation,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    partials: bool = False,
    implementation: str = "auto",
) -> Float[Array, "queries heads head_dim"] | Partial:
    """Attention of packed queries to runs of slots (semantics, "keys never move, queries do").

    Query j sees key i of a row iff j is one of the row's queries,
    `raw + i <= query_raw[j] < visible_until`, and, with a window, `births[j] - position < window`.
    Query head h reads KV head `h // (heads / kv_heads)`. Slots that no row names are never used,
    whatever they hold.

    Args:
      q: queries rotated to their births; best left in float32, since they are cast to K's type
        once, after the turn (float32 where K is quantised).
      k: keys as they were written.
      v: values as they were written.
      rows: which queries read which run of slots, and at which shift.
      births: int32, RoPE position of each query.
      turn: `rope.rotation(rows.shift)`; one rotation a row, made once for all layers.
      scale: factor on the scores, by default `head_dim ** -0.5`.
      window: how many positions back a query sees, itself included; None for all.
      softcap: scores become `softcap * tanh(score / softcap)`.
      sinks: one logit a head that takes part in the softmax and has no value.
      partials: return the unnormalised (m, l, acc), without sinks, to be merged with others.
      implementation: "xla" runs everywhere; "cpu" is C code for CPUs; "pallas" is a kernel for
        TPUs, interpreted elsewhere; "auto" is "cpu" on CPUs where it can be compiled, else "xla".

    Returns:
      float32 outputs, 0 for queries that see nothing; or a `Partial`. Differentiable in q, k, v and
      sinks in reverse mode, not in `turn`. Under vmap a batch is more rows of one call.

    Raises:
      ValueError: if heads is not a multiple of kv_heads, window or softcap is not positive, or the
        implementation is unknown; or if differentiated where K or V is quantised.
      NotImplementedError: if the implementation that was asked for cannot be used here.
    """
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads, which is no multiple of k's {kv_heads} KV heads")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 position or None, got {window}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive or None, got {softcap}")
    options = Options(head_dim**-0.5 if scale is None else float(scale), window, softcap)
    attend = _attend(options, _chosen(implementation, k, v))
    partial = attend(q, k, v, rows, births, jax.tree.map(lax.stop_gradient, turn))
    return partial if partials else partial.finish(sinks)


def _chosen(implementation: str, k, v) -> str:
    """The implementation for this call: "xla", "cpu" or "pallas"."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, "
                         f"got {implementation!r}")
    asked = implementation
    if asked == "auto":
        asked = "cpu" if jax.default_backend() == "cpu" else "xla"
    missing = _missing(asked, k, v)
    if missing and implementation != "auto":
        raise NotImplementedError(f'implementation="{asked}" cannot be used: {missing}; use "xla"')
    return "xla" if missing else asked


def _missing(implementation: str, k, v) -> str | None:
    """Why an implementation cannot be used here, None if it can."""
    if implementation == "xla":
        return None
    for x in (k, v):
        if x.dtype not in KERNEL_TYPES:
            return f"KV of dtype {number_dtype(x)} is not built"
    return cpu.unavailable() if implementation == "cpu" else None


@functools.lru_cache(maxsize=64)
def _attend(options: Options, chosen: str) -> Callable[..., Partial]:
    """The differentiable core for one set of options; all tracing rules hang on it.

    Its outputs serve only in combinations that do not depend on m (merge, finish), so m counts as
    a constant in the backward pass: what flows through m and through l and acc cancels.
    """
    forward = _batch_is_more_rows(functools.partial(_forward, options, chosen))
    backward = _batch_is_more_rows(functools.partial(xla.backward, options))

    @jax.custom_vjp
    def attend(q, k, v, rows, births, turn):
        return forward(q, k, v, rows, births, turn)

    def attend_fwd(*args):
        for stored in args[1:3]:
            if isinstance(stored, Quantized):
                raise no_gradient(stored.values.dtype)
        partial = forward(*args)
        return partial, (args, partial.m)

    def attend_bwd(residuals, cotangent):
        (q, k, v, rows, births, turn), m = residuals
        dq, dk, dv = backward(q, k, v, rows, births, turn, m, cotangent.l, cotangent.acc)
        integers = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), (rows, births))
        return dq, dk, dv, *integers, jax.tree.map(jnp.zeros_like, turn)

    attend.defvjp(attend_fwd, attend_bwd)
    return attend


def _batch_is_more_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """Under vmap, offset `q_start` and `slot` and call once, for a loop cannot be batched well."""
    mapped = jax.custom_batching.custom_vmap(function)

    @mapped.def_vmap
    def rule(size, in_batched, q, k, v, rows, births, turn, *per_query):
        def batched(value, is_batched):
            return jax.tree.map(lambda x, b: x if b else jnp.broadcast_to(x, (size, *x.shape)),
                                value, is_batched)

        def flat(value):
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), value)

        args = [batched(value, is_batched) for value, is_batched in
                zip((q, k, v, rows, births, turn, *per_query), in_batched, strict=True)]
        q, k, v, rows, births, turn, *per_query = args
        index = jnp.arange(size, dtype=jnp.int32)[:, None]
        rows = dataclasses.replace(rows, q_start=rows.q_start + index * q.shape[1],
                                   slot=rows.slot + index * k.shape[1])
        out = mapped(*(flat(value) for value in (q, k, v, rows, births, turn, *per_query)))
        out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return mapped


def _forward(options: Options, chosen: str, *args) -> Partial:
    if chosen == "cpu":
        return lax.platform_dependent(*args, cpu=functools.partial(cpu.attend, options),
                                      default=functools.partial(xla.forward, options))
    if chosen == "pallas":
        from kvfunc import pallas

        kernel = functools.partial(pallas.forward, options)
        return lax.platform_dependent(*args, tpu=kernel,
                                      default=functools.partial(kernel, interpret=True))
    return xla.forward(options, *args)
