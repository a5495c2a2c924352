"""Score mods: what is done to a score before the softmax. See `attnlab.ops.score_mods`."""

from attnlab.ops.score_mods import ALiBi, ScoreMod, SoftCap, alibi_slopes

__all__ = ["ALiBi", "ScoreMod", "SoftCap", "alibi_slopes"]
