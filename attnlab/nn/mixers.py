"""Recurrent, convolutional and linear-attention token mixers, to compare attention with.

All can replace `MultiHeadAttention` in a `Block`. They are causal by construction and take no other mask.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from attnlab.ops import products
from attnlab.ops.linear import LinearState, elu_plus_one, linear_attention
from attnlab.ops.masks import Causal, Mask
from attnlab.types import Array, DType


class _CausalMixer(nn.Module):
    """The interface of the mixers; subclasses define `_mix` and `empty_cache`."""

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T F"],
        *,
        mask: Mask | None = None,
        deterministic: bool = True,
        cache: Float[Array, "B ..."] | LinearState | None = None,
        dropout_key: Array | None = None,
    ) -> Float[Array, "B T d"] | tuple[Float[Array, "B T d"], Float[Array, "B ..."] | LinearState]:
        """Mix the tokens of each sequence: `[B, T, F]` to `[B, T, d]`, and with a cache also the new cache.

        Args:
          x: `[B, T, F]`.
          mask: None or `Causal()`.
          deterministic, dropout_key: no effect, as these modules have no dropout.
          cache: the state after the previous tokens; `empty_cache` before the first.
        """
        name = type(self).__name__
        if not (mask is None or isinstance(mask, Causal)):
            raise ValueError(f"mask is {type(mask).__name__}, but {name} is causal by construction: leave it out")
        if jnp.ndim(x) != 3:
            raise ValueError(f"the inputs of {name} have shape {jnp.shape(x)}, expected [batch, length, features]")
        x = jnp.asarray(x)
        empty = self.empty_cache(*x.shape[::2])
        if cache is not None and (given := _shapes(cache)) != _shapes(empty):
            raise ValueError(
                f"the cache of {name} has shape {given}, expected {_shapes(empty)}: make it with empty_cache"
            )
        out, extended = self._mix(x, empty, cache)
        return out if cache is None else (out, extended)


def _shapes(cache):
    """The shape of an array, or the shapes of a tuple of arrays."""
    return tuple(map(jnp.shape, cache)) if isinstance(cache, tuple) else jnp.shape(cache)


class GRU(_CausalMixer):
    """Gated recurrent unit (Cho et al. 2014): n sequential steps, each of O(d²).

    Its cache is the state `[B, d]`.

    Attributes:
      features: d, width of state and output; None for the input's.
      dtype: type of the computation; the input's when None.

    >>> block = Block(GRU(), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    features: int | None = None
    dtype: DType | None = None

    def _mix(self, x, empty, cache):
        cell = nn.GRUCell(self.features or x.shape[-1], dtype=self.dtype, name="cell")
        state, out = nn.RNN(cell, return_carry=True)(x, initial_carry=empty if cache is None else cache)
        return out, state

    def empty_cache(self, batch: int, features: int) -> Float[Array, "B d"]:
        """The state before the first token, `[batch, d]` zeros; `features` is the input's width."""
        return jnp.zeros((batch, self.features or features), self.dtype or jnp.float32)


class CausalConv(_CausalMixer):
    """Dilated causal convolution (van den Oord et al. 2016, section 2.1): O(k·n·d²), all n positions in parallel.

    The receptive field of a token is itself and the k − 1 tokens at `dilation`, 2·`dilation`, … before it. Layers of
    dilation 1, k, k², … have receptive fields of k, k², k³, … tokens, so log_k(n) layers cover n tokens; undilated it
    takes (n − 1) / (k − 1) layers.

    Its cache is the last R = (k − 1)·dilation inputs, `[B, R, F]`.

    Attributes:
      features: d, width of the output; None for the input's.
      kernel_size: k.
      dilation: distance between the tokens of the kernel.
      dtype: type of the computation; the input's when None.

    >>> block = Block(CausalConv(kernel_size=3, dilation=2), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    features: int | None = None
    kernel_size: int = 3
    dilation: int = 1
    dtype: DType | None = None

    def _mix(self, x, empty, cache):
        previous = empty.astype(x.dtype) if cache is None else cache
        inputs = jnp.concatenate([previous, x.astype(previous.dtype)], axis=1)
        convolve = nn.Conv(
            self.features or x.shape[-1],
            (self.kernel_size,),
            kernel_dilation=self.dilation,
            padding="VALID",
            dtype=self.dtype,
            name="conv",
        )
        return convolve(inputs), inputs[:, inputs.shape[1] - previous.shape[1] :]

    def empty_cache(self, batch: int, features: int) -> Float[Array, "B R F"]:
        """The inputs before the first token, `[batch, R, features]` zeros."""
        if min(self.kernel_size, self.dilation) < 1:
            raise ValueError(f"kernel_size, dilation = {self.kernel_size}, {self.dilation}: expected 1 or more of both")
        return jnp.zeros((batch, (self.kernel_size - 1) * self.dilation, features), self.dtype or jnp.float32)


class LinearAttention(_CausalMixer):
    """Causal multi-head linear attention (Katharopoulos et al. 2020): O(n·d²), a state that does not grow with n.

    The projections have the names and shapes of `MultiHeadAttention`'s. Its cache is the `LinearState` of each head.

    Attributes:
      num_heads: H.
      head_dim: D; None for input width / H.
      features: width of the output; None for the input's.
      feature_map, normalize: see `attnlab.linear_attention`; its `elu_plus_one` for None.
      use_bias: whether the projections add a bias.
      kernel_init: initializer of the kernels.
      dtype: type of the computation; the input's when None.

    >>> block = Block(LinearAttention(num_heads=2), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    num_heads: int = 1
    head_dim: int | None = None
    features: int | None = None
    feature_map: Callable | None = None
    normalize: bool = True
    use_bias: bool = True
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    dtype: DType | None = None

    def _mix(self, x, empty, cache):
        options = {"use_bias": self.use_bias, "dtype": self.dtype, "kernel_init": self.kernel_init}
        options["dot_general"] = products.dot_general
        heads = (self.num_heads, self._head_dim(x.shape[-1]))
        q, k, v = (nn.DenseGeneral(heads, name=name, **options)(x) for name in ("query", "key", "value"))
        form = {"feature_map": self.feature_map or elu_plus_one, "normalize": self.normalize}
        z, state = linear_attention(q, k, v, state=empty if cache is None else cache, return_state=True, **form)
        features = x.shape[-1] if self.features is None else self.features
        return nn.DenseGeneral(features, axis=(-2, -1), name="out", **options)(z), state

    def _head_dim(self, features):
        if self.num_heads < 1 or (self.head_dim is None and features % self.num_heads):
            raise ValueError(
                f"num_heads = {self.num_heads}: expected a divisor of the input width {features}, or a head_dim"
            )
        return features // self.num_heads if self.head_dim is None else self.head_dim

    def empty_cache(self, batch: int, features: int) -> LinearState:
        """The state before the first token, zeros; `features` is the input's width."""
        head_dim = self._head_dim(features)
        feature_map, head = self.feature_map or elu_plus_one, jax.ShapeDtypeStruct((head_dim,), jnp.float32)
        shape = (batch, self.num_heads, jax.eval_shape(feature_map, head).shape[-1])
        return LinearState(jnp.zeros((*shape, head_dim)), jnp.zeros(shape))
