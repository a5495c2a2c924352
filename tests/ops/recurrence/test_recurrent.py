"""The specification of the linear recurrence against direct recurrences of the papers, in float64."""

import functools

import jax
import numpy as np
import pytest

from attnlab import linear_recurrence
from tests.ops.recurrence import papers

T, H, K, V = 11, 3, 4, 5
recurrent = functools.partial(linear_recurrence, impl="recurrent")


def draws(seed=0):
    """Inputs of all members: `[T, H, …]`, keys of length 1, decays in (0, 1)."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, T, H, K))
    drawn = {"q": q, "k": k / np.linalg.norm(k, axis=-1, keepdims=True), "v": rng.standard_normal((T, H, V))}
    drawn |= {"alpha": rng.uniform(0.3, 1, (T, H)), "beta": rng.uniform(0, 2, (T, H))}
    drawn |= {"alphas": rng.uniform(0.3, 1, (T, H, K)), "a": rng.uniform(0, 1, (T, H, K))}
    return drawn | {"w": rng.uniform(0, 1, (T, H, V)), "gamma": 1 - 2.0 ** (-5 - np.arange(H))}


def by_head(paper, *arrays, **options):
    return np.stack([paper(*(x[:, h] for x in arrays), **options) for h in range(H)], axis=1)


def linear(x):
    expected = by_head(papers.linear_attention, x["q"], x["k"], x["v"], normalized=False)
    return expected, (x["q"], x["k"], x["v"]), {}


def retention(x):
    expected = [papers.retention(*(x[name][:, h] for name in "qkv"), gamma=x["gamma"][h]) for h in range(H)]
    return np.stack(expected, 1), (x["q"], x["k"], x["v"], np.broadcast_to(np.log(x["gamma"]), (T, H))), {}


def mamba2(x):
    dt, a = x["beta"], -np.linspace(0.5, 2, H)
    expected = [papers.mamba2(x["v"][:, h], dt[:, h], a[h], x["k"][:, h], x["q"][:, h]) for h in range(H)]
    return np.stack(expected, 1), (x["q"], x["k"], dt[..., None] * x["v"], dt * a), {}


def gla(x):
    expected = by_head(papers.gla, x["q"], x["k"], x["v"], x["alphas"])
    return expected, (x["q"], x["k"], x["v"], np.log(x["alphas"])), {}


def hgrn2(x):
    expected = by_head(papers.hgrn2, x["v"], x["alphas"], x["q"])
    return expected, (x["q"], 1 - x["alphas"], x["v"], np.log(x["alphas"])), {}


def delta_net(x):
    return by_head(papers.delta_net, x["q"], x["k"], x["v"], x["beta"]), (x["q"], x["k"], x["v"], None, x["beta"]), {}


def gated_delta_net(x):
    expected = by_head(papers.gated_delta_net, x["q"], x["k"], x["v"], x["alpha"], x["beta"])
    return expected, (x["q"], x["k"], x["v"], np.log(x["alpha"]), x["beta"]), {}


def kda(x):
    expected = by_head(papers.kda, x["q"], x["k"], x["v"], x["alphas"], x["beta"])
    return expected, (x["q"], x["k"], x["v"], np.log(x["alphas"]), x["beta"]), {}


def gdn2(x):
    expected = by_head(papers.gdn2, x["q"], x["k"], x["v"], x["alphas"], x["a"], x["w"])
    return expected, (x["q"], x["k"], x["w"] * x["v"], np.log(x["alphas"])), {"erase": (x["k"], x["a"] * x["k"])}


def rwkv7(x):
    key = x["k"][::-1]
    expected = by_head(papers.rwkv7, x["q"], key, x["v"], x["alphas"], x["k"], x["a"])
    erase = (x["a"] * x["k"], x["k"] / x["alphas"])
    return expected, (x["q"], key, x["v"], np.log(x["alphas"])), {"erase": erase}


MEMBERS = [linear, retention, mamba2, gla, hgrn2, delta_net, gated_delta_net, kda, gdn2, rwkv7]


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.__name__)
def test_specification_equals_recurrence_of_the_paper(float64, member):
    expected, arrays, options = member(draws())
    out = jax.jit(functools.partial(recurrent, scale=1.0))(*arrays, **options)
    assert out.dtype == np.float64
    np.testing.assert_allclose(out, expected, atol=1e-10, rtol=0)


def test_normalized_linear_attention_is_a_column_of_ones(float64):
    x = draws()
    q, k = np.abs(x["q"]), np.abs(x["k"])
    expected = by_head(papers.linear_attention, q, k, x["v"], normalized=True)
    with_ones = np.concatenate([x["v"], np.ones((T, H, 1))], axis=-1)
    out = jax.jit(recurrent)(q, k, with_ones)  # the scale cancels
    np.testing.assert_allclose(out[..., :-1] / out[..., -1:], expected, atol=1e-10, rtol=0)


def test_gated_delta_product_is_delta_steps_read_after_the_last(float64):
    steps, x = 3, draws()
    several = [draws(seed) for seed in range(steps)]
    k, v, beta = (np.stack([each[name] for each in several], axis=1) for name in ("k", "v", "beta"))  # [T, n, H, …]
    expected = [
        papers.gated_delta_product(x["q"][:, h], k[:, :, h], v[:, :, h], x["alpha"][:, h], beta[..., h])
        for h in range(H)
    ]
    k, v, beta = (y.reshape(T * steps, *y.shape[2:]) for y in (k, v, beta))
    g = np.zeros((T, steps, H))
    g[:, 0] = np.log(x["alpha"])
    q = np.repeat(x["q"], steps, axis=0)
    out = jax.jit(functools.partial(recurrent, scale=1.0))(q, k, v, g.reshape(T * steps, H), beta)
    np.testing.assert_allclose(out[steps - 1 :: steps], np.stack(expected, 1), atol=1e-10, rtol=0)
