"""The model families of `transformers` that a `GPT` can represent.

A family is a function that reads a config.json into a `ModelConfig`, a function that writes a config.json, and a table
of tensor names. A reader sets every field that defines its models, whatever the defaults of `ModelConfig`. A writer may
be called with any model: reading its output shows whether the family supports the model.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

from attnlab.interop.huggingface import decoders, tensor_names
from attnlab.interop.huggingface import rotary as rotaries
from attnlab.interop.huggingface.config_reader import ConfigReader, activation_name
from attnlab.interop.huggingface.decoders import attention_of, biased, llama_like, write_biased
from attnlab.interop.huggingface.tensor_names import Names
from attnlab.nn import AttentionConfig, ModelConfig, Rotary
from attnlab.nn.differential import DifferentialConfig
from attnlab.nn.latent_attention import LatentConfig
from attnlab.nn.mixers.gated_delta_net import GatedDeltaConfig
from attnlab.nn.mixers.mamba2 import Mamba2Config
from attnlab.support.errors import UserError

DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")  # GPT-2's options
# Options without effect on the logits of dense models: for experts, initial values, and how logits are computed.
_QWEN3_NEXT_SILENT = """
moe_intermediate_size shared_expert_intermediate_size num_experts_per_tok norm_topk_prob
output_router_logits router_aux_loss_coef
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
_EXPERTS = ("moe", "dbrx", "dots1", "mixtral")  # substrings of model types with mixtures of experts


class Family(NamedTuple):
    """All models of one `model_type`."""

    architecture: str  # the class of `transformers`
    read: Callable[[ConfigReader], ModelConfig]
    write: Callable[[ModelConfig], dict] | None  # None for a family that is only read
    names: Names = tensor_names.LLAMA


