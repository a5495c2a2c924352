"""The values behind the optional fields of a model."""

from typing import NamedTuple

from attnlab.ops.score_mods import ALiBi, ScoreMod, SoftCap, alibi_slopes


class Resolved(NamedTuple):
    """Sizes of attention and feed-forward layers, and which projections have biases."""

    head_dim: int
    kv_heads: int
    hidden: int
    attention_bias: bool
    qkv_bias: bool


def resolved(model) -> Resolved:
    """The values of the fields of a `GPT`, or of `config.model`, that may be None."""
    attention_bias = model.use_bias if model.attention_bias is None else model.attention_bias
    return Resolved(
        head_dim=model.head_dim or model.width // model.num_heads,
        kv_heads=model.kv_heads or model.num_heads,
        hidden=round(model.mlp_ratio * model.width),
        attention_bias=attention_bias,
        qkv_bias=attention_bias if model.qkv_bias is None else model.qkv_bias,
    )


def score_mods(model) -> tuple[ScoreMod, ...]:
    """The score mods of a model's attention."""
    cap = () if model.soft_cap is None else (SoftCap(model.soft_cap),)
    alibi = (ALiBi(alibi_slopes(model.num_heads)),) if model.positions == "alibi" else ()
    return (*cap, *alibi, *as_tuple(getattr(model, "score_mod", None)))  # a config has none


def as_tuple(score_mod) -> tuple[ScoreMod, ...]:
    """A score mod, several, or None, as a tuple."""
    if score_mod is None:
        return ()
    return score_mod if isinstance(score_mod, tuple) else (score_mod,)
