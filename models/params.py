"""The parameter tree of a model, filled one tensor at a time from any file format.

Every matrix is stored [out, in]; the rows of Q and K are in half-split RoPE order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvfunc.quantize import Quantized, quantize

from .config import ModelConfig

Place = tuple[int | None, str]  # layer (None outside the layers), module
Params = dict[str, Any]
Progress = Callable[[str, int, int], None]


def shapes(config: ModelConfig) -> dict[Place, tuple[int, ...]]:
    """Shape of every weight of the model, in the order of the forward pass."""
    width, mlp_width = config.width, config.mlp_width
    q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layer = {
        "attn_norm": (width,), "q": (q_width, width), "k": (kv_width, width),
        "v": (kv_width, width), "o": (width, q_width), "mlp_norm": (width,),
        "gate": (mlp_width, width), "up": (mlp_width, width), "down": (width, mlp_width),
    }
    table: dict[Place, tuple[int, ...]] = {(None, "embed"): (config.vocab_size, width)}
    table |= {(i, module): shape for i in range(config.layers) for module, shape in layer.items()}
    table[None, "norm"] = (width,)
    if not config.tied:
        table[None, "head"] = (config.vocab_size, width)
    return table


def check(config: ModelConfig, name: Callable[[Place], str],
          found: Mapping[str, tuple[int, ...]]) -> None:
    """Hold what a file contains against what the model needs.

    Args:
      config: the model.
      name: what the file format calls the weight at a place.
      found: shape of every tensor in the file.

    Raises:
      ValueError: for missing tensors, unknown ones, and shapes that differ, by name.
    """
    wanted = {name(place): shape for place, shape in shapes(config).items()}
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


def fill(config: ModelConfig, name: Callable[[Place], str], read: Callable[[Place], np.ndarray],
         dtype: Any, progress: Progress | None = None, quantization: str | None = None) -> Params:
    """Make the tree, holding one tensor at a time besides it.

    Args:
      config: the model.
      name: what the file format calls the weight at a place.
      read: the weight at a place, in any float type.
      dtype: type of every leaf that is not quantised.
      progress: called after each tensor with its name, how many are done, and how many there are.
      quantization: "int8" stores every matrix as int8, with one scale a row (an output channel, or
        a token of the vocabulary).

    Returns:
      `{"embed": {"weight": ...}, "layer_0": {"q": {"weight": ...}, ...}, ..., "norm": ...}`.
    """
    if quantization not in (None, "int8"):
        raise ValueError(f'quantization must be "int8" or None, got {quantization!r}')
    params: Params = {}
    places, dtype = list(shapes(config)), jnp.dtype(dtype)
    for done, (layer, module) in enumerate(places, start=1):
        parent = params if layer is None else params.setdefault(f"layer_{layer}", {})
        weight = read((layer, module))
        if quantization and weight.ndim == 2:
            parent[module] = {"weight": _rows_to_int8(_array(weight, np.dtype(np.float32)))}
        else:
            parent[module] = {"weight": _array(weight, dtype)}
        if progress is not None:
            progress(name((layer, module)), done, len(places))
    return params


def _array(value: np.ndarray, dtype: np.dtype) -> jax.Array:
    return jnp.array(value.astype(dtype, copy=False))  # a copy: `value` may be a mapped file


@jax.jit
def _rows_to_int8(weight: jax.Array) -> Quantized:
    return quantize(weight, jnp.int8)


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
