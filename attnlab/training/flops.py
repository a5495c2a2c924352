"""Floating point operations: how many training takes per token, and how many a device can do per second."""

import functools
import time

import jax
import jax.numpy as jnp

from attnlab.nn import GPT, fields
from attnlab.ops import products


def per_token(model: GPT, length: int) -> float:
    """FLOPs of training per token: 6 for each weight of a matrix product, 12·L·H·D for each visible key.

    A weight takes 2 in the forward and 4 in the backward pass, and so do the products q·k and p·v (Chowdhery et al.
    2022, appendix B, which counts every key; a causal query attends to (T + 1) / 2 keys on average). Embedding lookups,
    norms, softmax and the recomputation of remat are not counted.

    Args:
      model: the GPT.
      length: T, tokens per sequence.

    >>> per_token(GPT(vocab_size=10, num_layers=1, num_heads=1, width=8, context=3), length=3)
    5280.0
    """
    head_dim, kv_heads = fields.head_dim(model), model.kv_heads or model.num_heads
    projections = model.width * head_dim * (2 * model.num_heads + 2 * kv_heads)
    mlp = (3 if model.mlp == "gated" else 2) * round(model.mlp_ratio * model.width) * model.width
    weights = model.num_layers * (projections + mlp) + model.vocab_size * model.width
    keys = sum(_visible_keys(model, layer, length) for layer in range(model.num_layers))
    return 6.0 * weights + 12.0 * model.num_heads * head_dim * keys


def per_decoded_token(model: GPT, length: int) -> float:
    """FLOPs of decoding a token with `length` tokens before it: 2 for each weight, 4·H·D for each visible key.

    >>> model = GPT(vocab_size=10, num_layers=1, num_heads=1, width=8, context=8)
    >>> per_decoded_token(model, length=8) - per_decoded_token(model, length=4)
    128.0
    """
    head_dim, layers = fields.head_dim(model), range(model.num_layers)
    whole = sum(_visible_keys(model, layer, length) for layer in layers)
    weights = (per_token(model, length) - 12.0 * model.num_heads * head_dim * whole) / 6.0
    local = [fields.kind(model, layer) == "local" for layer in layers]
    keys = sum(min(model.window, length) if is_local else length for is_local in local)
    return 2.0 * weights + 4.0 * model.num_heads * head_dim * keys


def _visible_keys(model: GPT, layer: int, length: int) -> float:
    """How many keys a query attends to in a layer, on average; the first queries have fewer."""
    window = min(model.window, length) if fields.kind(model, layer) == "local" else length
    return window - window * (window - 1) / (2 * length)


def peak(dtype: str) -> float:
    """FLOP/s that one device achieves in a large matrix product, best of six.

    Args:
      dtype: data type of the operands; "float32" or "bfloat16".

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
