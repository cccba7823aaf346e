"""Why the layers of `Llama` are unrolled: a scan copies the weights of every layer.

Work: the MLPs of SmolLM2's 30 layers on 2, 16 and 512 rows. Peer: the same under `lax.scan` with
stacked weights. Limit: the weights read once, at the bandwidth of summing a large array.
"""

import jax
import jax.numpy as jnp
from common import copy_bandwidth, report, seconds
from jax import lax

from kvfunc.linear import product

LAYERS, WIDTH, MLP_WIDTH = 30, 576, 1536


def mlp(x, weights):
    gate, up, down = weights

    return x + product(product(x, up, x.dtype, gate), down, x.dtype)


@jax.jit
def unrolled(x, layers):
    for weights in layers:
        x = mlp(x, weights)
    return x


@jax.jit
def scanned(x, stacked):
    return lax.scan(lambda x, weights: (mlp(x, weights), None), x, stacked)[0]


def main():
    bandwidth = copy_bandwidth()
    rows = []
    for dtype in (jnp.bfloat16, jnp.float32):
        wide = jnp.full((MLP_WIDTH, WIDTH), 0.01, dtype)
        layers = [(wide, wide + i, wide.T + i) for i in range(LAYERS)]
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *layers)
        limit = sum(x.nbytes for x in jax.tree.leaves(layers)) / bandwidth
        for count in (2, 16, 512):
            x = jnp.ones((count, WIDTH), dtype)
            ours = seconds(lambda x=x, layers=layers: unrolled(x, layers))
            theirs = seconds(lambda x=x, stacked=stacked: scanned(x, stacked))
            rows.append([jnp.dtype(dtype).name, count, ours * 1e3, theirs * 1e3, theirs / ours,
                         limit * 1e3])
    report("layers", "30 MLPs, unrolled and scanned",
           ["dtype", "rows", "unrolled ms", "scanned ms", "scanned / unrolled", "limit ms"], rows,
           bandwidth_gb_per_s=bandwidth / 1e9)


if __name__ == "__main__":
    main()
