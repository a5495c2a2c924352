"""The front door says in one line what is wrong with its arguments, and what would run."""

import jax
import jax.numpy as jnp
import pytest
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
        ({"k": K[..., :4]}, "k has 4 features a head and q has 8"),
        ({"v": K[:, :3]}, r"v has \(length, heads\) \(3, 2\) and k has \(7, 2\)"),
        ({"k": jnp.zeros((2, 7, 3, 8)), "v": jnp.zeros((2, 7, 3, 8))}, "q has 4 heads and k has 3: .* multiple"),
        ({"mask": Causal()}, r"mask Causal compares positions, but Tq = 5 and Tk = 7 differ: pass q_positions"),
        ({"score_mod": ALiBi(jnp.ones(4))}, "score mod ALiBi compares positions"),
        ({"score_mod": ALiBi(jnp.ones(3))}, r"ALiBi slopes have shape \(3,\), expected \(4,\)"),
        ({"score_mod": jnp.tanh}, "expected score mods"),
        ({"mask": jnp.ones((2, 1, 1, 7), bool)}, r"Dense mask has shape \(2, 1, 1, 7\), expected exactly \(5, 7\) or"),
        ({"mask": jnp.ones((2, 5, 7), bool)}, r"Dense mask has shape \(2, 5, 7\).*add the head axis"),
        ({"mask": Padding(jnp.array([1, 2, 3]))}, r"lengths of shape \(3,\): expected \(\) or q's batch axes \(2,\)"),
        ({"bias": jnp.zeros((4, 5, 7))}, r"bias has shape \(4, 5, 7\), expected \(5, 7\) or \(2, 4, 5, 7\)"),
        ({"bias": jnp.zeros(7)}, "bias has shape"),
        ({"sinks": jnp.zeros(2)}, r"sinks has shape \(2,\), expected \(4,\)"),
        ({"q_positions": jnp.arange(4)}, r"q_positions has shape \(4,\), expected \(5,\) or \(2, 5\)"),
        ({"dropout_rate": 0.5}, "needs dropout_key"),
        ({"dropout_rate": 1.0}, r"expected a probability in \[0, 1\)"),
        ({"impl": "flash"}, "impl = 'flash' is unknown: use \"auto\" or one of 'cudnn', 'splash', 'b"),
        ({"block_sizes": (0, 4)}, "expected two sizes of 1 or more"),
        (
            {"impl": "dense", "block_sizes": (4, 4)},
            "impl = 'dense' cannot run this: it has no tiles.*; use one",
        ),
        ({"impl": "splash"}, "impl = 'splash' cannot run this: it needs a tpu, and this is a cpu; use one of 'blockw"),
        ({"impl": "cudnn"}, "impl = 'cudnn' cannot run this: it needs a gpu, and this is a cpu; use one of 'blockw"),
        (
            {"mask": Segments(jnp.zeros(5, int))},
            r"kv_ids have shape \(5,\), expected \(7,\) or .* give kv_ids too",
        ),
        ({"mask": Segments(jnp.zeros(4, int), jnp.zeros(7, int))}, r"q_ids have shape \(4,\), expected \(5,\)"),
        ({"mask": BlockSparse(jnp.ones((3, 2), bool), 4)}, r"blocks have shape \(3, 2\), expected exactly \(2, 2\) or"),
        ({"mask": PrefixLM(2)}, "mask PrefixLM compares positions"),
        ({"mask": "causal"}, "mask is a str: expected one of masks, e.g. Causal"),
        ({"mask": [[True]]}, "mask is a list: expected one of masks"),
        ({"q": Q.astype(int)}, "q has type int32, expected a floating type: use .astype"),
        ({"bias": jnp.ones((5, 7), bool)}, "bias has type bool, expected a floating type: use mask="),
        ({"scale": jnp.ones(7)}, r"scale has shape \(7,\), expected \(\)"),
        ({"q_positions": jnp.zeros(5)}, "q_positions has type float32, expected whole numbers"),
        ({"dropout_rate": 0.5, "dropout_key": 0}, "dropout_key = 0: expected a PRNG key"),
        ({"block_sizes": 64}, "block_sizes = 64: expected two sizes"),
        ({"block_sizes": (8.0, 8.0)}, "expected two sizes of 1 or more"),
        ({"q": Q[:, :, :0]}, "expected one head and one feature, or more"),
        ({"mask": PrefixLM(jnp.zeros(3, int)), **POSITIONS}, r"PrefixLM length of shape \(3,\): expected"),
        ({"mask": MaskFn(lambda b, h, i, j: i - j), **POSITIONS}, r"<lambda> returned int32\[\], expected a bool"),
        ({"mask": MaskFn(lambda b, h: b == h), **POSITIONS}, "<lambda> takes other arguments than it is given"),
        ({"score_mod": RelativeBias(jnp.zeros((4, 4))), **POSITIONS}, r"table has shape \(4, 4\), expected \(4, 2·R"),
        (
            {"score_mod": ScoreFn(lambda s, b, h, i, j: i), **POSITIONS},
            r"<lambda> returned int32\[\]",
        ),
        ({"mask": jnp.zeros((5, 7))}, "Dense mask has type float32, expected bool: use .* or bias=array"),
        ({"mask": jnp.ones((5, 7), jnp.int32)}, "Dense mask has type int32, expected bool"),
    ],
)
def test_a_bad_argument_is_one_line_that_names_it(own_errors, arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        attnlab.attention(**({"q": Q, "k": K, "v": K} | arguments))
    assert "\n" not in str(error.value)


def test_a_mask_without_its_head_axis_is_not_broadcast_to_the_batch():
    """The trap of (B, 1, 1, N) against (B, N, N): both read as something, neither as what was meant."""
    with pytest.raises(ValueError, match="expected exactly"):
        attnlab.attention(Q[:, :2], K[:, :2], K[:, :2], mask=jnp.ones((2, 2, 2), bool))


def test_a_bool_array_counts_as_a_dense_mask():
    array = jnp.tri(5, dtype=bool)
    x = jax.random.normal(jax.random.key(0), (5, 1, 8))
    assert (attnlab.attention(x, x, x, mask=array) == attnlab.attention(x, x, x, mask=Dense(array))).all()


def test_explicit_positions_let_a_step_attend_to_what_went_before():
    x = jax.random.normal(jax.random.key(0), (7, 1, 8))
    full = attnlab.attention(x, x, x, mask=Causal())
    last = attnlab.attention(x[5:], x, x, mask=Causal(), q_positions=jnp.array([5, 6]), kv_positions=jnp.arange(7))
    assert jnp.allclose(full[5:], last, atol=1e-6)


def test_explain_takes_what_attention_takes():
    x = jnp.zeros((5, 1, 8))
    arguments = (x, x, x, Causal(), SoftCap(2.0), None, 0.5)
    attnlab.attention(*arguments)
    assert attnlab.explain(*arguments, return_lse=True).backend == "dense"


def test_explain_names_the_backend_that_runs():
    explained = attnlab.explain(Q, K, K, score_mod=SoftCap(2.0))
    assert explained.backend in attnlab.implementations() and explained.backend not in explained.rejected
    assert str(explained).startswith(f"runs {explained.backend}")


def parts_of(q, k, v, cuts, **terms):
    pairs = zip((0, *cuts), (*cuts, k.shape[-3]))
    return [attnlab.attention(q, k[a:b], v[a:b], return_lse=True, **terms) for a, b in pairs]


def test_merged_parts_are_the_whole_and_so_are_their_gradients(float64):
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


def test_a_part_that_sees_nothing_merges_as_nothing():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 4, 2, 4))

    def merged(q, length):
        some = attnlab.attention(q, k, v, mask=Padding(length), return_lse=True)
        return attnlab.merge([some, attnlab.attention(q, k, v, mask=Padding(0), return_lse=True)])

    out, lse = merged(q, 3)
    expected = attnlab.attention(q, k, v, mask=Padding(3), return_lse=True)
    assert jnp.allclose(out, expected[0], atol=1e-6) and jnp.allclose(lse, expected[1], atol=1e-6)
    out, lse = merged(q, 0)
    assert (out == 0).all() and jnp.isneginf(lse).all()
    assert all(jnp.isfinite(jax.grad(lambda q, n=n: merged(q, n)[0].sum())(q)).all() for n in (0, 3))


