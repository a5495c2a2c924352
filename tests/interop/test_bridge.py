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

X = np.random.default_rng(0).standard_normal((2, 6, 8)).astype(np.float32)
TOKENS = np.arange(12, dtype=np.int32).reshape(2, 6) % 10
MODULES = {
    "attention": (MultiHeadAttention(num_heads=4, mask=Causal()), X),
    "gpt": (GPT(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6), TOKENS),
}


@pytest.mark.parametrize("module, inputs", MODULES.values(), ids=MODULES)
def test_linen_module_in_nnx_equals_linen(module, inputs):
    wrapped = bridge.lazy_init(bridge.ToNNX(module, rngs=nnx.Rngs(0)), inputs)
    params = {"params": nnx.to_pure_dict(nnx.state(wrapped, nnx.Param))}
    np.testing.assert_array_equal(wrapped(inputs), module.apply(params, inputs))

    gradient = nnx.to_pure_dict(nnx.grad(lambda wrapped: (wrapped(inputs) ** 2).sum())(wrapped))
    plain = jax.grad(lambda params: (module.apply(params, inputs) ** 2).sum())(params)["params"]
    jax.tree.map(np.testing.assert_array_equal, gradient, plain)


def test_nnx_optimizer_trains_linen_module():
    module, tokens = MODULES["gpt"]
    model = bridge.lazy_init(bridge.ToNNX(module, rngs=nnx.Rngs(0)), tokens)
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
    module = bridge.to_linen(Mixer, direct)
    variables = jax.jit(module.init)(jax.random.key(1), X)
    params = variables["params"]["layer"]
    ours = MultiHeadAttention(num_heads=4, mask=Causal())
    out = jax.jit(module.apply)(variables, X)
    np.testing.assert_allclose(out, jax.jit(ours.apply)({"params": params}, X), atol=2e-6)

    def gradient(loss):
        return jax.jit(jax.grad(lambda params: (loss(params) ** 2).sum()))(params)

    jax.tree.map(
        # Sums of 12 rows of products below 10.
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5),
        gradient(lambda params: module.apply(variables | {"params": {"layer": params}}, X)),
        gradient(lambda params: ours.apply({"params": params}, X)),
    )
