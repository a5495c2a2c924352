"""Rotary positions and windows of layers in a config.json: `rope_scaling` and `rope_parameters`, `layer_types`."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from attnlab.interop.huggingface.config_reader import ConfigReader
from attnlab.nn import Rotary

_FAST_TURNS = {"llama3": 4.0, "yarn": 32.0}  # defaults
KINDS = {"sliding_attention": "local", "full_attention": "global"}


def read_rotary(config: ConfigReader, rope: ConfigReader, partial: bool = False) -> Rotary:
    """Rotary positions from `rope_scaling` or `rope_parameters`; `partial` if the family has partial_rotary_factor."""
    kind, older = rope.get("rope_type"), rope.get("type")
    key, kind = ("type", older) if kind is None else ("rope_type", kind)
    kind = kind or "default"
    if kind not in ("default", "linear", *_FAST_TURNS):
        raise rope.error(key, f"one of default, linear, {', '.join(_FAST_TURNS)}: GPT supports no other")
    rotary = Rotary(rope.number("rope_theta"), _fraction(config, rope, kind, partial))
    if kind == "default":
        return rotary
    rotary = dataclasses.replace(rotary, scaling=kind, factor=rope.number("factor"))
    if rotary.factor < 1:
        raise rope.error("factor", "1 or more")
    if kind == "linear":
        return rotary
    name = "original_max_position_embeddings"  # in either place, the outer one first, as in transformers
    whole = config.integer("max_position_embeddings")
    context = rope.integer(name, whole) if config.get(name) is None else config.integer(name)
    slow, fast = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_slow", "beta_fast")
    fast_turns = rope.number_or_off(fast) or _FAST_TURNS[kind]
    rotary = dataclasses.replace(
        rotary,
        original_context=context,
        slow_turns=rope.number_or_off(slow) or 1.0,
        fast_turns=None if fast_turns == _FAST_TURNS[kind] else fast_turns,
    )
    if kind == "llama3":
        return rotary
    truncate = rope.get("truncate") is None or rope.flag("truncate")
    return dataclasses.replace(rotary, attention_factor=_attention_factor(rope), truncate=truncate)


def _fraction(config: ConfigReader, rope: ConfigReader, kind: str, partial: bool) -> float:
    option = "partial_rotary_factor"
    fraction = rope.optional_number(option) or 1.0
    if partial or fraction == 1:
        return fraction
    if kind != "default":  # where transformers fails
        raise rope.error(option, f"1, as positions of kind {kind!r} rotate all features of this family")
    for options in (config, rope):
        options.ignore(option)
    return 1.0


def _attention_factor(rope: ConfigReader) -> float | None:
    """The factor in a config, or from mscale and mscale_all_dim; None for `Rotary`'s default."""
    factor = rope.optional_number("attention_factor")
    mscale, all_dim = map(rope.number_or_off, ("mscale", "mscale_all_dim"))
    if factor is not None or mscale is None or all_dim is None:
        return factor
    log = math.log(rope.number("factor"))
    return (0.1 * mscale * log + 1) / (0.1 * all_dim * log + 1)


def score_factor(rope: ConfigReader) -> float:
    """The factor of DeepSeek's scores with scaled positions, which mscale_all_dim sets."""
    if (rope.get("rope_type") or rope.get("type") or "default") == "default":
        return 1.0
    all_dim = rope.number_or_off("mscale_all_dim") or 0.0
    return (0.1 * all_dim * math.log(rope.number("factor")) + 1) ** 2


def write_rotary(rotary: Rotary) -> dict | None:
    """The content of `rope_scaling`, which all versions of `transformers` read; None for no scaling."""
    if rotary.scaling == "none":
        return None
    scaling = {"rope_type": rotary.scaling, "factor": float(rotary.factor)}
    if rotary.scaling == "linear":
        return scaling
    scaling["original_max_position_embeddings"] = rotary.original_context
    fast_turns = rotary.fast_turns or _FAST_TURNS[rotary.scaling]
    if rotary.scaling == "llama3":
        return scaling | {"low_freq_factor": float(rotary.slow_turns), "high_freq_factor": float(fast_turns)}
    scaling |= {"beta_slow": float(rotary.slow_turns), "beta_fast": float(fast_turns), "truncate": rotary.truncate}
    factor = rotary.attention_factor
    return scaling | ({} if factor is None else {"attention_factor": float(factor)})


def resolved(rotary: Rotary) -> Rotary:
    """The same rotary positions, with defaults for options that their kind of scaling ignores."""
    if rotary.scaling == "none":
        return Rotary(rotary.base, rotary.fraction)
    if rotary.scaling == "linear":
        return Rotary(rotary.base, rotary.fraction, "linear", rotary.factor)
    return dataclasses.replace(rotary, fast_turns=rotary.fast_turns or _FAST_TURNS[rotary.scaling])


def read_kinds(config: ConfigReader, default: Sequence[str], names: Mapping[str, str] = KINDS) -> list[str]:
    """The kind of each layer by `layer_types`, whose words `names` translates, or `default` without it."""
    types = config.get("layer_types")
    if types is None:
        return list(default)
    if not isinstance(types, list | tuple) or not {str(word) for word in types} <= set(names):
        raise config.error("layer_types", f"a list of {' and '.join(names)}: GPT supports no other")
    if len(types) != len(default):
        raise config.error("layer_types", f"one for each of the {len(default)} layers")
    return [names[word] for word in types]


def layer_types(kinds: Sequence[str], names: Mapping[str, str] = KINDS) -> list[str]:
    """The inverse of `read_kinds`; a kind without a word stays as it is."""
    words = {ours: name for name, ours in names.items()}
    return [words.get(kind, kind) for kind in kinds]


def pattern(kinds: Sequence[str]) -> str:
    """The shortest words that repeat to these kinds of layers; "" if all are of one kind."""
    lengths = range(1, len(kinds) + 1)
    length = next(n for n in lengths if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    return " ".join(kinds[:length]) if length > 1 else ""
