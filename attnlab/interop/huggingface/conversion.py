"""The `GPT` that a config.json describes, and the config.json that describes a `GPT`."""

import dataclasses
import warnings
from collections.abc import Mapping

from attnlab.interop.huggingface import rotary as rotaries
from attnlab.interop.huggingface.config_reader import ConfigReader
from attnlab.interop.huggingface.families import DROPOUTS, FAMILIES, family_of, with_biases
from attnlab.interop.huggingface.tensor_names import kind_of
from attnlab.nn import GPT, AttentionConfig, LayerConfig, ModelConfig, Rotary
from attnlab.support.errors import UserError
from attnlab.support.options import FieldError

# Fields that do not change what a model computes, or whose values are compared in its layers.
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
        warnings.warn(f"{name}: dropout in its config is not used ({listed}): set it in the model", stacklevel=3)
    if unread := hf.unread():
        ignored = f"{', '.join(unread)} in its config {'is' if len(unread) == 1 else 'are'} ignored"
        warnings.warn(f"{name}: {ignored}, as by transformers' {family.architecture}", stacklevel=3)
    return GPT(model)


def make_config(model: GPT, model_type: str | None = None) -> dict:
    """The content of `config.json` for a model, in the family `model_type`, or in the first that supports the model."""
    if not isinstance(model, GPT):
        raise UserError(f"model is a {type(model).__name__}: expected attnlab.nn.GPT")
    written = {name: family for name, family in FAMILIES.items() if family.write}
    if model_type is not None and model_type not in written:
        raise UserError(f"model_type = {model_type!r}: expected one of {', '.join(written)}")
    kinds = {kind for family in written.values() for kind in family.names.layers}
    if others := [layer.kind for layer in model.config.used if kind_of(layer) not in kinds]:
        layers = _words(model.config)
        raise UserError(
            f"model.layers = {layers!r}: layers of {others[0]} cannot be exported to transformers: "
            f"expected {', '.join(sorted(kinds))}"
        )
    misfits = []
    for name in [model_type] if model_type else written:
        config = {
            "architectures": [FAMILIES[name].architecture],
            "model_type": name,
            **FAMILIES[name].write(canonical(model.config)),
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
        }
        if (misfit := _misfit(model.config, name, config)) is None:
            return config
        misfits.append(misfit)
    if model_type:
        raise UserError(misfit)
    raise UserError(
        f"no model type of transformers fits this model ({'; '.join(misfits[:2])}): train llama_tiny or gpt2_124m, or "
        f"pass model_type to see what another type lacks, one of {', '.join(written)}"
    )


def _misfit(model: ModelConfig, name: str, config: dict) -> str | None:
    """The first field in which a model differs from the model that its config describes, in words; None if equal."""
    try:
        described = canonical(make_model(config).config)
    except UserError as error:
        return f"{name} does not support such models ({error})"
    ours = canonical(with_biases(model) if name == "gpt2" else model)
    groups = [("", ours, described)]
    groups += [(f"{model.layer(n).kind}.", ours.layer(n), described.layer(n)) for n in range(model.num_layers)]
    for group, one, other in groups:
        if type(one) is not type(other):
            return f"model.layers = {_words(model)!r}: {name} supports only {_words(described)!r}"
        for field in (field.name for field in dataclasses.fields(one)):
            value, only = getattr(one, field), getattr(other, field)
            if field not in _NOT_COMPARED and value != only:
                return " ".join(f"model.{group}{field} = {value!r}: {name} supports only {only!r}".split())
    return None


def canonical(config: ModelConfig) -> ModelConfig:
    """The form that equivalent configs share: explicit sizes and biases, and one kind for local and other attention."""
    norms = {config.norm_of(number) for number in range(config.num_layers)}
    return config.replace(
        positions=config.position_encoding,
        mlp_ratio=config.hidden / config.width,
        norm_at=norms.pop() if len(norms) == 1 else config.norm_at,
        layers=tuple(_canonical_layer(layer, config) for layer in config.layers[: config.num_layers]),
    )


def _canonical_layer(layer: LayerConfig, config: ModelConfig) -> LayerConfig:
    module = layer.make(config)
    if not isinstance(layer, AttentionConfig):
        return dataclasses.replace(
            layer,
            heads=module.num_heads,
            key_dim=module.key_features(config.width),
            value_dim=module.value_features(config.width),
            value_heads=module.states,
        )
    kind = AttentionConfig if kind_of(layer) == "attention" else type(layer)
    resolved = {name: getattr(module, name) for name in ("kv_heads", "head_dim", "use_bias", "qkv_bias")}
    resolved |= {"heads": module.num_heads, "scale": module.scale or module.head_dim**-0.5, "impl": "auto"}
    resolved |= {"rotary": rotaries.resolved(module.rotary or Rotary())}
    return kind(**{field.name: getattr(layer, field.name) for field in dataclasses.fields(kind)} | resolved)


def _words(config: ModelConfig) -> str:
    """The kinds of one period of layers."""
    return " ".join(layer.kind for layer in config.layers[: config.num_layers])
