"""Rotary position embedding (RoPE) as a value, with cos and sin that never run out of range.

A `Rope` is a hashable value: frequencies in float64, made once from a model's configuration. Two
things are done with it:

- at birth a query or a key is rotated to its position: `rope.rotate(x, positions)`;
- in attention a query is *turned* by a row's shift, while the key stays as it was written:
  `rope.rotation(shift)`, of unit magnitude (see design note "keys never move, queries do" in
  the README).

Angles come from float64 tables of three base-1024 digits, `R(p) = R(2^20 top) R(2^10 mid) R(low)`,
so that they depend neither on a cache's capacity nor on the longest position seen; a negative
position is the conjugate.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

_DIGIT_BITS = 10
_DIGIT_ROWS = (1 << 10, 1 << 10, 1 << 11)  # together every non-negative int32

REFUSED = {
    "dynamic": "its frequencies change with the length of the text (dynamic NTK)",
    "longrope": "its frequencies change with the length of the text (long and short factors)",
    "su": "its frequencies change with the length of the text (the older name of longrope)",
}
KNOWN_TYPES = ("default", "linear", "llama3", "yarn")


@functools.partial(jax.tree_util.register_dataclass, meta_fields=["interleaved"],
                   data_fields=["cos", "sin"])
@dataclasses.dataclass(frozen=True)
class Rotation:
    """The rotation R(p) for some positions p; calling it rotates vectors.

    `interleaved` says how a pair is stored: dims (2i, 2i+1) if true, (i, i + rotary/2) if false.
    """

    cos: Float[Array, "*n half"]  # float32
    sin: Float[Array, "*n half"]  # float32
    interleaved: bool

    def __call__(self, x: Float[Array, "*n heads head_dim"]) -> Float[Array, "*n heads head_dim"]:
        """Rotate the first `2 * half` dims of every head; the others pass through.

        Args:
          x: vectors of any float type, with the rotation's own leading axes.

        Returns:
          float32, whatever the type of `x`: the caller casts once, after the last rotation.
        """
        half = self.cos.shape[-1]
        cos, sin = self.cos[..., None, :], self.sin[..., None, :]
        x = x.astype(jnp.float32)
        if self.interleaved:
            pairs = x[..., : 2 * half].reshape(*x.shape[:-1], half, 2)
            a, b = pairs[..., 0], pairs[..., 1]
            turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
            turned = turned.reshape(*x.shape[:-1], 2 * half)
        else:
            a, b = x[..., :half], x[..., half : 2 * half]
            turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        return jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)


@dataclasses.dataclass(frozen=True)
class Rope:
    """One RoPE table of a model: a hashable value, static under jit.

    Attributes:
      inv_freq: radians per position of each rotated pair, float64; `rotary_dim / 2` of them.
      magnitude: factor on the rotated dims of queries and keys at birth (YaRN's attention factor).
      interleaved: True where a pair is two neighbouring dims, False for the half-split order.
    """

    inv_freq: tuple[float, ...]
    magnitude: float = 1.0
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        """How many dims of a head are rotated; the remaining ones carry no position."""
        return 2 * len(self.inv_freq)

    @classmethod
    def default(cls, rotary_dim: int, theta: float = 10_000.0, **kwargs: Any) -> Rope:
        """RoPE as published (arXiv 2104.09864): pair i turns by theta^(-2i / rotary_dim)."""
        return cls(tuple(_default_inv_freq(rotary_dim, theta).tolist()), **kwargs)

    @classmethod
    def linear(cls, rotary_dim: int, theta: float, *, factor: float, **kwargs: Any) -> Rope:
        """Position interpolation (arXiv 2306.15595): every frequency divided by `factor`."""
        return cls(tuple((_default_inv_freq(rotary_dim, theta) / factor).tolist()), **kwargs)

    @classmethod
    def llama3(cls, rotary_dim: int, theta: float, *, factor: float, low_freq_factor: float,
               high_freq_factor: float, original_context: int, **kwargs: Any) -> Rope:
        """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a ramp.

        `original_context` is the context length, in tokens, that the model was first trained at.
        """
        inv_freq = _default_inv_freq(rotary_dim, theta)
        turns = original_context * inv_freq / (2 * math.pi)
        keep = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
        return cls(tuple((keep * inv_freq + (1 - keep) * inv_freq / factor).tolist()), **kwargs)

    @classmethod
    def yarn(cls, rotary_dim: int, theta: float, *, factor: float, original_context: int,
             attention_factor: float | None = None, beta_fast: float = 32.0, beta_slow: float = 1.0,
             mscale: float | None = None, mscale_all_dim: float | None = None,
             truncate: bool = True, **kwargs: Any) -> Rope:
        """YaRN (arXiv 2309.00071): a ramp over the pairs, and a magnitude on queries and keys.

        `attention_factor` is used as given, 1.0 included; None derives it from `factor`
        (or from `mscale` and `mscale_all_dim` where a file has both).
        """
        inv_freq = _default_inv_freq(rotary_dim, theta)

        def pair_that_turns(times: float) -> float:
            wavelength = original_context / (times * 2 * math.pi)
            return rotary_dim * math.log(wavelength) / (2 * math.log(theta))

        low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        if low == high:
            high += 0.001
        interpolate = np.clip((np.arange(rotary_dim // 2) - low) / (high - low), 0.0, 1.0)
        if attention_factor is None:
            if mscale and mscale_all_dim:
                attention_factor = _yarn_magnitude(factor, mscale) / _yarn_magnitude(
                    factor, mscale_all_dim)
            else:
                attention_factor = _yarn_magnitude(factor, 1.0)
        scaled = inv_freq * (1 - interpolate) + inv_freq / factor * interpolate
        return cls(tuple(scaled.tolist()),
                   magnitude=float(attention_factor), **kwargs)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, layer_type: str | None = None,
                    interleaved: bool = False) -> Rope:
        """Read the RoPE of a Hugging Face `config.json`, in every spelling it has had.

        Understood are `rope_theta` with `rope_scaling` (key `type` or `rope_type`) and
        transformers 5's `rope_parameters`, also when it is nested by layer type.

        Args:
          config: the parsed `config.json`.
          layer_type: which table to read where `rope_parameters` is nested by layer type.
          interleaved: order of the pairs in the weights.

        Raises:
          ValueError: for a RoPE type that is refused or unknown, by name, and for missing fields.
        """
        found = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if any(isinstance(value, Mapping) for value in found.values()):
            tables = {name: table for name, table in found.items() if isinstance(table, Mapping)}
            if layer_type not in tables:
                raise ValueError(
                    f"rope_parameters has one table per layer type, {sorted(tables)}; "
                    f"pass layer_type as one of them (got {layer_type!r})")
            found = tables[layer_type]
        fields = dict(found)
        kind = fields.get("rope_type", fields.get("type", "default"))
        theta = float(fields.get("rope_theta", config.get("rope_theta", 10_000.0)))
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        partial = fields.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        rotary_dim = int(head_dim * (1.0 if partial is None else partial))
        fields["original_context"] = (config.get("original_max_position_embeddings")
                                      or fields.get("original_max_position_embeddings")
                                      or config.get("max_position_embeddings"))

        def take(*names: str, optional: tuple[str, ...] = ()) -> dict[str, Any]:
            missing = [name for name in names if fields.get(name) is None]
            if missing:
                raise ValueError(f"rope type {kind!r} needs {missing} in rope_scaling or "
                                 f"rope_parameters; found {sorted(found)}")
            given = [name for name in optional if fields.get(name) is not None]
            return {name: fields[name] for name in (*names, *given)}

        match kind:
            case "default":
                return cls.default(rotary_dim, theta, interleaved=interleaved)
            case "linear":
                return cls.linear(rotary_dim, theta, interleaved=interleaved, **take("factor"))
            case "llama3":
                return cls.llama3(
                    rotary_dim, theta, interleaved=interleaved,
                    **take("factor", "low_freq_factor", "high_freq_factor", "original_context"))
            case "yarn":
                return cls.yarn(
                    rotary_dim, theta, interleaved=interleaved,
                    **take("factor", "original_context",
                           optional=("attention_factor", "beta_fast", "beta_slow", "mscale",
                                     "mscale_all_dim", "truncate")))
        reason = REFUSED.get(kind, "it is not known here")
        raise ValueError(
            f"rope type {kind!r} cannot be used: {reason}. repos needs fixed frequencies; "
            f"supported types are {', '.join(KNOWN_TYPES)}")

    def rotation(self, positions: Int[Array, "*n"]) -> Rotation:
        """R(p) of unit magnitude: what turns a query by a shift.

        Args:
          positions: int32, any value; negative ones turn backwards.

        Returns:
          cos and sin in float32, within 1.5e-7 of float64 for |p| < 2^20.
        """
        magnitude = jnp.abs(positions)
        cos = sin = None
        for place, (table_cos, table_sin) in enumerate(_digit_tables(self.inv_freq)):
            digit = (magnitude >> (place * _DIGIT_BITS)) & (table_cos.shape[0] - 1)
            c, s = jnp.asarray(table_cos)[digit], jnp.asarray(table_sin)[digit]
            cos, sin = (c, s) if cos is None else (cos * c - sin * s, sin * c + cos * s)
        sin = jnp.where(positions[..., None] < 0, -sin, sin)
        return Rotation(cos, sin, self.interleaved)

    def birth_rotation(self, positions: Int[Array, "*n"]) -> Rotation:
        """What rotates queries and keys to the positions they are born at, magnitude included.

        Make it once a forward pass; it serves every layer. `rotate` is the same for one use.

        Args:
          positions: int32.
        """
        unit = self.rotation(positions)
        return Rotation(unit.cos * self.magnitude, unit.sin * self.magnitude, self.interleaved)

    def rotate(self, x: Float[Array, "*n heads head_dim"],
               positions: Int[Array, "*n"]) -> Float[Array, "*n heads head_dim"]:
        """Rotate queries or keys to the positions they are born at, magnitude included.

        Args:
          x: vectors of any float type.
          positions: int32, one for each vector of heads.

        Returns:
          float32; cast it once, after the last rotation.
        """
        return self.birth_rotation(positions)(x)


def _default_inv_freq(rotary_dim: int, theta: float) -> np.ndarray:
    if rotary_dim <= 0 or rotary_dim % 2:
        raise ValueError(f"rotary_dim must be a positive even number, got {rotary_dim}")
    return float(theta) ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@functools.lru_cache(maxsize=16)
def _digit_tables(inv_freq: tuple[float, ...]) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """cos and sin of every digit at every place, float64 rounded once to float32."""
    frequencies = np.asarray(inv_freq, np.float64)
    tables = []
    for place, rows in enumerate(_DIGIT_ROWS):
        positions = np.arange(rows, dtype=np.float64) * (1 << (place * _DIGIT_BITS))
        angles = positions[:, None] * frequencies
        tables.append((np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)))
    return tuple(tables)
