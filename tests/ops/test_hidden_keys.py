"""In every backend, a key hidden from all queries of its example and head is inert, whatever it holds.

A key that is visible to some query is not inert: its NaN also reaches rows that do not attend to it, because 0 · NaN
is NaN: outputs through v, and gradients through k. The NaN stays within its example and head.
"""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import attnlab
from attnlab.masks import Causal, Dense

BATCH, LENGTH, HEADS = 2, 32, 2
HIDDEN = np.random.default_rng(1).random((BATCH, HEADS, LENGTH)) < 0.3
BACKENDS = ["dense", "blockwise", "devices"]


@functools.cache
def attend(backend):
    """Outputs and gradients `[B, T, H, D]` of causal attention in which some keys of each head are hidden."""
    impl = "dense" if backend == "dense" else "blockwise"
    mask = Causal() & Dense(np.broadcast_to(~HIDDEN[:, :, None], (BATCH, HEADS, LENGTH, LENGTH)))

    def total(q, k, v):
        out = attnlab.attention(q, k, v, mask, impl=impl, block_sizes=(8, 8) if impl == "blockwise" else None)
        return (out**2).sum(), out

    return jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))


def results(backend, *arrays):
    if backend == "devices":
        mesh = jax.make_mesh((4,), ("context",), axis_types=(AxisType.Auto,))
        with jax.set_mesh(mesh), attnlab.context_parallel("context"):
            outputs = attend(backend)(*arrays)
    else:
        outputs = attend(backend)(*arrays)
    return dict(zip(("q", "k", "v", "out"), map(np.asarray, jax.tree.leaves(outputs))))


def arrays():
    return list(np.random.default_rng(0).standard_normal((3, BATCH, LENGTH, HEADS, 8), np.float32))


@pytest.mark.parametrize("backend", BACKENDS)
def test_key_hidden_from_all_queries_of_its_head_changes_no_bit(backend):
    q, k, v = arrays()
    expected = results(backend, q, k, v)
    hidden = HIDDEN.swapaxes(1, 2)[..., None]
    actual = results(backend, q, np.where(hidden, np.float32(np.nan), k), np.where(hidden, np.float32(np.inf), v))
    for name, x in expected.items():
        np.testing.assert_array_equal(actual[name], x, err_msg=name)
    assert (actual["k"][HIDDEN.swapaxes(1, 2)] == 0).all() and np.isfinite(actual["out"]).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_visible_key_stays_within_its_example_and_head(backend):
    q, k, v = arrays()
    expected = results(backend, q, k, v)
    row = int(np.argmin(HIDDEN[1, 0, 20:])) + 20
    for poisoned in (k, v):
        before, poisoned[1, row, 0] = poisoned[1, row, 0].copy(), np.nan
        actual = results(backend, q, k, v)
        poisoned[1, row, 0] = before
        assert np.isnan(actual["out"][1, row:, 0]).all()
        for name, x in expected.items():
            x, y = x.copy(), actual[name].copy()
            x[1, :, 0] = y[1, :, 0] = 0
            np.testing.assert_array_equal(y, x, err_msg=name)
