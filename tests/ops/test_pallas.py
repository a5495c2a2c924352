"""The TPU kernels of our own, emulated: against dense, under all transforms, without races or reads out of bounds."""

import contextlib
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import attnlab
from attnlab.masks import BlockSparse, Causal, Dense, MaskFn, Padding, PrefixLM, Segments, SlidingWindow
from attnlab.score_mods import ALiBi, Forget, RelativeBias, ScoreFn, SoftCap, alibi_slopes
from tests.ops import cases
from tests.ops.cases import slow

ALL = [cases.draw(seed) for seed in range(320)]
QUICK = {83}  # drawn tiles, vectors of distances, sinks, dropout, heads in groups
# Reads out of bounds and races raise; memory is NaN until it is written.
STRICT = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")


@pytest.fixture(autouse=True)
def emulated(request):
    mode = (
        contextlib.nullcontext() if "not_emulated" in request.fixturenames else pltpu.force_tpu_interpret_mode(STRICT)
    )
    with mode:
        yield


@pytest.fixture
def not_emulated():
    """Leaves the kernels to TPUs."""


def mark(case):
    """Some cases run always, some of the others with the slow tests, all with the campaigns."""
    if case.seed in QUICK:
        return ()
    return (pytest.mark.slow,) if case.seed in (16, 17, 20, 27) or case.seed % 40 == 0 else (pytest.mark.campaign,)


@pytest.mark.parametrize("case", [pytest.param(case, marks=mark(case), id=str(case)) for case in ALL])
def test_kernels_match_dense_on_random_cases(case):
    expected = cases.results(case.arrays, case.run, "dense", jnp.float32)
    given = cases.results(case.arrays, case.run, "pallas", jnp.float32)
    for name, x in expected.items():
        # 1e-5 of the largest element is some 80 units in its last place, of sums of some hundred terms.
        largest = np.abs(x).max(initial=0, where=np.isfinite(x))
        np.testing.assert_allclose(given[name], x, rtol=1e-5, atol=1e-5 * max(largest, 1), err_msg=name)


def sample(length=40, kv_length=None, heads=2, dim=8, batch=(), dtype=np.float32):
    """q, k and v."""
    rng, kv_length = np.random.default_rng(0), kv_length or length
    shapes = [(*batch, n, heads, dim) for n in (length, kv_length, kv_length)]
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


kernel = functools.partial(attnlab.attention, impl="pallas", block_sizes=(16, 24))


def with_gradients(attend, **options):
    """A compiled function that returns the gradients of q, k, v, and (out, lse)."""

    def total(q, k, v):
        out, lse = attend(q, k, v, return_lse=True, **options)
        return (out.astype(jnp.float32) ** 2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)

    return jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))


def gradients(attend, *arrays, **options):
    return with_gradients(attend, **options)(*arrays)


def agree(found, expected, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        largest = np.abs(y).max(initial=1, where=np.isfinite(y))
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * largest)  # as above


dense = functools.partial(attnlab.attention, impl="dense")


def test_heads_of_a_group_with_other_tiles_share_the_gradients_of_keys():
    """For each head all tiles are FULL or EMPTY; for the group some are neither."""
    q, k, v = sample(24)
    blocks = np.array([[[1, 0, 0], [1, 1, 0], [0, 1, 0]], [[1, 1, 0], [0, 1, 0], [1, 0, 1]]], bool)
    arrays, options = (q, k[:, :1], v[:, :1]), {"mask": BlockSparse(blocks, 8)}
    attend = functools.partial(kernel, block_sizes=(8, 8))
    agree(gradients(attend, *arrays, **options), gradients(dense, *arrays, **options))


def test_bias_that_examples_and_heads_share_has_the_sum_of_their_gradients():
    arrays, bias = sample(24, batch=(2,)), np.random.default_rng(1).standard_normal((24, 24)).astype(np.float32)

    def gradient(attend):
        return jax.jit(jax.grad(lambda bias: (attend(*arrays, bias=bias) ** 2).sum()))(bias)

    agree(gradient(kernel), gradient(dense))


def test_running_sums_have_the_gradients_of_dense():
    sums = -np.cumsum(np.random.default_rng(1).random((2, 24, 2)), axis=1).astype(np.float32)

    def gradient(attend):
        run = functools.partial(attend, *sample(24, batch=(2,)), mask=Causal())
        return jax.jit(jax.grad(lambda sums: (run(score_mod=Forget(sums)) ** 2).sum()))(sums)

    agree(gradient(kernel), gradient(dense))


