"""The Pallas kernels for TPUs: every mask, score mod and bias compiled for every generation, grids, memory, meshes."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import attnlab
from attnlab.masks import BlockSparse, Causal, Dense, MaskFn, Padding, PrefixLM, Segments, SlidingWindow
from attnlab.score_mods import ALiBi, RelativeBias, ScoreFn, SoftCap, alibi_slopes

BATCH, HEADS, KV_HEADS, LENGTH = 2, 4, 2, 1024
MOVES = ("all-gather", "all-to-all", "collective-permute")
RNG = np.random.default_rng(0)
IDS = np.sort(RNG.integers(0, 3, (BATCH, LENGTH)), axis=-1).astype(np.int32)
LENGTHS = np.array([300, 700], np.int32)


class Call(NamedTuple):
    """A call of `attention`.

    Attributes:
      terms: arguments besides q, k, v. Their floating arrays are arguments of the program, and get gradients.
      is_traced: whether all other arrays among the terms are arguments of the program too; else it knows them.
      lengths: Tq and Tk.
      features: D and Dv.
      dtype: of q, k and v.
      block_sizes: of a tile.
      learns_pairs: whether an array of pairs has a gradient.
    """

    terms: dict
    is_traced: bool = False
    lengths: tuple[int, int] = (LENGTH, LENGTH)
    features: tuple[int, int] = (128, 128)
    dtype: jnp.dtype = jnp.bfloat16
    block_sizes: tuple[int, int] | None = None
    learns_pairs: bool = False

    def shapes(self):
        """Shapes of q, k, v."""
        heads = zip((HEADS, KV_HEADS, KV_HEADS), (0, 1, 1), (0, 0, 1))
        return [(BATCH, self.lengths[side], count, self.features[at]) for count, side, at in heads]

    def kernels(self):
        """How often each kernel runs in the gradient."""
        names = ["forward", "dq", "dkv", *(["dpairs"] if self.learns_pairs else [])]
        return {f"attnlab_{name}": 1 for name in names}


def bools(*shape):
    return RNG.random(shape) < 0.4


def wave(s, b, h, i, j, x):
    return s * jnp.cos(i - j) + x[j] + h - b


SMALL_TILES = (128, 128)  # a remainder of integers is long code, and is written out for each register of a tile
MASKS = {
    "none": Call({}),
    "causal": Call({"mask": Causal()}),
    "window": Call({"mask": SlidingWindow(100, 20)}),
    "prefix": Call({"mask": PrefixLM(LENGTHS)}),
    "traced prefix": Call({"mask": PrefixLM(LENGTHS)}, is_traced=True),
    "padding": Call({"mask": Padding(LENGTHS)}),
    "traced padding": Call({"mask": Padding(LENGTHS)}, is_traced=True),
    "segments": Call({"mask": Causal() & Segments(IDS)}),
    "traced segments": Call({"mask": Causal() & Segments(IDS)}, is_traced=True),
    "blocks": Call({"mask": BlockSparse(bools(16, 16), 64)}),
    "dense": Call({"mask": Dense(bools(LENGTH, LENGTH))}, is_traced=True),
    "dense by head": Call({"mask": Dense(bools(BATCH, HEADS, LENGTH, LENGTH))}, is_traced=True),
    "function": Call({"mask": MaskFn(lambda b, h, i, j: (i - j + h + b) % 3 == 0)}, block_sizes=SMALL_TILES),
    "function of arrays": Call(
        {"mask": MaskFn(lambda b, h, i, j, by: (i - j) % by[h] == 0, np.arange(1, HEADS + 1))}, block_sizes=SMALL_TILES
    ),
    "composition": Call({"mask": ~Causal() | SlidingWindow(5)}),
    "choice of masks": Call({"mask": MaskFn(lambda b, h, i, j: jnp.where(h == 0, j <= i, i & 1 == j & 1))}),
}
SCORE_MODS = {
    "alibi": Call({"mask": Causal(), "score_mod": ALiBi(alibi_slopes(HEADS))}),
    "relative": Call({"mask": Causal(), "score_mod": RelativeBias(jnp.ones((HEADS, 33)))}),
    "soft cap": Call({"mask": Causal(), "score_mod": SoftCap(30.0)}),
    "learned soft cap": Call({"score_mod": SoftCap(jnp.float32(30))}),
    "score function": Call({"score_mod": ScoreFn(wave, jnp.ones(LENGTH))}),
    "score function of a table": Call(
        {"score_mod": ScoreFn(lambda s, b, h, i, j, x: s + x[i % 64, j % 64], jnp.ones((64, 64)))}, learns_pairs=True
    ),
    "several": Call(
        {"score_mod": (SoftCap(30.0), ALiBi(alibi_slopes(HEADS)), RelativeBias(jnp.ones((HEADS, 33))))},
    ),
}
OTHERS = {
    "bias": Call({"bias": jnp.ones((BATCH, HEADS, LENGTH, LENGTH))}, learns_pairs=True),
    "bias of all examples": Call({"bias": jnp.ones((LENGTH, LENGTH), jnp.bfloat16)}, learns_pairs=True),
    "bias of keys": Call({"bias": jnp.ones((BATCH, 1, 1, LENGTH))}),
    "sinks and scale": Call({"mask": Causal(), "sinks": jnp.ones(HEADS), "scale": jnp.float32(0.1)}),
    "dropout": Call({"mask": Causal(), "dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, is_traced=True),
    "positions": Call(
        {
            "mask": Causal(),
            "q_positions": 2 * np.arange(LENGTH),
            "kv_positions": 2 * np.arange(LENGTH),
            "score_mod": ALiBi(alibi_slopes(HEADS)),
        }
    ),
    "traced positions": Call(
        {
            "mask": SlidingWindow(100),
            "q_positions": np.tile(np.arange(512, LENGTH), (BATCH, 1)),
            "kv_positions": np.tile(np.arange(LENGTH), (BATCH, 1)),
        },
        is_traced=True,
        lengths=(512, LENGTH),
    ),
    "64 features": Call({"mask": Causal()}, features=(64, 64)),
    "256 features": Call({"mask": Causal()}, features=(256, 256)),
    "fewer features of values": Call({"mask": Causal()}, features=(96, 32)),
    "more features of values": Call({"mask": Causal()}, features=(64, 256)),
    "float32": Call({"mask": Causal()}, dtype=jnp.float32),
    "length 1000": Call({"mask": Causal(), "score_mod": ALiBi(alibi_slopes(HEADS))}, lengths=(1000, 1000)),
    "length 50": Call({"mask": Causal(), "score_mod": RelativeBias(jnp.ones((HEADS, 9)))}, lengths=(50, 50)),
    "length 1": Call({"mask": Causal()}, lengths=(1, 1)),
    "one query": Call({"mask": Padding(LENGTHS)}, lengths=(1, LENGTH)),
}
CALLS = {**MASKS, **SCORE_MODS, **OTHERS}

# All masks, score mods and other arguments in few calls.
JOINED = {
    "causal, segments, padding, alibi, dropout": Call(
        {
            "mask": Causal() & Segments(IDS) & Padding(LENGTHS),
            "score_mod": ALiBi(alibi_slopes(HEADS)),
            "dropout_rate": 0.1,
            "dropout_key": jax.random.key(0),
        },
        is_traced=True,
    ),
    "window, prefix, function, cap, sinks, bias of all examples, 256 features": Call(
        {
            "mask": (~Causal() | SlidingWindow(100, 20)) & PrefixLM(LENGTHS),
            "score_mod": (SoftCap(30.0), ScoreFn(lambda s, b, h, i, j, x: s + x[h] * (i - j), jnp.ones(HEADS))),
            "bias": jnp.ones((LENGTH, LENGTH), jnp.bfloat16),
            "sinks": jnp.ones(HEADS),
        },
        features=(256, 128),
        learns_pairs=True,
    ),
    "blocks, dense, learned cap, function, positions": Call(
        {
            "mask": BlockSparse(bools(16, 16), 64) | Dense(bools(LENGTH, LENGTH)) | Causal(),
            "score_mod": (SoftCap(jnp.float32(30)), ScoreFn(wave, jnp.ones(2 * LENGTH))),
            "q_positions": 2 * np.arange(LENGTH),
            "kv_positions": 2 * np.arange(LENGTH),
        },
        is_traced=True,
        features=(64, 64),
    ),
    "functions, dense by head, biases, float32, length 1000": Call(
        {
            "mask": (
                MaskFn(lambda b, h, i, j: (i + j + h + b) & 1 == 0)
                | MaskFn(lambda b, h, i, j, bits: (i - j) & bits[h] == 0, np.arange(1, HEADS + 1))
            )
            & Dense(bools(BATCH, HEADS, 1000, 1000)),
            "bias": jnp.ones((BATCH, HEADS, 1000, 1000)),
            "score_mod": ALiBi(alibi_slopes(HEADS)),
        },
        is_traced=True,
        lengths=(1000, 1000),
        dtype=jnp.float32,
        block_sizes=SMALL_TILES,
        learns_pairs=True,
    ),
    "relative": CALLS["relative"],
    "no mask, bias of keys": Call({"bias": jnp.ones((BATCH, 1, 1, LENGTH))}),
    "length 50": CALLS["length 50"],
    "length 1": CALLS["length 1"],
    "one query": CALLS["one query"],
}


def mesh_of(topology, shape=(1, 1), kind=AxisType.Auto):
    devices = np.array(topology.devices[: shape[0] * shape[1]], dtype=object).reshape(shape)
    return Mesh(devices, ("data", "tensor"), axis_types=(kind,) * 2)


def inputs(mesh, shapes, dtype=jnp.bfloat16, spec=P()):  # noqa: B008
    return tuple(jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)) for shape in shapes)


def gradient(call: Call, mesh):
    """The gradient of all floating arrays, of the output and of lse, and the shapes of what it takes."""
    leaves, treedef = jax.tree.flatten(call.terms)
    arrays = {at: x for at, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)}
    learned = {at: x for at, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    others = {at: x for at, x in arrays.items() if call.is_traced and at not in learned}

    def total(qkv, learned, others):
        given = dict(enumerate(leaves)) | learned | others
        terms = jax.tree.unflatten(treedef, given.values())
        out, lse = attnlab.attention(*qkv, **terms, impl="pallas", block_sizes=call.block_sizes, return_lse=True)
        return out.astype(jnp.float32).sum() + lse.sum()

    def shaped(x):
        return jax.ShapeDtypeStruct(
            x.shape,
            jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True),
            sharding=NamedSharding(mesh, P()),
        )

    shapes = inputs(mesh, call.shapes(), call.dtype), *jax.tree.map(shaped, (learned, others))
    return jax.grad(total, argnums=(0, 1)), shapes


@pytest.mark.parametrize("name", CALLS)
def test_each_mask_score_mod_and_argument_compiles_with_its_gradient(name, topology, compiled):
    function, shapes = gradient(CALLS[name], mesh_of(topology("v5e")))
    _, program = compiled(function, *shapes)
    assert program.kernels == CALLS[name].kernels()


@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_every_generation_compiles_all_masks_and_score_mods(chip, name, topology, compiled):
    function, shapes = gradient(JOINED[name], mesh_of(topology(chip)))
    _, program = compiled(function, *shapes)
    assert program.kernels == JOINED[name].kernels()


# Grids


def kernels_of(jaxpr):
    """(name, grid) of each Pallas kernel in a jaxpr, those of inner jaxprs included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params["name"], equation.params["grid_mapping"].grid
            continue
        for x in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(x, "eqns"):
                yield from kernels_of(x)


