"""The linear recurrence over four devices: batch and heads, and sequences that `context_parallel` splits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import attnlab
from attnlab import linear_recurrence
from tests.ops.cases import slow
from tests.ops.recurrence import cases

LENGTH = 40
members = pytest.mark.parametrize(
    ("decay", "erasure", "impl"),
    [
        *(("head", "beta", "chunked"), ("feature", "pair", "parallel")),
        *(slow("feature", "pair", "chunked"), slow("head", "none", "parallel")),
    ],
)


def mesh_of(data=1, tensor=1, context=1, kind=AxisType.Auto):
    return jax.make_mesh((data, tensor, context), ("data", "tensor", "context"), axis_types=(kind,) * 3)


def draw(decay, erasure):
    """Segments that cross devices or begin at a device's first token; full, partial and zero lengths."""
    drawn = cases.draw(7, cases.Shape(4, LENGTH, (4, 2, 2), decay=decay, erasure=erasure))
    ids = np.zeros((4, LENGTH), int)
    ids[0, 20:], ids[1, 13:], ids[1, 33:] = 1, 1, 2
    return drawn | {"segment_ids": ids, "lengths": np.array([LENGTH, 27, 0, LENGTH])}


def specs(drawn, batch="data", length=None, heads=None):
    """The partition of each array: `[B, T, H, …]`, states `[B, H, K, V]`, ids `[B, T]`, lengths `[B]`."""
    special = {"state": P(batch, heads), "segment_ids": P(batch, length), "lengths": P(batch)}
    return {name: special.get(name, jax.tree.map(lambda _: P(batch, length, heads), x)) for name, x in drawn.items()}


def placed(drawn, mesh, spec):
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), drawn, spec)


run = jax.jit(functools.partial(cases.results, chunk_size=8), static_argnames="impl")


def close(actual, expected):
    # Sums in another order, of terms near 1.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-11), actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@members
def test_batch_and_heads_on_a_mesh_equal_one_device(float64, kind, decay, erasure, impl):
    drawn, mesh = draw(decay, erasure), mesh_of(data=2, tensor=2, kind=kind)
    arrays = placed(drawn, mesh, specs(drawn, heads="tensor"))
    with jax.set_mesh(mesh):
        sharded = run(arrays, impl=impl)
    assert tuple(sharded["out"].sharding.spec)[:3] == ("data", None, "tensor")
    close(sharded, run(drawn, impl=impl))


@pytest.mark.parametrize("kind, shape", [(AxisType.Explicit, (1, 1, 4)), slow(AxisType.Auto, (2, 1, 2))])
@members
def test_sequence_over_devices_equals_one_device(float64, kind, shape, decay, erasure, impl):
    drawn, mesh = draw(decay, erasure), mesh_of(*shape, kind=kind)
    arrays = placed(drawn, mesh, specs(drawn, length="context"))
    with jax.set_mesh(mesh), attnlab.context_parallel("context"):
        sharded = run(arrays, impl=impl)
    assert tuple(sharded["out"].sharding.spec)[1] == "context"
    close(sharded, run(drawn, impl=impl))


@members
def test_sharded_sequence_in_shard_map_equals_one_device(float64, decay, erasure, impl):
    drawn, mesh = draw(decay, erasure), mesh_of(tensor=2, context=2)
    spec = specs(drawn, length="context", heads="tensor")
    out_specs = (P("data", "context", "tensor"), P("data", "tensor"))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec,), out_specs=out_specs, check_vma=False)
    def shard(drawn):
        with attnlab.context_parallel("context", batch="data", heads="tensor"):
            return linear_recurrence(**drawn, return_state=True, chunk_size=8, impl=impl)

    split = functools.partial(cases.results, function=lambda return_state, **drawn: shard(drawn))
    close(jax.jit(split)(drawn), run(drawn, impl=impl))


def test_split_sequence_names_devices_and_rejects_unsplittable_calls(own_errors):
    arrays = cases.floating(draw("head", "beta"))
    options = {"segment_ids": np.zeros((4, LENGTH), int), "return_state": "segments"}
    with jax.set_mesh(mesh_of(context=4)), attnlab.context_parallel("context"):
        explained = attnlab.explain(**arrays, operator=linear_recurrence)
        assert "over 4 devices of 'context'" in str(explained) and "context_parallel cannot split" in str(explained)
        for change, message in (
            ({"impl": "recurrent"}, "context_parallel cannot split"),
            (options, "needs whole sequences"),
        ):
            with pytest.raises(ValueError, match=message):
                jax.eval_shape(functools.partial(linear_recurrence, **change), **arrays)
        short = jax.tree.map(lambda x: x[:, :39] if jnp.ndim(x) and x.shape[1] == LENGTH else x, arrays)
        with pytest.raises(ValueError, match="39 queries cannot be split over the 4 devices"):
            jax.eval_shape(linear_recurrence, **short)
