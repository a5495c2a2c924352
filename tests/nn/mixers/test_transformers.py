"""Gated DeltaNet, Kimi Delta Attention and Mamba-2 equal the layers of transformers with the same weights."""

import jax
import numpy as np
import pytest

from attnlab.nn import GatedDeltaNet, KimiDeltaAttention, Mamba2
from tests.parameters import parameters

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
X = np.random.default_rng(0).standard_normal((2, 70, 16)).astype(np.float32)
SIZES = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5}
COMMON = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 9}


def matrix(kernel):
    """The weight of a torch layer `[out, in]`, of a kernel `[in, …]`."""
    return kernel.reshape(len(kernel), -1).T


def columns(kernel, of_heads):
    """`[in, H', D]` as `[in, H, …]`: the heads that follow one another in a group."""
    return kernel.reshape(len(kernel), of_heads, -1)


def delta_weights(p) -> dict[str, np.ndarray]:
    """The weights that Qwen3-Next and OLMo Hybrid share."""
    convs = [p[f"{name}_conv"]["kernel"] for name in ("query", "key", "value")]
    conv = np.concatenate([kernel.reshape(len(kernel), -1) for kernel in convs], axis=1)
    out = p["out"]["kernel"]
    return {
        "conv1d.weight": conv.T[:, None],
        "A_log": p["A_log"],
        "dt_bias": p["dt_bias"],
        "out_proj.weight": out.reshape(-1, out.shape[-1]).T,
        "norm.weight": p["norm"]["scale"],
    }


def loaded(layer, weights):
    layer.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in weights.items()})
    return layer.eval()


def assert_equals(layer, module, variables):
    with torch.no_grad():
        expected = layer(torch.from_numpy(X))
    found = jax.jit(module.apply)(variables, X)
    # 70 tokens through a recurrence and a norm in float32, on both sides.
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-5 * float(expected.abs().max()))


def test_gated_delta_net_equals_qwen3_next():
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    options = {"linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-5, "layer_types": ["linear_attention"]}
    config = transformers.Qwen3NextConfig(**COMMON, **SIZES, **options)
    module = GatedDeltaNet(2, key_dim=6, value_dim=5, value_heads=4)
    variables = parameters(module, X)
    p = variables["params"]
    wide = [columns(p[name]["kernel"], 2) for name in ("query", "key", "value", "gate")]
    narrow = [columns(p[name]["kernel"], 2) for name in ("b", "a")]
    weights = delta_weights(p) | {
        "in_proj_qkvz.weight": matrix(np.concatenate(wide, axis=-1)),
        "in_proj_ba.weight": matrix(np.concatenate(narrow, axis=-1)),
    }
    assert_equals(loaded(Qwen3NextGatedDeltaNet(config, 0), weights), module, variables)


def test_gated_delta_net_equals_olmo_hybrid():
    hybrid = pytest.importorskip("transformers.models.olmo_hybrid.modeling_olmo_hybrid", reason="it has no OLMo Hybrid")
    kinds = ["linear_attention", "full_attention"]  # it expects one of attention
    options = {"linear_allow_neg_eigval": True, "layer_types": kinds, "num_attention_heads": 2}
    config = transformers.OlmoHybridConfig(**COMMON | {"num_hidden_layers": 2}, **SIZES, **options)
    module = GatedDeltaNet(2, key_dim=6, value_dim=5, value_heads=4, negative_eigenvalues=True)
    variables = parameters(module, X)
    p, weights = variables["params"], delta_weights(variables["params"])
    weights |= {"o_proj.weight": weights.pop("out_proj.weight"), "o_norm.weight": weights.pop("norm.weight")}
    names = {"q": "query", "k": "key", "v": "value", "g": "gate", "a": "a", "b": "b"}
    weights |= {f"{theirs}_proj.weight": matrix(p[name]["kernel"]) for theirs, name in names.items()}
    assert_equals(loaded(hybrid.OlmoHybridGatedDeltaNet(config, 0), weights), module, variables)


def test_kimi_delta_attention_equals_kimi_linear():
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear", reason="it has no Kimi Linear")
    options = {"linear_num_heads": 2, "linear_head_dim": 6, "rms_norm_eps": 1e-5, "layer_types": ["linear_attention"]}
    config = transformers.KimiLinearConfig(**COMMON, **options)
    module = KimiDeltaAttention(2, key_dim=6, value_dim=6)
    variables = parameters(module, X)
    p, weights = variables["params"], delta_weights(variables["params"] | {"dt_bias": None})
    names = {
        "q_proj": "query",
        "k_proj": "key",
        "v_proj": "value",
        "b_proj": "b",
        "forget_gate.f_a_proj": "decay_down",
        "forget_gate.f_b_proj": "decay_up",
        "g_a_proj": "gate_down",
        "g_b_proj": "gate_up",
    }
    weights = {f"{theirs}.weight": matrix(p[name]["kernel"]) for theirs, name in names.items()} | {
        "conv1d.weight": weights["conv1d.weight"],
        "o_proj.weight": weights["out_proj.weight"],
        "o_norm.weight": weights["norm.weight"],
        "forget_gate.A_log": p["A_log"].reshape(1, 1, -1, 1),
        "forget_gate.dt_bias": p["decay_up"]["bias"].reshape(-1),
    }
    assert_equals(loaded(kimi.KimiLinearDeltaAttention(config, 0), weights), module, variables)


@pytest.mark.parametrize("groups", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_mamba2_equals_transformers(groups):
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = transformers.Mamba2Config(
        **COMMON, num_heads=4, head_dim=8, state_size=6, n_groups=groups, expand=2, use_bias=False, chunk_size=16
    )
    module = Mamba2(groups, key_dim=6, value_heads=4)
    variables = parameters(module, X)
    p, out = variables["params"], variables["params"]["out"]["kernel"]
    weights = {name: p[name] for name in ("A_log", "dt_bias", "D")} | {
        "conv1d.weight": p["conv"]["kernel"].T[:, None],
        "conv1d.bias": p["conv"]["bias"],
        "in_proj.weight": matrix(p["in"]["kernel"]),
        "norm.weight": p["norm"]["scale"],
        "out_proj.weight": out.reshape(-1, out.shape[-1]).T,
    }
    assert_equals(loaded(Mamba2Mixer(config, 0), weights), module, variables)
