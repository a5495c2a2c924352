"""Masks: which keys each query may attend to. See `attnlab.ops.masks`."""

from attnlab.ops.mask_algebra import And, Mask, Not, Or
from attnlab.ops.masks import BlockSparse, Causal, Dense, MaskFn, Padding, PrefixLM, Segments, SlidingWindow, join

__all__ = [
    "And",
    "BlockSparse",
    "Causal",
    "Dense",
    "Mask",
    "MaskFn",
    "Not",
    "Or",
    "Padding",
    "PrefixLM",
    "Segments",
    "SlidingWindow",
    "join",
]
