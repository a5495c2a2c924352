"""A user's file that tests write, and a class that they import."""

from attnlab.nn import CausalConv, custom
from attnlab.nn.config import KINDS


def forget():
    """Forget all kinds but attnlab's own, as in a new process."""
    custom._SOURCES.clear()
    for kind in filter(custom.is_custom, list(KINDS)):
        del KINDS[kind]


SOURCE = '''"""Attention that prefers near keys, one that skips even positions, and an average of the past."""
from typing import ClassVar

import flax.linen as nn
import jax.numpy as jnp

from attnlab.masks import MaskFn
from attnlab.nn import AttentionConfig, LayerOut, MixerState, MultiHeadAttention, RecurrentMixer
from attnlab.support.options import option

odd = MaskFn(lambda b, h, i, j: (j % 2 == 1) | (i == j))


def near(score, b, h, i, j):
    return score - 0.1 * (i - j)


class Sized(nn.Module):  # no layer, as a field has no default
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)


class Running(nn.Module):
    num_heads: int = 1

    @nn.compact
    def __call__(self, x, deterministic):
        return jnp.cumsum(Sized(x.shape[-1])(nn.Dropout(0.5)(x, deterministic)), axis=1)


class Average(RecurrentMixer):
    decay: float = option("factor of an input, one token later", 0.6, low=0.01, high=1)

    def mix(self, x, state, context):
        v = self._dense("value", self.num_heads, self.value_features(x.shape[-1]))(x)
        ones, g = jnp.ones((*v.shape[:-1], 1), v.dtype), jnp.full(v.shape[:-1], jnp.log(self.decay))
        z, last_state = self._recur(ones, ones, v, state, context, g=g)
        return LayerOut(self._out(z, x.shape[-1]), MixerState(last_state))

    def key_features(self, features):
        return 1


class Shifted(MultiHeadAttention):
    pass


class ShiftedConfig(AttentionConfig, of=Shifted, kind="Shifted"):
    rotary: ClassVar[None] = None
'''


class Doubling(CausalConv):
    """Twice a convolution."""

    def mix(self, x, state, context):
        mixed = super().mix(x, state, context)
        return mixed._replace(out=2 * mixed.out)
