"""Flax layers with attnlab's attention equal plain Flax; attnlab's modules in NNX; unsupported arguments."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.nnx import bridge

import attnlab
from attnlab.interop.flax import attention_fn
from attnlab.masks import Causal, Padding, SlidingWindow
from attnlab.nn import GPT, MultiHeadAttention
from attnlab.score_mods import ALiBi, SoftCap, alibi_slopes
from tests.parameters import parameters

pytestmark = pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated soon")

rng = np.random.default_rng(0)
X = rng.standard_normal((2, 6, 8)).astype(np.float32)
MEMORY = rng.standard_normal((2, 5, 12)).astype(np.float32)
Q, K, V = rng.standard_normal((3, 2, 3, 6, 4, 2)).astype(np.float32)
TOKENS = np.array([[3, 1, 4, 1, 0, 0], [1, 5, 9, 2, 6, 5]])  # 0 is padding
KEY = jax.random.wrap_key_data(np.array([0, 7], np.uint32))
HALF = rng.random((2, 4, 6, 6)) < 0.5
HALF[..., 0] = True  # no row is fully masked
MASKS = {
    "none": None,
    "causal": nn.make_causal_mask(TOKENS),  # float32
    "padding": nn.make_attention_mask(np.ones_like(TOKENS), TOKENS > 0, dtype=bool),
    "both": nn.combine_masks(nn.make_causal_mask(TOKENS), nn.make_attention_mask(np.ones_like(TOKENS), TOKENS > 0)),
    "heads": HALF,
    "examples": HALF[:, :1].astype(np.int32),
    "keys": (TOKENS > 0)[:, None, None],
    "pairs": HALF[0, 0],
}


def wide(tree):
    """Convert floating arrays to float64, where the implementations differ by 1e-15 and mistakes by far more."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def pair(layer, *inputs, ours=None, **options):
    """The layer with flax's attention, the layer with attnlab's, and variables for both."""
    theirs = layer(num_heads=4, **options)
    return theirs, theirs.clone(attention_fn=ours or attention_fn()), parameters(theirs, *inputs)


def results(modules, *args, **options):
    """Outputs of the modules, computed by one program."""
    return jax.jit(lambda *args: [module.apply(*args, **options) for module in modules])(*args)


def test_attention_fn_names_every_flax_argument():
    """Flax silently omits arguments that the function does not name; this fails when Flax adds one."""
    named = set(inspect.signature(attention_fn()).parameters)
    for theirs in (nn.dot_product_attention, nnx.dot_product_attention):
        assert set(inspect.signature(theirs).parameters) <= named


def test_self_attention_under_every_mask_equals_flax(float64):
    theirs, ours, params = pair(nn.MultiHeadAttention, X)

    @jax.jit
    def outputs(params, x):
        return [{name: module.apply(params, x, mask=mask) for name, mask in MASKS.items()} for module in (ours, theirs)]

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), *outputs(*wide((params, X))))


def test_cross_attention_equals_flax(float64):
    theirs, ours, params = pair(nn.MultiHeadDotProductAttention, X, MEMORY, normalize_qk=True)
    params, x, memory = wide((params, X, MEMORY))
    mask = nn.make_attention_mask(np.ones((2, 6)), np.arange(5) < np.array([[3], [5]]))
    np.testing.assert_allclose(*results((ours, theirs), params, x, memory, mask=mask), rtol=1e-9)


def test_gradients_equal_flax(float64):
    theirs, ours, params = pair(nn.MultiHeadAttention, X, ours=attention_fn(impl="blockwise"))
    params, x = wide((params, X))

    def gradient(module):
        return jax.grad(lambda params, x: (module.apply(params, x, mask=MASKS["both"]) ** 2).sum(), (0, 1))(params, x)

    gradients = jax.jit(lambda: (gradient(ours), gradient(theirs)))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), *gradients)


