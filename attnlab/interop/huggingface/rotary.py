"""Rotary positions in a config.json: `rope_scaling`, or `rope_parameters` of transformers 5."""

import dataclasses
import math
from collections.abc import Mapping

from attnlab.interop.huggingface.config_reader import ConfigReader
from attnlab.nn import Rotary

LOCAL, GLOBAL = "sliding_attention", "full_attention"
_FAST_TURNS = {"llama3": 4.0, "yarn": 32.0}  # defaults


def option_of(hf: ConfigReader) -> str:
    """The name of the option that holds the rotary positions."""
    return "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"


def read(hf: ConfigReader, head_dim: int, *, fraction: float | None = None, inner: bool = False) -> Rotary:
    """The rotary positions of all layers.

    `fraction` is the default of partial_rotary_factor; None for a family without this option, which rotates all
    features. With `inner`, the option is read only inside the object with the rotary positions.
    """
    hf.get("original_max_position_embeddings")  # count it as read: it has no effect without scaling
    outer = {"rope_theta": hf.get("rope_theta", 10_000.0), "partial_rotary_factor": fraction}
    if not inner:
        outer["partial_rotary_factor"] = hf.get("partial_rotary_factor", fraction)
    rope = hf.within(option_of(hf), outer)
    if any(map(rope.get, (LOCAL, GLOBAL))):
        raise hf.error(option_of(hf), "one for all layers, as in all models of this family")
    rotary = _rotary(hf, rope, partial=fraction is not None)
    if int(head_dim * rotary.fraction) % 2:
        raise rope.error("partial_rotary_factor", f"a factor that rotates an even number of the {head_dim} features")
    return rotary


def is_off(hf: ConfigReader) -> bool:
    """Whether rope_theta is null, which means no positions."""
    rope, base = hf.get(option_of(hf)), hf.get("rope_theta", 10_000.0)
    return (rope.get("rope_theta", base) if isinstance(rope, Mapping) else base) is None


def read_two(hf: ConfigReader) -> tuple[Rotary, Rotary]:
    """The rotary positions of global layers and of local layers in Gemma 3."""
    both = hf.within("rope_parameters")
    if hf.get("rope_parameters") and not any(map(both.get, (GLOBAL, LOCAL))):
        raise hf.error("rope_parameters", f"an object with {GLOBAL} and {LOCAL}")
    base, local_base = hf.get("rope_theta", 1e6), hf.get("rope_local_base_freq", 10_000.0)
    global_hf, local_hf = both.within(GLOBAL, {"rope_theta": base}), both.within(LOCAL, {"rope_theta": local_base})
    if hf.get("rope_scaling"):  # in older files, for global layers only
        global_hf = hf.within("rope_scaling", {"rope_theta": base} | (both.get(GLOBAL) or {}))
    rotary, local = _rotary(hf, global_hf), _rotary(hf, local_hf)
    if local.scaling != "none":
        raise both.error(LOCAL, "no scaling in layers with a sliding window")
    return rotary, local


def _rotary(hf: ConfigReader, rope: ConfigReader, partial: bool = False) -> Rotary:
    """Rotary positions from an object; `partial` if the family has partial_rotary_factor."""
    kind, older = rope.get("rope_type"), rope.get("type")
    key, kind = ("type", older) if kind is None else ("rope_type", kind)
    kind = kind or "default"
    if kind not in ("default", "linear", *_FAST_TURNS):
        raise rope.error(key, f"one of default, linear, {', '.join(_FAST_TURNS)}: GPT supports no other")
    rotary = Rotary(rope.number("rope_theta"), _fraction(hf, rope, kind, partial))
    if kind == "default":
        return rotary
    factor = rope.number("factor")
    if factor < 1:
        raise rope.error("factor", "1 or more")
    if kind == "linear":
        return rotary if factor == 1 else dataclasses.replace(rotary, scaling=kind, factor=factor)
    name = "original_max_position_embeddings"  # in either object; the outer one wins, as in transformers
    whole = hf.integer("max_position_embeddings")
    slow, fast = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_slow", "beta_fast")
    fast_turns = rope.number_or_off(fast) or _FAST_TURNS[kind]
    scaled = dataclasses.replace(
        rotary,
        scaling=kind,
        factor=factor,
        original_context=rope.integer(name, null=whole) if hf.get(name) is None else hf.integer(name),
        slow_turns=rope.number_or_off(slow) or 1.0,
        fast_turns=None if fast_turns == _FAST_TURNS[kind] else fast_turns,
    )
    if kind == "yarn":
        truncate = rope.get("truncate") is None or rope.flag("truncate")
        scaled = dataclasses.replace(scaled, attention_factor=_attention_factor(rope), truncate=truncate)
    return rotary if factor == 1 and scaled.amplitude == 1 else scaled


def _fraction(hf: ConfigReader, rope: ConfigReader, kind: str, partial: bool) -> float:
    option = "partial_rotary_factor"
    fraction = rope.optional_number(option) or 1.0
    if partial or fraction == 1:
        return fraction
    if kind != "default":  # transformers fails here
        raise rope.error(option, f"1, as {kind!r} positions rotate all features in this family")
    for options in (hf, rope):
        options.ignore(option)
    return 1.0


def _attention_factor(rope: ConfigReader) -> float | None:
    """The factor in a config, or its value from mscale and mscale_all_dim; None for `Rotary`'s default."""
    factor = rope.optional_number("attention_factor")
    mscale, all_dim = map(rope.number_or_off, ("mscale", "mscale_all_dim"))
    if factor is not None or mscale is None or all_dim is None:
        return factor
    log = math.log(rope.number("factor"))
    return (0.1 * mscale * log + 1) / (0.1 * all_dim * log + 1)


def score_factor(hf: ConfigReader) -> float:
    """DeepSeek's factor on attention scores for scaled positions, computed from mscale_all_dim."""
    rope = hf.within(option_of(hf))
    if (rope.get("rope_type") or rope.get("type") or "default") == "default":
        return 1.0
    all_dim = rope.number_or_off("mscale_all_dim") or 0.0
    return (0.1 * all_dim * math.log(rope.number("factor")) + 1) ** 2


def write(rotary: Rotary) -> dict:
    """The options of rotary positions that all versions of `transformers` read."""
    return {"rope_theta": float(rotary.base), "rope_scaling": _scaling(resolved(rotary))}


def _scaling(rotary: Rotary) -> dict | None:
    """The content of `rope_scaling`; None for no scaling."""
    if rotary.scaling == "none":
        return None
    scaling = {"rope_type": rotary.scaling, "factor": float(rotary.factor)}
    if rotary.scaling == "linear":
        return scaling
    scaling["original_max_position_embeddings"] = rotary.original_context
    slow, fast = float(rotary.slow_turns), float(rotary.fast_turns)
    if rotary.scaling == "llama3":
        return scaling | {"low_freq_factor": slow, "high_freq_factor": fast}
    factor = {} if rotary.attention_factor is None else {"attention_factor": float(rotary.attention_factor)}
    return scaling | {"beta_slow": slow, "beta_fast": fast, "truncate": rotary.truncate, **factor}


def resolved(rotary: Rotary) -> Rotary:
    """The same rotary positions, with defaults for options that their kind of scaling ignores."""
    if rotary.scaling == "none":
        return Rotary(rotary.base, rotary.fraction)
    if rotary.scaling == "linear":
        return Rotary(rotary.base, rotary.fraction, "linear", rotary.factor)
    return dataclasses.replace(rotary, fast_turns=rotary.fast_turns or _FAST_TURNS[rotary.scaling])
