"""Each layer law detects a fault that the others miss; tests/nn/test_layers.py applies them to all layers."""

import linecache
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from attnlab.nn import CausalConv, sharding
from attnlab.support.errors import UserError
from attnlab.testing import check_layer
from attnlab.testing.layer import LAWS


class Convolution(CausalConv):
    """A convolution; `fault` changes its outputs or its call."""

    kernel_size: int = 3
    fault: object = None

    def mix(self, x, state, context):
        return self.fault(x, context, lambda context: super(Convolution, self).mix(x, state, context))


def clipped(x, context, mix):
    """One large token shrinks all outputs of its sequence."""
    mixed, largest = mix(context), jnp.abs(x).max(axis=1, keepdims=True, initial=0)
    return mixed._replace(out=mixed.out / jnp.maximum(1, largest / 4 if context.lengths is None else 0))


def forgetful(x, context, mix):
    mixed = mix(context)
    return mixed if context.lengths is not None else mixed._replace(cache=jax.tree.map(jnp.zeros_like, mixed.cache))


def leaking(x, context, mix):
    """Documents read the documents before them."""
    return mix(context._replace(segments=None))


def padding_kept(x, context, mix):
    return mix(context._replace(lengths=None))


def root(x, context, mix):
    """The norm of an input of 0 has no derivative."""
    mixed = mix(context)
    return mixed._replace(out=mixed.out + jnp.linalg.norm(x, axis=-1, keepdims=True))


def narrower(x, context, mix):
    """Outputs, rounded to eighths, have another type than the inputs."""
    mixed = mix(context)
    return mixed._replace(out=(jnp.round(8 * mixed.out) / 8).astype(jnp.float16))


def averaged(x, context, mix):
    """Like a layer that expects its outputs to be summed over devices."""
    mixed = mix(context)
    return mixed._replace(out=mixed.out / sharding.shards("batch", x))


def failing(x, context, mix):
    if context.segments is not None:
        raise NotImplementedError("documents")
    return mix(context)


def split(x, context, mix):
    """A reshape that cannot infer its size without tokens."""
    mixed = mix(context)
    return mixed._replace(out=mixed.out.reshape(*x.shape[:2], 4, -1).reshape(x.shape))


def hidden(x, context, mix):
    """A score that is NaN for later keys, which a mask hides."""
    mixed, places = mix(context), jnp.arange(x.shape[1], dtype=x.dtype)
    score = jnp.log1p(places[:, None] - places) * jnp.nan_to_num(x).sum()
    score = jnp.where(places[:, None] >= places, score, 0)
    return mixed._replace(out=mixed.out + 0 * score.sum(-1)[None, :, None])


def narrow(x, context, mix):
    mixed = mix(context)
    return mixed._replace(out=mixed.out[..., :7])


CAUSAL, IN_PIECES, PACKED, PADDED, GRADIENTS, STACKED, SHARDED, NO_TOKENS = LAWS


FAULTS = {
    clipped: CAUSAL,
    forgetful: IN_PIECES,
    leaking: PACKED,
    padding_kept: PADDED,
    root: GRADIENTS,
    narrower: "a loop over stacked layers raises TypeError: scan body function carry input and carry output must have ",
    averaged: SHARDED,
    failing: f"a call with 24 tokens of packed documents raises NotImplementedError: documents ({__file__}, line ",
    split: "a call with 0 tokens and a cache raises ZeroDivisionError: ",
    hidden: f"{GRADIENTS}: the gradient of the inputs at random inputs; usual causes are ",
    narrow: "its outputs have shape [2, 24, 7], expected [2, 24, 8], like its inputs",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_of_a_layer_is_found_only_by_its_law(fault):
    (message,) = check_layer(Convolution(fault=fault), features=8)
    assert message.startswith(FAULTS[fault])


@pytest.mark.usefixtures("own_errors")
def test_plain_module_is_checked_as_a_layer():
    assert check_layer(nn.Dense(8), features=8) == []

    class Mean(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x.mean(axis=1, keepdims=True) + nn.Dense(8)(x)

    assert check_layer(Mean(), features=8)[0].startswith(CAUSAL)
    with pytest.raises(UserError, match=r"expected an instance, Mean\(…\)"):
        check_layer(Mean, features=8)


def test_layer_that_raises_is_reported_with_its_line():
    class Odd(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x @ jnp.ones((7, 7))

    (message,) = check_layer(Odd(), features=8)
    line = re.fullmatch(rf"init raises TypeError: .* \({re.escape(__file__)}, line (\d+)\)", message)
    assert "jnp.ones((7, 7))" in linecache.getline(__file__, int(line[1]))
