"""The forecaster: an encoder reads a history of any length, a decoder writes the hours after it."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from attnlab import score_mods
from attnlab.masks import Causal, MaskFn, Padding, SlidingWindow
from attnlab.nn import Block, KVCache, Mlp, MultiHeadAttention, sinusoidal

OVERLAP = 8  # hours of the history that the decoder reads again
DAY = 25  # about how many hours after a tide the same tide returns on the next lunar day


class Forecaster(nn.Module):
    """Predicts each next level from those before it and from the history."""

    width: int = 32
    num_heads: int = 4
    kv_heads: int = 2

    def setup(self):
        # Each hour attends to its neighbours, and to the same hour of other days.
        near = SlidingWindow(left=3, right=3) | MaskFn(lambda b, h, i, j: (i - j) % DAY == 0)
        recent = score_mods.ALiBi(score_mods.alibi_slopes(self.num_heads))
        self.embed_history, self.embed_level = nn.Dense(self.width), nn.Dense(self.width)
        self.encoder = [
            Block(MultiHeadAttention(self.num_heads, mask=near), Mlp(2 * self.width)),
            Block(MultiHeadAttention(self.num_heads, score_mod=recent), Mlp(2 * self.width)),
        ]
        self.norm = nn.LayerNorm()
        self.cross = MultiHeadAttention(self.num_heads, qk_norm=True)
        self_attention = MultiHeadAttention(self.num_heads, kv_heads=self.kv_heads, rotary=1_000.0, mask=Causal())
        self.decoder = Block(self_attention, Mlp(2 * self.width))
        self.out = nn.Dense(1)

    def encode(self, history, lengths):
        """Encode histories `[B, S]`, padded after `lengths` `[B]` hours, as memory `[B, S, width]`."""
        x = self.embed_history(history[..., None]) + sinusoidal(jnp.arange(history.shape[1]), self.width)
        for block in self.encoder:
            x = block(x, mask=Padding(lengths))
        return x

    def decode(self, levels, memory, lengths, cache=None):
        """Predict the level after each of `levels` `[B, T]`; with a cache, also return the updated cache."""
        x = self.embed_level(levels[..., None])
        x = x + self.cross(self.norm(x), memory, mask=Padding(lengths))
        x = self.decoder(x, cache=cache)
        x, cache = (x, None) if cache is None else x
        predicted = levels + self.out(x)[..., 0]
        return predicted if cache is None else (predicted, cache)

    def __call__(self, history, lengths, levels):
        return self.decode(levels, self.encode(history, lengths), lengths)

    def init_cache(self, batch: int, hours: int) -> KVCache:
        """An empty cache for `hours` hours of the decoder."""
        return KVCache.empty(batch, hours, self.kv_heads, self.width // self.num_heads)


@partial(jax.jit, static_argnames=("model", "hours"))
def forecast(model: Forecaster, params, history, lengths, hours: int):
    """Predict the `hours` levels after each history, `[B, hours]`, autoregressively."""
    memory = model.apply(params, history, lengths, method="encode")
    again = jnp.take_along_axis(history, lengths[:, None] - OVERLAP + jnp.arange(OVERLAP), axis=1)
    cache = model.init_cache(len(history), OVERLAP + hours)
    predicted, cache = model.apply(params, again, memory, lengths, cache, method="decode")

    def step(carry, _):
        level, cache = carry
        predicted, cache = model.apply(params, level[:, None], memory, lengths, cache, method="decode")
        return (predicted[:, 0], cache), level

    _, levels = jax.lax.scan(step, (predicted[:, -1], cache), length=hours)
    return levels.T
