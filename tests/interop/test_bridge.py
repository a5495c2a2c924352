"""attnlab's modules in NNX programs, and NNX modules with attnlab's attention in linen programs."""

import jax
import numpy as np
import optax
from flax import nnx
from flax.nnx import bridge

from attnlab.interop.flax import attention_fn
from attnlab.masks import Causal
from attnlab.nn import GPT, MultiHeadAttention
from tests.parameters import parameters

X = np.random.default_rng(0).standard_normal((2, 6, 8)).astype(np.float32)
TOKENS = np.arange(12, dtype=np.int32).reshape(2, 6) % 10
MODEL = GPT.of(vocab_size=10, num_layers=1, num_heads=2, width=8, context=6)


def in_nnx(module, inputs):
    """The module with its parameters, initialized by one program."""
    return nnx.jit(lambda inputs: bridge.lazy_init(bridge.ToNNX(module, rngs=nnx.Rngs(0)), inputs))(inputs)


def test_linen_module_in_nnx_equals_linen_and_trains():
    wrapped = in_nnx(MODEL, TOKENS)
    optimizer = nnx.Optimizer(wrapped, optax.sgd(1e-2), wrt=nnx.Param)

    def loss(logits):
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], TOKENS[:, 1:]).mean(), logits

    @nnx.jit
    def step(wrapped, optimizer):
        params = {"params": nnx.to_pure_dict(nnx.state(wrapped, nnx.Param))}
        gradient, logits = nnx.grad(lambda wrapped: loss(wrapped(TOKENS)), has_aux=True)(wrapped)
        plain = jax.grad(lambda params: loss(MODEL.apply(params, TOKENS)), has_aux=True)(params)
        optimizer.update(wrapped, gradient)
        return ({"params": nnx.to_pure_dict(gradient)}, logits), plain, loss(logits)[0]

    losses = []
    for _ in range(5):
        found, expected, value = step(wrapped, optimizer)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        losses.append(float(value))
    assert losses == sorted(losses, reverse=True)


class Mixer(nnx.Module):
    """An NNX layer with attnlab's operator."""

    def __init__(self, rngs):
        self.layer = nnx.MultiHeadAttention(4, 8, decode=False, attention_fn=attention_fn(Causal()), rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


def test_nnx_module_in_linen_equals_multihead():
    module, ours = bridge.to_linen(Mixer), MultiHeadAttention(num_heads=4, mask=Causal())
    variables = jax.jit(module.init)(jax.random.key(1), X)
    params = parameters(ours, X)["params"]
    assert jax.tree.map(np.shape, variables["params"]["layer"]) == jax.tree.map(np.shape, params)

    def with_gradient(apply):
        return apply(params), jax.grad(lambda params: (apply(params) ** 2).sum())(params)

    def both():
        nnx_apply = with_gradient(lambda params: module.apply(variables | {"params": {"layer": params}}, X))
        return nnx_apply, with_gradient(lambda params: ours.apply({"params": params}, X))

    (out, gradient), (expected, plain) = jax.jit(both)()
    np.testing.assert_allclose(out, expected, atol=2e-6)
    # Sums of 12 rows of products below 10.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), gradient, plain)
