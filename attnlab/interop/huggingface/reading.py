"""The `GPT` that a config.json describes."""

import warnings
from collections.abc import Mapping
from dataclasses import MISSING

from attnlab.interop.huggingface import recurrent
from attnlab.interop.huggingface import rotary as rotaries
from attnlab.interop.huggingface.config_reader import ConfigReader
from attnlab.interop.huggingface.families import ALL_DROPOUTS, DROPOUTS, FAMILIES, Family, family_of
from attnlab.nn import GPT, Latent
from attnlab.nn.fields import check_shape
from attnlab.nn.kinds import KINDS, kinds_of
from attnlab.support.errors import UserError
from attnlab.support.options import options as options_of

# The reader of each option that sets a field directly.
_READ = {
    "vocab_size": ConfigReader.integer,
    "width": ConfigReader.integer,
    "num_layers": ConfigReader.integer,
    "num_heads": ConfigReader.integer,
    "context": ConfigReader.integer,
    "activation": ConfigReader.activation,
    "norm_epsilon": ConfigReader.number,
    "tie_embeddings": ConfigReader.flag,
    "attention_bias": ConfigReader.flag,
    "use_bias": ConfigReader.flag,
    "soft_cap": ConfigReader.optional_number,
    "logit_cap": ConfigReader.optional_number,
}
# How many heads a model has that predict later tokens, in the words of several families.
_EXTRA_HEADS = ("num_nextn_predict_layers", "num_mtp_layers")


def make_model(config: Mapping, name: str = "config") -> GPT:
    """Build the `GPT` that a config describes; `name` is the source in errors and warnings."""
    family = FAMILIES[family_of(config, name)]
    options = ConfigReader(config, family.defaults, name)
    for option in family.silent.split():
        options.get(option)
    extra_heads = {} if family.extra_heads else dict.fromkeys(_EXTRA_HEADS, 0)
    options.only({"is_causal": True, **extra_heads, **family.only})
    fields, declared = dict(family.fields), options_of(GPT)
    for option, field in family.options.items():
        fields[field] = _READ[field](options, option)
        # At once, because patterns are as long as the layers are many.
        if problem := field in declared and declared[field].problem(fields[field]):
            raise options.error(option, problem.removeprefix("expected "))
    if fields.get("attention_bias") == fields["use_bias"]:
        fields["attention_bias"] = None
    if (counts := options.counts_of_experts()) and not family.is_dense(options, fields["num_layers"]):
        raise options.error(counts[0], "0: a mixture of experts is not supported")
    fields |= _read_gpt2(options, fields) if "n_embd" in family.options else {}
    fields |= _read_decoder(options, fields, family) if "num_attention_heads" in family.options else {}
    fields |= _read_recurrent(options, fields, family) if family.recurrent else {}
    model = _without_idle(GPT(**fields))
    try:
        check_shape(model, declared)
    except ValueError as error:
        raise UserError(f"{name}: the options in its config do not fit together: {error}") from error
    _warn(options, family, model)
    return model


def _without_idle(model: GPT) -> GPT:
    """The model without options of layers that it does not have, as of attention if all layers are recurrent."""
    read, of_all = (frozenset().union(*(kind.reads for kind in kinds.values())) for kinds in (kinds_of(model), KINDS))
    read, of_all = ({name.partition(".")[0] for name in names} for names in (read, of_all))
    declared = {name: field for name, field in GPT.__dataclass_fields__.items() if name in of_all - read}
    idle = {name: field.default for name, field in declared.items() if field.default is not MISSING}
    if model.positions == "rotary" and "rotary" in idle:
        idle["positions"] = "none"
    return model.clone(**idle)


def _warn(options: ConfigReader, family: Family, model: GPT) -> None:
    """One line on ignored options, another on dropout rates."""
    rates = {option: options.get(option) for option in ALL_DROPOUTS if options.get(option)}
    if rates and not model.dropout:
        listed = ", ".join(f"{option} = {rate}" for option, rate in rates.items())
        warnings.warn(f"{options.name}: dropout in its config is not used ({listed}): set dropout", stacklevel=4)
    if unread := options.unread():
        ignored = f"{', '.join(unread)} in its config {'is' if len(unread) == 1 else 'are'} ignored"
        warnings.warn(f"{options.name}: {ignored}, as by transformers' {family.architecture}", stacklevel=4)


def _read_gpt2(options: ConfigReader, fields: Mapping) -> dict:
    rates = [options.get(option) for option in DROPOUTS]
    for option, rate in zip(DROPOUTS, rates):
        if not isinstance(rate, int | float) or not 0 <= rate < 1:
            raise options.error(option, "a probability in [0, 1)")
    return {
        "mlp_ratio": _ratio(options.integer("n_inner", 4 * fields["width"]), fields["width"]),
        "dropout": float(rates[0]) if rates.count(rates[0]) == len(rates) else 0.0,
        "score_scale": None if options.flag("scale_attn_weights") else 1.0,
    }


def _read_decoder(options: ConfigReader, fields: Mapping, family: Family) -> dict:
    if fields.get("mixer") == "latent":
        return _read_latent(options, fields, family)
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
    return read | _read_rotary(options, family, head_dim, kinds)