def test_bfloat16_equals_flax_up_to_rounding():
    theirs, ours, params = pair(nn.MultiHeadAttention, X, dtype=jnp.bfloat16, force_fp32_for_softmax=True)
    ours, theirs = results((ours, theirs), params, X, mask=MASKS["causal"])
    assert ours.dtype == theirs.dtype == jnp.bfloat16
    # The two round queries, scores, weights and results at different places: at most 8 times to 8 bits.
    size = float(jnp.abs(theirs).max())
    np.testing.assert_allclose(ours.astype(float), theirs.astype(float), atol=8 * 2**-8 * size)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_dtypes_are_promoted_like_flax(dtype):
    mixed = Q.astype(jnp.bfloat16), K, V

    def type_of(fn, **options):
        return jax.eval_shape(functools.partial(fn, **options), *mixed).dtype

    assert type_of(attention_fn(), dtype=dtype) == type_of(nn.dot_product_attention, dtype=dtype)
    seen = []

    def promote(arrays, dtype):
        seen.append(dtype)
        return tuple(x.astype(jnp.float16) for x in arrays)

    assert type_of(attention_fn(), dtype=dtype, promote_dtype=promote) == jnp.float16 and seen == [dtype]


def both(q, k, v, *cases):
    """The results of our function and of flax's with each of the options, computed by one program."""
    functions = attention_fn(), nn.dot_product_attention
    return jax.jit(lambda: [[fn(q, k, v, **case, deterministic=True) for case in cases] for fn in functions])()


def broadcastable(rng):
    """Normal numbers that broadcast to the scores of Q and K, with some axes of 1 and some leading axes missing."""
    kept, first = rng.random(5) < 0.5, rng.integers(0, 6)
    shape = [size if keep else 1 for size, keep in zip((2, 3, 4, 6, 6), kept)][first:]
    return rng.normal(size=shape).astype(np.float32)


def test_masks_and_biases_broadcast_like_flax():
    """12 shapes of each, in one program."""
    rng, cases = np.random.default_rng(0), []
    for _ in range(12):
        mask, bias = broadcastable(rng) > 0, broadcastable(rng)
        # Every query attends to the first key.
        cases.append({"mask": mask | (np.arange(mask.shape[-1] if mask.ndim else 1) == 0), "bias": bias})
    assert len({(case["mask"].shape, case["bias"].shape) for case in cases}) > 10
    # Scores and biases below 10, so weights err by 10·2^-24 a few times, and values are below 4.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *both(Q, K, V, *cases))


def test_fully_masked_row_is_zero_others_equal_flax():
    visible = TOKENS > 0
    (ours,), (theirs,) = np.asarray(both(Q, K, V, {"mask": (visible[:, :, None] & visible[:, None])[:, None, None]}))
    visible = np.broadcast_to(visible[:, None], (2, 3, 6))
    np.testing.assert_allclose(ours[visible], theirs[visible], atol=2e-6)
    np.testing.assert_array_equal(ours[~visible], 0)
    assert theirs[~visible].all()


@pytest.mark.parametrize(
    "options",
    [
        {"mask": SlidingWindow(1) & Padding(5), "impl": "blockwise", "block_sizes": (4, 2)},
        {"score_mod": (SoftCap(1.0), ALiBi(alibi_slopes(4))), "impl": "dense"},
        {"scale": 0.5, "sinks": np.arange(4, dtype=np.float32)},
        {"mask": Causal(), "q_positions": np.arange(6) + 2, "kv_positions": np.arange(6)},
    ],
    ids=str,
)
def test_attention_fn_arguments_reach_operator(options):
    out, expected, plain = jax.jit(
        lambda: [attention_fn(**options)(Q, K, V), attnlab.attention(Q, K, V, **options), attention_fn()(Q, K, V)]
    )()
    np.testing.assert_array_equal(out, expected)
    assert not np.allclose(plain, expected)


def test_attention_fn_combines_its_mask_with_the_layer_mask():
    _, ours, params = pair(nn.MultiHeadAttention, X, ours=attention_fn(Causal()))
    calls = (nn.MultiHeadAttention(num_heads=4), MASKS["both"]), (ours, MASKS["padding"])
    np.testing.assert_allclose(
        *jax.jit(lambda params: [module.apply(params, X, mask=m) for module, m in calls])(params), atol=2e-6
    )


