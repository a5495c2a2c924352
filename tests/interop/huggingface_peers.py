"""Random `transformers` models of every family, some in two shapes, and their answers.

The answers are also stored in `huggingface_goldens.npz`, for environments without torch. After a change of the models,
record all of them again, or some by name:

    python -m tests.interop.huggingface_peers [mamba2 mamba2-2 …]
"""

import functools
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from attnlab.interop.huggingface import from_hf
from attnlab.nn import GPT

SIZES = {"vocab_size": 67, "hidden_size": 48, "intermediate_size": 100, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256}
SIZES |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
# Sizes are odd; three layers are no multiple of patterns of two layers.
OTHER = {"vocab_size": 131, "hidden_size": 30, "intermediate_size": 77, "num_hidden_layers": 3}
OTHER |= {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 14}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64, "rope_theta": 5e5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
GEMMA3_ROPE = {GLOBAL: LINEAR | {"factor": 8.0}, LOCAL: {"rope_type": "default", "rope_theta": 1e4}}
RECURRENT = "linear_attention"
DELTA = {"linear_num_key_heads": 2, "linear_key_head_dim": 6, "linear_num_value_heads": 4, "linear_value_head_dim": 5}
BAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 10}
MAMBA2 = {"num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 10}
# Latent attention layers without experts; keys and values of a head have different sizes.
LATENT = {"num_key_value_heads": 6, "first_k_dense_replace": 9, "kv_lora_rank": 12, "q_lora_rank": 10}
LATENT |= {"qk_rope_head_dim": 6, "qk_nope_head_dim": 8, "v_head_dim": 5}
LATENT_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}
NO_POSITIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
PART = {"rope_type": "default", "partial_rotary_factor": 0.75, "rope_theta": 1e4}

# Windows are shorter than the inputs of the tests, caps small enough to matter.
PEERS = {
    "gpt2": ("GPT2", {}),
    "gpt2-2": ("GPT2", OTHER | {"n_inner": 50, "activation_function": "relu", "layer_norm_epsilon": 1e-2}),
    "llama": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-2": ("Llama", OTHER | {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 10}),
    "qwen2": ("Qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rope_parameters": LINEAR}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 10, "sliding_window": 6, "query_pre_attn_scalar": 24}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3_text": (
        "Gemma3Text",
        {"head_dim": 12, "num_hidden_layers": 3, "layer_types": [LOCAL, GLOBAL, LOCAL]}
        | {"sliding_window": 6, "query_pre_attn_scalar": 24, "rope_parameters": GEMMA3_ROPE},
    ),
    "olmo2": ("Olmo2", {"tie_word_embeddings": True}),
    "phi3": ("Phi3", {"rope_parameters": PART}),
    "qwen3_next": ("Qwen3Next", DELTA | {"head_dim": 16, "full_attention_interval": 2, "num_experts": 0}),
    "qwen3_next-2": (
        "Qwen3Next",
        OTHER
        | {"num_experts": 4, "mlp_only_layers": [0, 1, 2], "layer_types": [RECURRENT, GLOBAL, RECURRENT]}
        | {"linear_num_key_heads": 3, "linear_key_head_dim": 4, "linear_num_value_heads": 3}
        | {"linear_value_head_dim": 10, "linear_conv_kernel_dim": 3, "attention_bias": True, "rms_norm_eps": 1e-4}
        | {"rope_parameters": PART | {"partial_rotary_factor": 0.3}, "tie_word_embeddings": True},
    ),
    "olmo_hybrid": ("OlmoHybrid", DELTA | NO_POSITIONS | {"layer_types": [RECURRENT, GLOBAL]}),
    "olmo_hybrid-2": ("OlmoHybrid", OTHER | {"linear_allow_neg_eigval": False, "attention_bias": True}),
    "mamba2": ("Mamba2", MAMBA2),
    "mamba2-2": (
        "Mamba2",
        OTHER
        | {"num_heads": 5, "head_dim": 18, "expand": 3, "n_groups": 1, "state_size": 7, "conv_kernel": 3}
        | {"tie_word_embeddings": True},
    ),
    "bamba": ("Bamba", BAMBA | {"attn_layer_indices": [1], "tie_word_embeddings": True}),
    "bamba-2": (
        "Bamba",
        OTHER
        | {"attn_layer_indices": [0], "mamba_n_heads": 6, "mamba_n_groups": 3, "mamba_d_state": 5, "mamba_d_conv": 2}
        | {"head_dim": 12, "mlp_bias": True, "rope_parameters": PART | {"partial_rotary_factor": 1.0}},
    ),
    "diffllama": ("DiffLlama", {"rope_parameters": LLAMA3}),
    "diffllama-2": (
        "DiffLlama",
        OTHER
        | {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6, "attention_bias": True}
        | {"tie_word_embeddings": True},
    ),
    "deepseek_v3": ("DeepseekV3", LATENT | {"rope_parameters": LATENT_YARN}),
    "deepseek_v3-2": (
        "DeepseekV3",
        OTHER
        | LATENT
        | {"num_key_value_heads": 3, "head_dim": 6, "q_lora_rank": None, "rope_interleave": False, "v_head_dim": 9}
        | {"attention_bias": True, "tie_word_embeddings": True, "rms_norm_eps": 1e-4},
    ),
}
# Options of attention and feed-forward layers that a family lacks.
WITHOUT = {"Mamba2": {"intermediate_size", "num_attention_heads", "num_key_value_heads"}}
WITHOUT |= {"GPT2": {"intermediate_size", "num_key_value_heads", "head_dim"}}

