"""Flax linen modules: attention layers and the GPT. Inputs are `[batch, length, features]`."""

from attnlab.nn.additive import AdditiveAttention
from attnlab.nn.embeddings import cosine_similarity, nearest
from attnlab.nn.gpt import GPT, Block, Mlp
from attnlab.nn.heads import Head, StackedHeads
from attnlab.nn.layers import stack_layers, unstack_layers
from attnlab.nn.mixers import GRU, CausalConv
from attnlab.nn.multihead import KVCache, MultiHeadAttention
from attnlab.nn.positions import LearnedPositions, rotary, sinusoidal
from attnlab.nn.seq2seq import Seq2Seq, alignment

__all__ = [
    "GPT",
    "GRU",
    "AdditiveAttention",
    "Block",
    "CausalConv",
    "Head",
    "KVCache",
    "LearnedPositions",
    "Mlp",
    "MultiHeadAttention",
    "Seq2Seq",
    "StackedHeads",
    "alignment",
    "cosine_similarity",
    "nearest",
    "rotary",
    "sinusoidal",
    "stack_layers",
    "unstack_layers",
]
