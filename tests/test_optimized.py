"""Programs compiled as for users, against float64; and known miscompilations."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attnlab import nn
from attnlab.masks import Causal, SlidingWindow
from attnlab.ops.attention import attention
from attnlab.ops.cross_entropy import cross_entropy
from tests.ops.cases import draw, results
from tests.parameters import parameters
from tests.programs import JAXLIB, compiled_text, optimized, types_of_products

pytestmark = pytest.mark.slow

X = np.random.default_rng(0).standard_normal((2, 13, 16)).astype(np.float32)
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 13), dtype=np.int32)
MODULES = {
    "heads": nn.StackedHeads(2, 8, mask=SlidingWindow(3)),
    "multi-head": nn.MultiHeadAttention(4, kv_heads=2, mask=Causal(), rotary=100.0, qk_norm=True, sinks=True),
    "blockwise": nn.MultiHeadAttention(4, mask=Causal(), impl="blockwise"),
    "additive": nn.AdditiveAttention(8),
    "linear": nn.LinearAttention(4),
    "gru": nn.GRU(),
    "convolution": nn.CausalConv(3),
    "block": nn.Block(nn.MultiHeadAttention(2), nn.Mlp(19, "silu", gated=True), norm_at="stream"),
}
# Programs that reduce products with few columns, at the size where jaxlib 0.10.2 is wrong; and their columns.
OF_MANY_ROWS = {
    "norm of a projection": (nn.MultiHeadAttention(1, qk_norm=True, mask=Causal()), 3),
    "rms": (nn.RMSNorm(), 8),
    "layer": (nn.LayerNorm(), 4),
}
MODELS = {
    "llama": {"attention": {"rotary": {"scaling": "linear", "factor": 2.0}}, "norm": "rms", "mlp": "gated"},
    "local": {
        "layers": "local attention",
        "local": {"window": 3, "soft_cap": 1.5},
        "positions": "alibi",
        "num_layers": 3,
    },
}


def in_float64(function, *arguments):
    """The results of a function on the arguments in double precision."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64) if x.dtype == np.float32 else x, arguments)
        return jax.tree.map(np.asarray, jax.jit(function)(*wide))


def assert_as_exact(actual, exact, steps):
    """Float32 results, arrays or trees, are within `steps` roundings of 2^-24 relative to the largest element."""
    for a, b in zip(actual, exact, strict=True):
        largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(b))
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert x.dtype == np.float32 and y.dtype == np.float64
            np.testing.assert_allclose(x, y, rtol=0, atol=steps * 2.0**-24 * largest)


def with_gradients(apply, params, *inputs):
    """The output, and the gradients of its sum of squares."""

    def loss(params):
        out = apply(params, *inputs)
        return (out**2).sum(), out

    return jax.grad(loss, has_aux=True)(params)[::-1]


