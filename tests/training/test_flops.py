import jax
import jax.numpy as jnp
import pytest

from attnlab.nn import GPT
from attnlab.training import flops

MODEL = GPT(vocab_size=96, num_layers=2, num_heads=4, width=128, context=64, positions="learned", impl="dense")


@pytest.mark.parametrize("options", [{"kv_heads": 2, "mlp_ratio": 1.5, "mlp": "gated"}, {"mlp_ratio": 0}], ids=str)
def test_flops_per_token_match_xla_count(options):
    """XLA counts every key of dense attention, and elementwise operations besides matrix products."""
    model = MODEL.clone(**options)
    tokens = jax.ShapeDtypeStruct((8, 64), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss(params, tokens):
        return model.apply(params, tokens).sum()

    # The tokens are an argument: XLA would fold constants, and not count what depends on them alone.
    counted = jax.jit(jax.grad(loss)).lower(params, tokens).compile().cost_analysis()["flops"] / tokens.size
    keys_not_counted = 64 - (64 + 1) / 2
    formula = flops.per_token(model, 64) + 12 * model.num_layers * model.width * keys_not_counted
    assert formula <= counted <= 1.15 * formula


def test_flops_per_token_count_keys_within_the_window():
    visible = [sum(min(i + 1, 5) for i in range(64)) / 64, sum(i + 1 for i in range(64)) / 64]
    windowed, full = flops.per_token(MODEL.clone(window=5), 64), flops.per_token(MODEL, 64)
    assert full - windowed == pytest.approx(12 * 2 * 128 * (visible[1] - visible[0]))


def test_peak_flops_are_plausible():
    assert 1e8 < flops.peak("bfloat16") < 1e16


def test_decoded_token_costs_its_weights_and_its_visible_keys():
    """Two layers, one with a window of 3; four heads of 4 features, two of keys; 16 positions."""
    model = GPT(10, 2, 4, 16, 16, kv_heads=2, window=3, pattern="local global")
    weights = 2 * (16 * 4 * (2 * 4 + 2 * 2) + 2 * 4 * 16 * 16) + 10 * 16
    assert flops.per_decoded_token(model, 16) == 2 * weights + 4 * 4 * 4 * (3 + 16)
    assert flops.per_decoded_token(model, 2) == 2 * weights + 4 * 4 * 4 * (2 + 2)
