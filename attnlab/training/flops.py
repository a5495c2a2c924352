"""Floating point operations: those that a step needs, those that the device can do, and the share that is used."""

import functools
import time

import jax
import jax.numpy as jnp

from attnlab.nn import GPT
from attnlab.ops import products


def per_token(model: GPT, length: int) -> float:
    """What training spends on a token: 6 for each weight of a product, 12·L·H·D for each key seen.

    2 a weight forward, 4 backward, and the products q·k and p·v likewise (Chowdhery et al. 2022, appendix B, which
    counts every key; a causal query sees (T + 1) / 2 on average). Embeddings that are looked up, norms and softmax are
    not counted, nor what remat computes again.

    Args:
      model: the GPT.
      length: T, tokens a sequence.

    >>> per_token(GPT(vocab_size=10, num_layers=1, num_heads=1, width=8, context=3), length=3)
    5280.0
    """
    head_dim = model.width // model.num_heads
    kv_heads = model.kv_heads or model.num_heads
    projections = model.width * head_dim * (2 * model.num_heads + 2 * kv_heads)
    mlp = 2 * round(model.mlp_ratio * model.width) * model.width
    weights = model.num_layers * (projections + mlp) + model.vocab_size * model.width
    window = min(model.window or length, length)
    keys = window - window * (window - 1) / (2 * length)  # the first queries see fewer
    return 6.0 * weights + 12.0 * model.num_layers * model.width * keys


def peak(dtype: str) -> float:
    """FLOP/s of one device as a large matrix product reaches them: the best of half a dozen.

    Args:
      dtype: of the operands; "float32" or "bfloat16".

    >>> peak("float32") > 1e8
    True
    """
    size = 1024 if jax.default_backend() == "cpu" else 8192
    x = jnp.ones((size, size), dtype)
    multiply = jax.jit(functools.partial(products.dot_general, dimension_numbers=(((1,), (0,)), ((), ()))))
    jax.block_until_ready(multiply(x, x))
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(multiply(x, x))
        seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 / min(seconds)