@pytest.mark.parametrize(
    "options",
    [
        {"mask": Causal(), "score_mod": RelativeBias(np.arange(66, dtype=np.float32).reshape(2, 33) / 30)},
        {"mask": SlidingWindow(150, 20), "score_mod": (SoftCap(2.0), ALiBi(alibi_slopes(2)))},
    ],
    ids=["causal, relative bias", "window, soft cap and alibi"],
)
@pytest.mark.slow
def test_tiles_that_fit_tpus_match_dense(options):
    arrays = sample(300)
    attend = functools.partial(kernel, block_sizes=(128, 256))
    agree(gradients(attend, *arrays, **options), gradients(dense, *arrays, **options))


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(1, 40), (40, 1), (1, 1)])
def test_one_query_or_one_key_matches_dense(lengths):
    arrays = sample(*lengths)
    agree(gradients(kernel, *arrays, mask=Padding(30)), gradients(dense, *arrays, mask=Padding(30)))


@pytest.mark.slow
def test_fully_masked_rows_and_empty_tiles_have_zero_output_and_gradient():
    arrays = sample()
    mask = MaskFn(lambda b, h, i, j: (i % 3 > 0) & (i < 30) & (j > 24))  # rows, blocks of rows, blocks of columns
    (dq, dk, dv), (out, lse) = jax.tree.map(np.asarray, gradients(kernel, *arrays, mask=mask))
    masked = (np.arange(40) % 3 == 0) | (np.arange(40) >= 30)
    assert (out[masked] == 0).all() and np.isneginf(lse[masked]).all() and np.isfinite(lse[~masked]).all()
    assert (dq[masked] == 0).all() and (dk[:25] == 0).all() and (dv[:25] == 0).all()
    agree(((dq, dk, dv), (out, lse)), gradients(dense, *arrays, mask=mask))


def test_nan_is_inert_in_keys_that_are_masked_for_all_queries_and_propagates_from_others():
    q, k, v = sample(30, batch=(2,))
    lengths = np.array([10, 23])
    masked = (np.arange(30) >= lengths[:, None])[..., None, None]
    run = with_gradients(kernel, mask=Causal() & Padding(lengths))
    poisoned = run(q, np.where(masked, np.float32(np.nan), k), np.where(masked, np.float32(np.inf), v))
    jax.tree.map(np.testing.assert_array_equal, poisoned, run(q, k, v))
    k[:, 5] = np.nan
    assert (np.isnan(run(q, k, v)[1][0]).all(axis=(2, 3)) == (np.arange(30) >= 5)).all()


def test_bias_of_minus_infinity_masks_keys_and_such_a_sink_has_no_effect():
    arrays = sample(30)
    bias = np.where(np.tri(30, dtype=bool), 0, -np.inf).astype(np.float32)
    found = gradients(kernel, *arrays, bias=bias, sinks=np.full(2, -np.inf, np.float32))
    agree(found, gradients(dense, *arrays, mask=Causal()))


def test_score_mods_get_existing_positions_only():
    """The padding of the last tile must not have position 30, where the function is infinite."""
    mod = ScoreFn(lambda s, b, h, i, j: s / (30 - j) + s / (30 - i))
    agree(gradients(kernel, *sample(30), score_mod=mod), gradients(dense, *sample(30), score_mod=mod))


def test_bfloat16_errs_at_most_twice_as_much_as_dense():
    options = {"mask": Causal(), "score_mod": SoftCap(20.0), "scale": np.array(0.2, np.float32)}
    arrays = sample(70, dim=32, dtype=jnp.bfloat16)
    attend = functools.partial(kernel, block_sizes=(32, 32))
    exact, found, specified = (
        gradients(run, *(x.astype(dtype) for x in arrays), **options)
        for run, dtype in ((dense, jnp.float32), (attend, jnp.bfloat16), (dense, jnp.bfloat16))
    )
    agree(found[1][1], exact[1][1], 1e-6)  # lse, float32 throughout: 16 units in the last place of the largest
    for x, y, z in zip(*(jax.tree.leaves((one[0], one[1][0])) for one in (exact, found, specified))):
        x, y, z = (np.asarray(one, np.float64) for one in (x, y, z))
        assert np.linalg.norm(y - x) <= 2 * np.linalg.norm(z - x)


# Transforms. Terms of all kinds: scalars, vectors, pairs, integers, dropout.

