"""Sequences split over the chips of a TPU slice, compiled for it: what is sent, and what each chip holds."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import attnlab
from attnlab import config as configs
from attnlab.masks import Causal
from attnlab.planning import programs
from attnlab.training import parallel
from attnlab.training.experiment import Experiment

SLICE = "v5p:4x4x8"
COLLECTIVE = re.compile(r"= .*? (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def test_gathered_keys_are_gathered_again_for_the_gradient(topology, compiled):
    devices = np.array(topology(SLICE).devices, dtype=object).reshape(32, 4)
    mesh = Mesh(devices, ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    spec = NamedSharding(mesh, P("data", "context"))
    x = jax.ShapeDtypeStruct((32, 8192, 8, 128), jnp.bfloat16, sharding=spec)

    def total(q, k, v):
        return attnlab.attention(q, k, v, Causal()).astype(jnp.float32).sum()

    with attnlab.context_parallel("context"):
        text, _ = compiled(jax.grad(total, argnums=(0, 1, 2)), x, x, x)
    collectives = collections.Counter(COLLECTIVE.findall(text))
    assert collectives["all-gather"] == 4 and collectives["reduce-scatter"] == 2


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
