"""Positional encodings equal their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.nn import LearnedPositions, rotary, sinusoidal
from tests.parameters import parameters

X = np.random.default_rng(0).standard_normal((2, 5, 3, 8)).astype(np.float32)
TABLE = np.asarray(jax.jit(sinusoidal, static_argnums=1)(np.arange(100), 16))
turned = jax.jit(rotary)


def test_sinusoidal_equals_formula():
    for position in (0, 1, 17, 49):
        for pair in range(8):
            angle = position / 10000 ** (2 * pair / 16)
            np.testing.assert_allclose(
                TABLE[position, 2 * pair : 2 * pair + 2], [np.sin(angle), np.cos(angle)], atol=1e-5
            )


def test_rotary_scores_depend_on_position_difference():
    q, k = np.broadcast_to(X[:, :1], (2, 4, 3, 8))
    scores = (np.asarray(turned(q, np.array([7, 1007, 0, 5]))) * turned(k, np.array([3, 1003, 0, 1]))).sum(-1)
    # Angles up to 1,000 carry an error of 1,000 float32 units.
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-3)
    np.testing.assert_allclose(scores[2], (q * k)[2].sum(-1), atol=1e-5)
    assert not np.allclose(scores[0], scores[2], atol=1e-2)


def test_rotary_keeps_norms_and_dtype():
    rotated = turned(X, np.arange(5))
    np.testing.assert_allclose(np.linalg.norm(rotated, axis=-1), np.linalg.norm(X, axis=-1), rtol=1e-5)
    assert jax.eval_shape(rotary, X.astype(jnp.bfloat16), np.arange(5)).dtype == jnp.bfloat16


def test_rotary_takes_positions_per_sequence():
    positions = np.stack([np.arange(5), np.arange(5) + 7])
    shared = np.asarray(turned(X, positions[1]))
    np.testing.assert_allclose(np.asarray(turned(X, positions))[1], shared[1], atol=1e-6)
    np.testing.assert_array_equal(turned(X, positions[1:]), shared)


@pytest.mark.parametrize(
    "encode, message",
    [
        (lambda: sinusoidal(np.arange(3), 5), "rotate.* 5"),
        (lambda: rotary(np.ones((3, 1, 5), np.float32), np.arange(3)), "rotate.* 5"),
        *[(lambda n=n: rotary(X, np.ones(n, int)), r"positions have .*\(2, 5\)") for n in ((4,), (5, 1), (1, 2, 5))],
        (lambda: LearnedPositions(6, 4).init(jax.random.key(0), np.array([4, 6])), "positions contains 6, .*0 to 5"),
    ],
)
def test_mismatched_widths_and_positions_raise_one_line(encode, message, own_errors):
    with pytest.raises(ValueError, match=message):
        encode()


def test_learned_positions_look_up_table():
    table = LearnedPositions(context=6, features=4)
    params, positions = parameters(table, np.arange(6)), np.array([[3, 1]])
    out = jax.jit(table.apply)(params, positions)
    np.testing.assert_array_equal(out, params["params"]["embedding"][positions])
