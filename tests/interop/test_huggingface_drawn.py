"""Random configs over all options of every family: the logits of transformers, or an error that names the option."""

import copy
import functools
import re
import warnings

import numpy as np
import pytest

from attnlab.interop.huggingface import from_hf, make_config, make_model
from attnlab.interop.huggingface.families import FAMILIES
from attnlab.support.errors import UserError
from tests.interop.huggingface_peers import GLOBAL, LINEAR, LLAMA3, LOCAL, NO_POSITIONS, RECURRENT, YARN, weights

# Few sizes, so that models share their operations' programs; windows are shorter than the texts.
TEXT = np.random.default_rng(0).integers(0, 32, (2, 14))
ALWAYS = {"vocab_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "hidden_size": 16}
ALWAYS |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": None}
ALWAYS_GPT2 = {"vocab_size": 32, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "pad_token_id": None}
# Not too small: normalizing a few numbers near 0 would multiply rounding errors, on both sides.
DELTA = {"linear_num_key_heads": 2, "linear_key_head_dim": 12, "linear_num_value_heads": 4, "linear_value_head_dim": 10}
SMALL = {
    "gpt2": ALWAYS_GPT2,
    "gemma2": ALWAYS | {"head_dim": 4, "sliding_window": 5},
    "gemma3_text": ALWAYS | {"head_dim": 4, "sliding_window": 5},
    "qwen3_next": ALWAYS | DELTA | {"head_dim": 8, "num_experts": 0, "full_attention_interval": 2},
    "olmo_hybrid": ALWAYS | DELTA,
    "mamba2": {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "pad_token_id": None}
    | {"num_heads": 4, "head_dim": 8, "state_size": 6, "n_groups": 2},
    "bamba": ALWAYS | {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 6},
    "deepseek_v3": ALWAYS
    | {"num_key_value_heads": 4, "first_k_dense_replace": 2, "kv_lora_rank": 10, "q_lora_rank": 12}
    | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5, "n_routed_experts": 8, "n_group": 2}
    | {"topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
}
ACTIVATIONS = ["gelu_new", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "silu", "swish", "tanh", "mish", "quick_gelu"]
KINDS = [[LOCAL, GLOBAL], [GLOBAL, LOCAL], [LOCAL, LOCAL], [GLOBAL, GLOBAL], None]
PART = {"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.5}
SCALES = [
    {"rope_type": "default", "rope_theta": 500.0},
    {"type": "linear", "factor": 3.0},
    LINEAR,
    LLAMA3 | {"original_max_position_embeddings": 16},
    YARN | {"original_max_position_embeddings": 16},
    YARN | {"original_max_position_embeddings": 16, "mscale": 1.2, "mscale_all_dim": 0.0},
    YARN | {"original_max_position_embeddings": 16, "mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False},
    YARN | {"original_max_position_embeddings": 8, "attention_factor": 0.8, "beta_fast": 4.0, "beta_slow": 0.5},
    YARN | {"factor": None, "original_max_position_embeddings": 8},
    {"rope_type": "yarn", "factor": 0.5},
    PART,
    PART | {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0], "factor": 2.0},
    {"rope_type": "default", "mrope_section": [1, 1]},
    {GLOBAL: LINEAR, LOCAL: {"rope_type": "default", "rope_theta": 100.0}},
    {GLOBAL: PART, LOCAL: LINEAR},
    {GLOBAL: LINEAR},
]
# With scales of attention scores.
LATENT_SCALES = [
    YARN | {"original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0},
    YARN | {"original_max_position_embeddings": 16, "mscale_all_dim": 0.5},
    LINEAR | {"mscale_all_dim": 0.8},
    {"rope_type": "default", "rope_theta": 500.0, "mscale_all_dim": 2.0},
]
# Values to draw for options of a config.json; for other options, the default and one more.
VALUES = {"activation_function": ACTIVATIONS, "hidden_act": ACTIVATIONS, "hidden_activation": ACTIVATIONS}
VALUES |= {"attention_bias": [False, True], "mlp_bias": [False, True], "head_dim": [None, 4, 8], "n_inner": [None, 24]}
VALUES |= {"num_attention_heads": [4, 2], "num_key_value_heads": [4, 2, 1, None], "query_pre_attn_scalar": [4, 16, 256]}
VALUES |= {"attn_logit_softcapping": [None, 1.5], "final_logit_softcapping": [None, 2.0], "pad_token_id": [None, 0, 5]}
VALUES |= {"layer_types": KINDS, "max_window_layers": [0, 1, 2, 28], "use_bidirectional_attention": [None, False, True]}
VALUES |= {"layer_norm_epsilon": [1e-5, 1e-1], "rms_norm_eps": [1e-6, 1e-1], "rope_parameters": [None, *SCALES]}
VALUES |= {"original_max_position_embeddings": [16, 32], "sliding_window": [None, 3, 6]}
VALUES |= {"bos_token_id": [None, 3], "eos_token_id": [None, 2, [1, 2]]}
SILU = ["silu", "silu", "silu", "swish", "gelu"]  # others are rejected
HYBRIDS = [[RECURRENT, GLOBAL], [GLOBAL, RECURRENT], [RECURRENT] * 2, [GLOBAL] * 2, [LOCAL, RECURRENT], None]
LIMITS = [[0.0, float("inf")], [0.0, {"__float__": "Infinity"}], [0.0, 0.5], [0.01, float("inf")], None]
# For families with recurrent layers, values that replace those above.
DELTA_VALUES = {"hidden_act": SILU, "layer_types": HYBRIDS, "linear_conv_kernel_dim": [4, 2, 1]}
DELTA_VALUES |= {"linear_num_key_heads": [2, 1, 4], "linear_num_value_heads": [4, 8, 2]}
VALUES_OF = {
    "qwen3_next": DELTA_VALUES
    | {"head_dim": [8, 16], "mlp_only_layers": [None, [], [0], [0, 1]]}  # a quarter of a head is an even number
    | {"num_experts": [0, 2, 4], "num_experts_per_tok": [1, 2]}
    | {"moe_intermediate_size": [8], "shared_expert_intermediate_size": [8]},
    "olmo_hybrid": DELTA_VALUES
    | {"linear_num_key_heads": [2, 1, None], "linear_num_value_heads": [4, 8, None]}
    | {"rope_parameters": [NO_POSITIONS["rope_parameters"], {"rope_theta": None}, None, *SCALES]},
    "mamba2": {"conv_kernel": [4, 2, 1], "expand": [2, 2, 1, 4], "head_dim": [8, 4, 16], "hidden_act": SILU}
    | {"n_groups": [2, 1, 4], "num_heads": [4, 4, 2, 8], "time_step_limit": LIMITS},
    "bamba": {"attn_layer_indices": [None, [], [0], [1], [0, 1], [1, 9]], "hidden_act": SILU}
    | {"hidden_size": [16, 32], "mamba_d_head": ["auto", 8, 4]}  # half a head is an even number of features
    | {"mamba_expand": [2, 1, 4], "mamba_n_groups": [2, 1, 4], "mamba_n_heads": [4, 2, 8], "time_step_limit": LIMITS},
    "diffllama": {"head_dim": [None, 6, 8], "lambda_std_dev": [0.1, 0.5]},
    "deepseek_v3": {"first_k_dense_replace": [2, 2, 2, 1, 0, 3, 61], "head_dim": [4, 8], "kv_lora_rank": [10, 12, 40]}
    | {"num_attention_heads": [4, 3], "num_key_value_heads": [4, 4, 3, 2, None], "num_experts_per_tok": [2, 1]}
    | {"num_mtp_layers": [1, 0, 2], "q_lora_rank": [None, 12, 14], "qk_nope_head_dim": [6, 9]}
    | {"rope_interleave": [True, False, None]}
    | {"rope_parameters": [None, *SCALES, *LATENT_SCALES, *LATENT_SCALES]},
}
# Options of older files and of other families, which transformers accepts in any config.json.
OTHERS = {"rope_theta": [1e4, 50.0], "rope_scaling": [None, *SCALES], "rope_local_base_freq": [1e4, 30.0]}
OTHERS |= {"rope_interleaved": [False, True], "partial_rotary_factor": [1.0, 0.5], "sliding_window_pattern": [2, 3]}
OTHERS |= {"position_embedding_type": ["absolute", "relative_key"], "is_causal": [True, False], "qk_norm": [True]}
OTHERS |= {"is_decoder": [True, False], "clip_qkv": [None, 8.0], "logit_scale": [0.5], "torch_dtype": ["float32"]}
OTHERS |= {"_name_or_path": ["somebody/model"], "n_ctx": [32], "nonsense": [1]}
OTHERS_OF = {
    "deepseek_v3": {"num_nextn_predict_layers": [0, 1], "moe_layer_freq": [1], "qk_head_dim": [10], "head_dim": [4, 8]},
    "qwen3_next": {"full_attention_interval": [2, 1, 3]},
    "mamba2": {"num_nextn_predict_layers": [0, 1]},
}
ANY = ("sliding_window", "layer_types", "attention_bias", "mlp_bias", "head_dim", "attn_logit_softcapping")


@functools.cache
def torch_and_class(family):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.logging.set_verbosity_error()
    return torch, transformers.models.auto.CONFIG_MAPPING[family], transformers.AutoModelForCausalLM


def beside(default):
    """A default, and another value of its type."""
    if isinstance(default, bool):
        return [default, not default]
    return [default, 2 * default or 0.1] if isinstance(default, int | float) else [default]


def drawn(family, draw):
    """A config.json: options that make a model small, and random other options."""
    from transformers import PreTrainedConfig

    fields = torch_and_class(family)[1].__dataclass_fields__
    small = SMALL.get(family, ALWAYS)
    family_values = {
        name: beside(small.get(name, fields[name].default))
        for name in set(fields) - set(PreTrainedConfig.__dataclass_fields__)
    }
    values = family_values | VALUES | OTHERS | OTHERS_OF.get(family, {}) | VALUES_OF.get(family, {})
    config = small | {"model_type": family}
    others = sorted({*OTHERS, *OTHERS_OF.get(family, {}), *(ANY if family != "gpt2" else ())} - set(family_values))
    for options, number in ((sorted(family_values), draw.integers(1, 6)), (others, draw.integers(0, 3))):
        for option in draw.permutation(options)[:number].tolist():
            config[option] = values[option][draw.integers(len(values[option]))]
    return config


def theirs(family, config):
    """Logits and state of transformers, or None if it rejects the config or fails."""
    torch, config_class, auto = torch_and_class(family)
    try:
        config = config_class.from_dict(copy.deepcopy(config))
        model = auto.from_config(config, attn_implementation="eager").eval().float()
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for path, array in weights({path: tuple(x.shape) for path, x in parameters.items()}).items():
                parameters[path].copy_(torch.from_numpy(array))
            return model(torch.from_numpy(TEXT)).logits.numpy(), model.state_dict()
    except Exception:  # of many kinds: transformers checks little
        return None


def assert_same_or_refused(family, config):
    """True if the models were compared, False if ours was rejected, None if transformers fails."""
    if (answer := theirs(family, config)) is None:
        return None
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            model, params = from_hf(answer[1], config)
        except UserError as error:
            named = re.search(r"(\w+) = .* in its config", str(error))
            assert named and named[1] in str(config), (config, str(error))
            return False
    assert "nonsense" not in config or any("nonsense" in str(warning.message) for warning in told), config
    # Logits of Qwen3-Next differ from float64 by up to 8.3e-6 in transformers, and 6.4e-6 here.
    scale, tolerance = max(1.0, np.abs(answer[0]).max()), 2e-5 if family == "qwen3_next" else 1e-5
    close = functools.partial(np.testing.assert_allclose, desired=answer[0] / scale, rtol=0, err_msg=config)
    close(model.apply(params, TEXT) / scale, atol=tolerance)
    assert family == "deepseek_v3" or make_model(make_config(model, family)) == model
    return True


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_config_has_transformers_logits_or_is_rejected_by_name(family):
    pytest.importorskip("transformers", reason="transformers is not installed")
    draw, outcomes = np.random.default_rng(0), []
    while len(outcomes) - outcomes.count(None) < 8:  # a draw takes about a second
        outcomes.append(assert_same_or_refused(family, drawn(family, draw)))
    assert outcomes.count(True) >= 3, outcomes
