"""The linear recurrence as users call it: padding, packing, exact tasks, transformations, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab
from attnlab import linear_recurrence
from tests.ops.cases import slow
from tests.ops.recurrence import cases

members = pytest.mark.parametrize(
    ("decay", "erasure", "impl"),
    [
        *(("head", "beta", "chunked"), ("feature", "pair", "parallel")),
        *(slow("feature", "pair", "chunked"), slow("head", "beta", "parallel"), slow("head", "none", "parallel")),
    ],
)
BATCH, LENGTH = 4, 40


def draw(decay="head", erasure="beta", seed=5, length=LENGTH, heads=(4, 2, 2)):
    drawn = cases.draw(seed, cases.Shape(BATCH, length, heads, decay=decay, erasure=erasure))
    drawn["lengths"] = np.array([length, 0, length // 2 + 3, 1])
    drawn["segment_ids"] = np.arange(length) // 9 + np.arange(BATCH)[:, None]
    return drawn


def cut(drawn, part):
    """`drawn` with only the tokens of the slice `part`."""
    whole = ("state", "lengths", "scale")
    return {name: x if name in whole else jax.tree.map(lambda x: x[:, part], x) for name, x in drawn.items()}


def close(actual, expected, atol=1e-12):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), actual, expected)


@pytest.mark.parametrize("heads", [(2, 1, 4), (6, 3, 3), slow((4, 2, 8))])
def test_fewer_heads_are_shared_by_neighbours(float64, heads):
    """Key head h // (HV / H) writes to state h; queries and states are repeated in the same way."""
    drawn, most = draw("feature", heads=heads), max(heads)
    arrays = cases.floating(drawn)

    def repeated(name, x):
        axis = 1 if name == "state" else 2
        return np.repeat(x, most // x.shape[axis], axis=axis)

    run = jax.jit(functools.partial(linear_recurrence, impl="recurrent"))
    close(run(**arrays), run(**{name: repeated(name, x) for name, x in arrays.items()}))


@pytest.mark.parametrize(
    "impl, decay, erasure",
    [
        *(("chunked", "feature", "pair"), ("parallel", "head", "none")),
        *(slow("chunked", "head", "beta"), slow("parallel", "feature", "pair"), slow("recurrent", "head", "beta")),
    ],
)
def test_padding_with_nan_and_other_segments_is_inert(float64, impl, decay, erasure):
    drawn = draw(decay, erasure) | {"scale": 0.5}
    inside = np.arange(LENGTH) < drawn["lengths"][:, None]
    tokens = {name: x for name, x in cases.floating(drawn).items() if name not in ("state", "scale")}
    spoilt = drawn | jax.tree.map(lambda x: np.where(inside[(..., *[None] * (x.ndim - 2))], x, np.nan), tokens)
    spoilt["segment_ids"] = np.where(inside, drawn["segment_ids"], -1)
    run = jax.jit(functools.partial(cases.results, impl=impl, chunk_size=8))
    results = run(spoilt)
    close(results, run(drawn))
    for name in ("out", *(f"the gradient of {name}" for name in "qkv")):
        assert not np.asarray(results[name])[~inside].any()
    np.testing.assert_array_equal(results["state"][1], drawn["state"][1])  # a row without tokens


@members
def test_packed_sequences_and_their_states_equal_separate_calls(float64, decay, erasure, impl):
    """Segments of 9 tokens end within and at the ends of chunks; "parallel" groups its chunks of 2 tokens."""
    drawn = {name: x for name, x in draw(decay, erasure).items() if name != "lengths"}
    arrays, ids = cases.floating(drawn), drawn["segment_ids"]
    run = functools.partial(linear_recurrence, chunk_size=2 if impl == "parallel" else 8, impl=impl)
    packed = jax.jit(lambda arrays: run(**arrays, segment_ids=ids, return_state="segments"))(arrays)
    one = jax.jit(functools.partial(run, return_state=True))
    for segment, start in enumerate(range(0, LENGTH, 9)):
        part = slice(start, min(start + 9, LENGTH))
        expected = one(**cut(arrays, part) | {"state": arrays["state"] * (segment == 0)})
        close((packed[0][:, part], packed[1][:, segment]), expected)
    last = jax.jit(functools.partial(run, return_state=True))(**drawn)
    close((packed[0], packed[1][:, -1]), last)


def test_states_of_absent_or_padded_segments_are_zero(float64):
    drawn, ids = draw(length=24), np.zeros((BATCH, 24), int)
    ids[0, 5:], ids[0, 20:], ids[2, 10:] = 1, 2, 1
    drawn |= {"segment_ids": ids, "lengths": np.array([15, 24, 24, 0])}

    def compute(impl):
        static = {"segment_ids": ids, "return_state": "segments", "impl": impl, "chunk_size": 16}
        function = functools.partial(linear_recurrence, **static)
        run = functools.partial(cases.results, function=lambda return_state, segment_ids, **x: function(**x))
        return jax.jit(run)(drawn)

    results = compute("chunked")
    close(results, compute("recurrent"))
    close(results, compute("parallel"))
    assert results["state"].shape == (BATCH, 3, *drawn["state"].shape[1:])
    exists = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 0], [0, 0, 0]], bool)
    np.testing.assert_array_equal(np.asarray(results["state"]).any(axis=(2, 3, 4)), exists)


