"""Cross-entropy by chunks against the plain formula on full logits."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attnlab.ops.cross_entropy import MAX_LOGITS, MAX_NARROW_LOGITS, chunk_size, cross_entropy, loss_of_logits
from tests.ops.cases import slow

zeros = functools.partial(np.zeros, dtype=np.float32)
ones = functools.partial(np.ones, dtype=np.float32)

BATCH, LENGTH, WIDTH, VOCAB, PADDING = 4, 10, 6, 21, 3


def inputs(dtype=np.float32, scale=1.0, seed=0):
    """Features, embedding, targets and a cotangent of the losses."""
    rng = np.random.default_rng(seed)
    features, embedding = (
        (scale * rng.standard_normal(shape)).astype(dtype) for shape in ((BATCH, LENGTH, WIDTH), (VOCAB, WIDTH))
    )
    targets = rng.integers(0, VOCAB - PADDING, (BATCH, LENGTH)).astype(np.int32)
    wide = jnp.promote_types(dtype, jnp.float32)
    return features, embedding, targets, rng.standard_normal(targets.shape).astype(wide)


def with_gradients(losses, features, embedding, targets, g):
    """(losses, gradients of features and embedding)."""
    value, back = jax.vjp(lambda *x: losses(*x, targets), features, embedding)
    return value, *back(g)


@functools.cache
def ours(chunk=None, vocab_size=None, cap=None):
    losses = functools.partial(cross_entropy, chunk=chunk, vocab_size=vocab_size, cap=cap)
    return jax.jit(functools.partial(with_gradients, losses))


def reference(features, embedding, targets, g, vocab_size=VOCAB, cap=None):
    """(losses, gradients of features and embedding) by the formulas, in NumPy's float64."""
    features, embedding, g = (np.asarray(x, np.float64) for x in (features, embedding, g))
    real = embedding[:vocab_size]
    logits = features @ real.T
    slope = 1
    if cap is not None:  # 1 / cosh² of large numbers
        logits, slope = cap * np.tanh(logits / cap), 4 * np.exp(-2 * np.logaddexp(logits / cap, -logits / cap))
    log_p = scipy.special.log_softmax(logits, axis=-1)
    is_target = np.arange(vocab_size) == targets[..., None]
    d_logits = g[..., None] * (np.exp(log_p) - is_target) * slope
    d_embedding = np.zeros_like(embedding)
    d_embedding[:vocab_size] = np.einsum("btv,btf->vf", d_logits, features)
    return -log_p[is_target].reshape(targets.shape), d_logits @ real, d_embedding


def bounds(features, embedding, targets, g, rounding):
    """Bounds on the errors of float32 sums of products, with gradients of logits rounded by `rounding`."""
    x, e, g = (np.abs(np.asarray(a, np.float64)) for a in (features, embedding, g))
    sizes = x @ e.T  # Σ_f |x_f e_f|
    # A logit is a sum of WIDTH terms, an lse a sum of VOCAB terms; each rounding errs by 2^-24 of what is summed. The
    # other roundings (of exp, of log, of the difference) are a few units of 2^-24 of their results.
    value = 2.0**-24 * (2 * (WIDTH + 4) * sizes.max(-1) + VOCAB + 8 + 4 * np.log(VOCAB))
    # Logits of a narrow type are rounded to it: a logit and the lse each move by at most its largest rounding.
    value += 2 * rounding * sizes.max(-1) if rounding > 2.0**-24 else 0
    p = np.exp(np.asarray(features, np.float64) @ np.asarray(embedding, np.float64).T)
    p /= p.sum(-1, keepdims=True)
    is_target = np.arange(VOCAB) == np.asarray(targets)[..., None]
    # p errs in proportion to the errors of a logit and of the lse; their difference with 1 and the product are rounded.
    d_logits = g[..., None] * np.abs(p - is_target)
    d_logits_error = rounding * d_logits + g[..., None] * (2 * p * value[..., None] + 4 * 2.0**-24)
    # A gradient is a sum of as many products as there are ids or positions, which is rounded to its type at the end.
    # 1.01 for products of two of these errors.
    errors = []
    for subscripts, other, count in (("btv,vf->btf", e, VOCAB), ("btv,btf->vf", x, BATCH * LENGTH)):
        size = np.einsum(subscripts, d_logits, other)
        error = np.einsum(subscripts, d_logits_error, other)
        errors.append(1.01 * (error + (rounding + count * 2.0**-24) * size))
    return value, *errors