def read_gpt2(hf: ConfigReader) -> ModelConfig:
    hf.only(scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    width, rates = hf.integer("n_embd", 768), {hf.probability(option, 0.1) for option in DROPOUTS}
    scale = None if hf.flag("scale_attn_weights", True) else 1.0
    return ModelConfig(
        vocab_size=hf.integer("vocab_size", 50257),
        num_layers=hf.integer("n_layer", 12, high=10_000),
        num_heads=hf.integer("n_head", 12),
        width=width,
        context=hf.integer("n_positions", 1024),
        dropout=rates.pop() if len(rates) == 1 else 0.0,
        positions="learned",
        use_bias=True,
        norm_epsilon=hf.number("layer_norm_epsilon", 1e-5, high=1.0),
        mlp_ratio=hf.integer("n_inner", null=4 * width) / width,
        activation=hf.activation("activation_function", "gelu_new"),
        tie_embeddings=hf.flag("tie_word_embeddings", True),
        layers=(AttentionConfig(scale=scale, qk_norm=False),),
    )


def write_gpt2(config: ModelConfig) -> dict:
    layer = attention_of(config)
    return {
        "vocab_size": config.vocab_size,
        "n_embd": config.width,
        "n_layer": config.num_layers,
        "n_head": layer.heads,
        "n_positions": config.context,
        "n_inner": config.hidden,
        "activation_function": activation_name(config.activation),
        "layer_norm_epsilon": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
        "scale_attn_weights": layer.scale != 1,
        **dict.fromkeys(DROPOUTS, config.dropout),
    }


def with_biases(config: ModelConfig) -> ModelConfig:
    """The same model with all biases, which GPT-2 always has; added biases are 0."""
    layers = (
        dataclasses.replace(layer, use_bias=True, qkv_bias=True) if isinstance(layer, AttentionConfig) else layer
        for layer in config.layers
    )
    return config.replace(use_bias=True, layers=tuple(layers))


def read_llama(hf: ConfigReader) -> ModelConfig:
    decoders.check_divides(hf)
    return llama_like(hf, AttentionConfig(**biased(hf)), use_bias=hf.flag("mlp_bias", False))


def write_llama(config: ModelConfig) -> dict:
    return write_biased(config, mlp_bias=config.use_bias)


def read_mistral(hf: ConfigReader) -> ModelConfig:
    window = hf.optional_integer("sliding_window", 4096)
    return llama_like(hf, AttentionConfig(**decoders.attention(hf, kv_heads=8, window=window)))


def write_mistral(config: ModelConfig) -> dict:
    return decoders.write_llama_like(config, sliding_window=attention_of(config, is_local=True).window)


def _read_qwen(hf: ConfigReader, options: dict) -> ModelConfig:
    """Read a Qwen2 or Qwen3: layers have a window from number `max_window_layers` on, or as `layer_types` says."""
    uses, window = hf.flag("use_sliding_window", False), hf.get("sliding_window", 4096)
    first = hf.integer("max_window_layers", 28) if hf.get("max_window_layers", 28) else 0
    by_number = [uses and window is not None and n >= first for n in range(decoders.num_layers(hf))]
    local = decoders.layer_types(hf, rotaries.LOCAL, by_number)
    if any(local) and not uses:
        raise hf.error("use_sliding_window", "true, as layer_types has sliding_attention")
    return llama_like(hf, *decoders.windowed(hf, local, options))


def _qwen_windows(config: ModelConfig) -> dict:
    local = decoders.are_local(config)
    return {
        "sliding_window": attention_of(config, is_local=True).window,
        "use_sliding_window": any(local),
        "max_window_layers": local.index(True) if any(local) else len(local),
        "layer_types": decoders.write_types(rotaries.LOCAL, local),
    }


def read_qwen2(hf: ConfigReader) -> ModelConfig:
    return _read_qwen(hf, decoders.attention(hf, kv_heads=32, use_bias=False, qkv_bias=True))


def write_qwen2(config: ModelConfig) -> dict:
    return decoders.write_llama_like(config, **_qwen_windows(config))


def read_qwen3(hf: ConfigReader) -> ModelConfig:
    return _read_qwen(hf, biased(hf, kv_heads=32, head_dim=128, qk_norm=True))


def write_qwen3(config: ModelConfig) -> dict:
    return write_biased(config, **_qwen_windows(config))


def _gemma(hf: ConfigReader, every: int, local: Mapping = {}, logit_cap: float | None = None, **options) -> ModelConfig:
    """Read a Gemma 2 or 3: all but each `every`-th layer have a window, unless `layer_types` says otherwise."""
    decoders.check_divides(hf)
    hf.silence("hidden_act sliding_window")
    hf.get("sliding_window", 4096)
    by_number = [n % every > 0 for n in range(1, decoders.num_layers(hf) + 1)]
    scale = hf.number("query_pre_attn_scalar", 256.0) ** -0.5
    options = biased(hf, kv_heads=4, head_dim=256, scale=scale, **options)
    return llama_like(
        hf,
        *decoders.windowed(hf, decoders.layer_types(hf, rotaries.LOCAL, by_number), options, **local),
        tied=True,
        activation=hf.activation("hidden_activation", "gelu_pytorch_tanh"),
        norm="rms_plus_one",
        norm_at="both",
        embedding_scale=hf.integer("hidden_size") ** 0.5,
        logit_cap=hf.optional_number("final_logit_softcapping", logit_cap),
    )


def _write_gemma(config: ModelConfig, **options) -> dict:
    return write_biased(
        config,
        hidden_activation=activation_name(config.activation, "gelu_pytorch_tanh"),
        final_logit_softcapping=config.logit_cap,
        query_pre_attn_scalar=max(1, round(attention_of(config).scale ** -2)),
        sliding_window=attention_of(config, is_local=True).window or 4096,  # required even if no layer has a window
        layer_types=decoders.write_types(rotaries.LOCAL, decoders.are_local(config)),
        **options,
    )


def read_gemma2(hf: ConfigReader) -> ModelConfig:
    return _gemma(hf, 2, logit_cap=30.0, soft_cap=hf.optional_number("attn_logit_softcapping", 50.0))


def write_gemma2(config: ModelConfig) -> dict:
    return _write_gemma(config, attn_logit_softcapping=attention_of(config).soft_cap)


def read_gemma3(hf: ConfigReader) -> ModelConfig:
    hf.only(use_bidirectional_attention=False)
    rotary, local = rotaries.read_two(hf)
    every = hf.integer("sliding_window_pattern", 6)
    return _gemma(hf, every, {"rotary": local}, rotary=rotary, qk_norm=True)


def write_gemma3(config: ModelConfig) -> dict:
    return _write_gemma(config, rope_local_base_freq=float(attention_of(config, is_local=True).rotary.base))


def read_olmo2(hf: ConfigReader) -> ModelConfig:
    layer = AttentionConfig(**biased(hf, qk_norm=True, qk_norm_joint=True))
    return llama_like(hf, layer, epsilon=1e-5, norm_at="after")


def read_phi3(hf: ConfigReader) -> ModelConfig:
    options = decoders.attention(hf, fraction=1.0, window=hf.optional_integer("sliding_window"))
    if options["rotary"].scaling != "none":
        option = rotaries.option_of(hf)
        raise hf.error(option, "no scaling: Phi-3 has its own, which GPT does not support")
    return llama_like(hf, AttentionConfig(**options), epsilon=1e-5)


def write_phi3(config: ModelConfig) -> dict:
    return write_mistral(config) | {"partial_rotary_factor": attention_of(config).rotary.fraction}


def read_qwen3_next(hf: ConfigReader) -> ModelConfig:
    dense, step = hf.get("mlp_only_layers") or [], hf.integer("decoder_sparse_step", 1)
    if not isinstance(dense, list | tuple):
        raise hf.error("mlp_only_layers", "a list of layer numbers, or null")
    if hf.get("num_experts", 512) and not all(n in dense or (n + 1) % step for n in range(decoders.num_layers(hf))):
        raise hf.error("num_experts", "0: a mixture of experts is not supported")
    hf.silence(_QWEN3_NEXT_SILENT)
    options = {"kv_heads": 2, "head_dim": 256, "fraction": 0.25, "qk_norm": True, "output_gate": True}
    layer = AttentionConfig(**biased(hf, **options))
    sizes = {"heads": 16, "key_dim": 128, "value_heads": 32, "value_dim": 128}
    delta = decoders.read_delta(hf, **sizes, norm_epsilon=hf.number("rms_norm_eps", 1e-6, high=1.0))
    recurrent = decoders.by_types(hf, hf.integer("full_attention_interval", 4))
    return llama_like(hf, *decoders.hybrid(hf, layer, delta, recurrent), norm="rms_plus_one")


def write_qwen3_next(config: ModelConfig) -> dict:
    return write_biased(config) | {
        "num_experts": 0,
        "partial_rotary_factor": attention_of(config).rotary.fraction,
        **decoders.write_delta(config),
    }


def read_olmo_hybrid(hf: ConfigReader) -> ModelConfig:
    hf.silence(_OLMO_HYBRID_SILENT)
    rotary, positions = (Rotary(), "none") if rotaries.is_off(hf) else (None, "rotary")
    layer = AttentionConfig(**biased(hf, qk_norm=True, qk_norm_joint=True, rotary=rotary))
    delta = decoders.read_delta(hf, negative_eigenvalues=hf.flag("linear_allow_neg_eigval", True))
    recurrent = decoders.by_types(hf, 4, last=False)
    if len(set(recurrent)) < 2:
        raise hf.error("layer_types", "layers of both kinds")
    layers = decoders.hybrid(hf, layer, delta, recurrent)
    return llama_like(hf, *layers, norm_at="hybrid", positions=positions)


def write_olmo_hybrid(config: ModelConfig) -> dict:
    layer = decoders.recurrent_of(config, GatedDeltaConfig)
    return write_biased(config) | {
        "linear_allow_neg_eigval": layer.negative_eigenvalues,
        **decoders.write_delta(config),
        **({"rope_theta": None, "rope_scaling": None} if config.position_encoding == "none" else {}),
    }


_MAMBA2 = {"n_groups": 8, "state_size": 128, "num_heads": 128, "head_dim": 64, "conv_kernel": 4, "expand": 2}
_BAMBA = {"mamba_n_groups": 1, "mamba_d_state": 256, "mamba_n_heads": 128, "mamba_d_head": "auto"}
_BAMBA |= {"mamba_d_conv": 4, "mamba_expand": 2}


def read_mamba2(hf: ConfigReader) -> ModelConfig:
    hf.only(use_bias=False, use_conv_bias=True)
    hf.silence(_MAMBA2_SILENT)
    decoders.check_silu(hf)
    width, epsilon = hf.integer("hidden_size", 4096), hf.number("layer_norm_epsilon", 1e-5, high=1.0)
    return ModelConfig(
        vocab_size=hf.integer("vocab_size", 32768),
        num_layers=decoders.num_layers(hf, 64),
        num_heads=hf.integer("num_heads", 128),
        width=width,
        context=hf.integer("max_position_embeddings", 2048),  # not an option of transformers, which has no limit
        positions="none",
        norm="rms",
        norm_epsilon=epsilon,
        mlp_ratio=0.0,
        tie_embeddings=hf.flag("tie_word_embeddings", False),
        layers=(decoders.read_mamba2(hf, _MAMBA2, epsilon),),
    )


def write_mamba2(config: ModelConfig) -> dict:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.context,
        "layer_norm_epsilon": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
        **decoders.write_mamba2(config, _MAMBA2),
    }


