"""The configuration of a model from the metadata of a GGUF file.

As in config_hf every architecture is one function, which says in what it differs from Llama. What
llama.cpp holds for certain without a field in the file is written here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvfunc.rope import Rope

from .config import REQUIRED, ModelConfig, all_but_each, integer, number
from .moe import MoE

WHERE = "the GGUF file"
# Fields that say nothing about the computation.
_HARMLESS = {"rope.scaling.finetuned", "tensor_data_layout", "expert_shared_count"}
_LOCAL_THETA = 10_000.0  # of Gemma 3's layers with a window


def config_from_gguf(fields: Mapping[str, Any], *, tied: bool,
                     rope_factors: Sequence[float] | None = None) -> ModelConfig:
    """Read the metadata of a GGUF file.

    Args:
      fields: metadata by name, as plain Python values.
      tied: whether the file lacks `output.weight`.
      rope_factors: the tensor `rope_freqs.weight`, which divides the frequencies
        (that is how Llama 3's scaling is stored); None where the file has none.

    Raises:
      ValueError: for another architecture, a field of the architecture that is not understood, a
        missing field or a value that cannot be; the message names it.
    """
    kind = fields.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ValueError(f"general.architecture is {kind!r}; supported are "
                         f"{', '.join(map(repr, ARCHITECTURES))}")
    own = _Own(kind, fields)
    if "vocab_size" not in own.left and "tokenizer.ggml.tokens" in fields:
        own.left["vocab_size"] = len(fields["tokenizer.ggml.tokens"])
    width, heads = own.size("embedding_length"), own.size("attention.head_count")
    context_length = own.size("context_length")
    head_dim = own.size("attention.key_length", width // max(heads, 1))
    value_dim = own.size("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise ValueError(f"{kind}.attention.value_length is {value_dim} and the keys have "
                         f"{head_dim} dims; they must be equal")
    base = ModelConfig(
        vocab_size=own.size("vocab_size"), width=width, layers=own.size("block_count"),
        heads=heads, kv_heads=own.size("attention.head_count_kv", heads), head_dim=head_dim,
        mlp_width=own.size("feed_forward_length"),
        norm_eps=own.number("attention.layer_norm_rms_epsilon"), tied=tied,
        rope=_rope(own, own.size("rope.dimension_count", head_dim), context_length, rope_factors),
        context_length=context_length)
    config = dataclasses.replace(base, **ARCHITECTURES[kind](own, base))
    unknown = sorted(f"{kind}.{name}" for name in own.left.keys() - _HARMLESS)
    if unknown:
        raise ValueError(f"{WHERE} sets {', '.join(unknown)}, which is not supported: "
                         "use a model without it")
    return config


class _Own:
    """The fields of the file's own architecture, taken out one by one."""

    def __init__(self, kind: str, fields: Mapping[str, Any]):
        self.kind, prefix = kind, f"{kind}."
        self.left = {name.removeprefix(prefix): value for name, value in fields.items()
                     if name.startswith(prefix)}

    def size(self, name: str, default: Any = REQUIRED) -> int:
        return integer(f"{self.kind}.{name}", self.left.pop(name, None), default, WHERE)

    def number(self, name: str) -> float:
        return number(f"{self.kind}.{name}", self.left.pop(name, None), WHERE)

    def get(self, name: str, default: Any = None) -> Any:
        return self.left.pop(name, default)


Differs = Callable[[_Own, ModelConfig], dict[str, Any]]


def _llama(own: _Own, base: ModelConfig) -> dict[str, Any]:
    return {"window": own.size("attention.sliding_window", 0) or None}


def _qwen2(own: _Own, base: ModelConfig) -> dict[str, Any]:
    return {"biases": "qkv"}


def _qwen3(own: _Own, base: ModelConfig) -> dict[str, Any]:
    return {"qk_norm": "head"}


def _qwen2_moe(own: _Own, base: ModelConfig) -> dict[str, Any]:
    shared = own.size("expert_shared_feed_forward_length", base.mlp_width)
    return _qwen2(own, base) | _experts(own, normalised=False, shared_width=shared)


def _qwen3_moe(own: _Own, base: ModelConfig) -> dict[str, Any]:
    return _qwen3(own, base) | _experts(own)


def _gpt_oss(own: _Own, base: ModelConfig) -> dict[str, Any]:
    return {"biases": "qkvo", "sinks": True, "activation": "clamped_swiglu"} | _experts(
        own, scores="softmax_of_chosen", biases=True) | _windows(own, base, 2)


def _minimax_m2(own: _Own, base: ModelConfig) -> dict[str, Any]:
    gating = own.size("expert_gating_func", 2)
    if gating != 2:
        raise ValueError(f"{own.kind}.expert_gating_func is {gating}; only 2 (sigmoid) is "
                         "supported: use another model")
    return {"qk_norm": "all"} | _experts(own, width=base.mlp_width, scores="sigmoid")


def _gemma2(own: _Own, base: ModelConfig) -> dict[str, Any]:
    return _gemma(own, base, 46) | {"softcap": own.get("attn_logit_softcapping"),
                                    "logit_softcap": own.get("final_logit_softcapping"),
                                    } | _windows(own, base, 2)


def _gemma3(own: _Own, base: ModelConfig) -> dict[str, Any]:
    local = Rope.default(base.rope.rotary_dim, own.get("rope.freq_base_swa", _LOCAL_THETA))
    return _gemma(own, base, 62) | {"qk_norm": "head", "window_rope": local} | _windows(
        own, base, 6)


def _gemma(own: _Own, base: ModelConfig, largest: int) -> dict[str, Any]:
    # The largest member, told by its layers, scales by the width of a head as if heads filled it.
    dim = base.width // base.heads if base.layers == largest else base.head_dim
    return {"activation": "gelu_tanh", "gemma_norms": True, "attention_scale": dim**-0.5,
            "embed_scale": math.sqrt(base.width)}


def _windows(own: _Own, base: ModelConfig, every: int) -> dict[str, Any]:
    """A window in all layers but each `every`th."""
    pattern = own.get("attention.sliding_window_pattern", every)
    windowed = (tuple(map(bool, pattern)) if isinstance(pattern, list) else
                all_but_each(pattern, base.layers))
    return {"window": own.size("attention.sliding_window"), "windowed": windowed}


def _experts(own: _Own, **kwargs: Any) -> dict[str, Any]:
    count, chosen = own.size("expert_count"), own.size("expert_used_count")
    width = own.size("expert_feed_forward_length", kwargs.pop("width", REQUIRED))
    if (normalised := own.get("expert_weights_norm")) is not None:
        kwargs["normalised"] = bool(normalised)
    return {"moe": MoE(count, chosen, width, **kwargs)}


def _rope(own: _Own, rotary_dim: int, context_length: int,
          rope_factors: Sequence[float] | None) -> Rope:
    theta = own.get("rope.freq_base", 10_000.0)
    kind = own.get("rope.scaling.type", "linear")
    factor = own.get("rope.scaling.factor") or own.get("rope.scale_linear") or 1.0
    original = own.get("rope.scaling.original_context_length") or context_length
    options = {name: own.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")
               if f"rope.scaling.yarn_{name}" in own.left}
    if own.kind == "gpt-oss":
        options["truncate"] = False
    if kind == "none":
        rope = Rope.default(rotary_dim, theta)
    elif kind == "linear":
        rope = Rope.linear(rotary_dim, theta, factor=factor)
    elif kind == "yarn":
        rope = Rope.yarn(rotary_dim, theta, factor=factor, original_context=original, **options)
    else:
        raise ValueError(f"{own.kind}.rope.scaling.type {kind!r} is not supported; supported are "
                         "none, linear and yarn")
    # Unlike attention_factor in a config.json this multiplies YaRN's own magnitude.
    magnitude = rope.magnitude * own.get("rope.scaling.attn_factor", 1.0)
    inv_freq = rope.inv_freq
    if rope_factors is not None:
        if len(rope_factors) != len(inv_freq):
            raise ValueError(f"rope_freqs.weight has {len(rope_factors)} factors and the model "
                             f"rotates {len(inv_freq)} pairs of dims; they must be equal")
        inv_freq = tuple(f / float(by) for f, by in zip(inv_freq, rope_factors, strict=True))
    return dataclasses.replace(rope, inv_freq=inv_freq, magnitude=magnitude)


ARCHITECTURES: dict[str, Differs] = {
    "llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe, "gpt-oss": _gpt_oss, "minimax-m2": _minimax_m2, "phi3": _llama,
    "gemma2": _gemma2, "gemma3": _gemma3,
}
