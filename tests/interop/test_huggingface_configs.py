"""Options of older and newer config.json files as fields of a GPT, and options that are rejected."""

import math

import pytest

from attnlab.interop.huggingface import make_config, make_model
from attnlab.nn import GPT, AttentionConfig, Rotary
from attnlab.nn.config import KINDS
from attnlab.ops.masks import Causal
from attnlab.support.errors import UserError
from tests.interop.huggingface_peers import gpt2

LLAMA = {"model_type": "llama", "vocab_size": 67, "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 6}
LLAMA |= {"num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 256}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN, LINEAR = {"type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 2.0}
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def model_of(model_type, **options):
    return make_model(LLAMA | {"model_type": model_type} | options, "config.json")


def layer(kind="attention", **options):
    """A layer like Llama's, with these options."""
    return KINDS[kind](**({"qk_norm": False} if issubclass(KINDS[kind], AttentionConfig) else {}) | options)


def layers(*kinds, **options):
    return {"layers": tuple(layer(kind, **options) for kind in kinds)}


def layer_of(model_type, **options):
    """The first layer of a model."""
    return model_of(model_type, **options).config.layer(0)


def kinds(model):
    return " ".join(layer.kind for layer in model.config.layers)


def test_defaults_match_each_family():
    llama, attention = model_of("llama").config, layer_of("llama")
    assert (llama.tie_embeddings, llama.norm_epsilon, llama.activation, llama.use_bias) == (False, 1e-6, "silu", False)
    assert (llama.mlp_ratio, attention.kv_heads, attention.head_dim, attention.rotary) == (100 / 48, 6, 8, Rotary())
    gemma = model_of("gemma2", num_key_value_heads=2).config
    local, _ = gemma.layers
    assert (local.head_dim, local.scale, local.soft_cap, gemma.logit_cap) == (256, 1 / 16, 50.0, 30.0)
    assert (gemma.tie_embeddings, gemma.activation, gemma.embedding_scale) == (True, "gelu_tanh", 48**0.5)
    assert (local.window, kinds(model_of("gemma2"))) == (4096, "local attention")
    assert kinds(model_of("gemma3_text")) == "local local local local local attention"
    assert layer_of("mistral", num_key_value_heads=6).window == 4096
    assert layer_of("qwen3", head_dim=8).window is None
    assert layer_of("qwen2").qkv_bias and not layer_of("qwen2").use_bias
    assert model_of("olmo2").config.norm_epsilon == model_of("phi3").config.norm_epsilon == 1e-5


ROTARY = {
    "old base": ({"rope_theta": 5e5}, Rotary(5e5)),
    "new base": ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, Rotary(5e5)),
    "old linear": ({"rope_scaling": LINEAR | {"factor": 2}}, Rotary(scaling="linear", factor=2.0)),
    "a factor of 1": ({"rope_scaling": LINEAR | {"factor": 1}}, Rotary()),
    "yarn of factor 1": ({"rope_scaling": YARN | {"factor": 1.0}}, Rotary()),
    "both names": (
        {"rope_scaling": {"rope_type": "llama3", "type": "llama3", **LLAMA3}, "rope_theta": 5e5},
        Rotary(5e5, scaling="llama3", factor=8.0, original_context=64, slow_turns=2.0),
    ),
    "yarn of the whole context": ({"rope_scaling": YARN}, Rotary(scaling="yarn", factor=4.0, original_context=256)),
    "yarn with its context outside": (
        {"rope_scaling": YARN, "original_max_position_embeddings": 32},
        Rotary(scaling="yarn", factor=4.0, original_context=32),
    ),
    "yarn with everything": (
        {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
            | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5, "truncate": False}
        },
        Rotary(1e4, 1.0, "yarn", 4.0, 64, 2.0, 16.0, 1.5, truncate=False),
    ),
}


@pytest.mark.parametrize("options, rotary", ROTARY.values(), ids=ROTARY)
def test_rotary_options_of_older_and_newer_files(options, rotary):
    model = model_of("llama", **options)
    assert model.config.layer(0).rotary == rotary
    assert make_model(make_config(model)) == model


