"""Contributions that sum to the logits."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import see
from attnlab.nn import MultiHeadAttention
from attnlab.see.models import adapt
from tests.parameters import parameters
from tests.see import models
from tests.see.models import OTHERS, TOKENS, random, slow


class WithoutNorms(nn.Module):
    """Attention alone on a residual stream, as in Elhage et al. 2021."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(models.VOCABULARY, models.WIDTH)(tokens)
        for layer in range(2):
            x = AttentionOnly(name=f"layer_{layer}")(x)
        return nn.Dense(models.VOCABULARY, use_bias=False)(x)


class AttentionOnly(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + MultiHeadAttention(models.HEADS, name="attention")(x)


class OneBlock(nn.Module):
    """A block on a residual stream, a norm, a layer of logits, and `end` applied to the logits."""

    block: type = AttentionOnly
    norm: type = nn.RMSNorm
    end: Callable = jnp.positive

    @nn.compact
    def __call__(self, tokens):
        x = self.block(name="block")(nn.Embed(models.VOCABULARY, models.WIDTH)(tokens))
        return self.end(nn.Dense(models.VOCABULARY)(self.norm(name="norm")(x)))


def of(logits, tokens):
    """The logits of tokens."""
    return np.take_along_axis(logits, tokens[..., None], -1)[..., 0]


@pytest.mark.parametrize("kind", ["grouped", "flax", slow("hybrid"), slow("rms_norm")])
def test_contributions_sum_to_the_logits(kind):
    model, params = {
        "grouped": lambda: models.gpt(attention={"kv_heads": 2}),
        "flax": lambda: (models.Flax(), models.variables()),
        "hybrid": lambda: models.gpt(num_layers=3, use_bias=True, layers="gated_delta gru attention"),
        "rms_norm": lambda: (OneBlock(), models.variables(OneBlock())),
    }[kind]()
    logits = np.asarray(jax.jit(model.apply)(params, TOKENS))
    parts = see.contributions(model, params, TOKENS, targets=OTHERS)
    scale = max(1, float(np.abs(logits).max()))
    np.testing.assert_allclose(parts.logits / scale, of(logits, OTHERS) / scale, atol=1e-6)
    np.testing.assert_allclose(parts.total / scale, of(logits, OTHERS) / scale, atol=1e-5)
    if kind == "hybrid":
        assert parts.heads.shape == (2, models.HEADS, *TOKENS.shape) and parts.blocks.shape == (3, *TOKENS.shape)


def test_contribution_of_a_head_equals_the_effect_of_its_removal():
    """This holds in the last layer of a model without norms, because nothing comes after the head."""
    model, params = WithoutNorms(), models.variables(WithoutNorms())
    parts = see.contributions(model, params, TOKENS, targets=OTHERS)
    np.testing.assert_allclose(parts.total, parts.logits, atol=1e-5)
    heads = np.arange(models.HEADS)
    edits = [{"layer_1/attention/z": see.Put(0.0, where=heads[:, None] == head)} for head in heads]
    for head, cut in zip(heads, models.edited(model, params, TOKENS, edits=edits)):
        np.testing.assert_allclose(parts.heads[1, head], parts.logits - of(cut.out, OTHERS), atol=2e-5)


class Scaled(nn.Module):
    """A block that scales the outputs of its heads before they enter the stream."""

    @nn.compact
    def __call__(self, x):
        return x + 0.1 * MultiHeadAttention(models.HEADS, name="attention")(nn.LayerNorm()(x))


def test_unsupported_models_are_refused_in_one_line():
    layer, x, nonlinear, scaled = MultiHeadAttention(2), random(2, 7, 16), OneBlock(end=jnp.tanh), OneBlock(Scaled)
    for model, params, inputs, message in (
        (nonlinear, models.variables(nonlinear), TOKENS, "differ from the logits by"),
        (scaled, models.variables(scaled), TOKENS, "blocks from a sum by"),
        (layer, parameters(layer, x), x, "contributions need .*blocks"),
        (models.nnx_model(), None, TOKENS, "contributions .*flax.linen"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            see.contributions(model, params, inputs, targets=OTHERS)
        assert "\n" not in str(error.value)
    parts = jax.jit(lambda params: see.contributions(scaled, params, TOKENS, targets=OTHERS))(models.variables(scaled))
    assert np.isnan(parts.heads).all()  # under jit nothing can be raised


@pytest.mark.slow
def test_contributions_in_bfloat16():
    model, params = models.gpt(dtype=jnp.bfloat16)
    parts = see.contributions(model, params, TOKENS, targets=OTHERS)
    # Streams are rounded to 8 bits after each of five sums.
    np.testing.assert_allclose(parts.total, parts.logits, atol=5 * 2**-8 * np.abs(parts.logits).max())


def test_custom_norms_are_not_taken_for_norms_of_flax():
    class RMSNorm(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)

    model = OneBlock(norm=RMSNorm)
    params = models.variables(model)
    assert adapt(model, params, (TOKENS,), {})[0].sites.norms == ()
    with pytest.raises(ValueError, match="no 'norm/norm'"):
        see.edited(model, params, TOKENS, edits={"norm/norm": see.Put(1.0)})
