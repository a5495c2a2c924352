"""Rotary positions and windows of layers in a config.json: `rope_scaling` and `rope_parameters`, `layer_types`."""

import math
from collections.abc import Mapping, Sequence

from attnlab.interop.huggingface.options import Options
from attnlab.nn import Rotary

_FAST_TURNS = {"llama3": 4.0, "yarn": 32.0}  # where a config gives none
# What each kind of scaling has besides "rope_type", "rope_theta" and "partial_rotary_factor".
_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_slow",
        "beta_fast",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
}
_WORDS = {"sliding_attention": "local", "full_attention": "global"}


def read_rotary(config: Options, scaling: Mapping | None) -> Rotary:
    """Rotary positions by the options of a config.

    Args:
      config: where `rope_theta`, `partial_rotary_factor` and `max_position_embeddings` are.
      scaling: its `rope_scaling`, or `rope_parameters`, as files since `transformers` 5 have it, which may give the
        first two as well.

    Raises:
      UserError: a kind of scaling, or an option of it, that `Rotary` does not have.
    """
    outer = {option: config.get(option) for option in ("rope_theta", "partial_rotary_factor")}
    options = Options(scaling or {}, outer, f"{config.name}: rope_scaling")
    key = "rope_type" if options.get("rope_type") is not None else "type"  # that of older files
    kind = options.get(key) or "default"
    if kind not in _KEYS:
        raise options.error(key, f"one of {', '.join(_KEYS)}: GPT supports no other")
    known = {*_KEYS[kind], "rope_type", "type", *outer}
    if odd := [option for option in scaling or {} if option not in known and options.get(option) is not None]:
        raise options.error(odd[0], f"none: {kind!r} does not have it")
    base, fraction = options.number("rope_theta"), options.optional_number("partial_rotary_factor")
    rotary = Rotary(base, 1.0 if fraction is None else fraction)
    if kind == "default":
        return rotary
    rotary = rotary._replace(scaling=kind, factor=options.number("factor"))
    if kind == "linear":
        return rotary
    name = "original_max_position_embeddings"  # in either place, the outer one first, as in transformers
    whole = config.integer("max_position_embeddings")
    context = options.integer(name, whole) if config.get(name) is None else config.integer(name)
    slow, fast = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_slow", "beta_fast")
    fast_turns = options.optional_number(fast) or _FAST_TURNS[kind]
    return rotary._replace(
        original_context=context,
        slow_turns=options.optional_number(slow) or 1.0,
        fast_turns=None if fast_turns == _FAST_TURNS[kind] else fast_turns,
        attention_factor=_attention_factor(options),
        truncate=options.get("truncate") is None or options.flag("truncate"),
    )


def _attention_factor(options: Options) -> float | None:
    """The factor that is given, or follows from two other options; None for that of `Rotary`."""
    given, of_all, of_some = map(options.optional_number, ("attention_factor", "mscale_all_dim", "mscale"))
    if given is not None or of_all is None or of_some is None:
        return given
    log = math.log(options.number("factor"))
    return (0.1 * of_some * log + 1) / (0.1 * of_all * log + 1)


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
    """The same rotary positions with the options that their kind of scaling does not have at their defaults."""
    if rotary.scaling == "none":
        return Rotary(rotary.base, rotary.fraction)
    if rotary.scaling == "linear":
        return Rotary(rotary.base, rotary.fraction, "linear", rotary.factor)
    return rotary._replace(fast_turns=rotary.fast_turns or _FAST_TURNS[rotary.scaling])


def read_kinds(config: Options, default: Sequence[str]) -> list[str]:
    """For each layer "local" or "global", by `layer_types`, or `default` where the config has none."""
    types = config.get("layer_types")
    if types is None:
        return list(default)
    if not isinstance(types, list | tuple) or not {str(word) for word in types} <= set(_WORDS):
        raise config.error("layer_types", f"a list of {' and '.join(_WORDS)}: GPT supports no other")
    if len(types) != len(default):
        raise config.error("layer_types", f"one for each of the {len(default)} layers")
    return [_WORDS[word] for word in types]


def layer_types(kinds: Sequence[str]) -> list[str]:
    """The content of `layer_types`.

    >>> layer_types(["local", "global"])
    ['sliding_attention', 'full_attention']
    """
    names = {ours: name for name, ours in _WORDS.items()}
    return [names[kind] for kind in kinds]


def pattern(kinds: Sequence[str]) -> str:
    """The shortest words that give these kinds of layers when repeated; "" where all are of one kind.

    >>> pattern(["local", "local", "global", "local"]), pattern(["local", "local"])
    ('local local global', '')
    """
    lengths = range(1, len(kinds) + 1)
    length = next(n for n in lengths if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    return " ".join(kinds[:length]) if length > 1 else ""
