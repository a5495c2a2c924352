"""Chunks of the linear recurrence against the specification: random cases, extremes, and maps of states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.ops.recurrence import chunked
from attnlab.ops.recurrence.terms import terms_of
from tests.ops.cases import slow
from tests.ops.recurrence import cases

# (decay, erasure): heads of q, k and v, tokens of a chunk. Each program computes 34 cases, one a row: 306 in all.
PROGRAMS = {
    ("none", "none"): ((4, 2, 2), 7),
    ("head", "none"): ((2, 2, 4), 32),
    ("feature", "none"): ((2, 1, 2), 20),
    ("none", "beta"): ((2, 2, 2), 40),
    ("head", "beta"): ((2, 1, 4), 16),
    ("feature", "beta"): ((4, 2, 2), 9),
    ("none", "pair"): ((1, 1, 3), 10),
    ("head", "pair"): ((6, 1, 2), 1),
    ("feature", "pair"): ((2, 2, 2), 24),
}


@functools.cache
def program(impl, size=None):
    return jax.jit(functools.partial(cases.results, impl=impl, chunk_size=size), static_argnames="dtype")


@pytest.mark.parametrize(("decay", "erasure"), PROGRAMS, ids=lambda name: name)
def test_chunks_equal_specification_in_values_and_all_gradients(float64, decay, erasure):
    heads, size = PROGRAMS[decay, erasure]
    drawn = cases.draw(len(decay + erasure), cases.Shape(34, 40, heads, decay=decay, erasure=erasure))
    cases.assert_close(program("chunked", size)(drawn), program("recurrent")(drawn), 1e-12)


SLOW = [slow(*names, length, size) for names in PROGRAMS for length, size in ((100, 32), (67, 17), (33, 64))]


@pytest.mark.parametrize(("decay", "erasure", "length", "size"), SLOW)
def test_longer_sequences_equal_specification(float64, decay, erasure, length, size):
    drawn = cases.draw(length, cases.Shape(34, length, (4, 2, 2), 8, 6, decay, erasure))
    # Sums of up to 100 terms, half as many again as above.
    cases.assert_close(program("chunked", size)(drawn), program("recurrent")(drawn), 1e-12)


@pytest.mark.parametrize("erasure", ["none", "beta"])
@pytest.mark.parametrize("decay", ["none", slow("head"), "feature"])
def test_float32_errs_by_rounding(decay, erasure):
    size = 32
    drawn = cases.draw(2, cases.Shape(34, 40, (2, 2, 2), decay=decay, erasure=erasure))
    with jax.enable_x64(True):
        exact = jax.tree.map(np.asarray, program("recurrent")(drawn))
    found = jax.tree.map(np.asarray, program("chunked", size)(drawn, dtype=np.float32))
    # An element comes from products of K and, three in a row, of C terms: n roundings, which add up as √n (Higham and
    # Mary 2019), of terms up to four times as large as the largest result. Decays are exponentials of differences of
    # running sums G of a chunk, whose rounding is ε |G|.
    decays = drawn.get("g", np.zeros((1, size)))[:, :size]
    relative = (drawn["k"].shape[-1] + 3 * size) ** 0.5 + np.abs(decays.sum(axis=1)).max()
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(found))
    cases.assert_close(found, exact, 4 * relative * np.finfo(np.float32).eps)


# ------------------------------------------------------------------------------------------------------------- extremes

EXTREMES = ("fast decay", "fast, then slow decay", "no decay", "equal keys, β‖k‖² = 2", "zero keys")


def extremes(length, decay, erasure):
    """Each row of the batch has one of `EXTREMES`."""
    drawn = cases.draw(0, cases.Shape(len(EXTREMES), length, (2, 2, 2), decay=decay, erasure=erasure))
    del drawn["segment_ids"], drawn["lengths"]
    drawn["g"][0] = -80
    drawn["g"][1] = np.where(np.arange(length) < 16, -80, -0.01)[(..., *[None] * (drawn["g"].ndim - 2))]
    drawn["g"][2:] = 0
    drawn["k"][3], drawn["k"][4] = np.sqrt(1 / 4), 0
    if erasure == "beta":
        drawn["beta"][3:] = 2
    if erasure == "pair":
        drawn["erase"][0][3] = 1  # e rᵀ = 2 k kᵀ
        drawn["erase"][1][3] = np.sqrt(1 / 4)
        drawn["erase"][0][4] = drawn["erase"][1][4] = 0
    return drawn


LENGTHS = (0, 1, 2, 31, 32, 33, 100)
SHORT = [(length, *names) for length in (0, 33) for names in (("head", "beta"), ("feature", "pair"))]
ALL = [(length, decay, erasure) for length in LENGTHS for decay in ("head", "feature") for erasure in cases.ERASURES]


@pytest.mark.parametrize(
    ("length", "decay", "erasure"), [*SHORT, (1, "feature", "beta"), *(slow(*x) for x in ALL if x not in SHORT)]
)
def test_extremes_keep_values_and_gradients_finite_and_right(length, decay, erasure):
    drawn = extremes(length, decay, erasure)
    with jax.enable_x64(True):
        exact = jax.tree.map(np.asarray, program("recurrent")(drawn))
    found = jax.tree.map(np.asarray, program("chunked", 32)(drawn, dtype=np.float32))
    # As above, and a reflection at each token, whose errors add up; a running sum of fast decays has an error of ε|G|.
    relative = (4 + 3 * 32) ** 0.5 + length + np.array([80, 80 * 16, 0, 0, 0])
    cases.assert_close(found, exact, 4 * relative * np.finfo(np.float32).eps)


@pytest.mark.parametrize(("decay", "erasure"), [("head", "beta"), slow("feature", "beta"), slow("feature", "pair")])
def test_bfloat16_rounds_inputs_and_output_alone(decay, erasure):
    drawn = cases.draw(1, cases.Shape(2, 70, (4, 2, 2), 16, 8, decay, erasure))
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), cases.floating(drawn))
    exact = jax.tree.map(lambda x: x.astype(np.float32), low)
    integers = {name: drawn[name] for name in ("segment_ids", "lengths")}
    found = jax.tree.map(np.asarray, program("chunked", 32)(low | integers, dtype=jnp.bfloat16))
    expected = jax.tree.map(np.asarray, program("chunked", 32)(exact | integers, dtype=np.float32))
    assert found["last"].dtype == np.float32
    assert all(x.dtype == jnp.bfloat16 for name, x in found.items() if name not in ("last", "erase"))
    # A result has 8 bits, and so has the cotangent of the output, which gradients are linear in.
    found = jax.tree.map(lambda x: x.astype(np.float32), found)
    cases.assert_close(found, expected, 2 * 2.0**-8)


# ------------------------------------------------------------------------------------------------------- maps of states


@pytest.mark.parametrize(("decay", "erasure"), [("head", "beta"), slow("feature", "none"), slow("feature", "pair")])
def test_maps_of_two_parts_compose_to_the_map_of_both(float64, decay, erasure):
    drawn = cases.draw(3, cases.Shape(2, 50, decay=decay, erasure=erasure))
    state = drawn.pop("state")
    del drawn["segment_ids"], drawn["lengths"]

    @jax.jit
    def run(drawn, state):
        def terms(part):
            named = {"g": None, "beta": None, "erase": None} | jax.tree.map(lambda x: x[:, part], drawn)
            return terms_of(**named)

        maps = [chunked.summary(terms(part), 16) for part in (slice(0, 19), slice(19, None), slice(None))]
        return maps, chunked.run(terms(slice(None)), state, 16)[1]

    ((m1, n1), (m2, n2), (m, n)), last = run(drawn, state)
    np.testing.assert_allclose(m2 @ m1, m, atol=1e-13)
    np.testing.assert_allclose(m2 @ n1 + n2, n, atol=1e-12)
    np.testing.assert_allclose(m @ state + n, last, atol=1e-12)
