"""Weights and configuration of a Llama-family model from one GGUF file."""

from __future__ import annotations

import os
from typing import Any

import gguf
import numpy as np

from .config import ModelConfig
from .params import Params, Place, Progress, Source, check, fill, shapes

_TOP = {"embed": "token_embd", "norm": "output_norm", "head": "output"}
_LAYER = {
    "attn_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "mlp_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down",
}
_ROPE_FACTORS = "rope_freqs.weight"


class _Reader(gguf.GGUFReader):
    """A reader over a plain array: it takes a few slices a token, and np.memmap's are slow."""

    @property
    def data(self) -> np.ndarray:
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._data = np.asarray(mapped)


def load_gguf(path: str | os.PathLike[str] | gguf.GGUFReader, dtype: Any,
              progress: Progress | None = None,
              quantization: str | None = None) -> tuple[ModelConfig, Params]:
    """Load a GGUF file of architecture "llama", dequantised.

    Args:
      path: the file, or the reader that has it open already (opening takes seconds where the
        vocabulary is large).
      dtype: type of every weight.
      progress: called after each tensor with its name, how many are done, and how many there are.
      quantization: as that of `params.fill`.

    Returns:
      The configuration, and the parameter tree described in `params.py`.

    Raises:
      ValueError: for another architecture, and for tensors that are missing, unknown, of the wrong
        shape or of a type that cannot be read, by name.
    """
    config, tensors = _checked(path if isinstance(path, gguf.GGUFReader) else open_gguf(path))

    def read(place: Place) -> np.ndarray:
        weight = _dequantize(tensors[_name(place)])
        match place.module:
            case "q":
                return _half_split(weight, config.heads, config.rope.rotary_dim)
            case "k":
                return _half_split(weight, config.kv_heads, config.rope.rotary_dim)
        return weight

    return config, fill(config, _name, read, dtype, progress, quantization)


def inspect_gguf(path: str | os.PathLike[str]) -> ModelConfig:
    """The configuration of a file that `load_gguf` can load; no weight is read.

    Raises:
      ValueError: as `load_gguf`.
    """
    return _checked(open_gguf(path))[0]


def _checked(reader: gguf.GGUFReader) -> tuple[ModelConfig, dict[str, gguf.ReaderTensor]]:
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors = tensors.pop(_ROPE_FACTORS, None)
    config = ModelConfig.from_gguf(
        _fields(reader), tied=_name(Place(None, "head")) not in tensors,
        rope_factors=None if factors is None else _dequantize(factors).ravel().tolist())
    check({place: Source({_name(place): shape}) for place, shape in shapes(config).items()},
          {name: tuple(reversed(tensor.shape.tolist())) for name, tensor in tensors.items()})
    return config, tensors


def open_gguf(path: str | os.PathLike[str]) -> gguf.GGUFReader:
    """Open a GGUF file without reading its tensors.

    Raises:
      ValueError: if it is not a GGUF file, or only one part of a split one.
    """
    try:
        reader = _Reader(path)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} cannot be read as a GGUF file: {error}") from error
    parts = reader.get_field("split.count")
    if parts is not None and parts.contents() > 1:
        raise ValueError(f"{os.fspath(path)} is one of {parts.contents()} parts (split.count): "
                         "merge them into one file first")
    return reader


def _name(place: Place) -> str:
    layer, module, _ = place
    return f"{_TOP[module]}.weight" if layer is None else f"blk.{layer}.{_LAYER[module]}.weight"


def _fields(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()
            if name.startswith(("general.", "llama.")) or name == "tokenizer.ggml.tokens"}


def _dequantize(tensor: gguf.ReaderTensor) -> np.ndarray:
    try:
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ValueError(f"{tensor.name} is stored as {tensor.tensor_type.name}, which cannot be "
                         "dequantised here: use a file of another quantisation") from error


def _half_split(weight: np.ndarray, heads: int, rotary_dim: int) -> np.ndarray:
    """Bring the rows of every head from (2i, 2i + 1), GGUF's order, to (i, i + rotary_dim / 2)."""
    rows = weight.reshape(heads, -1, weight.shape[-1])  # [heads, head_dim, width]
    pairs = rows[:, :rotary_dim].reshape(heads, rotary_dim // 2, 2, -1)
    rotated = pairs.swapaxes(1, 2).reshape(heads, rotary_dim, -1)
    return np.concatenate([rotated, rows[:, rotary_dim:]], axis=1).reshape(weight.shape)
