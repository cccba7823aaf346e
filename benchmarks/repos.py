"""What closing a gap costs: an edit of integers here, a rewrite of every key elsewhere.

Work: a cache of n tokens (SmolLM2's shape, 30 layers, bfloat16), the first 16 dropped, then repos.
Peer: the same on a cache whose keys carry their position, where every live key is rotated again.
Limit of the peer: every byte of K read and written once at the machine's bandwidth.
The second table is the error of attention scores after many events, against float64.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from common import copy_bandwidth, report, seconds

import kvfunc

LAYERS, KV_HEADS, HEAD_DIM, THETA = 30, 3, 64, 1e5


def repos_against_rotation() -> None:
    rope = kvfunc.Rope.default(HEAD_DIM, THETA)
    bandwidth = copy_bandwidth()
    edit = jax.jit(lambda cache: kvfunc.repos(kvfunc.drop(cache, jnp.arange(16))[0])[0].position)

    @functools.partial(jax.jit, donate_argnums=0)
    def rotate_again(keys, shift):
        turn = rope.rotation(-shift)
        return [turn(k).astype(k.dtype) for k in keys]

    rows = []
    for n in (1024, 8192, 32768):
        table = kvfunc.init(1, n, 1, 1)
        table = dataclasses.replace(table, birth=jnp.arange(n, dtype=jnp.int32),
                                    position=jnp.arange(n, dtype=jnp.int32),
                                    next_position=jnp.int32(n))
        ours = seconds(lambda table=table: edit(table))
        keys = [jnp.ones((n, KV_HEADS, HEAD_DIM), jnp.bfloat16) for _ in range(LAYERS)]
        shift = jnp.full(n, 16, jnp.int32)

        def peer(shift=shift, keys=keys):
            keys[:] = rotate_again(keys, shift)
            return keys

        theirs = seconds(peer)
        moved = 2 * LAYERS * n * KV_HEADS * HEAD_DIM * 2
        rows.append([n, ours * 1e3, theirs * 1e3, theirs / ours, 0, moved / 1e6,
                     moved / bandwidth * 1e3])
    report("repos", "repos: an edit of integers against rotating every key again",
           ["tokens", "repos ms", "rotate keys ms", "ratio", "KV MB moved by repos",
            "KV MB moved by rotation", "limit of rotation ms"], rows,
           bandwidth_gb_per_s=bandwidth / 1e9)


def drift() -> None:
    """128 keys move down by one, event after event; 128 dims a head, theta 5e5, bfloat16."""
    head_dim, theta, n = 128, 5e5, 128
    rope = kvfunc.Rope.default(head_dim, theta)
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, n, 1, head_dim))

    def rotate64(x, positions):
        angles = positions[:, None, None] * np.asarray(rope.inv_freq)
        pairs = (x[..., : head_dim // 2] + 1j * x[..., head_dim // 2 :]) * np.exp(1j * angles)
        return np.concatenate([pairs.real, pairs.imag], -1)

    def scores(q, k):
        return np.einsum("qhd,khd->qk", np.asarray(q, np.float64), np.asarray(k, np.float64))

    births = 8192 + np.arange(n)
    stored = jnp.asarray(rotate64(k, births), jnp.bfloat16)
    back = rope.rotation(jnp.full(n, -1, jnp.int32))
    step = jax.jit(lambda keys: back(keys).astype(jnp.bfloat16))
    again, rows = stored, []
    for events in (1, 4, 16, 64, 256, 4096):
        for _ in range(events - (rows[-1][0] if rows else 0)):
            again = step(again)
        positions = births - events
        q_now = rotate64(q, positions)
        exact = scores(q_now, rotate64(np.asarray(k), positions)) / head_dim**0.5
        turn = rope.rotation(jnp.full(n, events, jnp.int32))
        turned = turn(jnp.asarray(q_now, jnp.float32)).astype(jnp.bfloat16)
        ours = scores(turned, stored) / head_dim**0.5
        theirs = scores(jnp.asarray(q_now, jnp.bfloat16), again) / head_dim**0.5
        rows.append([events, float(np.sqrt(np.mean((theirs - exact) ** 2))),
                     float(np.sqrt(np.mean((ours - exact) ** 2)))])
    report("drift", "error of attention scores after many repos events (root mean square)",
           ["repos events", "keys rotated again in bfloat16", "query turned by the summed shift"],
           rows)


if __name__ == "__main__":
    repos_against_rotation()
    drift()
