"""The operator on every backend, forward and backward, compiled for every generation of TPU and for H100s."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import attnlab
from attnlab.masks import BlockSparse, Causal, MaskFn, Padding, PrefixLM, Segments, SlidingWindow
from attnlab.score_mods import ALiBi, Forget, ScoreFn, SoftCap, alibi_slopes

GENERATIONS = ("v4", "v5e", "v5p", "v6e", "tpu7x", "h100")
KERNELS = {"tpu": "splash", "gpu": "fmha"}
MOVES = ("all-gather", "all-to-all", "collective-permute")  # a gradient of shared arrays may be summed


def inputs(mesh, length, spec=None, batch=2, heads=(4, 2, 2), head_dim=128):
    """Shapes of q, k and v, which every device has whole unless `spec` splits them."""
    sharding = NamedSharding(mesh, P() if spec is None else spec)
    return tuple(jax.ShapeDtypeStruct((batch, length, n, head_dim), jnp.bfloat16, sharding=sharding) for n in heads)


def gradients(**options):
    def total(q, k, v):
        return attnlab.attention(q, k, v, **options).astype(jnp.float32).sum()

    return jax.grad(total, argnums=(0, 1, 2))


def mesh_of(topology, shape=(1, 1), names=("data", "tensor"), kind=AxisType.Auto):
    devices = np.array(topology.devices[: shape[0] * shape[1]], dtype=object).reshape(shape)
    return Mesh(devices, names, axis_types=(kind,) * 2)


# Batch size and length whose memory is compared with twice the length; arrays within a v5e's VMEM do not count.
LINEAR = {("v5e", "auto"): (16, 8192), ("v5e", "blockwise"): (2, 4096), ("h100", "auto"): (16, 8192)}


@pytest.mark.parametrize(
    "name, impl",
    [*((name, "auto") for name in GENERATIONS), ("v5e", "blockwise"), ("h100", "blockwise"), ("v5e", "dense")],
)
def test_every_backend_compiles_forward_and_backward_in_linear_memory(name, impl, topology, compiled):
    chip, is_compared, sizes = topology(name), (name, impl) in LINEAR, []
    batch, shorter = LINEAR.get((name, impl), (2, 256 if impl == "dense" else 1024))
    tiles = (256, 256) if impl == "blockwise" and not is_compared else None
    for length in (shorter, 2 * shorter)[: 1 + is_compared]:
        arrays = inputs(mesh_of(chip), length, batch=batch)
        text, program = compiled(gradients(mask=Causal(), impl=impl, block_sizes=tiles), *arrays)
        sizes.append(program.temporaries)
        assert any(KERNELS[chip.platform] in kernel for kernel in program.kernels) == (impl == "auto")
        assert impl != "blockwise" or not program.kernels
        assert impl == "dense" or not re.search(rf"\[(\d+,)*{length},{length}\]", text)  # no array of all scores
    assert not is_compared or 0 < sizes[1] <= 2.1 * sizes[0]


TERMS = {
    "window": {"mask": SlidingWindow(left=100)},
    "padding and alibi": {"mask": Causal() & Padding(700), "score_mod": ALiBi(alibi_slopes(4))},
    "soft cap and sinks": {"mask": Causal(), "score_mod": SoftCap(30.0), "sinks": jnp.arange(4.0)},
    "dropout": {"mask": Causal(), "dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
}


@pytest.mark.parametrize("name, terms", [*(("v5e", terms) for terms in TERMS), ("h100", "window")])
def test_masks_score_mods_sinks_and_dropout_compile(name, terms, topology, compiled):
    chip = topology(name)
    specs = inputs(mesh_of(chip), 1024)
    _, program = compiled(gradients(**TERMS[terms]), *specs)
    arrays = (jnp.zeros(x.shape, x.dtype) for x in specs)
    expected = attnlab.explain(*arrays, platform=chip.platform, **TERMS[terms])
    assert bool(program.kernels) == (expected.backend in ("splash", "cudnn"))


@pytest.mark.parametrize("name, kind", [("v5e:2x2", AxisType.Explicit), ("h100:4", AxisType.Auto)])
def test_kernels_in_user_jit_keep_batch_and_heads_sharded(name, kind, topology, compiled):
    mesh = mesh_of(topology(name), (2, 2), kind=kind)
    _, program = compiled(gradients(mask=Causal()), *inputs(mesh, 256, P("data", None, "tensor")))
    assert program.kernels and not set(program.collectives) & set(MOVES)


@pytest.mark.parametrize(
    "name, manual", [("v5e:2x2", {"data"}), ("h100:4", {"data", "tensor"})], ids=["one axis", "all axes"]
)
def test_kernels_in_shard_map_run_on_their_shards(name, manual, topology, compiled):
    mesh, spec = mesh_of(topology(name), (2, 2)), P("data", None, "tensor" if "tensor" in manual else None)
    inner = functools.partial(attnlab.attention, mask=Causal())
    call = jax.shard_map(inner, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, axis_names=manual, check_vma=False)

    def total(q, k, v):
        return call(q, k, v).astype(jnp.float32).sum()

    _, program = compiled(jax.grad(total, argnums=(0, 1, 2)), *inputs(mesh, 256, P("data", None, "tensor")))
    assert program.kernels and not set(program.collectives) & set(MOVES)


def test_checked_shard_map_on_tpus_uses_blockwise(topology, compiled):
    mesh = mesh_of(topology("v5e:2x2"), (2, 2))
    attend = functools.partial(attnlab.attention, mask=Causal())
    call = jax.shard_map(attend, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    _, program = compiled(call, *inputs(mesh, 256, P("data")))
    assert not program.kernels


def test_segments_and_sinks_are_sharded_with_their_call(topology, compiled):
    mesh = mesh_of(topology("v5e:2x2"), (2, 2))

    def total(q, k, v, ids, sinks):
        mask = Causal() & Segments(ids)
        return attnlab.attention(q, k, v, mask, sinks=sinks).astype(jnp.float32).sum()

    ids = jax.ShapeDtypeStruct((2, 256), jnp.int32, sharding=NamedSharding(mesh, P("data")))
    sinks = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=NamedSharding(mesh, P("tensor")))
    arrays = inputs(mesh, 256, P("data", None, "tensor"))
    _, program = compiled(jax.grad(total, argnums=(0, 1, 2)), *arrays, ids, sinks)
    assert program.kernels and not set(program.collectives) & set(MOVES)


def cudnn_calls(text):
    """(mask type, operand types) of cuDNN's calls in an HLO text."""
    calls = [line for line in text.splitlines() if "custom_call_target=" in line and "fmha" in line]
    for call in calls:
        operands = call.split("operand_layout_constraints={")[1].split("api_version")[0]
        yield re.search(r'"mask_type": ?"(\w*)"', call)[1], re.findall(r"\w+\[[\d,]*\]", operands)


