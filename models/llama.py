"""Llama, SmolLM2 and Mistral on top of kvfunc: one transformer that reads KV through rows.

The whole model is here, top to bottom. Its one entry is `Llama.forward`, for prefill and decode,
for the library and for the server: packed tokens go in with their births, the slots they are
written to and the rows they read; logits and the storage with their KV come out.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvfunc.attention import segment_attention
from kvfunc.linear import int8_product
from kvfunc.models.config import ModelConfig
from kvfunc.models.params import Params
from kvfunc.quantize import Quantized, quantize
from kvfunc.rope import Rotation
from kvfunc.rows import Rows
from kvfunc.storage import KV, write_layer


def project(x: Float[Array, "n in"],
            weight: Float[Array, "out in"] | Quantized) -> Float[Array, "n out"]:
    """x W^T in float32. With int8 weights x is rounded to int8 as well, each token for itself."""
    if not isinstance(weight, Quantized):
        return jnp.einsum("ni,oi->no", x, weight, preferred_element_type=jnp.float32)
    return int8_product(quantize(x, jnp.int8), weight)


class Linear(nn.Module):
    """x W^T with W stored [out, in] and float32 sums: fast in XLA on CPUs for few rows."""

    features: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "n in"]) -> Float[Array, "n out"]:
        """Project every row."""
        initial = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        weight = self.param("weight", initial, (self.features, x.shape[-1]), self.dtype)
        return project(x, weight).astype(self.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467), computed in float32."""

    eps: float
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: Float[Array, "n width"]) -> Float[Array, "n width"]:
        """Normalise every row and scale its channels."""
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],), self.dtype)
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + self.eps)
        return x32.astype(self.dtype) * weight[None]


class Embedding(nn.Module):
    """The table of token vectors, [vocab, width]; tied models use it as their head too."""

    config: ModelConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self) -> Float[Array, "vocab width"] | Quantized:
        """The whole table."""
        shape = (self.config.vocab_size, self.config.width)
        return self.param("weight", nn.initializers.normal(1.0), shape, self.dtype)


class Layer(nn.Module):
    """Attention and SwiGLU, each behind a norm and added to the residual stream."""

    config: ModelConfig
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x, k_stored, v_stored, births, slots, rows, born: Rotation,
                 turn: Rotation):
        """One layer: returns the stream and this layer's storage with the new KV in it."""
        c = self.config

        def linear(name: str, features: int) -> Linear:
            return Linear(features, self.dtype, name=name)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(c.norm_eps, self.dtype, name=name)

        h = norm("attn_norm")(x)
        q = linear("q", c.heads * c.head_dim)(h).reshape(-1, c.heads, c.head_dim)  # [Q, H, D]
        k = linear("k", c.kv_heads * c.head_dim)(h).reshape(-1, c.kv_heads, c.head_dim)
        v = linear("v", c.kv_heads * c.head_dim)(h).reshape(-1, c.kv_heads, c.head_dim)
        # Written first and read back as stored: KV is the same function of (tokens, events)
        # however a prompt is cut into chunks.
        k_stored = write_layer(k_stored, slots, born(k))
        v_stored = write_layer(v_stored, slots, v)
        attended = segment_attention(born(q), k_stored, v_stored, rows, births, turn,
                                     window=c.window)
        attended = attended.astype(self.dtype).reshape(-1, c.heads * c.head_dim)
        x = x + linear("o", c.width)(attended)

        h = norm("mlp_norm")(x)
        gated = nn.silu(linear("gate", c.mlp_width)(h)) * linear("up", c.mlp_width)(h)
        return x + linear("down", c.width)(gated), k_stored, v_stored


class Llama(nn.Module):
    """The model; `dtype` is the type of weights and activations. Parameters are never held here."""

    config: ModelConfig
    dtype: DTypeLike = jnp.bfloat16

    @nn.compact
    def __call__(self, tokens, births, slots, kv, rows, at=None):
        """As `forward`, with the parameters bound by Linen."""
        c = self.config
        embed = Embedding(c, self.dtype, name="embed")()
        x = jax.tree.map(lambda table: table[tokens], embed)  # [Q, width]
        x = x.numbers().astype(self.dtype) if isinstance(x, Quantized) else x
        born, turn = c.rope.birth_rotation(births), c.rope.rotation(rows.shift)
        stored = []
        for i in range(c.layers):
            layer = Layer(c, self.dtype, name=f"layer_{i}")
            x, k, v = layer(x, kv.k[i], kv.v[i], births, slots, rows, born, turn)
            stored.append((k, v))
        if at is not None:
            x = x[at]  # [A, width]
        x = RMSNorm(c.norm_eps, self.dtype, name="norm")(x)
        if c.tied:
            head = embed
        else:
            head = Embedding(c, self.dtype, name="head")()
        k, v = zip(*stored, strict=True)
        return project(x, head), KV(k=k, v=v)

    def forward(self, params: Params, tokens: Int[Array, " queries"],
                births: Int[Array, " queries"], slots: Int[Array, " queries"], kv: KV, rows: Rows,
                at: Int[Array, " wanted"] | None = None) -> tuple[Float[Array, "wanted vocab"], KV]:
        """Run packed tokens through the model: the only entry.

        Args:
          params: weights, as the loaders give them.
          tokens: int32 ids of the packed queries; padding may hold any id.
          births: int32, the RoPE position each is born at.
          slots: int32, where its KV is written; the pool's size or more discards it (padding).
          kv: storage of all layers. Donate it when jitting.
          rows: which queries read which slots, these tokens' own slots included.
          at: int32, the queries whose logits are wanted; None for all.

        Returns:
          float32 logits, and the storage with the new KV in it.
        """
        return self.apply({"params": params}, tokens, births, slots, kv, rows, at)