def read_bamba(hf: ConfigReader) -> ModelConfig:
    hf.only(mamba_proj_bias=False, mamba_conv_bias=True)
    hf.silence("mamba_chunk_size num_logits_to_keep z_loss_coefficient")
    at = hf.get("attn_layer_indices") or []
    if not isinstance(at, list | tuple) or not all(isinstance(n, int) for n in at):
        raise hf.error("attn_layer_indices", "the numbers of the attention layers, or null")
    hf.integer("max_position_embeddings", 262144)
    layer = AttentionConfig(**biased(hf, kv_heads=8, fraction=0.5, inner=True))
    mamba = decoders.read_mamba2(hf, _BAMBA, hf.number("rms_norm_eps", 1e-5, high=1.0))
    layers = decoders.hybrid(hf, layer, mamba, [n not in at for n in range(decoders.num_layers(hf))])
    return llama_like(hf, *layers, use_bias=hf.flag("mlp_bias", False))


def write_bamba(config: ModelConfig) -> dict:
    options = write_llama(config) | decoders.write_mamba2(config, _BAMBA)
    attention = [n for n, layer in enumerate(decoders.layers_of(config)) if not isinstance(layer, Mamba2Config)]
    fraction = {"partial_rotary_factor": attention_of(config).rotary.fraction}
    return options | {
        "rope_scaling": (options["rope_scaling"] or {"rope_type": "default"}) | fraction,
        "attn_layer_indices": attention,
    }


