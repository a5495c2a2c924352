"""Blockwise attention against dense, in all types, under all transforms, and its memory."""

import dataclasses
import functools
import itertools
import re
from typing import ClassVar

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import attnlab
from attnlab.masks import BlockSparse, Causal, Dense, Mask, MaskFn, Padding, Segments, SlidingWindow
from attnlab.score_mods import ALiBi, RelativeBias, ScoreFn, ScoreMod, SoftCap, alibi_slopes
from tests.ops import cases

ALL = [cases.draw(seed) for seed in range(320)]
# Chosen to use each feature, and with few exceptions each pair of features that any case uses.
QUICK = {11, 12, 13, 16, 17, 19, 20, 27, 35, 37, 54, 71, 80, 84}


def test_quick_cases_use_every_feature():
    quick, every = (set().union(*(case.features() for case in some)) for some in ([ALL[n] for n in QUICK], ALL))
    assert quick == every


def mark(case):
    """The quick cases run always, a fortieth of the others with the slow tests, all with the campaigns."""
    if case.seed in QUICK:
        return ()
    return (pytest.mark.slow,) if case.seed % 40 == 0 else (pytest.mark.campaign,)


@pytest.mark.parametrize("case", [pytest.param(case, marks=mark(case), id=str(case)) for case in ALL])
def test_blockwise_matches_dense_on_random_cases(float64, case):
    expected = cases.results(case.arrays, case.run, "dense", jnp.float64)
    given = cases.results(case.arrays, case.run, "blockwise", jnp.float64)
    for name, x in expected.items():
        # Both round each of some hundred sums; 1e-11 is 5e4 units in the last place of the largest element.
        np.testing.assert_allclose(
            given[name], x, rtol=1e-11, atol=1e-11 * np.abs(x).max(initial=0, where=np.isfinite(x)), err_msg=name
        )
    # And float32 stays within 1e-5 of the largest element, some 80 units in its last place.
    given = cases.results(case.arrays, case.run, "blockwise", jnp.float32)
    for name, x in expected.items():
        largest = np.abs(x).max(initial=0, where=np.isfinite(x))
        np.testing.assert_allclose(given[name], x, rtol=1e-5, atol=1e-5 * max(largest, 1), err_msg=name)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("block_sizes", [(32, 32), (48, 20)])
def test_half_precision_errs_at_most_twice_as_much_as_dense(dtype, block_sizes):
    """Both round the weights to the input type; only blockwise rounds the scores' gradients to it as well."""
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 130, 4, 32), "k": (2, 130, 2, 32), "v": (2, 130, 2, 24), "bias": (1, 4, 130, 130), "sinks": (4,)}
    arrays = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}
    arrays = {name: np.asarray(x, np.float64) for name, x in arrays.items()}  # exact in either type

    def run(arrays, impl):
        return attnlab.attention(
            arrays["q"],
            arrays["k"],
            arrays["v"],
            Causal(),
            SoftCap(20.0),
            arrays["bias"],
            sinks=arrays["sinks"],
            impl=impl,
            block_sizes=block_sizes if impl == "blockwise" else None,
            return_lse=True,
        )

    with jax.enable_x64(True):
        exact = cases.results(arrays, run, "dense", jnp.float64)
    dense, tiled = (cases.results(arrays, run, impl, dtype) for impl in ("dense", "blockwise"))
    for name, x in exact.items():
        assert np.linalg.norm(tiled[name] - x) <= 2 * np.linalg.norm(dense[name] - x), name


def sample(*shape, heads=2, dim=8, dtype=jnp.float32, seed=0):
    return jax.random.normal(jax.random.key(seed), (3, *shape, heads, dim), dtype)


blockwise = functools.partial(attnlab.attention, impl="blockwise", block_sizes=(8, 6))


