"""Flax linen modules for attention and the GPT built of them. Inputs are `[batch, length, features]`."""

from attnlab.nn.gpt import GPT, Block, Mlp
from attnlab.nn.heads import Head, StackedHeads
from attnlab.nn.multihead import KVCache, MultiHeadAttention
from attnlab.nn.positions import LearnedPositions, rotary, sinusoidal

__all__ = [
    "GPT",
    "Block",
    "Head",
    "KVCache",
    "LearnedPositions",
    "Mlp",
    "MultiHeadAttention",
    "StackedHeads",
    "rotary",
    "sinusoidal",
]
