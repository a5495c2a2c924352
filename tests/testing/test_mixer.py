"""The check of a mixer without a specification finds each fault; tests/nn/test_layers.py applies it to all layers."""

import re

import jax.numpy as jnp
import pytest

from attnlab.nn import CausalConv
from attnlab.testing import check_mixer


class Later(CausalConv):
    """Uses the mean of all tokens."""

    def mix(self, x, before, tokens):
        out, state, conv = super().mix(x, before, tokens)
        return out + x.mean(axis=1, keepdims=True), state, conv


class Forgetful(CausalConv):
    """Its cache is empty after each piece."""

    def mix(self, x, before, tokens):
        out, state, conv = super().mix(x, before, tokens)
        return out, state, jnp.zeros_like(conv)


class Leaking(CausalConv):
    """Documents see those before them."""

    def mix(self, x, before, tokens):
        return super().mix(x, before, tokens._replace(segments=None))


class Infinite(CausalConv):
    """The norm of an input of 0 has no derivative."""

    def mix(self, x, before, tokens):
        out, state, conv = super().mix(x, before, tokens)
        return out + jnp.linalg.norm(x, axis=-1, keepdims=True), state, conv


class Failing(CausalConv):
    """Takes no documents."""

    def mix(self, x, before, tokens):
        if tokens.segments is not None:
            raise NotImplementedError("documents")
        return super().mix(x, before, tokens)


class Narrow(CausalConv):
    """Has other features than its inputs."""

    def mix(self, x, before, tokens):
        out, state, conv = super().mix(x, before, tokens)
        return out[..., :7], state, conv


def faults(layer):
    return check_mixer(layer, lambda batch: layer.empty_cache(batch, 8), features=8)


@pytest.mark.parametrize(
    "layer, fault",
    [
        (Later(kernel_size=3), "it is not causal"),
        (Forgetful(kernel_size=3), "in pieces, with a cache"),
        (Leaking(kernel_size=3), "packed documents"),
        (Infinite(kernel_size=3), "its gradients are not finite"),
        (Narrow(kernel_size=3), r"its outputs have shape \[2, 24, 7\], expected \[2, 24, 8\], as its inputs"),
        (Failing(kernel_size=3), r"packed documents .*\(NotImplementedError: documents\)"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_planted_fault_of_a_mixer_is_found(layer, fault):
    found = faults(layer)
    assert found and re.match(fault, found[-1] if "not finite" in fault else found[0])