@pytest.mark.parametrize(
    "mask",
    [Padding(2), Padding(jnp.array(2)), Dense(jnp.arange(40)[None] < jnp.full((40, 1), 2)), Causal() & Padding(2)],
)
def test_nan_in_masked_keys_is_inert(mask):
    q, k, v = sample(40)
    run = jax.value_and_grad(lambda q, k, v: (blockwise(q, k, v, mask=mask) ** 2).sum(), argnums=(0, 1, 2))
    clean = run(q, k, v)
    poisoned = run(q, k.at[2:].set(jnp.nan), v.at[2:].set(jnp.inf))
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)


def test_nan_in_a_visible_key_propagates():
    q, k, v = sample(40)
    assert jnp.isnan(blockwise(q, k.at[20].set(jnp.nan), v, mask=Causal())[20:]).all()


@pytest.mark.parametrize("mask", [Padding(jnp.array(0)), MaskFn(lambda b, h, i, j: i % 3 > 0)])
def test_fully_masked_row_has_zero_output_and_gradient(mask):
    q, k, v = sample(40)
    masked = ~mask.dense(40, 40).any(axis=1)

    def total(q, k, v):
        out, lse = blockwise(q, k, v, mask=mask, return_lse=True)
        return out.sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)

    gradients, (out, lse) = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v)
    assert (out[masked] == 0).all() and jnp.isneginf(lse[masked]).all() and jnp.isfinite(lse[~masked]).all()
    assert (gradients[0][masked] == 0).all() and all(jnp.isfinite(g).all() for g in gradients)


def test_lse_gradient_of_a_fully_masked_row_is_zero():
    q, k, v = sample(40)
    gradient = jax.grad(lambda q: jnp.exp(blockwise(q, k, v, mask=Padding(0), return_lse=True)[1]).sum())(q)
    assert (gradient == 0).all()


def test_bias_of_minus_infinity_masks_keys():
    q, k, v = sample(40)
    bias = jnp.where(jnp.tri(40, dtype=bool), 0, -jnp.inf)
    np.testing.assert_allclose(blockwise(q, k, v, bias=bias), blockwise(q, k, v, mask=Causal()), rtol=1e-5, atol=1e-6)


def test_masked_nan_leaves_mod_gradients_finite():
    q, k, v = sample(40)
    k, v = k.at[15:].set(jnp.nan), v.at[15:].set(jnp.nan)

    def total(weight, cap):
        mods = (ScoreFn(lambda s, b, h, i, j, weight: s * weight[h], weight), SoftCap(cap))
        return (blockwise(q, k, v, Padding(15), mods) ** 2).sum()

    assert all(jnp.isfinite(g).all() for g in jax.grad(total, (0, 1))(jnp.ones(2), jnp.array(3.0)))


@pytest.mark.parametrize("fn", [lambda s, b, h, i, j: s / (40 - j), lambda s, b, h, i, j: s / (1 + j)])
def test_score_mods_get_existing_positions_only(fn):
    """The padding of the last tile must not have position 40, where the first function is infinite."""
    q, k, v = sample(40)

    def gradient(attend):
        return jax.grad(lambda k: (attend(q, k, v, score_mod=ScoreFn(fn)) ** 2).sum())(k)

    expected = gradient(functools.partial(attnlab.attention, impl="dense"))
    np.testing.assert_allclose(gradient(blockwise), expected, rtol=1e-4, atol=1e-4)


def test_sink_of_minus_infinity_has_no_effect():
    q, k, v = sample(40)
    out, lse = blockwise(q, k, v, Padding(0), sinks=jnp.array([-jnp.inf, 0.0]), return_lse=True)
    assert (out == 0).all() and jnp.isneginf(lse[:, 0]).all() and (lse[:, 1] == 0).all()


@dataclasses.dataclass(frozen=True)
class Kept(Mask):
    """A user's mask, which defines `visible` alone: the keys that an array selects."""

    keep: jax.Array

    def visible(self, tile):
        return tile.of_keys(self.keep)


@dataclasses.dataclass(frozen=True)
class ByKey(ScoreMod):
    """A user's score mod: a number for each key, by index."""

    number: jax.Array

    def apply(self, scores, tile):
        return scores + tile.of_keys(self.number)


