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
from kvfunc.linear import product
from kvfunc.models.config import ModelConfig
from kvfunc.models.params import Params
from kvfunc.quantize import Quantized
from kvfunc.rope import Rotation
from kvfunc.rows import Rows
from kvfunc.storage import KV, write_layer


class Matrix(nn.Module):
    """A weight matrix, [out, in]: fast in XLA on CPUs for few rows of x in x W^T."""

    shape: tuple[int, int]
    dtype: DTypeLike
    initial: nn.initializers.Initializer = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)

    @nn.compact
    def __call__(self) -> Float[Array, "out in"] | Quantized:
        """The parameter."""
        return self.param("weight", self.initial, self.shape, self.dtype)


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


class Layer(nn.Module):
    """Attention and SwiGLU, each behind a norm and added to the residual stream."""

    config: ModelConfig
    dtype: DTypeLike
    attention: str

    @nn.compact
    def __call__(self, x, k_stored, v_stored, births, slots, rows, born: Rotation,
                 turn: Rotation):
        """One layer: returns the stream and this layer's storage with the new KV in it."""
        c = self.config

        def matrix(name: str, out: int, width: int) -> Array | Quantized:
            return Matrix((out, width), self.dtype, name=name)()

        def norm(name: str) -> RMSNorm:
            return RMSNorm(c.norm_eps, self.dtype, name=name)

        def heads(name: str, count: int) -> Array:
            weight = matrix(name, count * c.head_dim, c.width)
            return product(h, weight, self.dtype).reshape(-1, count, c.head_dim)

        h = norm("attn_norm")(x)
        q, k, v = heads("q", c.heads), heads("k", c.kv_heads), heads("v", c.kv_heads)  # [Q, H, D]
        # Written first and read back as stored: KV is the same function of (tokens, events)
        # however a prompt is cut into chunks.
        k_stored = write_layer(k_stored, slots, born(k))
        v_stored = write_layer(v_stored, slots, v)
        attended = segment_attention(born(q), k_stored, v_stored, rows, births, turn,
                                     window=c.window, implementation=self.attention)
        attended = attended.astype(self.dtype).reshape(-1, c.heads * c.head_dim)
        x = x + product(attended, matrix("o", c.width, c.heads * c.head_dim), self.dtype)

        h = norm("mlp_norm")(x)
        gate, up = (matrix(name, c.mlp_width, c.width) for name in ("gate", "up"))
        gated = product(h, up, self.dtype, gate)
        x = x + product(gated, matrix("down", c.width, c.mlp_width), self.dtype)
        return x, k_stored, v_stored


class Llama(nn.Module):
    """The model. Parameters are never held here.

    Args:
      config: sizes and RoPE.
      dtype: type of weights and activations.
      attention: the implementation, as `segment_attention` takes it.
    """

    config: ModelConfig
    dtype: DTypeLike = jnp.bfloat16
    attention: str = "auto"

    @nn.compact
    def __call__(self, tokens, births, slots, kv, rows, at=None):
        """As `forward`, with the parameters bound by Linen."""
        c = self.config

        def table(name: str) -> Array | Quantized:
            shape = c.vocab_size, c.width
            return Matrix(shape, self.dtype, nn.initializers.normal(1.0), name=name)()

        embed = table("embed")
        x = jax.tree.map(lambda rows: rows[tokens], embed)  # [Q, width]
        x = x.numbers().astype(self.dtype) if isinstance(x, Quantized) else x
        born, turn = c.rope.birth_rotation(births), c.rope.rotation(rows.shift)
        stored = []
        for i in range(c.layers):
            layer = Layer(c, self.dtype, self.attention, name=f"layer_{i}")
            x, k, v = layer(x, kv.k[i], kv.v[i], births, slots, rows, born, turn)
            stored.append((k, v))
        if at is not None:
            x = x[at]  # [A, width]
        x = RMSNorm(c.norm_eps, self.dtype, name="norm")(x)
        head = embed if c.tied else table("head")
        k, v = zip(*stored, strict=True)
        return product(x, head, jnp.float32), KV(k=k, v=v)

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