def read_diffllama(hf: ConfigReader) -> ModelConfig:
    hf.only(attention_dropout=0)
    hf.silence("lambda_std_dev")
    return llama_like(hf, DifferentialConfig(**biased(hf)), epsilon=1e-5)


def read_deepseek_v3(hf: ConfigReader) -> ModelConfig:
    hf.silence(_DEEPSEEK_V3_SILENT + "rope_interleave")
    heads, rotated, first = (
        hf.integer("num_attention_heads"),
        hf.integer("qk_rope_head_dim", 64),
        decoders.num_layers(hf),
    )
    dense = hf.get("first_k_dense_replace", 3)
    if not isinstance(dense, int) or isinstance(dense, bool) or dense < first:
        raise hf.error("first_k_dense_replace", f"{first} or more: a mixture of experts is not supported")
    if rotated % 2:
        raise hf.error("qk_rope_head_dim", "an even number, as pairs of features are rotated")
    if heads // hf.integer("num_key_value_heads", 128, null=heads) != 1:
        raise hf.error("num_key_value_heads", f"num_attention_heads = {heads}: all heads share one latent")
    if hf.integer("head_dim", null=rotated) != rotated:
        raise hf.error("head_dim", f"{rotated}, the value of qk_rope_head_dim")
    plain, rotary = hf.integer("qk_nope_head_dim", 128), rotaries.read(hf, rotated)
    factor = rotaries.score_factor(hf)
    layer = LatentConfig(
        kv_rank=hf.integer("kv_lora_rank", 512),
        q_rank=hf.optional_integer("q_lora_rank", 1536),
        nope_dim=plain,
        rope_dim=rotated,
        value_dim=hf.integer("v_head_dim", 128),
        scale=None if factor == 1 else (plain + rotated) ** -0.5 * factor,
        rotary=rotary,
        use_bias=hf.flag("attention_bias", False),
    )
    return llama_like(hf, layer)


FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", read_gpt2, write_gpt2, tensor_names.GPT2),
    "llama": Family("LlamaForCausalLM", read_llama, write_llama),
    "mistral": Family("MistralForCausalLM", read_mistral, write_mistral),
    "qwen2": Family("Qwen2ForCausalLM", read_qwen2, write_qwen2),
    "qwen3": Family("Qwen3ForCausalLM", read_qwen3, write_qwen3),
    "gemma2": Family("Gemma2ForCausalLM", read_gemma2, write_gemma2),
    "gemma3_text": Family("Gemma3ForCausalLM", read_gemma3, write_gemma3),
    "olmo2": Family("Olmo2ForCausalLM", read_olmo2, write_biased),
    "phi3": Family("Phi3ForCausalLM", read_phi3, write_phi3, tensor_names.PHI3),
    "qwen3_next": Family("Qwen3NextForCausalLM", read_qwen3_next, write_qwen3_next, tensor_names.QWEN3_NEXT),
    "olmo_hybrid": Family("OlmoHybridForCausalLM", read_olmo_hybrid, write_olmo_hybrid, tensor_names.OLMO_HYBRID),
    "mamba2": Family("Mamba2ForCausalLM", read_mamba2, write_mamba2, tensor_names.MAMBA2),
    "bamba": Family("BambaForCausalLM", read_bamba, write_bamba, tensor_names.BAMBA),
    "diffllama": Family("DiffLlamaForCausalLM", read_diffllama, write_biased, tensor_names.DIFFLLAMA),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", read_deepseek_v3, None, tensor_names.DEEPSEEK_V3),
}


def family_of(config: Mapping, name: str) -> str:
    """Return the `model_type` of a config, "gpt2" if it is missing; raise UserError if it is unsupported."""
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
