"""Llama and its relatives on top of kvfunc: one transformer that reads KV through rows.

The whole model is here, top to bottom. Its one entry is `Llama.forward`, for prefill and decode,
for the library and for the server: packed tokens go in with their births, the slots they are
written to and the rows they read; logits and the storage with their KV come out. In what one
family differs from another is `ModelConfig`'s to say; Llama is what it is without a word.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from kvfunc.attention import segment_attention
from kvfunc.linear import product
from kvfunc.models import moe
from kvfunc.models.config import ModelConfig
from kvfunc.models.params import Params
from kvfunc.quantize import Quantized
from kvfunc.rope import Rotation
from kvfunc.rows import Rows
from kvfunc.storage import KV, write_layer


class Matrix(nn.Module):
    """A weight, matrices [out, in]: fast in XLA on CPUs for few rows of x in x W^T."""

    shape: tuple[int, ...]
    dtype: DTypeLike
    initial: nn.initializers.Initializer = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)
    bias: bool = False

    @nn.compact
    def __call__(self) -> dict[str, Shaped[Array, "*experts out in"] | Quantized]:
        """The parameters: `weight`, and `bias` where there is one."""
        found = {"weight": self.param("weight", self.initial, self.shape, self.dtype)}
        if self.bias:
            found["bias"] = self.param("bias", nn.initializers.zeros, self.shape[:-1], self.dtype)
        return found


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467), computed in float32."""

    eps: float
    dtype: DTypeLike
    plus_one: bool = False  # whether 1 + weight scales the channels, in float32

    @nn.compact
    def __call__(self, x: Float[Array, "*n width"]) -> Float[Array, "*n width"]:
        """Normalise every row and scale its channels."""
        weight = self.param("weight", nn.initializers.ones, (x.shape[-1],), self.dtype)
        weight = weight.reshape((1,) * (x.ndim - 1) + (-1,))
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + self.eps)
        if self.plus_one:
            return (x32 * (1.0 + weight.astype(jnp.float32))).astype(self.dtype)
        return x32.astype(self.dtype) * weight


