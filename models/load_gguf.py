"""Weights and configuration of a model from one GGUF file."""

from __future__ import annotations

import os
from typing import Any

import gguf
import numpy as np

from .config import ModelConfig
from .config_gguf import config_from_gguf
from .names_gguf import sources_of
from .params import Params, Place, Progress, Source, check, fill

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
    """Load a GGUF file, dequantised.

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
    config, sources, tensors = _checked(
        path if isinstance(path, gguf.GGUFReader) else open_gguf(path))

    def read(place: Place) -> np.ndarray:
        source = sources[place]
        return source.make(*(_dequantize(tensors[name]) for name in source.tensors))

    def name(place: Place) -> str:
        return next(iter(sources[place].tensors))

    return config, fill(config, name, read, dtype, progress, quantization)


def inspect_gguf(reader: gguf.GGUFReader) -> ModelConfig:
    """The configuration of a file that `load_gguf` can load; no weight is read.

    Raises:
      ValueError: as `load_gguf`.
    """
    return _checked(reader)[0]


def _checked(reader: gguf.GGUFReader) -> tuple[
        ModelConfig, dict[Place, Source], dict[str, gguf.ReaderTensor]]:
    """A file that has been checked: what of which tensors, and these."""
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors = tensors.pop(_ROPE_FACTORS, None)
    fields = _fields(reader)
    config = config_from_gguf(
        fields, tied="output.weight" not in tensors,
        rope_factors=None if factors is None else _dequantize(factors).ravel().tolist())
    found = {name: tuple(reversed(tensor.shape.tolist())) for name, tensor in tensors.items()}
    sources = sources_of(config, fields["general.architecture"], found)
    check(sources, found)
    return config, sources, tensors


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


def _fields(reader: gguf.GGUFReader) -> dict[str, Any]:
    architecture = reader.get_field("general.architecture")
    own = ("general.", f"{architecture.contents()}." if architecture is not None else "general.")
    return {name: field.contents() for name, field in reader.fields.items()
            if name.startswith(own) or name == "tokenizer.ggml.tokens"}


def _dequantize(tensor: gguf.ReaderTensor) -> np.ndarray:
    try:
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ValueError(f"{tensor.name} is stored as {tensor.tensor_type.name}, which cannot be "
                         "dequantised here: use a file of another quantisation") from error
