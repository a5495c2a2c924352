"""Attention for JAX and Flax: an exact, memory-efficient operator, and the modules and tools built on it."""

from attnlab import interop, masks, nn, score_mods
from attnlab.loading import load
from attnlab.ops.attention import attention, attention_weights, explain, implementations, merge
from attnlab.ops.linear import LinearState, linear_attention

__all__ = [
    "LinearState",
    "attention",
    "attention_weights",
    "explain",
    "implementations",
    "interop",
    "linear_attention",
    "load",
    "masks",
    "merge",
    "nn",
    "score_mods",
]

__version__ = "0.1.0"