TERMS = {"slopes": np.array([0.5, 1.0]), "cap": np.array(3.0), "by_row": np.ones((2, 12)), "bias": np.ones((2, 12, 12))}
TERMS = {name: x.astype(np.float32) for name, x in TERMS.items()}


def with_everything(impl):
    def run(q, k, v, ids, seed, terms):
        mods = (ALiBi(terms["slopes"]), SoftCap(terms["cap"]))
        mods = (*mods, ScoreFn(lambda s, b, h, i, j, x: s * x[0, j] + x[1, i], terms["by_row"]))
        return attnlab.attention(
            q,
            k,
            v,
            Causal() & Segments(ids),
            mods,
            terms["bias"][None] if q.ndim == 4 else terms["bias"],
            sinks=terms["slopes"],
            dropout_rate=0.3,
            dropout_key=jax.vmap(jax.random.key)(seed) if q.ndim == 4 else jax.random.key(seed),
            impl=impl,
            block_sizes=(8, 6) if impl == "pallas" else None,
        )

    return run


def everything(*lead):
    q, k, v = (x[..., :1, :] if n else x for n, x in enumerate(sample(12, dim=4, batch=lead)))  # grouped heads
    ids = np.sort(np.random.default_rng(0).integers(0, 3, (*lead, 12)), axis=-1)
    return q, k, v, ids, np.arange(math.prod(lead)).reshape(lead), TERMS


def squared(attend):
    """The gradient of the sum of squares, of q, k, v and the terms."""
    return jax.grad(lambda *arguments: (attend(*arguments) ** 2).sum(), (0, 1, 2, 5))


AXES = (0, 0, 0, 0, 0, None)


@pytest.mark.parametrize(
    "transform",
    [
        lambda attend: squared(jax.vmap(jax.vmap(attend, AXES), AXES)),
        slow(lambda attend: jax.vmap(jax.vmap(squared(attend), AXES), AXES)),
    ],
    ids=["grad of vmap", "vmap of grad"],
)
def test_vmap_and_grad_nest_in_any_order(transform):
    arguments = everything(2, 1)
    agree(*(jax.jit(transform(with_everything(impl)))(*arguments) for impl in ("pallas", "dense")))


@pytest.mark.slow
def test_vmap_over_terms_or_ids_alone_matches_dense():
    *arrays, terms = everything()
    many = jax.tree.map(lambda x: np.stack([x, x + 1, x + 2]), terms)
    ids = np.stack([arrays[3], arrays[3] * 0])
    of_terms, of_ids = (
        [
            jax.jit(jax.vmap(jax.grad(lambda terms, run=run: (run(*arrays, terms) ** 2).sum())))(many),
            jax.jit(jax.vmap(lambda ids, run=run: run(*arrays[:3], ids, arrays[4], terms)))(ids),
        ]
        for run in map(with_everything, ("pallas", "dense"))
    )
    agree(of_terms, of_ids)


@pytest.mark.slow
def test_gradient_through_scan_matches_dense():
    q, *others = everything()

    def make(impl):
        step = lambda x, scale: (x + with_everything(impl)(x * scale, *others), None)  # noqa: E731
        return jax.jit(jax.grad(lambda q: jax.lax.scan(step, q, np.float32([0.5, 1.0]))[0].sum()))(q)

    agree(make("pallas"), make("dense"))


def test_functions_may_close_over_traced_arrays():
    q, k, v = sample(12, dim=4)

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(impl, weight, shift):
        def total(weight):
            # A number for each head, and pairs that all heads share.
            mod = ScoreFn(lambda s, b, h, i, j: s + weight[h] * jnp.sin(i - j) + weight[i * j % 2])
            mask = MaskFn(lambda b, h, i, j: (i - j) % shift == 0)
            sizes = (8, 6) if impl == "pallas" else None
            return (attnlab.attention(q, k, v, mask, mod, impl=impl, block_sizes=sizes) ** 2).sum()

        return jax.grad(total)(weight)

    agree(*(gradient(impl, np.float32([0.5, 2.0]), 3) for impl in ("pallas", "dense")))