# Means of vectors, by the ends of their names; other vectors have mean 1.
BASES = {"bias": 0.0, "model.norm.weight": 9.0, "norm_f.weight": 9.0, "final_layernorm.weight": 9.0, "A_log": -2.0}
BASES |= {"ln_f.weight": 9.0}
BASES |= dict.fromkeys(("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"), 0.0)

SCORED = (0, 19, 39)  # positions whose logits are kept
GOLDENS = Path(__file__).with_name("huggingface_goldens.npz")


def weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Tensors with these names and shapes, for a model whose greedy text varies.

    Layers matter more than the embedding of the last token. Norms are far from 1 or 0, and logits have size 1, so that
    a tolerance of 1e-4 is meaningful. States decay by a tenth per token.
    """
    draw, state = np.random.default_rng(0), {}
    for name, shape in sorted(shapes.items()):
        noise = draw.standard_normal(shape, np.float32)
        if len(shape) == 1:
            base = next((base for end, base in BASES.items() if name.endswith(end)), 1.0)
            state[name] = np.float32(base) + np.float32(0.2) * noise
        elif len(shape) == 3:  # convolutions; queries and keys far from 0 are normalized without loss
            state[name] = np.float32(0.8) * noise
        else:
            state[name] = np.float32(0.24 if "layers" in name or ".h." in name else 0.02) * noise
    return state


@functools.cache
def peer(name: str):
    """torch, and the transformers model of this name with `weights`."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    kind, options = PEERS[name]
    options = {option: value for option, value in (SIZES | options).items() if option not in WITHOUT.get(kind, ())}
    config = getattr(transformers, f"{kind}Config")(**options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    parameters = dict(model.named_parameters())  # a tied output is not among them
    with torch.no_grad():
        for path, array in weights({path: tuple(tensor.shape) for path, tensor in parameters.items()}).items():
            parameters[path].copy_(torch.from_numpy(array))
    return torch, model


@functools.cache
def logits(name: str) -> np.ndarray:
    """The logits of a model for `tokens`, `[B, T, V]`."""
    torch, model = peer(name)
    with torch.no_grad():
        return model(torch.from_numpy(tokens(name))).logits.numpy()


def tokens(name: str) -> np.ndarray:
    """Tokens `[2, 40]` for a model."""
    return np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 40))


def greedy(torch, model, prompt: np.ndarray, length: int) -> np.ndarray:
    """The text that a model of transformers generates after a prompt `[1, T]`."""
    prompt = torch.from_numpy(np.asarray(prompt, np.int64))
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        return model.generate(prompt, max_new_tokens=length, **options)[0, prompt.shape[1] :].numpy()


def answers(name: str) -> dict[str, np.ndarray]:
    """A transformers model's `config`, `shapes` and `logits`; also `greedy` text for the first model of a family."""
    torch, model = peer(name)
    shapes = {path: list(tensor.shape) for path, tensor in model.named_parameters()}
    arrays = {
        "config": np.array(json.dumps(model.config.to_dict(), sort_keys=True)),
        "shapes": np.array(json.dumps(shapes)),
        "logits": logits(name)[:, SCORED],
    }
    if not name.endswith("-2"):
        arrays["greedy"] = greedy(torch, model, tokens(name)[:1, :5], 200).astype(np.uint8)
    return arrays


def goldens(name: str) -> dict[str, np.ndarray]:
    """The stored answers of a model."""
    with np.load(GOLDENS) as archive:
        return {path.split("/")[1]: archive[path] for path in archive.files if path.split("/")[0] == name}


@functools.cache
def kept(name: str) -> tuple[dict, dict]:
    """The state dict and config of a model with stored answers."""
    answers = goldens(name)
    return weights(json.loads(str(answers["shapes"]))), json.loads(str(answers["config"]))


@functools.cache
def ours(name: str):
    """Our model and its parameters, imported from these."""
    return from_hf(*kept(name))


def gpt2(**values) -> GPT:
    """A GPT-2 with these options; it has biases by default."""
    return GPT.of(**{"positions": "learned", "use_bias": True, "attention": {"qk_norm": False}} | values)


def assert_same(one, other):
    """Assert that two models and their parameters are equal, bit for bit."""
    assert one[0] == other[0]
    jax.tree.map(np.testing.assert_array_equal, one[1], other[1])


if __name__ == "__main__":
    changed = sys.argv[1:] or list(PEERS)
    found = {name: answers(name) if name in changed else goldens(name) for name in PEERS}
    np.savez_compressed(GOLDENS, **{f"{name}/{key}": x for name in PEERS for key, x in found[name].items()})
