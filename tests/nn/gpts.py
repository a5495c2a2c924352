"""Small GPTs that together use every option."""

import numpy as np

from attnlab.nn import GPT

TOKENS = np.random.default_rng(0).integers(0, 11, (2, 8), dtype=np.int32)
MODERN = {"norm": "rms", "mlp": "gated", "activation": "silu", "tie_embeddings": False}
LLAMA3 = {"scaling": "llama3", "factor": 4.0, "original_context": 20, "fast_turns": 2.0}
GEMMA = {"norm": "rms_plus_one", "norm_at": "both", "mlp": "gated", "embedding_scale": 4.0, "logit_cap": 2.0}
OF_GEMMA = {"scale": 0.7, "soft_cap": 1.5, "value_residual": True}
OLMO = {"norm": "rms", "norm_at": "after", "logit_scale": 3.0, "activation": "relu_squared"}
RELU = {"positions": "none", "mlp_ratio": 2.3, "activation": "relu", "norm_epsilon": 1e-3}
RESIDUAL = {"kv_heads": 2, "value_residual": True}
LOCAL_GLOBAL = {"layers": "local attention", "num_layers": 3}
OPTIONS = {
    "learned": {"positions": "learned", "use_bias": True},
    "rotary": {},
    "alibi": {"positions": "alibi", "attention": {"soft_cap": 0.5}},
    "grouped": {"positions": "sinusoidal", "attention": {"kv_heads": 2}},
    "relu": {**RELU, "attention": {"window": 3, "qk_norm": False}},
    "attention only": {"mlp_ratio": 0.0},
    "llama": {
        **MODERN,
        "attention": {"rotary": LLAMA3, "qk_norm": False, "qkv_bias": True, "head_dim": 6, "kv_heads": 2},
    },
    "gemma": {
        **LOCAL_GLOBAL,
        **GEMMA,
        "local": {"rotary": {"base": 10.0}, "window": 3, **OF_GEMMA},
        "attention": {"rotary": {"base": 100.0, "scaling": "linear", "factor": 2.0}, **OF_GEMMA},
    },
    "olmo": {**OLMO, "attention": {"qk_norm_joint": True, "use_bias": True, "sinks": True, "kv_heads": 2}},
    "residual": {**LOCAL_GLOBAL, "local": {"window": 3, **RESIDUAL}, "attention": RESIDUAL},
    "plain": {"num_layers": 1},
    "learned, no attention": {"positions": "learned", "layers": "conv", "num_layers": 1, "mlp_ratio": 1.0},
    # Only the last layer receives values; they come from the second layer.
    "first values": {"layers": "attention rwkv7 rwkv7", "num_layers": 3, "mlp_ratio": 0.0},
    "attentions": {"layers": "forget differential latent stick_breaking", "num_layers": 4, "mlp_ratio": 0.0},
    "states": {"layers": "mamba2 local retention gru", "num_layers": 4, "mlp_ratio": 0.0, "local": {"window": 4}},
    "erasures": {"layers": "kda hgrn2 delta_product hgrn2", "num_layers": 4, "mlp_ratio": 0.0},
}


def gpt(**options):
    return GPT.of(**({"vocab_size": 11, "num_layers": 2, "num_heads": 4, "width": 16, "context": 8} | options))
