"""The tensors of recurrent layers in a state dict of `transformers`, and the parameters in each.

Functions take the layer, the width of its inputs, the name of its tensors, and the path of its parameters.
"""

from collections.abc import Iterator

from attnlab.interop.tensors import Tensor
from attnlab.nn.mixers import GatedDeltaNet, Mamba2

_QKV = ("query", "key", "value")


def mamba2(layer: Mamba2, width: int, name: str, path: str) -> Iterator[Tensor]:
    """The tensors of Mamba-2, whose input projection is gate, x, B, C and dt, in this order, here and there."""
    heads, inner = layer.states, layer.states * layer.value_features(width)
    channels = inner + 2 * layer.num_heads * layer.key_features(width)
    yield _matrix(f"{name}.in_proj.weight", width, inner + channels + heads, f"{path}/in")
    yield _convolution(name, channels, layer.conv, f"{path}/conv")
    yield Tensor(f"{name}.conv1d.bias", (channels,), (f"{path}/conv/bias",))
    yield from _vectors(name, path, heads, "A_log", "D", "dt_bias")
    yield Tensor(f"{name}.norm.weight", (inner,), (f"{path}/norm/scale",))
    yield _matrix(f"{name}.out_proj.weight", inner, width, f"{path}/out")


def gated_delta(layer: GatedDeltaNet, width: int, name: str, path: str) -> Iterator[Tensor]:
    """The tensors of Gated DeltaNet in OLMo Hybrid, one for each projection."""
    keys, values = _sizes(layer, width)
    sizes = {"query": keys, "key": keys, "value": values, "gate": values, "a": layer.states, "b": layer.states}
    for which, size in sizes.items():
        yield _matrix(f"{name}.{which[0]}_proj.weight", width, size, f"{path}/{which}")
    yield from _gated_delta_rest(layer, width, name, path, norm="o_norm", out="o_proj")


def gated_delta_fused(layer: GatedDeltaNet, width: int, name: str, path: str) -> Iterator[Tensor]:
    """The tensors of Gated DeltaNet in Qwen3-Next: two projections, of which each key head has a part."""
    keys, values = _sizes(layer, width)
    wide, narrow = (*_QKV, "gate"), ("b", "a")
    for which, size, paths in (("qkvz", 2 * (keys + values), wide), ("ba", 2 * layer.states, narrow)):
        yield _matrix(f"{name}.in_proj_{which}.weight", width, size, *(f"{path}/{p}" for p in paths))._replace(
            groups=layer.num_heads
        )
    yield from _gated_delta_rest(layer, width, name, path, norm="norm", out="out_proj")


def _gated_delta_rest(layer, width, name, path, *, norm, out) -> Iterator[Tensor]:
    keys, values = _sizes(layer, width)
    yield _convolution(name, 2 * keys + values, layer.conv, *(f"{path}/{which}_conv" for which in _QKV))
    yield from _vectors(name, path, layer.states, "A_log", "dt_bias")
    yield Tensor(f"{name}.{norm}.weight", (layer.value_features(width),), (f"{path}/norm/scale",))
    yield _matrix(f"{name}.{out}.weight", values, width, f"{path}/out")


def _sizes(layer, width) -> tuple[int, int]:
    """The features of the keys, and of the values, of all heads."""
    return layer.num_heads * layer.key_features(width), layer.states * layer.value_features(width)


def _matrix(name, rows, columns, *paths) -> Tensor:
    return Tensor(name, (columns, rows), tuple(f"{path}/kernel" for path in paths), transposed=True)


def _convolution(name, channels, tokens, *paths) -> Tensor:
    return Tensor(
        f"{name}.conv1d.weight", (channels, 1, tokens), tuple(f"{path}/kernel" for path in paths), transposed=True
    )


def _vectors(name, path, heads, *names) -> Iterator[Tensor]:
    for vector in names:
        yield Tensor(f"{name}.{vector}", (heads,), (f"{path}/{vector}",))
