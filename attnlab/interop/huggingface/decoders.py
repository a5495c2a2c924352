"""Parts that families share: options of Llama-like models, of layers with a window, and of recurrent layers.

Writers take a config whose layers have explicit sizes; see `conversion.canonical`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from attnlab.interop.huggingface import rotary as rotaries
from attnlab.interop.huggingface.config_reader import ConfigReader, activation_name
from attnlab.nn import AttentionConfig, LayerConfig, ModelConfig
from attnlab.nn.mixers.gated_delta_net import GatedDeltaConfig
from attnlab.nn.mixers.interface import RecurrentConfig
from attnlab.nn.mixers.mamba2 import Mamba2Config
from attnlab.nn.multihead import LocalConfig

_NO_LIMIT = ([0, math.inf], [0, {"__float__": "Infinity"}])  # the second form is from transformers 5
_RECURRENT = "linear_attention"


def llama_like(hf: ConfigReader, *layers: LayerConfig, epsilon: float = 1e-6, tied: bool = False, **fields):
    """Read a config like Llama's, with these `layers` (one period) and `fields`; `epsilon` and `tied` are defaults."""
    width = hf.integer("hidden_size")
    shared = {
        "vocab_size": hf.integer("vocab_size"),
        "num_layers": num_layers(hf),
        "num_heads": hf.integer("num_attention_heads"),
        "width": width,
        "context": hf.integer("max_position_embeddings"),
        "positions": "none" if all(layer.rotary is None for layer in layers) else "rotary",
        "norm": "rms",
        "norm_epsilon": hf.number("rms_norm_eps", epsilon, high=1.0),
        "mlp": "gated",
        "mlp_ratio": hf.integer("intermediate_size") / width,
        "activation": fields.get("activation") or hf.activation("hidden_act", "silu"),
        "tie_embeddings": hf.flag("tie_word_embeddings", tied),
        "layers": layers,
    }
    return ModelConfig(**shared | fields)


