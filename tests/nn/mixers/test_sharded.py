"""A model of each mixer, sharded over four devices along each mesh axis, computes what one device does."""

import functools

import pytest

from tests.training.layouts import LAYOUTS, distance, experiment, gradient

SLOW = ("gated_delta", "delta_product", "mamba2", "rwkv7", "hgrn2", "gru", "differential", "latent", "stick_breaking")
OPTIONS = {"forget": {"forget.conv": 3}, "stick_breaking": {"stick_breaking.conv": 2}}


def gradient_on(layout, layers):
    return gradient(experiment(*LAYOUTS[layout], layers=layers, **OPTIONS.get(layers, {})))


@functools.cache
def on_one_device(layers):
    return gradient_on("one device", layers)


# tests/training/test_parallel.py has the layouts "pmap", "context" and "fsdp and tensor".
CASES = [("mamba2", "tensor"), ("forget", "tensor"), *((layers, "fsdp and context") for layers in SLOW)]


@pytest.mark.parametrize(
    "layers, layout", [("conv", "fsdp and context"), *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)]
)
def test_mixer_on_a_mesh_has_the_gradient_of_one_device(layers, layout):
    # Float32 sums in another order, through two norms: a few dozen units of 6e-8.
    assert distance(gradient_on(layout, layers), on_one_device(layers)) < 5e-6
