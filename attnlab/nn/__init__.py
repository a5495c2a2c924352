"""Flax linen modules: attention layers and the GPT. Inputs are `[batch, length, features]`."""

from attnlab.nn.additive import AdditiveAttention
from attnlab.nn.cache import KVCache, LatentCache
from attnlab.nn.config import ModelConfig
from attnlab.nn.custom import register
from attnlab.nn.differential import DifferentialAttention
from attnlab.nn.embeddings import cosine_similarity, nearest
from attnlab.nn.heads import Head, StackedHeads
from attnlab.nn.latent_attention import LatentAttention
from attnlab.nn.layer import Context, Layer, LayerConfig, LayerOut
from attnlab.nn.mixers.causal_conv import CausalConv
from attnlab.nn.mixers.gated_conv import GatedConv
from attnlab.nn.mixers.gated_delta_net import GatedDeltaNet
from attnlab.nn.mixers.gated_delta_product import GatedDeltaProduct
from attnlab.nn.mixers.gated_linear_attention import GatedLinearAttention
from attnlab.nn.mixers.gru import GRU
from attnlab.nn.mixers.hgrn2 import HGRN2
from attnlab.nn.mixers.interface import CausalMixer, MixerState, RecurrentMixer
from attnlab.nn.mixers.kimi_delta_attention import KimiDeltaAttention
from attnlab.nn.mixers.linear_attention import LinearAttention
from attnlab.nn.mixers.mamba2 import Mamba2
from attnlab.nn.mixers.retention import Retention
from attnlab.nn.mixers.rwkv7 import RWKV7
from attnlab.nn.mixers.short_conv import ShortConv
from attnlab.nn.mlp import Mlp
from attnlab.nn.multihead import AttentionConfig, MultiHeadAttention
from attnlab.nn.norms import LayerNorm, RMSNorm
from attnlab.nn.positions import LearnedPositions, sinusoidal
from attnlab.nn.rotations import Rotary, rotary
from attnlab.nn.seq2seq import Seq2Seq, alignment
from attnlab.nn.stack import stack_layers, unstack_layers
from attnlab.nn.stick_breaking import StickBreakingAttention
from attnlab.nn.transformer import GPT, Block

__all__ = [
    "GPT",
    "GRU",
    "HGRN2",
    "RWKV7",
    "AdditiveAttention",
    "AttentionConfig",
    "Block",
    "CausalConv",
    "CausalMixer",
    "Context",
    "DifferentialAttention",
    "GatedConv",
    "GatedDeltaNet",
    "GatedDeltaProduct",
    "GatedLinearAttention",
    "Head",
    "KVCache",
    "KimiDeltaAttention",
    "LatentAttention",
    "LatentCache",
    "Layer",
    "LayerConfig",
    "LayerNorm",
    "LayerOut",
    "LearnedPositions",
    "LinearAttention",
    "Mamba2",
    "MixerState",
    "Mlp",
    "ModelConfig",
    "MultiHeadAttention",
    "RMSNorm",
    "RecurrentMixer",
    "Retention",
    "Rotary",
    "Seq2Seq",
    "ShortConv",
    "StackedHeads",
    "StickBreakingAttention",
    "alignment",
    "cosine_similarity",
    "nearest",
    "register",
    "rotary",
    "sinusoidal",
    "stack_layers",
    "unstack_layers",
]