SPECS = (P("data", None, "tensor"), P("data", None), P("data", None), P("data"), P("data"), P())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.slow
def test_a_mesh_splits_batch_and_heads_and_moves_nothing(kind):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind,) * 2)
    *arrays, terms = everything(2)
    arrays[1:3] = (np.repeat(x, 2, axis=-2) for x in arrays[1:3])  # as many heads as axes split
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, SPECS)]
    run = jax.jit(with_everything("pallas"))
    assert "all-" not in run.lower(*placed, terms).compile().as_text()
    gradient = jax.jit(squared(with_everything("pallas")))(*placed, terms)
    agree(gradient, jax.jit(squared(with_everything("dense")))(*arrays, terms))


def test_a_users_shard_map_matches_dense():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    call = functools.partial(kernel, mask=Causal(), score_mod=ALiBi(alibi_slopes(2)))
    split = jax.shard_map(call, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    arrays = sample(20, dim=4, batch=(2,))
    one, other = (
        jax.jit(jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), argnums=(0, 1, 2)))(*arrays)
        for f in (split, functools.partial(call, impl="dense", block_sizes=None))
    )
    agree(one, other)


@pytest.mark.parametrize(
    "derive",
    [
        slow(lambda f, x: jax.jvp(f, (x,), (x,))),
        lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
        lambda f, x: jax.jit(jax.vmap(lambda x: jax.jvp(f, (x,), (x,))))(x[None]),
        slow(lambda f, x: jax.hessian(f)(x)),
        lambda f, x: jax.jit(jax.grad(lambda x: jax.grad(jax.jit(f))(x).sum()))(x),
    ],
    ids=["jvp", "jvp in jit", "vmap of jvp in jit", "hessian", "grad of grad in jit"],
)
def test_forward_mode_and_second_order_raise_one_line(derive):
    q, k, v = sample(16)
    message = "forward-mode|impl = 'pallas' has no derivatives of second order: use impl='dense'"
    with pytest.raises((TypeError, ValueError), match=message) as error:
        derive(lambda q: kernel(q, k, v, mask=Causal()).sum(), q)
    assert "\n" not in str(error.value)


# What is refused, and when it is chosen

TABLE = np.ones((3, 3), np.float32)
POSITIONS = np.arange(256) // 2
FAR = RelativeBias(np.ones((4, 5), np.float32))


def of_table(s, b, h, i, j):
    return s + jnp.asarray(TABLE)[i % 3, j % 3]


def on_tpu(dtype=jnp.float32, length=256, **more):
    shape, found = jax.ShapeDtypeStruct((2, length, 4, 64), dtype), []
    jax.eval_shape(lambda x: found.append(attnlab.explain(x, x, x, platform="tpu", **more)), shape)
    return found[0]


