"""Layers that mix tokens otherwise than by softmax; each can replace `MultiHeadAttention` in a `Block`.

All are causal by construction. Files: `interface` (their call and their state), `short_conv`, `delta_rule` (the parts
that mixers of the delta rule share), and one for each mixer.
"""

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

__all__ = [
    "GRU",
    "HGRN2",
    "RWKV7",
    "CausalConv",
    "CausalMixer",
    "GatedConv",
    "GatedDeltaNet",
    "GatedDeltaProduct",
    "GatedLinearAttention",
    "KimiDeltaAttention",
    "LinearAttention",
    "Mamba2",
    "MixerState",
    "RecurrentMixer",
    "Retention",
    "ShortConv",
]
