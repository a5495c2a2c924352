"""Tables from tensor names in state dicts of `transformers` to a `GPT`'s parameters; see `tensors.named`."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from attnlab.interop import tensors
from attnlab.interop.tensors import Tensor
from attnlab.nn import DifferentialAttention, Layer, LayerConfig, ModelConfig
from attnlab.nn.latent_attention import LatentAttention

_NORMS = {
    "before": {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"},
    "after": {"post_attention_layernorm": "attention_post_norm", "post_feedforward_layernorm": "mlp_post_norm"},
    "both": {
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_post_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    },
}
_MLP = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_QKV = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out"}
_ATTENTION = _QKV | {"q_norm": "query_ln", "k_norm": "key_ln"}
_DELTA = {"conv1d": "query_conv key_conv value_conv", "A_log": "A_log", "dt_bias": "dt_bias"}
_MAMBA2 = {"in_proj": "in", "conv1d": "conv", "norm": "norm", "out_proj": "out"}
_MAMBA2 |= {name: name for name in ("A_log", "D", "dt_bias")}


class Names(NamedTuple):
    """The names of a family's tensors; the defaults are Llama's.

    Attributes:
      layers: by kind of layer, a prefix for the names in its table, and the table, or a function from layer to table.
      mlp: the prefix and the table of feed-forward layers.
      norms: tables for the norms of blocks, by `norm_at`.
      top: table for the embedding and other tensors outside the blocks.
      model: the prefix of all names.
      blocks: the part before the numbers of blocks.
      file_parts: maps parts of names in files to parts of names in the state dict; tensors that get the same name are
        joined in the order of this mapping.
    """

    layers: Mapping[str, tuple[str, Mapping[str, str] | Callable[[Layer], Mapping[str, str]]]]
    mlp: tuple[str, Mapping[str, str]] = ("mlp", _MLP)
    norms: Mapping[str, Mapping[str, str]] = _NORMS
    top: Mapping[str, str] = {"embed_tokens": "embed", "norm": "final_norm"}
    model: str = "model"
    blocks: str = "layers"
    file_parts: Mapping[str, str] = {}


def _latent(layer: LatentAttention) -> dict[str, str]:
    return {
        "q_proj" if layer.q_rank is None else "q_b_proj": "query",
        "q_a_proj": "query_down",
        "q_a_layernorm": "query_norm",
        "kv_a_proj_with_mqa": "latent rotary",
        "kv_a_layernorm": "latent_norm",
        "kv_b_proj": "key+value",
        "o_proj": "out",
    }


GPT2 = Names(
    {"attention": ("attn", {"c_attn": "query key value", "c_proj": "out"})},
    ("mlp", {"c_fc": "up", "c_proj": "down"}),
    {"before": {"ln_1": "attention_norm", "ln_2": "mlp_norm"}},
    {"wte": "embed", "wpe": "positions", "ln_f": "final_norm"},
    "transformer",
    "h",
)
LLAMA = Names({"attention": ("self_attn", _ATTENTION)})
PHI3 = Names(
    {"attention": ("self_attn", {"qkv_proj": "query key value", "o_proj": "out"})},
    ("mlp", {"gate_up_proj": "gate up", "down_proj": "down"}),
)
_QWEN_DELTA = {"in_proj_qkvz": "query+key+value+gate", "in_proj_ba": "b+a", "norm": "norm", "out_proj": "out", **_DELTA}
_GATED = ("self_attn", _ATTENTION | {"q_proj": "query+gate"})
QWEN3_NEXT = Names({"attention": _GATED, "gated_delta": ("linear_attn", _QWEN_DELTA)})
_OLMO_DELTA = {**_QKV, **_DELTA, "g_proj": "gate", "a_proj": "a", "b_proj": "b", "o_norm": "norm"}
OLMO_HYBRID = LLAMA._replace(
    layers=LLAMA.layers | {"gated_delta": ("linear_attn", _OLMO_DELTA)},
    file_parts={
        "attention_layer_norm": "input_layernorm",
        "feedforward_layer_norm": "post_attention_layernorm",
        **{f"{which}_conv1d": "conv1d" for which in "qkv"},
    },
)
MAMBA2 = Names(
    {"mamba2": ("mixer", _MAMBA2)},
    norms={"before": {"norm": "attention_norm"}},
    top={"embeddings": "embed", "norm_f": "final_norm"},
    model="backbone",
    file_parts={"embedding": "embeddings"},
)
BAMBA = Names(
    LLAMA.layers | {"mamba2": ("mamba", _MAMBA2)},
    mlp=("feed_forward", _MLP),
    norms={"before": {"input_layernorm": "attention_norm", "pre_ff_layernorm": "mlp_norm"}},
    top={"embed_tokens": "embed", "final_layernorm": "final_norm"},
)
_LAMBDAS = {name: name for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")}
DIFFLLAMA = Names({"differential": ("self_attn", _QKV | _LAMBDAS | {"groupnorm": "norm"})})
DEEPSEEK_V3 = Names({"latent": ("self_attn", _latent)})


def kind_of(layer: LayerConfig) -> str:
    """The kind of a layer, "attention" with or without a window."""
    return "attention" if layer.kind == "local" else layer.kind


def table(
    config: ModelConfig, names: Names, shapes: Mapping[str, tuple], prefix: str, interleaved: bool, **options
) -> list[Tensor]:
    """The tensors of a model; `shapes` has the shapes of its parameters by path.

    `interleaved` means that rotary positions rotate pairs of neighbours; `options` are as for `tensors.named`.
    """
    named = functools.partial(tensors.named, shapes, **options)
    entries = [*named(prefix, "", names.top), *named("", "", {"lm_head": "output"})]
    modules = {id(layer): layer.make(config) for layer in config.used}
    for number in range(config.num_layers):
        name, path, layer = f"{prefix}{names.blocks}.{number}.", f"block_{number}/", config.layer(number)
        (part, lines), module = names.layers[kind_of(layer)], modules[id(layer)]
        lines = lines(module) if callable(lines) else lines
        details = {"groups": getattr(module, "num_heads", 1), "details": _details(module, interleaved)}
        entries += named(name, path, names.norms[config.norm_of(number)])
        entries += named(f"{name}{names.mlp[0]}.", f"{path}mlp/", names.mlp[1])
        entries += named(f"{name}{part}.", f"{path}attention/", lines, **details)
    return entries


def _details(layer: Layer, interleaved: bool) -> dict[str, dict[str, Any]]:
    """The `details` of a layer for `tensors.named`: orders of outputs, and constants."""
    if isinstance(layer, DifferentialAttention):  # one head of our values is two of theirs; their norm has no weights
        size, half = layer.head_dim, layer.kv_heads // 2
        heads = [head for pair in range(half) for head in (pair, pair + half)]
        order = tuple(head * size + feature for head in heads for feature in range(size))
        return {"value": {"order": order}, "norm": {"constant": 1.0}}
    if isinstance(layer, LatentAttention) and interleaved:  # we rotate i with i + half, not neighbours

        def order(plain):
            end = plain + layer.rope_dim
            return (*range(plain), *range(plain, end, 2), *range(plain + 1, end, 2))

        query = {"order": order(layer.nope_dim), "groups": layer.num_heads}
        return {"query": query, "latent rotary": {"order": order(layer.kv_rank)}}
    return {}
