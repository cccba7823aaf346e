"""What the models need to know of one of them; config_hf and config_gguf read it from files."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvfunc.models.moe import MoE
from kvfunc.rope import Rope

REQUIRED = object()  # in the place of a default


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """What sets one model apart from the others: a hashable value, static under jit.

    Attributes:
      vocab_size: rows of the embedding.
      width: length of the residual stream.
      layers: how many blocks.
      heads: query heads.
      kv_heads: key and value heads; a divisor of `heads`.
      head_dim: length of one head; need not be `width / heads`.
      mlp_width: length of the hidden layer of the gated MLP.
      norm_eps: added to the mean square in RMSNorm.
      tied: True where the head is the embedding.
      rope: rotary embedding of queries and keys, in half-split order.
      context_length: positions the model was made for, in tokens.
      window: a query sees keys less than `window` positions behind it, those that the positions
        count after a repos; None sees all.
      windowed: which layers have the window; None: all.
      window_rope: the rotary embedding of these layers, where it is another.
      biases: which products of attention have a bias: a part of "qkvo".
      qk_norm: RMSNorm of queries and keys before the rotation, "head" by head or "all" heads as
        one; None for none.
      sinks: whether each head has a logit that takes part in the softmax and has no value.
      attention_scale: factor on the scores; None is `head_dim ** -0.5`.
      softcap: scores become `softcap * tanh(score / softcap)`; None leaves them.
      logit_softcap: the same of the logits.
      activation: of the gated MLPs, one of `moe.ACTIVATIONS`.
      gemma_norms: whether norms multiply by 1 + weight, and stand behind attention and MLP too.
      embed_scale: factor on the embedding.
      moe: the experts; None: there are none.
      sparse: which layers have experts and no other MLP; None: all, if there are experts.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    norm_eps: float
    tied: bool
    rope: Rope
    context_length: int
    window: int | None = None
    windowed: tuple[bool, ...] | None = None
    window_rope: Rope | None = None
    biases: str = ""
    qk_norm: str | None = None
    sinks: bool = False
    attention_scale: float | None = None
    softcap: float | None = None
    logit_softcap: float | None = None
    activation: str = "silu"
    gemma_norms: bool = False
    embed_scale: float = 1.0
    moe: MoE | None = None
    sparse: tuple[bool, ...] | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ValueError(f"{field.name} must be at least 1, got {value}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got heads={self.heads} "
                             f"and kv_heads={self.kv_heads}")
        for rope in (self.rope, self.window_rope or self.rope):
            if rope.rotary_dim > self.head_dim:
                raise ValueError(f"the rotary dims must fit a head, got {rope.rotary_dim} of them "
                                 f"and head_dim={self.head_dim}")
        for name in ("windowed", "sparse"):
            value = getattr(self, name)
            if value is not None and len(value) != self.layers:
                raise ValueError(f"{name} must have one entry a layer, got {len(value)} and "
                                 f"layers={self.layers}")

    def has_window(self, layer: int) -> bool:
        """Whether a layer's queries see a window only."""
        return self.window is not None and (self.windowed is None or self.windowed[layer])

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        return self.moe is not None and (self.sparse is None or self.sparse[layer])

    def rope_of(self, layer: int) -> Rope:
        """The rotary embedding of a layer."""
        local = self.window_rope is not None and self.has_window(layer)
        return self.window_rope if local else self.rope


def all_but_each(every: int, layers: int) -> tuple[bool, ...]:
    """True for all layers but each `every`th."""
    return tuple((layer + 1) % every != 0 for layer in range(layers))


def integer(name: str, value: Any, default: Any, where: str) -> int:
    """A field that must be one integer, or its default; without one the field must be there."""
    if value is None:
        if default is REQUIRED:
            raise ValueError(f"{where} lacks {name}")
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be one integer, got {value!r}")
    return value


def number(name: str, value: Any, where: str) -> float:
    """A field that must be there, and a number."""
    if value is None:
        raise ValueError(f"{where} lacks {name}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)
