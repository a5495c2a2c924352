"""The tensors of relatives of softmax attention in a state dict of `transformers`, and the parameters in each.

Functions take the layer, the width of its inputs, the name of its tensors, and the path of its parameters.
"""

from collections.abc import Iterator

from attnlab.interop.tensors import Tensor
from attnlab.nn import DifferentialAttention, LatentAttention


def differential(layer: DifferentialAttention, width: int, name: str, path: str) -> Iterator[Tensor]:
    """The tensors of DiffLlama: a value of ours is its heads j and Hk/2 + j, and the heads' norm has no weights."""
    size, kv_heads = layer.head_dim, layer.kv_heads
    features = {"query": layer.num_heads * size, "key": kv_heads * size, "value": kv_heads * size}
    pairs = [(pair, pair + kv_heads // 2) for pair in range(kv_heads // 2)]
    order = tuple(head * size + feature for pair in pairs for head in pair for feature in range(size))
    for which, columns in features.items():
        of_value = {"order": order} if which == "value" else {}
        bias = layer.use_bias if layer.qkv_bias is None else layer.qkv_bias
        yield from _linear(f"{name}.{which[0]}_proj", width, columns, f"{path}/{which}", bias=bias, **of_value)
    yield from _linear(f"{name}.o_proj", features["query"], width, f"{path}/out", bias=layer.use_bias)
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
        yield from _linear(f"{name}.q_a_proj", width, layer.q_rank, f"{path}/query_down", bias=layer.use_bias)
        yield Tensor(f"{name}.q_a_layernorm.weight", (layer.q_rank,), (f"{path}/query_norm/scale",))
    yield from _linear(query, of_query, queries, f"{path}/query", groups=heads, order=order(layer.nope_dim))
    both, shared = rank + rotated, (f"{path}/latent", f"{path}/rotary")
    yield from _linear(f"{name}.kv_a_proj_with_mqa", width, both, *shared, bias=layer.use_bias, order=order(rank))
    yield Tensor(f"{name}.kv_a_layernorm.weight", (rank,), (f"{path}/latent_norm/scale",))
    expanded = heads * (layer.nope_dim + layer.value_dim)
    yield from _linear(f"{name}.kv_b_proj", rank, expanded, f"{path}/key", f"{path}/value", groups=heads)
    yield from _linear(f"{name}.o_proj", heads * layer.value_dim, width, f"{path}/out", bias=layer.use_bias)


def _linear(name, rows, columns, *paths, bias=False, groups=1, order=()) -> Iterator[Tensor]:
    kernels, biases = (tuple(f"{path}/{which}" for path in paths) for which in ("kernel", "bias"))
    yield Tensor(f"{name}.weight", (columns, rows), kernels, transposed=True, groups=groups, order=order)
    if bias:
        yield Tensor(f"{name}.bias", (columns,), biases, groups=groups, order=order)