@pytest.mark.parametrize(
    "parts", [[], [(jnp.zeros((3, 1, 2)), jnp.zeros((3, 1))), (jnp.zeros((4, 1, 2)), jnp.zeros((4, 1)))]]
)
def test_merge_says_which_shapes_do_not_fit(own_errors, parts):
    with pytest.raises(ValueError, match="merge was given shapes"):
        attnlab.merge(parts)


@pytest.mark.parametrize("length, expected", [(8, "dense"), (96, "dense"), (97, "blockwise"), (1024, "blockwise")])
def test_short_scores_are_written_out_and_long_ones_tiled(length, expected):
    x = jax.ShapeDtypeStruct((2, length, 4, 8), jnp.float32)
    chosen = []
    jax.eval_shape(lambda q: chosen.append(attnlab.explain(q, q, q, Causal()).backend), x)
    assert chosen == [expected]


def test_a_step_of_decoding_is_written_out():
    explained = attnlab.explain(jnp.zeros((2, 1, 4, 8)), *[jnp.zeros((2, 9000, 4, 8))] * 2, Padding(7))
    assert explained.backend == "dense"


def test_an_argument_that_one_backend_cannot_honour_is_told():
    x = jnp.zeros((5, 1, 8))
    explained = attnlab.explain(x, x, x, Causal(), block_sizes=(2, 2))
    assert explained.backend == "blockwise" and "no tiles" in explained.rejected["dense"]


