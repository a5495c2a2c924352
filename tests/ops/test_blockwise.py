"""Blockwise attention against dense, in all types, under all transforms, and its memory."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab
from attnlab.masks import Causal, Mask, MaskFn, Padding, Segments
from attnlab.score_mods import ALiBi, Forget, ScoreFn, ScoreMod, SoftCap, alibi_slopes
from tests.ops import cases
from tests.ops.cases import slow

ALL = [cases.draw(seed) for seed in range(320)]
QUICK = {54, 80, 172, 295}  # together they use each feature
# With these cases, nearly every pair of features occurs that any case uses.
PAIRS = {11, 12, 13, 16, 17, 19, 20, 27, 35, 37, 71, 84}


def marked():
    """Quick cases always run, some others run with the slow tests, and all run with the campaigns."""
    marks = {**dict.fromkeys(QUICK, ()), **dict.fromkeys(PAIRS, pytest.mark.slow)}
    return [pytest.param(case, marks=marks.get(case.seed, pytest.mark.campaign), id=str(case)) for case in ALL]


@pytest.mark.parametrize("case", marked())
def test_blockwise_matches_dense_on_random_cases(float64, case):
    expected = cases.results(case.arrays, case.run, "dense", jnp.float64)
    actual = cases.results(case.arrays, case.run, "blockwise", jnp.float64)
    cases.assert_near(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, block_sizes", [(jnp.bfloat16, (48, 20)), (jnp.float16, (32, 32))])
def test_half_precision_errs_at_most_twice_as_much_as_dense(dtype, block_sizes):
    """Both backends round the weights to the input type; blockwise also rounds the gradients of the scores to it."""
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 130, 4, 32), "k": (2, 130, 2, 32), "v": (2, 130, 2, 24), "bias": (1, 4, 130, 130), "sinks": (4,)}
    arrays = {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}
    arrays = {name: x.astype(np.float64) for name, x in arrays.items()}  # exact in either type

    def run(arrays, impl):
        terms = {"mask": Causal(), "score_mod": SoftCap(20.0), "return_lse": True, **arrays}
        return attnlab.attention(impl=impl, block_sizes=block_sizes if impl == "blockwise" else None, **terms)

    with jax.enable_x64(True):
        exact = cases.results(arrays, run, "dense", jnp.float64)
    dense, tiled = (cases.results(arrays, run, impl, dtype) for impl in ("dense", "blockwise"))
    for name, x in exact.items():
        # The errors of four sinks do not average out: each may be rounded once more, by half a unit.
        rounding = np.linalg.norm(x) * float(jnp.finfo(dtype).eps) / 2 if x.size < 10 else 0
        assert np.linalg.norm(tiled[name] - x) <= 2 * np.linalg.norm(dense[name] - x) + rounding, name


def sample(*shape, heads=2, dim=8, dtype=np.float32):
    return np.random.default_rng(0).standard_normal((3, *shape, heads, dim)).astype(dtype)


def from_row(x, start, value):
    """`x` with `value` in all rows from `start` on."""
    return np.where(np.arange(len(x))[:, None, None] < start, x, np.float32(value))


blockwise = functools.partial(attnlab.attention, impl="blockwise", block_sizes=(8, 6))
dense = functools.partial(attnlab.attention, impl="dense")


@pytest.mark.parametrize("attend", [blockwise, dense], ids=["blockwise", "dense"])
def test_fully_masked_row_has_zero_output_and_gradient(attend):
    mask = MaskFn(lambda b, h, i, j: i % 3 > 0)

    def total(q, k, v):
        out, lse = attend(q, k, v, mask=mask, return_lse=True)
        return out.sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum(), (out, lse)

    @jax.jit
    def run(q, k, v):
        lse_gradient = jax.grad(lambda q: jnp.exp(attend(q, k, v, mask=mask, return_lse=True)[1]).sum())(q)
        return jax.grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v), lse_gradient, mask.dense(40, 40)

    (gradients, (out, lse)), lse_gradient, visible = jax.tree.map(np.asarray, run(*sample(40)))
    masked = ~visible.any(axis=1)
    assert (out[masked] == 0).all() and np.isneginf(lse[masked]).all() and np.isfinite(lse[~masked]).all()
    assert (gradients[0][masked] == 0).all() and all(np.isfinite(g).all() for g in gradients)
    assert (lse_gradient[masked] == 0).all()


def test_bias_of_minus_infinity_masks_keys():
    bias = np.where(np.tri(40, dtype=bool), 0, -np.inf).astype(np.float32)
    run = jax.jit(lambda q, k, v: (blockwise(q, k, v, bias=bias), blockwise(q, k, v, mask=Causal())))
    np.testing.assert_allclose(*run(*sample(40)), rtol=1e-5, atol=1e-6)


def test_masked_nan_leaves_mod_gradients_finite():
    q, k, v = sample(40)
    k, v = from_row(k, 15, np.nan), from_row(v, 15, np.nan)

    def total(weight, cap):
        mods = (ScoreFn(lambda s, b, h, i, j, weight: s * weight[h], weight), SoftCap(cap))
        return (blockwise(q, k, v, Padding(15), mods) ** 2).sum()

    gradients = jax.jit(jax.grad(total, (0, 1)))(np.ones(2, np.float32), np.float32(3))
    assert all(np.isfinite(g).all() for g in gradients)


def test_score_mods_get_existing_positions_only():
    """The padding of the last tile must not have position 40, nor −1, where the function is infinite."""
    q, k, v = sample(40)
    mod = ScoreFn(lambda s, b, h, i, j: s / (40 - j) + s / (1 + j))

    def gradient(attend):
        return jax.grad(lambda k: (attend(q, k, v, score_mod=mod) ** 2).sum())

    actual, expected = jax.jit(lambda k: [gradient(attend)(k) for attend in (blockwise, dense)])(k)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_sink_of_minus_infinity_has_no_effect():
    sinks = np.array([-np.inf, 0], np.float32)
    run = jax.jit(lambda q, k, v: blockwise(q, k, v, Padding(0), sinks=sinks, return_lse=True))
    out, lse = map(np.asarray, run(*sample(40)))
    assert (out == 0).all() and np.isneginf(lse[:, 0]).all() and (lse[:, 1] == 0).all()


@dataclasses.dataclass(frozen=True)
class Kept(Mask):
    """A user's mask that defines only `visible`: the keys that an array selects."""

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
    keep, number = np.random.default_rng(0).random(45) < 0.5, np.arange(45, dtype=np.float32) / 9

    def results(attend):
        def total(number):
            out = attend(q, k, v, Kept(jnp.asarray(keep)) & Causal(), ByKey(number))
            return (out**2).sum(), out

        return jax.grad(total, has_aux=True)

    actual, expected = jax.jit(lambda number: [results(attend)(number) for attend in (blockwise, dense)])(number)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), actual, expected)


