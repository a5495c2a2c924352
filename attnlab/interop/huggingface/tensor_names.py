"""The tensors of a state dict of `transformers`, and the parameters of a `GPT` in each.

Functions of layers take the layer, the width of its inputs, the name of its tensors, and the path of its parameters.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from attnlab.interop.tensors import Tensor
from attnlab.nn import (
    DifferentialAttention,
    GatedDeltaNet,
    LatentAttention,
    LayerConfig,
    Mamba2,
    ModelConfig,
    MultiHeadAttention,
)

# The names of norms, by `GPT.norm_at`.
_NORMS = {
    "before": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
    "both": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
}


_QKV = ("query", "key", "value")


def gpt2(config: ModelConfig, prefix: str = "transformer.", transposed: bool = False) -> list[Tensor]:
    """The tensors of GPT-2; with `transposed`, kernels are `[out, in]`, as in torch's Linear and nanoGPT."""
    width, hidden = config.width, config.hidden
    tensors = [
        Tensor(f"{prefix}wte.weight", (config.vocab_size, width), ("embed/embedding",)),
        Tensor(f"{prefix}wpe.weight", (config.context, width), ("positions/embedding",)),
    ]

    def norm(name, path):
        yield Tensor(f"{name}.weight", (width,), (f"{path}/scale",))
        if config.use_bias:
            yield Tensor(f"{name}.bias", (width,), (f"{path}/bias",))

    def projection(name, rows, columns, paths, use_bias=config.use_bias):
        shape = (columns, rows) if transposed else (rows, columns)
        yield Tensor(f"{name}.weight", shape, tuple(f"{path}/kernel" for path in paths), transposed)
        if use_bias:
            yield Tensor(f"{name}.bias", (columns,), tuple(f"{path}/bias" for path in paths))

    for number in range(config.num_layers):
        name, block, layer = f"{prefix}h.{number}", f"block_{number}", config.layer(number).make(config)
        projections = [f"{block}/attention/{which}" for which in _QKV]
        tensors += norm(f"{name}.ln_1", f"{block}/attention_norm")
        tensors += projection(f"{name}.attn.c_attn", width, 3 * width, projections, layer.qkv_bias)
        tensors += projection(f"{name}.attn.c_proj", width, width, [f"{block}/attention/out"], layer.use_bias)
        tensors += norm(f"{name}.ln_2", f"{block}/mlp_norm")
        tensors += projection(f"{name}.mlp.c_fc", width, hidden, [f"{block}/mlp/up"])
        tensors += projection(f"{name}.mlp.c_proj", hidden, width, [f"{block}/mlp/down"])
    return [*tensors, *norm(f"{prefix}ln_f", "final_norm"), *_output(config)]


def decoder(config: ModelConfig, names: "Names", prefix: str = "model.", interleaved: bool = False) -> list[Tensor]:
    """The tensors of Llama and similar families; `interleaved` if rotary positions rotate pairs of neighbours."""

    def renamed(part):
        return names.parts.get(part, part)

    def norm(name, path):
        return Tensor(f"{name}.weight", (config.width,), (f"{path}/scale",))

    embed = f"{prefix}{renamed('embed_tokens')}.weight"
    tensors = [Tensor(embed, (config.vocab_size, config.width), ("embed/embedding",))]
    for number in range(config.num_layers):
        name, block, layer = f"{prefix}layers.{number}", f"block_{number}", config.layer(number)
        part, of_layer = names.layers[kind_of(layer)]
        options = {"interleaved": True} if interleaved and of_layer is latent else {}
        tensors += of_layer(layer.make(config), config.width, f"{name}.{part}", f"{block}/attention", **options)
        if config.hidden:
            tensors += names.mlp(config, f"{name}.{renamed('mlp')}", f"{block}/mlp")
        norms = _NORMS[config.norm_of(number)]
        places = [place for place in norms if config.hidden or not place.startswith("mlp")]
        tensors += [norm(f"{name}.{renamed(norms[place])}", f"{block}/{place}") for place in places]
    return [*tensors, norm(f"{prefix}{renamed('norm')}", "final_norm"), *_output(config)]


