"""Outputs and gradients of every backend for rows with only large scores, as additive masks often make them.

The float32 log-sum-exp of such a row loses the log of the sum: weights computed from it are wrong by a factor of up
to the number of keys.
"""

import functools

import jax
import numpy as np
import pytest

import attnlab
from attnlab.masks import Causal
from tests.ops.cases import slow

SHIFTS = [sign * size for size in (0, 1e3, 1e5, 1e7, 1e9, 1e15, 1e30) for sign in (1, -1)]
LENGTH = 64
BLOCKS = {"blockwise": (16, 16), "dense": None}


def arrays(dtype):
    """q, k, v `[shifts, T, H, D]`, sinks, and a bias that shifts every second row of an example."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, LENGTH, 2, 8)).repeat(len(SHIFTS), 0) for _ in range(3))
    rows = np.arange(LENGTH) % 2
    bias = np.asarray(SHIFTS)[:, None, None, None] * rows[:, None] * np.ones(LENGTH)
    return [x.astype(dtype) for x in (q, k, v, rng.standard_normal(2), bias)]


@functools.cache
def results(impl, dtype, with_sinks=False):
    """out, lse, and the gradients of q, k, v, sinks and bias, by name."""
    mix_out, mix_lse = (np.random.default_rng(1).standard_normal((LENGTH, 2, *more)) for more in ((8,), ()))

    def total(q, k, v, sinks, bias):
        out, lse = attnlab.attention(
            q, k, v, Causal(), bias=bias, sinks=sinks if with_sinks else None, impl=impl, return_lse=True,
            block_sizes=BLOCKS[impl],
        )  # fmt: skip
        return (out * mix_out.astype(dtype)).sum() + (lse * mix_lse.astype(dtype)).sum(), (out, lse)

    with jax.enable_x64(dtype == np.float64):
        gradients, outputs = jax.jit(jax.grad(total, argnums=range(5), has_aux=True))(*arrays(dtype))
        return dict(zip(("out", "lse", "q", "k", "v", "sinks", "bias"), map(np.asarray, (*outputs, *gradients))))


@pytest.mark.parametrize("dtype, bound, with_sinks", [(np.float32, 1e-4, True), slow(np.float64, 1e-12, False)])
def test_shifted_rows_have_the_outputs_and_gradients_of_dense(dtype, bound, with_sinks):
    """Float32 rounds a logit of 1e3 by 3e-5 and one of 1e5 by 4e-3. Products in another order differ as much, so dense
    itself is no more exact. From 1e7 on, products are lost in the shift and all backends agree."""
    expected = results("dense", dtype, with_sinks)
    for name, x in results("blockwise", dtype, with_sinks).items():
        for row, exact, shift in zip(x, expected[name], SHIFTS, strict=True) if x.ndim > 1 else ():
            rounding = abs(shift) * np.finfo(dtype).eps if abs(shift) < 1e7 else 0
            atol = float(np.abs(exact).max()) * (bound + 2 * rounding)
            np.testing.assert_allclose(row, exact, rtol=0, atol=atol, err_msg=f"{name} {shift:g}")
