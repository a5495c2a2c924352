"""Matrix products in the layouts and accumulation types for which XLA's CPU backend has fast kernels.

Seen in jaxlib 0.10.2; XLA's tracker has no issue for this. The fast kernels do not cover xᵀ·g, the gradient of a weight
matrix w, which takes up to twice as long as x·w. XLA converts the operands of bfloat16 products to float32, unless the
result is float32: AMX and AVX512_BF16 then compute the product, but only in the forms x·y and x·yᵀ.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType

from attnlab.ops.platforms import is_specified, platform_of


def dot_general(x, kernel, dimension_numbers, precision=None, preferred_element_type=None):
    """`jax.lax.dot_general` for flax's `dot_general=`; on CPUs, fast for x's last axes times a kernel's first axes.

    On CPUs the gradient of the kernel, xᵀ·g, materializes the transpose of the narrower operand, because XLA's CPU
    backend computes x·y up to twice as fast as xᵀ·y. Products of bfloat16 are accumulated in float32, and are twice as
    fast as products of float32. `jax.checkpoint` policies do not count this primitive as a dot product.
    """
    ((x_axes, kernel_axes), (x_batch, _)) = dimension_numbers
    rank = len(x_axes)
    last, first = tuple(range(x.ndim - rank, x.ndim)), tuple(range(rank))
    mesh_types = {kind for a in (x, kernel) for kind in jax.typeof(a).sharding.mesh.axis_types}
    if (
        is_specified()
        or platform_of(x, kernel) != "cpu"
        or (x_batch or tuple(x_axes) != last or tuple(kernel_axes) != first)
        or not (precision is preferred_element_type is None and x.dtype == kernel.dtype)
        # Only lax has rules for shard_map and for Explicit mesh axes.
        or (jax.sharding.get_abstract_mesh().axis_names or AxisType.Explicit in mesh_types)
        or not x.size
    ):
        return lax.dot_general(x, kernel, dimension_numbers, precision, preferred_element_type)
    width = math.prod(kernel.shape[:rank])
    y = matrix_product(x.reshape(-1, width), kernel.reshape(width, -1), axes=(1, 0))
    return y.reshape(*x.shape[: x.ndim - rank], *kernel.shape[rank:])


def matrix_product(x, y, *, axes: tuple[int, int]):
    """Contract axis axes[0] of the matrix x with axis axes[1] of the matrix y: x·y, x·yᵀ or xᵀ·y, in their type."""
    return _product_p.bind(x, y, axes=axes)


def _lax_product(x, y, *, axes):
    return lax.dot_general(x, y, (((axes[0],), (axes[1],)), ((), ())))


def _on_cpu(x, y, *, axes):
    if axes == (0, 0):
        if x.shape[1] <= y.shape[1]:
            return _on_cpu(_transposed(x), y, axes=(1, 0))
        return _transposed(_on_cpu(_transposed(y), x, axes=(1, 0)))
    if x.dtype != jnp.bfloat16:
        return _lax_product(x, y, axes=axes)
    # XLA has bfloat16 products of these two forms only: the barriers prevent it from folding transposes into products.
    x, y = lax.optimization_barrier((x, y))
    z = lax.dot_general(x, y, (((1,), (axes[1],)), ((), ())), preferred_element_type=jnp.float32)
    return lax.optimization_barrier(z.astype(jnp.bfloat16))


def _transposed(x):
    return exchanged(lax.optimization_barrier(x), -2)


def exchanged(x, axis: int):
    """Exchange `axis` of x, counted from the end, and the next axis, in row-major order, for CPUs.

    Adds an axis temporarily, because XLA turns a plain transpose into a layout for which it has no bfloat16 products.
    """
    *outer, rows, columns = x.shape[: x.ndim + axis + 2]
    inner = x.shape[x.ndim + axis + 2 :]
    x = x.reshape(*outer, rows, 1, columns, *inner).swapaxes(len(outer), len(outer) + 2)
    return lax.optimization_barrier(x.reshape(*outer, columns, rows, *inner))


def _x_gradient(g, x, y, *, axes):
    return matrix_product(y, g, axes=(1, 1)) if axes == (0, 0) else matrix_product(g, y, axes=(1, 1 - axes[1]))


def _y_gradient(g, x, y, *, axes):
    return matrix_product(g, x, axes=(0, 0)) if axes == (1, 1) else matrix_product(x, g, axes=(1 - axes[0], 0))


def _batched(operands, batch_axes, *, axes):
    return jax.vmap(lambda x, y: _lax_product(x, y, axes=axes), batch_axes)(*operands), 0


# A primitive, because with custom_jvp the cotangent of a float32 sum would not stay bfloat16. The layout for CPUs is
# chosen when the primitive is lowered, because a program traced on a CPU may be compiled for another platform.
_product_p = Primitive("matrix_product")
_product_p.def_impl(jax.jit(_on_cpu, static_argnames="axes"))
_product_p.def_abstract_eval(
    lambda x, y, *, axes: x.update(shape=(x.shape[1 - axes[0]], y.shape[1 - axes[1]]), weak_type=False)
)
ad.defbilinear(_product_p, _x_gradient, _y_gradient)
batching.primitive_batchers[_product_p] = _batched
mlir.register_lowering(_product_p, mlir.lower_fun(_lax_product, multiple_results=False))
mlir.register_lowering(_product_p, mlir.lower_fun(_on_cpu, multiple_results=False), platform="cpu")
