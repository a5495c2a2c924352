"""Each law of a layer notices a fault that the others do not; tests/nn/test_layers.py applies them to all layers."""

import jax.numpy as jnp
import pytest

from attnlab.nn import CausalConv, sharding
from attnlab.testing import check_layer
from attnlab.testing.layer import LAWS


class Convolution(CausalConv):
    """A convolution whose outputs, or call, `fault` changes."""

    kernel_size: int = 3
    fault: object = None

    def mix(self, x, before, tokens):
        return self.fault(x, tokens, lambda tokens: super(Convolution, self).mix(x, before, tokens))


def clipped(x, tokens, mix):
    """All outputs are smaller where one token is large."""
    out, *rest = mix(tokens)
    largest = jnp.abs(x).max(axis=1, keepdims=True, initial=0)
    return out / jnp.maximum(1, largest / 4 if tokens.lengths is None else 0), *rest


def forgetful(x, tokens, mix):
    out, state, conv = mix(tokens)
    return out, state, jnp.zeros_like(conv) if tokens.lengths is None else conv


def leaking(x, tokens, mix):
    """Documents read those before them."""
    return mix(tokens._replace(segments=None))


def padding_kept(x, tokens, mix):
    return mix(tokens._replace(lengths=None))


def root(x, tokens, mix):
    """The norm of an input of 0 has no derivative."""
    out, *rest = mix(tokens)
    return out + jnp.linalg.norm(x, axis=-1, keepdims=True), *rest


def narrower(x, tokens, mix):
    """Outputs, here eighths, that have not the type of the inputs."""
    out, *rest = mix(tokens)
    return (jnp.round(8 * out) / 8).astype(jnp.float16), *rest


def averaged(x, tokens, mix):
    """As one that expects its outputs to be summed over devices."""
    out, *rest = mix(tokens)
    return out / sharding.shards("batch", x), *rest


def failing(x, tokens, mix):
    if tokens.segments is not None:
        raise NotImplementedError("documents")
    return mix(tokens)


def narrow(x, tokens, mix):
    out, *rest = mix(tokens)
    return out[..., :7], *rest


CAUSAL, IN_PIECES, PACKED, PADDED, GRADIENTS, STACKED, SHARDED = LAWS


FAULTS = {
    clipped: CAUSAL,
    forgetful: IN_PIECES,
    leaking: PACKED,
    padding_kept: PADDED,
    root: GRADIENTS,
    narrower: STACKED,
    averaged: SHARDED,
    failing: f"{PACKED} (NotImplementedError: documents)",
    narrow: "its outputs have shape [2, 24, 7], expected [2, 24, 8], as its inputs",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_of_a_layer_is_found_by_its_law_alone(fault):
    layer = Convolution(fault=fault)
    (found,) = check_layer(layer, lambda batch: layer.init_cache(batch, 8), features=8)
    assert found.startswith(FAULTS[fault])
