"""Segment attention: packed queries read runs of slots, each run at its own shift.

This is the contract; xla.py, cpu/, pallas/ and triton/ carry it out. For a key born at b that now
counts as position n, `R(p) q . R(n) k = R(p + (b - n)) q . R(b) k`: so the keys are read exactly as
they were written and the query block is turned by the row's shift.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from kvfunc import cpu, triton, xla
from kvfunc.contract import KERNEL_TYPES, Options, Partial
from kvfunc.quantize import Quantized, no_gradient
from kvfunc.rope import Rotation
from kvfunc.rows import Rows

IMPLEMENTATIONS = ("auto", "xla", "cpu", "pallas", "triton")
_FASTEST = {"cpu": "cpu", "tpu": "pallas", "gpu": "triton"}  # of JAX's backends
_log = logging.getLogger(__name__)


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
        TPUs, interpreted elsewhere; "triton" is a kernel for NVIDIA GPUs; "auto" is what is made
        for JAX's default backend, or "xla" where that cannot be used, which is logged once.

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
    attend = _attend(options, choose(implementation, k.dtype, v.dtype))
    if 0 in (q.shape[0], rows.q_len.shape[0], k.shape[0]):
        partial = Partial.empty(*q.shape)
    else:
        partial = attend(q, k, v, rows, births, jax.tree.map(lax.stop_gradient, turn))
    return partial if partials else partial.finish(sinks)


def choose(implementation: str, *stored: DTypeLike) -> str:
    """What `segment_attention` does with this `implementation`: "auto" becomes one of the others.

    Args:
      implementation: as for `segment_attention`.
      stored: types that K and V are stored as.

    Raises:
      ValueError: if it is unknown.
      NotImplementedError: if it cannot be used here, and is not "auto".
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, "
                         f"got {implementation!r}")
    asked = implementation
    if asked == "auto":
        asked = _FASTEST.get(jax.default_backend(), "xla")
    missing = _missing(asked, stored)
    if not missing:
        return asked
    if implementation == "auto":
        _say_once(f'attention runs on "xla", since "{asked}" cannot be used: {missing}')
        return "xla"
    raise NotImplementedError(f'implementation="{asked}" cannot be used: {missing}; use "xla"')


def _missing(implementation: str, stored: Sequence[DTypeLike]) -> str | None:
    """Why an implementation cannot be used here, None if it can."""
    if implementation == "xla":
        return None
    for dtype in map(jnp.dtype, stored):
        if dtype not in KERNEL_TYPES:
            return f"KV of dtype {dtype} is not built"
    if implementation == "cpu":
        return cpu.unavailable()
    return triton.unavailable() if implementation == "triton" else None


@functools.cache
def _say_once(sentence: str) -> None:
    _log.warning(sentence)


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
    if chosen == "triton":
        return triton.forward(options, *args)
    return xla.forward(options, *args)
