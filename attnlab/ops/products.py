"""Matrix products, laid out as the device likes them."""

import functools
import math

import jax
from jax import lax


def dot_general(x, kernel, dimension_numbers, precision=None, preferred_element_type=None):
    """`jax.lax.dot_general` for flax's `dot_general=`: the last axes of x with the first of a kernel, no batch axes.

    On CPUs the gradient of the kernel, xᵀ·g, multiplies a transpose of x that was written down: XLA's CPU backend
    multiplies rows by columns at twice the speed of columns by columns.
    """
    ((x_axes, kernel_axes), (x_batch, _)) = dimension_numbers
    rank = len(x_axes)
    last, first = tuple(range(x.ndim - rank, x.ndim)), tuple(range(rank))
    if jax.default_backend() != "cpu" or x_batch or tuple(x_axes) != last or tuple(kernel_axes) != first:
        return lax.dot_general(x, kernel, dimension_numbers, precision, preferred_element_type)
    width = math.prod(kernel.shape[:rank])
    y = _product(x.reshape(-1, width), kernel.reshape(width, -1), precision, preferred_element_type)
    return y.reshape(*x.shape[: x.ndim - rank], *kernel.shape[rank:])


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _product(x, kernel, precision, preferred_element_type):
    return _dot(x, kernel, 1, precision, preferred_element_type)


def _dot(x, kernel, axis, precision, preferred_element_type):
    return lax.dot_general(x, kernel, (((axis,), (0,)), ((), ())), precision, preferred_element_type)


@_product.defjvp
def _product_jvp(precision, preferred_element_type, primals, tangents):
    (x, kernel), (dx, d_kernel) = primals, tangents
    options = (precision, preferred_element_type)
    turned = lax.optimization_barrier(x.T)
    return _dot(x, kernel, 1, *options), _dot(dx, kernel, 1, *options) + _dot(turned, d_kernel, 0, *options)
