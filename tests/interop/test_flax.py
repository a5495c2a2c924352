"""Flax's layers with attnlab's attention equal those with their own; unsupported arguments raise by name."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import attnlab
from attnlab.interop.flax import attention_fn
from attnlab.masks import Causal, Padding, SlidingWindow
from attnlab.score_mods import ALiBi, SoftCap, alibi_slopes

pytestmark = pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated soon")

rng = np.random.default_rng(0)
X = rng.standard_normal((2, 6, 8)).astype(np.float32)
MEMORY = rng.standard_normal((2, 5, 12)).astype(np.float32)
Q, K, V = rng.standard_normal((3, 2, 3, 6, 4, 2)).astype(np.float32)
TOKENS = np.array([[3, 1, 4, 1, 0, 0], [1, 5, 9, 2, 6, 5]])  # 0 is padding
LAYERS = [nn.MultiHeadDotProductAttention, nn.MultiHeadAttention, nn.SelfAttention]
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
    """Floating arrays in float64, where the implementations differ by 1e-15 and mistakes by far more."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def pair(layer, *inputs, ours=None, **options):
    """The layer with flax's attention, the layer with attnlab's, and variables for both."""
    theirs = layer(num_heads=4, **options)
    return theirs, theirs.clone(attention_fn=ours or attention_fn()), jax.jit(theirs.init)(jax.random.key(2), *inputs)


def results(modules, *args, **options):
    """What the modules return, computed by one program."""
    return jax.jit(lambda *args: [module.apply(*args, **options) for module in modules])(*args)


def test_attention_fn_names_every_flax_argument():
    """Flax silently omits arguments that the function does not name; this fails when Flax adds one."""
    named = set(inspect.signature(attention_fn()).parameters)
    for theirs in (nn.dot_product_attention, nnx.dot_product_attention):
        assert set(inspect.signature(theirs).parameters) <= named


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layer", LAYERS)
def test_self_attention_equals_flax(layer, mask, float64):
    theirs, ours, params = pair(layer, X)
    params, x = wide((params, X))
    np.testing.assert_allclose(ours.apply(params, x, mask=mask), theirs.apply(params, x, mask=mask), rtol=1e-9)


@pytest.mark.parametrize("normalize_qk", [False, True])
@pytest.mark.parametrize("layer", LAYERS[:2])
def test_cross_attention_equals_flax(layer, normalize_qk, float64):
    theirs, ours, params = pair(layer, X, MEMORY, normalize_qk=normalize_qk)
    params, x, memory = wide((params, X, MEMORY))
    mask = nn.make_attention_mask(np.ones((2, 6)), np.arange(5) < np.array([[3], [5]]))
    np.testing.assert_allclose(*results((ours, theirs), params, x, memory, mask=mask), rtol=1e-9)


@pytest.mark.parametrize("impl", ["dense", "blockwise"])
def test_gradients_equal_flax(impl, float64):
    theirs, ours, params = pair(nn.MultiHeadAttention, X, ours=attention_fn(impl=impl))
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


@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16])
def test_dtypes_are_promoted_like_flax(dtype):
    mixed = Q.astype(jnp.bfloat16), K, V
    assert attention_fn()(*mixed, dtype=dtype).dtype == nn.dot_product_attention(*mixed, dtype=dtype).dtype
    seen = []

    def promote(arrays, dtype):
        seen.append(dtype)
        return tuple(x.astype(jnp.float16) for x in arrays)

    assert attention_fn()(*mixed, dtype=dtype, promote_dtype=promote).dtype == jnp.float16 and seen == [dtype]


SHAPES = st.tuples(st.lists(st.booleans(), min_size=5, max_size=5), st.integers(0, 5), st.integers(0, 2**31))