def test_user_defined_mask_and_mod_match_dense():
    q, k, v = sample(45)
    keep, number = jnp.asarray(np.random.default_rng(0).random(45) < 0.5), jnp.arange(45.0) / 9

    def results(attend):
        def total(number):
            out = attend(q, k, v, Kept(keep) & Causal(), ByKey(number))
            return (out**2).sum(), out

        return jax.grad(total, has_aux=True)(number)

    expected = results(functools.partial(attnlab.attention, impl="dense"))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), results(blockwise), expected)


# Transforms

TERMS = {"bias": (2, 20, 20), "sinks": (2,), "slopes": (2,), "cap": ()}


def with_everything(impl):
    def run(q, k, v, ids, key, terms):
        return attnlab.attention(
            q,
            k,
            v,
            mask=Causal() & Segments(ids),
            score_mod=(ALiBi(terms["slopes"]), SoftCap(terms["cap"])),
            bias=terms["bias"],
            sinks=terms["sinks"],
            dropout_rate=0.3,
            dropout_key=key,
            impl=impl,
            block_sizes=(8, 6) if impl == "blockwise" else None,
        )

    return run


def everything(*lead):
    q, k, v = sample(*lead, 20, dtype=jnp.float64)
    rng = np.random.default_rng(0)
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (*lead, 20)), axis=-1))
    keys = jax.random.split(jax.random.key(1), lead)
    terms = {name: jnp.asarray(np.abs(rng.normal(size=shape)) + 1) for name, shape in TERMS.items()}
    return q, k, v, ids, keys, terms


def agree(make, *arguments):
    expected = jax.jit(make("dense"))(*arguments)
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)
    jax.tree.map(compare, make("blockwise")(*arguments), expected)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "remat"])
@pytest.mark.parametrize("outer", ["grad of vmap", "vmap of grad"])
def test_vmap_and_grad_nest_in_any_order(float64, wrap, outer):
    arguments = everything(2, 3)
    axes = (0, 0, 0, 0, 0, None)

    def gradient(f):
        return jax.grad(lambda q, k, v, ids, key, terms: (f(q, k, v, ids, key, terms) ** 2).sum(), (0, 1, 2, 5))

    def make(impl):
        f = with_everything(impl)
        if outer == "grad of vmap":
            return gradient(wrap(jax.vmap(jax.vmap(f, axes), axes)))
        return wrap(jax.vmap(jax.vmap(gradient(f), axes), axes))

    agree(make, *arguments)


def test_vmap_over_terms_alone_matches_dense(float64):
    q, k, v, ids, key, terms = everything()
    many = jax.tree.map(lambda x: jnp.stack([x, x + 1, x + 2]), terms)

    def make(impl):
        f = with_everything(impl)
        return jax.vmap(jax.grad(lambda terms: (f(q, k, v, ids, key, terms) ** 2).sum()))

    agree(make, many)


def test_gradient_through_scan_matches_dense(float64):
    q, k, v, ids, key, terms = everything()

    def make(impl):
        def layers(q):
            step = lambda x, scale: (x + with_everything(impl)(x * scale, k, v, ids, key, terms), None)  # noqa: E731
            return jax.lax.scan(step, q, jnp.array([0.5, 1.0, 2.0]))[0].sum()

        return jax.grad(layers)

    agree(make, q)


def test_functions_may_close_over_traced_arrays(float64):
    q, k, v = sample(20, dtype=jnp.float64)

    def make(impl):
        @jax.jit
        def total(weight, shift):
            mod = ScoreFn(lambda s, b, h, i, j: s + weight[h] * jnp.sin(i - j))
            mask = MaskFn(lambda b, h, i, j: (i - j) % shift == 0)
            sizes = (8, 6) if impl == "blockwise" else None
            return (attnlab.attention(q, k, v, mask, mod, impl=impl, block_sizes=sizes) ** 2).sum()

        return jax.grad(total)

    agree(make, jnp.array([0.5, 2.0]), 3)


def mesh_of_four():
    return jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def attend_on_mesh(q, k, v, sinks, ids):
    return blockwise(
        q, k, v, mask=Causal() & Segments(ids), sinks=sinks, score_mod=RelativeBias(jnp.ones((q.shape[-2], 5)))
    )


