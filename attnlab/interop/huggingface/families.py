"""The families of models in `transformers` that a `GPT` can be, by the options of their config.json."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from attnlab.interop.huggingface import mixer_tensors
from attnlab.interop.huggingface.config_reader import ConfigReader
from attnlab.interop.tensors import Tensor
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
_BIASED = _LLAMA | {"attention_bias": "attention_bias"}
_GEMMA = _DECODER | {
    "hidden_activation": "activation",
    "attention_bias": "attention_bias",
    "final_logit_softcapping": "logit_cap",
}
_DEFAULTS = {"rope_theta": 10_000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}
_BIASED_DEFAULTS = _DEFAULTS | {"attention_bias": False}
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

_DELTA = {
    "linear_num_key_heads": "heads",
    "linear_key_head_dim": "key_dim",
    "linear_num_value_heads": "value_heads",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "conv",
}
# Options without effect on the logits of dense models: of experts, of initial values, and of how they are computed.
_QWEN3_NEXT_SILENT = """
moe_intermediate_size shared_expert_intermediate_size num_experts_per_tok norm_topk_prob
output_router_logits router_aux_loss_coef decoder_sparse_step mlp_only_layers
"""
_OLMO_HYBRID_SILENT = "linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor"
_DEEPSEEK_V3_SILENT = """
moe_intermediate_size n_shared_experts n_routed_experts num_local_experts num_experts_per_tok n_group topk_group
routed_scaling_factor norm_topk_prob output_router_logits router_aux_loss_coef aux_loss_alpha ep_size moe_layer_freq
scoring_func seq_aux topk_method num_nextn_predict_layers num_mtp_layers qk_head_dim
"""
_MAMBA2_SILENT = """
time_step_rank time_step_min time_step_max time_step_floor rescale_prenorm_residual residual_in_fp32 chunk_size
"""

_EXPERTS = ("moe", "dbrx", "dots1", "mixtral")  # within the model_type of a mixture of experts


class Recurrent(NamedTuple):
    """The recurrent layers of a family."""

    kind: str  # the word of `GPT.pattern`
    options: Mapping[str, str]  # options of config.json that set a field of `Recurrence`
    layers: str  # the option that says which layers are of attention; "" if none are
    tensors: Callable[..., Iterator[Tensor]]
    name: str  # of the layers' tensors
    expand: str = ""  # the option that is the width of the layers over the model's, where there is one
    same_epsilon: bool = True  # whether the layers' norms have the ε of the model's; otherwise it is 1e-5
    hybrid: bool = False  # whether there must be layers of attention and recurrent ones
    period: str = ""  # the option for the number of layers to one of attention, in place of `layers`; "" for 4


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
    inner_fraction: bool = False  # whether partial_rotary_factor counts within rope_parameters alone
    rotary_optional: bool = False  # whether rope_theta may be null, for no positions
    recurrent: Recurrent | None = None
    names: Mapping[str, str] = {}  # parts of tensors' names, where they differ from Llama's
    # Parts of names in files, with their names in the state dict; tensors that have the same name there are one, joined
    # in this order.
    file_names: Mapping[str, str] = {}
    silent: str = ""  # options without effect on the logits
    extra_heads: bool = False  # whether files may have heads for later tokens, which do not change the logits
    is_written: bool = True  # whether models of GPT go out to it
    # Whether no layer has experts, though the config counts some.
    is_dense: Callable[[ConfigReader, int], bool] = lambda options, layers: False


def _is_dense_qwen3_next(options: ConfigReader, layers: int) -> bool:
    dense = options.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple):
        raise options.error("mlp_only_layers", "a list of numbers of layers, or null")
    step = options.integer("decoder_sparse_step")
    return all(layer in dense or (layer + 1) % step for layer in range(layers))


def _is_dense_deepseek_v3(options: ConfigReader, layers: int) -> bool:
    first = options.get("first_k_dense_replace")
    if not isinstance(first, int) or isinstance(first, bool) or first < layers:
        raise options.error("first_k_dense_replace", f"{layers} or more: a mixture of experts is not supported")
    return True


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
        _BIASED | {"mlp_bias": "use_bias"},
        _BIASED_DEFAULTS | {"mlp_bias": False},
        divides=True,
    ),
    "mistral": Family("MistralForCausalLM", _GATED, _LLAMA, _DEFAULTS | _SLIDING | {"num_key_value_heads": 8}),
    "qwen2": Family("Qwen2ForCausalLM", _GATED | {"qkv_bias": True}, _LLAMA, _DEFAULTS | _SOME_SLIDING),
    "qwen3": Family(
        "Qwen3ForCausalLM", _GATED | {"qk_norm": True}, _BIASED, _BIASED_DEFAULTS | _SOME_SLIDING | {"head_dim": 128}
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
        _BIASED,
        _BIASED_DEFAULTS | {"rms_norm_eps": 1e-5},
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        _GATED,
        _LLAMA,
        _DEFAULTS | {"sliding_window": None, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
        fused=True,
        scales_rotary=False,
    ),
    "qwen3_next": Family(
        "Qwen3NextForCausalLM",
        _GATED | {"norm": "rms_plus_one", "qk_norm": True, "output_gate": True},
        _BIASED,
        _BIASED_DEFAULTS
        | {
            "head_dim": 256,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.25,
            "layer_types": None,
            "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": 512,
            "decoder_sparse_step": 1,
        },
        recurrent=Recurrent(
            "gated_delta",
            _DELTA,
            "layer_types",
            mixer_tensors.gated_delta_fused,
            "linear_attn",
            period="full_attention_interval",
        ),
        silent=_QWEN3_NEXT_SILENT,
        is_dense=_is_dense_qwen3_next,
    ),
    "olmo_hybrid": Family(
        "OlmoHybridForCausalLM",
        _GATED | {"norm_at": "hybrid", "qk_norm": True, "qk_norm_joint": True},
        _BIASED,
        _BIASED_DEFAULTS | {"layer_types": None, "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True},
        rotary_optional=True,
        file_names={
            "attention_layer_norm": "input_layernorm",
            "feedforward_layer_norm": "post_attention_layernorm",
            **{f"{which}_conv1d": "conv1d" for which in "qkv"},
        },
        recurrent=Recurrent(
            "gated_delta",
            _DELTA | {"linear_allow_neg_eigval": "negative_eigenvalues"},
            "layer_types",
            mixer_tensors.gated_delta,
            "linear_attn",
            same_epsilon=False,
            hybrid=True,
        ),
        silent=_OLMO_HYBRID_SILENT,
    ),
    "mamba2": Family(
        "Mamba2ForCausalLM",
        {"positions": "none", "norm": "rms", "use_bias": False, "mlp_ratio": 0},
        {
            "vocab_size": "vocab_size",
            "hidden_size": "width",
            "num_hidden_layers": "num_layers",
            "num_heads": "num_heads",
            "max_position_embeddings": "context",  # not an option of transformers': these models have no limit
            "layer_norm_epsilon": "norm_epsilon",
            "tie_word_embeddings": "tie_embeddings",
        },
        {
            "vocab_size": 32768,
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "max_position_embeddings": 2048,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "num_heads": 128,
            "head_dim": 64,
            "state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "expand": 2,
            "time_step_limit": None,
        },
        {"use_bias": False, "use_conv_bias": True},
        recurrent=Recurrent(
            "mamba2",
            {
                "n_groups": "heads",
                "state_size": "key_dim",
                "num_heads": "value_heads",
                "head_dim": "value_dim",
                "conv_kernel": "conv",
            },
            "",
            mixer_tensors.mamba2,
            "mixer",
            "expand",
        ),
        names={"model": "backbone", "embed_tokens": "embeddings", "norm": "norm_f", "input_layernorm": "norm"},
        file_names={"embedding": "embeddings"},
        silent=_MAMBA2_SILENT,
    ),
    "bamba": Family(
        "BambaForCausalLM",
        _GATED,
        _BIASED | {"mlp_bias": "use_bias"},
        _BIASED_DEFAULTS
        | {
            "mlp_bias": False,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "attn_layer_indices": None,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_n_heads": 128,
            "mamba_d_head": "auto",
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "time_step_limit": None,
        },
        {"mamba_proj_bias": False, "mamba_conv_bias": True},
        inner_fraction=True,
        recurrent=Recurrent(
            "mamba2",
            {
                "mamba_n_groups": "heads",
                "mamba_d_state": "key_dim",
                "mamba_n_heads": "value_heads",
                "mamba_d_head": "value_dim",
                "mamba_d_conv": "conv",
            },
            "attn_layer_indices",
            mixer_tensors.mamba2,
            "mamba",
            "mamba_expand",
        ),
        names={"mlp": "feed_forward", "norm": "final_layernorm", "post_attention_layernorm": "pre_ff_layernorm"},
        silent="mamba_chunk_size num_logits_to_keep z_loss_coefficient",
    ),
    "diffllama": Family(
        "DiffLlamaForCausalLM",
        _GATED | {"mixer": "differential"},
        _BIASED,
        _BIASED_DEFAULTS | {"rms_norm_eps": 1e-5},
        {"attention_dropout": 0},
        silent="lambda_std_dev",
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        _GATED | {"mixer": "latent"},
        _BIASED,
        _BIASED_DEFAULTS
        | {
            "num_key_value_heads": 128,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "rope_interleave": True,
            "n_routed_experts": 256,
            "first_k_dense_replace": 3,
        },
        silent=_DEEPSEEK_V3_SILENT,
        is_dense=_is_dense_deepseek_v3,
        extra_heads=True,
        is_written=False,
    ),
}


def family_of(config: Mapping, name: str) -> str:
    """The `model_type` of a config, "gpt2" where it is missing; UserError for an unsupported one."""
    model_type = config.get("model_type", "gpt2")
    where = f"{name}: model_type = {model_type!r} in its config"
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        experts = any("experts" in str(option) and count for option, count in config.items())
        if experts or any(word in str(model_type) for word in _EXPERTS):
            raise UserError(f"{where}: a mixture of experts is not supported")
        reads = " reads more than text" if "vision_config" in config or "audio_config" in config else ""
        raise UserError(f"{where}{reads}: expected one of {', '.join(FAMILIES)}")
    if config.get("quantization_config"):
        raise UserError(f"{name}: quantization_config in its config: quantised weights are not supported")
    return model_type
