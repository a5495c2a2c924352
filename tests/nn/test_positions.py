"""Positional encodings equal their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.nn import LearnedPositions, rotary, sinusoidal


def test_sinusoidal_equals_formula():
    table = np.asarray(sinusoidal(jnp.arange(50), 16))
    for position in (0, 1, 17, 49):
        for pair in range(8):
            angle = position / 10000 ** (2 * pair / 16)
            np.testing.assert_allclose(
                table[position, 2 * pair : 2 * pair + 2], [np.sin(angle), np.cos(angle)], atol=1e-5
            )


@pytest.mark.parametrize("shift", [1, 5, 40])
def test_sinusoidal_shift_is_one_rotation(shift):
    table = np.asarray(sinusoidal(jnp.arange(100), 16), np.float64)
    angles = shift / 10000 ** (np.arange(0, 16, 2) / 16)
    sin, cos = table[:, 0::2], table[:, 1::2]
    rotated = np.stack([sin * np.cos(angles) + cos * np.sin(angles), cos * np.cos(angles) - sin * np.sin(angles)], -1)
    np.testing.assert_allclose(rotated.reshape(100, 16)[: 100 - shift], table[shift:], atol=2e-5)


def test_rotary_scores_depend_on_position_difference():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 3, 8))

    def score(i, j):
        return (rotary(q, jnp.array([i])) * rotary(k, jnp.array([j]))).sum(-1)

    # Angles up to 1,000 carry an error of 1,000 float32 units.
    np.testing.assert_allclose(score(7, 3), score(1007, 1003), atol=1e-3)
    np.testing.assert_allclose(score(0, 0), (q * k).sum(-1), atol=1e-5)


def test_rotary_keeps_norms_and_dtype():
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8))
    rotated = rotary(x, jnp.arange(5))
    np.testing.assert_allclose(jnp.linalg.norm(rotated, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)
    assert rotary(x.astype(jnp.bfloat16), jnp.arange(5)).dtype == jnp.bfloat16


def test_rotary_takes_positions_per_sequence():
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8))
    positions = jnp.stack([jnp.arange(5), jnp.arange(5) + 7])
    np.testing.assert_allclose(rotary(x, positions)[1], rotary(x[1], jnp.arange(5) + 7), atol=1e-6)
    np.testing.assert_array_equal(rotary(x, positions[1:]), rotary(x, positions[1]))


@pytest.mark.parametrize(
    "encode", [lambda: sinusoidal(jnp.arange(3), 5), lambda: rotary(jnp.ones((3, 1, 5)), jnp.arange(3))]
)
def test_odd_width_raises_one_line(encode):
    with pytest.raises(ValueError, match="there are 5: use an even number"):
        encode()


@pytest.mark.parametrize("shape", [(4,), (5, 1), (1, 2, 5)])
def test_rotary_wrong_number_of_positions_raises(shape, own_errors):
    with pytest.raises(ValueError, match=r"positions have shape .*, expected \(5,\) or \(2, 5\): one per token"):
        rotary(jnp.ones((2, 5, 3, 8)), jnp.ones(shape, int))


def test_learned_positions_look_up_table():
    table = LearnedPositions(context=6, features=4)
    params = table.init(jax.random.key(0), jnp.arange(6))
    np.testing.assert_array_equal(
        table.apply(params, jnp.array([[3, 1]])), params["params"]["embedding"][jnp.array([[3, 1]])]
    )
