"""The matrix products of a program, found in its jaxpr, and each of them timed alone."""

import collections
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.ops.cpu import products

from . import serving


class Product(NamedTuple):
    """A product of two matrices, x·y, x·yᵀ or xᵀ·y, as in a training step.

    Attributes:
      x: shape of the first operand.
      y: shape of the second operand.
      axes: the axis of each operand that is summed.
      dtype: type of the operands.
    """

    x: tuple[int, int]
    y: tuple[int, int]
    axes: tuple[int, int]
    dtype: str

    @property
    def flops(self) -> int:
        """2 for each multiplication.

        >>> Product((2, 3), (3, 5), (1, 0), "float32").flops
        60
        """
        return 2 * math.prod(self.x) * self.y[1 - self.axes[1]]

    def __str__(self) -> str:
        """The form and the sizes.

        >>> str(Product((7, 3), (7, 5), (0, 0), "float32"))
        'xᵀ·y, x [7, 3], y [7, 5]'
        """
        form = "xᵀ" * (self.axes[0] == 0) or "x"
        return f"{form}·{'yᵀ' if self.axes[1] else 'y'}, x {list(self.x)}, y {list(self.y)}"


def of_program(closed) -> collections.Counter:
    """How often a jaxpr has each `Product`; loops of known length count as often as they run.

    Products with batch axes, such as attention's, are not counted, nor is what runs in a loop of unknown length.
    """
    counts = collections.Counter()
    _count(closed.jaxpr, 1, counts)
    return counts


def _count(jaxpr, times: int, counts: collections.Counter) -> None:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "while":
            continue
        if equation.primitive.name in ("dot_general", "matrix_product"):
            product = _product(equation)
            counts.update({product: times} if product else {})
        inside = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for inner in _inner(equation.params):
            _count(inner, inside, counts)


def _inner(params: dict) -> list:
    """The jaxprs among the parameters of an equation."""
    values = [value for each in params.values() for value in (each if isinstance(each, tuple | list) else (each,))]
    return [jaxpr for value in values if hasattr(jaxpr := getattr(value, "jaxpr", value), "eqns")]


def _product(equation) -> Product | None:
    """The product of two matrices that an equation computes, or None; axes that are not summed count as one."""
    x, y = (variable.aval for variable in equation.invars)
    if equation.primitive.name == "matrix_product":
        return Product(x.shape, y.shape, equation.params["axes"], x.dtype.name)
    (x_axes, y_axes), batch = equation.params["dimension_numbers"]
    if any(batch) or not x_axes:
        return None
    shapes, axes = [], []
    for operand, summed in ((x, x_axes), (y, y_axes)):
        first, last = tuple(range(len(summed))), tuple(range(operand.ndim - len(summed), operand.ndim))
        if tuple(summed) not in (first, last) or operand.ndim == len(summed):
            return None
        inner = math.prod(operand.shape[axis] for axis in summed)
        axes.append(int(tuple(summed) == last))
        shapes.append((operand.size // inner, inner) if axes[-1] else (inner, operand.size // inner))
    return Product(*shapes, tuple(axes), x.dtype.name)


class Timer:
    """Times products alone, one after the other.

    Args:
      found: products, as tuples.
      library: "xla", as attnlab's modules multiply, with a result in the operands' type; or "torch", which transposes
        by strides.
    """

    def __init__(self, found: list, library: str = "xla"):
        make = {"xla": _by_xla, "torch": _by_torch}[library]
        self._calls = [make(Product(tuple(x), tuple(y), tuple(axes), dtype)) for x, y, axes, dtype in found]
        for call, _ in self._calls:
            call()

    def time(self) -> dict:
        """The `seconds` of each product: the median over as many calls as take 20 ms.

        A call of a compiled program takes some 100 µs besides its products, and new memory for a result is slow; a step
        pays for both once, not for each product. So a program of XLA repeats a product 4 times, and a small one until
        it has computed 1 GFLOP, up to 32 times.
        """
        return {"seconds": [self._seconds(call) / times for call, times in self._calls]}

    @staticmethod
    def _seconds(call: Callable[[], object]) -> float:
        seconds = []
        while sum(seconds) < 0.02:
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)


def _operands(product: Product) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal(shape, np.float32) for shape in (product.x, product.y)]


def _by_xla(product: Product) -> tuple[Callable[[], object], int]:
    """(A function that multiplies, how often one call multiplies)."""
    times = max(4, min(32, 10**9 // product.flops))
    operands = [jnp.asarray(operand, product.dtype) for operand in _operands(product)]
    multiply = functools.partial(products.matrix_product, axes=product.axes)
    program = jax.jit(functools.partial(_repeated, multiply, times))
    return lambda: program(*operands).block_until_ready(), times


def _repeated(multiply: Callable, times: int, x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiply `times` times, each time with an element of the previous product in the smaller operand.

    Otherwise XLA would multiply once, before the loop. The loop carries the operand's bits, because to update one
    element of a bfloat16 array XLA on CPUs converts the whole array to float32 and back.
    """
    bitcast, swapped = jax.lax.bitcast_convert_type, x.size < y.size
    smaller, other = (x, y) if swapped else (y, x)
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")

    def body(_, bits):
        operand = bitcast(bits, x.dtype)
        out = multiply(operand, other) if swapped else multiply(other, operand)
        corner = jax.lax.optimization_barrier(out)[:1, :1]  # without the barrier XLA might compute this element alone
        return jax.lax.dynamic_update_slice(bits, bitcast(corner, unsigned), (0, 0))

    return jax.lax.fori_loop(0, times, body, bitcast(smaller, unsigned))


def _by_torch(product: Product) -> tuple[Callable[[], object], int]:
    import torch

    x, y = (torch.from_numpy(operand).to(getattr(torch, product.dtype)) for operand in _operands(product))
    return functools.partial(torch.matmul, x if product.axes[0] else x.T, y.T if product.axes[1] else y), 1


def work() -> None:
    """Answer requests."""
    serving.serve(Timer)