def mesh_arguments():
    q, k, v = sample(2, 20, heads=4)
    ids = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (2, 20)), axis=-1))
    return q, k, v, jnp.arange(4.0), ids


SPECS = (*(P("data", None, "tensor"),) * 3, P("tensor"), P("data"))


def test_shard_map_matches_unsharded_call():
    sharded = jax.shard_map(attend_on_mesh, mesh=mesh_of_four(), in_specs=SPECS, out_specs=SPECS[0])
    arguments = mesh_arguments()
    one, other = (
        jax.jit(jax.value_and_grad(lambda *x, f=f: (f(*x) ** 2).sum(), argnums=(0, 1, 2, 3)))(*arguments)
        for f in (attend_on_mesh, sharded)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), one, other)


def test_sharded_batch_and_heads_need_no_all_gather():
    mesh, arguments = mesh_of_four(), mesh_arguments()
    run = jax.jit(jax.value_and_grad(lambda *x: (attend_on_mesh(*x) ** 2).sum(), argnums=(0, 1, 2, 3)))
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arguments, SPECS)]
    compiled = run.lower(*placed).compile()
    assert not re.findall("all-gather|all-to-all|collective-permute", compiled.as_text())
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), compiled(*placed), run(*arguments)
    )


@pytest.mark.parametrize(
    "derive",
    [
        lambda f, x: jax.jvp(f, (x,), (x,)),
        lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
        lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
        lambda f, x: jax.jit(jax.vmap(lambda x: jax.jvp(f, (x,), (x,))))(x[None]),
        lambda f, x: jax.jacfwd(f)(x),
        lambda f, x: jax.hessian(f)(x),
        lambda f, x: jax.grad(lambda x: jax.grad(f)(x).sum())(x),
        lambda f, x: jax.grad(lambda x: jax.grad(jax.jit(f))(x).sum())(x),
    ],
    ids=[
        "jvp",
        "jvp in jit",
        "jvp of jit",
        "vmap of jvp in jit",
        "jacfwd",
        "hessian",
        "grad of grad",
        "grad of grad of jit",
    ],
)
def test_forward_mode_and_second_order_raise_one_line(derive):
    q, k, v = sample(20)
    with pytest.raises(ValueError, match="reverse mode only: .* use impl='dense'") as error:
        derive(lambda q: blockwise(q, k, v, mask=Causal()).sum(), q)
    assert "\n" not in str(error.value)


# Annotations, which are checked in the tests alone, have no symbolic sizes: hence `own_errors`.
MASKS = [None, SlidingWindow(5), Causal() & Padding(7), MaskFn(lambda b, h, i, j: i + b >= j)]


@pytest.mark.parametrize("impl", ["dense", "blockwise"])
def test_export_with_symbolic_batch_matches_direct_call(own_errors, impl):
    sizes = (8, 6) if impl == "blockwise" else None

    @jax.jit
    def run(x):
        return [attnlab.attention(x, x, x, mask, impl=impl, block_sizes=sizes) for mask in MASKS]

    x = sample(20)
    (batch,) = jax.export.symbolic_shape("batch")
    exported = jax.export.export(run)(jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype))
    for size in (1, 3):
        jax.tree.map(np.testing.assert_array_equal, exported.call(x[:size]), run(x[:size]))


def test_export_chooses_block_sizes_for_a_symbolic_batch(own_errors):
    (batch,) = jax.export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, 300, 2, 8), jnp.float32)
    run = jax.jit(lambda x: attnlab.attention(x, x, x, SlidingWindow(5), impl="blockwise"))
    assert jax.export.export(run)(x).out_avals[0].shape == x.shape


def test_exported_module_with_symbolic_batch_matches_direct_call(own_errors):
    module = attnlab.nn.MultiHeadAttention(num_heads=2, mask=Causal() & SlidingWindow(5))
    x = sample(12, heads=1)[:, :, 0]
    params = module.init(jax.random.key(0), x)
    run = jax.jit(lambda x: module.apply(params, x))
    (batch,) = jax.export.symbolic_shape("batch")
    exported = jax.export.export(run)(jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype))
    np.testing.assert_array_equal(exported.call(x[:2]), run(x[:2]))


