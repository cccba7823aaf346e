"""Weights and configuration of a model from a Hugging Face folder."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from .config import ModelConfig
from .config_hf import config_from_hf
from .names_hf import is_mxfp4, sources_of
from .params import Params, Place, Progress, Source, check, fill

Files = dict[str, Any]  # open safetensors by tensor

_DTYPES = ("BF16", "F16", "F32")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Older files carry the frequencies that config.json already determines.
_BUFFER = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")


def load_hf(directory: str | os.PathLike[str], dtype: Any,
            progress: Progress | None = None,
            quantization: str | None = None) -> tuple[ModelConfig, Params]:
    """Load `config.json` and safetensors, in one file or in shards with an index.

    Args:
      directory: the folder.
      dtype: type of every weight.
      progress: called after each tensor with its name, how many are done, and how many there are.
      quantization: as that of `params.fill`.

    Returns:
      The configuration, and the parameter tree described in `params.py`.

    Raises:
      ValueError: for another architecture, files that are missing or broken, and for tensors that
        are missing, unknown, of the wrong shape or of a type that cannot be read, by name.
    """
    with _opened(pathlib.Path(directory)) as (config, sources, files):

        def read(place: Place) -> np.ndarray:
            source = sources[place]
            return source.make(*(files[name].get_tensor(name) for name in source.tensors))

        def name(place: Place) -> str:
            return next(iter(sources[place].tensors))

        return config, fill(config, name, read, dtype, progress, quantization)


def inspect_hf(directory: str | os.PathLike[str]) -> ModelConfig:
    """The configuration of a folder that `load_hf` can load; no tensor is read.

    Raises:
      ValueError: as `load_hf`.
    """
    with _opened(pathlib.Path(directory)) as (config, _, _):
        return config


@contextlib.contextmanager
def _opened(directory: pathlib.Path) -> Iterator[tuple[ModelConfig, dict[Place, Source], Files]]:
    """A folder that has been checked: what of which tensors, and the open file of each."""
    fields = _json(directory / "config.json")
    config = config_from_hf(fields)
    with contextlib.ExitStack() as stack:
        files: Files = {}
        for path in _weight_files(directory):
            try:
                file = stack.enter_context(safe_open(path, framework="numpy"))
            except SafetensorError as error:
                raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
            for key in file.keys():  # noqa: SIM118
                if key in files:
                    raise ValueError(f"{key} stands in two files of {directory}: "
                                     "remove it from one")
                files[key] = file
        files = {key: file for key, file in files.items() if not _BUFFER.fullmatch(key)}
        if config.tied:
            _drop_copy_of_embedding(files)
        sources = sources_of(config, fields["model_type"], files.keys())
        check(sources, {key: tuple(file.get_slice(key).get_shape())
                        for key, file in files.items()})
        for key, file in files.items():
            stored = file.get_slice(key).get_dtype()
            if stored not in _DTYPES and not (stored == "U8" and is_mxfp4(key)):
                raise ValueError(f"{key} is stored as {stored}; supported are {', '.join(_DTYPES)}")
        yield config, sources, files


def _json(path: pathlib.Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist: the folder of a model must have one")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _weight_files(directory: pathlib.Path) -> list[pathlib.Path]:
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    if not (directory / _INDEX).is_file():
        raise ValueError(f"{directory} has neither {_SINGLE} nor {_INDEX}: save the model as "
                         "safetensors")
    shard_of = _json(directory / _INDEX).get("weight_map")
    if not shard_of:
        raise ValueError(f"{directory / _INDEX} lacks weight_map: save the model again")
    paths = [directory / name for name in sorted(set(shard_of.values()))]
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} does not exist, and {_INDEX} names it")
    return paths


def _drop_copy_of_embedding(files: dict[str, Any]) -> None:
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    if not {embed, head} <= files.keys():
        return
    if not np.array_equal(files[embed].get_tensor(embed), files[head].get_tensor(head)):
        raise ValueError(f"config.json says tie_word_embeddings, but {head} differs from {embed}: "
                         "set tie_word_embeddings to false to use it")
    del files[head]