class Layer(nn.Module):
    """Attention and a gated MLP, each behind a norm and added to the residual stream."""

    config: ModelConfig
    dtype: DTypeLike
    attention: str
    index: int

    @nn.compact
    def __call__(self, x, k_stored, v_stored, births, slots, rows, born: Rotation,
                 turn: Rotation):
        """One layer: returns the stream and this layer's storage with the new KV in it."""
        c = self.config

        def heads(name: str, count: int) -> Array:
            out = self._linear(name, h, count * c.head_dim, name in c.biases)
            if c.qk_norm == "all" and name in "qk":
                out = self._norm(f"{name}_norm", out)
            out = out.reshape(-1, count, c.head_dim)
            return self._norm(f"{name}_norm", out) if c.qk_norm == "head" and name in "qk" else out

        def behind(name: str, out: Array) -> Array:
            return self._norm(name, out) if c.gemma_norms else out

        h = self._norm("attn_norm", x)
        q, k, v = heads("q", c.heads), heads("k", c.kv_heads), heads("v", c.kv_heads)  # [Q, H, D]
        # Written first and read back as stored: KV is the same function of (tokens, events)
        # however a prompt is cut into chunks.
        k_stored = write_layer(k_stored, slots, born(k))
        v_stored = write_layer(v_stored, slots, v)
        sinks = self.param("sinks", nn.initializers.zeros, (c.heads,), self.dtype) if (
            c.sinks) else None
        attended = segment_attention(
            born(q), k_stored, v_stored, rows, births, turn, scale=c.attention_scale,
            window=c.window if c.has_window(self.index) else None, softcap=c.softcap, sinks=sinks,
            implementation=self.attention)
        attended = attended.astype(self.dtype).reshape(-1, c.heads * c.head_dim)
        x = x + behind("attn_post_norm", self._linear("o", attended, c.width, "o" in c.biases))

        h = self._norm("mlp_norm", x)
        mlp = self._experts(h) if c.has_experts(self.index) else self._mlp(h, "", c.mlp_width)
        return x + behind("mlp_post_norm", mlp), k_stored, v_stored

    def _mlp(self, h: Array, prefix: str, width: int) -> Array:
        gate, up = (self._matrix(prefix + name, width, h.shape[1])["weight"]
                    for name in ("gate", "up"))
        if self.config.activation == "silu":
            hidden = product(h, up, self.dtype, gate)
        else:
            of_gate, of_up = (product(h, weight, jnp.float32) for weight in (gate, up))
            hidden = moe.activated(self.config.activation, of_gate, of_up).astype(self.dtype)
        return self._linear(prefix + "down", hidden, h.shape[1])

    def _experts(self, h: Array) -> Array:
        some = self.config.moe
        router = self._matrix("router", some.experts, h.shape[1], some.biases)
        correction = self.param("correction", nn.initializers.zeros, (some.experts,),
                                jnp.float32) if some.corrected else None
        logits = moe.router_logits(h, router["weight"], router.get("bias"))
        chosen, weights = moe.route(some, logits, correction)
        shapes = {"gate": (some.width, h.shape[1]), "up": (some.width, h.shape[1]),
                  "down": (h.shape[1], some.width)}
        params = {name: Matrix((some.experts, *shape), self.dtype, bias=some.biases,
                               name=f"experts_{name}")() for name, shape in shapes.items()}
        out = moe.mixed(some, self.config.activation, h, chosen, weights, params)
        if some.shared_width:
            gate = self._matrix("shared_router", 1, h.shape[1])["weight"]
            share = jax.nn.sigmoid(product(h, gate, jnp.float32))
            out = out + share * self._mlp(h, "shared_", some.shared_width).astype(jnp.float32)
        return out.astype(self.dtype)

    def _norm(self, name: str, x: Array) -> Array:
        return RMSNorm(self.config.norm_eps, self.dtype, self.config.gemma_norms, name=name)(x)

    def _matrix(self, name: str, out: int, width: int, bias: bool = False) -> dict:
        return Matrix((out, width), self.dtype, bias=bias, name=name)()

    def _linear(self, name: str, x: Array, out: int, bias: bool = False) -> Array:
        found = self._matrix(name, out, x.shape[1], bias)
        x = product(x, found["weight"], self.dtype)
        return x + found["bias"][None] if bias else x


class Llama(nn.Module):
    """The model, of whichever family. Parameters are never held here.

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
            return Matrix(shape, self.dtype, nn.initializers.normal(1.0), name=name)()["weight"]

        embed = table("embed")
        x = jax.tree.map(lambda rows: rows[tokens], embed)  # [Q, width]
        x = x.numbers().astype(self.dtype) if isinstance(x, Quantized) else x
        x = x if c.embed_scale == 1 else x * jnp.asarray(c.embed_scale, self.dtype)
        rotations = {rope: (rope.birth_rotation(births), rope.rotation(rows.shift))
                     for rope in {c.rope_of(i): None for i in range(c.layers)}}
        stored = []
        for i in range(c.layers):
            layer = Layer(c, self.dtype, self.attention, i, name=f"layer_{i}")
            x, k, v = layer(x, kv.k[i], kv.v[i], births, slots, rows, *rotations[c.rope_of(i)])
            stored.append((k, v))
        if at is not None:
            x = x[at]  # [A, width]
        x = RMSNorm(c.norm_eps, self.dtype, c.gemma_norms, name="norm")(x)
        head = embed if c.tied else table("head")
        k, v = zip(*stored, strict=True)
        logits = product(x, head, jnp.float32)
        if c.logit_softcap is not None:
            logits = c.logit_softcap * jnp.tanh(logits / c.logit_softcap)
        return logits, KV(k=k, v=v)

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