@dataclasses.dataclass(frozen=True)
class Tempered(ScoreMod):
    """A user's score mod: a factor for each example."""

    factor: jax.Array

    def apply(self, scores, tile):
        return scores * tile.of_examples(self.factor)


@pytest.mark.parametrize("attend", [blockwise, dense])
def test_user_defined_mod_with_a_float_per_example_matches_single_examples(attend):
    qkv, factors = sample(16, 16), np.linspace(0, 2, 16, dtype=np.float32)  # as many examples as keys
    run = jax.jit(lambda q, k, v, factor: attend(q, k, v, Causal(), Tempered(factor)))
    each = [run(*(x[n] for x in qkv), factor) for n, factor in enumerate(factors)]
    np.testing.assert_allclose(run(*qkv, factors), np.stack(each), rtol=1e-4, atol=1e-5)


# Transforms

TERMS = {"bias": (2, 20, 20), "sinks": (2,), "slopes": (2,), "cap": ()}


def with_everything(impl):
    def run(q, k, v, ids, seed, terms):
        mask, mods = Causal() & Segments(ids), (ALiBi(terms["slopes"]), SoftCap(terms["cap"]))
        options = {"bias": terms["bias"], "sinks": terms["sinks"], "dropout_rate": 0.3}
        options |= {"dropout_key": jax.random.key(seed), "block_sizes": (8, 6) if impl == "blockwise" else None}
        return attnlab.attention(q, k, v, mask, mods, impl=impl, **options)

    return run


def everything(*lead):
    q, k, v = sample(*lead, 20, dtype=np.float64)
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(0, 3, (*lead, 20)), axis=-1)
    seeds = np.arange(math.prod(lead)).reshape(lead)
    terms = {name: np.asarray(np.abs(rng.normal(size=shape)) + 1) for name, shape in TERMS.items()}
    return q, k, v, ids, seeds, terms


