"""Models of each mixer on four devices, split along each axis of a mesh, compute what one device does."""

import functools

import pytest

from attnlab.nn.kinds import MIXERS
from tests.training.test_parallel import LAYOUTS, distance, experiment, gradient

CONTEXT = ("context", "fsdp and context")
FAST = {("mamba2", "tensor"), *((mixer, "fsdp and context") for mixer in ("mamba2", "gru", "conv"))}


@functools.cache
def on_one_device(mixer):
    return gradient(experiment(*LAYOUTS["one device"], mixer=mixer))


CASES = [(mixer, layout) for mixer in MIXERS[1:] for layout in ("tensor", "fsdp and tensor", *CONTEXT)]


@pytest.mark.parametrize(
    "mixer, layout", [pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in CASES]
)
def test_mixer_on_a_mesh_has_the_gradient_of_one_device(mixer, layout):
    # Float32 sums in another order, through two norms: some tens of units of 6e-8.
    assert distance(gradient(experiment(*LAYOUTS[layout], mixer=mixer)), on_one_device(mixer)) < 5e-6