def test_blocks_of_a_block_sparse_mask_are_bool(own_errors):
    with pytest.raises(ValueError, match="blocks have type float32, expected bool: use blocks.astype"):
        attnlab.attention(Q, K, K, mask=BlockSparse(jnp.ones((2, 2)), 4))


def test_lists_in_a_mask_are_refused(own_errors):
    with pytest.raises(ValueError, match=r"mask And holds a list with 3: expected jnp.array"):
        attnlab.attention(Q, K, K, mask=Padding([3, 5]) & Segments(jnp.zeros(5, int), jnp.zeros(7, int)))


def test_a_rate_that_is_traced_is_refused(own_errors):
    with pytest.raises(ValueError, match="dropout_rate is traced: expected a number that is known"):
        jax.jit(lambda rate: attnlab.attention(Q, Q, Q, dropout_rate=rate, dropout_key=jax.random.key(0)))(0.5)


@pytest.mark.parametrize(
    "rows, message", [([0, 5], "rows from 0 to 5: expected indices of 5"), ([0.5], "whole numbers")]
)
def test_rows_are_indices(own_errors, rows, message):
    with pytest.raises(ValueError, match=message):
        attnlab.attention_weights(Q, K, rows=jnp.array(rows))


def test_rows_may_count_from_the_end():
    weights = attnlab.attention_weights(Q, Q, mask=BlockSparse(jnp.eye(2, dtype=bool), 3))
    picked = attnlab.attention_weights(Q, Q, mask=BlockSparse(jnp.eye(2, dtype=bool), 3), rows=jnp.array([-1, 0]))
    assert jnp.allclose(picked, weights[..., jnp.array([-1, 0]), :])


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint32])
@pytest.mark.parametrize("impl", ["dense", "blockwise"])
def test_unsigned_numbers_do_not_wrap(dtype, impl):
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


def test_a_window_may_be_as_wide_as_a_number_goes():
    x = jax.random.normal(jax.random.key(0), (20, 1, 8))
    wide = SlidingWindow(2**62) | PrefixLM(2**40) & Padding(2**40)
    for impl in ("dense", "blockwise"):
        expected = attnlab.attention(x, x, x, PrefixLM(99))
        assert jnp.allclose(attnlab.attention(x, x, x, wide, impl=impl), expected, atol=1e-6)


def test_explain_says_of_every_backend_why_not():
    for impl in ("auto", "dense", "blockwise"):
        explained = attnlab.explain(Q, Q, Q, impl=impl)
        assert {explained.backend, *explained.rejected} == set(attnlab.implementations())


def test_meshes_with_explicit_axes_are_left_to_the_specification():
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.device_put(jnp.ones((2, 200, 2, 8)), NamedSharding(mesh, P("data", None, "tensor")))
    with jax.set_mesh(mesh):
        assert jnp.allclose(jax.jit(lambda x: attnlab.attention(x, x, x))(x), 1)
        with pytest.raises(ValueError, match="mesh axes of AxisType.Auto, and these are Explicit"):
            jax.jit(lambda x: attnlab.attention(x, x, x, impl="blockwise"))(x)


def test_arrays_of_masks_and_mods_have_their_type_and_shape(own_errors):
    with pytest.raises(ValueError, match="Padding lengths of type float32: expected whole numbers"):
        attnlab.attention(Q, K, K, mask=Padding(jnp.ones(2)))
    with pytest.raises(ValueError, match=r"SoftCap cap has shape \(7,\), expected \(\)"):
        attnlab.attention(Q, K, K, score_mod=SoftCap(jnp.ones(7)))
