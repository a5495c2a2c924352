"""Forget and output gates of multi-head attention; mixers/test_papers.py compares them with their formulas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab
from attnlab.masks import Causal, SlidingWindow
from attnlab.nn import GPT, KVCache, MultiHeadAttention, sharding
from attnlab.score_mods import Forget
from attnlab.training.optimizer import decayed
from tests.nn import relatives
from tests.nn.mixers.papers import sigmoid
from tests.ops.references import naive
from tests.parameters import parameters

rng = np.random.default_rng(0)
X = rng.standard_normal((2, 7, 8)).astype(np.float32)
MODULE = relatives.MODULES["gates"]
PARAMS = parameters(MODULE, X)
APPLY = jax.jit(MODULE.apply)
EMPTY = KVCache.empty(batch=2, capacity=8, kv_heads=2, head_dim=2, forget_heads=4)


# Outputs are sums of about ten numbers of size 1: 1e-6 is 17 units of float32's rounding.
near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6)


def test_gate_that_forgets_everything_keeps_later_outputs_accurate():
    x, params = X.copy(), jax.tree.map(np.array, PARAMS)
    x[..., 0] = np.arange(7) == 2
    params["params"]["forget"]["kernel"][0] = -1e9
    near(APPLY(params, x), np.stack([relatives.gates(np.float64(row), relatives.by_path(params)) for row in x]))


def test_gate_parameters_have_shapes_and_initial_values_of_the_papers():
    params = PARAMS["params"]
    assert params["forget"]["kernel"].shape == (8, 4)
    assert params["gate"]["kernel"].shape == (8, 4, 2)
    initial = jax.jit(lambda key: MODULE.init(key, X)["params"]["forget"]["bias"])(jax.random.key(0))
    np.testing.assert_array_equal(initial, np.zeros(4))
    is_decayed = decayed(params)
    assert is_decayed["forget"] == is_decayed["gate"] == {"kernel": True, "bias": False}
    plain = MultiHeadAttention(4, use_bias=False, forget_gate=True, output_gate=True)
    shapes = jax.eval_shape(plain.init, jax.random.key(0), X)["params"]
    assert [name for name, leaves in shapes.items() if "bias" in leaves] == ["forget"]


def test_rolling_cache_equals_window_and_keeps_sums_small():
    """Beyond the capacity, sums count from the newest position, so that they do not grow with the text."""
    x, cache = np.tile(X, (1, 4, 1)), EMPTY
    expected = jax.jit(MODULE.apply)(PARAMS, x, mask=SlidingWindow(7))
    for t in range(28):
        out, cache = APPLY(PARAMS, x[:, t : t + 1], cache=cache)
        near(out[:, 0], expected[:, t])
    steps = -np.log(sigmoid(x @ PARAMS["params"]["forget"]["kernel"] + PARAMS["params"]["forget"]["bias"]))
    assert np.abs(cache.forget).max() <= 8 * steps.max()


def test_cache_after_discarded_tokens_continues_from_the_newest_kept():
    _, cache = APPLY(PARAMS, X, cache=EMPTY)
    kept, alone = np.array([2, 4]), X.copy()
    for row, length in enumerate(kept):
        alone[row, length : length + 2] = X[row, :2]
    out, _ = APPLY(PARAMS, X[:, :2], cache=cache._replace(length=jnp.asarray(kept)))
    near(out, np.take_along_axis(np.asarray(APPLY(PARAMS, alone)), (kept[:, None] + np.arange(2))[..., None], axis=1))


def test_sums_are_float32_in_a_bfloat16_module():
    module = MODULE.clone(dtype=jnp.bfloat16)
    cache = KVCache.empty(2, 8, 2, 2, jnp.bfloat16, forget_heads=4)
    out, cache = jax.eval_shape(module.apply, PARAMS, X.astype(jnp.bfloat16), cache=cache)
    assert out.dtype == cache.key.dtype == jnp.bfloat16 and cache.forget.dtype == jnp.float32


def test_forget_layers_have_no_rotary_positions():
    config = GPT.of(layers="forget", forget={"kv_heads": 2}).config
    assert config.position_encoding == "none" and config.layers[0].make(config).rotary is None


def test_axes_of_gates_are_named_by_heads():
    assert sharding.parameter_names("block/attention/forget/kernel", 2) == (None, "heads")
    assert sharding.parameter_names("block/attention/gate/kernel", 3) == ("embed", "heads", None)


def test_forget_equals_naive_forgetting_attention_of_fla():
    torch = pytest.importorskip("torch", reason="torch is not installed")

    shapes = {"q": (2, 30, 4, 8), "k": (2, 30, 2, 8), "v": (2, 30, 2, 8)}
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes.values())
    log_gates = np.log(sigmoid(rng.standard_normal((2, 30, 4)))).astype(np.float32)
    expected = naive("forgetting_attn").naive_forgetting_attn(*map(torch.tensor, (q, k, v, log_gates)))
    out = attnlab.attention(q, k, v, Causal(), Forget(jnp.cumsum(log_gates, axis=1)))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