@pytest.mark.parametrize("name, batch", [("h100", 2), ("h100:4", 1)])
def test_padding_reaches_cudnn_named_on_a_cpu(name, batch, topology, compiled):
    mask = Causal() & Padding(np.array([100, 0]))
    arrays = inputs(mesh_of(topology(name), (2 // batch,) * 2), 256, P("data", None, "tensor"))
    text, program = compiled(gradients(mask=mask, impl="cudnn"), *arrays)
    for mask_type, operands in cudnn_calls(text):
        assert mask_type == "PADDING_CAUSAL" and operands.count(f"s32[{batch}]") == 2  # lengths of queries and of keys
    assert sum(program.kernels.values()) == 2  # forward and backward


def test_gathered_keys_are_gathered_again_for_the_gradient(topology, compiled):
    """The sequence is split over the chips of a slice."""
    mesh = mesh_of(topology("v5p:4x4x8"), (32, 4), ("data", "context"))
    arrays = inputs(mesh, 8192, P("data", "context"), batch=32, heads=(8, 8, 8))
    with attnlab.context_parallel("context"):
        text, _ = compiled(gradients(mask=Causal()), *arrays)
    counts = collections.Counter(re.findall(r"= .*? (all-gather|all-reduce|reduce-scatter)(?:-start)?\(", text))
    # XLA may compile a reduce-scatter as an all-reduce from which each device takes its part.
    assert counts["all-gather"] == 4 and counts["reduce-scatter"] + counts["all-reduce"] == 2, counts


# Masks and score mods for Mosaic's kernels: functions of arrays, and the shapes of these arrays.
LENGTH, HEADS = 1024, 4
MOSAIC_MASKS = {
    "none": (lambda: None, {}),
    "window": (lambda: SlidingWindow(255, 3), {}),
    "documents": (lambda ids: Segments(ids) & Causal(), {"ids": ((2, LENGTH), jnp.int32)}),
    "padding, prefix": (lambda n: Padding(n) & PrefixLM(n), {"n": ((2,), jnp.int32)}),
    "algebra": (lambda: ~Causal() | (SlidingWindow(3) & ~SlidingWindow(0)), {}),
    "blocks": (
        lambda blocks: BlockSparse(blocks, 128) & Causal(),
        {"blocks": ((2, 1, LENGTH // 128, LENGTH // 128), jnp.bool_)},
    ),
    "function": (
        lambda every, ids: MaskFn(lambda b, h, i, j, n, x: ~((i - j) % n[h] != 0) | (x[b, i] == x[b, j]), every, ids),
        {"every": ((HEADS,), jnp.int32), "ids": ((2, LENGTH), jnp.int32)},
    ),
}
MOSAIC_MODS = {
    "none": (lambda: None, {}),
    "alibi, soft cap": (lambda slopes: (ALiBi(slopes), SoftCap(30.0)), {"slopes": ((HEADS,), jnp.float32)}),
    "soft cap of an array": (SoftCap, {"cap": ((), jnp.float32)}),
    "forget": (Forget, {"queries": ((2, LENGTH, HEADS), jnp.float32)}),
    "function": (
        lambda x, y: ScoreFn(lambda s, b, h, i, j, x, y: jnp.tanh(s) * x[j] - y[h] * jnp.where(i > j, 1.0, 0.5), x, y),
        {"x": ((LENGTH,), jnp.float32), "y": ((HEADS,), jnp.float32)},
    ),
}


def through_mosaic(mask, mod, has_sinks=False):
    """The gradients by q, k, v and the mod's arrays, and the shapes of the mod's and of the mask's arrays."""
    (make_mask, mask_shapes), (make_mod, mod_shapes) = MOSAIC_MASKS[mask], MOSAIC_MODS[mod]

    def total(q, k, v, learned, fixed):
        sinks = learned.pop("sinks", None)
        terms = {"mask": make_mask(**fixed), "score_mod": make_mod(**learned), "sinks": sinks}
        return attnlab.attention(q, k, v, impl="mosaic", **terms).astype(jnp.float32).sum()

    mod_shapes = mod_shapes | ({"sinks": ((HEADS,), jnp.float32)} if has_sinks else {})
    return jax.grad(total, argnums=(0, 1, 2, 3)), mod_shapes, mask_shapes


def placed(mesh, shapes):
    """Shapes with their axes of examples and heads sharded like q's."""
    sharded = {}
    for name, (shape, dtype) in shapes.items():
        spec = [{2: "data", HEADS: "tensor"}.get(n) for n in shape]
        sharded[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))
    return sharded


@pytest.mark.parametrize(
    "mask, mod, size",
    [
        ("none", "soft cap of an array", 128),
        ("window", "alibi, soft cap", 64),
        ("documents", "forget", 128),
        ("padding, prefix", "soft cap of an array", 64),
        ("algebra", "none", 128),
        ("blocks", "alibi, soft cap", 128),
        ("function", "function", 64),
        ("function", "function", 128),
    ],
)
def test_mosaic_compiles_masks_and_score_mods_forward_and_backward(mask, mod, size, topology, compiled):
    """Compilation fails if a kernel needs more than the 232,448 bytes of shared memory of a block."""
    function, *shapes = through_mosaic(mask, mod, has_sinks=size == 64)
    mesh = mesh_of(topology("h100"))
    arrays = inputs(mesh, LENGTH, heads=(HEADS, 2, 2), head_dim=size)
    assert_mosaic(*compiled(function, *arrays, *(placed(mesh, x) for x in shapes)))


def assert_mosaic(text, program):
    assert sum(count for name, count in program.custom_calls.items() if "mosaic" in name) == 3, program.custom_calls
    assert not re.search(rf"\[(\d+,)*{LENGTH},{LENGTH}\]", text)  # no array of all scores


@pytest.mark.parametrize("mask, mod", [("documents", "forget"), ("blocks", "alibi, soft cap")])
@pytest.mark.parametrize("is_manual", [False, True], ids=["in a user's jit", "within shard_map"])
def test_mosaic_on_a_mesh_keeps_batch_and_heads_sharded(mask, mod, is_manual, topology, compiled):
    mesh = mesh_of(topology("h100:4"), (2, 2))
    function, *shapes = through_mosaic(mask, mod, has_sinks=True)
    arrays = (
        *inputs(mesh, LENGTH, P("data", None, "tensor"), heads=(HEADS, 2, 2), head_dim=64),
        *(placed(mesh, x) for x in shapes),
    )
    if is_manual:
        specs = jax.tree.map(lambda x: x.sharding.spec, arrays)
        function = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=specs[:4], check_vma=False)
    text, program = compiled(function, *arrays)
    assert_mosaic(text, program)
    assert not set(program.collectives) & set(MOVES)
