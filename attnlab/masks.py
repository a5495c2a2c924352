"""Masks: who may look at whom. See `attnlab.ops.masks`."""

from attnlab.ops.masks import (
    And,
    BlockSparse,
    Causal,
    Dense,
    Mask,
    MaskFn,
    Not,
    Or,
    Padding,
    PrefixLM,
    Segments,
    SlidingWindow,
    join,
)

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
