"""Masks: who may look at whom. See `attnlab.ops.masks`."""

from attnlab.ops.masks import And, Causal, Dense, Mask, Not, Or, Padding, SlidingWindow, join

__all__ = ["And", "Causal", "Dense", "Mask", "Not", "Or", "Padding", "SlidingWindow", "join"]