# Skipped tiles


@dataclasses.dataclass(frozen=True)
class Counting(ScoreMod):
    """Leaves scores as they are and counts the tiles that are computed."""

    counted: ClassVar[list] = []

    def apply(self, scores, tile):
        jax.debug.callback(lambda: self.counted.append(1))
        return scores


def tiles_computed(attend, *arguments):
    """(forward, backward)."""
    counts = []
    for run in (attend, jax.grad(lambda *x: attend(*x).sum())):
        Counting.counted.clear()
        jax.block_until_ready(jax.jit(run)(*arguments))
        jax.effects_barrier()
        counts.append(len(Counting.counted))
    return counts[0], counts[1] - counts[0]


DOCUMENTS = jnp.arange(512) // 64


@pytest.mark.parametrize(
    "mask, expected",
    [
        (None, 64),
        (Causal(), 36),
        (SlidingWindow(left=64), 15),
        (BlockSparse(jnp.eye(8, dtype=bool), size=64), 8),
        (MaskFn(lambda b, h, i, j: i // 64 == j // 64), 8),
        (Padding(128), 16),
        (Padding(jnp.array(0)), 0),
    ],
)
def test_empty_tiles_are_skipped(mask, expected):
    q, k, v = sample(512, heads=1)

    def attend(q, mask):
        return attnlab.attention(q, k, v, mask, Counting(), impl="blockwise", block_sizes=(64, 64))

    assert tiles_computed(lambda q: attend(q, mask), q) == (expected, expected)
    if jax.tree.leaves(mask):  # traced, the block mask is computed by the running program
        assert tiles_computed(attend, q, mask) == (expected, expected)


def test_empty_tiles_are_skipped_under_vmap():
    q, k, v = sample(3, 512, heads=1)

    def attend(q, k, v, ids):
        mask = Causal() & Segments(ids)
        return attnlab.attention(q, k, v, mask, Counting(), impl="blockwise", block_sizes=(64, 64))

    ids = jnp.stack([DOCUMENTS, DOCUMENTS // 2, DOCUMENTS])
    assert tiles_computed(jax.vmap(attend), q, k, v, ids) == (12, 12)
    assert tiles_computed(jax.vmap(attend, in_axes=(0, 0, 0, None)), q, k, v, DOCUMENTS) == (8, 8)
    assert tiles_computed(jax.vmap(jax.vmap(attend)), q[None], k[None], v[None], ids[None]) == (12, 12)


# Memory


def temporaries(length, **terms):
    """Bytes of temporary arrays of forward and backward."""
    x = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def total(q, k, v, ids):
        out = attnlab.attention(q, k, v, mask=Causal() & Segments(ids), impl="blockwise", **terms)
        return (out**2).sum()

    return (
        jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(x, x, x, ids).compile().memory_analysis().temp_size_in_bytes
    )


def test_memory_is_linear_in_the_length():
    terms = {
        "score_mod": (ALiBi(alibi_slopes(8)), SoftCap(30.0)),
        "dropout_rate": 0.1,
        "dropout_key": jax.random.key(0),
    }
    lengths = (1024, 4096, 16384)
    sizes = [temporaries(length, **terms) for length in lengths]
    # Besides the arrays there is the visit order, a few bytes for each 256 × 256 scores.
    orders = [16 * (length // 256) ** 2 for length in lengths]
    for (shorter, _), (longer, order) in itertools.pairwise(zip(sizes, orders)):
        assert longer <= 4 * shorter + order


def test_memory_is_a_twentieth_of_jax_nn():
    x = jax.ShapeDtypeStruct((1, 8192, 8, 64), jnp.float32)
    total = jax.grad(lambda q, k, v: (jax.nn.dot_product_attention(q, k, v, is_causal=True) ** 2).sum(), (0, 1, 2))
    theirs = jax.jit(total).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes
    assert temporaries(8192) <= theirs / 20
