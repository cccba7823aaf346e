"""The parameter tree of a model, filled one tensor at a time from any file format.

Every matrix is stored [out, in]; the rows of Q and K are in half-split RoPE order.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvfunc.quantize import Quantized, quantize
from kvfunc.storage import fastest_dtype

from .config import ModelConfig


class Place(NamedTuple):
    """Where a parameter stands in the tree."""

    layer: int | None  # None: outside the layers
    module: str
    leaf: str = "weight"  # empty for a parameter that has no module of its own


class Source(NamedTuple):
    """What a file has for a place."""

    tensors: dict[str, tuple[int, ...]]  # shapes by name
    make: Callable[..., np.ndarray] = lambda tensor: tensor  # of them the parameter, [out, in]


Params = dict[str, Any]
Progress = Callable[[str, int, int], None]


def shapes(config: ModelConfig) -> dict[Place, tuple[int, ...]]:
    """Shape of every parameter of the model, in the order of the forward pass."""
    table: dict[Place, tuple[int, ...]] = {Place(None, "embed"): (config.vocab_size, config.width)}
    for i in range(config.layers):
        table |= {Place(i, module, leaf): shape
                  for (module, leaf), shape in _layer(config, i).items()}
    table[Place(None, "norm")] = (config.width,)
    if not config.tied:
        table[Place(None, "head")] = (config.vocab_size, config.width)
    return table


def _layer(c: ModelConfig, index: int) -> dict[tuple[str, str], tuple[int, ...]]:
    table: dict[tuple[str, str], tuple[int, ...]] = {}

    def add(module: str, *shape: int, bias: bool = False) -> None:
        table[module, "weight"] = shape
        if bias:
            table[module, "bias"] = shape[:-1]

    def add_mlp(width: int, prefix: str = "", *experts: int, bias: bool = False) -> None:
        add(prefix + "gate", *experts, width, c.width, bias=bias)
        add(prefix + "up", *experts, width, c.width, bias=bias)
        add(prefix + "down", *experts, c.width, width, bias=bias)

    add("attn_norm", c.width)
    widths = {name: count * c.head_dim for name, count in (
        ("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads))}
    for name, width in widths.items():
        add(name, width, c.width, bias=name in c.biases)
    if c.qk_norm:
        for name in "qk":
            add(f"{name}_norm", c.head_dim if c.qk_norm == "head" else widths[name])
    if c.sinks:
        table["sinks", ""] = (c.heads,)
    add("o", c.width, c.heads * c.head_dim, bias="o" in c.biases)
    if c.gemma_norms:
        add("attn_post_norm", c.width)
    add("mlp_norm", c.width)
    if c.has_experts(index):
        moe = c.moe
        add("router", moe.experts, c.width, bias=moe.biases)
        if moe.corrected:
            table["correction", ""] = (moe.experts,)
        add_mlp(moe.width, "experts_", moe.experts, bias=moe.biases)
        if moe.shared_width:
            add("shared_router", 1, c.width)
            add_mlp(moe.shared_width, "shared_")
    else:
        add_mlp(c.mlp_width)
    if c.gemma_norms:
        add("mlp_post_norm", c.width)
    return table


def from_rows(wanted: Mapping[Place, tuple[int, ...]], place: Place,
              fused: Mapping[str, Sequence[str]], spell: Callable[[str], str]) -> Source | None:
    """The source of a place whose rows stand in a tensor beside those of others; or None.

    Args:
      wanted: shape of every parameter.
      place: the place.
      fused: of each such tensor the modules, in order of their rows.
      spell: makes a tensor's name in the file.
    """
    for whole, modules in fused.items():
        if place.module in modules:
            sizes = [wanted[place._replace(module=module)][0] for module in modules]
            start, count = sum(sizes[:modules.index(place.module)]), wanted[place][0]
            return Source({spell(whole): (sum(sizes), *wanted[place][1:])},
                          operator.itemgetter(slice(start, start + count)))
    return None


def check(sources: Mapping[Place, Source], found: Mapping[str, tuple[int, ...]]) -> None:
    """Hold what a file contains against what the model needs.

    Args:
      sources: what the file should have for each place.
      found: shape of every tensor in the file.

    Raises:
      ValueError: for missing tensors, unknown ones, and shapes that differ, by name.
    """
    wanted = {name: shape for source in sources.values() for name, shape in source.tensors.items()}
    missing = [key for key in wanted if key not in found]
    if missing:
        raise ValueError(f"the model lacks {_some(missing)}: the file is incomplete or its "
                         "configuration is another model's")
    unknown = [key for key in found if key not in wanted]
    if unknown:
        raise ValueError(f"the model contains {_some(unknown)}, which this architecture does not "
                         "use: its configuration is another model's, or it needs a feature that "
                         "is not supported")
    for key, shape in wanted.items():
        if tuple(found[key]) != shape:
            raise ValueError(f"{key} has shape {tuple(found[key])} and the configuration asks for "
                             f"{shape}")


def size(config: ModelConfig, dtype: DTypeLike, quantization: str | None = None) -> int:
    """Bytes of the tree that `fill` makes."""
    each, total = jnp.dtype(dtype).itemsize, 0
    for place, shape in shapes(config).items():
        if quantization and _is_matrix(place, shape):
            total += math.prod(shape) + 4 * math.prod(shape[:-1])  # with one scale a row
        else:
            total += math.prod(shape) * (4 if place.module == "correction" else each)
    return total


def _is_matrix(place: Place, shape: tuple[int, ...]) -> bool:
    return place.leaf == "weight" and len(shape) > 1 and "router" not in place.module


def fill(config: ModelConfig, name: Callable[[Place], str], read: Callable[[Place], np.ndarray],
         dtype: Any, progress: Progress | None = None, quantization: str | None = None) -> Params:
    """Make the tree, holding one tensor at a time besides it.

    Args:
      config: the model.
      name: what the file format calls the weight at a place.
      read: the weight at a place, in any float type.
      dtype: type of every leaf that is not quantised.
      progress: called after each tensor with its name, how many are done, and how many there are.
      quantization: "int8" stores every matrix but the experts' routers as int8, with one scale a
        row (an output channel, or a token of the vocabulary).

    Returns:
      `{"embed": {"weight": ...}, "layer_0": {"q": {"weight": ...}, ...}, ..., "norm": ...}`.
    """
    if quantization not in (None, "int8"):
        raise ValueError(f'quantization must be "int8" or None, got {quantization!r}')
    params: Params = {}
    places, dtype = list(shapes(config)), jnp.dtype(dtype)
    for done, place in enumerate(places, start=1):
        layer, module, leaf = place
        parent = params if layer is None else params.setdefault(f"layer_{layer}", {})
        parent, key = (parent.setdefault(module, {}), leaf) if leaf else (parent, module)
        weight = read(place)
        if quantization and _is_matrix(place, weight.shape):
            parent[key] = _rows_to_int8(_array(weight, np.dtype(np.float32)))
        elif leaf == "weight" and module.startswith("experts_"):
            parent[key] = _array(weight, dtype).view(fastest_dtype(dtype))
        else:  # the correction decides between scores that are close
            parent[key] = _array(weight, np.float32 if module == "correction" else dtype)
        if progress is not None:
            progress(name(place), done, len(places))
    return params


def _array(value: np.ndarray, dtype: Any) -> jax.Array:
    return jnp.array(value.astype(dtype, copy=False))  # a copy: `value` may be a mapped file


@jax.jit
def _rows_to_int8(weight: jax.Array) -> Quantized:
    return quantize(weight, jnp.int8)


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