@pytest.mark.parametrize("return_state", [False, True, "segments"])
def test_short_sequences_have_the_usual_output_shapes(return_state):
    for length in (0, 1, 3):
        arrays = cases.floating(draw(length=length))
        options = {"segment_ids": np.zeros((BATCH, length), int), "return_state": return_state}
        shapes = jax.eval_shape(functools.partial(linear_recurrence, **options), **arrays)
        out, *states = jax.tree.leaves(shapes)
        assert out.shape == (BATCH, length, 4, 3)
        by_segment = (min(length, 1),) if return_state == "segments" else ()
        assert [state.shape for state in states] == [(BATCH, *by_segment, 2, 4, 3)] * bool(return_state)


def test_segment_of_one_token_has_the_last_state():
    arrays, ids = cases.floating(draw(length=1)), np.zeros((BATCH, 1), int)
    run = functools.partial(linear_recurrence, segment_ids=ids)
    last, by_segment = jax.jit(lambda x: [run(**x, return_state=of)[1] for of in (True, "segments")])(arrays)
    np.testing.assert_allclose(by_segment[:, 0], last, atol=1e-6)  # sums of two products of size 1


def test_empty_sequence_returns_the_initial_state():
    arrays = cases.floating(draw(length=0))
    np.testing.assert_array_equal(linear_recurrence(**arrays, return_state=True)[1], np.float32(arrays["state"]))


def test_two_householder_steps_per_token_count_modulo_three():
    """Two reflections of the plane rotate by 120°; the largest of three outputs shows the sum, for 3,000 tokens."""
    count = 3000
    digits = np.random.default_rng(1).integers(0, 3, count)
    # Reflections across lines at angles a and b rotate by 2 (b − a).
    angles = np.stack([np.zeros(count), np.pi / 3 * digits], axis=1).reshape(-1) + np.pi / 2
    k = np.stack([np.cos(angles), np.sin(angles)], axis=-1)[:, None].astype(np.float32)
    thirds = 2 * np.pi / 3 * np.arange(3)
    q = np.broadcast_to(np.stack([np.cos(thirds), np.sin(thirds)], axis=-1), (2 * count, 3, 2)).astype(np.float32)
    start = np.array([[[1], [0]]], np.float32)
    beta = np.full((2 * count, 1), 2, np.float32)
    out = jax.jit(linear_recurrence)(q, k, np.zeros((2 * count, 1, 1), np.float32), beta=beta, state=start, scale=1.0)
    assert (out[1::2, :, 0].argmax(axis=-1) == np.cumsum(digits) % 3).all()
    np.testing.assert_allclose(out[1::2].max(axis=1), 1, atol=1e-3)  # 6,000 reflections, each rounded


@pytest.mark.parametrize("impl", cases.SCHEDULES)
def test_gradients_under_vmap_scan_and_remat_equal_the_batch(float64, impl):
    drawn = draw("feature", "beta")
    arrays, ids = cases.floating(drawn), drawn["segment_ids"]

    def total(row, ids):
        return (linear_recurrence(**row, segment_ids=ids, chunk_size=16, impl=impl) ** 2).sum()

    def scanned(arrays):
        return jax.lax.scan(lambda sum, row: (sum + jax.checkpoint(total)(*row), None), 0.0, (arrays, ids))[0]

    expected = jax.jit(jax.grad(total))(arrays, ids)
    close(jax.jit(jax.vmap(jax.grad(total)))(arrays, ids), expected)
    close(jax.jit(jax.grad(scanned))(arrays), expected)


def test_any_number_of_batch_axes_agrees(float64):
    drawn = draw(length=9)
    twice = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), drawn)
    run = jax.jit(functools.partial(linear_recurrence, return_state=True))
    out, state = run(**drawn)
    close(run(**twice), (out.reshape(2, 2, *out.shape[1:]), state.reshape(2, 2, *state.shape[1:])))
    one = {name: None if name == "lengths" else jax.tree.map(lambda x: x[0], x) for name, x in drawn.items()}
    close(run(**one), (out[0], state[0]))


def of_squares(q, impl="chunked"):
    return (linear_recurrence(q, q, q, beta=q[..., 0], impl=impl, chunk_size=8) ** 2).sum()


def test_forward_mode_of_chunked_form_is_rejected(own_errors):
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jit(jax.jacfwd(of_squares)).lower(np.ones((20, 1, 2), np.float32))


