"""Logits and losses of the next tokens."""

import functools

import jax.numpy as jnp

from attnlab.nn import sharding
from attnlab.ops.cross_entropy import capped, chunk_size, cross_entropy, loss_of_logits


def logits(config, x, embed):
    """Logits for features `[B, R, F]`, one for each row of the table `embed`: float32 `[B, R, rows]`."""
    return capped(sharding.constrain(embed.attend(x), "batch", "length", "vocab"), config.logit_cap)


def losses(config, x, targets, embed):
    """Cross-entropy of targets `[B, R]` in nats, NaN for targets outside the vocabulary; see `ops.cross_entropy`."""
    batch, length, _ = x.shape
    length = -(-length // sharding.shards("length", x))
    chunk = chunk_size(-(-batch // sharding.shards("batch", x)), length, config.vocab_rows, x.dtype)
    if chunk < length or jnp.finfo(x.dtype).bits < 32:
        options = {"vocab_size": config.vocab_size, "chunk": chunk, "cap": config.logit_cap}
        return sharding.over_tokens(functools.partial(cross_entropy, **options), x, embed.embedding, targets)
    return loss_of_logits(logits(config, x, embed), targets, config.vocab_size)
