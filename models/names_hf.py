"""Which tensors of a Hugging Face folder a parameter is made of.

Most are one tensor under the same name in every family. The others are here: rows of a larger
matrix (Phi-3), one matrix for each expert (Qwen, MiniMax-M2), and all experts in one (GPT-OSS).
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from .config import ModelConfig
from .params import Place, Source, from_rows, shapes

_NAMES = {
    "embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    "attn_norm": "input_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj",
    "v": "self_attn.v_proj", "o": "self_attn.o_proj", "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm", "sinks": "self_attn.sinks",
    "mlp_norm": "post_attention_layernorm", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj", "router": "mlp.gate", "shared_router": "mlp.shared_expert_gate",
    "shared_gate": "mlp.shared_expert.gate_proj", "shared_up": "mlp.shared_expert.up_proj",
    "shared_down": "mlp.shared_expert.down_proj",
    "experts_gate": "mlp.experts.{}.gate_proj", "experts_up": "mlp.experts.{}.up_proj",
    "experts_down": "mlp.experts.{}.down_proj",
}
_GEMMA = {
    "attn_post_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_OTHER_NAMES = {
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gpt_oss": {"router": "mlp.router"},
    "minimax_m2": {
        "router": "block_sparse_moe.gate",
        "correction": "block_sparse_moe.e_score_correction_bias",
        "experts_gate": "block_sparse_moe.experts.{}.w1",
        "experts_up": "block_sparse_moe.experts.{}.w3",
        "experts_down": "block_sparse_moe.experts.{}.w2"},
}
_FUSED = {  # name: the modules whose rows stand in it, in this order
    "phi3": {"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")}}
# Of FP4 (E2M1), by its four bits; GPT-OSS has two in a byte and one exponent for 32 of them.
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4 = np.concatenate([_FP4, -_FP4])
_BLOCKS, _SCALES = "_blocks", "_scales"


def sources_of(config: ModelConfig, kind: str, found: Collection[str]) -> dict[Place, Source]:
    """What the folder must have for each place.

    Args:
      config: of the model.
      kind: its `model_type`.
      found: names of the tensors that are there, which tell how experts are stored.
    """
    wanted = shapes(config)
    return {place: _source(wanted, place, kind, found) for place in wanted}


def is_mxfp4(name: str) -> bool:
    """Whether a tensor is one half of numbers in MXFP4."""
    return name.endswith((_BLOCKS, _SCALES))


def _source(wanted: dict[Place, tuple[int, ...]], place: Place, kind: str,
            found: Collection[str]) -> Source:
    layer, module, leaf = place
    names, shape = _NAMES | _OTHER_NAMES.get(kind, {}), wanted[place]
    prefix = "" if layer is None else f"model.layers.{layer}."
    suffix = f".{leaf}" if leaf else ""
    fused = from_rows(wanted, place, _FUSED.get(kind, {}), lambda name: prefix + name + suffix)
    if fused is not None:
        return fused
    if kind == "gpt_oss" and module.startswith("experts_"):
        return _of_gpt_oss(f"{prefix}mlp.experts.", module, leaf, shape, found)
    if "{}" in names[module]:
        every = (prefix + names[module].format(expert) + suffix for expert in range(shape[0]))
        return Source(dict.fromkeys(every, shape[1:]), lambda *tensors: np.stack(tensors))
    return Source({prefix + names[module] + suffix: shape})


def _of_gpt_oss(prefix: str, module: str, leaf: str, shape: tuple[int, ...],
                found: Collection[str]) -> Source:
    """All experts in one tensor, [experts, in, out], rows of gate and up in turns."""
    joined = module != "experts_down"
    name = prefix + ("gate_up_proj" if joined else "down_proj")
    every = {"experts_gate": slice(0, None, 2), "experts_up": slice(1, None, 2)}.get(
        module, slice(None))
    out = shape[1] * (2 if joined else 1)
    if leaf == "bias":
        return Source({f"{name}_bias": (shape[0], out)}, lambda tensor: tensor[:, every])
    if name + _BLOCKS not in found:
        return Source({name: (shape[0], shape[2], out)},
                      lambda tensor: tensor.swapaxes(1, 2)[:, every])
    groups = shape[0], out, shape[2] // 32
    return Source({name + _BLOCKS: (*groups, 16), name + _SCALES: groups},
                  lambda blocks, scales: of_mxfp4(blocks[:, every], scales[:, every]))


def of_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Numbers of MXFP4, float32 [..., 32 * groups].

    Args:
      blocks: uint8 [..., groups, 16], two numbers of E2M1 a byte, the low half first.
      scales: uint8 [..., groups], the exponent of each group and 127.
    """
    pairs = np.stack([_FP4[blocks & 15], _FP4[blocks >> 4]], -1)
    numbers = pairs.reshape(*blocks.shape[:-1], 32)
    numbers = np.ldexp(numbers, scales.astype(np.int32)[..., None] - 127)
    return numbers.reshape(*blocks.shape[:-2], -1)
