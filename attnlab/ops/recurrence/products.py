"""Batched matrix products with operands rounded to a type, such as bfloat16, and sums in float32 or wider."""

import functools

import jax
import jax.numpy as jnp

from attnlab.types import Array, DType


def product(spec: str, x: Array, y: Array, operand: DType | None = None) -> Array:
    """The einsum of two arrays, such as "...tk,...jk->...tj", after rounding both to `operand`; None for their type.

    Derivatives round their operands in the same way; the derivative of `einsum` would multiply float32 cotangents.
    """
    return jnp.einsum(spec, x, y) if _is_wide(operand) else _rounded(spec, operand, x, y)


def rounded(x: Array, operand: DType | None) -> Array:
    """Convert an array to the type in which `product` multiplies it."""
    return x if _is_wide(operand) else x.astype(operand)


def _is_wide(operand) -> bool:
    return operand is None or jnp.finfo(operand).bits >= 32


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rounded(spec, operand, x, y):
    return jnp.einsum(spec, x.astype(operand), y.astype(operand), preferred_element_type=jnp.float32)


def _forward(spec, operand, x, y):
    return _rounded(spec, operand, x, y), (x, y)


def _backward(spec, operand, residuals, g):
    x_axes, y_axes, out_axes = spec.replace("->", ",").split(",")
    x, y = residuals
    d_x = product(f"{out_axes},{y_axes}->{x_axes}", g, y, operand)
    d_y = product(f"{out_axes},{x_axes}->{y_axes}", g, x, operand)
    return d_x.astype(x.dtype), d_y.astype(y.dtype)


_rounded.defvjp(_forward, _backward)
