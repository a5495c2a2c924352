"""Recurrent layers in a config.json: which layers they are, and the options that are fields of `Recurrence`."""

import math
from collections.abc import Sequence

from attnlab.interop.huggingface.config_reader import ConfigReader
from attnlab.interop.huggingface.families import Recurrent
from attnlab.interop.huggingface.rotary import layer_types, read_kinds
from attnlab.nn.groups import Recurrence
from attnlab.nn.kinds import Mixer, kinds_of, named

_EPSILON = 1e-5  # of the norms of recurrent layers, by default
_NO_LIMIT = ([0, math.inf], [0, {"__float__": "Infinity"}])  # the second in files of transformers 5


def layers(options: ConfigReader, recurrent: Recurrent, number: int) -> list[str]:
    """The kind of each layer: "attention", or the family's recurrent kind."""
    if recurrent.layers == "layer_types":
        period = options.integer(recurrent.period) if recurrent.period else 4
        default = [recurrent.kind if n % period else "attention" for n in range(1, number + 1)]
        if recurrent.hybrid and "attention" not in default:
            default[-1] = "attention"
        kinds = read_kinds(options, default, _names(recurrent))
        if recurrent.hybrid and len(set(kinds)) < 2:
            raise options.error("layer_types", "layers of both kinds")
        return kinds
    at = options.get(recurrent.layers) or [] if recurrent.layers else []
    if not isinstance(at, list | tuple) or not all(isinstance(n, int) for n in at):
        raise options.error(recurrent.layers, "the numbers of the layers of attention, or null")
    return ["attention" if n in at else recurrent.kind for n in range(number)]


def read(options: ConfigReader, recurrent: Recurrent, *, width: int, num_heads: int, epsilon: float) -> Recurrence:
    """The sizes and parts of a family's recurrent layers; UserError for what GPT does not have."""
    if options.activation("hidden_act") != "silu":
        raise options.error("hidden_act", "silu or swish, the activation of GPT's recurrent layers")
    limits = options.get("time_step_limit")
    if limits is not None and (not isinstance(limits, list | tuple) or list(limits) not in _NO_LIMIT):
        raise options.error("time_step_limit", "[0.0, Infinity]: GPT does not limit time steps")
    names = {field: option for option, field in recurrent.options.items()}
    heads = options.integer(names["heads"], num_heads)
    value_heads = options.integer(names["value_heads"], num_heads)
    key_dim = options.integer(names["key_dim"], int(0.75 * width / heads))
    inner = options.integer(recurrent.expand) * width if recurrent.expand else 2 * key_dim * value_heads
    is_auto = options.get(names["value_dim"]) == "auto"
    value_dim = inner // value_heads if is_auto else options.integer(names["value_dim"], inner // value_heads)
    if recurrent.expand and value_heads * value_dim != inner:
        sizes = f"{value_heads} heads of {value_dim} features and hidden_size = {width}"
        raise options.error(recurrent.expand, f"a factor that fits {sizes}")
    negative = names.get("negative_eigenvalues")
    return Recurrence(
        heads,
        key_dim,
        value_dim,
        options.integer(names["conv"]),
        negative_eigenvalues=options.flag(negative) if negative else None,
        value_heads=value_heads,
        norm_epsilon=epsilon if recurrent.same_epsilon and epsilon != _EPSILON else None,
    )


def write(model, recurrent: Recurrent, kinds: Sequence[str]) -> dict:
    """The options of a config.json that say what the recurrent layers of a `GPT` are; `kinds` of its layers."""
    kind, width = named(recurrent.kind), model.width
    is_any = recurrent.kind in kinds_of(model)
    sizes = values(kind.module(model) if is_any else kind.layer(num_heads=1, key_dim=1, value_dim=2 * width), width)
    options = {option: sizes[field] for option, field in recurrent.options.items()}
    if recurrent.expand:
        options[recurrent.expand] = sizes["value_heads"] * sizes["value_dim"] // width
    kinds = [recurrent.kind if kind == recurrent.kind else "attention" for kind in kinds]
    if recurrent.layers == "layer_types":
        options["layer_types"] = layer_types(kinds, _names(recurrent))
    elif recurrent.layers:
        options[recurrent.layers] = [n for n, kind in enumerate(kinds) if kind == "attention"]
    return options


def resolved(model) -> dict:
    """The options of a `GPT`'s recurrent layers, with their defaults, by kind."""
    kinds = {name: kind for name, kind in kinds_of(model).items() if isinstance(kind, Mixer)}
    return {name: values(kind.module(model), model.width) for name, kind in kinds.items()}


def values(layer, width: int) -> dict:
    """The fields of `Recurrence` that a layer reads, with its values."""
    return {
        **{name: getattr(layer, name) for name in layer.reads - {"heads"}},
        "heads": layer.num_heads,
        "key_dim": layer.key_features(width),
        "value_heads": layer.states,
        "value_dim": layer.value_features(width),
    }


def _names(recurrent: Recurrent) -> dict[str, str]:
    """The words of `layer_types`, with our kinds."""
    return {"linear_attention": recurrent.kind, "full_attention": "attention"}