def test_flax_decoding_equals_flax():
    theirs, ours, variables = pair(nn.MultiHeadAttention, X, decode=True, ours=attention_fn(impl="blockwise"))
    cache, outs = variables["cache"], []
    step = jax.jit(lambda *args: [module.apply(*args, mutable=["cache"]) for module in (ours, theirs)])
    for at in range(6):
        variables = variables | {"cache": cache}
        (out, state), (expected, _) = step(variables, X[:, at : at + 1])
        cache = state["cache"]
        np.testing.assert_allclose(out, expected, atol=2e-6)
        outs.append(out)
    full = nn.MultiHeadAttention(num_heads=4)
    full = jax.jit(full.apply)({"params": variables["params"]}, X, mask=MASKS["causal"])
    np.testing.assert_allclose(np.concatenate(outs, axis=1), full, atol=2e-6)


def test_positional_terms_raise_in_flax_decoding():
    for name, option in (("mask", Causal()), ("score_mod", ALiBi(np.ones(4)))):
        _, ours, variables = pair(nn.MultiHeadAttention, X, decode=True, ours=attention_fn(**{name: option}))
        with pytest.raises(ValueError, match=f"{name} .*Tq = 1 and Tk = 6.*flax"):
            jax.eval_shape(functools.partial(ours.apply, mutable=["cache"]), variables, X[:, :1])


def test_weights_are_sown_like_flax():
    theirs, ours, params = pair(nn.SelfAttention, X, dropout_rate=0.5, broadcast_dropout=False, deterministic=False)
    options = {"rngs": {"dropout": jax.random.key(5)}, "mutable": ["intermediates"], "mask": MASKS["both"]}
    sown = []
    for _, state in results((ours, theirs), params, X, sow_weights=True, **options):
        sown.append(state["intermediates"]["attention_weights"][0])
    for module in (ours, theirs):
        assert not jax.eval_shape(functools.partial(module.apply, **options), params, X)[1]
    np.testing.assert_allclose(*sown, atol=1e-6)


def test_layer_dropout_uses_its_rng_stream():
    _, ours, params = pair(nn.MultiHeadAttention, X, dropout_rate=0.5, broadcast_dropout=False, deterministic=True)
    plain = nn.MultiHeadAttention(num_heads=4, attention_fn=attention_fn())
    same, expected = results((ours, plain), params, X)
    np.testing.assert_array_equal(same, expected)
    dropping = ours.clone(deterministic=False)
    run = jax.jit(lambda seed: dropping.apply(params, X, rngs={"dropout": jax.random.key(seed)}))
    once, again, other = map(run, (7, 7, 8))
    np.testing.assert_array_equal(once, again)
    assert not np.allclose(once, other) and not np.allclose(once, expected)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"precision": "highest"}, "precision = 'highest': .*jax.default_matmul_precision"),
        ({"einsum_dot_general": jax.lax.dot_general}, "einsum_dot_general ="),
        ({"dropout_rate": 0.1, "dropout_rng": KEY}, "set broadcast_dropout=False in the layer"),
        ({"dropout_rate": 0.1, "broadcast_dropout": False}, "dropout_rng = None.*deterministic=True"),
        ({"mask": np.ones((5, 6))}, r"mask has shape \(5, 6\).* \(2, 3, 4, 6, 6\)"),
        ({"bias": np.ones((6, 6), bool)}, "bias has type bool.*use mask="),
        ({"key": K[..., :4, :, :], "value": V[..., :4, :, :], "is_causal": True}, "is_causal compares positions"),
    ],
)
def test_unsupported_argument_raises_by_name(options, message, own_errors):
    arguments = {"query": Q, "key": K, "value": V} | options
    with pytest.raises(ValueError, match=message) as error:
        jax.eval_shape(lambda: attention_fn()(**arguments))
    assert "\n" not in str(error.value)


def test_neutral_arguments_are_accepted():
    neutral = {"force_fp32_for_softmax": True, "dropout_rng": KEY, "dropout_rate": 0.0}
    calls = [{}, *(neutral | {"precision": name} for name in (None, "default", ("default", jax.lax.Precision.DEFAULT)))]
    assert len({str(jax.make_jaxpr(functools.partial(attention_fn(), **more))(Q, K, V)) for more in calls}) == 1


@functools.cache
def nnx_pair(**options):
    """NNX's layer with its own attention and with ours, with the same parameters."""
    options = {"num_heads": 4, "in_features": 8, "decode": False} | options
    create = nnx.jit(lambda fn: nnx.MultiHeadAttention(**options, attention_fn=fn, rngs=nnx.Rngs(0)), static_argnums=0)
    return create(nnx.dot_product_attention), create(attention_fn())


