"""Score mods: changes of the attention scores before the softmax. See `attnlab.ops.score_mods`."""

from attnlab.ops.score_mods import ALiBi, RelativeBias, ScoreFn, ScoreMod, SoftCap, alibi_slopes

__all__ = ["ALiBi", "RelativeBias", "ScoreFn", "ScoreMod", "SoftCap", "alibi_slopes"]
