"""Building blocks of the studies."""

import jax
import numpy as np
import pytest

from attnlab._studies import complexity, heads, markov, norms, rank, recall, scaling, training
from attnlab._studies.positions import rotation
from attnlab.nn import GPT, sinusoidal
from attnlab.study import fitting


def test_jacobian_norm_matches_autodiff(float64):
    """‖J‖² = Σp² − 2Σp³ + (Σp²)², against automatic differentiation."""
    # The square is a difference of numbers of size 1, off by 2⁻⁵²; its root by 2⁻²⁶ where it is 0.
    jacobian = jax.jit(jax.jacobian(jax.nn.softmax))
    for scale in (0.0, 1.0, 30.0):
        s = scale * np.random.default_rng(0).standard_normal(50)
        exact = np.linalg.norm(jacobian(s))
        weights = np.exp(s - s.max())
        np.testing.assert_allclose(scaling.jacobian_norm(weights / weights.sum()), exact, atol=2**-26)


def test_composite_norm_is_of_the_largest_column_and_row_sums():
    assert rank.norm(np.array([[1.0, -3.0], [0.0, 1.0]])) == pytest.approx((4 * 4) ** 0.5)


def test_slopes_are_three_where_the_fall_is_doubly_exponential():
    logs = np.array([[-1.0, -3.0, -9.0, -27.0], [-1.0, -2.0, -3.0, -4.0]])
    np.testing.assert_allclose(rank.slopes(logs), [[3, 3], [1, 1]])


def test_needed_width_is_the_smallest_with_enough_recall():
    rows = [{"mixer": "GRU", "width": w, "pairs": n, "recalled": w / (10 * n)} for w in (16, 32) for n in (1, 2, 4)]
    assert recall.needed(rows, "GRU") == {1: 16, 2: 32, 4: np.inf}


def test_looks_are_denser_in_the_first_fifth():
    looks = markov.looks(1000)
    assert looks[:4] == [0, 10, 20, 30] and looks[-2:] == [950, 1000] and len(looks) == 37


def test_exponents_of_exact_powers_are_recovered():
    rows = [
        {"layer": "x", "n": n, "d": d, "k or r": r, "flops": 7 * n**2 * d * r**0.5}
        for n in (1, 4, 16)
        for d in (2, 8)
        for r in (3, 9)
    ]
    np.testing.assert_allclose(complexity.exponents(rows)["x"], (2, 1, 0.5))


def test_gru_flops_are_step_times_trips():
    """XLA counts the loop body of a GRU over n tokens once, so the study multiplies one step by the trip count."""
    step, program = complexity.gru_step(8), complexity.compiled_for(*complexity.layer_call(complexity.GRU(), 16, 8))
    assert complexity.count_flops(program) < 2 * complexity.count_flops(step), (
        "if XLA counts trips itself, do not multiply"
    )
    assert complexity.count_trips(program) == 16
    assert complexity.count_flops(step) >= 6 * 2 * 8 * 8, "six matrices"


def test_dilated_convolutions_reach_n_in_log_k_n_layers():
    for k, n, layers in ((2, 16, 4), (5, 26, 3)):
        assert complexity.conv_path(n, k) == layers
        assert 1 + layers * (k - 1) < n, "as many undilated layers reach less"


@pytest.mark.parametrize("shift", [1, 11, 500])
def test_sinusoidal_shift_is_a_rotation(shift):
    matrix = rotation(shift, 32)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(32), atol=1e-12)
    assert np.linalg.det(matrix) == pytest.approx(1)
    encode, places = jax.jit(sinusoidal, static_argnums=1), np.arange(50, dtype=np.int32)
    # float32 angles of up to 550 are off by half a unit in the last place, 3e-5.
    np.testing.assert_allclose(encode(places + shift, 32), encode(places, 32) @ matrix.T, atol=6e-5)


def test_norms_examples_have_the_requested_length():
    x = np.asarray(jax.jit(norms.examples, static_argnums=(1, 2, 3))(jax.random.key(0), 500, 8.0, 8.0))
    lengths = np.linalg.norm(x, axis=-1).mean(0)
    np.testing.assert_allclose(lengths[-1] / lengths[:-1].mean(), 8, rtol=0.1)
    assert (x[:, norms.partners()] * x[:, :-1]).sum(-1).mean() > 10, "partners share a pattern"


def test_text_detects_language_and_trains_a_model(tmp_path):
    path = tmp_path / "texto.txt"
    path.write_text("dijo que el gato que vio no era el que él decía. " * 40, encoding="utf-8")
    text = fitting.read(str(path))
    assert text.language == "es"
    model = GPT(text.tokenizer.vocab_size, 1, 2, 16, 16)
    params = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 4), np.int32))["params"]
    watched, advanced = [], []
    fitted = fitting.fit(
        training.text_loss(model),
        params,
        text.batches(16, 4, 0),
        40,
        learning_rate=1e-2,
        watch=lambda step, params, gradient: watched.append(step),
        advance=lambda: advanced.append(1),
    )
    before, after = (heads.score(model, p, text.held_out(16, 4, 8)) for p in (params, fitted))
    assert after < before - 0.5 and watched == list(range(40)) and len(advanced) == 40
