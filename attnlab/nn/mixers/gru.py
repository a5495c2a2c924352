"""The gated recurrent unit."""

import flax.linen as nn
import jax.numpy as jnp

from attnlab.nn.layer import LayerConfig, LayerOut
from attnlab.nn.mixers.interface import CausalMixer, MixerState
from attnlab.types import DType


class GRU(CausalMixer):
    """Gated recurrent unit (Cho et al. 2014): n sequential steps, each of O(d²).

    Its cache holds the state `[B, d]`.

    Attributes:
      features: d, width of state and output; None for the input's.
      dtype: type of the computation; the input's when None.

    >>> block = Block(GRU(), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    features: int | None = None
    dtype: DType | None = None

    def mix(self, x, state, context):
        cell = nn.GRUCell(self.features or x.shape[-1], dtype=self.dtype, name="cell")
        begins = inside = None
        if context.segments is not None:
            begins = jnp.pad(context.segments[:, 1:] != context.segments[:, :-1], ((0, 0), (1, 0)))
        if context.lengths is not None:
            inside = jnp.arange(x.shape[1]) < context.lengths[:, None]

        def step(cell, state, token):
            x, begins, inside = token
            previous = state if begins is None else jnp.where(begins[:, None], 0, state)
            state, out = cell(previous, x)
            return state if inside is None else jnp.where(inside[:, None], state, previous), out

        run = nn.scan(step, variable_broadcast="params", split_rngs={"params": False}, in_axes=1, out_axes=1)
        last_state, out = run(cell, state.state, (x, begins, inside))
        return LayerOut(out, MixerState(last_state))

    def init_state(self, batch, features):
        return MixerState(jnp.zeros((batch, self.features or features), self.dtype or jnp.float32))


class GRUConfig(LayerConfig, of=GRU, kind="gru"):
    """A gated recurrent unit."""
