"""Attention on meshes whose axes are Explicit, the default of `jax.make_mesh`, or Auto."""

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import attnlab
from attnlab.masks import Causal, Segments
from attnlab.score_mods import RelativeBias
from tests.ops.cases import slow

BATCH_AND_HEADS = (*(P("data", None, "tensor", None),) * 3, P("tensor"), P("data"))
KEYS = (P("data", None, None, None), *(P("data", "tensor", None, None),) * 2, P(None), P("data"))


def arguments():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 20, heads, 8)).astype(np.float32) for heads in (4, 2, 2))  # grouped heads
    return q, k, v, np.arange(4, dtype=np.float32), np.sort(rng.integers(0, 3, (2, 20)), axis=-1)


def gradients(impl):
    def total(q, k, v, sinks, ids):
        mask, mod = Causal() & Segments(ids), RelativeBias(np.ones((4, 5), np.float32))
        sizes = (8, 6) if impl == "blockwise" else None
        out, lse = attnlab.attention(q, k, v, mask, mod, sinks=sinks, impl=impl, block_sizes=sizes, return_lse=True)
        return (out**2).sum() + lse.sum(), (out, lse)

    return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3), has_aux=True))


@pytest.mark.parametrize(
    "impl, specs, kind",
    [
        ("blockwise", BATCH_AND_HEADS, AxisType.Explicit),
        ("dense", KEYS, AxisType.Explicit),
        slow("blockwise", BATCH_AND_HEADS, AxisType.Auto),
        slow("dense", BATCH_AND_HEADS, AxisType.Explicit),
        slow("blockwise", KEYS, AxisType.Explicit),
    ],
)
def test_call_on_a_mesh_equals_the_call_on_one_device(impl, specs, kind):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind,) * 2)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arguments(), specs)]
    run = gradients(impl)
    compiled = run.lower(*placed).compile()
    (_, (out, lse)), slopes = compiled(*placed)
    if kind == AxisType.Explicit:
        assert [x.sharding.spec for x in (out, lse)] == [specs[0], P(*specs[0][:-1])]
        assert [x.sharding.spec for x in slopes] == list(specs[:-1])
    if specs is BATCH_AND_HEADS:
        assert not re.findall("all-gather|all-to-all|collective-permute", compiled.as_text())
    # Sums in another order: 20 keys, and gradients near 10.
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(compare, ((out, lse), slopes), (run(*arguments())[0][1], run(*arguments())[1]))


def test_weights_on_explicit_axes_keep_batch_and_heads():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    q, k = arguments()[:2]
    placed = [jax.device_put(x, NamedSharding(mesh, BATCH_AND_HEADS[0])) for x in (q, k)]
    run = jax.jit(lambda q, k: attnlab.attention_weights(q, k, Causal()))
    weights = run(*placed)
    assert weights.sharding.spec == P("data", "tensor", None, None)
    np.testing.assert_allclose(weights, run(q, k), rtol=1e-6, atol=1e-6)