def attention(hf: ConfigReader, *, kv_heads: int | None = None, head_dim: int | None = None, **options) -> dict:
    """The options of an attention layer, with these default sizes; `fraction` and `inner` as in `rotary.read`."""
    width, heads = hf.integer("hidden_size"), hf.integer("num_attention_heads")
    size = hf.integer("head_dim", head_dim, null=max(1, width // heads))
    rotated = {name: options.pop(name) for name in ("fraction", "inner") if name in options}
    return {
        "kv_heads": hf.integer("num_key_value_heads", kv_heads, null=heads),
        "head_dim": size,
        "rotary": options.pop("rotary", None) or rotaries.read(hf, size, **rotated),
        "qk_norm": False,
        **options,
    }


def biased(hf: ConfigReader, **options) -> dict:
    """Like `attention`, for configs that have `attention_bias`."""
    return attention(hf, use_bias=hf.flag("attention_bias", False), **options)


def check_divides(hf: ConfigReader) -> None:
    """Raise UserError unless the number of heads divides the width."""
    width = hf.integer("hidden_size")
    if width % hf.integer("num_attention_heads"):
        raise hf.error("num_attention_heads", f"a divisor of hidden_size = {width}")


def num_layers(hf: ConfigReader, default: int | None = None) -> int:
    return hf.integer("num_hidden_layers", default, high=10_000)


def layer_types(hf: ConfigReader, word: str, default: list[bool]) -> list[bool]:
    """For each layer, whether `layer_types` has `word`, not full_attention; `default` if the option is missing."""
    types, words = hf.get("layer_types"), (word, rotaries.GLOBAL)
    if types is None:
        return default
    if not isinstance(types, list | tuple) or not {str(each) for each in types} <= set(words):
        raise hf.error("layer_types", f"a list of {' and '.join(words)}: GPT supports no other")
    if len(types) != len(default):
        raise hf.error("layer_types", f"one for each of the {len(default)} layers")
    return [each == word for each in types]


def windowed(hf: ConfigReader, local: list[bool], options: dict, **local_options) -> tuple[LayerConfig, ...]:
    """One period of attention layers, with a window where `local` is true; one `AttentionConfig` if all are alike."""
    if not any(local):
        return (AttentionConfig(**options),)
    local_options = options | local_options | {"window": hf.integer("sliding_window")}
    if all(local):
        return (AttentionConfig(**local_options),)
    kinds = AttentionConfig(**options), LocalConfig(**local_options)
    return period([kinds[each] for each in local])


def period(layers: Sequence[LayerConfig]) -> tuple[LayerConfig, ...]:
    """The shortest sequence whose repetition gives these layers."""
    lengths = range(1, len(layers) + 1)
    length = next(n for n in lengths if all(layer is layers[i % n] for i, layer in enumerate(layers)))
    return tuple(layers[:length])


def write_llama_like(config: ModelConfig, **options) -> dict:
    """The options of a config.json like Llama's, with `options` added."""
    layer = attention_of(config)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": layer.heads,
        "num_key_value_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_epsilon,
        "hidden_act": activation_name(config.activation),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
        **rotaries.write(layer.rotary),
        **options,
    }


def write_biased(config: ModelConfig, **options) -> dict:
    """Like `write_llama_like`, for configs that have `attention_bias`."""
    return write_llama_like(config, attention_bias=attention_of(config).use_bias, **options)


def layers_of(config: ModelConfig) -> list[LayerConfig]:
    return [config.layer(number) for number in range(config.num_layers)]


def are_local(config: ModelConfig) -> list[bool]:
    """Whether each layer has a window."""
    return [getattr(layer, "window", None) is not None for layer in layers_of(config)]


def attention_of(config: ModelConfig, *, is_local: bool = False) -> AttentionConfig:
    """The first attention layer without a window, or with one if `is_local`; else the other kind, or a placeholder."""
    layers = [layer for layer in config.used if isinstance(layer, AttentionConfig)]
    layers.sort(key=lambda layer: (layer.window is not None) != is_local)
    heads = config.num_heads
    return layers[0] if layers else AttentionConfig(heads=heads, kv_heads=heads, head_dim=2, use_bias=False, scale=1.0)


def recurrent_of(config: ModelConfig, kind: type[RecurrentConfig]) -> RecurrentConfig:
    """The first layer of a kind, or a placeholder."""
    layers = [layer for layer in config.used if isinstance(layer, kind)]
    return layers[0] if layers else kind(heads=1, key_dim=1, value_heads=1, value_dim=2 * config.width)


def write_types(word: str, are: Sequence[bool]) -> list[str]:
    """The inverse of `layer_types`."""
    return [word if each else rotaries.GLOBAL for each in are]


def hybrid(
    hf: ConfigReader, attention: LayerConfig, recurrent: LayerConfig, are_recurrent: Sequence[bool]
) -> tuple[LayerConfig, ...]:
    """One period of layers of two kinds."""
    if any(are_recurrent):
        check_silu(hf)
    return period([recurrent if each else attention for each in are_recurrent])


def check_silu(hf: ConfigReader) -> None:
    """Raise UserError unless the activation is SiLU, as in recurrent layers."""
    if hf.activation("hidden_act", "silu") != "silu":
        raise hf.error("hidden_act", "silu or swish, the activation of GPT's recurrent layers")


def by_types(hf: ConfigReader, every: int, *, last: bool = True) -> list[bool]:
    """Whether layers are recurrent: by `layer_types`, else all but each `every`-th; with fewer, the last is `last`."""
    default = [n % every > 0 for n in range(1, num_layers(hf) + 1)]
    if all(default):
        default[-1] = last
    return layer_types(hf, _RECURRENT, default)


def read_delta(hf: ConfigReader, *, heads=None, key_dim=None, value_heads=None, value_dim=None, **options):
    """Read a Gated DeltaNet layer; sizes default to the arguments, or else follow from the model's sizes."""
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
    layer = recurrent_of(config, GatedDeltaConfig)
    return {
        "layer_types": write_types(_RECURRENT, [isinstance(each, GatedDeltaConfig) for each in layers_of(config)]),
        "linear_num_key_heads": layer.heads,
        "linear_key_head_dim": layer.key_dim,
        "linear_num_value_heads": layer.value_heads,
        "linear_value_head_dim": layer.value_dim,
        "linear_conv_kernel_dim": layer.conv,
    }


def read_mamba2(hf: ConfigReader, defaults: Mapping[str, int | str], epsilon: float) -> Mamba2Config:
    """Read a Mamba-2 layer; `defaults` maps 6 options: groups, state, heads, head features, convolution, expansion."""
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
    """The inverse of `read_mamba2`; `options` are the names in its `defaults`."""
    layer = recurrent_of(config, Mamba2Config)
    expand = layer.value_heads * layer.value_dim // config.width
    sizes = layer.heads, layer.key_dim, layer.value_heads, layer.value_dim, layer.conv, expand
    return dict(zip(options, sizes))
