"""Which fields of a GPT fit together."""

from collections.abc import Mapping
from dataclasses import MISSING

import flax.linen as nn

from attnlab.nn import own
from attnlab.nn.groups import GROUPS, group
from attnlab.nn.kinds import KINDS, Attention, kinds_of, positions_of
from attnlab.nn.resolved import resolved
from attnlab.support.options import Option, first_problem

POSITIONS = ("auto", "learned", "sinusoidal", "rotary", "alibi", "none")
MAX_BIGRAMS = 4096  # ids of a model with a table of bigrams, which then has 64 MiB


def check_shape(model, declared: Mapping[str, Option]) -> None:
    """Raise ValueError, beginning with a field, unless the fields of a `GPT` or of `config.model` fit together.

    `declared` are the options of a `GPT`.
    """
    if isinstance(model, nn.Module) and (problem := first_problem(declared, _values(model))):
        raise ValueError(problem)
    _check_pattern(model)
    _check_read(model, declared)
    _check_rotary(model, declared)
    _check_heads(model)
    for name, kind in kinds_of(model).items():
        kind.check(model, name)
    width = model.width
    if model.positions == "sinusoidal" and width % 2:
        raise ValueError(f"width = {width} is odd: sinusoidal positions need an even width")
    if model.mlp_ratio and resolved(model).hidden < 1:
        raise ValueError(
            f"mlp_ratio = {model.mlp_ratio} times width = {width} rounds to {resolved(model).hidden}: "
            f"use 1/{width} or more, or 0 for no feed-forward layers"
        )
    if not model.mlp_ratio:
        for name in ("mlp", "activation"):
            if not declared[name].is_default(value := getattr(model, name)):
                raise ValueError(f"{name} = {value!r}, but mlp_ratio = 0, so there are no feed-forward layers")
    if model.bigrams and (model.vocab_size or 0) > MAX_BIGRAMS:
        raise ValueError(
            f"bigrams = True with vocab_size = {model.vocab_size}: expected {MAX_BIGRAMS} or fewer, as the table has "
            "their square of parameters"
        )
    rows = _values(model).get("padded_vocab_size")
    if rows is not None and rows < model.vocab_size:
        raise ValueError(f"padded_vocab_size = {rows}: expected vocab_size = {model.vocab_size} or more")
    if model.qk_norm_joint and not model.qk_norm:
        raise ValueError("qk_norm_joint = True, but qk_norm = False: set both")


def _values(model) -> dict:
    """The options of a model and their values, by dotted name."""
    grouped = {f"{name}.{field}": value for name in GROUPS for field, value in vars(group(model, name)).items()}
    return dict(vars(model) if isinstance(model, nn.Module) else model) | grouped


def _check_read(model, declared) -> None:
    """Raise ValueError for an option of layers that is set, and that no layer reads, or not each layer where it must.

    A required field of a `GPT` cannot be left out, so it may be idle.
    """
    kinds, values = kinds_of(model), _values(model)
    read = frozenset().union(*(kind.reads for kind in kinds.values()))
    of_layers = frozenset({"recurrence"}).union(*(kind.reads for kind in KINDS.values()))
    remedy = f"leave it out, or choose others than {', '.join(kinds)}"
    for name, each in declared.items():
        names, required = {name, name.partition(".")[0]}, isinstance(model, nn.Module) and each.unset is MISSING
        if names & of_layers and not names & read and not required and not each.is_default(values[name]):
            raise ValueError(f"{name} = {values[name]!r}, but no layer reads it: {remedy}")
    if model.positions in ("rotary", "alibi") and model.positions not in read:
        raise ValueError(f"positions = {model.positions!r}, but no layer reads them: {remedy}")
    of_all = {"value_residual": model.value_residual, "mask": values.get("mask"), "score_mod": values.get("score_mod")}
    for name, value in of_all.items():
        others = [kind for kind in kinds if name not in kinds[kind].reads]
        if others and value is not None and value is not False:
            shown = value if value is True else type(value).__name__
            raise ValueError(f"{name} = {shown}, but layers of {others[0]} do not read it: {remedy}")


def _check_rotary(model, declared) -> None:
    """Raise ValueError for options of rotary positions that are set, where layers of attention have no such."""
    kinds, values = kinds_of(model).values(), _values(model)
    if positions_of(model) != "rotary":
        for name in declared:
            if name.startswith(("rotary.", "local_base")) and not declared[name].is_default(values[name]):
                raise ValueError(f"{name} = {values[name]!r}, but positions = {model.positions!r}: choose rotary")
    if model.local_base is not None and not any(isinstance(kind, Attention) and kind.is_local(model) for kind in kinds):
        raise ValueError(f"local_base = {model.local_base}, but window = None: set the window of local layers")
    if model.local_base is not None and not model.pattern:
        raise ValueError(f"local_base = {model.local_base}, but all layers are local: set rotary.base in its place")


def _check_heads(model) -> None:
    if not any("head_dim" in kind.reads for kind in kinds_of(model).values()):
        return
    width, num_heads, kv_heads = model.width, model.num_heads, resolved(model).kv_heads
    if model.head_dim is None and width % num_heads:
        multiple = max(1, round(width / num_heads)) * num_heads
        raise ValueError(
            f"width = {width} is not divisible by num_heads = {num_heads}: use a multiple, e.g. {multiple}, or give "
            "head_dim"
        )
    if num_heads % kv_heads:
        raise ValueError(f"num_heads = {num_heads} is not a multiple of kv_heads = {kv_heads}: use a divisor, e.g. 1")
    if positions_of(model) == "rotary":
        group(model, "rotary").check(resolved(model).head_dim)


def _check_pattern(model) -> None:
    words = model.pattern.split()
    if words and model.mixer != "attention":
        raise ValueError(f"mixer = {model.mixer!r}, but pattern = {model.pattern!r}: leave one of them out")
    if unknown := [word for word in words if word not in KINDS and not own.WORD.fullmatch(word)]:
        raise ValueError(
            f"pattern = {model.pattern!r} has {unknown[0]!r}: expected the words {', '.join(KINDS)}, or FILE.py:NAME, "
            "e.g. 'local global'"
        )
    if "local" in words and model.window is None:
        raise ValueError(f"pattern = {model.pattern!r}, but window = None: give the window of its local layers")
