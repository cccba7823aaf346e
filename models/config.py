"""What the family of models needs to know of one member, read from either file format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kvfunc.models.moe import MoE
from kvfunc.rope import Rope

# Fields of a GGUF file that say nothing about the computation.
_HARMLESS_GGUF = {"rope.scaling.finetuned", "tensor_data_layout"}
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

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any], *, tied: bool,
                  rope_factors: Sequence[float] | None = None) -> ModelConfig:
        """Read the metadata of a GGUF file whose `general.architecture` is "llama".

        Args:
          fields: metadata by name, as plain Python values.
          tied: whether the file lacks `output.weight`.
          rope_factors: the tensor `rope_freqs.weight`, which divides the frequencies
            (that is how Llama 3's scaling is stored); None where the file has none.

        Raises:
          ValueError: for another architecture, a field under `llama.` that is not understood, a
            missing field or a value that cannot be; the message names it.
        """
        kind = fields.get("general.architecture")
        if kind != "llama":
            raise ValueError(f"general.architecture is {kind!r}; the only supported one is 'llama' "
                             "(Llama, SmolLM2 and Mistral)")
        own = {name.removeprefix("llama."): value for name, value in fields.items()
               if name.startswith("llama.")}
        if "vocab_size" not in own and "tokenizer.ggml.tokens" in fields:
            own["vocab_size"] = len(fields["tokenizer.ggml.tokens"])

        def take(name: str, default: Any = REQUIRED) -> int:
            return integer(f"llama.{name}", own.pop(name, None), default, "the GGUF file")

        width, heads = take("embedding_length"), take("attention.head_count")
        context_length = take("context_length")
        head_dim = take("attention.key_length", width // max(heads, 1))
        value_dim = take("attention.value_length", head_dim)
        if value_dim != head_dim:
            raise ValueError(f"llama.attention.value_length is {value_dim} and the keys have "
                             f"{head_dim} dims; they must be equal")
        eps = "attention.layer_norm_rms_epsilon"
        config = cls(
            vocab_size=take("vocab_size"), width=width, layers=take("block_count"), heads=heads,
            kv_heads=take("attention.head_count_kv", heads), head_dim=head_dim,
            mlp_width=take("feed_forward_length"),
            norm_eps=number(f"llama.{eps}", own.pop(eps, None), "the GGUF file"), tied=tied,
            rope=_gguf_rope(own, take("rope.dimension_count", head_dim), context_length,
                            rope_factors),
            context_length=context_length, window=take("attention.sliding_window", 0) or None)
        unknown = sorted(f"llama.{name}" for name in own.keys() - _HARMLESS_GGUF)
        if unknown:
            raise ValueError(f"the GGUF file sets {', '.join(unknown)}, which is not supported: "
                             "use a model without it")
        return config


def _gguf_rope(own: dict[str, Any], rotary_dim: int, context_length: int,
               rope_factors: Sequence[float] | None) -> Rope:
    """Take the RoPE fields out of `own`."""
    theta = own.pop("rope.freq_base", 10_000.0)
    kind = own.pop("rope.scaling.type", "linear")
    factor = own.pop("rope.scaling.factor", None) or own.pop("rope.scale_linear", None) or 1.0
    original = own.pop("rope.scaling.original_context_length", None) or context_length
    betas = {name: own.pop(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")
             if f"rope.scaling.yarn_{name}" in own}
    if kind == "none":
        rope = Rope.default(rotary_dim, theta)
    elif kind == "linear":
        rope = Rope.linear(rotary_dim, theta, factor=factor)
    elif kind == "yarn":
        rope = Rope.yarn(rotary_dim, theta, factor=factor, original_context=original, **betas)
    else:
        raise ValueError(f"llama.rope.scaling.type {kind!r} is not supported; supported are none, "
                         "linear and yarn")
    # Unlike attention_factor in a config.json this multiplies YaRN's own magnitude.
    magnitude = rope.magnitude * own.pop("rope.scaling.attn_factor", 1.0)
    inv_freq = rope.inv_freq
    if rope_factors is not None:
        if len(rope_factors) != len(inv_freq):
            raise ValueError(f"rope_freqs.weight has {len(rope_factors)} factors and the model "
                             f"rotates {len(inv_freq)} pairs of dims; they must be equal")
        inv_freq = tuple(f / float(by) for f, by in zip(inv_freq, rope_factors, strict=True))
    return dataclasses.replace(rope, inv_freq=inv_freq, magnitude=magnitude)


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
