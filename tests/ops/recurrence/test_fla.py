"""The linear recurrence against the recurrent forms of flash-linear-attention, which compute in float32."""

import functools

import jax
import numpy as np
import pytest

from attnlab import linear_recurrence
from tests.ops.references import naive

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("einops", reason="einops is not installed")
B, T, H, K, V = 2, 40, 2, 8, 6
rng = np.random.default_rng(0)


def normal(*shape):
    return rng.standard_normal((B, T, H, *shape)).astype(np.float32)


def uniform(low, high, *shape):
    return rng.uniform(low, high, (B, T, H, *shape)).astype(np.float32)


Q, KEY, VALUE = normal(K), normal(K), normal(V)
KEY /= np.linalg.norm(KEY, axis=-1, keepdims=True)
LOG_DECAY, LOG_DECAYS = np.log(uniform(0.5, 1)), np.log(uniform(0.5, 1, K))
BETA, A, W = uniform(0, 1), uniform(0, 1, K), uniform(0, 1, V)


def call(function, *arrays, heads_first=False, **options):
    """The output `[B, T, H, V]` of a torch function."""
    arrays = [torch.tensor(np.swapaxes(x, 1, 2) if heads_first else x) for x in arrays]
    out = function(*arrays, **options)
    out = (out[0] if isinstance(out, tuple) else out).numpy()
    return np.swapaxes(out, 1, 2) if heads_first else out


def gated_delta_rule():
    out = call(naive("gated_delta_rule").naive_recurrent_gated_delta_rule, Q, KEY, VALUE, BETA, LOG_DECAY)
    return out, ((Q, KEY, VALUE, LOG_DECAY, BETA), {})


def gdn2():
    out = call(naive("gdn2").naive_recurrent_gdn2, Q, KEY, VALUE, LOG_DECAYS, A, W)
    return out, ((Q, KEY, W * VALUE, LOG_DECAYS), {"erase": (KEY, A * KEY)})


def generalized_delta_rule():
    """The state is read before it decays, S ← exp(g) S + β αᵀ S + k vᵀ: e = −β and r = α exp(−g)."""
    arrays, decays = (Q, normal(K), VALUE, -KEY, A * KEY), np.log(uniform(0.6, 1, K))
    path = "generalized_delta_rule/dplr"
    out = call(naive(path).dplr_recurrence, *arrays, decays, heads_first=True)
    return out, ((*arrays[:3], decays), {"erase": (-arrays[4], arrays[3] * np.exp(-decays))})


def gated_delta_product():
    """Two steps per token: the first applies the decay, and outputs are read after the second."""
    k, v, beta = (np.concatenate([x, x[::-1]], axis=1) for x in (KEY, VALUE, BETA))
    options = {"scale": K**-0.5, "num_householder": 2}
    out = call(naive("gated_delta_product").naive_recurrent_gated_delta_product, Q, k, v, LOG_DECAY, beta, **options)
    g = np.stack([LOG_DECAY, np.zeros_like(LOG_DECAY)], axis=2).reshape(B, 2 * T, H)
    return np.repeat(out, 2, axis=1), ((np.repeat(Q, 2, axis=1), k, v, g, beta), {})


MEMBERS = [gated_delta_rule, gdn2, generalized_delta_rule]


@pytest.mark.parametrize("member", [*MEMBERS, gated_delta_product], ids=lambda member: member.__name__)
def test_all_forms_equal_naive_form_of_fla(member):
    expected, (arrays, options) = member()
    run = jax.jit(functools.partial(linear_recurrence, **options), static_argnames="impl")
    read = slice(1, None, 2) if member is gated_delta_product else slice(None)  # after the last step of a token
    for impl in ("recurrent", "chunked", "parallel"):
        np.testing.assert_allclose(run(*arrays, impl=impl)[:, read], expected[:, read], rtol=1e-5, atol=1e-5)