def kind_of(layer: LayerConfig) -> str:
    """The kind of a layer, "attention" with a window or without."""
    return "attention" if layer.kind in ("local", "global") else layer.kind


def _output(config: ModelConfig) -> Iterator[Tensor]:
    if not config.tie_embeddings:
        yield Tensor("lm_head.weight", (config.vocab_size, config.width), ("output/embedding",))


def linear(
    name: str, rows: int, columns: int, *paths: str, bias: bool = False, groups: int = 1, order: tuple[int, ...] = ()
) -> Iterator[Tensor]:
    """The tensors of a linear layer, whose parameters at several paths are parts of its outputs."""
    kernels, biases = (tuple(f"{path}/{which}" for path in paths) for which in ("kernel", "bias"))
    yield Tensor(f"{name}.weight", (columns, rows), kernels, transposed=True, groups=groups, order=order)
    if bias:
        yield Tensor(f"{name}.bias", (columns,), biases, groups=groups, order=order)


def mlp(config: ModelConfig, name: str, path: str) -> Iterator[Tensor]:
    for which in ("gate", "up"):
        yield from linear(f"{name}.{which}_proj", config.width, config.hidden, f"{path}/{which}", bias=config.use_bias)
    yield from linear(f"{name}.down_proj", config.hidden, config.width, f"{path}/down", bias=config.use_bias)


def mlp_fused(config: ModelConfig, name: str, path: str) -> Iterator[Tensor]:
    """The tensors of Phi-3, one for both projections of the input."""
    paths, bias = (f"{path}/gate", f"{path}/up"), config.use_bias
    yield from linear(f"{name}.gate_up_proj", config.width, 2 * config.hidden, *paths, bias=bias)
    yield from linear(f"{name}.down_proj", config.hidden, config.width, f"{path}/down", bias=bias)


def attention(layer: MultiHeadAttention, width: int, name: str, path: str) -> Iterator[Tensor]:
    """The tensors of Llama, with a gate in Qwen3-Next, of which each head has a part of the queries' tensor."""
    sizes = _features(layer)
    for which, columns in sizes.items():
        gated = layer.output_gate and which == "query"
        paths, groups = [f"{path}/{which}"] + [f"{path}/gate"] * gated, layer.num_heads if gated else 1
        columns *= len(paths)
        yield from linear(f"{name}.{which[0]}_proj", width, columns, *paths, bias=layer.qkv_bias, groups=groups)
    yield from linear(f"{name}.o_proj", sizes["query"], width, f"{path}/out", bias=layer.use_bias)
    for which in ("query", "key") if layer.qk_norm else ():
        size = sizes[which] if layer.qk_norm_joint else layer.head_dim
        yield Tensor(f"{name}.{which[0]}_norm.weight", (size,), (f"{path}/{which}_ln/scale",))


def attention_fused(layer: MultiHeadAttention, width: int, name: str, path: str) -> Iterator[Tensor]:
    """The tensors of Phi-3, one for queries, keys and values."""
    sizes = _features(layer)
    paths = [f"{path}/{which}" for which in sizes]
    yield from linear(f"{name}.qkv_proj", width, sum(sizes.values()), *paths, bias=layer.qkv_bias)
    yield from linear(f"{name}.o_proj", sizes["query"], width, f"{path}/out", bias=layer.use_bias)


def _features(layer: MultiHeadAttention) -> dict[str, int]:
    """Features of the queries, keys and values of all heads."""
    heads = {"query": layer.num_heads, "key": layer.kv_heads, "value": layer.kv_heads}
    return {which: number * layer.head_dim for which, number in heads.items()}


