"""attnlab's modules in NNX programs, and NNX modules with attnlab's attention in linen programs."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.nnx import bridge

import attnlab
from attnlab.interop.flax import attention_fn
from attnlab.masks import Causal
from attnlab.nn import GPT, MultiHeadAttention
from tests.parameters import parameters

X = np.random.default_rng(0).standard_normal((2, 6, 8)).astype(np.float32)
TOKENS = np.arange(12, dtype=np.int32).reshape(2, 6) % 10
MODULES = {
    "attention": (MultiHeadAttention(num_heads=4, mask=Causal()), X),
    "gpt": (GPT(vocab_size=10, num_layers=1, num_heads=2, width=8, context=6), TOKENS),
}


def in_nnx(module, inputs):
    """The module with its parameters, initialized by one program."""
    return nnx.jit(lambda inputs: bridge.lazy_init(bridge.ToNNX(module, rngs=nnx.Rngs(0)), inputs))(inputs)


@pytest.mark.parametrize("module, inputs", MODULES.values(), ids=MODULES)
def test_linen_module_in_nnx_equals_linen(module, inputs):
    wrapped = in_nnx(module, inputs)
    params = {"params": nnx.to_pure_dict(nnx.state(wrapped, nnx.Param))}

    def loss(out):
        return (out**2).sum(), out

    @nnx.jit
    def both(wrapped, params):
        ours, out = nnx.grad(lambda wrapped: loss(wrapped(inputs)), has_aux=True)(wrapped)
        return (nnx.to_pure_dict(ours), out), jax.grad(lambda p: loss(module.apply(p, inputs)), has_aux=True)(params)

    (gradient, out), (plain, expected) = both(wrapped, params)
    np.testing.assert_array_equal(out, expected)
    jax.tree.map(np.testing.assert_array_equal, gradient, plain["params"])


def test_nnx_optimizer_trains_linen_module():
    module, tokens = MODULES["gpt"]
    model = in_nnx(module, tokens)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()

        value, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return value

    losses = [float(step(model, optimizer)) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


class Mixer(nnx.Module):
    """An NNX layer with attnlab's operator, through Flax's layer or called directly."""

    def __init__(self, direct, rngs):
        self.direct = direct
        self.layer = nnx.MultiHeadAttention(4, 8, decode=False, attention_fn=attention_fn(Causal()), rngs=rngs)

    def __call__(self, x):
        if not self.direct:
            return self.layer(x)
        q, k, v = self.layer.query(x), self.layer.key(x), self.layer.value(x)
        return self.layer.out(attnlab.attention(q, k, v, mask=Causal()))


@pytest.mark.parametrize("direct", [True, False])
def test_nnx_module_in_linen_equals_multihead(direct):
    module, ours = bridge.to_linen(Mixer, direct), MultiHeadAttention(num_heads=4, mask=Causal())
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