@pytest.mark.parametrize(("impl", "seed"), [("blockwise", 0), ("blockwise", 1), ("blockwise", 2), ("dense", 6)])
def test_optimized_operator_equals_float64(impl, seed):
    case = draw(seed)
    with jax.enable_x64(True):
        exact = results(case.arrays, case.run, "dense", np.float64)
    actual = results(case.arrays, case.run, impl, np.float32, compiled=optimized)
    for name, value in exact.items():
        np.testing.assert_array_equal(np.isfinite(actual[name]), np.isfinite(value))
        finite = np.isfinite(value)
        # Sums of up to 40 terms and exponentials of scores of up to 30, two passes: relative to the largest element.
        largest = np.abs(value[finite]).max(initial=1)
        np.testing.assert_allclose(actual[name][finite], value[finite], rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("name", [*MODULES, *OF_MANY_ROWS])
def test_optimized_module_equals_float64(name):
    if name in MODULES:
        # Sums of 16 to 52 terms, forward and backward, through up to five layers of products and a softmax.
        module, x, steps = MODULES[name], X, 500
    else:
        # Gradients of the parameters are sums of 32,769 terms of either sign.
        (module, width), steps = OF_MANY_ROWS[name], 2000
        x = np.random.default_rng(0).standard_normal((32_769, 1, width)).astype(np.float32)
    wide = module.clone(dtype=jnp.float64) if name == "gru" else module  # its state is otherwise float32
    params = parameters(module, x[:1])
    exact = in_float64(functools.partial(with_gradients, wide.apply), params, x)
    assert_as_exact(optimized(functools.partial(with_gradients, module.apply))(params, x), exact, steps)


@pytest.mark.parametrize("name", MODELS)
def test_optimized_gpt_and_its_caches_equal_float64(name):
    """The losses, their gradients, and the logits of a prompt and of single tokens after it."""
    model = nn.GPT.of(**{"vocab_size": 11, "num_layers": 2, "width": 16, "context": 16} | MODELS[name])
    params = parameters(model, TOKENS)
    targets = np.roll(TOKENS, -1, axis=1)

    def train(model, params):
        return jax.value_and_grad(lambda params: model.apply(params, TOKENS, targets=targets).mean())(params)

    def step(params, tokens, caches):
        return model.apply(params, tokens, caches=caches)

    wide = model.replace(dtype=jnp.float64)
    exact = in_float64(functools.partial(train, wide), params)
    assert_as_exact(optimized(functools.partial(train, model))(params), exact, steps=1000)

    logits, caches, step = [], model.init_caches(batch=2), optimized(step)
    for at in (slice(0, 9), *(slice(i, i + 1) for i in range(9, 13))):
        part, caches = step(params, TOKENS[:, at], caches)
        logits.append(part)
    assert_as_exact([np.concatenate(logits, axis=1)], [in_float64(wide.apply, params, TOKENS)], steps=1000)


def test_optimized_cross_entropy_equals_float64():
    rng = np.random.default_rng(0)
    features, embedding = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 10, 6), (21, 6)))
    targets = rng.integers(0, 21, (4, 10)).astype(np.int32)

    def ours(x):
        return cross_entropy(*x, targets, chunk=5).sum()

    def plain(x):
        return optax.softmax_cross_entropy_with_integer_labels(x[0] @ x[1].T, targets).sum()

    actual = optimized(jax.value_and_grad(ours))((features, embedding))
    assert_as_exact(actual, in_float64(jax.value_and_grad(plain), (features, embedding)), steps=200)


def test_reduction_after_batched_products_is_wrong_only_on_jaxlib_0_10_2():
    """JAX issue 39103."""

    def norms(rows):
        return jax.vmap(lambda row: ((jnp.eye(3) @ row) ** 2).sum())(rows)

    rows = np.random.default_rng(0).standard_normal((32_769, 3)).astype(np.float32)
    exact = (rows.astype(np.float64) ** 2).sum(1)
    wrong = np.abs(jax.jit(norms)(rows) - exact).max() > 1e-3
    assert wrong == (JAXLIB == (0, 10, 2))
    right = jax.jit(norms, compiler_options={"xla_cpu_experimental_ynn_fusion_type": ""})(rows)
    np.testing.assert_allclose(right, exact, rtol=4 * 2.0**-24)


def test_overlapping_slice_update_is_wrong_up_to_jaxlib_0_12():
    """XLA issue 49176: 1 1 1 1 instead of 1 1 2 3; right without the reshape. attnlab has no such program."""

    def shifted(x):
        x = x + 1
        return jax.lax.dynamic_update_slice(x, x[:3], (1, 0, 0)).reshape(1, 4, 1)

    out = optimized(shifted)(np.arange(4, dtype=np.int32).reshape(4, 1, 1)).ravel()
    assert out.tolist() == ([1, 1, 1, 1] if JAXLIB < (0, 13) else [1, 1, 2, 3])


@pytest.mark.parametrize("length", [128, 1024])  # tiles one by one, heads one by one
def test_attention_multiplies_bfloat16_without_conversion(length):
    x = jax.ShapeDtypeStruct((2, length, 2, 64), jnp.bfloat16)
    plain = jax.ShapeDtypeStruct((4, 64, 64), jnp.bfloat16)
    as_float32 = compiled_text(lambda x, y: jnp.matmul(x, y, preferred_element_type="float32"), plain, plain)
    if types_of_products(as_float32) == {"f32"}:
        pytest.skip("XLA has no bfloat16 products on this processor")

    def both(q, k, v, d_out):
        return jax.vjp(lambda *x: attention(*x, Causal(), impl="blockwise"), q, k, v)[1](d_out)

    compiled = compiled_text(both, x, x, x, x)
    # δ is a product of float32 with ones.
    assert types_of_products(re.sub(r".* = f32\[\d+,1\].* dot\(.*", "", compiled)) == {"bf16"}
