"""Solve unit lower triangular systems by forward substitution (Golub and Van Loan 2013, section 3.1).

Summing powers of the matrix would need only products, but for similar keys their entries grow like binomial
coefficients and cancel: at 64 tokens no digit of float32 is left.
"""

import functools

import jax
import jax.numpy as jnp

from attnlab.ops.meshes import varying_like
from attnlab.ops.recurrence.products import product, rounded
from attnlab.types import Array, DType

_BLOCK = 8  # rows that are substituted one by one; larger blocks are merged by products


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def solve(a: Array, b: Array | tuple[Array, ...], operand: DType | None = None) -> Array | tuple[Array, ...]:
    """Solve (I + A) X = B for X, with strictly lower triangular A `[..., C, C]` and B `[..., C, V]`, or several B.

    Entries of A on and above the diagonal are not read. The inverse is computed in A's type; its product with B has
    operands and a result of type `operand`, see `product`.
    """
    return _forward(a, b, operand)[0]


def _forward(a, b, operand):
    inverse = _inverse(a)
    x = jax.tree.map(lambda b: rounded(product("...tj,...jv->...tv", inverse, b, operand), operand), b)
    return x, (inverse, x)


def _backward(operand, residuals, g):
    inverse, x = residuals
    d_b = jax.tree.map(lambda g: product("...jt,...tv->...jv", inverse.mT, g, operand), g)
    d_a = jax.tree.map(lambda d_b, x: product("...tv,...vj->...tj", d_b, x.mT, operand), d_b, x)
    return -jnp.tril(jax.tree.reduce(jnp.add, d_a), -1), d_b


solve.defvjp(_forward, _backward)


def _inverse(a):
    size = a.shape[-1]
    blocks = 1 << (-(-size // _BLOCK) - 1).bit_length()
    padding = blocks * _BLOCK - size
    a = jnp.pad(a, [*[(0, 0)] * (a.ndim - 2), (0, padding), (0, padding)]) if padding else a
    return _merged(a, _by_rows(a, blocks))[..., :size, :size]


def _by_rows(a, blocks):
    """The inverses of the blocks on the diagonal, `[..., blocks, B, B]`."""
    a = jnp.tril(_blocks(a, _BLOCK, blocks), -1)

    def substitute(row, x):
        """Row `row` is final: eliminate it from the rows below."""
        column = jax.lax.dynamic_slice_in_dim(a, row, 1, axis=-1)
        return x - column * jax.lax.dynamic_slice_in_dim(x, row, 1, axis=-2)

    identity = varying_like(a, jnp.broadcast_to(jnp.eye(_BLOCK, dtype=a.dtype), a.shape))
    rows = functools.partial(jax.lax.fori_loop, 0, _BLOCK - 1, substitute)
    # Unrolled, the loop is one kernel on GPUs. On CPUs it is faster without unrolling.
    return jax.lax.platform_dependent(identity, cuda=functools.partial(rows, unroll=True), default=rows)


def _blocks(a, size, count, below=0):
    """Blocks of `[..., C, C]` along the diagonal, `below` rows under it: `[..., count, size, size]`."""
    starts = (n * (size + below) for n in range(count))
    return jnp.stack([a[..., at + below : at + below + size, at : at + size] for at in starts], axis=-3)


def _merged(a, inverses):
    """Merge the inverses of diagonal blocks pairwise: the inverse of [[U, 0], [A, L]] from U⁻¹ and L⁻¹."""
    while (count := inverses.shape[-3]) > 1:
        size, upper, lower = inverses.shape[-1], inverses[..., ::2, :, :], inverses[..., 1::2, :, :]
        with jax.default_matmul_precision("highest"):
            corner = -(lower @ (_blocks(a, size, count // 2, below=size) @ upper))
        rows = [[upper, jnp.zeros_like(corner)], [corner, lower]]
        inverses = jnp.concatenate([jnp.concatenate(row, axis=-1) for row in rows], axis=-2)
    return inverses[..., 0, :, :]
