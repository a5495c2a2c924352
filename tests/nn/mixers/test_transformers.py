"""Kimi Delta Attention equals the transformers layer with the same weights; tests/interop compares whole models."""

import jax
import numpy as np
import pytest

from attnlab.nn import KimiDeltaAttention
from tests.parameters import parameters

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
X = np.random.default_rng(0).standard_normal((2, 70, 16)).astype(np.float32)
NAMES = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "b_proj": "b",
    "forget_gate.f_a_proj": "decay_down",
    "forget_gate.f_b_proj": "decay_up",
    "g_a_proj": "gate_down",
    "g_b_proj": "gate_up",
}


def test_kimi_delta_attention_equals_kimi_linear():
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear", reason="it has no Kimi Linear")
    options = {"linear_num_heads": 2, "linear_head_dim": 6, "rms_norm_eps": 1e-5, "layer_types": ["linear_attention"]}
    config = transformers.KimiLinearConfig(hidden_size=16, num_hidden_layers=1, vocab_size=9, **options)
    module = KimiDeltaAttention(2, key_dim=6, value_dim=6)
    variables = parameters(module, X)
    p = variables["params"]

    def flat(name):
        """A kernel as a matrix, `[in, H·D]`."""
        return p[name]["kernel"].reshape(len(p[name]["kernel"]), -1)

    convs = [flat(f"{name}_conv") for name in ("query", "key", "value")]
    weights = {f"{theirs}.weight": flat(name).T for theirs, name in NAMES.items()} | {
        "conv1d.weight": np.concatenate(convs, axis=1).T[:, None],
        "o_proj.weight": p["out"]["kernel"].reshape(-1, 16).T,
        "o_norm.weight": p["norm"]["scale"],
        "forget_gate.A_log": p["A_log"].reshape(1, 1, -1, 1),
        "forget_gate.dt_bias": p["decay_up"]["bias"].reshape(-1),
    }
    layer = kimi.KimiLinearDeltaAttention(config, 0).eval()
    layer.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in weights.items()})
    with torch.no_grad():
        expected = layer(torch.from_numpy(X))
    out = jax.jit(module.apply)(variables, X)
    # 70 tokens through a recurrence and a norm in float32, on both sides.
    np.testing.assert_allclose(out, expected.numpy(), atol=2e-5 * float(expected.abs().max()))
