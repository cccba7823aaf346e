"""Edit the KV cache of a language model."""
