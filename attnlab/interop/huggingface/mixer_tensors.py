"""The tensors of mixers other than softmax attention in a state dict of `transformers`, and the parameters in each.

Functions take the layer, the width of its inputs, the name of its tensors, and the path of its parameters.
"""

from collections.abc import Iterator

from attnlab.interop.tensors import Tensor
from attnlab.nn import DifferentialAttention, GatedDeltaNet, LatentAttention, Mamba2

_QKV = ("query", "key", "value")


def linear(
    name: str, rows: int, columns: int, *paths: str, bias: bool = False, groups: int = 1, order: tuple[int, ...] = ()
) -> Iterator[Tensor]:
    """The tensors of a linear layer, whose parameters at several paths are parts of its outputs."""
    kernels, biases = (tuple(f"{path}/{which}" for path in paths) for which in ("kernel", "bias"))
    yield Tensor(f"{name}.weight", (columns, rows), kernels, transposed=True, groups=groups, order=order)
    if bias:
        yield Tensor(f"{name}.bias", (columns,), biases, groups=groups, order=order)


def differential(layer: DifferentialAttention, width: int, name: str, path: str) -> Iterator[Tensor]:
    """The tensors of DiffLlama: a value of ours is its heads j and Hk/2 + j, and the heads' norm has no weights."""
    size, kv_heads = layer.head_dim, layer.kv_heads
    features = {"query": layer.num_heads * size, "key": kv_heads * size, "value": kv_heads * size}
    pairs = [(pair, pair + kv_heads // 2) for pair in range(kv_heads // 2)]
    order = tuple(head * size + feature for pair in pairs for head in pair for feature in range(size))
    for which, columns in features.items():
        of_value = {"order": order} if which == "value" else {}
        bias = layer.use_bias if layer.qkv_bias is None else layer.qkv_bias
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
