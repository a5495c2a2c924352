"""The config.json that describes a `GPT`."""

from collections.abc import Sequence

from attnlab.interop.huggingface import recurrent
from attnlab.interop.huggingface import rotary as rotaries
from attnlab.interop.huggingface.config_reader import activation_name
from attnlab.interop.huggingface.families import DROPOUTS, FAMILIES, Family
from attnlab.interop.huggingface.reading import make_model
from attnlab.nn import GPT
from attnlab.nn.kinds import Attention, kind_of, named, norm_at_of, pattern_of, positions_of
from attnlab.nn.resolved import resolved
from attnlab.support.errors import UserError

# Fields that do not decide what a model computes, or only together with others.
_NOT_COMPARED = (
    *("parent", "name", "dropout", "remat", "dtype", "impl", "zero_outputs", "local_base", "mixer"),
    "padded_vocab_size",  # tensors are written without padding
)
_WRITTEN = {name: family for name, family in FAMILIES.items() if family.is_written}
_SOFTMAX = ("attention", "local", "global")
# Kinds of layers that a family has.
_KINDS = {
    *_SOFTMAX,
    *(family.recurrent.kind for family in _WRITTEN.values() if family.recurrent),
    *(family.fields["mixer"] for family in _WRITTEN.values() if "mixer" in family.fields),
}


def make_config(model: GPT, model_type: str | None = None) -> dict:
    """The content of `config.json` for a model, of a family or the first that has such models."""
    if not isinstance(model, GPT):
        raise UserError(f"a {type(model).__name__}: expected attnlab.nn.GPT")
    if model_type is not None and model_type not in _WRITTEN:
        raise UserError(f"model_type = {model_type!r}: expected one of {', '.join(_WRITTEN)}")
    if others := [kind for kind in pattern_of(model)[: model.num_layers] if kind not in _KINDS]:
        raise UserError(
            f"model.{_shown(model, 'pattern')}: models of transformers that are written have no layers of {others[0]}"
        )
    for family in [model_type] if model_type else _WRITTEN:
        config = _write(model, family)
        if (misfit := _misfit(model, family, config)) is None:
            return config
    if model_type:
        raise UserError(misfit)
    raise UserError(
        f"no family of transformers has this model; to hear what one of them lacks, give model_type, one of "
        f"{', '.join(_WRITTEN)}"
    )


def with_biases(model: GPT) -> GPT:
    """The same model with all biases, which GPT-2 always has; added biases are 0."""
    return model.clone(use_bias=True, attention_bias=None, qkv_bias=None)