def broadcastable(case):
    """Normal numbers that broadcast to the scores of Q and K, with some axes of 1 and some leading axes missing."""
    kept, first, seed = case
    shape = [size if keep else 1 for size, keep in zip((2, 3, 4, 6, 6), kept)][first:]
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@settings(max_examples=25)
@given(SHAPES, SHAPES)
def test_masks_and_biases_broadcast_like_flax(mask, bias):
    mask, bias = broadcastable(mask) > 0, broadcastable(bias)
    mask = mask | (np.arange(mask.shape[-1] if mask.ndim else 1) == 0)  # every query attends to the first key
    ours = attention_fn()(Q, K, V, bias=bias, mask=mask, deterministic=True)
    theirs = nn.dot_product_attention(Q, K, V, bias=bias, mask=mask, deterministic=True)
    # Scores and biases below 10, so weights err by 10·2^-24 a few times, and values are below 4.
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize("shape", [(), (6,), (6, 6), (1, 6, 6), (4, 1, 6)])
def test_inputs_without_batch_equal_flax(shape):
    q, k, v = Q[0, 0], K[0, 0], V[0, 0]
    mask = (np.random.default_rng(0).random(shape) < 0.6) | (np.arange(6) == 0 if shape else True)
    ours, theirs = (fn(q, k, v, mask=mask, deterministic=True) for fn in (attention_fn(), nn.dot_product_attention))
    np.testing.assert_allclose(ours, theirs, atol=2e-6)


def test_bias_gradient_equals_flax(float64):
    q, k, v = wide((Q, K, V))
    bias = np.random.default_rng(4).standard_normal((4, 1, 1))

    def gradient(fn):
        return jax.grad(lambda bias: (fn(q, k, v, bias=bias, mask=MASKS["pairs"], deterministic=True) ** 2).sum())(bias)

    ours, theirs = jax.jit(lambda: (gradient(attention_fn()), gradient(nn.dot_product_attention)))()
    np.testing.assert_allclose(ours, theirs, atol=1e-12)


def test_fully_masked_row_is_zero_others_equal_flax():
    mask = nn.make_attention_mask(TOKENS > 0, TOKENS > 0)[:, None]
    ours, theirs = (fn(Q, K, V, mask=mask, deterministic=True) for fn in (attention_fn(), nn.dot_product_attention))
    visible = np.broadcast_to((np.asarray(TOKENS) > 0)[:, None], (2, 3, 6))
    np.testing.assert_allclose(ours[visible], theirs[visible], atol=2e-6)
    np.testing.assert_array_equal(ours[~visible], 0)
    assert np.asarray(theirs)[~visible].all()


@pytest.mark.parametrize(
    "options",
    [
        {"mask": Causal()},
        {"mask": SlidingWindow(1) & Padding(5), "impl": "blockwise", "block_sizes": (4, 2)},
        {"score_mod": SoftCap(1.0), "impl": "dense"},
        {"score_mod": (SoftCap(1.0), ALiBi(alibi_slopes(4)))},
        {"scale": 0.5, "sinks": jnp.arange(4.0)},
        {"mask": Causal(), "q_positions": jnp.arange(6) + 2, "kv_positions": jnp.arange(6)},
    ],
    ids=str,
)
def test_attention_fn_arguments_reach_operator(options):
    expected = attnlab.attention(Q, K, V, **options)
    np.testing.assert_array_equal(attention_fn(**options)(Q, K, V), expected)
    assert not np.allclose(attention_fn()(Q, K, V), expected)


def test_attention_fn_uses_named_backend():
    programs = {impl: str(jax.make_jaxpr(attention_fn(impl=impl))(Q, K, V)) for impl in ("auto", "dense", "blockwise")}
    assert programs["auto"] == programs["dense"] != programs["blockwise"]
    with pytest.raises(ValueError, match="impl = 'fast' is unknown"):
        attention_fn(impl="fast")(Q, K, V)


def test_attention_fn_ands_its_mask_with_layers():
    _, ours, params = pair(nn.MultiHeadAttention, X, ours=attention_fn(Causal()))
    theirs = jax.jit(nn.MultiHeadAttention(num_heads=4).apply)(params, X, mask=MASKS["both"])
    for mask in (MASKS["padding"], Padding(np.array([4, 6]))):
        np.testing.assert_allclose(jax.jit(ours.apply)(params, X, mask=mask), theirs, atol=2e-6)


