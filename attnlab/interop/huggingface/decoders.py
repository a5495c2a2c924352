"""What families share: the options of a Llama, and of layers with a window or of two kinds."""

from collections.abc import Sequence

from attnlab.interop.huggingface import rotary as rotaries
from attnlab.interop.huggingface.config_reader import ConfigReader, activation_name
from attnlab.nn import AttentionConfig, LayerConfig, ModelConfig
from attnlab.nn.multihead import GlobalConfig, LocalConfig


def llama_like(
    hf: ConfigReader,
    *layers: LayerConfig,
    epsilon: float = 1e-6,
    tied: bool = False,
    activation: str | None = None,
    **fields,
) -> ModelConfig:
    """A model of a period of layers, as Llama but for these fields; `epsilon` and `tied` by default."""
    width = hf.integer("hidden_size")
    shared = {
        "vocab_size": hf.integer("vocab_size"),
        "num_layers": num_layers(hf),
        "num_heads": hf.integer("num_attention_heads"),
        "width": width,
        "context": hf.integer("max_position_embeddings"),
        "positions": "none" if all(layer.rotary is None for layer in layers) else "rotary",
        "norm": "rms",
        "norm_epsilon": hf.number("rms_norm_eps", epsilon),
        "mlp": "gated",
        "mlp_ratio": hf.integer("intermediate_size") / width,
        "activation": activation or hf.activation("hidden_act", "silu"),
        "tie_embeddings": hf.flag("tie_word_embeddings", tied),
        "layers": layers,
    }
    return ModelConfig(**shared | fields)


def attention(hf: ConfigReader, *, kv_heads: int | None = None, head_dim: int | None = None, **options) -> dict:
    """The options of a layer of attention, with these sizes by default; `fraction` and `inner` as in `rotary.read`."""
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


def bias(hf: ConfigReader) -> bool:
    """Whether the projections of attention have biases."""
    return hf.flag("attention_bias", False)


def check_divides(hf: ConfigReader) -> None:
    """Raise UserError unless heads divide the width."""
    width = hf.integer("hidden_size")
    if width % hf.integer("num_attention_heads"):
        raise hf.error("num_attention_heads", f"a divisor of hidden_size = {width}")


def num_layers(hf: ConfigReader, default: int | None = None) -> int:
    return hf.integer("num_hidden_layers", default, high=10_000)


def layer_types(hf: ConfigReader, word: str, default: list[bool]) -> list[bool]:
    """Whether `layer_types` has a word for each layer, and not full_attention; `default` without the option."""
    types, words = hf.get("layer_types"), (word, rotaries.GLOBAL)
    if types is None:
        return default
    if not isinstance(types, list | tuple) or not {str(each) for each in types} <= set(words):
        raise hf.error("layer_types", f"a list of {' and '.join(words)}: GPT supports no other")
    if len(types) != len(default):
        raise hf.error("layer_types", f"one for each of the {len(default)} layers")
    return [each == word for each in types]


def windowed(hf: ConfigReader, local: list[bool], options: dict, **local_options) -> tuple[LayerConfig, ...]:
    """One period of layers of attention, those with a window where `local`; plain layers if all are alike."""
    if not any(local):
        return (AttentionConfig(**options),)
    local_options = options | local_options | {"window": hf.integer("sliding_window")}
    if all(local):
        return (AttentionConfig(**local_options),)
    kinds = GlobalConfig(**options), LocalConfig(**local_options)
    return period([kinds[each] for each in local])


def period(layers: Sequence[LayerConfig]) -> tuple[LayerConfig, ...]:
    """The shortest part that repeats to these layers."""
    lengths = range(1, len(layers) + 1)
    length = next(n for n in lengths if all(layer is layers[i % n] for i, layer in enumerate(layers)))
    return tuple(layers[:length])


def write_llama_like(config: ModelConfig, **options) -> dict:
    """The options of a config.json as Llama's, and these."""
    layer = attention_of(config)
    made = layer.make(config)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": config.hidden,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": made.num_heads,
        "num_key_value_heads": made.kv_heads,
        "head_dim": max(1, made.head_dim),
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.norm_epsilon,
        "hidden_act": activation_name(config.activation),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
        **rotaries.write(layer.rotary),
        **options,
    }


def write_bias(config: ModelConfig) -> dict:
    return {"attention_bias": attention_of(config).make(config).use_bias}


def layers_of(config: ModelConfig) -> list[LayerConfig]:
    return [config.layer(number) for number in range(config.num_layers)]


def are_local(config: ModelConfig) -> list[bool]:
    """Whether each layer has a window."""
    return [getattr(layer, "window", None) is not None for layer in layers_of(config)]


def attention_of(config: ModelConfig, *, is_local: bool = False) -> AttentionConfig:
    """The first layer of attention without a window, or with one; if there is none, the other, or a default."""
    layers = [layer for layer in config.used if isinstance(layer, AttentionConfig)]
    layers.sort(key=lambda layer: (layer.window is not None) != is_local)
    return layers[0] if layers else AttentionConfig()


def write_types(word: str, are: Sequence[bool]) -> list[str]:
    """`layer_types`, the inverse of `layer_types`."""
    return [word if each else rotaries.GLOBAL for each in are]
