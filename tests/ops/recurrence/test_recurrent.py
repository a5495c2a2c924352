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
    """Inputs for all members: `[T, H, …]`, keys of norm 1, decays in (0, 1)."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, T, H, K))
    drawn = {"q": q, "k": k / np.linalg.norm(k, axis=-1, keepdims=True), "v": rng.standard_normal((T, H, V))}
    drawn |= {"alpha": rng.uniform(0.3, 1, (T, H)), "beta": rng.uniform(0, 2, (T, H))}
    drawn |= {"alphas": rng.uniform(0.3, 1, (T, H, K)), "a": rng.uniform(0, 1, (T, H, K))}
    by_head = {"gamma": 1 - 2.0 ** (-5 - np.arange(H)), "rate": -np.linspace(0.5, 2, H)}
    drawn |= {name: np.broadcast_to(x, (T, H)) for name, x in by_head.items()}
    return drawn | {"w": rng.uniform(0, 1, (T, H, V)), "key": drawn["k"][::-1]}


def by_head(paper, *arrays, **options):
    return np.stack([paper(*(x[:, h] for x in arrays), **options) for h in range(H)], axis=1)


# A paper's recurrence, its arrays, and our arguments that add to or replace q, k and v.
MEMBERS = {
    "linear": (functools.partial(papers.linear_attention, normalized=False), "q k v", lambda x: {}),
    "retention": (
        lambda q, k, v, gamma: papers.retention(q, k, v, gamma[0]),
        "q k v gamma",
        lambda x: {"g": np.log(x["gamma"])},
    ),
    "mamba2": (
        lambda x, dt, a, b, c: papers.mamba2(x, dt, a[0], b, c),
        "v beta rate k q",
        lambda x: {"v": x["beta"][..., None] * x["v"], "g": x["beta"] * x["rate"]},
    ),
    "gla": (papers.gla, "q k v alphas", lambda x: {"g": np.log(x["alphas"])}),
    "hgrn2": (papers.hgrn2, "v alphas q", lambda x: {"k": 1 - x["alphas"], "g": np.log(x["alphas"])}),
    "delta_net": (papers.delta_net, "q k v beta", lambda x: {"beta": x["beta"]}),
    "gated_delta_net": (
        papers.gated_delta_net,
        "q k v alpha beta",
        lambda x: {"g": np.log(x["alpha"]), "beta": x["beta"]},
    ),
    "kda": (papers.kda, "q k v alphas beta", lambda x: {"g": np.log(x["alphas"]), "beta": x["beta"]}),
    "gdn2": (
        papers.gdn2,
        "q k v alphas a w",
        lambda x: {"v": x["w"] * x["v"], "g": np.log(x["alphas"]), "erase": (x["k"], x["a"] * x["k"])},
    ),
    "rwkv7": (
        papers.rwkv7,
        "q key v alphas k a",
        lambda x: {"k": x["key"], "g": np.log(x["alphas"]), "erase": (x["a"] * x["k"], x["k"] / x["alphas"])},
    ),
}


@pytest.mark.parametrize("paper, names, arguments", MEMBERS.values(), ids=MEMBERS)
def test_specification_equals_recurrence_of_the_paper(float64, paper, names, arguments):
    x = draws()
    expected = by_head(paper, *(x[name] for name in names.split()))
    out = jax.jit(functools.partial(recurrent, scale=1.0))(**{name: x[name] for name in "qkv"} | arguments(x))
    assert out.dtype == np.float64
    np.testing.assert_allclose(out, expected, atol=1e-10, rtol=0)


def test_column_of_ones_normalizes_linear_attention(float64):
    x = draws()
    q, k = np.abs(x["q"]), np.abs(x["k"])
    expected = by_head(papers.linear_attention, q, k, x["v"], normalized=True)
    with_ones = np.concatenate([x["v"], np.ones((T, H, 1))], axis=-1)
    out = jax.jit(recurrent)(q, k, with_ones)  # the scale cancels
    np.testing.assert_allclose(out[..., :-1] / out[..., -1:], expected, atol=1e-10, rtol=0)


def test_gated_delta_product_equals_delta_steps_read_after_the_last(float64):
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
