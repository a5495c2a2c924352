"""The benchmark of matrix products, and how they are found in a program. No test asserts a time."""

import json

import jax
import jax.numpy as jnp
import pytest

from attnlab._benchmarks.harness import recording
from attnlab._benchmarks.harness.matrix_products import Product, Timer, of_compiled, of_program
from attnlab.ops import products


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


def test_products_of_a_compiled_program_are_found_in_fusions_and_without_batches():
    compiled = """
%fused.1 (a: f32[7,3], b: f32[3,5]) -> f32[7,5] {
  %a = f32[7,3]{1,0} parameter(0)
  %b = f32[3,5]{1,0} parameter(1)
  %dot.1 = f32[7,5]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %negate.1 = f32[7,5]{1,0} negate(%dot.1)
}

ENTRY %main (x: f32[7,3], y: f32[3,5], z: f32[2,7,3]) -> f32[7,5] {
  %x = f32[7,3]{1,0} parameter(0)
  %z = bf16[2,7,3]{2,1,0} parameter(2)
  %batched = f32[2,7,7]{2,1,0} dot(%z, %z), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}
  %dot.2 = f32[3,3]{1,0} dot(%x, %x), lhs_contracting_dims={0}, rhs_contracting_dims={0}
  ROOT %ynn_fusion.4 = f32[7,5]{1,0} fusion(%x, %y), kind=kCustom, calls=%fused.1, metadata={op_name="up"}
}
"""
    product = "7 × 5, sums of 3"
    assert of_compiled(compiled) == {"dot.1": product, "dot.2": "3 × 3, sums of 7", "ynn_fusion.4": product}


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


@pytest.mark.slow
def test_products_write_tables_figures_and_a_record(tiny, figures_of, capsys, tmp_path):
    figures = figures_of("products", tiny, "--precisions=float32", "--rounds=1", f"--record={tmp_path}")
    recorded = json.loads((tmp_path / recording.file_name(recording.machine())).read_text())["benchmarks"]
    assert recorded["products"]["tiny, float32"]["figures"].keys() == figures.keys()
    out = capsys.readouterr().out
    assert "x·y, x [32, 8], y [8, 8]" in out and "the floor" in out
    assert figures["floor_ms_tiny_float32"] > 0
    # Of 32 tokens: 12 · 8² weights of a layer, and 8 · 65 of the output, forward and twice backward.
    assert figures["gflop_tiny_float32"] == pytest.approx(6 * 32 * (12 * 8**2 + 8 * 65) / 1e9)
