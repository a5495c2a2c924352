"""A sequence split over the chips of a TPU slice, compiled for it: what is sent."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import attnlab
from attnlab.masks import Causal

COLLECTIVE = re.compile(r"= .*? (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def test_gathered_keys_are_gathered_again_for_the_gradient(topology, compiled):
    devices = np.array(topology("v5p:4x4x8").devices, dtype=object).reshape(32, 4)
    mesh = Mesh(devices, ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((32, 8192, 8, 128), jnp.bfloat16, sharding=NamedSharding(mesh, P("data", "context")))

    def total(q, k, v):
        return attnlab.attention(q, k, v, mask=Causal()).astype(jnp.float32).sum()

    with attnlab.context_parallel("context"):
        text, _ = compiled(jax.grad(total, argnums=(0, 1, 2)), x, x, x)
    found = collections.Counter(COLLECTIVE.findall(text))
    # XLA may compile a reduce-scatter as an all-reduce of which each device takes its part.
    assert found["all-gather"] == 4 and found["reduce-scatter"] + found["all-reduce"] == 2, found