@pytest.mark.parametrize("impl", ["auto", "blockwise"])
def test_flax_decoding_equals_flax(impl):
    theirs, ours, variables = pair(nn.MultiHeadAttention, X, decode=True, ours=attention_fn(impl=impl))
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


@pytest.mark.parametrize(
    "name, option", [("mask", {"mask": Causal()}), ("score_mod", {"score_mod": ALiBi(np.ones(4))})]
)
def test_positional_terms_raise_in_flax_decoding(name, option):
    _, ours, variables = pair(nn.MultiHeadAttention, X, decode=True, ours=attention_fn(**option))
    with pytest.raises(ValueError, match=f"{name} compares positions, but Tq = 1 and Tk = 6.*leave causality to flax"):
        ours.apply(variables, X[:, :1], mutable=["cache"])


def test_explicit_positions_allow_different_lengths():
    last = attention_fn(Causal(), q_positions=jnp.array([4, 5]), kv_positions=jnp.arange(6))(Q[..., 4:, :, :], K, V)
    np.testing.assert_allclose(last, attention_fn(Causal())(Q, K, V)[..., 4:, :, :], atol=2e-6)


@pytest.mark.parametrize("layer", LAYERS)
def test_weights_are_sown_like_flax(layer):
    theirs, ours, params = pair(layer, X, dropout_rate=0.5, broadcast_dropout=False, deterministic=False)
    options = {"rngs": {"dropout": jax.random.key(5)}, "mutable": ["intermediates"], "mask": MASKS["both"]}
    sown = []
    for _, state in results((ours, theirs), params, X, sow_weights=True, **options):
        sown.append(state["intermediates"]["attention_weights"][0])
    for module in (ours, theirs):
        assert not jax.eval_shape(functools.partial(module.apply, **options), params, X)[1]
    np.testing.assert_allclose(*sown, atol=1e-6)


def test_dropout_rate_is_met_and_deterministic_drops_none():
    """Zero queries attend to 64 keys equally; identity values return the weights."""
    zeros = np.zeros((8, 64, 2, 4), np.float32)
    identity = np.broadcast_to(np.eye(64, dtype=np.float32)[:, None], (8, 64, 2, 64))
    attend = functools.partial(attention_fn(), zeros, zeros, identity)
    options = {"dropout_rate": 0.25, "dropout_rng": jax.random.key(6)}
    nothing = ({"deterministic": True}, {"dropout_rate": 0.0})
    weights, plain, *given = jax.jit(
        lambda: [attend(broadcast_dropout=False, **options), attend(), *(attend(**options | none) for none in nothing)]
    )()
    weights = np.asarray(weights)
    # Of 2^16 draws the share has deviation √(0.25·0.75/2^16) = 0.0017: four of them.
    assert abs(float((weights == 0).mean()) - 0.25) < 0.007
    np.testing.assert_allclose(weights[weights != 0], 1 / 64 / 0.75, rtol=1e-5)
    for same in given:
        np.testing.assert_array_equal(same, plain)


def test_layer_dropout_uses_its_rng_stream():
    _, ours, params = pair(nn.MultiHeadAttention, X, dropout_rate=0.5, broadcast_dropout=False, deterministic=True)
    plain = nn.MultiHeadAttention(num_heads=4, attention_fn=attention_fn())
    np.testing.assert_array_equal(ours.apply(params, X), plain.apply(params, X))
    ours = ours.clone(deterministic=False)
    once, again, other = (ours.apply(params, X, rngs={"dropout": jax.random.key(seed)}) for seed in (7, 7, 8))
    np.testing.assert_array_equal(once, again)
    assert not np.allclose(once, other) and not np.allclose(once, plain.apply(params, X))


