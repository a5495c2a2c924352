"""The families of models in `transformers` that a `GPT` can be, by the options of their config.json."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from attnlab.support.errors import UserError

_GPT2 = {
    "vocab_size": "vocab_size",
    "n_embd": "width",
    "n_layer": "num_layers",
    "n_head": "num_heads",
    "n_positions": "context",
    "activation_function": "activation",
    "layer_norm_epsilon": "norm_epsilon",
    "tie_word_embeddings": "tie_embeddings",
}
DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")  # of GPT-2
ALL_DROPOUTS = (*DROPOUTS, "attention_dropout")
_DECODER = {
    "vocab_size": "vocab_size",
    "hidden_size": "width",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "max_position_embeddings": "context",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tie_embeddings",
}
_LLAMA = _DECODER | {"hidden_act": "activation"}
_GEMMA = _DECODER | {
    "hidden_activation": "activation",
    "attention_bias": "attention_bias",
    "final_logit_softcapping": "logit_cap",
}
_DEFAULTS = {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}
_SLIDING = {"sliding_window": 4096}
_SOME_SLIDING = _SLIDING | {
    "use_sliding_window": False,
    "max_window_layers": 28,
    "layer_types": None,
    "num_key_value_heads": 32,
}
_GEMMA_DEFAULTS = _DEFAULTS | {
    "sliding_window": 4096,
    "layer_types": None,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
}
_GATED = {"positions": "rotary", "norm": "rms", "mlp": "gated", "use_bias": False}
_GEMMA_FIELDS = _GATED | {"norm": "rms_plus_one", "norm_at": "both"}

_EXPERTS = ("moe", "dbrx", "dots1", "mixtral")  # within the model_type of a mixture of experts


class Family(NamedTuple):
    """Properties of all models of one `model_type`."""

    architecture: str  # the class of `transformers`
    fields: Mapping[str, Any]  # fields of `GPT` that all models have
    options: Mapping[str, str]  # options of config.json that set a field directly
    # Values of options that a config.json may lack. Options of windows, local rotary bases and scales of scores exist
    # only in the families that name them here.
    defaults: Mapping[str, Any]
    only: Mapping[str, Any] = {}  # options that change the function, with the one supported value
    fused: bool = False  # whether a block's projections of the same input are one tensor
    scales_rotary: bool = True
    divides: bool = False  # whether num_attention_heads must divide hidden_size


FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        {"positions": "learned", "norm": "layer", "use_bias": True},
        _GPT2,
        {
            "vocab_size": 50257,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "scale_attn_weights": True,
            **dict.fromkeys(DROPOUTS, 0.1),
        },
        {"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    ),
    "llama": Family(
        "LlamaForCausalLM",
        _GATED,
        _LLAMA | {"attention_bias": "attention_bias", "mlp_bias": "use_bias"},
        _DEFAULTS | {"attention_bias": False, "mlp_bias": False},
        divides=True,
    ),
    "mistral": Family("MistralForCausalLM", _GATED, _LLAMA, _DEFAULTS | _SLIDING | {"num_key_value_heads": 8}),
    "qwen2": Family("Qwen2ForCausalLM", _GATED | {"qkv_bias": True}, _LLAMA, _DEFAULTS | _SOME_SLIDING),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        _GATED | {"qk_norm": True},
        _LLAMA | {"attention_bias": "attention_bias"},
        _DEFAULTS | _SOME_SLIDING | {"attention_bias": False, "head_dim": 128},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        _GEMMA_FIELDS,
        _GEMMA | {"attn_logit_softcapping": "soft_cap"},
        _GEMMA_DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        divides=True,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        _GEMMA_FIELDS | {"qk_norm": True},
        _GEMMA,
        _GEMMA_DEFAULTS | {"sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 10_000.0},
        {"use_bidirectional_attention": False},
        divides=True,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        _GATED | {"norm_at": "after", "qk_norm": True, "qk_norm_joint": True},
        _LLAMA | {"attention_bias": "attention_bias"},
        _DEFAULTS | {"attention_bias": False, "rms_norm_eps": 1e-5},
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        _GATED,
        _LLAMA,
        _DEFAULTS | {"sliding_window": None, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
        fused=True,
        scales_rotary=False,
    ),
}


def family_of(config: Mapping, name: str) -> str:
    """The `model_type` of a config, "gpt2" where it is missing; UserError for an unsupported one."""
    model_type = config.get("model_type", "gpt2")
    where = f"{name}: model_type = {model_type!r} in its config"
    experts = any("experts" in str(option) and count for option, count in config.items())
    if experts or any(word in str(model_type) for word in _EXPERTS):
        raise UserError(f"{where}: a mixture of experts is not supported")
    if model_type not in FAMILIES:
        reads = " reads more than text" if "vision_config" in config or "audio_config" in config else ""
        raise UserError(f"{where}{reads}: expected one of {', '.join(FAMILIES)}")
    if config.get("quantization_config"):
        raise UserError(f"{name}: quantization_config in its config: quantised weights are not supported")
    return model_type