def test_nnx_error_for_operator_as_attention_fn_names_the_right_one():
    layer = nnx.MultiHeadAttention(4, 8, decode=False, attention_fn=attnlab.attention, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="no argument 'dropout_rng': .*attention_fn=attnlab.interop.flax.attention_fn"):
        layer(X)


def test_nnx_attention_equals_nnx():
    calls = ({}, {"is_causal": True}, {"mask": HALF}, {"mask": HALF, "is_causal": True})
    outputs = nnx.jit(lambda modules, x: [[module(x, **call) for call in calls] for module in modules])
    ours, theirs = outputs(nnx_pair(num_kv_heads=2), X)
    np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_nnx_decoding_equals_nnx():
    full = nnx.jit(lambda module, x: module(x, is_causal=True))(nnx_pair()[1], X)
    modules = nnx_pair(decode=True)
    for module in modules:
        module.init_cache(X.shape)
    step = nnx.jit(lambda modules, x: [module(x) for module in modules])
    for at in range(6):
        expected, out = step(modules, X[:, at : at + 1])
        np.testing.assert_allclose(out, expected, atol=2e-6)
        np.testing.assert_allclose(out, full[:, at : at + 1], atol=2e-6)


def test_nnx_weights_are_sown_like_nnx():
    def sown(modules, x):
        for module in modules:
            layer = nnx.capture(module, nnx.Intermediate)
            yield layer(x, sow_weights=True, mask=MASKS["both"], rngs=nnx.Rngs(0))[1]["attention_weights"][0]

    pair = nnx_pair(dropout_rate=0.5, broadcast_dropout=False, deterministic=False)
    np.testing.assert_allclose(*nnx.jit(lambda modules, x: list(sown(modules, x)))(pair, X), atol=1e-6)


def test_linen_module_in_nnx_equals_linen_and_trains():
    model = GPT.of(vocab_size=10, num_layers=1, num_heads=2, width=8, context=6)
    wrapped = nnx.jit(lambda tokens: bridge.lazy_init(bridge.ToNNX(model, rngs=nnx.Rngs(0)), tokens))(TOKENS)
    optimizer = nnx.Optimizer(wrapped, optax.sgd(1e-2), wrt=nnx.Param)

    def loss(logits):
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], TOKENS[:, 1:]).mean(), logits

    @nnx.jit
    def step(wrapped, optimizer):
        params = {"params": nnx.to_pure_dict(nnx.state(wrapped, nnx.Param))}
        gradient, logits = nnx.grad(lambda wrapped: loss(wrapped(TOKENS)), has_aux=True)(wrapped)
        plain = jax.grad(lambda params: loss(model.apply(params, TOKENS)), has_aux=True)(params)
        optimizer.update(wrapped, gradient)
        return ({"params": nnx.to_pure_dict(gradient)}, logits), plain, loss(logits)[0]

    losses = []
    for _ in range(5):
        actual, expected, value = step(wrapped, optimizer)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)
        losses.append(float(value))
    assert losses == sorted(losses, reverse=True)


def test_nnx_module_in_linen_equals_multihead():
    module = bridge.to_linen(nnx.MultiHeadAttention, 4, 8, decode=False, attention_fn=attention_fn(Causal()))
    ours = MultiHeadAttention(num_heads=4, mask=Causal())
    variables = jax.jit(module.init)(jax.random.key(1), X)
    params = parameters(ours, X)["params"]
    assert jax.tree.map(np.shape, variables["params"]) == jax.tree.map(np.shape, params)

    def with_gradient(apply):
        return apply(params), jax.grad(lambda params: (apply(params) ** 2).sum())(params)

    def both():
        nnx_apply = with_gradient(lambda params: module.apply(variables | {"params": params}, X))
        return nnx_apply, with_gradient(lambda params: ours.apply({"params": params}, X))

    (out, gradient), (expected, plain) = jax.jit(both)()
    np.testing.assert_allclose(out, expected, atol=2e-6)
    # Sums of 12 rows of products below 10.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), gradient, plain)
