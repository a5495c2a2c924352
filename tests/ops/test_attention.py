"""Argument checks, the choice of a backend, `explain`, and `merge`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import attnlab
from attnlab.masks import BlockSparse, Causal, Dense, MaskFn, Padding, PrefixLM, Segments, SlidingWindow
from attnlab.score_mods import ALiBi, RelativeBias, ScoreFn, SoftCap

Q = jnp.zeros((2, 5, 4, 8))
K = jnp.zeros((2, 7, 2, 8))
POSITIONS = {"q_positions": jnp.arange(5), "kv_positions": jnp.arange(7)}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"q": jnp.zeros((4, 8))}, r"q has shape \(4, 8\), expected \[\.\.\., length, heads, features\]"),
        ({"k": K[0]}, r"k has batch axes \(\) and q has \(2,\)"),
        ({"k": K[..., :4]}, "k has 4 features per head and q has 8"),
        ({"v": K[:, :3]}, r"v has \(length, heads\) \(3, 2\) and k has \(7, 2\)"),
        ({"k": jnp.zeros((2, 7, 3, 8)), "v": jnp.zeros((2, 7, 3, 8))}, "q has 4 heads and k has 3: .* multiple"),
        ({"mask": Causal()}, r"mask Causal compares positions, but Tq = 5 and Tk = 7 differ: pass q_positions"),
        ({"score_mod": ALiBi(jnp.ones(4))}, "score mod ALiBi compares positions"),
        ({"score_mod": ALiBi(jnp.ones(3))}, r"ALiBi slopes has shape \(3,\), expected \(4,\): one slope per head"),
        ({"score_mod": jnp.tanh}, r"score_mod is a function, wrap it as score_mods\.ScoreFn\(fn\): expected one of"),
        ({"mask": jnp.ones((2, 1, 1, 7), bool)}, r"Dense mask has shape \(2, 1, 1, 7\), expected exactly \(5, 7\) or"),
        ({"mask": jnp.ones((2, 5, 7), bool)}, r"Dense mask has shape \(2, 5, 7\).*add the head axis"),
        ({"mask": Padding(jnp.array([1, 2, 3]))}, r"lengths has shape \(3,\), expected \(\) or q's batch axes \(2,\)"),
        ({"bias": jnp.zeros((4, 5, 7))}, r"bias has shape \(4, 5, 7\), expected \(5, 7\) or \(2, 4, 5, 7\)"),
        ({"bias": jnp.zeros(7)}, "bias has shape"),
        ({"sinks": jnp.zeros(2)}, r"sinks has shape \(2,\), expected \(4,\)"),
        ({"q_positions": jnp.arange(4)}, r"q_positions has shape \(4,\), expected \(5,\) or \(2, 5\)"),
        ({"dropout_rate": 0.5}, "needs dropout_key"),
        ({"dropout_rate": 1.0}, r"expected a probability in \[0, 1\)"),
        ({"impl": "flash"}, "impl = 'flash' is unknown: use \"auto\" or one of 'cudnn', 'splash', 'p"),
        ({"block_sizes": (0, 4)}, "expected two sizes of 1 or more"),
        (
            {"impl": "dense", "block_sizes": (4, 4)},
            "impl = 'dense' cannot run this: it has no tiles.*; use one",
        ),
        ({"impl": "splash"}, "impl = 'splash' cannot run this: it needs a tpu, and this is a cpu; use one of 'blockw"),
        ({"impl": "cudnn"}, "impl = 'cudnn' cannot run this: it needs a gpu, and this is a cpu; use one of 'blockw"),
        (
            {"mask": Segments(jnp.zeros(5, int))},
            r"kv_ids has shape \(5,\), expected \(7,\) or .* pass kv_ids too",
        ),
        ({"mask": Segments(jnp.zeros(4, int), jnp.zeros(7, int))}, r"q_ids has shape \(4,\), expected \(5,\)"),
        ({"mask": BlockSparse(jnp.ones((3, 2), bool), 4)}, r"blocks has shape \(3, 2\), expected exactly \(2, 2\) or"),
        ({"mask": PrefixLM(2)}, "mask PrefixLM compares positions"),
        ({"mask": "causal"}, "mask is a str: expected one of masks, e.g. masks.Causal"),
        ({"mask": [[True]]}, "mask is a list: expected one of masks"),
        ({"q": Q.astype(int)}, "q has type int32, expected a floating type: use .astype"),
        ({"bias": jnp.ones((5, 7), bool)}, "bias has type bool, expected a floating type: use mask="),
        ({"scale": jnp.ones(7)}, r"scale has shape \(7,\), expected \(\)"),
        ({"q_positions": jnp.zeros(5)}, "q_positions has type float32, expected integers"),
        ({"dropout_rate": 0.5, "dropout_key": 0}, "dropout_key = 0: expected a PRNG key"),
        ({"block_sizes": 64}, "block_sizes = 64: expected two sizes"),
        ({"block_sizes": (8.0, 8.0)}, "expected two sizes of 1 or more"),
        ({"q": Q[:, :, :0]}, "expected at least one head and one feature"),
        ({"mask": PrefixLM(jnp.zeros(3, int)), **POSITIONS}, r"PrefixLM length has shape \(3,\), expected"),
        ({"mask": MaskFn(lambda b, h, i, j: i - j), **POSITIONS}, r"<lambda> returned int32\[\], expected one bool"),
        ({"mask": MaskFn(lambda b, h: b == h), **POSITIONS}, "<lambda> does not take the arguments it is called with"),
        ({"score_mod": RelativeBias(jnp.zeros((4, 4))), **POSITIONS}, r"table has shape \(4, 4\), expected \(4, 2·R"),
        (
            {"score_mod": ScoreFn(lambda s, b, h, i, j: i), **POSITIONS},
            r"<lambda> returned int32\[\]",
        ),
        ({"mask": jnp.zeros((5, 7))}, "Dense mask has type float32, expected bool: use .* or bias=array"),
        ({"mask": jnp.ones((5, 7), jnp.int32)}, "Dense mask has type int32, expected bool"),
        ({"mask": lambda b, h, i, j: i >= j}, r"mask is a function, wrap it as masks\.MaskFn\(fn\): expected one of"),
        ({"mask": Causal}, "mask is the class Causal, call it: expected one of masks"),
        ({"score_mod": [SoftCap(2.0)]}, "score_mod is a list: expected one of score_mods, .* or a tuple of them"),
        (
            {"q_positions": [2**31] * 5},
            "q_positions has values from 2147483648 to .* ±1073741823",
        ),
        (
            {"q_positions": jnp.full(5, 2**31, jnp.uint32)},
            "q_positions has values from 2147483648 .* subtract",
        ),
        ({"kv_positions": np.arange(7) + 2**31 - 3}, "kv_positions has values from 2147483645 to 2147483651, expected"),
        ({"kv_positions": np.arange(7) - 2**40}, "kv_positions has values from -1099511627776 to .*, expected"),
        ({"q_positions": jnp.full(5, 2**30)}, "q_positions has values from 1073741824 to 1073741824, expected"),
    ],
)
def test_bad_argument_is_one_line_that_names_it(own_errors, arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        attnlab.attention(**({"q": Q, "k": K, "v": K} | arguments))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, remedy", [("is_causal", r"use mask=masks\.Causal\(\)"), ("droput_rate", "expected one of q, k,")]
)
@pytest.mark.parametrize("call", [attnlab.attention, attnlab.explain, attnlab.attention_weights])
def test_unknown_argument_is_one_line_with_a_remedy(own_errors, call, name, remedy):
    arguments = (Q, K) if call is attnlab.attention_weights else (Q, K, K)
    with pytest.raises(TypeError, match=f"^{call.__name__} has no argument '{name}': {remedy}.*$"):
        call(*arguments, **{name: True})


@pytest.mark.parametrize("impl", ["dense", "blockwise"])
def test_float64_numpy_computes_in_float32_without_warnings(impl):
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
        return jax.jit(lambda: attnlab.attention(x, x, x, **terms, impl=impl, return_lse=True))()

    out, lse = run(x, terms)
    expected, expected_lse = run(x.astype(np.float32), jax.tree.map(jnp.asarray, terms))
    assert out.dtype == lse.dtype == jnp.float32
    assert jnp.array_equal(out, expected) and jnp.array_equal(lse, expected_lse)
    assert attnlab.merge([(x, np.zeros((20, 2)))] * 2)[0].dtype == jnp.float32


def test_mask_without_a_head_axis_is_rejected():
    """(B, N, N) would broadcast against (B, H, N, N) with the wrong meaning."""
    with pytest.raises(ValueError, match="expected exactly"):
        attnlab.attention(Q[:, :2], K[:, :2], K[:, :2], mask=jnp.ones((2, 2, 2), bool))


def test_bool_array_is_a_dense_mask():
    array = jnp.tri(5, dtype=bool)
    x = jax.random.normal(jax.random.key(0), (5, 1, 8))
    run = jax.jit(lambda mask: attnlab.attention(x, x, x, mask=mask))
    assert (run(array) == run(Dense(array))).all()


def test_decoding_step_with_positions_equals_the_full_pass():
    x = jax.random.normal(jax.random.key(0), (7, 1, 8))
    full = jax.jit(lambda: attnlab.attention(x, x, x, mask=Causal()))()
    positions = {"q_positions": jnp.array([5, 6]), "kv_positions": jnp.arange(7)}
    last = jax.jit(lambda: attnlab.attention(x[5:], x, x, mask=Causal(), **positions))()
    assert jnp.allclose(full[5:], last, atol=1e-6)


def test_explain_takes_the_arguments_of_attention():
    x = jnp.zeros((5, 1, 8))
    arguments = (x, x, x, Causal(), SoftCap(2.0), None, 0.5)
    jax.eval_shape(lambda: attnlab.attention(*arguments))
    assert attnlab.explain(*arguments, return_lse=True).backend == "dense"


def test_explain_names_the_backend_that_runs():
    explained = attnlab.explain(Q, K, K, score_mod=SoftCap(2.0))
    assert explained.backend in attnlab.implementations() and explained.backend not in explained.rejected
    assert str(explained).startswith(f"runs {explained.backend}")


def parts_of(q, k, v, cuts, **terms):
    pairs = zip((0, *cuts), (*cuts, k.shape[-3]))
    return [attnlab.attention(q, k[a:b], v[a:b], return_lse=True, **terms) for a, b in pairs]


def test_merged_parts_equal_one_call_in_values_and_gradients(float64):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 9, 2, 4), jnp.float64)

    def merged(q, k, v):
        return attnlab.merge(parts_of(q, k, v, (2, 3)))

    def at_once(q, k, v):
        return attnlab.attention(q, k, v, return_lse=True)

    for one, other in zip(*(jax.tree.leaves(jax.jit(f)(q, k, v)) for f in (merged, at_once))):
        assert jnp.allclose(one, other, rtol=1e-12)
    squares = [lambda *x, f=f: sum((y**2).sum() for y in f(*x)) for f in (merged, at_once)]
    total = [jax.jit(jax.grad(f, (0, 1, 2)))(q, k, v) for f in squares]
    for one, other in zip(*total):
        assert jnp.allclose(one, other, rtol=1e-10)


def test_merge_ignores_fully_masked_parts():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 4, 2, 4))

    @jax.jit
    def merged(q, length):
        def parts(q):
            return [attnlab.attention(q, k, v, mask=Padding(n), return_lse=True) for n in (length, 0)]

        gradient = jax.grad(lambda q: attnlab.merge(parts(q))[0].sum())(q)
        return parts(q)[0], attnlab.merge(parts(q)), gradient

    expected, (out, lse), gradient = merged(q, jnp.array(3))
    assert jnp.allclose(out, expected[0], atol=1e-6) and jnp.allclose(lse, expected[1], atol=1e-6)
    assert jnp.isfinite(gradient).all()
    _, (out, lse), gradient = merged(q, jnp.array(0))
    assert (out == 0).all() and jnp.isneginf(lse).all() and jnp.isfinite(gradient).all()


@pytest.mark.parametrize(
    "parts", [[], [(jnp.zeros((3, 1, 2)), jnp.zeros((3, 1))), (jnp.zeros((4, 1, 2)), jnp.zeros((4, 1)))]]
)
def test_merge_of_different_shapes_is_rejected(own_errors, parts):
    with pytest.raises(ValueError, match="merge got shapes"):
        attnlab.merge(parts)


@pytest.mark.parametrize("length, expected", [(8, "dense"), (96, "dense"), (97, "blockwise"), (1024, "blockwise")])
def test_backend_is_dense_for_short_and_blockwise_for_long(length, expected):
    x = jax.ShapeDtypeStruct((2, length, 4, 8), jnp.float32)
    chosen = []
    jax.eval_shape(lambda q: chosen.append(attnlab.explain(q, q, q, Causal()).backend), x)
    assert chosen == [expected]


def test_decoding_step_runs_dense():
    explained = attnlab.explain(jnp.zeros((2, 1, 4, 8)), *[jnp.zeros((2, 9000, 4, 8))] * 2, Padding(7))
    assert explained.backend == "dense"


def test_explain_names_the_argument_that_rejects_a_backend():
    x = jnp.zeros((5, 1, 8))
    explained = attnlab.explain(x, x, x, Causal(), block_sizes=(2, 2))
    assert explained.backend == "blockwise" and "no tiles" in explained.rejected["dense"]


def test_block_sparse_with_float_blocks_is_rejected(own_errors):
    with pytest.raises(ValueError, match="blocks has type float32, expected bool: use blocks.astype"):
        attnlab.attention(Q, K, K, mask=BlockSparse(jnp.ones((2, 2)), 4))


def test_mask_holding_a_list_is_rejected(own_errors):
    with pytest.raises(ValueError, match=r"mask And holds 3, expected arrays: use jnp\.array"):
        attnlab.attention(Q, K, K, mask=Padding([3, 5]) & Segments(jnp.zeros(5, int), jnp.zeros(7, int)))


def test_traced_dropout_rate_is_rejected(own_errors):
    with pytest.raises(ValueError, match="dropout_rate is traced: expected a Python number"):
        jax.jit(lambda rate: attnlab.attention(Q, Q, Q, dropout_rate=rate, dropout_key=jax.random.key(0)))(0.5)


@pytest.mark.parametrize(
    "rows, message", [([0, 5], "rows from 0 to 5: expected indices of 5"), ([0.5], "expected integers")]
)
def test_rows_outside_the_queries_are_rejected(own_errors, rows, message):
    with pytest.raises(ValueError, match=message):
        attnlab.attention_weights(Q, K, rows=jnp.array(rows))


def test_negative_rows_count_from_the_end():
    def weights_of(rows):
        return attnlab.attention_weights(Q, Q, mask=BlockSparse(jnp.eye(2, dtype=bool), 3), rows=rows)

    weights, picked = jax.jit(lambda: (weights_of(None), weights_of(jnp.array([-1, 0]))))()
    assert jnp.allclose(picked, weights[..., jnp.array([-1, 0]), :])


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint32])
@pytest.mark.parametrize("impl", ["dense", "blockwise"])
def test_unsigned_positions_and_lengths_do_not_wrap(dtype, impl):
    x = jax.random.normal(jax.random.key(0), (20, 1, 8))
    places = jnp.arange(20)
    mask = SlidingWindow(2) & Padding(jnp.array(0, dtype))
    out = attnlab.attention(x, x, x, mask, q_positions=places.astype(dtype), kv_positions=places, impl=impl)
    assert (out == 0).all()
    out, expected = (
        attnlab.attention(x, x, x, SlidingWindow(2), q_positions=at, kv_positions=at, impl=impl)
        for at in (places.astype(dtype), places)
    )
    assert (out == expected).all()


def test_sizes_beyond_int32_are_unlimited():
    x = jax.random.normal(jax.random.key(0), (20, 1, 8))
    wide = SlidingWindow(2**62) | PrefixLM(2**40) & Padding(2**40)
    many = np.array(2**40)  # as int32 it would be 0
    for impl in ("dense", "blockwise"):
        expected = attnlab.attention(x, x, x, impl=impl)
        for mask in (wide, Padding(many), PrefixLM(many)):
            assert jnp.allclose(attnlab.attention(x, x, x, mask, impl=impl), expected, atol=1e-6)
        traced = jax.jit(lambda places, impl=impl: attnlab.attention(x, x, x, wide, q_positions=places, impl=impl))
        assert jnp.allclose(traced(jnp.arange(20)), expected, atol=1e-6)


def test_explain_covers_every_backend():
    for impl in ("auto", "dense", "blockwise"):
        explained = attnlab.explain(Q, Q, Q, impl=impl)
        assert {explained.backend, *explained.rejected} == set(attnlab.implementations())


@pytest.mark.parametrize("impl", ["dense", "blockwise"])
def test_explicit_mesh_axes_give_the_unsharded_result(impl):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 20, 4, 8))
    expected = jax.jit(lambda *x: attnlab.attention(*x, mask=Causal(), impl=impl))(q, k[..., :2, :], v[..., :2, :])
    q, k, v = (
        jax.device_put(x, NamedSharding(mesh, P("data", None, "tensor"))) for x in (q, k[..., :2, :], v[..., :2, :])
    )
    with jax.set_mesh(mesh):
        out = jax.jit(lambda *x: attnlab.attention(*x, mask=Causal(), impl=impl))(q, k, v)
    assert jnp.allclose(out, expected, atol=1e-6)


def test_arrays_of_wrong_type_or_shape_are_rejected(own_errors):
    with pytest.raises(ValueError, match="Padding lengths has type float32, expected integers"):
        attnlab.attention(Q, K, K, mask=Padding(jnp.ones(2)))
    with pytest.raises(ValueError, match=r"SoftCap cap has shape \(7,\), expected \(\)"):
        attnlab.attention(Q, K, K, score_mod=SoftCap(jnp.ones(7)))


@pytest.mark.parametrize("impl", ["dense", "blockwise"])
@pytest.mark.parametrize("static", [True, False], ids=["static", "arrays"])
def test_export_with_a_symbolic_batch_equals_the_direct_call(own_errors, static, impl):  # annotations say int
    def run(q, lengths, ids):
        mask = SlidingWindow(3) | PrefixLM(2)
        mods = (SoftCap(2.0),)
        if not static:
            drawn = Dense(jnp.tri(20, dtype=bool)) & BlockSparse(jnp.eye(4, dtype=bool), 5)
            mask &= Padding(lengths) | ~Segments(ids) & drawn | MaskFn(lambda b, h, i, j: (b + i) % 3 == j)
            mods += (ALiBi(jnp.ones(2)), RelativeBias(jnp.ones((2, 3))), ScoreFn(lambda s, b, h, i, j: s + b * h))
        return attnlab.attention(q, q, q, mask, mods, bias=jnp.ones((1, 2, 20, 20)), impl=impl)

    (batch,) = export.symbolic_shape("batch")
    shapes = [(batch, 20, 2, 4), (batch,), (batch, 20)]
    types = (jnp.float32, jnp.int32, jnp.int32)
    exported = export.export(jax.jit(run))(*(jax.ShapeDtypeStruct(*each) for each in zip(shapes, types)))
    q = jax.random.normal(jax.random.key(0), (3, 20, 2, 4))
    arguments = (q, jnp.array([3, 0, 20]), jnp.arange(60).reshape(3, 20) // 7)
    assert jnp.allclose(exported.call(*arguments), jax.jit(run)(*arguments), atol=1e-6)