@pytest.mark.parametrize("dtype, chunk", [(jnp.float32, None), (jnp.bfloat16, 4), (jnp.float16, None)])
def test_narrow_types_err_only_by_rounding(dtype, chunk):
    arguments = inputs(dtype)
    results = ours(chunk)(*arguments)
    assert [x.dtype for x in results] == [jnp.float32, dtype, dtype]
    # Products of two narrow numbers are exact in float32, and so are the operands in float64. Rounding to nearest with
    # 8 significant bits errs by at most 2^-8 of the result, with 11 by 2^-11, with 24 by 2^-24.
    rounding = float(jnp.finfo(dtype).eps) / 2
    for result, expected, bound in zip(results, reference(*arguments), bounds(*arguments, rounding), strict=True):
        error = np.abs(np.asarray(result, np.float64) - expected)
        assert (error <= bound).all(), np.max(error / bound)


@pytest.mark.parametrize("chunk", [None, 4])
def test_bfloat16_error_is_within_five_roundings(chunk):
    rng = np.random.default_rng(0)
    features, embedding = rng.standard_normal((1, 200, 64)), rng.standard_normal((300, 64)) / 8
    targets, g = rng.integers(0, 300, (1, 200)).astype(np.int32), np.ones((1, 200), np.float32)
    exact = reference(features, embedding, targets, g, 300)
    features, embedding = jnp.asarray(features, jnp.bfloat16), jnp.asarray(embedding, jnp.bfloat16)
    rounded = reference(features, embedding, targets, g, 300)
    for result, inherited, expected in zip(ours(chunk)(features, embedding, targets, g), rounded, exact):
        errors = [np.linalg.norm(np.asarray(x, np.float64) - expected) for x in (result, inherited)]
        # Variances add: in units of one rounding, two from the operands, and one each from the logits, their gradients
        # and the results.
        assert errors[0] <= math.sqrt(5 / 2) * errors[1]


def test_float32_embedding_has_float32_gradient_for_bfloat16_features():
    features, embedding, targets, g = inputs(jnp.bfloat16)
    narrow, mixed = (
        jax.tree.map(np.asarray, ours(4)(features, x, targets, g)) for x in (embedding, embedding.astype(np.float32))
    )
    assert [x.dtype for x in mixed] == [jnp.float32, jnp.bfloat16, jnp.float32]
    assert (mixed[2] != mixed[2].astype(jnp.bfloat16)).any(), "the sum is rounded to bfloat16"
    # The embedding is exact in both types, so only the type in which its gradient is returned differs.
    for one, other in zip(narrow, mixed, strict=True):
        np.testing.assert_array_equal(one, other.astype(one.dtype))


@pytest.mark.parametrize("chunk, cap", [(None, None), (4, 3.0), slow(1, 0.5)])
def test_random_calls_with_padding_and_cap_equal_float64_formulas(float64, chunk, cap):
    real = VOCAB - PADDING
    for seed in range(8):
        features, embedding, targets, g = inputs(
            np.float64, scale=np.random.default_rng(seed).uniform(0.01, 5), seed=seed
        )
        expected = reference(features, embedding, targets, g, real, cap)
        embedding[real:] = [[np.nan], [np.inf], [1e300]]
        for actual, exact in zip(ours(chunk, real, cap)(features, embedding, targets, g), expected, strict=True):
            np.testing.assert_allclose(actual, exact, rtol=1e-10, atol=1e-11)


def with_offset(losses, logits, targets, offset):
    """Losses and gradients of `logits`, the features of an identity embedding with one more column, `offset`."""
    features = jnp.concatenate([logits, jnp.ones((*logits.shape[:-1], 1))], axis=-1)
    embedding = jnp.eye(VOCAB, VOCAB + 1) + offset * jnp.eye(1, VOCAB + 1, VOCAB)
    loss, back = jax.vjp(lambda features: losses(features, embedding, targets), features)
    return loss, back(jnp.ones_like(loss))[0][..., :VOCAB]


