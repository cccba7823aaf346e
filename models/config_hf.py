"""The configuration of a model from the `config.json` of a Hugging Face folder.

Every family is one function here, which says in what it differs from Llama.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from kvfunc.rope import Rope

from .config import REQUIRED, ModelConfig, all_but_each, integer, number
from .moe import MoE

Json = Mapping[str, Any]
_SLIDING, _FULL = "sliding_attention", "full_attention"


def config_from_hf(config: Json) -> ModelConfig:
    """Read a parsed `config.json`.

    Raises:
      ValueError: for another architecture, a feature that is not built here, a missing field or
        a value that cannot be; the message names it.
    """
    family = family_of(config)
    for name in ("rope_interleaved", "mlp_bias"):
        _must_be(config, name, False)
    quantization = config.get("quantization_config")
    if quantization and not (family.mxfp4 and quantization.get("quant_method") == "mxfp4"):
        raise ValueError(f"config.json sets quantization_config={quantization!r}, which is not "
                         "supported: use a model without it")
    # transformers fills these in with one member's own values, a guess for any other size.
    for name in family.required:
        if name not in config and not (name == "rope_theta" and config.get("rope_parameters")):
            raise ValueError(f"config.json of a {config['model_type']} model lacks {name}: add it"
                             + (" (null is full attention)" if name == "sliding_window" else ""))

    def take(name: str, default: Any = REQUIRED) -> int:
        return integer(name, config.get(name), default, "config.json")

    width, heads, layers = (take(name) for name in (
        "hidden_size", "num_attention_heads", "num_hidden_layers"))
    base = ModelConfig(
        vocab_size=take("vocab_size"), width=width, layers=layers, heads=heads,
        kv_heads=take("num_key_value_heads", heads),
        head_dim=take("head_dim", width // max(heads, 1)), mlp_width=take("intermediate_size"),
        norm_eps=number("rms_norm_eps", config.get("rms_norm_eps"), "config.json"),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        rope=Rope.from_config({**config, **family.rope(config)}, layer_type=_FULL),
        context_length=take("max_position_embeddings"))
    return dataclasses.replace(base, **family.differs(config, base))


def family_of(config: Json) -> Family:
    """The family that a parsed `config.json` names.

    Raises:
      ValueError: if it is none of `FAMILIES`.
    """
    kind = config.get("model_type")
    known = ", ".join(f"{kind} ({family.architecture})" for kind, family in FAMILIES.items())
    if kind in _REFUSED:
        raise ValueError(f"model_type {kind!r} is not supported: {_REFUSED[kind]}")
    if kind not in FAMILIES:
        raise ValueError(f"model_type {kind!r} is not supported; supported are {known}")
    for name in config.get("architectures") or ():
        if name != FAMILIES[kind].architecture:
            raise ValueError(f"architecture {name!r} is not supported; supported are {known}")
    return FAMILIES[kind]


_REFUSED = {
    "gemma3": "it sees images; a text-only Gemma 3 has model_type gemma3_text",
    "llama4": "its layers without RoPE and its chunked attention are not built",
}


def _llama(config: Json, base: ModelConfig) -> dict[str, Any]:
    _silu(config)
    _must_be(config, "attention_bias", False)
    return {}


def _mistral(config: Json, base: ModelConfig) -> dict[str, Any]:
    return _llama(config, base) | {"window": config.get("sliding_window")}


def _qwen2(config: Json, base: ModelConfig) -> dict[str, Any]:
    _silu(config)
    return {"biases": "qkv"} | _qwen_window(config, base)


def _qwen3(config: Json, base: ModelConfig) -> dict[str, Any]:
    return _llama(config, base) | {"qk_norm": "head"} | _qwen_window(config, base)


def _qwen2_moe(config: Json, base: ModelConfig) -> dict[str, Any]:
    _must_be(config, "qkv_bias", True, default=True)
    experts = _qwen_experts(config, shared_width=_size(config, "shared_expert_intermediate_size"))
    return _qwen2(config, base) | experts


def _qwen3_moe(config: Json, base: ModelConfig) -> dict[str, Any]:
    return _qwen3(config, base) | _qwen_experts(config)


def _gpt_oss(config: Json, base: ModelConfig) -> dict[str, Any]:
    _silu(config)
    _must_be(config, "attention_bias", True)
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        raise ValueError("config.json of a gpt_oss model lacks rope_scaling: add its YaRN")
    _must_be(config, "swiglu_limit", 7.0, default=7.0)
    moe = MoE(_size(config, "num_local_experts"), _size(config, "num_experts_per_tok"),
              base.mlp_width, "softmax_of_chosen", biases=True)
    return {"biases": "qkvo", "sinks": True, "activation": "clamped_swiglu", "moe": moe} | _windows(
        config, base, all_but_each(2, base.layers))


def _minimax_m2(config: Json, base: ModelConfig) -> dict[str, Any]:
    _silu(config)
    for name, value in (("use_qk_norm", True), ("qk_norm_type", "per_layer"),
                        ("scoring_func", "sigmoid"), ("use_routing_bias", True)):
        _must_be(config, name, value, default=value)
    moe = MoE(_size(config, "num_local_experts"), _size(config, "num_experts_per_tok"),
              base.mlp_width, "sigmoid")
    return {"qk_norm": "all", "moe": moe}


def _minimax_rope(config: Json) -> dict[str, Any]:
    if config.get("rotary_dim") is None:
        return {}
    return {"partial_rotary_factor": config["rotary_dim"] / _size(config, "head_dim")}


def _gemma2(config: Json, base: ModelConfig) -> dict[str, Any]:
    return _gemma(config, base) | {
        "softcap": config.get("attn_logit_softcapping"),
        "logit_softcap": config.get("final_logit_softcapping"),
    } | _windows(config, base, all_but_each(2, base.layers))


def _gemma3(config: Json, base: ModelConfig) -> dict[str, Any]:
    _must_be(config, "use_bidirectional_attention", False)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        _must_be(config, name, None)
    pattern = _size(config, "sliding_window_pattern", 6)
    local = {key: value for key, value in config.items() if key != "rope_scaling"}
    local["rope_theta"] = config.get("rope_local_base_freq", 10_000.0)
    return _gemma(config, base) | {
        "qk_norm": "head", "window_rope": Rope.from_config(local, layer_type=_SLIDING),
    } | _windows(config, base, all_but_each(pattern, base.layers))


def _gemma(config: Json, base: ModelConfig) -> dict[str, Any]:
    _must_be(config, "attention_bias", False)
    name = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    _must_be(config, name, "gelu_pytorch_tanh")
    scale = number("query_pre_attn_scalar", config.get("query_pre_attn_scalar"), "config.json")
    return {"activation": "gelu_tanh", "gemma_norms": True, "attention_scale": scale**-0.5,
            "embed_scale": math.sqrt(base.width)}


def _qwen_window(config: Json, base: ModelConfig) -> dict[str, Any]:
    if not config.get("use_sliding_window"):
        return {}
    first = _size(config, "max_window_layers")
    return _windows(config, base, tuple(i >= first for i in range(base.layers)))


def _qwen_experts(config: Json, **kwargs: Any) -> dict[str, Any]:
    moe = MoE(_size(config, "num_experts"), _size(config, "num_experts_per_tok"),
              _size(config, "moe_intermediate_size"), "softmax",
              normalised=bool(config.get("norm_topk_prob", False)), **kwargs)
    step, dense = _size(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    return {"moe": moe, "sparse": tuple((i + 1) % step == 0 and i not in dense for i in range(
        _size(config, "num_hidden_layers")))}


def _windows(config: Json, base: ModelConfig, default: tuple[bool, ...]) -> dict[str, Any]:
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [_SLIDING if windowed else _FULL for windowed in default]
    unknown = sorted(set(kinds) - {_SLIDING, _FULL})
    if unknown or len(kinds) != base.layers:
        raise ValueError(f"layer_types must name one of {_FULL} and {_SLIDING} for each of the "
                         f"{base.layers} layers, got {len(kinds)} entries: {sorted(set(kinds))}")
    return {"window": _size(config, "sliding_window"),
            "windowed": tuple(kind == _SLIDING for kind in kinds)}


def _silu(config: Json) -> None:
    _must_be(config, "hidden_act", "silu", default="silu")


def _size(config: Json, name: str, default: Any = REQUIRED) -> int:
    return integer(name, config.get(name), default, "config.json")


def _must_be(config: Json, name: str, wanted: Any, default: Any = None) -> None:
    value = config.get(name, default)
    if (value or None) != (wanted or None):
        raise ValueError(f"config.json sets {name}={value!r}, which is not supported; only "
                         f"{wanted!r} is: use another model")


@dataclasses.dataclass(frozen=True)
class Family:
    """One kind of model.

    Attributes:
      models: what they are called.
      architecture: the only entry of `architectures`.
      differs: the fields of `ModelConfig` that are not as in Llama.
      required: fields that the file must have.
      tied: whether the head is the embedding where the file does not say.
      rope: fields that `Rope.from_config` wants in another spelling.
      mxfp4: whether experts may be stored in MXFP4.
    """

    models: str
    architecture: str
    differs: Callable[[Json, ModelConfig], dict[str, Any]]
    required: tuple[str, ...] = ("num_key_value_heads", "rope_theta")
    tied: bool = False
    rope: Callable[[Json], dict[str, Any]] = lambda config: {}
    mxfp4: bool = False


_HEADS = ("num_key_value_heads", "rope_theta", "head_dim")
_WINDOW = ("num_key_value_heads", "sliding_window")

FAMILIES = {
    "llama": Family("Llama 2 and 3, SmolLM2", "LlamaForCausalLM", _llama, ()),
    "mistral": Family("Mistral", "MistralForCausalLM", _mistral, _WINDOW),
    "qwen2": Family("Qwen2, Qwen2.5", "Qwen2ForCausalLM", _qwen2),
    "qwen3": Family("Qwen3", "Qwen3ForCausalLM", _qwen3, _HEADS),
    "qwen2_moe": Family("Qwen1.5-MoE, Qwen2-MoE", "Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3_moe": Family("Qwen3-MoE", "Qwen3MoeForCausalLM", _qwen3_moe, _HEADS),
    "gpt_oss": Family("GPT-OSS", "GptOssForCausalLM", _gpt_oss, (*_HEADS, "sliding_window"),
                      mxfp4=True),
    "minimax_m2": Family("MiniMax-M2", "MiniMaxM2ForCausalLM", _minimax_m2, _HEADS,
                         rope=_minimax_rope),
    "phi3": Family("Phi-3-mini-4k", "Phi3ForCausalLM", _mistral, _WINDOW),
    "gemma2": Family("Gemma 2", "Gemma2ForCausalLM", _gemma2, (*_HEADS, "sliding_window"),
                     tied=True),
    "gemma3_text": Family("Gemma 3, text only", "Gemma3ForCausalLM", _gemma3,
                          (*_HEADS, "sliding_window"), tied=True),
}
