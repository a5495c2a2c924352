"""Both schedules of the linear recurrence against the specification: random cases, extremes, and maps of states."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.ops.recurrence import chunked, parallel
from attnlab.ops.recurrence.terms import terms_of
from tests.ops.cases import slow
from tests.ops.recurrence import cases

# (decay, erasure): heads of q, k and v, tokens per chunk; with 1 and 41 tokens the last group of chunks is not full.
# Each program computes 34 cases, one per row: 306 in all.
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


QUICK = [("head", "none"), ("feature", "beta"), ("head", "pair")]
schedules = pytest.mark.parametrize("impl", cases.SCHEDULES)


@schedules
@pytest.mark.parametrize(
    ("decay", "erasure"), [names if names in QUICK else slow(*names) for names in PROGRAMS], ids=lambda name: name
)
def test_chunks_equal_specification_in_values_and_all_gradients(float64, impl, decay, erasure):
    heads, size = PROGRAMS[decay, erasure]
    drawn = cases.draw(len(decay + erasure), cases.Shape(34, 41, heads, decay=decay, erasure=erasure))
    cases.assert_close(program(impl, size)(drawn), program("recurrent")(drawn), 1e-12)


@schedules
def test_bfloat16_has_a_float32_state_and_gradients_of_its_own_type(impl):
    drawn = cases.draw(1, cases.Shape(2, 70, (4, 2, 2), decay="feature", erasure="pair"))
    shapes = jax.eval_shape(functools.partial(program(impl, 32), dtype=jnp.bfloat16), drawn)
    assert shapes.pop("state").dtype == np.float32
    assert {x.dtype for x in jax.tree.leaves(shapes)} == {jnp.dtype(jnp.bfloat16)}


EXTREMES = ("fast decay", "fast, then slow decay", "resets", "no decay", "equal keys, β‖k‖² = 2", "zero keys")


def extremes(length, decay, erasure):
    """Each row of the batch has one of `EXTREMES`."""
    drawn = cases.draw(0, cases.Shape(len(EXTREMES), length, (2, 2, 2), decay=decay, erasure=erasure))
    del drawn["segment_ids"], drawn["lengths"]
    drawn["g"][0] = -80
    drawn["g"][1] = np.where(np.arange(length) < 16, -80, -0.01)[(..., *[None] * (drawn["g"].ndim - 2))]
    drawn["g"][2] = -0.3
    drawn["g"][2, 5::20], drawn["g"][2, 9::20], drawn["g"][2, 12::20] = -1e4, -1e9, -np.inf
    drawn["g"][3:] = 0
    drawn["k"][4], drawn["k"][5] = np.sqrt(1 / 4), 0
    if erasure == "beta":
        drawn["beta"][4:] = 2
    if erasure == "pair":
        drawn["erase"][0][4] = 1  # e rᵀ = 2 k kᵀ
        drawn["erase"][1][4] = np.sqrt(1 / 4)
        drawn["erase"][0][5] = drawn["erase"][1][5] = 0
    return drawn


@schedules
@pytest.mark.parametrize(("decay", "erasure"), [("head", "beta"), ("feature", "pair")])
@pytest.mark.parametrize("length", [33, *map(slow, (0, 1, 32, 100))])
def test_extremes_keep_values_and_gradients_finite_and_right(length, decay, erasure, impl):
    drawn = extremes(length, decay, erasure)
    with jax.enable_x64(True):
        exact = jax.tree.map(np.asarray, program("recurrent")(drawn))
    actual = jax.tree.map(np.asarray, program(impl, 32)(drawn, dtype=np.float32))
    # As in `attnlab.testing`: n roundings add up as √n, for terms up to four times as large as the largest result.
    # Errors of a reflection at each token add up linearly.
    cases.assert_close(actual, exact, 4 * ((4 + 3 * 32) ** 0.5 + length) * np.finfo(np.float32).eps)


@schedules
@pytest.mark.parametrize(("decay", "erasure"), [("head", "beta"), ("feature", "pair")])
def test_gate_gradients_of_fast_decays_equal_the_specification(decay, erasure, impl):
    drawn = cases.draw(1, cases.Shape(len(EXTREMES), 33, decay=decay, erasure=erasure), strongest=20.0)
    del drawn["segment_ids"], drawn["lengths"]
    with jax.enable_x64(True):
        exact = np.asarray(program("recurrent")(drawn)["the gradient of g"])
    error = np.abs(np.asarray(program(impl, 32)(drawn, dtype=np.float32)["the gradient of g"]) - exact)
    assert error.max() < 1e-6 * np.abs(exact).max()
    assert np.median(error[exact != 0] / np.abs(exact[exact != 0])) < 1e-6


@pytest.mark.parametrize(
    ("run", "decay", "erasure"),
    [(chunked.run, "head", "beta"), (functools.partial(parallel.run, operand=np.float64), "feature", "pair")],
    ids=["chunked", "parallel"],
)
def test_maps_of_two_parts_compose_to_the_map_of_both(float64, run, decay, erasure):
    drawn = cases.draw(3, cases.Shape(2, 50, decay=decay, erasure=erasure))
    state = drawn.pop("state")
    del drawn["segment_ids"], drawn["lengths"]

    @jax.jit
    def maps_and_state(drawn, state):
        def terms(part):
            named = {"g": None, "beta": None, "erase": None} | jax.tree.map(lambda x: x[:, part], drawn)
            return terms_of(**named)

        maps = [chunked.summary(run, terms(part), 16) for part in (slice(0, 19), slice(19, None), slice(None))]
        return maps, run(terms(slice(None)), state, 16)[1]

    ((m1, n1), (m2, n2), (m, n)), last = maps_and_state(drawn, state)
    np.testing.assert_allclose(m2 @ m1, m, atol=1e-13)
    np.testing.assert_allclose(m2 @ n1 + n2, n, atol=1e-12)
    np.testing.assert_allclose(m @ state + n, last, atol=1e-12)
