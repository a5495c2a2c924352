"""Floating point operations per token of training and decoding, and the peak rate of a device."""

import functools
import time

import jax
import jax.numpy as jnp

from attnlab.nn import GPT
from attnlab.nn.kinds import Kind, kind_of, named
from attnlab.nn.resolved import resolved
from attnlab.ops.cpu import products


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
    operations = sum(kind.operations(model, length) for kind in _kinds(model))
    return 6.0 * _weights(model) + 3.0 * operations


def per_decoded_token(model: GPT, length: int) -> float:
    """FLOPs of decoding the last of `length` tokens: 2 for each weight, 4·H·D for each visible key.

    >>> model = GPT(vocab_size=10, num_layers=1, num_heads=1, width=8, context=8)
    >>> per_decoded_token(model, length=8) - per_decoded_token(model, length=4)
    128.0
    """
    return 2.0 * _weights(model) + sum(kind.operations_at(model, length) for kind in _kinds(model))


def _kinds(model: GPT) -> list[Kind]:
    return [named(kind_of(model, layer)) for layer in range(model.num_layers)]


def _weights(model: GPT) -> int:
    """Weights of all matrix products."""
    mlp = (3 if model.mlp == "gated" else 2) * resolved(model).hidden * model.width
    return sum(kind.weights(model) + mlp for kind in _kinds(model)) + model.vocab_rows * model.width


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
