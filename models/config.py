"""What the family of models needs to know of one member, read from either file format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kvfunc.rope import Rope

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}

# Fields of a config.json that change the computation when they are set.
_REFUSED_HF = ("attention_bias", "mlp_bias", "rope_interleaved", "quantization_config")
# Fields of a GGUF file that say nothing about the computation.
_HARMLESS_GGUF = {"rope.scaling.finetuned", "tensor_data_layout"}
_REQUIRED = object()


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama, SmolLM2 or Mistral model: a hashable value, static under jit.

    Attributes:
      vocab_size: rows of the embedding.
      width: length of the residual stream.
      layers: how many blocks.
      heads: query heads.
      kv_heads: key and value heads; a divisor of `heads`.
      head_dim: length of one head; need not be `width / heads`.
      mlp_width: length of the hidden layer of SwiGLU.
      norm_eps: added to the mean square in RMSNorm.
      tied: True where the head is the embedding.
      rope: rotary embedding of queries and keys, in half-split order.
      context_length: positions the model was made for, in tokens.
      window: a query sees keys less than `window` positions behind it; None sees all.
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

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ValueError(f"{field.name} must be at least 1, got {value}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got heads={self.heads} "
                             f"and kv_heads={self.kv_heads}")
        if self.rope.rotary_dim > self.head_dim:
            raise ValueError(f"the rotary dims must fit a head, got {self.rope.rotary_dim} of them "
                             f"and head_dim={self.head_dim}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face `config.json` of a Llama, SmolLM2 or Mistral model.

        Args:
          config: the parsed file.

        Raises:
          ValueError: for another architecture, a feature that is not built here, a missing field or
            a value that cannot be; the message names it.
        """
        kind = _hf_kind(config)
        for name in _REFUSED_HF:
            if config.get(name):
                raise ValueError(f"config.json sets {name}={config[name]!r}, which is not "
                                 "supported: use a model without it")
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"config.json sets hidden_act={config['hidden_act']!r}; "
                             "only 'silu' is supported")
        # transformers fills these in with Mistral 7B's own values, a guess for any other size.
        for name in ("num_key_value_heads", "sliding_window") if kind == "mistral" else ():
            if name not in config:
                raise ValueError(f"config.json of a mistral model lacks {name}: add it "
                                 "(sliding_window is null for full attention)")

        def take(name: str, default: Any = _REQUIRED) -> int:
            return _integer(name, config.get(name), default, "config.json")

        width, heads = take("hidden_size"), take("num_attention_heads")
        window = config.get("sliding_window") if kind == "mistral" else None
        return cls(
            vocab_size=take("vocab_size"), width=width, layers=take("num_hidden_layers"),
            heads=heads, kv_heads=take("num_key_value_heads", heads),
            head_dim=take("head_dim", width // max(heads, 1)), mlp_width=take("intermediate_size"),
            norm_eps=_number("rms_norm_eps", config.get("rms_norm_eps"), "config.json"),
            tied=bool(config.get("tie_word_embeddings", False)), rope=Rope.from_config(config),
            context_length=take("max_position_embeddings"), window=window)

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

        def take(name: str, default: Any = _REQUIRED) -> int:
            return _integer(f"llama.{name}", own.pop(name, None), default, "the GGUF file")

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
            norm_eps=_number(f"llama.{eps}", own.pop(eps, None), "the GGUF file"), tied=tied,
            rope=_gguf_rope(own, take("rope.dimension_count", head_dim), context_length,
                            rope_factors),
            context_length=context_length, window=take("attention.sliding_window", 0) or None)
        unknown = sorted(f"llama.{name}" for name in own.keys() - _HARMLESS_GGUF)
        if unknown:
            raise ValueError(f"the GGUF file sets {', '.join(unknown)}, which is not supported: "
                             "use a model without it")
        return config


def _hf_kind(config: Mapping[str, Any]) -> str:
    known = ", ".join(f"{kind} ({name})" for kind, name in ARCHITECTURES.items())
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(f"model_type {kind!r} is not supported; supported are {known}")
    for name in config.get("architectures") or ():
        if name != ARCHITECTURES[kind]:
            raise ValueError(f"architecture {name!r} is not supported; supported are {known}")
    return kind


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


def _integer(name: str, value: Any, default: Any, where: str) -> int:
    if value is None:
        if default is _REQUIRED:
            raise ValueError(f"{where} lacks {name}")
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be one integer, got {value!r}")
    return value


def _number(name: str, value: Any, where: str) -> float:
    if value is None:
        raise ValueError(f"{where} lacks {name}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)
