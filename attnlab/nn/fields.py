"""Which fields of a GPT fit together."""

import flax.linen as nn

from attnlab.nn.kinds import KINDS
from attnlab.nn.resolved import recurrence_of, resolved, rotary_of
from attnlab.support.options import first_problem, options

POSITIONS = ("learned", "sinusoidal", "rotary", "alibi", "none")
MAX_BIGRAMS = 4096  # ids of a model with a table of bigrams, which then has 64 MiB


def check_shape(model) -> None:
    """Raise ValueError, beginning with a field, unless the fields of a `GPT` or of `config.model` fit together."""
    if isinstance(model, nn.Module) and (problem := first_problem(options(type(model)), _values(model))):
        raise ValueError(problem)
    _check_heads(model)
    _check_pattern(model)
    width = model.width
    if model.positions == "sinusoidal" and width % 2:
        raise ValueError(f"width = {width} is odd: sinusoidal positions need an even width")
    if model.mlp_ratio and resolved(model).hidden < 1:
        raise ValueError(
            f"mlp_ratio = {model.mlp_ratio} times width = {width} rounds to {resolved(model).hidden}: "
            f"use 1/{width} or more, or 0 for no feed-forward layers"
        )
    if model.bigrams and (model.vocab_size or 0) > MAX_BIGRAMS:
        raise ValueError(
            f"bigrams = True with vocab_size = {model.vocab_size}: expected {MAX_BIGRAMS} or fewer, as the table has "
            "their square of parameters"
        )
    if model.qk_norm_joint and not model.qk_norm:
        raise ValueError("qk_norm_joint = True, but qk_norm = False: set both")


def _values(model) -> dict:
    """The options of a model and their values, by dotted name."""
    groups = {"rotary": rotary_of(model), "recurrence": recurrence_of(model)}
    grouped = {f"{name}.{field}": value for name, group in groups.items() for field, value in vars(group).items()}
    return dict(vars(model) if isinstance(model, nn.Module) else model) | grouped


def _check_heads(model) -> None:
    width, num_heads, kv_heads = model.width, model.num_heads, resolved(model).kv_heads
    if model.head_dim is None and width % num_heads:
        multiple = max(1, round(width / num_heads)) * num_heads
        raise ValueError(
            f"width = {width} is not divisible by num_heads = {num_heads}: use a multiple, e.g. {multiple}, or give "
            "head_dim"
        )
    if num_heads % kv_heads:
        raise ValueError(f"num_heads = {num_heads} is not a multiple of kv_heads = {kv_heads}: use a divisor, e.g. 1")
    head_dim = resolved(model).head_dim
    if model.positions == "rotary" and head_dim % 2:
        raise ValueError(
            f"positions = 'rotary' rotates pairs of features, but a head has {head_dim} "
            f"(width = {model.width}, num_heads = {model.num_heads}): choose an even width / num_heads, or head_dim"
        )
    if model.positions == "rotary":
        rotary_of(model).check(head_dim)


def _check_pattern(model) -> None:
    words = model.pattern.split()
    if words and model.mixer != "attention":
        raise ValueError(f"mixer = {model.mixer!r}, but pattern = {model.pattern!r}: leave one of them out")
    if unknown := [word for word in words if word not in KINDS]:
        raise ValueError(
            f"pattern = {model.pattern!r} has {unknown[0]!r}: expected the words {', '.join(KINDS)}, e.g. "
            "'local global'"
        )
    if "local" in words and model.window is None:
        raise ValueError(f"pattern = {model.pattern!r}, but window = None: give the window of its local layers")
