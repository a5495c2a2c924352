"""Floating point operations per token of training and decoding, and the peak rate of a device."""

import functools
import time

import flax.linen as nn
import jax
import jax.numpy as jnp

from attnlab.nn import GPT
from attnlab.ops import counting
from attnlab.ops.cpu import products
from attnlab.training import precision as precisions


def per_token(model: nn.Module, length: int) -> float:
    """Training FLOPs per token: three times the forward pass, which is traced but not run.

    Each weight of a matrix product takes 2 FLOPs in the forward and 4 in the backward pass. Each multiplication in q·k
    and p·v takes as many, but only visible keys count: (T + 1) / 2 on average for a causal query (Chowdhery et al.
    2022, appendix B, count every key). Recurrences count as if computed token by token, although `impl="chunked"` does
    more work. Embedding lookups, elementwise operations and recomputation by remat are not counted.

    Args:
      model: a module from tokens `[B, T]` to logits, with any layers.
      length: T, tokens per sequence.

    >>> per_token(GPT.of(vocab_size=10, num_layers=1, num_heads=1, width=8, context=3), length=3)
    5280.0
    """
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return 3.0 * counting.operations(model.apply, _variables(model), tokens) / length


def per_decoded_token(model: GPT, length: int) -> float:
    """FLOPs of decoding the last of `length` tokens: 2 for each weight, plus each layer's work on its cache.

    >>> model = GPT.of(vocab_size=10, num_layers=1, num_heads=1, width=8, context=8)
    >>> per_decoded_token(model, length=8) - per_decoded_token(model, length=4)
    128.0
    """
    caches = jax.eval_shape(lambda: model.init_caches(1, length))

    def step(variables, token, caches):
        return model.apply(variables, token, caches=caches)

    return counting.operations(step, _variables(model), jax.ShapeDtypeStruct((1, 1), jnp.int32), caches)


def _variables(model: nn.Module):
    return jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), jnp.int32))


def peak(precision: str) -> float:
    """FLOP/s that one device achieves in a large matrix product, the best of six runs.

    Args:
      precision: "float32" (in full precision), "tf32" or "bfloat16".

    >>> peak("float32") > 1e8
    True
    """
    size = 1024 if jax.default_backend() == "cpu" else 8192
    x = jnp.ones((size, size), "bfloat16" if precision == "bfloat16" else "float32")
    multiply = jax.jit(functools.partial(products.dot_general, dimension_numbers=(((1,), (0,)), ((), ()))))
    seconds = []
    with precisions.products(precision):
        jax.block_until_ready(multiply(x, x))
        for _ in range(6):
            start = time.perf_counter()
            jax.block_until_ready(multiply(x, x))
            seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 / min(seconds)