def _read_latent(options: ConfigReader, fields: Mapping, family: Family) -> dict:
    heads, rotated = fields["num_heads"], options.integer("qk_rope_head_dim")
    if rotated % 2:
        raise options.error("qk_rope_head_dim", "an even number, as pairs of features are rotated")
    if heads // options.integer("num_key_value_heads", heads) != 1:
        raise options.error("num_key_value_heads", f"num_attention_heads = {heads}: all heads share one latent")
    if options.integer("head_dim", rotated) != rotated:
        raise options.error("head_dim", f"qk_rope_head_dim = {rotated}, whose place it takes")
    latent = Latent(
        options.integer("kv_lora_rank"),
        None if options.get("q_lora_rank") is None else options.integer("q_lora_rank"),
        options.integer("qk_nope_head_dim"),
        rotated,
        options.integer("v_head_dim"),
    )
    scale = (latent.nope_dim + rotated) ** -0.5
    kinds = ["global"] * fields["num_layers"]
    return {
        "latent": latent,
        "mlp_ratio": _ratio(options.integer("intermediate_size"), fields["width"]),
        **_read_rotary(options, family, rotated, kinds, scale),
    }


def is_interleaved(config: Mapping) -> bool:
    """Whether the weights that a config describes are for rotary positions that rotate pairs of neighbours."""
    defaults = FAMILIES[family_of(config, "config")].defaults
    return bool({**defaults, **config}["rope_interleave"]) if "rope_interleave" in defaults else False


def _read_recurrent(options: ConfigReader, fields: Mapping, family: Family) -> dict:
    """Which layers are recurrent, and their sizes."""
    kinds = recurrent.layers(options, family.recurrent, fields["num_layers"])
    if set(kinds) == {"attention"}:
        return {}
    sizes = {"width": fields["width"], "num_heads": fields["num_heads"], "epsilon": fields["norm_epsilon"]}
    read = {"recurrence": recurrent.read(options, family.recurrent, **sizes)}
    return read | ({"pattern": rotaries.pattern(kinds)} if len(set(kinds)) > 1 else {"mixer": kinds[0]})


def _ratio(hidden: int, width: int) -> int | float:
    return hidden // width if hidden % width == 0 else hidden / width


def _read_kinds(options: ConfigReader, family: Family, layers: int) -> list[str]:
    """The kind of each layer, "local" or "global"."""
    has_window = "sliding_window" in family.defaults and options.get("sliding_window") is not None
    if "layer_types" not in family.defaults or family.recurrent:
        return ["local" if has_window else "global"] * layers
    if "use_sliding_window" in family.defaults:
        has_window &= options.flag("use_sliding_window")
        first = options.integer("max_window_layers") if options.get("max_window_layers") else 0
        kinds = ["local" if has_window and n >= first else "global" for n in range(layers)]
    else:
        period = options.integer("sliding_window_pattern") if "sliding_window_pattern" in family.defaults else 2
        kinds = ["local" if n % period else "global" for n in range(1, layers + 1)]
    kinds = rotaries.read_kinds(options, kinds)
    if "local" in kinds and options.get("use_sliding_window") is False:
        raise options.error("use_sliding_window", "true, as layer_types has sliding_attention")
    return kinds


def _read_rotary(
    options: ConfigReader, family: Family, head_dim: int, kinds: list[str], scale: float | None = None
) -> dict:
    """Rotary positions, and with the `scale` of scores by default, their scale where these options change it."""
    if "rope_local_base_freq" in family.defaults:
        return _read_two_rotaries(options, kinds)
    options.get("original_max_position_embeddings")  # no effect without scaling
    option = "rope_scaling" if options.get("rope_scaling") else "rope_parameters"  # of transformers 5
    outer = {name: options.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    if family.inner_fraction:
        options.ignore("partial_rotary_factor")
        outer["partial_rotary_factor"] = family.defaults["partial_rotary_factor"]
    rope = options.within(option, outer)
    if family.rotary_optional and rope.get("rope_theta") is None:
        rope.get("rope_type")
        return {"positions": "none"}
    if any(rope.get(kind) for kind in rotaries.KINDS):
        raise options.error(option, f"one for all layers: {family.architecture} has no others")
    partial = "partial_rotary_factor" in family.defaults
    rotary = rotaries.read_rotary(options, rope, partial)
    if rotary.scaling != "none" and not family.scales_rotary:
        raise options.error(option, f"no scaling: {family.architecture} has its own, which GPT does not support")
    if int(head_dim * rotary.fraction) % 2:
        raise rope.error("partial_rotary_factor", f"a factor by which an even number of {head_dim} features is rotated")
    factor = 1.0 if scale is None else rotaries.score_factor(rope)
    return {"rotary": rotary} | ({} if factor == 1 else {"score_scale": scale * factor})


def _read_two_rotaries(options: ConfigReader, kinds: list[str]) -> dict:
    """Rotary positions of Gemma 3, whose global and local layers differ."""
    both = options.within("rope_parameters", {})
    if options.get("rope_parameters") and not any(map(both.get, rotaries.KINDS)):
        raise options.error("rope_parameters", f"an object with {' and '.join(rotaries.KINDS)}")
    bases = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
    outer = {kind: {"rope_theta": options.get(base)} for kind, base in bases.items()}
    ropes = {kind: both.within(kind, base) for kind, base in outer.items()}
    if options.get("rope_scaling"):  # in older files, for global layers only
        older = outer["full_attention"] | (both.get("full_attention") or {})
        ropes["full_attention"] = options.within("rope_scaling", older)
    rotary, local = (rotaries.read_rotary(options, rope) for rope in ropes.values())
    if local.scaling != "none":
        raise both.error("sliding_attention", "no scaling in layers with a sliding window")
    if set(kinds) == {"local"}:
        return {"rotary": local}
    return {"rotary": rotary} | ({"local_base": local.base} if "local" in kinds else {})
