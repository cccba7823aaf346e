"""For a JAX researcher: run a model on a cache, drop part of the text, close the gap, go on."""

import dataclasses

import jax
import jax.numpy as jnp

import kvfunc
from kvfunc import models

model = models.load(dtype=jnp.float32)  # the embedded SmolLM2-135M-Instruct
config = model.config
network = models.Llama(config, jnp.float32)


@jax.jit
def step(params, cache, tokens):
    """Append tokens to the cache; the cache, and the likeliest next token."""
    cache, new = kvfunc.reserve(cache, len(tokens))
    logits, kv = network.forward(params, tokens, new.births, new.slots, cache.kv,
                                 kvfunc.rows_for(cache, new))
    return dataclasses.replace(cache, kv=kv), logits[-1].argmax()


def append(cache, text):
    """The same for a text."""
    return step(model.params, cache, jnp.array(model.tokenizer.encode(text), jnp.int32))


def main():
    cache = kvfunc.init(config.layers, 64, config.kv_heads, config.head_dim, jnp.float32)
    cache, _ = append(cache, "Notes from today.")
    start = int(cache.length)
    cache, _ = append(cache, " The password is swordfish.")
    secret = jnp.arange(start, int(cache.length))
    question = " It rained. The password is"

    _, token = append(cache, question)
    print("with the secret:   ", model.tokenizer.decode([int(token)]))

    cache, dropped = kvfunc.drop(cache, secret)
    cache, _ = kvfunc.repos(cache)  # no byte of KV is read or written
    _, token = append(cache, question)
    print("without it:        ", model.tokenizer.decode([int(token)]))
    print(f"dropped {dropped.dropped} tokens; the next one is born at {cache.next_position}")


if __name__ == "__main__":
    main()