@pytest.mark.parametrize(
    "losses",
    [cross_entropy, functools.partial(cross_entropy, chunk=4), lambda x, e, targets: loss_of_logits(x @ e.T, targets)],
    ids=["whole", "chunks", "logits"],
)
def test_common_offset_of_logits_changes_no_bit(losses):
    rng = np.random.default_rng(0)
    logits = rng.integers(-200, 200, (BATCH, LENGTH, VOCAB)).astype(np.float32) / 64  # exact beside the offset
    targets = rng.integers(0, VOCAB, (BATCH, LENGTH)).astype(np.int32)
    run = jax.jit(functools.partial(with_offset, losses))
    for actual, expected in zip(run(logits, targets, 10_000.0), run(logits, targets, 0.0), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_huge_logits_keep_losses_and_gradients_finite():
    arguments = inputs(scale=100.0)
    assert np.abs(np.asarray(arguments[0]) @ np.asarray(arguments[1]).T).max() > 1e4
    results = [np.asarray(x) for x in ours(4, vocab_size=VOCAB - PADDING)(*arguments)]
    assert all(np.isfinite(x).all() for x in results)
    expected = reference(*arguments, VOCAB - PADDING)[0]
    # A logit is a sum of WIDTH terms of size 1e5 at most, and the loss the difference of two such sums.
    np.testing.assert_allclose(results[0], expected, atol=2 * WIDTH * 2.0**-24 * 1e5)


@pytest.mark.parametrize("shape", [(0, 10), (2, 3, 7)])
def test_any_batch_axes_and_length_have_a_loss(shape):
    features, embedding = ones((*shape, WIDTH)), ones((VOCAB, WIDTH))
    arguments = features, embedding, np.zeros(shape, np.int32), ones(shape)
    losses, d_features, d_embedding = ours(4)(*arguments)
    assert (losses.shape, d_features.shape, d_embedding.shape) == (shape, features.shape, embedding.shape)
    # Equal logits: the loss is log V, up to a rounding of the logits and of the sum of V equal terms.
    np.testing.assert_allclose(losses, np.full(shape, math.log(VOCAB)), atol=VOCAB * 2.0**-24 * 6)


def test_targets_of_any_integer_type_give_the_same_result():
    features, embedding, targets, _ = inputs()
    embedding = np.tile(embedding, (20, 1))  # more ids than one byte holds
    run = jax.jit(functools.partial(cross_entropy, chunk=4))
    expected = run(features, embedding, targets)
    for dtype in (np.int8, np.uint8, np.uint32):
        np.testing.assert_array_equal(run(features, embedding, np.asarray(targets).astype(dtype)), expected)


def test_only_traced_target_out_of_range_has_nan_loss():
    features, embedding, targets, g = inputs()
    wrong = targets.copy()
    wrong[[0, 1, 2], [0, 3, 9]] = -1, VOCAB - 1, VOCAB
    is_wrong = wrong != targets
    g = np.where(is_wrong, np.float32(0), g)
    run = ours(4, vocab_size=VOCAB - 1)
    results, expected = (jax.tree.map(np.asarray, run(features, embedding, ids, g)) for ids in (wrong, targets))
    np.testing.assert_array_equal(np.isnan(results[0]), is_wrong)
    np.testing.assert_array_equal(results[0][~is_wrong], expected[0][~is_wrong])
    for result, other in zip(results[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(result, other)


# The same sums in another order, as below: up to 40 terms of size 10 at most, each rounded by 2^-24.
close = functools.partial(jax.tree.map, functools.partial(np.testing.assert_allclose, atol=3e-5))


def test_vmap_matches_batch_axes():
    arguments = inputs()
    mapped = jax.vmap(functools.partial(cross_entropy, chunk=4), in_axes=(0, None, 0))
    close(jax.jit(functools.partial(with_gradients, mapped))(*arguments), ours(4)(*arguments))


@pytest.mark.parametrize("within, chunk", [(True, 4), (False, 4), slow(True, None), slow(False, None)])
def test_gradient_in_and_of_shard_map_sums_over_shared_embedding(within, chunk):
    losses, rows = functools.partial(cross_entropy, chunk=chunk), P("data")
    shard_map = functools.partial(jax.shard_map, mesh=jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,)))
    if within:
        run = functools.partial(with_gradients, losses)
        run = shard_map(run, in_specs=(rows, P(), rows, rows), out_specs=(rows, rows, P()))
    else:
        is_checked = chunk is not None
        sharded = shard_map(losses, in_specs=(rows, P(), rows), out_specs=rows, check_vma=is_checked)
        run = functools.partial(with_gradients, sharded)
    close(jax.jit(run)(*inputs()), ours(chunk)(*inputs()))


@pytest.mark.parametrize("chunk, kind", [(4, AxisType.Explicit), slow(None, AxisType.Auto)], ids=str)
def test_sharded_batch_needs_no_all_gather(chunk, kind):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    arguments = inputs()
    specs = P("data"), P(), P("data"), P("data")
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arguments, specs)]
    compiled = ours(chunk).lower(*placed).compile()
    text = compiled.as_text()
    assert not any(name in text for name in ("all-gather", "all-to-all", "collective-permute"))
    close(compiled(*placed), ours(chunk)(*arguments))