def differential(layer: DifferentialAttention, width: int, name: str, path: str) -> Iterator[Tensor]:
    """The tensors of DiffLlama: a value of ours is its heads j and Hk/2 + j, and the heads' norm has no weights."""
    size, kv_heads, features = layer.head_dim, layer.kv_heads, _features(layer)
    pairs = [(pair, pair + kv_heads // 2) for pair in range(kv_heads // 2)]
    order = tuple(head * size + feature for pair in pairs for head in pair for feature in range(size))
    for which, columns in features.items():
        of_value = {"order": order} if which == "value" else {}
        bias = layer.qkv_bias
        yield from linear(f"{name}.{which[0]}_proj", width, columns, f"{path}/{which}", bias=bias, **of_value)
    yield from linear(f"{name}.o_proj", features["query"], width, f"{path}/out", bias=layer.use_bias)
    for which in ("q1", "k1", "q2", "k2"):
        yield Tensor(f"{name}.lambda_{which}", (size,), (f"{path}/lambda_{which}",))
    yield Tensor(f"{name}.groupnorm.weight", (2 * size,), (f"{path}/norm/scale",), constant=1.0)


def latent(layer: LatentAttention, width: int, name: str, path: str, *, interleaved: bool = False) -> Iterator[Tensor]:
    """The tensors of DeepSeek's latent attention; `interleaved` if it rotates pairs of neighbours, for our halves."""
    heads, rank, rotated = layer.num_heads, layer.kv_rank, layer.rope_dim

    def order(plain):
        if not interleaved:
            return ()
        return (*range(plain), *range(plain, plain + rotated, 2), *range(plain + 1, plain + rotated, 2))

    query, of_query, queries = f"{name}.q_proj", width, heads * (layer.nope_dim + rotated)
    if layer.q_rank is not None:
        query, of_query = f"{name}.q_b_proj", layer.q_rank
        yield from linear(f"{name}.q_a_proj", width, layer.q_rank, f"{path}/query_down", bias=layer.use_bias)
        yield Tensor(f"{name}.q_a_layernorm.weight", (layer.q_rank,), (f"{path}/query_norm/scale",))
    yield from linear(query, of_query, queries, f"{path}/query", groups=heads, order=order(layer.nope_dim))
    both, shared = rank + rotated, (f"{path}/latent", f"{path}/rotary")
    yield from linear(f"{name}.kv_a_proj_with_mqa", width, both, *shared, bias=layer.use_bias, order=order(rank))
    yield Tensor(f"{name}.kv_a_layernorm.weight", (rank,), (f"{path}/latent_norm/scale",))
    expanded = heads * (layer.nope_dim + layer.value_dim)
    yield from linear(f"{name}.kv_b_proj", rank, expanded, f"{path}/key", f"{path}/value", groups=heads)
    yield from linear(f"{name}.o_proj", heads * layer.value_dim, width, f"{path}/out", bias=layer.use_bias)


def mamba2(layer: Mamba2, width: int, name: str, path: str) -> Iterator[Tensor]:
    """The tensors of Mamba-2, whose input projection is gate, x, B, C and dt, in this order, here and there."""
    heads, inner = layer.states, layer.states * layer.value_features(width)
    channels = inner + 2 * layer.num_heads * layer.key_features(width)
    yield from linear(f"{name}.in_proj", width, inner + channels + heads, f"{path}/in")
    yield _convolution(name, channels, layer.conv, f"{path}/conv")
    yield Tensor(f"{name}.conv1d.bias", (channels,), (f"{path}/conv/bias",))
    yield from _vectors(name, path, heads, "A_log", "D", "dt_bias")
    yield Tensor(f"{name}.norm.weight", (inner,), (f"{path}/norm/scale",))
    yield from linear(f"{name}.out_proj", inner, width, f"{path}/out")


def gated_delta(layer: GatedDeltaNet, width: int, name: str, path: str) -> Iterator[Tensor]:
    """The tensors of Gated DeltaNet in OLMo Hybrid, one for each projection."""
    keys, values = _sizes(layer, width)
    sizes = {"query": keys, "key": keys, "value": values, "gate": values, "a": layer.states, "b": layer.states}
    for which, size in sizes.items():
        yield from linear(f"{name}.{which[0]}_proj", width, size, f"{path}/{which}")
    yield from _gated_delta_rest(layer, width, name, path, norm="o_norm", out="o_proj")


def gated_delta_fused(layer: GatedDeltaNet, width: int, name: str, path: str) -> Iterator[Tensor]:
    """The tensors of Gated DeltaNet in Qwen3-Next: two projections, of which each key head has a part."""
    keys, values = _sizes(layer, width)
    wide, narrow = (*_QKV, "gate"), ("b", "a")
    for which, size, paths in (("qkvz", 2 * (keys + values), wide), ("ba", 2 * layer.states, narrow)):
        parts = [f"{path}/{part}" for part in paths]
        yield from linear(f"{name}.in_proj_{which}", width, size, *parts, groups=layer.num_heads)
    yield from _gated_delta_rest(layer, width, name, path, norm="norm", out="out_proj")


def _gated_delta_rest(layer, width, name, path, *, norm, out) -> Iterator[Tensor]:
    keys, values = _sizes(layer, width)
    yield _convolution(name, 2 * keys + values, layer.conv, *(f"{path}/{which}_conv" for which in _QKV))
    yield from _vectors(name, path, layer.states, "A_log", "dt_bias")
    yield Tensor(f"{name}.{norm}.weight", (layer.value_features(width),), (f"{path}/norm/scale",))
    yield from linear(f"{name}.{out}", values, width, f"{path}/out")


def _sizes(layer, width) -> tuple[int, int]:
    """The features of the keys, and of the values, of all heads."""
    return layer.num_heads * layer.key_features(width), layer.states * layer.value_features(width)


def _convolution(name, channels, tokens, *paths) -> Tensor:
    return Tensor(
        f"{name}.conv1d.weight", (channels, 1, tokens), tuple(f"{path}/kernel" for path in paths), transposed=True
    )


def _vectors(name, path, heads, *names) -> Iterator[Tensor]:
    for vector in names:
        yield Tensor(f"{name}.{vector}", (heads,), (f"{path}/{vector}",))


class Names(NamedTuple):
    """The names of a family's tensors, where they differ from Llama's.

    Attributes:
      layers: by the kind of a layer, its part of a name, and the function of its tensors.
      mlp: the function of the tensors of a feed-forward layer.
      parts: other parts of names, by Llama's.
      file_parts: parts of names in files, with the names in the state dict; tensors that have the same name there are
        one, joined in this order.
    """

    layers: Mapping[str, tuple[str, Callable[..., Iterator[Tensor]]]]
    mlp: Callable[..., Iterator[Tensor]] = mlp
    parts: Mapping[str, str] = {}
    file_parts: Mapping[str, str] = {}


LLAMA = Names({"attention": ("self_attn", attention)})
PHI3 = Names({"attention": ("self_attn", attention_fused)}, mlp_fused)
QWEN3_NEXT = Names({**LLAMA.layers, "gated_delta": ("linear_attn", gated_delta_fused)})
_PARTS = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
_PARTS |= {f"{which}_conv1d": "conv1d" for which in "qkv"}
OLMO_HYBRID = Names({**LLAMA.layers, "gated_delta": ("linear_attn", gated_delta)}, file_parts=_PARTS)
MAMBA2 = Names(
    {"mamba2": ("mixer", mamba2)},
    parts={"model": "backbone", "embed_tokens": "embeddings", "norm": "norm_f", "input_layernorm": "norm"},
    file_parts={"embedding": "embeddings"},
)
BAMBA = Names(
    {**LLAMA.layers, "mamba2": ("mamba", mamba2)},
    parts={"mlp": "feed_forward", "norm": "final_layernorm", "post_attention_layernorm": "pre_ff_layernorm"},
)
DIFFLLAMA = Names({"differential": ("self_attn", differential)})
DEEPSEEK_V3 = Names({"latent": ("self_attn", latent)})
