"""The `GPT` that a config.json describes."""

from collections.abc import Mapping

from attnlab.errors import UserError
from attnlab.interop.huggingface import rotary as rotaries
from attnlab.interop.huggingface.families import DROPOUTS, FAMILIES, Family, family_of
from attnlab.interop.huggingface.options import Options
from attnlab.nn import GPT
from attnlab.nn.gpt import check_shape

# How an option is read that sets a field as it is.
_READ = {
    "vocab_size": Options.integer,
    "width": Options.integer,
    "num_layers": Options.integer,
    "num_heads": Options.integer,
    "context": Options.integer,
    "activation": Options.activation,
    "norm_epsilon": Options.number,
    "tie_embeddings": Options.flag,
    "attention_bias": Options.flag,
    "use_bias": Options.flag,
    "soft_cap": Options.optional_number,
    "logit_cap": Options.optional_number,
}


def make_model(config: Mapping, name: str = "config") -> GPT:
    """Build the `GPT` that a config describes.

    Args:
      config: the content of `config.json`.
      name: name of the source in errors.

    Raises:
      UserError: another model than those of `FAMILIES`; an option is malformed, or has a value that `GPT` does not
        support.

    >>> make_model({"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 128}).width
    64
    """
    family = FAMILIES[family_of(config, name)]
    options = Options(config, family.defaults, name)
    options.only(family.only)
    fields = dict(family.fields)
    for option, field in family.options.items():
        fields[field] = _READ[field](options, option)
    if fields.get("attention_bias") == fields["use_bias"]:
        fields["attention_bias"] = None
    fields |= _read_gpt2(options, fields) if "n_embd" in family.options else _read_decoder(options, fields, family)
    model = GPT(**fields)
    try:
        check_shape(model)
    except ValueError as error:
        raise UserError(f"{name}: the options in its config do not fit together: {error}") from error
    return model


def _read_gpt2(options: Options, fields: Mapping) -> dict:
    rates = [options.get(option) for option in DROPOUTS]
    for option, rate in zip(DROPOUTS, rates):
        if not isinstance(rate, int | float) or not 0 <= rate < 1:
            raise options.error(option, "a probability in [0, 1)")
    return {
        "mlp_ratio": _ratio(options.integer("n_inner", 4 * fields["width"]), fields["width"]),
        "dropout": float(rates[0]) if rates.count(rates[0]) == len(rates) else 0.0,
    }


def _read_decoder(options: Options, fields: Mapping, family: Family) -> dict:
    width, heads = fields["width"], fields["num_heads"]
    if family.divides and width % heads:
        raise options.error("num_attention_heads", f"a divisor of hidden_size = {width}")
    kv_heads = options.integer("num_key_value_heads", heads)
    head_dim = options.integer("head_dim", max(1, width // heads))
    read = {
        "kv_heads": None if kv_heads == heads else kv_heads,
        "head_dim": None if head_dim * heads == width else head_dim,
        "mlp_ratio": _ratio(options.integer("intermediate_size"), width),
    }
    if "query_pre_attn_scalar" in family.defaults:
        scalar = options.number("query_pre_attn_scalar")
        read["score_scale"] = None if scalar == head_dim else scalar**-0.5
        read["embedding_scale"] = width**0.5
    kinds = _read_kinds(options, family, fields["num_layers"])
    if "local" in kinds:
        read |= {"window": options.integer("sliding_window"), "pattern": rotaries.pattern(kinds)}
    return read | _read_rotary(options, family)


def _ratio(hidden: int, width: int) -> int | float:
    return hidden // width if hidden % width == 0 else hidden / width


def _read_kinds(options: Options, family: Family, layers: int) -> list[str]:
    """Which layers are "local" and which "global"."""
    if "sliding_window_pattern" in family.defaults:
        period = options.integer("sliding_window_pattern")
        kinds = ["local" if n % period else "global" for n in range(1, layers + 1)]
    elif "use_sliding_window" in family.defaults:
        uses = options.flag("use_sliding_window") and options.get("sliding_window") is not None
        first = options.integer("max_window_layers") if options.get("max_window_layers") else 0
        kinds = ["local" if uses and n >= first else "global" for n in range(layers)]
        if not uses:
            return kinds
    else:
        kinds = ["global" if options.get("sliding_window") is None else "local"] * layers
    given = rotaries.read_kinds(options, kinds)
    if given != kinds and "layer_types" not in family.defaults:
        raise options.error("layer_types", f"none: {family.architecture} does not have it")
    return given


def _read_rotary(options: Options, family: Family) -> dict:
    option = "rope_scaling" if options.get("rope_scaling") else "rope_parameters"  # that of transformers 5
    scaling, local = options.get(option), None
    if isinstance(scaling, Mapping) and ("full_attention" in scaling or "sliding_attention" in scaling):
        scaling, local = scaling.get("full_attention"), scaling.get("sliding_attention")
    if not all(isinstance(value, Mapping | None) for value in (scaling, local)):
        raise options.error(option, "an object, or null")
    rotary = rotaries.read_rotary(options, scaling)
    if rotary.scaling != "none" and not family.scales_rotary:
        raise options.error("rope_scaling", f"none: {family.architecture} has its own, which GPT does not support")
    if rotary.fraction != 1 and "partial_rotary_factor" not in family.defaults:
        raise options.error("partial_rotary_factor", f"1: {family.architecture} has no other")
    if "rope_local_base_freq" not in family.defaults:
        return {"rotary": rotary}
    base = {"rope_theta": options.number("rope_local_base_freq")}
    of_local = rotaries.read_rotary(Options(base, {}, options.name), local)
    if of_local.scaling != "none" or of_local.fraction != rotary.fraction:
        raise options.error("rope_parameters", "no scaling in layers with a sliding window")
    return {"rotary": rotary, "local_base": of_local.base}
