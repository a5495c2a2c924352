"""The file of a user that tests write, and a class that they import."""

from attnlab.nn import CausalConv

SOURCE = '''"""Attention that prefers near keys, one that skips even positions, and an average of the past."""
import flax.linen as nn
import jax.numpy as jnp

from attnlab.masks import MaskFn
from attnlab.nn import CausalMixer, LayerOut, MixerState, MultiHeadAttention, RecurrentMixer
from attnlab.score_mods import ScoreFn

near = ScoreFn(lambda score, b, h, i, j: score - 0.1 * (i - j))
odd = MaskFn(lambda b, h, i, j: (j % 2 == 1) | (i == j))


class Average(RecurrentMixer):
    def mix(self, x, state, context):
        v = self._dense("value", self.num_heads, self.value_features(x.shape[-1]))(x)
        ones, g = jnp.ones((*v.shape[:-1], 1), v.dtype), jnp.full(v.shape[:-1], -0.5)
        z, last_state = self._recur(ones, ones, v, state, context, g=g)
        return LayerOut(self._out(z, x.shape[-1]), MixerState(last_state))

    def key_features(self, features):
        return 1


class Needy(CausalMixer):
    order: int


class Reader(RecurrentMixer):
    reads = "key_dim"


class Shifted(MultiHeadAttention):
    @classmethod
    def of_model(cls, model, **fields):
        return super().of_model(model, **fields | {"rotary": None})
'''


class Doubling(CausalConv):
    """Twice a convolution."""

    def mix(self, x, state, context):
        found = super().mix(x, state, context)
        return found._replace(out=2 * found.out)