def grids(topology, terms, is_gradient=True, length=512):
    """The grids of the kernels of a call with tiles of 128 × 128, by name."""
    mesh = mesh_of(topology("v5e"))

    def total(q, k, v, terms):
        out = attnlab.attention(q, k, v, **terms, impl="pallas", block_sizes=(128, 128))
        return out.astype(jnp.float32).sum()

    function = jax.grad(total, argnums=(0, 1, 2)) if is_gradient else total
    shapes = inputs(mesh, [(BATCH, length, heads, 128) for heads in (HEADS, KV_HEADS, KV_HEADS)])
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        found = list(kernels_of(jax.jit(functools.partial(function, terms=terms)).trace(*shapes).jaxpr))
    assert len(found) == len(dict(found))
    return dict(found)


def visits(any_visible):
    """How many tiles a kernel visits for the example and the head with most of them; rows without any are visited."""
    return int(np.maximum(any_visible.sum(axis=-1), 1).sum(axis=-1).max())


def expected_grids(mask, length=512):
    """Grids of the kernels, counted in the whole mask."""
    visible = np.asarray(mask.dense(length, length, num_heads=HEADS, batch=(BATCH,)))
    visible = np.broadcast_to(visible, (BATCH, HEADS, length, length))
    visible = np.pad(visible, [(0, 0), (0, 0), (0, -length % 128), (0, -length % 128)])
    count = -(-length // 128)
    tiles = visible.reshape(BATCH, HEADS, count, 128, count, 128).any(axis=(3, 5))
    of_kv_heads = tiles.reshape(BATCH, KV_HEADS, -1, count, count).any(axis=2)
    by_query, by_key = visits(tiles), visits(of_kv_heads.swapaxes(-1, -2))
    return {
        "attnlab_forward": (BATCH, HEADS, by_query),
        "attnlab_dq": (BATCH, HEADS, by_query),
        "attnlab_dkv": (BATCH, KV_HEADS, by_key, HEADS // KV_HEADS),
    }


SPARSE = {
    "causal": Causal(),
    "window": SlidingWindow(100),
    "window to both sides": SlidingWindow(20, 130),
    "prefix by example": PrefixLM(np.array([100, 200])),
    "padding by example": Padding(np.array([100, 300])),
    "all keys masked": Padding(0),
    "documents": Causal() & Segments(np.repeat(np.arange(4), 128)),
    "function with fully masked rows": MaskFn(lambda b, h, i, j: (i >= 200) & (j < i) & (j // 128 != 1)),
    "function by head": MaskFn(lambda b, h, i, j: j // 128 <= h + b),
    "blocks by head": BlockSparse(RNG.random((BATCH, HEADS, 4, 4)) < 0.3, 128),
}


@pytest.mark.parametrize("name", SPARSE)
def test_grids_have_one_step_for_each_tile_with_visible_pairs(name, topology):
    expected = expected_grids(SPARSE[name])
    assert grids(topology, {"mask": SPARSE[name]}) == expected
    forward = {"attnlab_forward": expected["attnlab_forward"]}
    assert grids(topology, {"mask": SPARSE[name]}, is_gradient=False) == forward


def test_grids_of_a_ragged_length_have_a_last_shorter_block(topology):
    assert grids(topology, {"mask": Causal()}, length=400) == expected_grids(Causal(), length=400)


def test_gradient_of_a_bias_goes_along_all_tiles_and_what_shares_them(topology):
    def gradient_of(bias):
        mesh = mesh_of(topology("v5e"))

        def total(bias, q, k, v):
            out = attnlab.attention(q, k, v, Causal(), bias=bias, impl="pallas", block_sizes=(128, 128))
            return out.astype(jnp.float32).sum()

        shapes = inputs(mesh, [bias, *((BATCH, 512, heads, 128) for heads in (HEADS, KV_HEADS, KV_HEADS))])
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return dict(kernels_of(jax.jit(jax.grad(total)).trace(*shapes).jaxpr))["attnlab_dpairs"]

    assert gradient_of((512, 512)) == (1, 1, 16, BATCH, HEADS)
    assert gradient_of((BATCH, 1, 512, 512)) == (BATCH, 1, 16, 1, HEADS)
    assert gradient_of((BATCH, HEADS, 512, 512)) == (BATCH, HEADS, 16, 1, 1)


# Memory


def test_memory_is_linear_in_the_length_and_no_array_has_all_pairs(topology, compiled):
    mesh, sizes, batch = mesh_of(topology("v5e")), [], 16  # what fits a v5e's VMEM is not counted: much more

    def total(q, k, v, slopes):
        out = attnlab.attention(q, k, v, Causal(), score_mod=ALiBi(slopes), impl="pallas")
        return out.astype(jnp.float32).sum()

    for length in (8192, 16384):
        shapes = inputs(mesh, [(batch, length, heads, 128) for heads in (HEADS, KV_HEADS, KV_HEADS)])
        slopes = inputs(mesh, [(HEADS,)], jnp.float32)
        text, program = compiled(jax.grad(total, argnums=(0, 1, 2, 3)), *shapes, *slopes)
        assert program.kernels == CALLS["alibi"].kernels()
        assert not re.search(rf"\[(\d+,)*{length},{length}(,\d+)*\]", text)
        sizes.append(program.temporaries)
    assert 0 < sizes[1] <= 2.1 * sizes[0]


# Meshes


SPLIT, BY_HEAD, BY_EXAMPLE = P("data", None, "tensor"), P("tensor"), P("data")


def sharded_inputs(mesh, of_slopes=BY_HEAD, length=256):
    """q, k, v and segment ids, split over both axes of a mesh, and slopes."""
    arrays = inputs(mesh, [(BATCH, length, heads, 128) for heads in (HEADS, KV_HEADS, KV_HEADS)], spec=SPLIT)
    ids = inputs(mesh, [(BATCH, length)], jnp.int32, BY_EXAMPLE)
    return *arrays, *ids, *inputs(mesh, [(HEADS,)], jnp.float32, of_slopes)


def attend_in_segments(q, k, v, ids, slopes=None):
    score_mod = None if slopes is None else ALiBi(slopes)
    return attnlab.attention(q, k, v, Causal() & Segments(ids), score_mod, impl="pallas")


def total_of(attend):
    return lambda *arrays: attend(*arrays).astype(jnp.float32).sum()


@pytest.mark.parametrize(
    ("kind", "of_slopes"), [(kind, spec) for kind in (AxisType.Auto, AxisType.Explicit) for spec in (BY_HEAD, P())]
)
def test_kernels_in_a_users_jit_keep_ids_and_slopes_split_with_queries(kind, of_slopes, topology, compiled):
    mesh = mesh_of(topology("v5e:2x2"), (2, 2), kind)
    gradient = jax.grad(total_of(attend_in_segments), argnums=(0, 1, 2, 4))
    _, program = compiled(gradient, *sharded_inputs(mesh, of_slopes))
    assert program.kernels == CALLS["alibi"].kernels()
    assert not set(program.collectives) & set(MOVES)


@pytest.mark.parametrize("manual", [{"data", "tensor"}, {"data"}], ids=["all axes", "one axis"])
def test_kernels_within_shard_map_run_on_what_they_are_given(manual, topology, compiled):
    mesh = mesh_of(topology("v5e:2x2"), (2, 2))
    split, by_example, by_head = (
        P(*(axis if axis in manual else None for axis in spec)) for spec in (SPLIT, BY_EXAMPLE, BY_HEAD)
    )
    specs = {"in_specs": (split, split, split, by_example, by_head), "out_specs": split}
    call = jax.shard_map(attend_in_segments, mesh=mesh, axis_names=manual, check_vma=False, **specs)
    _, program = compiled(jax.grad(total_of(call), argnums=(0, 1, 2, 4)), *sharded_inputs(mesh))
    assert program.kernels == CALLS["alibi"].kernels()
    assert not set(program.collectives) & set(MOVES)


def test_kernels_within_checked_shard_map_take_arrays_that_vary_over_fewer_axes(topology, compiled):
    mesh = mesh_of(topology("v5e:2x2"), (2, 2))
    specs = (SPLIT, SPLIT, SPLIT, BY_EXAMPLE, BY_HEAD)
    call = jax.shard_map(attend_in_segments, mesh=mesh, in_specs=specs, out_specs=SPLIT)
    _, program = compiled(jax.grad(total_of(call), argnums=(0, 1, 2, 4)), *sharded_inputs(mesh))
    assert program.kernels == CALLS["alibi"].kernels() and set(program.collectives) <= {"all-reduce"}  # of the slopes


def test_checked_shard_map_over_some_axes_leaves_the_call_to_blockwise(topology, compiled):
    mesh = mesh_of(topology("v5e:2x2"), (2, 2))
    attend = functools.partial(attnlab.attention, mask=Causal())
    call = jax.shard_map(attend, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    *arrays, _, _ = sharded_inputs(mesh)
    _, program = compiled(jax.grad(total_of(call), argnums=(0, 1, 2)), *arrays)
    assert not program.kernels


def test_tables_of_visits_that_scalar_memory_cannot_hold_are_shared_by_examples(topology, compiled):
    mesh = mesh_of(topology("v5e"))
    arrays = inputs(mesh, [(16, 2**15, heads, 128) for heads in (HEADS, KV_HEADS, KV_HEADS)])
    _, program = compiled(total_of(attend_in_segments), *arrays, *inputs(mesh, [(16, 2**15)], jnp.int32))
    assert program.kernels == {"attnlab_forward": 1}


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.save_only_these_names("attention")])
def test_remat_computes_kernels_again_unless_it_keeps_what_attention_returns(policy, topology, compiled):
    mesh = mesh_of(topology("v5e"))

    @functools.partial(jax.checkpoint, policy=policy)
    def attend(q, k, v):
        return jnp.sin(attnlab.attention(jnp.sin(q), k, v, Causal(), impl="pallas"))

    shapes = inputs(mesh, CALLS["causal"].shapes())
    _, program = compiled(jax.value_and_grad(total_of(attend), argnums=(0, 1, 2)), *shapes)
    assert program.kernels["attnlab_forward"] == (2 if policy is None else 1)


# The choice

SPLASH = ("none", "causal", "window", "segments", "traced segments", "soft cap", "sinks and scale", "float32")
SPLASH += tuple(name for name in OTHERS if "features" in name)
SHORT = ("length 50", "length 1", "one query")


@pytest.mark.parametrize("name", CALLS)
def test_auto_takes_splash_on_tpus_where_it_can_else_blockwise(name):
    call = CALLS[name]
    q, k, v = (jnp.zeros(shape, call.dtype) for shape in call.shapes())
    explanation = attnlab.explain(q, k, v, **call.terms, block_sizes=call.block_sizes, platform="tpu")
    expected = "dense" if name in SHORT else "splash" if name in SPLASH else "blockwise"
    assert explanation.backend == expected, str(explanation)
