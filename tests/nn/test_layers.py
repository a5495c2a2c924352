"""The laws of `attnlab.testing.check_layer` hold for every layer that mixes tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.masks import Causal, SlidingWindow
from attnlab.nn import MultiHeadAttention
from attnlab.score_mods import ALiBi, SoftCap, alibi_slopes
from attnlab.testing import check_layer
from attnlab.testing.layer import LENGTH
from tests.nn import relatives
from tests.nn.mixers import cases
from tests.parameters import parameters

HEADS = {
    "plain": {},
    "rotary": {"rotary": 100.0},
    "normed": {"qk_norm": True, "head_dim": 16},  # of two features the norm keeps little but their rounding
    "window": {"mask": SlidingWindow(2)},  # in a cache that its pieces overflow
    "sinks": {"sinks": True, "score_mod": ALiBi(alibi_slopes(4))},
    "gates": {"kv_heads": 2, "score_mod": SoftCap(9.0), "forget_gate": True, "output_gate": True},
}
ATTENTION = {name: MultiHeadAttention(4, **({"mask": Causal()} | fields)) for name, fields in HEADS.items()}


class ExclusiveAttention(MultiHeadAttention):
    """Attention whose outputs have no part along the token's own value."""

    def after(self, z, v, x, context):
        v = jnp.repeat(v, z.shape[-2] // v.shape[-2], axis=-2)
        unit = v * jax.lax.rsqrt(jnp.maximum((v**2).sum(-1, keepdims=True), 1e-12))  # 0 for a value of 0
        return super().after(z - (z * unit).sum(-1, keepdims=True) * unit, v, x, context)


ATTENTION["exclusive"] = ExclusiveAttention(4, kv_heads=2, mask=Causal())
LAYERS = ATTENTION | relatives.MODULES | cases.ALL
FAST = ("window", "gates", "exclusive", "latent", "gated_delta", "mamba2")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n not in FAST else ()) for n in LAYERS])
def test_layer_obeys_the_laws_of_mixing(name):
    assert check_layer(LAYERS[name], features=8, capacity=LENGTH // (2 if name == "window" else 1)) == []


def test_subclass_that_replaces_a_step_of_attention_equals_its_formula(float64):
    x = np.random.default_rng(0).standard_normal((1, 9, 8))
    variables = parameters(LAYERS["exclusive"], x)
    p = relatives.by_path(variables)
    q, k, v = (relatives.dense(x[0], p, name) for name in ("query", "key", "value"))
    v = v.repeat(2, axis=1)
    z = np.stack([relatives.softmax(q[:, h], k[:, h // 2], 0.5**0.5) @ v[:, h] for h in range(4)], axis=1)
    z -= (z * v).sum(-1, keepdims=True) / (v * v).sum(-1, keepdims=True) * v
    expected = np.einsum("thd,hdf->tf", z, p["out/kernel"]) + p["out/bias"]
    np.testing.assert_allclose(LAYERS["exclusive"].apply(variables, x)[0], expected, rtol=1e-10, atol=1e-12)
