"""Recurrent layers in a config.json: Gated DeltaNet and Mamba-2, alone or among layers of attention."""

import math
from collections.abc import Iterable, Mapping, Sequence

from attnlab.interop.huggingface.config_reader import ConfigReader
from attnlab.interop.huggingface.decoders import layer_types, layers_of, num_layers, period, write_types
from attnlab.nn import LayerConfig, ModelConfig
from attnlab.nn.mixers.gated_delta_net import GatedDeltaConfig
from attnlab.nn.mixers.interface import RecurrentConfig
from attnlab.nn.mixers.mamba2 import Mamba2Config

_NO_LIMIT = ([0, math.inf], [0, {"__float__": "Infinity"}])  # the second in files of transformers 5
_WORD = "linear_attention"


def hybrid(
    hf: ConfigReader, attention: LayerConfig, recurrent: LayerConfig, are_recurrent: Sequence[bool]
) -> tuple[LayerConfig, ...]:
    """One period of layers of two kinds."""
    if any(are_recurrent):
        check_silu(hf)
    return period([recurrent if each else attention for each in are_recurrent])


def check_silu(hf: ConfigReader) -> None:
    """Raise UserError for another activation than the one of recurrent layers."""
    if hf.activation("hidden_act", "silu") != "silu":
        raise hf.error("hidden_act", "silu or swish, the activation of GPT's recurrent layers")


def by_types(hf: ConfigReader, every: int, *, last: bool = True) -> list[bool]:
    """Whether each layer is recurrent, by `layer_types`, or all but one of `every`; `last` if that is none."""
    default = [n % every > 0 for n in range(1, num_layers(hf) + 1)]
    if all(default):
        default[-1] = last
    return layer_types(hf, _WORD, default)


def write_types_of(config: ModelConfig, kind: type[LayerConfig]) -> list[str]:
    """`layer_types` of a model, whose recurrent layers are of a kind."""
    return write_types(_WORD, are(config, kind))


def are(config: ModelConfig, kind: type[LayerConfig]) -> list[bool]:
    """Whether each layer is of a kind."""
    return [isinstance(layer, kind) for layer in layers_of(config)]


def read_delta(hf: ConfigReader, *, heads=None, key_dim=None, value_heads=None, value_dim=None, **options):
    """Layers of Gated DeltaNet; sizes by default, or those that follow from the model's."""
    width, num_heads = hf.integer("hidden_size"), hf.integer("num_attention_heads")
    heads = hf.integer("linear_num_key_heads", heads, null=num_heads)
    key_dim = hf.integer("linear_key_head_dim", key_dim, null=int(0.75 * width / heads))
    return GatedDeltaConfig(
        heads=heads,
        key_dim=key_dim,
        value_heads=hf.integer("linear_num_value_heads", value_heads, null=num_heads),
        value_dim=hf.integer("linear_value_head_dim", value_dim, null=2 * key_dim),
        conv=hf.integer("linear_conv_kernel_dim", 4),
        **options,
    )


def write_delta(config: ModelConfig) -> dict:
    layer = module_of(config, GatedDeltaConfig)
    return {
        "linear_num_key_heads": layer.num_heads,
        "linear_key_head_dim": layer.key_features(config.width),
        "linear_num_value_heads": layer.states,
        "linear_value_head_dim": layer.value_features(config.width),
        "linear_conv_kernel_dim": layer.conv,
    }


def read_mamba2(hf: ConfigReader, defaults: Mapping[str, int | str], epsilon: float) -> Mamba2Config:
    """Layers of Mamba-2; `defaults` of groups, state, heads, their features, convolution and expansion, by option."""
    limits = hf.get("time_step_limit")
    if limits is not None and (not isinstance(limits, list | tuple) or list(limits) not in _NO_LIMIT):
        raise hf.error("time_step_limit", "[0.0, Infinity]: GPT does not limit time steps")
    groups, state, heads, features, conv, expand = defaults
    width, value_heads = hf.integer("hidden_size"), hf.integer(heads, defaults[heads])
    inner = hf.integer(expand, defaults[expand]) * width
    is_auto = hf.get(features, defaults[features]) == "auto"
    value_dim = inner // value_heads if is_auto else hf.integer(features)
    if value_heads * value_dim != inner:
        sizes = f"{value_heads} heads of {value_dim} features and hidden_size = {width}"
        raise hf.error(expand, f"a factor that fits {sizes}")
    return Mamba2Config(
        heads=hf.integer(groups, defaults[groups]),
        key_dim=hf.integer(state, defaults[state]),
        value_heads=value_heads,
        value_dim=value_dim,
        conv=hf.integer(conv, defaults[conv]),
        norm_epsilon=epsilon,
    )


def write_mamba2(config: ModelConfig, options: Iterable[str]) -> dict:
    """The inverse of `read_mamba2`, with the names of its defaults."""
    layer, width = module_of(config, Mamba2Config), config.width
    inner = layer.states * layer.value_features(width)
    sizes = layer.num_heads, layer.key_features(width), layer.states, layer.value_features(width), layer.conv
    return dict(zip(options, (*sizes, inner // width)))


def module_of(config: ModelConfig, kind: type[RecurrentConfig]):
    """The first layer of a kind, or one of some sizes."""
    layers = [layer for layer in config.used if isinstance(layer, kind)]
    layer = layers[0] if layers else kind(heads=1, key_dim=1, value_heads=1, value_dim=2 * config.width)
    return layer.make(config)
