"""The gated recurrent unit."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from attnlab.nn.layer import LayerConfig, LayerOut
from attnlab.nn.matrices import Matrix
from attnlab.nn.mixers.interface import CausalMixer, MixerState
from attnlab.types import DType


class GRU(CausalMixer):
    """Gated recurrent unit (Cho et al. 2014): n sequential steps, each O(d²).

    Its cache holds the state `[B, d]`, in float32 even if the computation is in bfloat16: a bfloat16 state would stop
    changing before it converges, once its steps are smaller than its rounding error.

    Attributes:
      features: d, width of state and output; None for the input's width.
      dtype: type of the computation; None for the input's type.

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
        dtype = jnp.promote_types(self.dtype or jnp.float32, jnp.float32)
        return MixerState(jnp.zeros((batch, self.features or features), dtype))


class _Cell(nn.Module):
    """`flax.linen.GRUCell`, with its parameters, over all tokens; projects inputs all at once, states one by one."""

    features: int
    dtype: DType | None

    @nn.compact
    def __call__(self, x, state, context):
        by_token = jnp.moveaxis(x, 1, 0)
        inputs = tuple(nn.Dense(self.features, dtype=self.dtype, name=name)(by_token) for name in ("ir", "iz", "in"))
        kernels, (*_, bias) = zip(*(_Hidden(self.features, name == "hn", name=name)() for name in ("hr", "hz", "hn")))
        kernel, bias = (y.astype(inputs[0].dtype) for y in (jnp.concatenate(kernels, axis=-1), bias))
        begins = inside = None
        if context.segments is not None:
            begins = jnp.pad(context.segments[:, 1:] != context.segments[:, :-1], ((0, 0), (1, 0))).T[..., None]
        if context.lengths is not None:
            inside = (jnp.arange(x.shape[1]) < context.lengths[:, None]).T[..., None]
        out, last_state = _run(inputs, kernel, bias, state, begins, inside)
        return last_state, jnp.moveaxis(out, 0, 1)


@jax.custom_vjp
def _run(inputs, kernel, bias, state, begins, inside):
    """(Outputs `[T, B, d]`, the last state `[B, d]`) for projected inputs of the gates r, z and n, each `[T, B, d]`.

    Gates, states and sums have the type of `state`; outputs and the operands of products have the inputs' type.
    """
    return _forward(inputs, kernel, bias, state, begins, inside)[0]


def _forward(inputs, kernel, bias, state, begins, inside):
    def step(state, token):
        inputs, begins, inside = token
        previous = state if begins is None else jnp.where(begins, 0, state)
        _, z, n, _ = _gates(inputs, _product(previous, kernel), bias)
        out = (1 - z) * n + z * previous
        return out if inside is None else jnp.where(inside, out, previous), (out.astype(kernel.dtype), previous)

    last, (out, previous) = jax.lax.scan(step, state, (inputs, begins, inside))
    return (out, last), (inputs, kernel, bias, previous, begins, inside)


def _product(x, kernel):
    """x @ kernel in the kernel's type, summed in x's type."""
    return jnp.matmul(x.astype(kernel.dtype), kernel, preferred_element_type=x.dtype)


def _gates(inputs, hidden, bias):
    r, z, n = jnp.split(hidden, 3, axis=-1)
    r, z, n = nn.sigmoid(inputs[0] + r), nn.sigmoid(inputs[1] + z), n + bias
    return r, z, jnp.tanh(inputs[2] + r * n), n


def _backward(residuals, cotangents):
    """Recompute the gates of all tokens at once; the kernel's gradient is one product after the loop."""
    inputs, kernel, bias, previous, begins, inside = residuals
    d_out, d_last = cotangents
    r, z, n, hidden_n = _gates(inputs, _product(previous, kernel), bias)

    def step(d_state, token):
        d_out, (r, z, n, hidden_n, previous), begins, inside = token
        d_out = d_out + (d_state if inside is None else jnp.where(inside, d_state, 0))
        d_n = d_out * (1 - z) * (1 - n * n)
        d_r, d_z = d_n * hidden_n * r * (1 - r), d_out * (previous - n) * z * (1 - z)
        d_hidden = jnp.concatenate([d_r, d_z, d_n * r], axis=-1)
        d_previous = d_out * z + _product(d_hidden, kernel.T) + (0 if inside is None else jnp.where(inside, 0, d_state))
        return d_previous if begins is None else jnp.where(begins, 0, d_previous), (d_r, d_z, d_n, d_hidden)

    tokens = (d_out, (r, z, n, hidden_n, previous), begins, inside)
    d_state, (*d_inputs, d_hidden) = jax.lax.scan(step, d_last, tokens, reverse=True)
    operands = (y.astype(kernel.dtype) for y in (previous, d_hidden))
    d_kernel = jnp.einsum("tbi,tbj->ij", *operands, preferred_element_type=previous.dtype)
    d_bias = d_hidden[..., -len(bias) :].sum(axis=(0, 1))
    d_inputs, d_kernel, d_bias = jax.tree.map(lambda y: y.astype(kernel.dtype), (tuple(d_inputs), d_kernel, d_bias))
    return d_inputs, d_kernel, d_bias, d_state, None, None


_run.defvjp(_forward, _backward)


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
