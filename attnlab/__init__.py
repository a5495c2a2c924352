"""attnlab: the attention laboratory for JAX and Flax."""

from attnlab import nn
from attnlab.ops import masks, score_mods
from attnlab.ops.attention import attention, attention_weights, explain, implementations

__all__ = ["attention", "attention_weights", "explain", "implementations", "masks", "nn", "score_mods"]
