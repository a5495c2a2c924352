"""The `GPT` that a config.json describes, and the config.json that describes a `GPT`."""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from attnlab.interop.huggingface import rotary as rotaries
from attnlab.interop.huggingface.config_reader import ConfigReader
from attnlab.interop.huggingface.families import DROPOUTS, FAMILIES, family_of, with_biases
from attnlab.interop.huggingface.tensor_names import kind_of
from attnlab.nn import GPT, AttentionConfig, LayerConfig, ModelConfig, RecurrentMixer
from attnlab.support.errors import UserError
from attnlab.support.options import FieldError

# Fields that do not decide what a model computes, or that its layers have.
_NOT_COMPARED = {"num_heads", "dropout", "remat", "dtype", "zero_outputs", "padded_vocab_size", "layers"}


def make_model(config: Mapping, name: str = "config") -> GPT:
    """Build the `GPT` that a config describes; `name` is the source in errors and warnings."""
    family, hf = FAMILIES[family_of(config, name)], ConfigReader(config, name)
    hf.only(is_causal=True)
    try:
        model = family.read(hf)
    except FieldError as error:
        raise UserError(f"{name}: the options in its config do not fit together: {error}") from error
    hf.check_unread()
    rates = {option: hf.get(option) for option in (*DROPOUTS, "attention_dropout") if hf.get(option)}
    if rates and not model.dropout:
        listed = ", ".join(f"{option} = {rate}" for option, rate in rates.items())
        warnings.warn(f"{name}: dropout in its config is not used ({listed}): set dropout", stacklevel=3)
    if unread := hf.unread():
        ignored = f"{', '.join(unread)} in its config {'is' if len(unread) == 1 else 'are'} ignored"
        warnings.warn(f"{name}: {ignored}, as by transformers' {family.architecture}", stacklevel=3)
    return GPT(model)


def make_config(model: GPT, model_type: str | None = None) -> dict:
    """The content of `config.json` for a model, of a family or the first that has such models."""
    if not isinstance(model, GPT):
        raise UserError(f"a {type(model).__name__}: expected attnlab.nn.GPT")
    written = {name: family for name, family in FAMILIES.items() if family.write}
    if model_type is not None and model_type not in written:
        raise UserError(f"model_type = {model_type!r}: expected one of {', '.join(written)}")
    kinds = {kind for family in written.values() for kind in family.names.layers}
    if others := [layer.kind for layer in model.config.used if kind_of(layer) not in kinds]:
        layers = _words(model.config)
        raise UserError(
            f"model.layers = {layers!r}: models of transformers that are written have no layers of {others[0]}"
        )
    for name in [model_type] if model_type else written:
        config = {
            "architectures": [FAMILIES[name].architecture],
            "model_type": name,
            **FAMILIES[name].write(model.config),
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        }
        if (misfit := _misfit(model.config, name, config)) is None:
            return config
    if model_type:
        raise UserError(misfit)
    raise UserError(
        f"no family of transformers has this model; to hear what one of them lacks, give model_type, one of "
        f"{', '.join(written)}"
    )


def _misfit(model: ModelConfig, name: str, config: dict) -> str | None:
    """The first field in which a model differs from the model that its config describes, in words; None without one."""
    try:
        described = make_model(config).config
    except UserError as error:
        return f"{name} does not have such models ({error})"
    model = with_biases(model) if name == "gpt2" else model
    for (field, value, resolved), (_, only, other) in zip(_fields(model), _fields(described)):
        if resolved != other:
            return " ".join(f"model.{field} = {value!r}: {name} supports only {only!r}".split())
    return None


def _fields(config: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    """The fields that decide what a model computes: name, value, and a value that is equal in equivalent models."""
    layers = [config.layer(number) for number in range(config.num_layers)]
    resolved = {"positions": config.position_encoding, "mlp_ratio": config.hidden}
    resolved["norm_at"] = [config.norm_of(number) for number in range(config.num_layers)]
    for name, value in vars(config).items():
        if name not in _NOT_COMPARED:
            yield name, value, resolved.get(name, value)
    yield "layers", _words(config), list(map(kind_of, layers))
    of_layers = {id(layer): list(_layer_fields(layer, config)) for layer in config.used}
    for layer in layers:
        yield from of_layers[id(layer)]


def _layer_fields(layer: LayerConfig, config: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    """The same of a layer: its module knows the sizes, biases and masks that fields leave open."""
    module = layer.make(config)
    resolved = {"heads": module.num_heads, "impl": "auto"}
    if isinstance(module, RecurrentMixer):
        resolved |= {"key_dim": module.key_features(config.width), "value_dim": module.value_features(config.width)}
        resolved |= {"value_heads": module.states}
    else:
        resolved |= {"scale": module.scale or module.head_dim**-0.5}
        resolved |= {"rotary": module.rotary and rotaries.resolved(module.rotary)}
    for field in dataclasses.fields(AttentionConfig if kind_of(layer) == "attention" else layer):
        value = getattr(layer, field.name)
        yield f"{layer.kind}.{field.name}", value, resolved.get(field.name, getattr(module, field.name, value))


def _words(config: ModelConfig) -> str:
    """The kinds of one period of layers."""
    return " ".join(layer.kind for layer in config.layers[: config.num_layers])