def shapes(jaxpr):
    """The shapes of all arrays that a jaxpr computes, including those of inner jaxprs."""
    for equation in jaxpr.eqns:
        yield from (x.aval.shape for x in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from shapes(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("chunk", [4, 9])
def test_gradient_holds_logits_of_only_one_chunk(chunk):
    def largest(chunk):
        losses = functools.partial(cross_entropy, chunk=chunk)
        jaxpr = jax.make_jaxpr(functools.partial(with_gradients, losses))(*inputs())
        return max(math.prod(shape) for shape in shapes(jaxpr.jaxpr))

    assert largest(LENGTH) == BATCH * LENGTH * VOCAB, "logits are not counted"
    # Features are padded to whole chunks, so they hold up to twice their size.
    assert largest(chunk) <= max(BATCH * chunk * VOCAB, 2 * BATCH * LENGTH * WIDTH) < BATCH * LENGTH * VOCAB


@pytest.mark.parametrize("chunk", [LENGTH, 4])
def test_backward_pass_keeps_max_log_sum_inputs_and_logits_of_one_chunk(chunk):
    features, embedding, targets, _ = inputs(jnp.bfloat16)
    _, back = jax.jit(lambda *x: jax.vjp(lambda *x: cross_entropy(*x, targets, chunk=chunk), *x))(features, embedding)
    residuals = [f"{x.dtype}{x.shape}" for x in jax.tree.leaves(back)]
    expected = ["bfloat16(4, 10, 6)", "bfloat16(21, 6)", "int32(4, 10)", *["float32(4, 10)"] * 2]
    assert sorted(residuals) == sorted(expected + ["bfloat16(4, 10, 21)"] * (chunk == LENGTH))


@pytest.mark.parametrize("dtype, most", [(jnp.float32, MAX_LOGITS), (jnp.bfloat16, MAX_NARROW_LOGITS)])
@given(rows=st.integers(0, 2**20), length=st.integers(0, 2**20), vocab_size=st.integers(1, 2**30))
def test_chunk_size_is_the_length_or_the_largest_power_of_two(dtype, most, rows, length, vocab_size):
    chunk = chunk_size(rows, length, vocab_size, dtype)
    assert 1 <= chunk <= max(length, 1)
    assert chunk == 1 or rows * chunk * vocab_size <= most
    if chunk < length:
        assert chunk & (chunk - 1) == 0 and 2 * rows * chunk * vocab_size > most


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": zeros(WIDTH)}, r"features has shape \(6,\)"),
        ({"features": np.zeros((4, 10, 6), np.int32)}, "features has type int32"),
        ({"embedding": zeros((21, 5))}, "embedding has 5 .*features has 6"),
        ({"embedding": zeros((0, 6))}, r"embedding has shape \(0, 6\)"),
        ({"targets": np.zeros((4, 9), np.int32)}, r"targets has shape \(4, 9\), .*\(4, 10\)"),
        ({"targets": zeros((4, 10))}, r"targets has type float32"),
        ({"targets": np.full((4, 10), 2**40)}, "targets contains 1099511627776, .*0 to 20"),
        ({"vocab_size": 17, "targets": np.full((4, 10), 17)}, "targets contains 17, .*0 to 16"),
        ({"cap": 0.0}, "cap = 0.0"),
        ({"vocab_size": 22}, "vocab_size = 22: .*21"),
        ({"chunk": 2.5}, r"chunk = 2\.5"),
    ],
)
def test_invalid_argument_raises_one_line(own_errors, change, message):
    features, embedding, targets, _ = inputs()
    arguments = {"features": features, "embedding": embedding, "targets": targets} | change
    with pytest.raises(ValueError, match=message) as error:
        cross_entropy(**arguments)
    assert "\n" not in str(error.value)