def _write(model: GPT, name: str) -> dict:
    family = FAMILIES[name]
    more = _gpt2_options(model) if name == "gpt2" else {}
    more |= _decoder_options(model, family) if "num_attention_heads" in family.options else {}
    more |= recurrent.write(model, family.recurrent, _kinds(model)) if family.recurrent else {}
    more |= {"num_experts": 0} if "num_experts" in family.defaults else {}
    return {
        "architectures": [family.architecture],
        "model_type": name,
        **{option: _value(model, field, family.defaults.get(option)) for option, field in family.options.items()},
        **more,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _value(model: GPT, field: str, default):
    """The value of an option that sets a field directly."""
    if field == "attention_bias":
        return _resolved(model)["attention_bias"]
    return activation_name(model.activation, default) if field == "activation" else getattr(model, field)


def _gpt2_options(model: GPT) -> dict:
    return {
        "n_inner": resolved(model).hidden,
        "scale_attn_weights": model.score_scale != 1,
        **dict.fromkeys(DROPOUTS, model.dropout),
    }


def _decoder_options(model: GPT, family: Family) -> dict:
    options = {
        "num_key_value_heads": resolved(model).kv_heads,
        "head_dim": max(1, resolved(model).head_dim),
        "intermediate_size": resolved(model).hidden,
        "attention_dropout": 0.0,
        "rope_theta": float(model.rotary.base),
        "rope_scaling": rotaries.write_rotary(model.rotary),
    }
    if family.inner_fraction:
        fraction = {"partial_rotary_factor": model.rotary.fraction}
        options["rope_scaling"] = (options["rope_scaling"] or {"rope_type": "default"}) | fraction
    elif "partial_rotary_factor" in family.defaults:
        options["partial_rotary_factor"] = model.rotary.fraction
    if family.rotary_optional and positions_of(model) == "none":
        options |= {"rope_theta": None, "rope_scaling": None}
    if "rope_local_base_freq" in family.defaults:
        options["rope_local_base_freq"] = model.local_base or model.rotary.base
    if "query_pre_attn_scalar" in family.defaults:
        options["query_pre_attn_scalar"] = max(1, round((_resolved(model)["score_scale"] or 1) ** -2))
    if "sliding_window" in family.defaults:
        options |= _window_options(model, family)
    return options


def _window_options(model: GPT, family: Family) -> dict:
    kinds = _kinds(model)
    slides = "local" in kinds
    options = {"sliding_window": model.window if slides else None}
    if "use_sliding_window" in family.defaults:
        options |= {"use_sliding_window": slides, "max_window_layers": kinds.index("local") if slides else len(kinds)}
    if "query_pre_attn_scalar" in family.defaults:  # Gemma expects a window even if no layer has it
        options |= {"sliding_window": options["sliding_window"] or family.defaults["sliding_window"]}
    if "layer_types" in family.defaults:
        options["layer_types"] = rotaries.layer_types(kinds)
    return options


def _misfit(model: GPT, name: str, config: dict) -> str | None:
    """The first field in which a model differs from the model that its config describes, in words; None without one."""
    try:
        described = make_model(config)
    except UserError as error:
        return f"{name} does not have such models ({error})"
    model = with_biases(model) if name == "gpt2" else model
    theirs = _resolved(described)
    for field, value in _resolved(model).items():
        if value != theirs[field]:
            return f"model.{_shown(model, field)}: {name} supports only {_shown(described, field).partition(' = ')[2]}"
    return None


def _shown(model: GPT, field: str) -> str:
    """A field and its value in one line; the mixer in place of an empty pattern."""
    field = "mixer" if field == "pattern" and not model.pattern else field
    return f"{field} = {' '.join(repr(getattr(model, field)).split())}"


def _resolved(model: GPT) -> dict:
    """The fields that decide what a model computes, in one form for equivalent values."""
    return {
        **{field: getattr(model, field) for field in GPT.__dataclass_fields__ if field not in _NOT_COMPARED},
        **({} if model.mlp_ratio else {"activation": None, "mlp": None}),
        **_resolved_attention(model),
        "positions": positions_of(model),
        "mlp_ratio": resolved(model).hidden,
        "attention_bias": resolved(model).attention_bias,
        "qkv_bias": resolved(model).qkv_bias,
        "window": model.window if any(kind.is_local(model) for kind in _attention(model)) else None,
        "pattern": _kinds(model),
        "norm_at": [norm_at_of(model, layer) for layer in range(model.num_layers)],
        "recurrence": recurrent.resolved(model),
    }


def _resolved_attention(model: GPT) -> dict:
    """The fields of layers of attention alone, None where there are none."""
    rotary = [kind.rotary(model) for kind in _attention(model)]
    if not rotary:
        return dict.fromkeys(("num_heads", "kv_heads", "head_dim", "score_scale", "rotary"))
    return {
        "kv_heads": resolved(model).kv_heads,
        "head_dim": resolved(model).head_dim,
        "score_scale": model.score_scale or resolved(model).head_dim ** -0.5,
        "rotary": [rotaries.resolved(options) for options in rotary] if positions_of(model) == "rotary" else None,
    }


def _attention(model: GPT) -> list[Attention]:
    """The layers of attention, of softmax or of its relatives."""
    kinds = [named(kind_of(model, layer)) for layer in range(model.num_layers)]
    return [kind for kind in kinds if isinstance(kind, Attention)]


def _kinds(model: GPT) -> Sequence[str]:
    """The kind of each layer, where softmax attention is "local" or "global" for whether it has the window."""

    def resolved_kind(name):
        return ("local" if named(name).is_local(model) else "global") if name in _SOFTMAX else name

    return [resolved_kind(kind_of(model, layer)) for layer in range(model.num_layers)]
