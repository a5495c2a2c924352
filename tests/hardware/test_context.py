"""Sequences split over the chips of a TPU slice, compiled for it: what is sent, and what each chip holds."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import attnlab
from attnlab import config as configs
from attnlab.masks import Causal, SlidingWindow
from attnlab.planning import programs
from attnlab.training import parallel
from attnlab.training.experiment import Experiment

SLICE = "v5p:4x4x8"
COLLECTIVE = re.compile(r"= .*? (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def split(compiled, chips, shape, length, way, **options):
    """HLO text and `Program` of the gradients of a call, its sequence split over the last axis of a mesh."""
    devices = np.array(chips.devices[: int(np.prod(shape))], dtype=object).reshape(shape)
    mesh = Mesh(devices, ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    spec = NamedSharding(mesh, P("data", "context"))
    x = jax.ShapeDtypeStruct((shape[0], length, 8, 128), jnp.bfloat16, sharding=spec)

    def total(q, k, v):
        return attnlab.attention(q, k, v, **options).astype(jnp.float32).sum()

    with attnlab.context_parallel("context", way=way):
        return compiled(jax.grad(total, argnums=(0, 1, 2)), x, x, x)


def collectives(text):
    return collections.Counter(COLLECTIVE.findall(text))


def bytes_sent(text):
    """Bytes that each device sends by collective-permute."""
    sizes = {"bf16": 2, "f32": 4, "s32": 4}
    found = re.findall(r"= \(?(\w+)\[([\d,]+)\]\S* .*?collective-permute(?:-start)?\(", text)
    return sum(sizes[kind] * int(np.prod(list(map(int, shape.split(","))))) for kind, shape in found)


@pytest.mark.parametrize("chips", [4, 8])
def test_ring_sends_four_messages_for_each_other_device(chips, topology, compiled):
    text, program = split(compiled, topology(SLICE), (128 // chips, chips), 2048 * chips, "ring", impl="pallas")
    assert collectives(text) == {"collective-permute": 4 * (chips - 1)}
    assert program.kernels


def test_halo_of_a_window_is_as_large_for_any_number_of_devices(topology, compiled):
    sent = []
    for chips in (4, 8, 16):
        text, _ = split(compiled, topology(SLICE), (128 // chips, chips), 2048 * chips, "halo", mask=SlidingWindow(511))
        assert collectives(text) == {"collective-permute": 4}  # keys and values, and their gradients
        sent.append(bytes_sent(text))
    # 512 rows of k and v in bfloat16, 8 heads of 128, and as many of their gradients.
    assert sent == [4 * 512 * 8 * 128 * 2] * 3


def test_gathered_keys_are_gathered_again_for_the_gradient(topology, compiled):
    text, _ = split(compiled, topology(SLICE), (32, 4), 8192, "gather", mask=Causal(), impl="pallas")
    assert collectives(text)["all-gather"] == 4 and collectives(text)["reduce-scatter"] == 2


def test_memory_of_a_chip_depends_on_its_own_share_of_the_sequence(topology):
    chips, temporaries = topology(SLICE), []
    for devices, length in ((1, 8192), (16, 131_072)):
        config = configs.default()
        config.precision, config.batch_size = "bfloat16", 1
        config.model.update(num_layers=1, num_heads=16, width=2048, context=length)
        on = parallel.make("mesh", 1, context=devices, devices=chips.devices[:devices])
        experiment = Experiment(config, vocab_size=50_304, parallel=on)
        shapes = (experiment.abstract_state, on.abstract_batch(1, length))
        with jax.sharding.use_abstract_mesh(on.mesh.abstract_mesh):
            lowered = experiment.train_step.trace(*shapes).lower(lowering_platforms=("tpu",))
        temporaries.append(programs.read(lowered.compile()).temporaries)
    assert temporaries[1] <= 1.2 * temporaries[0]
