"""Argument checks, the choice of a backend, `explain`, and `merge`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import attnlab
from attnlab.masks import BlockSparse, Causal, Dense, MaskFn, Padding, PrefixLM, Segments, SlidingWindow
from attnlab.score_mods import ALiBi, RelativeBias, ScoreFn, SoftCap
from tests.ops.cases import slow

zeros = functools.partial(np.zeros, dtype=np.float32)
ones = functools.partial(np.ones, dtype=np.float32)

Q = zeros((2, 5, 4, 8))
K = zeros((2, 7, 2, 8))
POSITIONS = {"q_positions": np.arange(5, dtype=np.int32), "kv_positions": np.arange(7, dtype=np.int32)}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"q": zeros((4, 8))}, r"q has shape \(4, 8\)"),
        ({"k": K[0]}, r"k has batch axes \(\) and q has \(2,\)"),
        ({"k": K[..., :4]}, "k has 4 features .*q has 8"),
        ({"v": K[:, :3]}, r"v has .*\(3, 2\) and k has \(7, 2\)"),
        ({"k": zeros((2, 7, 3, 8)), "v": zeros((2, 7, 3, 8))}, "q has 4 heads .*k has 3"),
        ({"mask": Causal()}, r"mask Causal .*Tq = 5 and Tk = 7"),
        ({"score_mod": ALiBi(ones(4))}, "score mod ALiBi compares positions"),
        ({"score_mod": jnp.tanh}, r"score_mod is a function, .*score_mods\.ScoreFn\(fn\)"),
        ({"mask": np.ones((2, 5, 7), bool)}, r"Dense mask .*\(2, 5, 7\).*head axis"),
        ({"mask": Padding(jnp.array([1, 2, 3]))}, r"lengths has shape \(3,\), .*\(2,\)"),
        ({"mask": ~Padding(np.array([7, 8])) | Padding(7)}, "Padding lengths contains 8, expected 0 to 7"),
        ({"mask": Padding(-1)}, "Padding lengths contains -1, expected 0 to 7"),
        ({"bias": zeros((4, 5, 7))}, r"bias has shape \(4, 5, 7\)"),
        ({"sinks": zeros(2)}, r"sinks has shape \(2,\), .*\(4,\)"),
        ({"q_positions": np.arange(4, dtype=np.int32)}, r"q_positions has shape \(4,\), .*\(5,\)"),
        ({"dropout_rate": 0.5}, "needs dropout_key"),
        ({"dropout_rate": 1.0}, r"dropout_rate = 1\.0: .*probability"),
        ({"impl": "flash"}, "impl = 'flash' .*'cudnn', 'mosaic', 'fa4', 'splash', 'd"),
        ({"block_sizes": (0, 4)}, r"block_sizes = \(0, 4\)"),
        ({"impl": "dense", "block_sizes": (4, 4)}, "impl = 'dense' .*no tiles"),
        ({"impl": "splash"}, "impl = 'splash' .*tpu, .*cpu; .*'blockw"),
        ({"mask": Segments(np.zeros(5, np.int32))}, r"kv_ids has shape \(5,\), .*\(7,\).*: pass kv_ids too"),
        ({"mask": BlockSparse(np.ones((3, 2), bool), 4)}, r"blocks has shape \(3, 2\), .*\(2, 2\)"),
        ({"mask": "causal"}, "mask is a str: .*masks.Causal"),
        ({"q": Q.astype(np.int32)}, "q has type int32"),
        ({"bias": np.ones((5, 7), bool)}, "bias has type bool, .*use mask="),
        ({"scale": ones(7)}, r"scale has shape \(7,\)"),
        ({"q_positions": zeros(5)}, "q_positions has type float32"),
        ({"dropout_rate": 0.5, "dropout_key": 0}, "dropout_key = 0"),
        ({"q": Q[:, :, :0]}, r"q has shape \(2, 5, 0, 8\)"),
        ({"mask": MaskFn(lambda b, h, i, j: i - j), **POSITIONS}, r"<lambda> returned int32\[\], .*bool"),
        ({"mask": MaskFn(lambda b, h: b == h), **POSITIONS}, "<lambda> does not take"),
        ({"score_mod": RelativeBias(zeros((4, 4))), **POSITIONS}, r"table has shape \(4, 4\), .*\(4, 2·R"),
        ({"mask": zeros((5, 7))}, "Dense mask .*float32, .*bias=array"),
        ({"mask": Causal}, "mask is the class Causal"),
        ({"score_mod": [SoftCap(2.0)]}, "score_mod is a list"),
        ({"q_positions": np.full(5, 2**31, np.uint32)}, "q_positions .*from 2147483648 .*subtract"),
        ({"q_positions": jnp.array([2**30] * 5)}, "q_positions .*from 1073741824 to 1073741824"),
    ],
)
def test_invalid_argument_raises_one_line_that_names_it(own_errors, arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        attnlab.attention(**({"q": Q, "k": K, "v": K} | arguments))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: {"mask": BlockSparse(ones((2, 2)), 4)}, "blocks has type float32, .*bool"),
        (lambda: {"mask": Padding([3, 5]) & Padding(3)}, "mask And holds 3"),
        (lambda: {"mask": Padding(ones(2))}, "Padding lengths has type float32"),
        (lambda: {"mask": Segments(np.arange(7) << 32)}, "Segments q_ids .*to 25769803776, .*int32"),
        (lambda: {"mask": Segments(np.full(5, 2**32 - 1, np.uint32), zeros(7).astype(np.int32))}, "uint32 .*one type"),
        (lambda: {"mask": MaskFn(lambda b, h, i, j, ids: ids[i] == 0, np.arange(7) << 32)}, "MaskFn arrays .*int32"),
        (lambda: {"score_mod": SoftCap(ones(7))}, r"SoftCap cap has shape \(7,\)"),
    ],
)
def test_masks_and_mods_with_invalid_arrays_are_rejected(own_errors, make, message):
    with pytest.raises(ValueError, match=message):
        attnlab.attention(Q, K, K, **make())


@pytest.mark.parametrize(
    "name, remedy", [("is_causal", r"use mask=masks\.Causal\(\)"), ("droput_rate", "expected one of q, k,")]
)
@pytest.mark.parametrize("call", [attnlab.attention, attnlab.explain, attnlab.attention_weights])
def test_unknown_argument_raises_one_line_with_a_remedy(own_errors, call, name, remedy):
    arguments = (Q, K) if call is attnlab.attention_weights else (Q, K, K)
    with pytest.raises(TypeError, match=f"^{call.__name__} .*'{name}': {remedy}.*$"):
        call(*arguments, **{name: True})


def test_float64_numpy_computes_in_float32_without_warnings():
    x = np.random.default_rng(0).normal(size=(20, 2, 8))
    terms = {
        "mask": Causal() & MaskFn(lambda b, h, i, j, table: table[h] > 0, np.ones(2)),
        "score_mod": (ALiBi(np.ones(2)), RelativeBias(np.ones((2, 3))), SoftCap(np.array(9.0))),
        "bias": np.ones((20, 20)),
        "scale": np.array(0.5),
        "sinks": np.ones(2),
        "q_positions": np.arange(20),
    }

    def run(x, terms):
        return attnlab.attention(x, x, x, **terms, impl="blockwise", return_lse=True)

    narrow = x.astype(np.float32), jax.tree.map(jnp.asarray, terms)
    (out, lse), expected = jax.jit(lambda: (run(x, terms), run(*narrow)))()
    assert out.dtype == lse.dtype == jnp.float32
    jax.tree.map(np.testing.assert_array_equal, (out, lse), expected)
    assert jax.eval_shape(lambda: attnlab.merge([(x, np.zeros((20, 2)))] * 2))[0].dtype == jnp.float32


def draw(*shape, dtype=np.float32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def test_bool_array_is_a_dense_mask():
    array = np.tri(5, dtype=bool)
    x = draw(5, 1, 8)
    run = jax.jit(lambda array: [attnlab.attention(x, x, x, mask=mask) for mask in (array, Dense(array))])
    np.testing.assert_array_equal(*run(array))


@pytest.mark.parametrize(
    "impl, chosen", [(("cudnn", "blockwise", "dense"), "blockwise"), (("decode", "auto"), "dense")]
)
def test_first_listed_backend_that_supports_the_call_runs(impl, chosen):
    explained = attnlab.explain(Q, K, K, impl=impl)
    assert explained.backend == chosen and explained.rejected.keys() == {*attnlab.implementations()} - {chosen}
    assert jax.eval_shape(functools.partial(attnlab.attention, impl=impl), Q, K, K).shape == Q.shape


def test_error_for_several_unsupported_backends_gives_each_reason(own_errors):
    with pytest.raises(
        ValueError, match=r"'splash'\) cannot run this: cudnn: it needs a gpu.*; splash: it needs a tpu"
    ):
        attnlab.attention(Q, K, K, impl=("cudnn", "splash"))
    with pytest.raises(ValueError, match=r"impl = 'flash' is unknown: .* or a tuple of them"):
        attnlab.attention(Q, K, K, impl=("dense", "flash"))
    with pytest.raises(ValueError, match=r"impl = \(\) is unknown"):
        attnlab.attention(Q, K, K, impl=())


def test_merged_parts_equal_one_call_in_values_and_gradients(float64):
    def total(q, k, v, cuts):
        pairs = zip((0, *cuts), (*cuts, k.shape[-3]))
        parts = [attnlab.attention(q, k[a:b], v[a:b], return_lse=True) for a, b in pairs]
        results = attnlab.merge(parts) if cuts else parts[0]
        return sum((y**2).sum() for y in results), results

    step = jax.grad(total, (0, 1, 2), has_aux=True)
    (actual, merged), (expected, at_once) = jax.jit(lambda *x: [step(*x, cuts) for cuts in ((2, 3), ())])(
        *draw(3, 9, 2, 4, dtype=np.float64)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-8), merged, at_once)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-8), actual, expected)


def test_merge_ignores_fully_masked_parts():
    q, k, v = draw(3, 4, 2, 4)

    @jax.jit
    def merged(q, length):
        def parts(q):
            return [attnlab.attention(q, k, v, mask=Padding(n), return_lse=True) for n in (length, 0)]

        gradient = jax.grad(lambda q: attnlab.merge(parts(q))[0].sum())(q)
        return parts(q)[0], attnlab.merge(parts(q)), gradient

    expected, (out, lse), gradient = jax.tree.map(np.asarray, merged(q, 3))
    assert np.allclose(out, expected[0], atol=1e-6) and np.allclose(lse, expected[1], atol=1e-6)
    assert np.isfinite(gradient).all()
    _, (out, lse), gradient = jax.tree.map(np.asarray, merged(q, 0))
    assert (out == 0).all() and np.isneginf(lse).all() and np.isfinite(gradient).all()


@pytest.mark.parametrize("parts", [[], [(zeros((n, 1, 2)), zeros((n, 1))) for n in (3, 4)]])
def test_merge_of_different_shapes_is_rejected(own_errors, parts):
    with pytest.raises(ValueError, match="merge got shapes"):
        attnlab.merge(parts)


@pytest.mark.parametrize("length, expected", [(8, "dense"), (96, "dense"), (97, "blockwise"), (1024, "blockwise")])
def test_backend_is_dense_for_short_and_blockwise_for_long(length, expected):
    x = jax.ShapeDtypeStruct((2, length, 4, 8), jnp.float32)
    chosen = []
    jax.eval_shape(lambda q: chosen.append(attnlab.explain(q, q, q, Causal()).backend), x)
    assert chosen == [expected]


def test_traced_dropout_rate_is_rejected(own_errors):
    with pytest.raises(ValueError, match="dropout_rate is traced"):
        jax.jit(lambda rate: attnlab.attention(Q, Q, Q, dropout_rate=rate, dropout_key=jax.random.key(0)))(0.5)


@pytest.mark.parametrize("rows, message", [([0, 5], "rows from 0 to 5: .*5"), ([0.5], "expected integers")])
def test_rows_outside_the_queries_are_rejected(own_errors, rows, message):
    with pytest.raises(ValueError, match=message):
        attnlab.attention_weights(Q, K, rows=jnp.array(rows))


@pytest.mark.parametrize("dtype, impl", [(jnp.uint8, "blockwise"), (jnp.uint32, "dense")])
def test_unsigned_positions_and_lengths_do_not_wrap(dtype, impl):
    @jax.jit
    def run(x, places):
        def attend(mask, q_positions, kv_positions):
            return attnlab.attention(x, x, x, mask, q_positions=q_positions, kv_positions=kv_positions, impl=impl)

        unsigned, window = places.astype(dtype), SlidingWindow(2)
        masked = attend(window & Padding(jnp.array(0, dtype)), unsigned, places)
        return masked, attend(window, unsigned, unsigned), attend(window, places, places)

    masked, out, expected = map(np.asarray, run(draw(20, 1, 8), np.arange(20, dtype=np.int32)))
    assert (masked == 0).all() and (out == expected).all()


def test_sizes_beyond_int32_are_unlimited():
    x = draw(20, 1, 8)
    wide = SlidingWindow(2**62) | PrefixLM(2**40)
    many = np.array(2**40)  # as int32 it would be 0
    masks = (None, wide, PrefixLM(many))

    @functools.partial(jax.jit, static_argnums=2)
    def run(places, masks, impl):
        attend = functools.partial(attnlab.attention, x, x, x, impl=impl)
        return [*(attend(mask=mask) for mask in masks), attend(mask=wide, q_positions=places)]

    for impl in ("dense", "blockwise"):
        expected, *actual = run(np.arange(20, dtype=np.int32), masks, impl)
        for one in actual:
            np.testing.assert_allclose(one, expected, atol=1e-6)


@pytest.mark.parametrize("impl", ["blockwise", "dense"])
@pytest.mark.parametrize("q, k", [(Q[:, :0], K), (Q, K[:, :0]), (Q[:0], K[:0])], ids=["queries", "keys", "examples"])
def test_empty_inputs_have_zero_outputs(impl, q, k):
    out, lse = attnlab.attention(q, k, k + 1, impl=impl, return_lse=True)
    assert out.shape == q.shape and (out == 0).all()
    assert lse.shape == q.shape[:-1] and (lse == -np.inf).all()
    positions = {f"{name}_positions": np.arange(x.shape[1]) for name, x in (("q", q), ("kv", k))}
    assert (attnlab.stick_breaking_attention(q, k, k, impl=impl, **positions) == 0).all()
    gradients = jax.grad(lambda *x: attnlab.attention(*x, impl=impl).sum(), (0, 1, 2))(q, k, k)
    assert all((x == 0).all() for x in gradients)


def test_heads_before_tokens_warn_unless_arguments_confirm_sizes():
    swapped, few, ids = zeros((2, 4, 32, 8)), zeros((1, 1, 32, 8)), np.zeros(4, np.int32)
    calls = (attnlab.attention, attnlab.linear_attention, attnlab.linear_recurrence, attnlab.stick_breaking_attention)
    for call in calls:
        with pytest.warns(UserWarning, match=r"q has shape \(2, 4, 32, 8\).* 4 tokens of 32 heads.*swapaxes") as caught:
            jax.eval_shape(call, swapped, swapped, swapped)
        assert {x.filename for x in caught} == {__file__}
        jax.eval_shape(call, few, few, few)  # one token
    attend = functools.partial(jax.eval_shape, attnlab.attention)
    with pytest.warns(UserWarning, match="4 tokens of 32 heads"):
        attend(swapped, swapped, swapped, Causal() & Padding(np.array([3, 4])), SoftCap(2.0))
    attend(swapped, swapped[..., :8, :], swapped[..., :8, :])
    attend(swapped, few := zeros((2, 9, 32, 8)), few)
    for term in ({"mask": Segments(ids)}, {"q_positions": ids}, {"score_mod": ALiBi(ones(32))}, {"sinks": ones(32)}):
        attend(swapped, swapped, swapped, **term)
    attnlab.nn.MultiHeadAttention(32).init(jax.random.key(0), zeros((2, 4, 64)))


@pytest.mark.parametrize("impl", [slow("dense"), "blockwise"])
def test_export_with_a_symbolic_batch_equals_the_direct_call(own_errors, impl):  # a symbolic batch is no int
    def run(q, lengths, ids):
        drawn = Dense(np.tri(20, dtype=bool)) & BlockSparse(np.eye(4, dtype=bool), 5)
        mask = (SlidingWindow(3) | PrefixLM(2)) & Padding(lengths) | ~Segments(ids) & drawn
        mask |= MaskFn(lambda b, h, i, j: (b + i) % 3 == j)
        mods = (SoftCap(2.0), ALiBi(np.ones(2)), RelativeBias(np.ones((2, 3))))
        mods += (ScoreFn(lambda s, b, h, i, j: s + b * h),)
        return attnlab.attention(q, q, q, mask, mods, bias=ones((1, 2, 20, 20)), impl=impl)

    (batch,) = export.symbolic_shape("batch")
    shapes = [(batch, 20, 2, 4), (batch,), (batch, 20)]
    types = (jnp.float32, jnp.int32, jnp.int32)
    exported = export.export(jax.jit(run))(*(jax.ShapeDtypeStruct(*each) for each in zip(shapes, types)))
    ids = np.arange(60, dtype=np.int32).reshape(3, 20) // 7
    arguments = (draw(3, 20, 2, 4), np.array([3, 0, 20], np.int32), ids)
    np.testing.assert_allclose(exported.call(*arguments), jax.jit(run)(*arguments), atol=1e-6)


def test_first_surely_supported_backend_runs_under_jit():
    """A traced array has no known platform: a kernel named alone runs anyway, but one of several is skipped."""
    q = jnp.ones((2, 128, 2, 64), jnp.bfloat16)
    run = jax.jit(lambda q, impl: attnlab.attention(q, q, q, Causal(), impl=impl), static_argnames="impl")
    assert run.lower(q, impl=("cudnn", "splash", "dense")).as_text() == run.lower(q, impl="dense").as_text()


def test_explain_takes_positional_arguments_and_names_rejections():
    q = jnp.ones((2, 4, 2, 8))
    explained = attnlab.explain(q, q, q, Causal(), None, None, 0.5, None, 0.0, None, None, None, "auto", (2, 2))
    assert explained.backend == "blockwise" and "no tiles" in explained.rejected["dense"]
