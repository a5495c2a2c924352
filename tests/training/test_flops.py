import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from attnlab import attention
from attnlab.masks import Causal, MaskFn, SlidingWindow
from attnlab.nn import GPT, MultiHeadAttention, register
from attnlab.nn.config import KINDS
from attnlab.ops import counting
from attnlab.training import flops

SIZES = {"vocab_size": 96, "num_layers": 2, "num_heads": 4, "width": 128, "context": 64, "positions": "learned"}
SMALL = {"vocab_size": 10, "num_layers": 2, "num_heads": 4, "width": 16, "context": 16}


def model_of(impl="dense", window=None, kv_heads=None, **fields):
    return GPT.of(**SIZES | fields, attention={"impl": impl, "window": window, "kv_heads": kv_heads})


@pytest.mark.parametrize("options", [{"kv_heads": 2, "mlp_ratio": 1.5, "mlp": "gated"}, {"mlp_ratio": 0.0}], ids=str)
def test_flops_per_token_match_xla_count(options):
    """XLA counts every key of dense attention, and elementwise operations besides matrix products."""
    model = model_of(**options)
    tokens = jax.ShapeDtypeStruct((8, 64), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss(params, tokens):
        return model.apply(params, tokens).sum()

    # Tokens are an argument: XLA would fold constants, and not count operations that depend only on them.
    counted = jax.jit(jax.grad(loss)).lower(params, tokens).compile().cost_analysis()["flops"] / tokens.size
    keys_not_counted = 64 - (64 + 1) / 2
    formula = flops.per_token(model, 64) + 12 * 2 * 128 * keys_not_counted
    assert formula <= counted <= 1.15 * formula


def test_flops_per_token_count_keys_within_the_window():
    visible = [sum(min(i + 1, 5) for i in range(64)) / 64, sum(i + 1 for i in range(64)) / 64]
    windowed, full = (flops.per_token(model_of(window=window), 64) for window in (5, None))
    assert full - windowed == pytest.approx(12 * 2 * 128 * (visible[1] - visible[0]))


# FLOPs per layer of decoding the seventh token, besides those of weights, with four heads of 4 features.
OF_CACHES = {
    "attention": 4 * 7 * 4 * 4,
    "differential": 2 * 7 * 4 * (4 + 8),
    "stick_breaking": 4 * 7 * 4 * 4,
    "gla": 4 * 4 * 2 * 4,
    "gated_delta": 8 * 4 * 4 * 4,
    "gru": 0,
}


@pytest.mark.parametrize("kind", OF_CACHES)
def test_decoded_token_costs_two_flops_per_weight_plus_its_cache(kind):
    model = GPT.of(**SMALL, layers=kind)
    params = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 2), np.int32))["params"]
    leaves = jax.tree_util.tree_leaves_with_path(params)
    weights = sum(leaf.size for path, leaf in leaves if path[-1].key == "kernel" and "conv" not in path[-2].key)
    assert flops.per_decoded_token(model, 7) == 2 * (weights + 10 * 16) + 2 * OF_CACHES[kind]


class EightTimes(MultiHeadAttention):
    def attend(self, q, k, v, terms, context):
        results = [super(EightTimes, self).attend(q, k, v, terms, context) for _ in range(8)]
        return sum(z for z, _ in results), results[0][1]


@pytest.mark.parametrize("impl", ["dense", "blockwise"])
def test_user_layer_that_attends_eight_times_costs_eight_times(impl):
    once, auto = (model_of(each, num_layers=1, context=300) for each in (impl, "auto"))
    assert flops.per_token(once, 300) == flops.per_token(auto, 300)
    layer = KINDS[register(EightTimes)](impl=impl)
    eight = flops.per_token(once.replace(layers=(layer,)), 300)
    assert eight - flops.per_token(once, 300) == pytest.approx(7 * 12 * 128 * (300 + 1) / 2)


def test_loops_branches_convolutions_and_calls_in_vmap_are_counted():
    x, kernel = jnp.ones((2, 9, 4)), jnp.ones((3, 2, 6))
    product = 2 * 4 * 4 * 4
    square = jnp.ones((4, 4))
    assert counting.operations(lambda y: lax.scan(lambda c, _: (c @ c, None), y, None, 5)[0], square) == 5 * product
    assert counting.operations(lambda y: lax.cond(y[0, 0] > 0, lambda: y @ y, lambda: y), square) == product
    convolve = functools.partial(lax.conv_general_dilated, window_strides=(1,), padding="SAME", feature_group_count=2)
    layout = ("NWC", "WIO", "NWC")
    assert counting.operations(lambda x: convolve(x, kernel, dimension_numbers=layout), x) == 2 * 2 * 9 * 6 * 3 * 2
    attend = jax.vmap(lambda q: attention(q, q, q, mask=SlidingWindow(left=1)))
    assert counting.operations(attend, jnp.ones((3, 9, 2, 4))) == 3 * 2 * (2 * 9 - 1) * 4 * 4

    def by_data(q, ids):
        return attention(q, q, q, mask=MaskFn(lambda b, h, i, j: ids[i] == ids[j]) & Causal())

    assert counting.operations(by_data, jnp.ones((9, 2, 4)), jnp.arange(9)) == 2 * 45 * 4 * 4
    with pytest.warns(UserWarning, match="while loop is counted as one iteration"):
        assert (
            counting.operations(lambda y: lax.while_loop(lambda y: y[0, 0] < 9, lambda y: y @ y, y), square) == product
        )


def test_peak_flops_are_plausible():
    assert all(1e8 < flops.peak(precision) < 1e16 for precision in ("bfloat16", "tf32"))


def test_decoded_token_costs_its_weights_and_its_visible_keys():
    """Two layers, one with a window of 3; four heads of 4 features, two key heads; 16 positions."""
    local, keys = {"window": 3}, {"kv_heads": 2}
    model = GPT.of(**SMALL, layers="local attention", local=local | keys, attention=keys)
    weights = 2 * (16 * 4 * (2 * 4 + 2 * 2) + 2 * 4 * 16 * 16) + 10 * 16
    assert flops.per_decoded_token(model, 16) == 2 * weights + 4 * 4 * 4 * (3 + 16)
    assert flops.per_decoded_token(model, 2) == 2 * weights + 4 * 4 * 4 * (2 + 2)
