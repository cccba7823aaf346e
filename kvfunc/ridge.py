"""Ridge regression from sums alone: X'X and X'Y are all that is kept of what was seen.

So memory is constant, whoever saw different examples adds his sums to another's, and the weights
are one solve away. Examples are features standardised by the sums' own means and variances, the
last feature is the constant 1, and the answer may be of a lower rank.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve
from jaxtyping import Array, Bool, Float

OVERSAMPLED = 8  # directions beyond the rank that the iteration for the leading ones carries
ROUNDS = 4  # of that iteration: fitted values fall off fast, and what is lost is the last of them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Everything that is remembered of the examples of a regression."""

    gram: Float[Array, "*batch features features"]  # X'X; the last feature is 1
    cross: Float[Array, "*batch features outputs"]  # X'Y
    energy: Float[Array, "*batch outputs"]  # sums of Y^2

    @classmethod
    def zeros(cls, batch: tuple[int, ...], features: int, outputs: int) -> Sums:
        """No examples."""
        return cls(jnp.zeros((*batch, features, features)), jnp.zeros((*batch, features, outputs)),
                   jnp.zeros((*batch, outputs)))

    @property
    def count(self) -> Float[Array, "*batch"]:
        """How many examples there were."""
        return self.gram[..., -1, -1]

    def add(self, x: Float[Array, "*batch n features"], y: Float[Array, "*batch n outputs"],
            mask: Bool[Array, " n"]) -> Sums:
        """The sums with further examples, of which the mask says which count.

        Args:
          x: features, the last of them 1.
          y: what they should give.
          mask: False for padding, which may hold NaN.
        """
        x, y = (jnp.where(jnp.expand_dims(mask, (*range(x.ndim - 2), -1)), values, 0.0)
                for values in (x, y))
        return self + Sums(jnp.einsum("...nf,...ng->...fg", x, x),
                           jnp.einsum("...nf,...no->...fo", x, y), jnp.square(y).sum(-2))

    def __add__(self, other: Sums) -> Sums:
        return jax.tree.map(jnp.add, self, other)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weights:
    """Linear maps of rank `rank`: x -> x left^T right^T + bias, matrices as `linear.product`'s."""

    left: Float[Array, "*batch rank features"]
    right: Float[Array, "*batch outputs rank"]
    bias: Float[Array, "*batch outputs"]
    noise: Float[Array, "*batch"]  # mean square of what the maps leave, over mean square of Y

    def __call__(self, x: Float[Array, "*batch n features"]) -> Float[Array, "*batch n outputs"]:
        """What the features give."""
        return (x @ self.left.mT) @ self.right.mT + self.bias[..., None, :]


def fit(sums: Sums, penalty: float, rank: int) -> Weights:
    """Solve for the weights.

    Args:
      sums: of the examples; of none, the weights are 0.
      penalty: lambda, in units of the standardised features' own variance times their number.
      rank: of the map; the leading directions of the fitted values stay.

    Raises:
      ValueError: if `penalty` is not above 0 or `rank` is not between 1 and the outputs.
    """
    features, outputs = sums.cross.shape[-2:]
    if not penalty > 0:
        raise ValueError(f"penalty must be above 0, got {penalty}: without one, features that "
                         "always come together have no single solution")
    if not 1 <= rank <= outputs:
        raise ValueError(f"rank must be between 1 and the {outputs} outputs, got {rank}")
    solve = _fit
    for _ in sums.gram.shape[:-2]:
        solve = jax.vmap(solve, (0, None, None))
    return solve(sums, penalty, min(rank, features))


def _fit(sums: Sums, penalty: float, rank: int) -> Weights:
    count = jnp.maximum(sums.gram[-1, -1], 1.0)
    x_mean, y_mean = sums.gram[-1] / count, sums.cross[-1] / count
    covariance = sums.gram / count - x_mean[:, None] * x_mean[None]
    variance = jnp.diagonal(covariance)
    # What never varies has rounding errors for a variance; the constant 1 is one such.
    varies = variance > 1e-6 * jnp.diagonal(sums.gram) / count
    scale = jnp.where(varies, jax.lax.rsqrt(jnp.where(varies, variance, 1.0)), 0.0)
    correlation = covariance * scale[:, None] * scale[None]
    cross = (sums.cross / count - x_mean[:, None] * y_mean[None]) * scale[:, None]
    penalised = correlation + penalty * jnp.eye(len(scale))
    solved = cho_solve((jnp.linalg.cholesky(penalised), True), cross)
    leading = _leading(solved.T @ correlation @ solved, rank)  # of the fitted values' covariance
    left = (solved * scale[:, None]) @ leading
    fitted = left @ leading.T
    bias = y_mean - x_mean @ fitted
    explained = 2 * (sums.cross / count - x_mean[:, None] * y_mean[None]) - covariance @ fitted
    left_over = sums.energy / count - jnp.square(y_mean) - (fitted * explained).sum(0)
    noise = jnp.maximum(left_over.sum(), 0.0) / jnp.maximum(sums.energy.sum() / count, 1e-30)
    return Weights(left.T, leading, bias, noise)


def _leading(matrix: Float[Array, "n n"], rank: int) -> Float[Array, "n rank"]:
    """An orthonormal basis of the leading directions of a symmetric matrix."""
    size = min(rank + OVERSAMPLED, len(matrix))
    if size == len(matrix):
        return jnp.linalg.eigh(matrix).eigenvectors[:, ::-1][:, :rank]
    basis = jax.random.normal(jax.random.key(0), (len(matrix), size))
    for _ in range(ROUNDS):
        basis = jnp.linalg.qr(matrix @ basis).Q
    inner = jnp.linalg.eigh(basis.T @ matrix @ basis).eigenvectors
    return basis @ inner[:, ::-1][:, :rank]
