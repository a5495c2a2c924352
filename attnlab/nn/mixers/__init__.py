"""Layers that mix tokens otherwise than by softmax; each can replace `MultiHeadAttention` in a `Block`.

All are causal by construction. Files: `interface` (their call and their state), `short_conv`, and one for each mixer.
"""

from attnlab.nn.mixers.causal_conv import CausalConv
from attnlab.nn.mixers.gated_conv import GatedConv
from attnlab.nn.mixers.gated_delta_net import GatedDeltaNet
from attnlab.nn.mixers.gated_linear_attention import GatedLinearAttention
from attnlab.nn.mixers.gru import GRU
from attnlab.nn.mixers.interface import MixerState
from attnlab.nn.mixers.linear_attention import LinearAttention
from attnlab.nn.mixers.mamba2 import Mamba2
from attnlab.nn.mixers.retention import Retention
from attnlab.nn.mixers.short_conv import ShortConv

__all__ = [
    "GRU",
    "CausalConv",
    "GatedConv",
    "GatedDeltaNet",
    "GatedLinearAttention",
    "LinearAttention",
    "Mamba2",
    "MixerState",
    "Retention",
    "ShortConv",
]
