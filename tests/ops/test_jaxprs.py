"""Evaluation of jaxprs, with a visitor."""

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.ops import jaxprs


def test_evaluation_equals_the_function_and_a_visitor_replaces_results():
    def function(x):
        return jax.jit(jnp.sin)(x) + jax.lax.scan(lambda carry, y: (carry + y, None), 0.0, x)[0]

    x = jnp.arange(3.0)
    closed = jax.make_jaxpr(function)(x)
    np.testing.assert_array_equal(jaxprs.evaluate(closed, [x])[0], function(x))

    def without_sine(equation, values):
        called = jaxprs.inner(equation) if equation.primitive.name in ("jit", "pjit") else None
        if called is not None:
            return jaxprs.evaluate(called, values, without_sine)
        return values if equation.primitive.name == "sin" else None

    np.testing.assert_array_equal(jaxprs.evaluate(closed, [x], without_sine)[0], x + 3)


def test_constants_and_carry_of_a_scan_are_counted():
    closed = jax.make_jaxpr(lambda x, w: jax.lax.scan(lambda carry, y: (carry * w + y, y), x[0], x))(jnp.ones(3), 2.0)
    (scan,) = (equation for equation in closed.jaxpr.eqns if equation.primitive.name == "scan")
    assert jaxprs.consts_and_carry(scan.params) == (1, 1)


def test_called_program_keeps_its_constants():
    table = np.arange(5.0, dtype=np.float32)
    closed = jax.make_jaxpr(lambda x: jax.jit(lambda x: x + table)(x))(table)

    def called(equation, values):
        inner = jaxprs.inner(equation)
        return None if inner is None else jaxprs.evaluate(inner, values, called)

    np.testing.assert_array_equal(jaxprs.evaluate(closed, [table], called)[0], 2 * table)
