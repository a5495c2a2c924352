"""Gradients of each argument, compiled as for users, against float64: compiler faults show in few of many programs.

jaxlib 0.10.2 computes some sums of products wrongly on CPUs (JAX issue 39103). How many of them a program has
depends on the arguments that it differentiates and on the shape of the cotangent.
"""

import functools
import itertools

import jax
import numpy as np
import pytest

import attnlab
from attnlab import nn
from attnlab.masks import Causal
from attnlab.ops.cross_entropy import cross_entropy
from attnlab.ops.stick_breaking import stick_breaking_attention
from attnlab.score_mods import ALiBi, RelativeBias
from tests.parameters import parameters
from tests.programs import optimized

pytestmark = pytest.mark.slow

RNG = np.random.default_rng(0)
BATCH, LENGTH, HEADS, SIZE = 8, 128, 4, 32


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def attention(impl, mask, q, k, v, slopes=None, table=None, **terms):
    mods = [] if slopes is None else [ALiBi(slopes)]
    mods += [] if table is None else [RelativeBias(table)]
    return attnlab.attention(q, k, v, mask, tuple(mods), impl=impl, **terms)


def losses(features, embedding):
    return cross_entropy(features, embedding, np.arange(BATCH * LENGTH, dtype=np.int32).reshape(BATCH, LENGTH) % 97)


Q = {name: normal(BATCH, LENGTH, HEADS, SIZE) for name in "qkv"}
BIAS = {"bias": normal(1, HEADS, LENGTH, LENGTH)}
MODS = {"slopes": abs(normal(HEADS)), "table": normal(HEADS, 9), "sinks": normal(HEADS)}
RATES = {"g": -abs(normal(BATCH, LENGTH, HEADS)), "beta": abs(normal(BATCH, LENGTH, HEADS)) / 4}
PAIRS = 3  # of arguments; pairs without q, k and v come first
ALL = ("full", "ones", "examples")
# By name: a function, its arguments, and the kinds of cotangents.
OPERATORS = {
    "blockwise with a bias": (functools.partial(attention, "blockwise", None), Q | BIAS, ALL),
    "blockwise with mods": (functools.partial(attention, "blockwise", None), Q | MODS, ALL),
    "blockwise causal": (functools.partial(attention, "blockwise", Causal()), Q | BIAS, ("examples", "one-hot")),
    "dense with a bias": (functools.partial(attention, "dense", None), Q | BIAS, ("ones",)),
    "stick-breaking": (stick_breaking_attention, Q, ("full", "examples")),
    "linear": (attnlab.linear_attention, Q, ("full", "examples")),
    "recurrence": (attnlab.linear_recurrence, {**Q, "k": Q["k"] / 8, **RATES}, ("full", "ones")),
    "cross entropy": (
        losses,
        {"features": normal(BATCH, LENGTH, 64), "embedding": normal(97, 64)},
        ("full", "one-hot"),
    ),
}
LAYERS = {
    "attention": nn.MultiHeadAttention(4, sinks=True, qk_norm=True),
    "gated_delta": nn.GatedDeltaNet(num_heads=4),
    "mamba2": nn.Mamba2(num_heads=4),
    "gru": nn.GRU(),
    "norm": nn.LayerNorm(),
}


def gradients(function, cotangent, chosen, others, weights):
    """The gradients of the `chosen` arguments of `function(**chosen, **others)` for a kind of cotangent."""

    def loss(chosen):
        out = function(**chosen, **others)
        if cotangent == "one-hot":
            return out[(1, -1) + (0,) * (out.ndim - 2)]
        return out.sum() if cotangent == "ones" else (out * weights).sum()

    return jax.grad(loss)(chosen)


def weights_of(cotangent, out):
    """Weights of the outputs or of the examples; None for the other kinds of cotangent."""
    shapes = {"full": out.shape, "examples": (out.shape[0], *[1] * (out.ndim - 1))}
    return np.random.default_rng(1).standard_normal(shapes[cotangent]) if cotangent in shapes else None


def assert_equal_float64(function, arguments, chosen, cotangents, wide_function=None):
    """Check the gradients of each group of arguments for each kind of cotangent, each in a separate program."""
    out = jax.eval_shape(lambda arguments: function(**arguments), arguments)
    for cotangent in cotangents:
        weights = weights_of(cotangent, out)
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda x: np.asarray(x, np.float64), arguments)
            run = functools.partial(gradients, wide_function or function, cotangent)
            exact = jax.jit(run)(wide, {}, weights)
        run, narrow = functools.partial(gradients, function, cotangent), jax.tree.map(np.float32, weights)
        for names in chosen:
            others = {name: x for name, x in arguments.items() if name not in names}
            grads = optimized(run)({name: arguments[name] for name in names}, others, narrow)
            for name in names:
                assert_near(grads[name], exact[name], f"{names}, {cotangent}")


def assert_near(actual, exact, message):
    """In sums of up to 2^17 terms of either sign, roundings of 2^-24 add up to 2^-15.5, like a random walk; a factor of
    11 allows for the passes before. A wrong fusion is off by at least as much as the gradient."""
    largest = max(np.abs(x).max() for x in jax.tree.leaves(exact))
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2.0**-12 * largest, err_msg=message)


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_of_each_argument_of_an_operator_equal_float64(name):
    function, arguments, cotangents = OPERATORS[name]
    pairs = sorted(itertools.combinations(arguments, 2), key=lambda pair: sum(name in Q for name in pair))
    assert_equal_float64(function, arguments, [(name,) for name in arguments] + pairs[:PAIRS], cotangents)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_inputs_and_parameters_of_a_layer_equal_float64(name):
    module, x = LAYERS[name], normal(BATCH, LENGTH, 64)
    arguments = {"variables": parameters(module, x), "x": x}

    def apply(module, variables, x):
        return module.apply(variables, x)

    wide = module.clone(dtype=np.float64) if name == "gru" else module  # its state is otherwise float32
    function, wide_function = (functools.partial(apply, each) for each in (module, wide))
    chosen = [("x",), ("variables",), ("x", "variables")]
    assert_equal_float64(function, arguments, chosen, ("full", "ones"), wide_function)
