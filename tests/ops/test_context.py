"""One call over several devices equals the unsplit call: masks, score mods, dropout, gradients."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import attnlab
from attnlab.masks import BlockSparse, Causal, Dense, Mask, MaskFn, Padding, PrefixLM, Segments, SlidingWindow
from attnlab.ops.context import layouts
from attnlab.ops.schedule import CPU
from attnlab.score_mods import ALiBi, Forget, RelativeBias, ScoreFn, ScoreMod, SoftCap, alibi_slopes
from tests.ops import cases
from tests.ops.cases import slow

BATCH, LENGTH, HEADS, DIM = 2, 32, 4, 8
UP_TO_ONE = np.linspace(0, 1, 4 * LENGTH, dtype=np.float32)
rng = np.random.default_rng(0)


def integers(high, *shape):
    return rng.integers(0, high, shape).astype(np.int32)


MASKS = {
    "window": SlidingWindow(3, 1),
    "prefix": PrefixLM(integers(LENGTH, BATCH)),
    "padding": Padding(np.array([LENGTH // 3, LENGTH - 2])),
    "segments": Causal() & Segments(np.sort(integers(3, BATCH, LENGTH))),
    "blocks": BlockSparse(rng.random((BATCH, HEADS, 8, 8)) < 0.5, size=4),
    "dense": Dense(rng.random((BATCH, HEADS, LENGTH, LENGTH)) < 0.5),
    "function": MaskFn(lambda b, h, i, j, by: (i - j + b + h) % by[h] != 0, jnp.array([2, 3, 4, 5])),
}
MODS = {
    "alibi": ALiBi(alibi_slopes(HEADS)),
    "relative": RelativeBias(jnp.asarray(rng.normal(size=(HEADS, 9)), jnp.float32)),
    "cap": SoftCap(2.0),
    "forget": Forget(jnp.asarray(-np.cumsum(rng.random((BATCH, LENGTH, HEADS)), axis=1), jnp.float32)),
    "function": ScoreFn(lambda s, b, h, i, j, x: s + x[j] * (1 + b) - h * i / 100, jnp.asarray(UP_TO_ONE[::4])),
}
TERMS = {f"{name} mask": {"mask": MASKS[name]} for name in ("window", "segments", "blocks")}
TERMS["function mod"] = {"mask": Causal(), "score_mod": MODS["function"]}
TERMS["dropout"] = {"dropout_rate": 0.4, "dropout_key": jax.random.key(1)}
TERMS["sinks"] = {"mask": Causal(), "sinks": np.linspace(-1, 1, HEADS, dtype=np.float32)}
TERMS["everything"] = {
    # For some pairs each mask decides alone.
    "mask": (MASKS["segments"] | MASKS["window"] | MASKS["prefix"])
    & (MASKS["padding"] | MASKS["blocks"])
    & (MASKS["dense"] | MASKS["function"]),
    "score_mod": tuple(MODS.values()),
    **TERMS["dropout"],
    "sinks": TERMS["sinks"]["sinks"],
}


def arrays(dtype=np.float32, kv_heads=2, length=LENGTH):
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((BATCH, length, h, DIM)).astype(dtype) for h in (HEADS, kv_heads, kv_heads))


def gradients(attend):
    """(out, lse) and the gradients of q, k and v."""

    def total(q, k, v):
        out, lse = attend(q, k, v)
        return jnp.sin(out).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)

    return jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))


def attend(q, k, v, **options):
    options = {"impl": "blockwise", "block_sizes": (4, 8), "return_lse": True, **options}
    return attnlab.attention(q, k, v, **options)


def mesh_of(data=1, tensor=1, context=1, kind=AxisType.Auto):
    return jax.make_mesh((data, tensor, context), ("data", "tensor", "context"), axis_types=(kind,) * 3)


def assert_equal(actual, expected):
    # Sums of 32 terms in another order: a few units in the last place of the largest element.
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(compare, actual, expected)


@functools.cache
def unsplit(terms):
    return gradients(functools.partial(attend, **TERMS[terms], impl="dense", block_sizes=None))(*arrays())


# Everything at once; separately, the terms that depend on the example and the head.
BOTH = ["everything", "function mod", "dropout"]
SHAPES = {(1, 2, 2): [*BOTH, "sinks"], (2, 1, 2): ["everything"], (2, 2, 1): ["everything", "blocks mask"]}


@pytest.mark.parametrize(
    "shape, terms",
    [
        (shape, terms) if (shape, terms) == ((1, 2, 2), "everything") else slow(shape, terms)
        for shape, names in SHAPES.items()
        for terms in names
    ],
)
def test_shards_in_shard_map_use_indices_of_the_whole_call(shape, terms):
    mesh, options = mesh_of(*shape), {name: x for name, x in TERMS[terms].items() if name != "sinks"}
    axis, spec = "context" if shape[2] > 1 else None, P("data", "context", "tensor")
    sinks = {name: x for name, x in TERMS[terms].items() if name == "sinks"}

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(spec, spec, spec, P("tensor")), out_specs=(spec, spec), check_vma=False
    )
    def split(q, k, v, sinks):
        with attnlab.context_parallel(axis, batch="data", heads="tensor"):
            return attend(q, k, v, **options, **sinks, impl="dense", block_sizes=None)

    assert_equal(gradients(lambda q, k, v: split(q, k, v, sinks))(*arrays()), unsplit(terms))


def test_positions_bias_and_dropout_key_in_shard_map_equal_whole_call():
    """Positions and bias are sharded, and the key drops the same weights as in the whole call."""
    spec, options = P(None, "context"), {"dropout_rate": 0.4, "dropout_key": jax.random.key(1)}
    positions, bias = np.arange(LENGTH)[::-1] * 2, rng.normal(size=(LENGTH, LENGTH)).astype(np.float32)

    def whole(q, k, v, positions, bias):
        sides = {"q_positions": positions, "kv_positions": positions}
        return attend(q, k, v, mask=SlidingWindow(9), bias=bias, **sides, **options)

    @functools.partial(
        jax.shard_map,
        mesh=mesh_of(context=4),
        in_specs=(spec,) * 3 + (P("context"),) * 2,
        out_specs=(spec, spec),
        check_vma=False,
    )
    def split(*arguments):
        with attnlab.context_parallel("context"):
            return whole(*arguments)

    assert_equal(*(jax.jit(f)(*arrays(), positions, bias) for f in (split, whole)))


@dataclasses.dataclass(frozen=True)
class OfRows(ScoreMod):
    """Adds a number for each query, and subtracts one for each key."""

    rows: jax.Array

    def apply(self, scores, tile):
        return scores + tile.of_queries(self.rows) - tile.of_keys(self.rows)


@dataclasses.dataclass(frozen=True)
class Inner(Mask):
    """A mask that wraps another."""

    mask: Mask

    def visible(self, tile):
        return self.mask.visible(tile)


def test_user_masks_and_mods_index_arrays_of_the_whole_call():
    mask = Causal() & Inner(Segments(np.arange(LENGTH) // 7))
    run = functools.partial(attend, mask=mask, score_mod=OfRows(jnp.asarray(8 * UP_TO_ONE[::4])))
    assert_equal(in_context(run)(*arrays()), jax.jit(run)(*arrays()))


def test_layout_in_shard_map_equals_layout_of_the_whole_call():
    mesh, spec, told = mesh_of(context=4), P(None, "context"), []
    whole = jax.ShapeDtypeStruct((1, 2**18, 8, 64), jnp.bfloat16)

    def tell(q):
        with attnlab.context_parallel("context"):
            told.append(attnlab.explain(q, q, q, Causal()).split)
        return q

    jax.eval_shape(jax.shard_map(tell, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False), whole)
    with jax.set_mesh(mesh):
        jax.eval_shape(tell, whole)
    assert told[0] == told[1] and "zigzag" in told[0]


def test_mask_function_over_traced_arrays_keeps_other_terms_static():
    def told(q, limit):
        mask = Causal() & MaskFn(lambda b, h, i, j: j < limit[h])
        answers.append(attnlab.explain(q, q, q, mask).split)

    answers = []
    with jax.set_mesh(mesh_of(context=4)), attnlab.context_parallel("context"):
        jax.eval_shape(told, jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.float32), np.arange(8))
    assert "zigzag" in answers[0]


@pytest.mark.parametrize(
    "terms, kind",
    [("segments mask", AxisType.Auto), ("window mask", AxisType.Explicit), slow("everything", AxisType.Auto)],
)
def test_split_call_equals_unsplit_call(terms, kind):
    run, mesh = gradients(functools.partial(attend, **TERMS[terms])), mesh_of(data=2, context=2, kind=kind)
    placed = [jax.device_put(x, NamedSharding(mesh, P("data", "context"))) for x in arrays()]
    with jax.set_mesh(mesh), attnlab.context_parallel("context"):
        actual = run(*placed)
    assert actual[1][0].sharding.spec[:2] == ("data", "context")
    assert_equal(actual, unsplit(terms))


def in_context(function, axis="context", **options):
    """Run `function` on a mesh of four devices, within `context_parallel`."""

    def run(*args):
        with jax.set_mesh(mesh_of(context=4)), attnlab.context_parallel(axis, **options):
            return jax.jit(function)(*args)

    return run


def test_split_call_under_vmap_equals_unsplit_call():
    stacked = [np.stack([x, 2 * x]) for x in arrays()]
    run = jax.vmap(lambda q, k, v: attend(q, k, v, mask=Causal()))
    assert_equal(in_context(run)(*stacked), jax.jit(run)(*stacked))


def test_compiled_function_is_traced_again_in_another_context():
    run, mesh = jax.jit(lambda q, k, v: attend(q, k, v)[0]), mesh_of(context=4)
    with jax.set_mesh(mesh):
        before = run.lower(*arrays()).as_text()
        with attnlab.context_parallel("context"):
            within = run.lower(*arrays()).as_text()
        assert "all_gather" in within and run.lower(*arrays()).as_text() == before


def test_explain_reports_the_layout():
    def explained(mask, **options):
        shape, answers = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.bfloat16), []
        with jax.set_mesh(mesh_of(context=4)), attnlab.context_parallel("context"):
            jax.eval_shape(lambda q: answers.append(attnlab.explain(q, q, q, mask, **options)), shape)
        return answers[0]

    zigzag = "over 4 devices, keys gathered, rows in zigzag order: the busiest computes 1.00 times the mean"
    assert str(explained(Causal())).startswith(f"runs blockwise {zigzag}")
    assert explained(None).split == "over 4 devices, keys gathered: the busiest computes 1.00 times the mean"
    backend, rejected = explained(Causal(), platform="tpu")
    assert backend == "blockwise" and "one shard of a call" in rejected["splash"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"axis": "sequence"}, "'sequence', .*'data', 'tensor', 'context'"),
        ({"length": 30}, "30 queries .*4 devices .*'context'"),
        ({"heads": "context"}, "names 'context', 'context'"),
        ({"batch": "data"}, "'data' .*only within a shard_map"),
        ({"way": "ring"}, "no argument 'way': remove it, every device gathers all keys"),
    ],
    ids=str,
)
def test_unsplittable_call_raises_one_line(options, message):
    length, run = options.pop("length", LENGTH), functools.partial(attnlab.attention, mask=Causal())
    with pytest.raises((ValueError, TypeError)) as error:
        in_context(run, **options)(*arrays(length=length))
    assert re.search(message, str(error.value)) and "\n" not in str(error.value)


DOCUMENTS = np.searchsorted(np.sort(np.random.default_rng(0).integers(0, 32768, 12)), np.arange(32768), side="right")


@pytest.mark.parametrize(
    "mask, is_zigzag, imbalance",
    [
        (Causal(), True, 1.01),
        (SlidingWindow(4095), False, 1.08),
        (Causal() & Segments(DOCUMENTS.astype(np.int32)), True, 1.62),
    ],
    ids=["causal", "window", "documents"],
)
def test_rows_are_in_zigzag_order_if_that_balances_work_better(mask, is_zigzag, imbalance):
    layout = layouts.choose(mask, (32768, 32768), 8, costs=CPU)
    assert layout.is_zigzag == is_zigzag and layout.imbalance <= imbalance
    rows = layout.rows(32768)
    visible, _ = mask.tiles(32768, 32768, (512, 512))
    busy = [visible[0, 0, np.unique(device_rows // 512)].sum() for device_rows in rows]
    np.testing.assert_allclose(max(busy) / np.mean(busy), layout.imbalance)
    assert sorted(rows.ravel()) == list(range(32768))


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.slow if seed in (20, 21) else pytest.mark.campaign) for seed in range(60)],
)
def test_random_calls_over_devices_equal_unsplit_calls(float64, seed):
    case = cases.draw(seed, multiple=4)
    expected = cases.results(case.arrays, case.run, "blockwise", jnp.float64)
    with jax.set_mesh(mesh_of(context=4)), attnlab.context_parallel("context"):
        actual = cases.results(case.arrays, case.run, "blockwise", jnp.float64)
    cases.assert_near(actual, expected)
