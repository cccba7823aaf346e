"""Which tensors of a GGUF file a parameter is made of."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from .config import ModelConfig
from .params import Place, Source, from_rows, shapes

_NAMES = {
    "embed": "token_embd", "norm": "output_norm", "head": "output", "attn_norm": "attn_norm",
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm", "sinks": "attn_sinks.weight", "mlp_norm": "ffn_norm",
    "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down", "router": "ffn_gate_inp",
    "correction": "exp_probs_b.bias", "shared_router": "ffn_gate_inp_shexp",
    "attn_post_norm": "post_attention_norm", "mlp_post_norm": "post_ffw_norm",
    **{f"experts_{name}": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
    **{f"shared_{name}": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
}
_OTHER_NAMES = {"gpt-oss": {"mlp_norm": "post_attention_norm"}}
_FUSED = {"phi3": {"attn_qkv": ("q", "k", "v"), "ffn_up": ("gate", "up")}}


def sources_of(config: ModelConfig, kind: str, found: Collection[str]) -> dict[Place, Source]:
    """What the file must have for each place.

    Args:
      config: of the model.
      kind: its `general.architecture`.
      found: shapes of the tensors that are there, by name.
    """
    wanted = shapes(config)
    return {place: _source(config, wanted, place, kind, found) for place in wanted}


def _source(config: ModelConfig, wanted: dict[Place, tuple[int, ...]], place: Place, kind: str,
            found: Collection[str]) -> Source:
    layer, module, leaf = place
    prefix = "" if layer is None else f"blk.{layer}."
    suffix = f".{leaf}" if leaf else ""
    fused = from_rows(wanted, place, _FUSED.get(kind, {}), lambda name: prefix + name + suffix)
    if fused is not None:
        return fused
    name = prefix + (_NAMES | _OTHER_NAMES.get(kind, {}))[module] + suffix
    if module == "shared_router":  # a vector, or a matrix of one row
        shape = wanted[place]
        is_vector = len(found.get(name, shape)) == 1
        return Source({name: shape[1:] if is_vector else shape}, np.atleast_2d)
    if config.gemma_norms and module.endswith("norm"):
        return Source({name: wanted[place]}, lambda weight: weight - 1)  # stored as 1 + weight
    if kind == "llama" and module in ("q", "k"):
        heads = config.heads if module == "q" else config.kv_heads
        return Source({name: wanted[place]},
                      lambda weight: _half_split(weight, heads, config.rope.rotary_dim))
    return Source({name: wanted[place]})


def _half_split(weight: np.ndarray, heads: int, rotary_dim: int) -> np.ndarray:
    """Bring every head's rows from (2i, 2i + 1), as Llama's lie, to (i, i + rotary_dim / 2)."""
    rows = weight.reshape(heads, -1, weight.shape[-1])  # [heads, head_dim, width]
    pairs = rows[:, :rotary_dim].reshape(heads, rotary_dim // 2, 2, -1)
    rotated = pairs.swapaxes(1, 2).reshape(heads, rotary_dim, -1)
    return np.concatenate([rotated, rows[:, rotary_dim:]], axis=1).reshape(weight.shape)
