"""attnlab: the attention laboratory for JAX and Flax."""

from attnlab import masks, nn, score_mods
from attnlab.loading import load
from attnlab.ops.attention import attention, attention_weights, explain, implementations, merge

__all__ = ["attention", "attention_weights", "explain", "implementations", "load", "masks", "merge", "nn", "score_mods"]
