"""The fields of a GPT: which of them fit together, and what they say about each layer."""

from typing import NamedTuple

import flax.linen as nn

from attnlab.nn.rotations import Rotary
from attnlab.ops.masks import Causal, Mask, SlidingWindow, join
from attnlab.ops.score_mods import ALiBi, ScoreMod, SoftCap, alibi_slopes
from attnlab.support.options import first_problem, options

POSITIONS = ("learned", "sinusoidal", "rotary", "alibi", "none")
KINDS = ("local", "global")  # of layers, the words of `pattern`

MAX_BIGRAMS = 4096  # ids of a model with a table of bigrams, which then has 64 MiB


def check_shape(model) -> None:
    """Check the fields of a model, and the constraints between them.

    Args:
      model: a `GPT`, or `config.model`, whose values `attnlab.config` has checked one by one.

    Raises:
      ValueError: the model cannot be built; the message begins with the name of a field.
    """
    if isinstance(model, nn.Module) and (problem := first_problem(options(type(model)), vars(model) | _nested(model))):
        raise ValueError(problem)
    _check_heads(model)
    _check_positions(model)
    _check_layers(model)
    width = model.width
    if model.mlp_ratio and round(model.mlp_ratio * width) < 1:
        raise ValueError(
            f"mlp_ratio = {model.mlp_ratio} times width = {width} rounds to {round(model.mlp_ratio * width)}: "
            f"use 1/{width} or more, or 0 for no feed-forward layers"
        )
    if model.bigrams and (model.vocab_size or 0) > MAX_BIGRAMS:
        raise ValueError(
            f"bigrams = True with vocab_size = {model.vocab_size}: expected {MAX_BIGRAMS} or fewer, as the table has "
            "their square of parameters"
        )
    if model.qk_norm_joint and not model.qk_norm:
        raise ValueError("qk_norm_joint = True, but qk_norm = False: set both")


class Resolved(NamedTuple):
    """What a model's optional fields stand for: features and key heads of a head, hidden features, biases."""

    head_dim: int
    kv_heads: int
    hidden: int
    attention_bias: bool
    qkv_bias: bool


def resolved(model) -> Resolved:
    """The values of the fields that may be None, and the width of the feed-forward layer."""
    attention_bias = model.use_bias if model.attention_bias is None else model.attention_bias
    return Resolved(
        head_dim=model.head_dim or model.width // model.num_heads,
        kv_heads=model.kv_heads or model.num_heads,
        hidden=round(model.mlp_ratio * model.width),
        attention_bias=attention_bias,
        qkv_bias=attention_bias if model.qkv_bias is None else model.qkv_bias,
    )


def head_dim(model) -> int:
    """D, the features of a head."""
    return resolved(model).head_dim


def kinds(model) -> tuple[str, ...]:
    """Which layers are "local", within `window`, and which "global", for one period of `pattern`."""
    return tuple(model.pattern.split()) or ("global" if model.window is None else "local",)


def kind(model, layer: int) -> str:
    """The kind of a layer, "local" or "global"."""
    period = kinds(model)
    return period[layer % len(period)]


def mask(model, layer: int) -> Mask:
    """The mask of a layer: causal or a window, and-ed with the model's field."""
    own = SlidingWindow(left=model.window - 1) if kind(model, layer) == "local" else Causal()
    return join(own, model.mask)


def rotary(model, layer: int) -> Rotary | None:
    """The rotary positions of a layer; None where the model has others."""
    if model.positions != "rotary":
        return None
    if model.local_base is not None and kind(model, layer) == "local":
        return Rotary(model.local_base, model.rotary.fraction)
    return model.rotary


def score_mods(model) -> tuple[ScoreMod, ...]:
    """The score mods of a GPT's attention, by its fields `soft_cap`, `positions` and `num_heads`."""
    cap = () if model.soft_cap is None else (SoftCap(model.soft_cap),)
    return (*cap, ALiBi(alibi_slopes(model.num_heads))) if model.positions == "alibi" else cap


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


def _check_positions(model) -> None:
    if model.positions == "rotary" and head_dim(model) % 2:
        raise ValueError(
            f"positions = 'rotary' rotates pairs of features, but a head has {head_dim(model)} "
            f"(width = {model.width}, num_heads = {model.num_heads}): choose an even width / num_heads, or head_dim"
        )
    if model.positions == "rotary":
        as_rotary(model.rotary).check(head_dim(model))
    if model.positions == "sinusoidal" and model.width % 2:
        raise ValueError(f"width = {model.width} is odd: sinusoidal positions need an even width")


def _check_layers(model) -> None:
    words = model.pattern.split()
    if unknown := [word for word in words if word not in KINDS]:
        raise ValueError(
            f"pattern = {model.pattern!r} has {unknown[0]!r}: expected the words local and global, e.g. 'local global'"
        )
    if "local" in words and model.window is None:
        raise ValueError(f"pattern = {model.pattern!r}, but window = None: give the window of its local layers")


def as_rotary(group) -> Rotary:
    """Rotary options as a `Rotary`, also from a mapping, such as `config.model.rotary`."""
    return group if isinstance(group, Rotary) else Rotary(**dict(group))


def _nested(model) -> dict:
    return {f"rotary.{name}": value for name, value in vars(as_rotary(model.rotary)).items()}