@pytest.mark.slow
def test_reverse_mode_twice_is_right():
    def twice(impl):
        q = np.linspace(-1, 1, 40, dtype=np.float32).reshape(20, 1, 2)
        return jax.jit(jax.grad(lambda q: (jax.grad(of_squares)(q, impl) ** 2).sum()))(q)

    expected = twice("recurrent")
    for impl in cases.SCHEDULES:
        close(twice(impl), expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
def test_gradients_store_one_state_per_chunk():
    def temporaries(length, size):
        shapes = {"q": (length, 2, 64), "g": (length, 2), "beta": (length, 2)}
        q, g, beta = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes.values())

        def total(q, g, beta):
            return linear_recurrence(q, q, q, g, beta, chunk_size=size).sum()

        step = jax.jit(jax.grad(total, (0, 1, 2))).lower(q, g, beta).compile()
        return step.memory_analysis().temp_size_in_bytes

    arrays, state = 4096 * 2 * 64 * 4, 2 * 64 * 64 * 4  # bytes of q, and of a state
    at_once, coarse = temporaries(4096, 32), temporaries(4096, 64)
    # 128 states (64 if chunks are twice as long), and arrays as large as q, by chunk, with their gradients.
    assert at_once < 128 * state + 16 * arrays
    assert at_once - coarse > 0.5 * (128 - 64) * state


def test_explain_names_the_form_chunk_size_and_case():
    drawn = draw()
    explain = functools.partial(attnlab.explain, operator=linear_recurrence)
    assert str(explain(**drawn)).splitlines() == [
        "runs chunked by 32 tokens, symmetric",
        "not recurrent: it is for 4 tokens or fewer",
        "not jla: it needs jax-linear-attention 0.1.0, and it is not installed: pip install 'attnlab[jla]'",
        "not parallel: it is for GPUs and TPUs",
    ]
    for platform in ("gpu", "tpu"):
        text = str(explain(**drawn | {"q": np.float32(drawn["q"])}, platform=platform))
        products = ", products in TF32" if platform == "gpu" else ""
        assert text.startswith(f"runs parallel by 40 tokens, symmetric{products}\n")
        assert text.endswith("\nnot chunked: it is for CPUs")
    assert explain(**cut(drawn, slice(0, 4)) | {"lengths": None}).backend == "recurrent"
    assert explain(**drawn, impl="recurrent").rejected["chunked"] == "it could, but impl names recurrent"
    del drawn["beta"]
    assert "by 8 tokens, no erasure" in str(explain(**drawn, chunk_size=8))
    assert "general" in str(explain(**draw("feature", "pair"), return_state=True))
    with pytest.raises(TypeError, match="explain has no argument 'mask'"):
        explain(drawn["q"], drawn["k"], drawn["v"], mask=None)


zeros = functools.partial(np.zeros, dtype=np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"impl": "fast"}, "impl = 'fast': expected one of auto, recurrent, jla, parallel, chunked"),
        ({"chunk_size": 0}, "chunk_size = 0"),
        ({"return_state": "all"}, "return_state = 'all'"),
        ({"return_state": "segments"}, "return_state = 'segments' needs segment_ids"),
        ({"q": zeros((9, 4))}, r"q has shape \(9, 4\)"),
        ({"q": zeros((2, 8, 2, 4))}, r"k has \(batch, length\) \(2, 9\) and q has \(2, 8\)"),
        ({"k": zeros((2, 9, 2, 5))}, "k has 5 features per head and q has 4"),
        ({"q": zeros((2, 9, 3, 4))}, "q, k and v have 3, 2 and 4 heads"),
        ({"g": zeros((2, 9, 2))}, r"g has shape \(2, 9, 2\), expected \(2, 9, 4\) or \(2, 9, 4, 4\)"),
        ({"beta": zeros((2, 9, 4)), "erase": (zeros((2, 9, 4, 4)),) * 2}, "beta and erase are both set"),
        ({"erase": zeros((2, 9, 4, 4))}, "erase is a ndarray: expected a pair"),
        ({"erase": (zeros((2, 9, 4, 4)), zeros((2, 9, 4, 3)))}, r"erase\[1\] has shape \(2, 9, 4, 3\)"),
        ({"scale": zeros(4)}, r"scale has shape \(4,\)"),
        ({"lengths": np.array([1, 2, 3])}, r"lengths has shape \(3,\), expected \(2,\)"),
        ({"lengths": np.array([9, 10])}, "lengths contains 10, expected 0 to 9"),
        ({"state": zeros((2, 2, 4, 3))}, r"state has shape \(2, 2, 4, 3\), expected \(2, 4, 4, 3\)"),
    ],
)
def test_invalid_argument_raises_one_line(own_errors, change, message):
    arrays = {"q": zeros((2, 9, 2, 4)), "k": zeros((2, 9, 2, 4)), "v": zeros((2, 9, 4, 3))}
    with pytest.raises(ValueError, match=message) as error:
        linear_recurrence(**arrays | change)
    assert "\n" not in str(error.value)


def test_states_of_traced_segments_raise_one_line():
    drawn = {name: x for name, x in draw().items() if name != "lengths"}
    with pytest.raises(ValueError, match="segment_ids are traced: close over them"):
        jax.jit(functools.partial(linear_recurrence, return_state="segments"))(**drawn)
