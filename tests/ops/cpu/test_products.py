"""Products laid out for CPUs compared with lax, and whether XLA still needs the layout."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab.ops.cpu import products
from tests.ops.cases import slow
from tests.programs import compiled_text, types_of_products

SIZES = st.sampled_from([1, 4, 9])


def arrays(*shapes, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def contraction(x, kernel, rank):
    """Contract the last `rank` axes of x with the first axes of kernel, as flax's Dense and DenseGeneral do."""
    return (tuple(range(x.ndim - rank, x.ndim)), tuple(range(rank))), ((), ())


@settings(max_examples=8)  # each compiles a program
@given(SIZES, SIZES, SIZES, SIZES, st.sampled_from([1, 2]), st.integers(0, 2**31))
def test_products_and_gradients_match_lax(batch, length, width, out, rank, seed):
    x_shape, kernel_shape = (
        ((batch, length, width), (width, out)) if rank == 1 else ((batch, length, width), (length, width, out))
    )
    x, kernel = arrays(x_shape, kernel_shape, seed=seed)
    numbers = contraction(x, kernel, rank)
    (g,) = arrays((batch, length, out) if rank == 1 else (batch, out), seed=seed + 1)

    @jax.jit
    def run(x, kernel, g):
        ours, pull = jax.vjp(lambda x, k: products.dot_general(x, k, numbers), x, kernel)
        theirs, pull_lax = jax.vjp(lambda x, k: jax.lax.dot_general(x, k, numbers), x, kernel)
        return (ours, *pull(g)), (theirs, *pull_lax(g))

    # Sums of at most 81 float32 products near 1, in any order: 81 · 2^-24 · a few.
    for a, b in zip(*run(x, kernel, g), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5)


@pytest.mark.parametrize("width, out", [(4, 12), slow(12, 4)])
def test_higher_derivatives_match_lax(width, out, float64):
    x, kernel, dx, d_kernel = arrays((5, width), (width, out), (5, width), (width, out), dtype=np.float64)
    numbers = contraction(x, kernel, 1)

    def energy(multiply):
        return lambda x, k: jnp.sum(jnp.sin(multiply(x, k, numbers)))

    @jax.jit
    def run(x, kernel, dx, d_kernel):
        def derivatives(f):
            return (
                jax.jvp(f, (x, kernel), (dx, d_kernel))[1],
                jax.jvp(jax.grad(f, (0, 1)), (x, kernel), (dx, d_kernel))[1],
                jax.grad(lambda x, k: jax.jvp(f, (x, k), (dx, d_kernel))[1], (0, 1))(x, kernel),
                jax.vmap(jax.grad(f, 1), (0, None))(x[:, None], kernel),
                jax.vmap(jax.grad(f, (0, 1)), (None, 0))(x, jnp.stack([kernel, d_kernel])),
            )

        return [derivatives(energy(multiply)) for multiply in (products.dot_general, jax.lax.dot_general)]

    compare = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
    jax.tree.map(compare, *run(x, kernel, dx, d_kernel))


@pytest.mark.parametrize("shape", [(64, 32, 128), (1, 8, 8), (7, 5, 1)], ids=str)
def test_bfloat16_accumulates_in_float32(shape):
    rows, width, out = shape
    x, kernel, g = arrays((rows, width), (width, out), (rows, out), dtype=jnp.bfloat16)
    numbers = contraction(x, kernel, 1)

    @jax.jit
    def run(x, kernel, g):
        y, pull = jax.vjp(lambda x, k: products.dot_general(x, k, numbers), x, kernel)
        return y, *pull(g)

    wide = [np.asarray(a, np.float64) for a in (x, kernel, g)]
    expected, sizes = ((x @ kernel, g @ kernel.T, x.T @ g) for x, kernel, g in (wide, map(np.abs, wide)))
    for result, exact, size in zip(run(x, kernel, g), expected, sizes):
        assert result.dtype == jnp.bfloat16
        # Rounded once to 8 bits; the float32 sums before it err by 2^-24 per term, for at most 128 terms.
        bound = np.abs(exact) * 2.0**-8 + size * 128 * 2.0**-24
        assert (np.abs(np.asarray(result, np.float64) - exact) <= bound).all()


