"""The arithmetic of the Anchor Pool in NumPy and float64, and texts to try it on."""

import jax.numpy as jnp
import numpy as np

from kvfunc.segments import Segment

LAYERS, HEADS, HEAD_DIM, TOKENS, BEHIND = 3, 2, 8, 24, 4
CHANNELS = 2 * HEADS * HEAD_DIM


def text(seed: int, length: int = TOKENS, size: int = TOKENS) -> Segment:
    """Random KV of a text, with garbage for padding."""
    k, v = np.random.default_rng(seed).normal(size=(2, LAYERS, size, HEADS, HEAD_DIM))
    return segment(k, v, length)


def segment(k, v, length) -> Segment:
    k, v = (np.array(x, np.float32) for x in (k, v))
    for x in (k, v):
        x[:, length:] = 1e3
    return Segment(jnp.asarray(k), jnp.asarray(v), jnp.int32(length))


def flat(of: Segment) -> np.ndarray:
    """Keys and values [layers, length, channels]: what a segment says, without its padding."""
    length = int(of.length)
    return np.concatenate([np.asarray(x, float)[:, :length].reshape(LAYERS, length, -1)
                           for x in (of.k, of.v)], -1)


def moved(of: Segment, offset) -> Segment:
    """The text with another `flat`, its own plus an offset [layers, length, channels]."""
    length = int(of.length)
    both = np.zeros((LAYERS, of.size, CHANNELS))
    both[:, :length] = flat(of) + offset
    k, v = np.split(both.reshape(LAYERS, of.size, 2 * HEADS, HEAD_DIM), 2, axis=2)
    return segment(k, v, length)


def deviation(seed: int, length: int = TOKENS, size: float = 1.0) -> np.ndarray:
    """What another prompt might do to a text: nothing to layer 0."""
    offset = np.random.default_rng(100 + seed).normal(size=(LAYERS, length, CHANNELS)) * size
    offset[0] = 0
    return offset.astype(np.float32)


def near(base, share: float, seed: int = 0):
    """A text at about this relative distance."""
    noise = np.random.default_rng(seed).normal(size=flat(base).shape)
    return moved(base, share * noise)


def close(actual, expected, tolerance=1e-5):
    """Equal but for rounding."""
    np.testing.assert_allclose(actual, expected, rtol=0,
                               atol=tolerance * max(np.abs(expected).max(), 1))


class Ridge:
    """Regression of y on x, whose last column is 1: standardised, penalised, of a rank."""

    def __init__(self, x, y, penalty: float, rank: int | None = None):
        self.mean, self.y_mean, deviation = x.mean(0), y.mean(0), x.std(0)
        self.scale = np.where(deviation > 1e-9, 1 / np.maximum(deviation, 1e-9), 0)
        z = self._standardised(x)
        count, features = z.shape
        self.slopes = np.linalg.solve(z.T @ z + penalty * count * np.eye(features),
                                      z.T @ (y - self.y_mean))
        if rank is not None:
            leading = np.linalg.svd(z @ self.slopes)[2][:rank]
            self.slopes = self.slopes @ leading.T @ leading
        self.noise = np.square(y - self(x)).mean() / np.square(y).mean()

    def _standardised(self, x):
        return (x - self.mean) * self.scale

    def __call__(self, x):
        return self._standardised(x) @ self.slopes + self.y_mean


def softmax(logits) -> np.ndarray:
    """Over axis 0."""
    weights = np.exp(logits - logits.max(0, keepdims=True))
    return weights / weights.sum(0, keepdims=True)


def distance(mine, theirs) -> float:
    """Root-mean-square difference over what both have [layers, tokens, channels], over `mine`."""
    both = min(mine.shape[1], theirs.shape[1])
    mine, theirs = mine[:, :both], theirs[:, :both]
    return float(np.sqrt(np.square(theirs - mine).mean() / np.square(mine).mean()))


def entropy(weights) -> float:
    """In bits."""
    weights = np.asarray(weights, float)
    weights = weights[weights > 0]
    return float(-(weights * np.log2(weights)).sum())


class Paper:
    """KVCOMM's rules (kvcomm_reference.md, 2.3 and 3), for anchors as long as the text or longer.

    Arrays are `flat`s: [layers, tokens, channels], keys first.
    """

    def __init__(self, mine, theirs: list):
        self.mine, self.theirs = _kinds(mine), [_kinds(anchor) for anchor in theirs]
        self.length = mine.shape[1]

    def of_tokens(self) -> np.ndarray:
        """w_X [anchors, 2, tokens]: from the mean absolute difference to the first tokens."""
        means = [np.abs(self.mine - anchor[:, :self.length]).mean((0, 3)).T
                 for anchor in self.theirs]
        return softmax(-np.array(means))

    def of_following(self) -> np.ndarray:
        """u_X [anchors, layers, channels]: from the norm to the last tokens."""
        norms = [np.sqrt(np.square(self.mine - anchor[:, anchor.shape[1] - self.length:]).sum(1))
                 for anchor in self.theirs]
        return softmax(-np.array(norms)).reshape(len(self.theirs), len(self.mine), -1)

    def of_gate(self) -> np.ndarray:
        """s [anchors]: from the norm over all values."""
        norms = [np.linalg.norm((self.mine - anchor[:, :self.length])[:, :, 1])
                 for anchor in self.theirs]
        return softmax(-np.array(norms))


def _kinds(of) -> np.ndarray:
    return of.reshape(*of.shape[:2], 2, -1)


def activated(weights) -> set[int]:
    """Whom KVCOMM counts: up to the last whose cumulative sum is below .9; all if there is none."""
    order = sorted(range(len(weights)), key=lambda anchor: -weights[anchor])
    sums = np.cumsum([weights[anchor] for anchor in order])
    below = [place for place, so_far in enumerate(sums) if so_far < 0.9]
    return set(order[:below[-1] + 1]) if below else set(order)
