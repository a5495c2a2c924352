"""The gated recurrent unit."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from attnlab.nn.layer import LayerConfig, LayerOut
from attnlab.nn.matrices import Matrix
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
        cell = _Cell(self.features or x.shape[-1], self.dtype, name="cell")
        last_state, out = cell(x, state.state, context)
        return LayerOut(out, MixerState(last_state))

    def init_state(self, batch, features):
        return MixerState(jnp.zeros((batch, self.features or features), self.dtype or jnp.float32))


class _Cell(nn.Module):
    """`flax.linen.GRUCell` over all tokens, with its parameters: inputs are projected at once, states once a token."""

    features: int
    dtype: DType | None

    @nn.compact
    def __call__(self, x, state, context):
        inputs = [nn.Dense(self.features, dtype=self.dtype, name=name)(x) for name in ("ir", "iz", "in")]
        kernels, (*_, bias) = zip(*(_Hidden(self.features, name == "hn", name=name)() for name in ("hr", "hz", "hn")))
        kernel, bias = (y.astype(inputs[0].dtype) for y in (jnp.concatenate(kernels, axis=-1), bias))
        begins = inside = None
        if context.segments is not None:
            begins = jnp.pad(context.segments[:, 1:] != context.segments[:, :-1], ((0, 0), (1, 0)))
        if context.lengths is not None:
            inside = jnp.arange(x.shape[1]) < context.lengths[:, None]

        def step(state, token):
            (of_r, of_z, of_n), begins, inside = token
            previous = state if begins is None else jnp.where(begins[:, None], 0, state)
            r, z, n = jnp.split(previous @ kernel, 3, axis=-1)
            r, z = nn.sigmoid(of_r + r), nn.sigmoid(of_z + z)
            n = jnp.tanh(of_n + r * (n + bias))
            state = (1 - z) * n + z * previous
            return state if inside is None else jnp.where(inside[:, None], state, previous), state

        by_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (inputs, begins, inside))
        last_state, out = jax.lax.scan(step, state, by_token)
        return last_state, jnp.moveaxis(out, 0, 1)


class _Hidden(nn.Module):
    """The kernel `[d, d]` of a projection of the state, and its bias `[d]` or None."""

    features: int
    use_bias: bool

    def matrices(self, _) -> dict[str, Matrix]:
        return {"kernel": Matrix()}

    @nn.compact
    def __call__(self):
        kernel = self.param("kernel", nn.initializers.orthogonal(), (self.features, self.features))
        return kernel, self.param("bias", nn.initializers.zeros, (self.features,)) if self.use_bias else None


class GRUConfig(LayerConfig, of=GRU, kind="gru"):
    """A gated recurrent unit."""
