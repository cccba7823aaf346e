"""Prefill and decode of SmolLM2-135M, through `Llama.forward`, beside torch.

Work: prefill of 512 and of 2,048 random tokens in chunks of 512, and one decode step behind 512 and
behind 2,047 tokens; one request. Peer: the same weights in transformers on torch (eager, its own
cache, one pass a prompt), where both are installed: `pip install torch transformers accelerate`.
Limits, from figures of the same run: decode reads every weight and every live KV byte once, at the
bandwidth of summing a large array; prefill multiplies, at the speed of one large matrix product.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from common import copy_bandwidth, report, seconds

import kvfunc
from kvfunc import models
from kvfunc.models.load import embedded_path

CHUNK, CAPACITY = 512, 2048 + 512


class Ours:
    """One request on a pool, its slots in order."""

    def __init__(self, dtype):
        self.model = models.load(dtype=dtype)
        config = self.model.config
        self.network = models.Llama(config, dtype)
        self.kv = kvfunc.KV.zeros(config.layers, CAPACITY, config.kv_heads, config.head_dim,
                                  kvfunc.fastest_dtype(dtype))
        self.history = kvfunc.History(CAPACITY)
        self.forward = jax.jit(self.network.forward, donate_argnames="kv")
        self.least = 1 if dtype == jnp.float32 else 2

    def step(self, tokens, start):
        """Logits behind `tokens`, which stand at raw index `start` and on."""
        count = len(tokens)
        size = max(count, self.least)

        def padded(values, fill):
            return np.pad(values, (0, size - count), constant_values=fill).astype(np.int32)

        queries = np.arange(start, start + count)
        rows = self.history.rows(queries, np.arange(CAPACITY)).pad(256, size)
        logits, self.kv = self.forward(
            self.model.params, padded(tokens, 0), padded(self.history.births[queries], 0),
            padded(queries, CAPACITY), self.kv, rows,
            np.full(self.least, count - 1, np.int32))
        return logits

    def prefill(self, tokens):
        """Logits of the last token."""
        for start in range(0, len(tokens), CHUNK):
            logits = self.step(tokens[start : start + CHUNK], start)
        return logits


class Torch:
    """The same in transformers."""

    def __init__(self, dtype):
        import torch
        import transformers

        torch.set_grad_enabled(False)
        self.torch = torch
        path = embedded_path()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name,
            dtype={jnp.float32: torch.float32, jnp.bfloat16: torch.bfloat16}[dtype])

    def prefill(self, tokens):
        """A forward pass over the whole prompt; keeps its cache."""
        ids = self.torch.tensor(np.asarray(tokens)[None])
        self.answer = self.model(ids, use_cache=True, logits_to_keep=1)
        return self.answer.logits[0].float().numpy()

    def decode(self, token):
        """One further token behind the last prefill; the cache is cut back afterwards."""
        cache = self.answer.past_key_values
        logits = self.model(self.torch.tensor([[token]]), past_key_values=cache).logits
        cache.crop(-1)
        return logits.float().numpy()


def matmul_speed(dtype) -> float:
    """FLOP a second of one large product."""
    x = jnp.ones((2048, 2048), dtype)
    product = jax.jit(functools.partial(jnp.matmul, preferred_element_type=jnp.float32))
    return 2 * 2048**3 / seconds(lambda: product(x, x))


def main() -> None:
    tokens = np.random.default_rng(0).integers(1000, 40000, 2048)
    bandwidth = copy_bandwidth()
    rows = []
    for dtype in (jnp.bfloat16, jnp.float32):
        speed = matmul_speed(dtype)
        ours = Ours(dtype)
        config = ours.model.config
        weights = sum(x.size for x in jax.tree.leaves(ours.model.params))
        embedding = config.vocab_size * config.width
        try:
            peer = Torch(dtype)
        except ImportError as error:
            print(f"no peer in this run: {error}")
            peer = None

        def add(work, mine, theirs, limit, dtype=dtype):
            rows.append([jnp.dtype(dtype).name, work, mine * 1e3,
                         theirs * 1e3 if theirs else None,
                         theirs / mine if theirs else None, limit * 1e3, mine / limit])

        for count in (512, 2048):
            prompt = tokens[:count]
            mine = seconds(lambda ours=ours, prompt=prompt: ours.prefill(prompt), 3)
            theirs = peer and seconds(lambda peer=peer, prompt=prompt: peer.prefill(prompt), 3)
            attention = 2 * config.layers * config.heads * config.head_dim * count**2
            flops = 2 * (weights - embedding) * count + attention
            add(f"prefill {count}", mine, theirs, flops / speed)
            last = count - 1
            mine = seconds(lambda ours=ours, last=last: ours.step(tokens[last:last + 1], last), 15)
            theirs = peer and seconds(lambda peer=peer: peer.decode(7), 15)
            kv = 2 * config.layers * config.kv_heads * config.head_dim * count
            add(f"decode behind {last}", mine, theirs,
                (weights + kv) * jnp.dtype(dtype).itemsize / bandwidth)
    report("model", "SmolLM2-135M, one request",
           ["dtype", "work", "ms", "torch ms", "torch / ours", "limit ms", "ours / limit"], rows,
           bandwidth_gb_per_s=bandwidth / 1e9)


if __name__ == "__main__":
    main()
