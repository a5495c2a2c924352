"""The matrix products of a program, and their times."""

import jax
import jax.numpy as jnp
import pytest

from attnlab._benchmarks.harness.matrix_products import Product, Timer, of_program
from attnlab.ops.cpu import products


def test_products_are_found_in_loops_and_with_their_forms():
    def program(x, w):
        def layer(x, w):
            return products.dot_general(x, w, (((1,), (0,)), ((), ()))), None

        return jax.lax.scan(layer, x, w)[0].sum()

    x, w = jnp.ones((5, 4)), jnp.ones((3, 4, 4))
    found = of_program(jax.make_jaxpr(jax.grad(program, argnums=1))(x, w))
    forward, for_x, for_w = (1, 0), (1, 1), (0, 0)
    counts = {axes: sum(n for product, n in found.items() if product.axes == axes) for axes in (forward, for_x, for_w)}
    assert counts == {forward: 3, for_x: 3, for_w: 3}
    assert {product.flops for product in found} == {2 * 5 * 4 * 4}


def test_axes_that_are_not_summed_count_as_one():
    found = of_program(
        jax.make_jaxpr(lambda x, y: jnp.einsum("btf,fv->btv", x, y))(jnp.ones((2, 3, 4)), jnp.ones((4, 5)))
    )
    assert list(found) == [Product((6, 4), (4, 5), (1, 0), "float32")]
    assert not of_program(
        jax.make_jaxpr(lambda x, y: jnp.einsum("bij,bjk->bik", x, y))(jnp.ones((2, 3, 4)), jnp.ones((2, 4, 5)))
    )


@pytest.mark.parametrize("library", ["xla", "torch"])
def test_timer_multiplies_every_form(library):
    if library == "torch":
        pytest.importorskip("torch", reason="torch is not installed")
    found = [
        ((6, 4), (4, 5), (1, 0), "float32"),
        ((6, 4), (5, 4), (1, 1), "bfloat16"),
        ((6, 4), (6, 5), (0, 0), "float32"),
    ]
    seconds = Timer(found, library).time()["seconds"]
    assert len(seconds) == 3 and min(seconds) > 0