@pytest.mark.usefixtures("not_emulated")
@pytest.mark.parametrize(
    "more",
    [
        {"mask": Padding(7)},
        {"mask": ~Causal()},
        {"mask": BlockSparse(np.eye(4, dtype=bool), 64)},
        {"mask": Dense(np.eye(256, dtype=bool))},
        {"score_mod": ALiBi(alibi_slopes(4))},
        {"score_mod": FAR, "q_positions": POSITIONS, "kv_positions": POSITIONS},
        {"bias": np.zeros((256, 256), np.float32)},
        {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
        {"return_lse": True},
    ],
    ids=lambda more: ", ".join(more),
)
def test_kernels_take_by_name_what_splash_lacks_and_auto_does_not(more):
    assert on_tpu(**more, impl="pallas").backend == "pallas"
    auto = on_tpu(**more)
    assert auto.backend == "blockwise" and "has not run on a TPU" in auto.rejected["pallas"]


@pytest.mark.usefixtures("not_emulated")
@pytest.mark.parametrize(
    "more, reason",
    [
        ({"dtype": jnp.float16}, "it has no float16"),
        ({"block_sizes": (64, 64)}, r"tiles of \(64, 64\) are not multiples of 128"),
        ({"score_mod": ScoreFn(lambda s, b, h, i, j: jax.nn.relu(s))}, "derivative rule of its own"),
        ({"score_mod": ScoreFn(lambda s, b, h, i, j: jnp.sort(s[None])[0])}, "no sort of scores"),
        ({"length": 2**15, "score_mod": ScoreFn(of_table)}, "takes 4.0 GiB, more"),
    ],
    ids=["float16", "tiles", "relu", "sort", "pairs"],
)
def test_unsupported_arguments_are_refused_in_one_line(more, reason):
    found = on_tpu(**more)
    assert found.backend in ("blockwise", "dense")
    assert re.search(reason, found.rejected["pallas"]) and "\n" not in found.rejected["pallas"]


@pytest.mark.usefixtures("not_emulated")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_cpus_refuse_the_kernels_unless_they_are_emulated(wrap):
    arrays = sample(16, batch=(2,))
    attend = wrap(functools.partial(attnlab.attention, impl="pallas"))
    with pytest.raises(ValueError, match="needs a tpu, or .*force_tpu_interpret_mode|Only interpret mode") as error:
        attend(*arrays)
    assert "\n" not in str(error.value)
    assert attnlab.explain(*sample(256, batch=(2,))).backend == "blockwise"


@pytest.mark.parametrize(
    "make",
    [
        lambda rng: BlockSparse(rng.random((2, 2, 14, 14)) < 0.5, 3) & Causal(),
        lambda rng: MaskFn(lambda b, h, i, j, table: table[i % 3, j % 3], rng.random((3, 3)) < 0.5),
    ],
    ids=["blocks by example and head", "function of a table"],
)
@pytest.mark.slow
def test_masks_that_gather_are_drawn_or_given_and_match_dense(make):
    """Drawn where they are known while tracing, else an array of pairs."""
    mask = jax.tree.map(jnp.asarray, make(np.random.default_rng(0)))
    q, k, v = sample(batch=(2,))
    arrays, expected = (q, k[:, :, :1], v[:, :, :1]), gradients(dense, q, k[:, :, :1], v[:, :, :1], mask=mask)
    agree(gradients(kernel, *arrays, mask=mask), expected)
    traced = jax.jit(lambda mask: gradients(kernel, *arrays, mask=mask))(mask)
    agree(traced, expected)


@pytest.mark.usefixtures("not_emulated")
def test_numpy_arrays_of_64_bits_in_masks_are_accepted():
    assert on_tpu(mask=PrefixLM(np.array([100, 200])), impl="pallas").backend == "pallas"


@jax.custom_vjp
def rounded(x):
    """x rounded, with the gradient of x."""
    return jnp.round(x)


rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, d: (d,))
EDGES = {
    "rule for a vector": lambda s, b, h, i, j, x: s + rounded(x[j]),
    "rule for pairs": lambda s, b, h, i, j, x: s + rounded(x[h] * (i - j)),
    "infinite derivative at 0": lambda s, b, h, i, j, x: jnp.sqrt(abs(s)) + x[i],
    "quotient of gathered pairs": lambda s, b, h, i, j, x: s / x[(i * j) % 10],
    "no score": lambda s, b, h, i, j, x: x[j],
    "one number": lambda s, b, h, i, j, x: x[0],
}


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.slow
def test_score_functions_at_ragged_edges_and_with_rules_match_dense(name):
    q, k, v = sample(10, dim=4)
    x = np.linspace(0.5, 1.7, 10, dtype=np.float32)

    def gradient(impl, sizes):
        def total(q, k, v, x):
            mod = ScoreFn(EDGES[name], x)
            out, lse = attnlab.attention(q, k, v, score_mod=mod, impl=impl, block_sizes=sizes, return_lse=True)
            return (out**2).sum() + lse.sum(), (out, lse)

        return jax.jit(jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True))(q, k, v, x)

    agree(gradient("pallas", (8, 8)), gradient("dense", None))


@pytest.mark.parametrize(
    "mask",
    [
        Segments(np.repeat([0, 0, 2, 2], 5), np.concatenate([[0, 1], np.repeat([0, 2], 9)])),
        SlidingWindow(1) & BlockSparse(np.array([[1, 1], [1, 0]], bool), 10),
    ],
    ids=["segments", "window and blocks"],
)
def test_nan_is_inert_where_bounds_of_tiles_do_not_tell_that_a_key_is_masked(mask):
    q, k, v = sample(20)
    masked = ~np.asarray(jax.jit(lambda: mask.dense(20, 20))()).any(axis=0)[:, None, None]
    assert masked.any()
    run = with_gradients(kernel, mask=mask)
    poisoned = run(q, *(np.where(masked, np.float32(np.nan), x) for x in (k, v)))
    jax.tree.map(np.testing.assert_array_equal, poisoned, run(q, k, v))


def test_positions_with_a_conjunction_of_masks_match_dense():
    q, k, v = sample(20)
    positions = {"q_positions": np.arange(20) * 2, "kv_positions": np.arange(20)}
    options = {"mask": Causal() & SlidingWindow(9), **positions}
    agree(gradients(kernel, q, k, v, **options), gradients(dense, q, k, v, **options))
