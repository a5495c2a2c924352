"""Programs that move bfloat16 as integers: they have the same bits, and no bfloat16 slices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from attnlab.ops import jaxprs
from attnlab.ops.cpu.stacks import moved_as_integers
from tests.programs import compiled_text

X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 3)), jnp.bfloat16)


def _scanned(x):
    def layer(carry, row):
        return carry * row, (carry + row, row.astype(jnp.float32))

    return lax.scan(layer, x[0], x, reverse=True, unroll=2)


def _nested(x):
    inner = jax.jit(lambda row: lax.map(lambda number: number * 2, row))
    return lax.scan(lambda carry, row: (carry + inner(row), inner(carry)), x[0], x)


def _while(x):
    largest, last, first = x.max() + 9, x[-1], x[0]

    def step(state):
        i, rows = state
        row = lax.dynamic_index_in_dim(rows, i, keepdims=False)
        return i + 1, lax.dynamic_update_index_in_dim(rows, row * first + last, i, axis=0)

    return lax.while_loop(lambda state: (state[0] < 3) & (state[1][0, 0] < largest), step, (0, x))


def _condition(x):
    branches = [lambda i: lax.dynamic_index_in_dim(x, i), lambda i: x[:1]]
    return lax.map(lambda i: lax.switch(i % 2, branches, i), jnp.arange(3))


def _gradient(x):
    return jax.grad(lambda x: _nested(x)[1].astype(jnp.float32).sum())(x)


def _moved(closed) -> set:
    """The types of arrays that slices and loops of a program move."""
    types = set()
    for equation in closed.jaxpr.eqns:
        name, atoms = equation.primitive.name, (*equation.invars, *equation.outvars)
        if name == "scan":
            consts, _ = jaxprs.consts_and_carry(equation.params)
            atoms = (*equation.invars[consts:], *equation.outvars)
        if name in ("dynamic_slice", "dynamic_update_slice", "scan"):
            types |= {str(atom.aval.dtype) for atom in atoms}
        types |= {dtype for called in jaxprs.called(equation) for dtype in _moved(called)}
    return types


@pytest.mark.parametrize("function", [_scanned, _nested, _while, _condition, _gradient])
def test_moved_program_has_the_same_bits_and_no_slices_of_bfloat16(function):
    expected, moved = function(X), moved_as_integers(function)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(moved)(X), expected)
    assert "bfloat16" in _moved(jax.make_jaxpr(function)(X))
    types = _moved(jax.make_jaxpr(moved)(X))
    assert "bfloat16" not in types and "uint16" in types


def test_moved_program_of_float32_is_unchanged():
    x = X.astype(jnp.float32)
    assert str(jax.make_jaxpr(moved_as_integers(_nested))(x)) == str(jax.make_jaxpr(_nested)(x))


def test_moved_program_takes_trees_and_keeps_names_of_scopes():
    @moved_as_integers
    def scaled(tree):
        with jax.named_scope("scaling"):
            return {"out": (lax.map(lambda row: row * tree["by"], tree["x"]), None)}

    text = jax.jit(scaled).lower({"x": X, "by": 2.0}).as_text(debug_info=True)
    assert "scaling" in text and list(scaled({"x": X, "by": 2.0})) == ["out"]


@pytest.mark.slow
def test_xla_still_converts_whole_stacks_of_bfloat16():
    def doubled(x):
        def step(i, x):
            return lax.dynamic_update_index_in_dim(x, 2 * lax.dynamic_index_in_dim(x, i), i, axis=0)

        return lax.fori_loop(0, len(x), step, x)

    stack, whole = jax.ShapeDtypeStruct((4, 256, 256), jnp.bfloat16), "f32[4,256,256]"
    assert whole not in compiled_text(moved_as_integers(doubled), stack)
    assert whole in compiled_text(doubled, stack), "ops/cpu/stacks.py is not needed any more"
