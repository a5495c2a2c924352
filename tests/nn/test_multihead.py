"""Multi-head attention agrees with Flax's, loads its checkpoints, and decodes with a cache."""

import functools

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.masks import Causal, Padding, SlidingWindow
from attnlab.nn import KVCache, LatentAttention, MultiHeadAttention
from attnlab.score_mods import ALiBi
from tests.nn import relatives
from tests.ops.cases import slow
from tests.parameters import parameters

rng = np.random.default_rng(0)
X = rng.standard_normal((2, 6, 8)).astype(np.float32)
MEMORY = rng.standard_normal((2, 5, 12)).astype(np.float32)
EMPTY = KVCache.empty(batch=2, capacity=8, kv_heads=4, head_dim=2)
GATED = KVCache.empty(batch=2, capacity=8, kv_heads=4, head_dim=2, forget_heads=4)
HALF = GATED.forget.astype(jnp.bfloat16)


def shapes(tree):
    return jax.tree.map(lambda leaf: leaf.shape, tree)


@pytest.mark.parametrize("use_bias, qk_norm, memory", [(True, True, MEMORY), (False, False, None)])
def test_parameters_are_interchangeable_with_flax(use_bias, qk_norm, memory, float64):
    ours = MultiHeadAttention(num_heads=4, use_bias=use_bias, qk_norm=qk_norm)
    theirs = flax.linen.MultiHeadDotProductAttention(num_heads=4, use_bias=use_bias, normalize_qk=qk_norm)
    params = parameters(theirs, X, memory)
    assert shapes(jax.eval_shape(ours.init, jax.random.key(2), X, memory)) == shapes(params)
    # In float64, because flax's variance, E[x²] − E[x]², cancels in float32 if a head's two features are close.
    x, memory = (None if array is None else array.astype(np.float64) for array in (X, memory))
    results = jax.jit(lambda params: [module.apply(params, x, memory) for module in (ours, theirs)])(params)
    np.testing.assert_allclose(*results, rtol=1e-9)


@pytest.mark.parametrize("module", [MultiHeadAttention(4), LatentAttention(2, 6, 4, 2, 4)])
def test_lengths_and_masks_in_field_and_call_combine(module):
    params, lengths = parameters(module, X), np.array([3, 6])
    causal = module.clone(mask=Causal())

    @jax.jit
    def run(params):
        expected = module.apply(params, X, mask=Causal() & Padding(lengths))
        return expected, causal.apply(params, X, mask=Padding(lengths)), causal.apply(params, X, lengths=lengths)

    expected, by_mask, by_lengths = run(params)
    np.testing.assert_array_equal(by_mask, expected)
    np.testing.assert_array_equal(by_lengths, expected)


def test_head_dim_and_out_features_set_shapes():
    module = MultiHeadAttention(num_heads=3, head_dim=5, out_features=7)
    assert jax.eval_shape(module.init_with_output, jax.random.key(0), X)[0].shape == (2, 6, 7)


def test_multihead_sown_weights_give_output():
    module = MultiHeadAttention(num_heads=4, mask=Causal(), use_bias=False)
    params = parameters(module, X)["params"]
    out, state = jax.jit(functools.partial(module.apply, mutable=["intermediates"]))({"params": params}, X)
    (weights,) = state["intermediates"]["attention_weights"]
    values = np.einsum("btf,fhd->bhtd", X, params["value"]["kernel"])
    expected = np.einsum("bhtd,hdf->btf", np.asarray(weights) @ values, params["out"]["kernel"])
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_sinks_start_at_zero_and_take_weight():
    module = MultiHeadAttention(num_heads=4, sinks=True)
    sowing = jax.jit(functools.partial(module.init_with_output, mutable=["params", "intermediates"]))
    _, state = sowing(jax.random.key(2), X)
    np.testing.assert_array_equal(state["params"]["sinks"], np.zeros(4))
    assert (np.asarray(state["intermediates"]["attention_weights"][0]).sum(-1) < 1).all()