def test_yarn_scales_of_scores_become_one_factor():
    options = {"type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}
    factor = layer_of("llama", rope_scaling=options).rotary.attention_factor
    assert factor == pytest.approx((0.0707 * math.log(40) + 1) / (0.1 * math.log(40) + 1), rel=1e-12)
    off = model_of("llama", rope_scaling=options | {"mscale_all_dim": 0.0})
    assert off == model_of("llama", rope_scaling={"type": "yarn", "factor": 40.0})


def test_gemma3_has_two_rotary_bases_in_older_and_newer_files():
    old = {"rope_theta": 1e6, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    newer = {GLOBAL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}, LOCAL: {"rope_theta": 2e4}}
    model = model_of("gemma3_text", sliding_window_pattern=3, **old)
    assert model == model_of("gemma3_text", layer_types=[LOCAL, LOCAL, GLOBAL] * 2, rope_parameters=newer)
    near, _, far = model.config.layers
    assert (kinds(model), near.rotary.base, far.rotary.factor) == ("local local attention", 2e4, 8.0)
    without = model_of("gemma3_text", layer_types=[GLOBAL] * 6, rope_local_base_freq=2e4)
    assert (without.config.layer(0).window, without.config.layer(0).rotary.base) == (None, 1e6)
    assert all(make_model(make_config(each)) == each for each in (model, without))


PATTERNS = {
    "all": ({"layer_types": [LOCAL] * 6}, "attention", 5),
    "off": ({"use_sliding_window": False}, "attention", None),
    "last layers": ({"max_window_layers": 4}, "attention attention attention attention local local", 5),
    "period of three": ({"layer_types": [LOCAL, LOCAL, GLOBAL] * 2}, "local local attention", 5),
    "cut period": ({"layer_types": [LOCAL, LOCAL, LOCAL, GLOBAL, LOCAL, LOCAL]}, "local local local attention", 5),
}


@pytest.mark.parametrize("options, pattern, window", PATTERNS.values(), ids=PATTERNS)
def test_layer_types_become_the_shortest_pattern(options, pattern, window):
    model = model_of("qwen2", **{"use_sliding_window": True, "sliding_window": 5} | options)
    assert (kinds(model), max((layer.window for layer in model.config.layers), key=bool)) == (pattern, window)
    assert make_model(make_config(model)) == model


DENSE = {"first_k_dense_replace": 6}  # no experts in a DeepSeek-V3
REFUSED = {
    "another model": ("bert", {}, "model_type = 'bert' .*gpt2, llama, mistral, qwen2"),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 32}, "'gpt_oss' .*mixture of experts"),
    "experts of Qwen3-Next": ("qwen3_next", {}, "num_experts = 512 in its config, expected 0: a mixture of experts"),
    "two billion layers": ("qwen2", {"num_hidden_layers": 2**31 - 1}, "num_hidden_layers = 2147483647 .*1 to 10000"),
    "experts of a Llama": ("llama", {"num_local_experts": 8}, "num_local_experts = 8 .*mixture of experts"),
    "experts of DeepSeek": ("deepseek_v3", {}, "first_k_dense_replace = 3 .*6 or more: a mixture of experts"),
    "heads of latent keys": ("deepseek_v3", DENSE | {"num_key_value_heads": 2}, "num_key_value_heads = 2 .*= 6"),
    "other rotary part": ("deepseek_v3", DENSE | {"head_dim": 8}, "head_dim = 8 .*64, the value of qk_rope_head_dim"),
    "dropout of differences": ("diffllama", {"attention_dropout": 0.1}, "attention_dropout = 0.1 .*expected 0"),
    "odd heads": ("diffllama", {"num_key_value_heads": 3}, "not fit together: differential.kv_heads = 3: .* even"),
    "time steps": ("mamba2", {"time_step_limit": [0.0, 0.1]}, r"time_step_limit = \[0.0, 0.1\] .*does not limit"),
    "no bias of a convolution": ("bamba", {"mamba_conv_bias": False}, "mamba_conv_bias = False"),
    "widths of Mamba-2": ("mamba2", {"num_heads": 5, "head_dim": 8}, "expand = 2 .*5 heads of 8"),
    "activation of convolutions": ("olmo_hybrid", {"hidden_act": "gelu"}, "hidden_act = 'gelu' .*silu or swish"),
    "layers of one kind": ("olmo_hybrid", {"layer_types": [GLOBAL] * 6}, "layer_types = .*both kinds"),
    "numbers of layers": ("bamba", {"attn_layer_indices": "all"}, "attn_layer_indices = 'all'"),
    "vision": ("gemma3", {"vision_config": {}}, "model_type = 'gemma3' .*more than text"),
    "quantised": ("llama", {"quantization_config": {"bits": 4}}, "quantised weights"),
    "longrope": ("phi3", {"rope_scaling": {"type": "longrope"}}, "rope_scaling: type = 'longrope' .*llama3, yarn"),
    "Phi-3's yarn": ("phi3", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling = .*yarn.*no scaling"),
    "fraction": ("llama", {"rope_scaling": LINEAR, "partial_rotary_factor": 0.5}, "rotary_factor = 0.5 .*'linear'"),
    "no name": ([], {}, r"model_type = \[\]"),
    "positions per kind": ("llama", {"rope_scaling": {GLOBAL: {"type": "default"}}}, "expected one for all layers"),
    "window off": ("qwen3", {"layer_types": [LOCAL] * 6}, "use_sliding_window = False"),
    "no object": ("llama", {"rope_scaling": "linear"}, "rope_scaling = 'linear'"),
    "too few kinds": ("gemma2", {"layer_types": [LOCAL]}, "one for each of the 6 layers"),
    "activation": ("llama", {"hidden_act": "mish"}, "hidden_act = 'mish'"),
    "size": ("llama", {"hidden_size": None}, "hidden_size = None"),
    "epsilon": ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps = 'small'"),
    "huge base": ("llama", {"rope_theta": 10**400}, "rope_theta = 1000.* number above 0, at most"),
    "large epsilon": ("mamba2", {"layer_norm_epsilon": 2}, "layer_norm_epsilon = 2 in its config, .*at most 1"),
    "flag": ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings = 1"),
    "heads": ("llama", {"num_attention_heads": 7}, "num_attention_heads = 7 .*hidden_size = 48"),
    "groups": ("llama", {"num_key_value_heads": 4}, "attention.kv_heads = 4: expected a divisor of num_heads = 6"),
}


