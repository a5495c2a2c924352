"""Score mods: what is done to a score before the softmax. See `attnlab.ops.score_mods`."""

from attnlab.ops.score_mods import ALiBi, RelativeBias, ScoreFn, ScoreMod, SoftCap, alibi_slopes

__all__ = ["ALiBi", "RelativeBias", "ScoreFn", "ScoreMod", "SoftCap", "alibi_slopes"]
