"""The fields of a GPT: which of them fit together, and what they say about each layer."""

from attnlab.nn import layers
from attnlab.nn.block import NORM_AT
from attnlab.nn.mlp import ACTIVATIONS, MLPS
from attnlab.nn.norms import NORMS
from attnlab.nn.rotations import Rotary
from attnlab.ops.masks import Causal, Mask, SlidingWindow, join
from attnlab.ops.score_mods import ALiBi, ScoreMod, SoftCap, alibi_slopes

POSITIONS = ("learned", "sinusoidal", "rotary", "alibi", "none")
KINDS = ("local", "global")  # of layers, the words of `pattern`

MAX_BIGRAMS = 4096  # ids of a model with a table of bigrams, which then has 64 MiB

_CHOICES = {
    "positions": POSITIONS,
    "norm": NORMS,
    "norm_at": NORM_AT,
    "mlp": MLPS,
    "activation": tuple(ACTIVATIONS),
    "remat": layers.REMAT,
}


def check_shape(model) -> None:
    """Check the constraints between the fields of a model.

    Args:
      model: a `GPT`, or any object with its fields, e.g. `config.model`.

    Raises:
      ValueError: the model cannot be built; the message begins with the name of a field.

    >>> from attnlab.nn import GPT
    >>> check_shape(GPT(vocab_size=10, num_layers=2, num_heads=3, width=8, context=6))
    Traceback (most recent call last):
    ValueError: width = 8 is not divisible by num_heads = 3: use a multiple, e.g. 9, or give head_dim
    """
    for field in ("num_layers", "num_heads", "kv_heads", "head_dim", "width", "context"):
        size = getattr(model, field)
        if size is not None and size < 1:
            raise ValueError(f"{field} = {size}: expected 1 or more")
    for field, choices in _CHOICES.items():
        if getattr(model, field) not in choices:
            raise ValueError(f"{field} = {getattr(model, field)!r}: expected one of {', '.join(choices)}")
    _check_heads(model)
    _check_positions(model)
    _check_layers(model)
    width = model.width
    if model.mlp_ratio < 0 or (model.mlp_ratio and round(model.mlp_ratio * width) < 1):
        raise ValueError(
            f"mlp_ratio = {model.mlp_ratio} times width = {width} rounds to {round(model.mlp_ratio * width)}: "
            f"use 1/{width} or more, or 0 for no feed-forward layers"
        )
    for field in ("soft_cap", "logit_cap"):
        cap = getattr(model, field)
        if cap is not None and not cap > 0:
            raise ValueError(f"{field} = {cap}: expected a number of logits above 0, or None")
    if model.bigrams and (model.vocab_size or 0) > MAX_BIGRAMS:
        raise ValueError(
            f"bigrams = True with vocab_size = {model.vocab_size}: expected {MAX_BIGRAMS} or fewer, as the table has "
            "their square of parameters"
        )
    if model.qk_norm_joint and not model.qk_norm:
        raise ValueError("qk_norm_joint = True, but qk_norm = False: set both")


def head_dim(model) -> int:
    """D, the features of a head: the field, or else width / num_heads.

    >>> from attnlab.nn import GPT
    >>> head_dim(GPT(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6))
    4
    """
    return model.head_dim or model.width // model.num_heads


def kinds(model) -> tuple[str, ...]:
    """Which layers are "local", within `window`, and which "global", for one period of `pattern`.

    >>> from attnlab.nn import GPT
    >>> kinds(GPT(vocab_size=10, num_layers=5, num_heads=2, width=8, context=6, window=3, pattern="local global"))
    ('local', 'global')
    """
    return tuple(model.pattern.split()) or ("global" if model.window is None else "local",)


def kind(model, layer: int) -> str:
    """The kind of a layer, "local" or "global"."""
    period = kinds(model)
    return period[layer % len(period)]


def mask(model, layer: int) -> Mask:
    """The mask of a layer: causal or a window, and-ed with the model's field.

    >>> from attnlab.nn import GPT
    >>> mask(GPT(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6, window=3), 0)
    SlidingWindow(left=2, right=0)
    """
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
    """The score mods of a GPT's attention, by its fields `soft_cap`, `positions` and `num_heads`.

    >>> from attnlab.nn import GPT
    >>> score_mods(GPT(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6, soft_cap=50.0))
    (SoftCap(cap=50.0),)
    """
    cap = () if model.soft_cap is None else (SoftCap(model.soft_cap),)
    return (*cap, ALiBi(alibi_slopes(model.num_heads))) if model.positions == "alibi" else cap


def _check_heads(model) -> None:
    width, num_heads, kv_heads = model.width, model.num_heads, model.kv_heads or model.num_heads
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
    if model.local_base is not None and not model.local_base > 0:
        raise ValueError(f"local_base = {model.local_base}: expected a number above 0, or None for that of rotary")


def _check_layers(model) -> None:
    if model.window is not None and model.window < 1:
        raise ValueError(f"window = {model.window}: expected 1 position or more (a token attends to itself), or None")
    words = model.pattern.split()
    if unknown := [word for word in words if word not in KINDS]:
        raise ValueError(
            f"pattern = {model.pattern!r} has {unknown[0]!r}: expected the words local and global, e.g. 'local global'"
        )
    if "local" in words and model.window is None:
        raise ValueError(f"pattern = {model.pattern!r}, but window = None: give the window of its local layers")


def as_rotary(options) -> Rotary:
    """Rotary options as a `Rotary`, also from a mapping, such as `config.model.rotary`.

    >>> as_rotary({"base": 500_000.0}).base
    500000.0
    """
    return options if isinstance(options, Rotary) else Rotary(**dict(options))
