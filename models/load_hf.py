"""Weights and configuration of a Llama-family model from a Hugging Face folder."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from .config import ModelConfig
from .params import Params, Place, Progress, check, fill

_TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj",
    "v": "self_attn.v_proj", "o": "self_attn.o_proj", "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}
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
    directory = pathlib.Path(directory)
    config = ModelConfig.from_hf(_json(directory / "config.json"))
    with contextlib.ExitStack() as stack:
        files = {}
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
        check(config, _name, {key: tuple(file.get_slice(key).get_shape())
                              for key, file in files.items()})
        for key, file in files.items():
            stored = file.get_slice(key).get_dtype()
            if stored not in _DTYPES:
                raise ValueError(f"{key} is stored as {stored}; supported are {', '.join(_DTYPES)}")

        def read(place: Place) -> np.ndarray:
            return files[_name(place)].get_tensor(_name(place))

        return config, fill(config, _name, read, dtype, progress, quantization)


def _name(place: Place) -> str:
    layer, module = place
    if layer is None:
        return f"{_TOP[module]}.weight"
    return f"model.layers.{layer}.{_LAYER[module]}.weight"


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
    embed, head = _name((None, "embed")), _name((None, "head"))
    if not {embed, head} <= files.keys():
        return
    if not np.array_equal(files[embed].get_tensor(embed), files[head].get_tensor(head)):
        raise ValueError(f"config.json says tie_word_embeddings, but {head} differs from {embed}: "
                         "set tie_word_embeddings to false to use it")
    del files[head]