@pytest.mark.parametrize("model_type, options, message", REFUSED.values(), ids=REFUSED)
def test_unsupported_option_is_refused_by_name(model_type, options, message):
    with pytest.raises(UserError, match=message) as error:
        model_of(model_type, **options)
    assert str(error.value).startswith("config.json: ") and "\n" not in str(error.value)


# Options that transformers does not read either: they leave the model unchanged.
IGNORED = {
    "windows": ("olmo2", {"sliding_window": 7, "layer_types": [LOCAL] * 6}, "sliding_window, layer_types in its"),
    "newer fraction": (
        *("qwen3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
        "rope_parameters.partial_rotary_factor .*is ignored",
    ),
    "unknown": ("phi3", {"nonsense": 1}, "config.json: nonsense .*is ignored.*Phi3ForCausal"),
    "dropouts": ("phi3", {"embd_pdrop": 0.1, "resid_pdrop": 0.2}, r"\(embd_pdrop = 0.1, resid_pdrop = 0.2\)"),
}


@pytest.mark.parametrize("model_type, options, message", IGNORED.values(), ids=IGNORED)
def test_option_unread_by_transformers_is_ignored_with_one_warning(model_type, options, message):
    with pytest.warns(UserWarning, match=message) as told:
        model = model_of(model_type, **options)
    assert model == model_of(model_type)
    assert len(told) == 1 and "\n" not in str(told[0].message)


MAMBA2 = {"num_heads": 6, "head_dim": 16, "n_groups": 2, "num_attention_heads": None, "num_key_value_heads": None}
MAMBA2 |= {"intermediate_size": None}
META = {"_name_or_path": "x/y", "torch_dtype": "bfloat16", "use_cache": True, "architectures": ["A"], "eos_token_id": 2}
DEFAULTS = {"pretraining_tp": 1, "sliding_window": None, "attention_dropout": 0.0, "partial_rotary_factor": 1.0}
EXPERTS = {"n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8, "topk_group": 4, "n_group": 8}
EXPERTS |= {"moe_intermediate_size": 2048, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "ep_size": 1}
EXPERTS |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "aux_loss_alpha": 0.001}
PREDICTED = {"num_nextn_predict_layers": 1, "num_mtp_layers": 2, "seq_aux": True, "pretraining_tp": 1}
LATENT = {"head_dim": 64, "qk_head_dim": 192, "rope_interleave": True}
# Options without effect, added to those of a model.
SILENT = [
    ("llama", {}, META | DEFAULTS),
    ("qwen3_next", {"num_experts": 0}, {"num_experts_per_tok": 8, "moe_intermediate_size": 5}),
    ("qwen3_next", {"num_experts": 0}, {"num_experts": 4, "mlp_only_layers": list(range(6))}),
    ("qwen3_next", {"num_experts": 0}, {"num_experts": 4, "decoder_sparse_step": 7}),
    ("mamba2", MAMBA2, {"time_step_max": 1.0, "chunk_size": 8}),
    ("mamba2", MAMBA2, {"time_step_limit": [0.0, {"__float__": "Infinity"}]}),
    ("deepseek_v3", DENSE, EXPERTS | PREDICTED | LATENT),
]


@pytest.mark.parametrize("family, options, more", SILENT)
def test_option_without_effect_is_ignored_silently(family, options, more):
    assert model_of(family, **options | more) == model_of(family, **options)


def test_partial_rotary_factor_is_read_where_the_family_reads_it():
    half = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    for options in ({"rope_parameters": half}, {"partial_rotary_factor": 0.5}):
        assert layer_of("phi3", **options).rotary == Rotary(fraction=0.5)
    bamba = {"mamba_n_heads": 6, "attn_layer_indices": [0]}  # only within rope_parameters
    assert layer_of("bamba", **bamba).rotary == Rotary(fraction=0.5)
    assert layer_of("bamba", **bamba, rope_parameters=half | {"partial_rotary_factor": 1.0}).rotary == Rotary()
    with pytest.warns(UserWarning, match="partial_rotary_factor in its config is ignored"):
        assert layer_of("bamba", **bamba, partial_rotary_factor=0.25).rotary.fraction == 0.5


def test_olmo_hybrid_has_rotary_positions_unless_their_base_is_null():
    assert model_of("olmo_hybrid").config.positions == "rotary"
    for options in ({"rope_theta": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": None}}):
        model = model_of("olmo_hybrid", **options)
        assert (model.config.positions, model.config.norm_at) == ("none", "hybrid")
        assert make_model(make_config(model, "olmo_hybrid")) == model


def test_recurrent_layer_sizes_default_as_their_family_derives():
    for family, options, sizes in (
        ("olmo_hybrid", {"linear_num_value_heads": 12}, (6, 6, 12, 12, 4, 1e-5)),
        ("bamba", {"mamba_n_heads": 6, "attn_layer_indices": [1]}, (1, 256, 6, 16, 4, 1e-5)),
        ("qwen3_next", {"num_experts": 0}, (16, 128, 32, 128, 4, 1e-6)),
    ):
        names = ("heads", "key_dim", "value_heads", "value_dim", "conv", "norm_epsilon")
        assert tuple(getattr(layer_of(family, **options), name) for name in names) == sizes


def test_latent_attention_sizes_come_from_config_or_defaults():
    sizes = {"kv_rank": 512, "q_rank": 1536, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
    assert layer_of("deepseek_v3", **DENSE) == layer("latent", **sizes, use_bias=False)
    options = {"kv_lora_rank": 9, "q_lora_rank": None, "qk_nope_head_dim": 7, "qk_rope_head_dim": 4, "v_head_dim": 5}
    sizes = {"kv_rank": 9, "nope_dim": 7, "rope_dim": 4, "value_dim": 5}
    assert layer_of("deepseek_v3", **DENSE, **options) == layer("latent", **sizes, use_bias=False)


def test_mscale_all_dim_scales_scores_of_latent_attention():
    yarn = {"type": "yarn", "factor": 40, "mscale": 1.0, "original_max_position_embeddings": 64}
    factor = 0.1 * math.log(40) + 1
    published = layer_of("deepseek_v3", **DENSE, rope_scaling=yarn | {"mscale_all_dim": 1.0})
    assert published.scale == pytest.approx(192**-0.5 * factor**2, rel=1e-12)
    assert published.rotary.attention_factor == 1.0
    off = layer_of("deepseek_v3", **DENSE, rope_scaling=yarn | {"mscale_all_dim": 0})
    assert (off.scale, off.rotary.attention_factor) == (None, None)
    linear = {"type": "linear", "factor": 40.0, "mscale_all_dim": 0.5}
    scale = layer_of("deepseek_v3", **DENSE, rope_scaling=linear).scale
    assert scale == pytest.approx(192**-0.5 * (0.05 * math.log(40) + 1) ** 2, rel=1e-12)
    assert layer_of("llama", rope_scaling=yarn | {"mscale_all_dim": 1.0}).scale is None


MODEL, MAMBA = model_of("llama"), GPT.of(layers="mamba2", num_layers=2, width=16, mlp_ratio=0.0, norm="rms")
HYBRID = {"layers": (layer("gated_delta", gate=False), layer(qk_norm=True, qk_norm_joint=True))}
ALONE = {"mlp_ratio": 0.0, "mlp": "plain", "activation": "gelu_tanh"}
EXPORTS = {
    "no family has it": (layers("attention", sinks=True), None, "this model .model.*gpt2 .*llama.*: train llama_tiny"),
    "convolution": (layers("attention", conv=4), "llama", "model.attention.conv = 4: llama supports only 0"),
    "no convolution": (
        layers("mamba2", conv=0) | {"positions": "none"},
        "mamba2",
        "mamba2 does not support .*models .*conv_kernel = 0",
    ),
    "mask": (layers("attention", mask=Causal()), "llama", r"model.attention.mask = Causal\(\): llama .*None"),
    "kind": (layers("forget") | {"positions": "auto"}, None, "= 'forget': layers of forget cannot be exported"),
    "attention alone": (ALONE, "llama", "llama does not support such models .*intermediate_size = 0"),
    "windows": ({"layers": (layer("attention"), layer("local", window=5))}, "llama", "model.local.window = 5: llama"),
    "kind of another family": (layers("differential"), "mistral", "model.layers = 'differential': mistral .*'attenti"),
    "hybrid": (HYBRID, "olmo_hybrid", "model.norm_at = 'before'"),
    "gate": (HYBRID | {"norm_at": "hybrid"}, "olmo_hybrid", "model.gated_delta.gate = False: olmo_hybrid .*True"),
    "positions": ({}, "gpt2", "model.positions = 'rotary': gpt2 .*'learned'"),
    "family": ({}, "bert", "model_type = 'bert': .*gpt2, llama"),
    "family without export": ({}, "deepseek_v3", "model_type = 'deepseek_v3': .*gpt2, llama"),
}


@pytest.mark.parametrize("changes, family, message", EXPORTS.values(), ids=EXPORTS)
def test_export_rejects_model_of_no_family_by_field(changes, family, message):
    with pytest.raises(UserError, match=message) as error:
        make_config(MODEL.replace(**changes), family)
    assert "\n" not in str(error.value)


def test_equivalent_fields_export_the_same_config():
    same = [layers("attention", kv_heads=6, head_dim=8, use_bias=False, qkv_bias=False, scale=8**-0.5, heads=6)]
    same += [layers("attention"), {"dropout": 0.5, "remat": "block"}, {"positions": "auto"}]
    for changes in same:
        assert make_config(MODEL.replace(**changes)) == make_config(MODEL)
    said = layers("mamba2", heads=1, key_dim=8, value_heads=4, value_dim=8)
    assert make_config(MAMBA.replace(num_heads=2, **said)) == make_config(MAMBA)


def test_export_picks_the_first_family_that_fits_the_model():
    for changes, family in (
        (layers("attention", window=5), "mistral"),
        (layers("attention", qkv_bias=True), "qwen2"),
        ({"layers": (layer("local", qkv_bias=True, window=5), layer("attention", qkv_bias=True))}, "qwen2"),
        (layers("attention", qk_norm=True), "qwen3"),
        (layers("differential"), "diffllama"),
        (layers("attention", rotary=Rotary(fraction=0.5)), "phi3"),
        (layers("attention", heads=5, head_dim=8), "mistral"),  # transformers' Llama needs a width that heads divide
    ):
        assert make_config(MODEL.replace(**changes))["model_type"] == family
    assert make_config(MODEL, "phi3")["model_type"] == "phi3"
    fed = MAMBA.replace(mlp_ratio=2.0, mlp="gated", activation="silu")
    for model, family in ((gpt2(num_layers=1, num_heads=2, width=8), "gpt2"), (MAMBA, "mamba2"), (fed, "bamba")):
        assert make_config(model)["model_type"] == family
