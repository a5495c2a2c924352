"""Regression in context: points of one linear function."""

import numpy as np

from attnlab.data.tasks import regressions


def test_regression_points_and_query_are_of_one_linear_function():
    batch = regressions(0, batch_size=500, points=6, inputs=3)
    x, y = np.asarray(batch.tokens[..., :-1]), np.asarray(batch.tokens[..., -1])
    assert batch.tokens.shape == (500, 7, 4) and (y[:, -1] == 0).all()
    expected = np.einsum("btf,bf->bt", x, batch.weights)
    np.testing.assert_allclose(y[:, :-1], expected[:, :-1], atol=1e-6)  # float32 sums of three terms
    np.testing.assert_allclose(batch.targets, expected[:, -1], atol=1e-6)


def test_regression_inputs_are_uniform_and_weights_normal():
    batch = regressions(0, batch_size=4000, points=4, inputs=5)
    x, w = np.asarray(batch.tokens[..., :-1]), np.asarray(batch.weights)
    assert x.min() >= -1 and x.max() < 1
    # Standard errors of the mean squares of 100,000 and 20,000 numbers are 0.001 and 0.01: four of each.
    assert abs((x**2).mean() - 1 / 3) < 0.004 and abs((w**2).mean() - 1) < 0.04