def test_transposes_around_bfloat16_products_compile():
    """XLA has no bfloat16 product of columns, which it would need if it folded a transpose into the product."""
    x, kernel = arrays((8, 16), (16, 16), dtype=jnp.bfloat16)

    @jax.jit
    def run(x, kernel):
        heads = x.reshape(1, 8, 2, 8).transpose(0, 2, 1, 3)  # as attention lays them out
        y = products.dot_general(heads.transpose(0, 2, 1, 3).reshape(8, 16).T.T, kernel.T, contraction(x, kernel, 1))
        return products.dot_general(y.T.T, kernel, contraction(x, kernel, 1)).T

    exact = (np.asarray(x, np.float64) @ np.asarray(kernel, np.float64).T @ np.asarray(kernel, np.float64)).T
    # Two roundings to 8 bits, the first of which the second product sums over 16 terms near 4.
    np.testing.assert_allclose(np.asarray(run(x, kernel), np.float64), exact, atol=16 * 4 * 2.0**-8)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_cpu_layout_is_absent_on_other_platforms(dtype):
    """A step may be traced on a CPU and exported for another platform."""
    x, kernel = arrays((6, 4), (4, 8), dtype=dtype)

    def program(platform):
        def energy(x, kernel):
            return jnp.sin(products.dot_general(x, kernel, contraction(x, kernel, 1))).sum()

        module = jax.export.export(jax.jit(jax.grad(energy, (0, 1))), platforms=[platform])(x, kernel).mlir_module()
        return tuple(module.count(f"stablehlo.{name}") for name in ("dot_general", "transpose", "optimization_barrier"))

    assert program("cuda") == program("tpu") == (3, 0, 0)
    products_of_cpu, transposes, barriers = program("cpu")
    assert products_of_cpu == 3 and transposes and barriers


def test_explicit_sharding_is_kept():
    mesh = jax.make_mesh((4,), ("a",), axis_types=(jax.sharding.AxisType.Explicit,))
    spec = jax.sharding.PartitionSpec
    x, kernel = arrays((8, 3, 16), (16, 4))
    numbers = contraction(x, kernel, 1)
    expected = x @ kernel
    for x_spec, kernel_spec in ((spec("a"), spec()), (spec(), spec(None, "a"))):
        placed = [
            jax.device_put(a, jax.sharding.NamedSharding(mesh, s)) for a, s in ((x, x_spec), (kernel, kernel_spec))
        ]
        y, back = jax.jit(lambda x, k: jax.vjp(lambda k: products.dot_general(x, k, numbers), k))(*placed)
        np.testing.assert_allclose(y, expected, atol=1e-5)
        assert "a" in str(jax.typeof(y))
        (gradient,) = jax.jit(lambda back, y: back(jnp.ones_like(y)))(back, y)
        np.testing.assert_allclose(gradient, np.tile(x.sum((0, 1))[:, None], 4), atol=1e-4)


@pytest.mark.parametrize("shape", [(0, 4, 3), (4, 0, 3), (4, 3, 0)], ids=str)
def test_empty_products_are_zero(shape):
    rows, width, out = shape
    run = jax.jit(lambda x, kernel: products.dot_general(x, kernel, contraction(x, kernel, 1)))
    y = run(np.ones((rows, width), np.float32), np.ones((width, out), np.float32))
    np.testing.assert_array_equal(y, np.zeros((rows, out)))


def test_other_contractions_are_left_to_lax():
    batched, first = (((2,), (1,)), ((0,), (0,))), (((0,), (0,)), ((), ()))

    @jax.jit
    def run(x, y):
        both = [[f(x, y, numbers) for numbers in (batched, first)] for f in (products.dot_general, jax.lax.dot_general)]
        return both, products.dot_general(x.astype(jnp.bfloat16), y[0], (((2,), (0,)), ((), ())))

    (ours, theirs), mixed = run(*arrays((3, 4, 5), (3, 5, 6)))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert mixed.dtype == jnp.float32


KERNEL = "__ynn_fusion"  # XLA's fast kernels


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_xla_still_has_no_fast_kernel_for_products_of_columns(dtype):
    x, g = jax.ShapeDtypeStruct((512, 256), dtype), jax.ShapeDtypeStruct((512, 1024), dtype)
    ours = compiled_text(functools.partial(products.matrix_product, axes=(0, 0)), x, g)
    if KERNEL not in ours:
        pytest.skip(f"this XLA has no {KERNEL}")
    assert KERNEL not in compiled_text(lambda x, g: x.T @ g, x, g), "ops/cpu/products.py need not transpose any more"


@pytest.mark.slow
def test_xla_still_converts_products_whose_result_is_bfloat16():
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    if types_of_products(compiled_text(functools.partial(products.matrix_product, axes=(1, 0)), x, x)) == {"f32"}:
        pytest.skip("XLA has no bfloat16 products on this processor")
    types = types_of_products(compiled_text(lambda x, y: x @ y, x, x))
    assert types == {"f32"}, "ops/cpu/products.py need not ask for float32 results any more"