def agree(make, *arguments, run=jax.jit):
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10)
    jax.tree.map(compare, run(make("blockwise"))(*arguments), jax.jit(make("dense"))(*arguments))


def plain(f):
    return f


@pytest.mark.parametrize(
    "outer, wrap", [("grad of vmap", jax.checkpoint), slow("grad of vmap", plain), slow("vmap of grad", plain)]
)
def test_vmap_and_grad_nest_in_any_order(float64, wrap, outer):
    arguments = everything(2, 3)
    axes = (0, 0, 0, 0, 0, None)

    def gradient(f):
        return jax.grad(lambda *arguments: (f(*arguments) ** 2).sum(), (0, 1, 2, 5))

    def make(impl):
        f = with_everything(impl)
        if outer == "grad of vmap":
            return gradient(wrap(jax.vmap(jax.vmap(f, axes), axes)))
        return wrap(jax.vmap(jax.vmap(gradient(f), axes), axes))

    agree(make, *arguments, run=plain if wrap is plain else jax.jit)


def test_nested_vmaps_over_different_arguments_match_dense(float64):
    *arrays, terms = everything(3)
    many = jax.tree.map(lambda x: np.stack([x, x + 1]), terms)

    def make(impl):
        gradient = jax.grad(lambda terms, *arrays: (with_everything(impl)(*arrays, terms) ** 2).sum())
        return jax.vmap(jax.vmap(gradient, (0, *(None,) * 5)), (None, *(0,) * 5))

    agree(make, many, *arrays)


def test_functions_may_close_over_traced_arrays(float64):
    q, k, v = sample(20, dtype=np.float64)

    def make(impl):
        @jax.jit
        def total(weight, shift):
            mod = ScoreFn(lambda s, b, h, i, j: s + weight[h] * jnp.sin(i - j))
            mask = MaskFn(lambda b, h, i, j: (i - j) % shift == 0)
            sizes = (8, 6) if impl == "blockwise" else None
            return (attnlab.attention(q, k, v, mask, mod, impl=impl, block_sizes=sizes) ** 2).sum()

        return jax.grad(total)

    agree(make, np.array([0.5, 2.0]), 3)


@pytest.mark.parametrize(
    "derive",
    [
        lambda f, x: jax.jvp(f, (x,), (x,)),
        lambda f, x: jax.jit(jax.vmap(lambda x: jax.jvp(f, (x,), (x,))))(x[None]),
        lambda f, x: jax.grad(lambda x: jax.grad(f)(x).sum())(x),
    ],
    ids=["jvp", "vmap of jvp in jit", "grad of grad"],
)
def test_forward_mode_and_second_order_raise_one_line(derive):
    q, k, v = sample(20)
    with pytest.raises((TypeError, ValueError), match="forward-mode|second order: use impl='dense'") as error:
        derive(lambda q: blockwise(q, k, v, mask=Causal()).sum(), q)
    assert "\n" not in str(error.value)


# Memory


def temporaries(length, score_mods=(), forgets=False, **terms):
    """Bytes of temporary arrays of forward and backward."""
    x, sums = (jax.ShapeDtypeStruct((1, length, 8, *features), jnp.float32) for features in ((64,), ()))
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def total(q, k, v, sums, ids):
        mods = (*score_mods, Forget(sums)) if forgets else score_mods
        out = attnlab.attention(q, k, v, Causal() & Segments(ids), mods, impl="blockwise", **terms)
        return (out**2).sum()

    compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2, 3))).lower(x, x, x, sums, ids).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_is_linear_in_the_length():
    terms = {
        "score_mods": (ALiBi(alibi_slopes(8)), SoftCap(30.0)),
        "forgets": True,
        "dropout_rate": 0.1,
        "dropout_key": jax.random.key(0),
    }
    lengths = (4096, 16384)
    sizes = [temporaries(length, **terms) for length in lengths]
    # Besides the arrays there is the visit order, a few bytes for each 256 × 256 scores.
    order = 16 * (lengths[1] // 256) ** 2
    assert sizes[1] <= 4 * sizes[0] + order


@pytest.mark.slow
def test_memory_is_a_twentieth_of_jax_nn():
    x = jax.ShapeDtypeStruct((1, 8192, 8, 64), jnp.float32)
    total = jax.grad(lambda q, k, v: (jax.nn.dot_product_attention(q, k, v, is_causal=True) ** 2).sum(), (0, 1, 2))
    theirs = jax.jit(total).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes
    assert temporaries(8192) <= theirs / 20