@pytest.mark.parametrize(
    "given, message",
    [
        ({"precision": "highest"}, "precision = 'highest': expected None.*jax.default_matmul_precision"),
        ({"precision": jax.lax.Precision.HIGH}, "precision = .*HIGH.*: expected None"),
        ({"precision": ("default", "high")}, "precision = .*: expected None"),
        ({"einsum_dot_general": jax.lax.dot_general}, "einsum_dot_general = .*: expected None"),
        ({"qk_attn_weights_einsum": jnp.einsum}, "qk_attn_weights_einsum = .*: expected None"),
        ({"attn_weights_value_einsum": jnp.einsum}, "attn_weights_value_einsum = .*: expected None"),
        ({"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}, "give the layer broadcast_dropout=False"),
        ({"dropout_rate": 0.1, "broadcast_dropout": False}, "dropout_rng = None.*give a key, or deterministic=True"),
        ({"mask": np.ones((5, 6))}, r"mask has shape \(5, 6\), expected one that broadcasts to.* \(2, 3, 4, 6, 6\)"),
        ({"mask": np.ones((1, 2, 3, 4, 6, 6))}, "mask has shape .*, expected one that broadcasts to"),
        ({"bias": np.ones((4, 6, 5))}, r"bias has shape \(4, 6, 5\), expected one that broadcasts to"),
        ({"bias": np.ones((6, 6), bool)}, "bias has type bool, expected a floating type: use mask="),
        ({"bias": np.ones((6, 6), int)}, "bias has type int"),
        ({"key": K[..., :4, :, :], "value": V[..., :4, :, :], "is_causal": True}, "is_causal compares positions"),
    ],
)
def test_unsupported_argument_raises_by_name(given, message, own_errors):
    with pytest.raises(ValueError, match=message) as error:
        attention_fn()(**{"query": Q, "key": K, "value": V} | given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("precision", [None, "default", jax.lax.Precision.DEFAULT, ("default", "default")])
def test_neutral_arguments_are_accepted(precision):
    out = attention_fn()(Q, K, V, precision=precision, force_fp32_for_softmax=True, dropout_rng=jax.random.key(0))
    np.testing.assert_array_equal(out, attention_fn()(Q, K, V))


def nnx_pair(ours=None, **options):
    options = {"num_heads": 4, "in_features": 8, "decode": False} | options
    return [
        nnx.MultiHeadAttention(**options, attention_fn=fn, rngs=nnx.Rngs(0))
        for fn in (nnx.dot_product_attention, ours or attention_fn())
    ]


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    "call",
    [{}, {"is_causal": True}, {"mask": HALF}, {"mask": HALF, "is_causal": True}],
    ids=lambda call: "+".join(call),
)
def test_nnx_attention_equals_nnx(call, kv_heads):
    theirs, ours = nnx_pair(num_kv_heads=kv_heads)
    np.testing.assert_allclose(ours(X, **call), theirs(X, **call), atol=2e-6)


def test_nnx_gradients_equal_nnx(float64):
    theirs, ours = (
        nnx.jit(nnx.grad(lambda module, x: (module(x, is_causal=True) ** 2).sum()))(module, wide(X))
        for module in nnx_pair()
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, theirs)


def test_nnx_decoding_equals_nnx():
    theirs, ours = nnx_pair(decode=True)
    full = nnx_pair()[1](X, is_causal=True)
    for module in (theirs, ours):
        module.init_cache(X.shape)
    for at in range(6):
        out = ours(X[:, at : at + 1])
        np.testing.assert_allclose(out, theirs(X[:, at : at + 1]), atol=2e-6)
        np.testing.assert_allclose(out, full[:, at : at + 1], atol=2e-6)


def test_nnx_weights_are_sown_like_nnx():
    sown = []
    for module in nnx_pair(dropout_rate=0.5, broadcast_dropout=False, deterministic=False):
        layer = nnx.capture(module, nnx.Intermediate)
        _, state = layer(X, sow_weights=True, mask=MASKS["both"], rngs=nnx.Rngs(0))
        sown.append(state["attention_weights"][0])
    np.testing.assert_allclose(*sown, atol=1e-6)