@pytest.mark.parametrize(
    "options, call, message",
    [
        ({"num_heads": 3}, {}, "width 8 .* 3 heads"),
        ({"kv_heads": 3}, {}, "num_heads = 4 .*kv_heads = 3"),
        ({}, {"inputs_kv": MEMORY, "cache": EMPTY}, "cache is for self-attention"),
        ({}, {"positions": np.arange(6), "cache": EMPTY}, "cache .*remove positions"),
        ({}, {"cache": KVCache.empty(2, 8, 4, 3)}, r"key has shape \(2, 8, 4, 3\), .*4, 2\): make it with init_cache"),
        ({}, {"cache": KVCache.empty(2, 8, 4, 2, int)}, "cache.key has type int"),
        ({}, {"cache": EMPTY._replace(length=np.array([0]))}, r"cache.length has shape \(1,\)"),
        ({}, {"cache": EMPTY._replace(length=np.zeros(2))}, "cache.length has type float64"),
        ({}, {"cache": tuple(EMPTY)}, "cache is a tuple"),
        ({}, {"cache": KVCache.empty(2, 4, 4, 2)}, "6 tokens .* cache of 4"),
        ({}, {"lengths": np.array([6, 7])}, "lengths contains 7, expected 0 to 6"),
        ({"rotary": 100.0}, {"inputs_kv": MEMORY}, "remove it for cross-attention"),
        ({"forget_gate": True}, {"inputs_kv": X}, "forget_gate needs queries and keys of one sequence"),
        ({"conv": 2}, {"inputs_kv": X}, "conv needs queries and keys of one sequence"),
        ({"conv": 2}, {"cache": EMPTY}, r"expected key, value, length, conv.key, conv.query, conv.value: make"),
        ({"forget_gate": True}, {"cache": GATED._replace(forget=np.zeros((2, 8, 2)))}, r"\(2, 8, 2\), .*\(2, 8, 4\)"),
        (
            {"forget_gate": True, "mask": Causal()},
            {"cache": GATED._replace(forget=HALF)},
            "expected float32 or float64",
        ),
        ({}, {"cache": GATED}, "length, forget, expected key, value, length: make"),
    ],
)
def test_multihead_invalid_argument_raises_one_line(options, call, message, own_errors):
    with pytest.raises(ValueError, match=message) as error:
        jax.eval_shape(lambda: MultiHeadAttention(**({"num_heads": 4} | options)).init(jax.random.key(0), X, **call))
    assert "\n" not in str(error.value)


def test_cross_attention_to_same_array_equals_attention_to_a_copy():
    module, positions = MultiHeadAttention(4, mask=Causal()), np.arange(6) + 2
    apply = functools.partial(module.apply, parameters(module, X), X, positions=positions)
    np.testing.assert_array_equal(apply(X), apply(X.copy()))


FULL = list(relatives.MODULES.values())


def test_tokens_after_a_cache_without_a_mask_attend_to_all_keys():
    module = MultiHeadAttention(num_heads=4)
    params = parameters(module, X)
    _, cache = module.apply(params, X[:, :4], cache=EMPTY)
    out, _ = module.apply(params, X[:, 4:], cache=cache)
    np.testing.assert_allclose(out, module.apply(params, X)[:, 4:], atol=1e-6)


@pytest.mark.parametrize("module", [slow(module) if module in FULL[1::2] else module for module in FULL])
def test_full_cache_attends_to_newest_positions_for_any_chunk_size(module):
    x, windowed = np.random.default_rng(0).standard_normal((2, 12, 8)).astype(np.float32), SlidingWindow(7)
    params, apply = parameters(module, x), jax.jit(module.apply)
    expected = jax.jit(module.clone(mask=windowed).apply)(params, x)
    for pieces in ((6, 6), (8, 4), (4, 8), (8, 1, 1, 1, 1)):
        outs, cache = [], module.init_cache(2, 8, 8)
        for piece in np.split(x, np.cumsum(pieces)[:-1], axis=1):
            out, cache = apply(params, piece, cache=cache)
            outs.append(out)
        np.testing.assert_allclose(np.concatenate(outs, axis=1), expected, atol=5e-6)  # float32 sums in another order
    assert sorted(jax.jit(type(cache).positions)(cache).tolist()[0]) == list(range(4, 12))
    module.apply(params, x[:, :1], cache=cache)  # outside of jit, where lengths have values


@pytest.mark.parametrize(
    "module", [MultiHeadAttention(4, kv_heads=2, rotary=100.0, sinks=True), slow(relatives.MODULES["gates"])]
)
def test_multihead_backends_have_the_same_gradients(float64, module):
    x = np.random.default_rng(0).standard_normal((2, 100, 8))
    mask = Padding(np.array([70, 100])) & Causal()
    params = jax.tree.map(np.float64, parameters(module, x))

    def gradient(impl, params):
        return jax.grad(lambda params: (module.clone(impl=impl).apply(params, x, mask=mask) ** 2).sum())(params)

    tiled, dense = jax.jit(lambda params: [gradient(impl, params) for impl in ("blockwise", "dense")])(params)
    # Each side rounds about a hundred sums, as in `assert_near` of tests/ops/cases.py.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-10), tiled, dense)
    trained = jax.tree.leaves([dense["params"].get(name, []) for name in ("sinks", "forget", "gate")])
    assert trained and all(np.abs(leaf).max() > 1e-3 for leaf in trained)


def test_multihead_with_positions_is_equivariant_to_token_order():
    layer = MultiHeadAttention(2, mask=Causal(), rotary=100.0, score_mod=ALiBi(np.array([0.5, 0.25], np.float32)))
    x = np.random.default_rng(0).standard_normal((2, 6, 8)).astype(np.float32)
    order, params = np.array([3, 0, 5, 1, 4, 2]), parameters(layer, x)

    @jax.jit
    def run(params):
        return layer.apply(params, x)[:, order], layer.apply(params, x[:, order], positions=order)

    # Float32 sums of 8 terms in another order.
    np.testing.assert_allclose(*run(params), atol=1e-5)
