"""Tiles of neighbouring queries and what they see: the tables that kernels go by.

Rows of few queries are read by small tiles, all others by large ones; both passes are merged. A
kernel turns queries by q cos + q' sin, where q' is what the sine multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvfunc.contract import Options, Partial
from kvfunc.rope import Rotation
from kvfunc.rows import Rows

FEW_QUERIES = 8  # rows of so many queries or fewer are read by small tiles


class Tiles(NamedTuple):
    """For each tile bounds of what its queries see, and of the rows that they stand in. int32."""

    last_raw: Array
    first_raw: Array
    oldest: Array  # smallest birth
    first_row: Array
    stop_row: Array


class Runs(NamedTuple):
    """For each row what a kernel needs of it; `position` is that of its first key as its queries
    see it. int32.
    """

    q_start: Array
    q_len: Array
    slot: Array
    length: Array
    raw: Array
    position: Array
    visible_until: Array


def in_passes(attend: Callable[[Rows, bool], Partial], rows: Rows) -> Partial:
    """Attention in one pass for the rows of few queries and one for the others.

    Args:
      attend: attention of a table; is told whether its rows are those of few queries.
      rows: the whole table.
    """
    few = rows.q_len <= FEW_QUERIES
    state = attend(rows.where(few), True)
    if rows.query_raw.shape[0] > FEW_QUERIES:
        state = state.merge(attend(rows.where(~few), False))
    return state


def up(count: int, multiple: int) -> int:
    """The next multiple."""
    return -(-count // multiple) * multiple


def padded(x: Array, size: int, fill: int = 0) -> Array:
    """Packed queries, filled up to whole tiles of `size`: [tiles * size, …]."""
    padding = [(0, up(x.shape[0], size) - x.shape[0])] + [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, padding, constant_values=fill)


def runs_of(rows: Rows) -> Runs:
    """The table as kernels read it."""
    columns = dict(position=rows.birth - rows.shift)
    return Runs(*(jnp.asarray(columns[name] if name in columns else getattr(rows, name), jnp.int32)
                  for name in Runs._fields))


def tiles_of(rows: Rows, births: Array, size: int) -> Tiles:
    """The tiles of `size` queries each."""
    raw = padded(rows.query_raw, size, Rows.NO_QUERY).reshape(-1, size)
    born = padded(births, size).reshape(-1, size)
    tile = jnp.arange(raw.shape[0], dtype=jnp.int32)[:, None]
    row = jnp.arange(rows.q_len.shape[0], dtype=jnp.int32)[None]
    meets = _meets(size, tile, rows.q_start[None], rows.q_len[None])
    meets &= ((rows.q_len > 0) & (rows.length > 0))[None]
    stop_row = jnp.where(meets, row + 1, 0).max(-1, initial=0)
    real = raw != Rows.NO_QUERY
    return Tiles(
        last_raw=raw.max(-1), first_raw=jnp.where(real, raw, Rows.NEVER).min(-1),
        oldest=jnp.where(real, born, Rows.NEVER).min(-1),
        first_row=jnp.where(meets, row, stop_row[:, None]).min(-1, initial=Rows.NEVER),
        stop_row=stop_row)


def _meets(size: int, tile, q_start, q_len):
    """Whether a row's queries and a tile's have some in common."""
    return (q_start < (tile + 1) * size) & (q_start + q_len > tile * size)


def seen(options: Options, slots: int, size: int, tile, bounds: Tiles, run: Runs):
    """The keys [start, stop) of a row that some query of a tile may see; of scalars, or arrays that
    fit each other.
    """
    is_read = _meets(size, tile, run.q_start, run.q_len) & (run.q_start >= 0) & (run.slot >= 0)
    is_read &= bounds.first_raw < run.visible_until
    length = jnp.clip(slots - run.slot, 0, run.length)
    stop = jnp.clip(bounds.last_raw - run.raw + 1, 0, jnp.where(is_read, length, 0))
    start = jnp.zeros_like(stop)
    if options.window is not None:
        start = jnp.clip(bounds.oldest - (options.window - 1) - run.position, 0, stop)
    return start, stop


def over_dims(turn: Rotation, dim: int) -> Float[Array, "rows 2 dim"]:
    """Cosine and sine of each dim; dims that do not turn have 1 and 0."""
    def spread(x, fill: float):
        x = jnp.repeat(x, 2, -1) if turn.interleaved else jnp.tile(x, (1, 2))
        return jnp.pad(x, ((0, 0), (0, dim - x.shape[-1])), constant_values=fill)

    return jnp.stack([spread(turn.cos, 1.0), spread(turn.sin, 0.0)], 1)


def under_sine(q: jax.Array, turn: Rotation) -> jax.Array:
    """q': for each pair (a, b) of q that turns, (-b, a)."""
    turning = 2 * turn.cos.shape[-1]
    x = q[..., :turning]
    if turn.interleaved:
        x = jnp.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    else:
        a, b = jnp.split(x, 2, -1)
        x = jnp.concatenate([-b, a], -1)
    return jnp.pad(x, [(0, 0)] * (q.ndim - 1) + [(0, q.shape[-1] - turning)])
