"""An edited cache on eight devices and on one gives the same attention: a program of its own.

Args: the implementation. The flag that makes eight devices of a CPU must be there before JAX is.
"""

import os
import sys

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import kvfunc

HEADS, KV_HEADS, HEAD_DIM, SLOTS = 8, 2, 16, 64
ROPE = kvfunc.Rope.default(HEAD_DIM)


def edited():
    """A cache of 40 tokens with a hole that is closed, and four new tokens' queries."""
    normal = np.random.default_rng(3).normal
    cache = kvfunc.init(layers=1, slots=SLOTS, kv_heads=KV_HEADS, head_dim=HEAD_DIM,
                        dtype=jnp.float32)
    for count, gone in ((40, jnp.arange(8, 19)), (4, None)):
        cache, new = kvfunc.reserve(cache, count)
        k, v = (jnp.asarray(normal(size=(count, KV_HEADS, HEAD_DIM)), jnp.float32) for _ in "kv")
        cache = kvfunc.write(cache, new.slots, [ROPE.rotate(k, new.births)], [v])
        if gone is not None:
            cache, _ = kvfunc.drop(cache, gone)
            cache, _ = kvfunc.repos(cache)
    q = jnp.asarray(normal(size=(4, HEADS, HEAD_DIM)), jnp.float32)
    return cache, new, ROPE.rotate(q, new.births)


def main(implementation):
    assert len(jax.devices()) == 8
    cache, new, q = edited()
    rows = kvfunc.rows_for(cache, new)
    attend = functools.partial(kvfunc.segment_attention, implementation=implementation)
    args = rows, new.births, ROPE.rotation(rows.shift)
    k, v = cache.kv.k[0], cache.kv.v[0]
    one = attend(q, k, v, *args)
    assert np.abs(one).min() > 0

    # Fewer KV heads than devices: each is on the four devices whose query heads read it.
    mesh = Mesh(np.reshape(jax.devices(), (KV_HEADS, 4)), ("kv_heads", "group"))
    of_queries, of_keys = P(None, ("kv_heads", "group")), P(None, "kv_heads")
    over_heads = jax.jit(jax.shard_map(
        attend, mesh=mesh, in_specs=(of_queries, of_keys, of_keys, P(), P(), P()),
        out_specs=of_queries, check_vma=False))
    out = over_heads(q, k, v, *args)
    assert len(out.sharding.device_set) == 8 and not out.sharding.is_fully_replicated
    np.testing.assert_allclose(out, one, rtol=0, atol=1e-6)

    # Slots on all devices: each reads the rows that lie on it, and the parts are merged.
    mesh = Mesh(np.array(jax.devices()), ("slots",))

    def over_part(q, k, v, rows, births, turn):
        here = jax.lax.axis_index("slots") * k.shape[0]
        begins = jnp.clip(rows.slot - here, 0, k.shape[0])
        ends = jnp.clip(rows.slot + rows.length - here, 0, k.shape[0])
        before = begins + here - rows.slot  # keys of the row that lie on devices before
        rows = dataclasses.replace(rows, slot=begins, length=ends - begins,
                                   raw=rows.raw + before, birth=rows.birth + before)
        part = attend(q, k, v, rows, births, turn, partials=True)
        return jax.tree.map(lambda x: jax.lax.all_gather(x, "slots"), part).merged().finish()

    over_slots = jax.jit(jax.shard_map(
        over_part, mesh=mesh, in_specs=(P(), P("slots"), P("slots"), P(), P(), P()),
        out_specs=P(), check_vma=False))
    np.testing.assert_allclose(over_slots(q, k, v, *args), one, rtol=0, atol=1e-6)


if __name__ == "__main__":
    main(sys.argv[1])
