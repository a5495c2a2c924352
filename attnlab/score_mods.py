"""Score mods: changes to the attention scores before the softmax. See `attnlab.ops.score_mods`."""

from attnlab.ops.score_mods import ALiBi, Forget, RelativeBias, ScoreFn, ScoreMod, SoftCap, alibi_slopes

__all__ = ["ALiBi", "Forget", "RelativeBias", "ScoreFn", "ScoreMod", "SoftCap", "alibi_slopes"]
