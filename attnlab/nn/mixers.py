"""What stood in attention's place before it: recurrent and convolutional layers, to compare with.

Both take the place of `MultiHeadAttention` in a `Block`. They look at what came before and nothing else, whatever the
mask.
"""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float

from attnlab.ops.masks import Causal, Mask
from attnlab.types import Array, DType


class GRU(nn.Module):
    """Gated recurrent unit (Cho et al. 2014): n steps, one after another, each of O(d²).

    Attributes:
      features: d, width of state and output; None for the input's.
      dtype: type of the computation; the input's when None.

    >>> from attnlab.nn import Block, Mlp
    >>> block = Block(GRU(), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    features: int | None = None
    dtype: DType | None = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T F"],
        *,
        mask: Mask | None = None,
        deterministic: bool = True,
        cache: Float[Array, "B d"] | None = None,
        dropout_key: Array | None = None,
    ) -> Float[Array, "B T d"] | tuple[Float[Array, "B T d"], Float[Array, "B d"]]:
        """`[B, T, F]` to `[B, T, d]`.

        Args:
          x: `[B, T, F]`.
          mask: None or `Causal()`.
          deterministic, dropout_key: nothing here drops.
          cache: the state `[B, d]` after what came before (`empty_cache` at the start); the new one is then returned
            as well.

        Returns:
          `[B, T, d]`, and with a cache the new one.

        Raises:
          ValueError: another mask, or inputs or a cache of another shape.
        """
        _check("a GRU", x, mask, cache, self.empty_cache)
        width = self.features or x.shape[-1]
        before = self.empty_cache(*x.shape[::2]) if cache is None else cache
        cell = nn.GRUCell(width, dtype=self.dtype, name="cell")
        state, out = nn.RNN(cell, return_carry=True)(x, initial_carry=before)
        return out if cache is None else (out, state)

    def empty_cache(self, batch: int, features: int) -> Float[Array, "B d"]:
        """The state before the first token, `[batch, d]` zeros; `features` is the input's width.

        >>> GRU().empty_cache(batch=2, features=3).shape
        (2, 3)
        """
        return jnp.zeros((batch, self.features or features), self.dtype or jnp.float32)


class CausalConv(nn.Module):
    """Dilated causal convolution (van den Oord et al. 2016, section 2.1): each of O(k·n·d²), all n at once.

    A token sees itself and the k − 1 tokens at `dilation`, 2·`dilation`, … before it. Layers of dilation 1, k, k², …
    see k, k², k³, … tokens, so log_k(n) of them see n; undilated it takes (n − 1) / (k − 1).

    Attributes:
      features: d, width of the output; None for the input's.
      kernel_size: k.
      dilation: distance of the tokens that are seen.
      dtype: type of the computation; the input's when None.

    >>> from attnlab.nn import Block, Mlp
    >>> block = Block(CausalConv(kernel_size=3, dilation=2), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    features: int | None = None
    kernel_size: int = 3
    dilation: int = 1
    dtype: DType | None = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T F"],
        *,
        mask: Mask | None = None,
        deterministic: bool = True,
        cache: Float[Array, "B R F"] | None = None,
        dropout_key: Array | None = None,
    ) -> Float[Array, "B T d"] | tuple[Float[Array, "B T d"], Float[Array, "B R F"]]:
        """`[B, T, F]` to `[B, T, d]`.

        Args:
          x: `[B, T, F]`.
          mask: None or `Causal()`.
          deterministic, dropout_key: nothing here drops.
          cache: the last R = (k − 1)·dilation inputs `[B, R, F]` (`empty_cache` at the start); the new ones are then
            returned as well.

        Returns:
          `[B, T, d]`, and with a cache the new one.

        Raises:
          ValueError: another mask, inputs or a cache of another shape, a kernel or dilation below 1.
        """
        _check("a causal convolution", x, mask, cache, self.empty_cache)
        before = self.empty_cache(*x.shape[::2]).astype(x.dtype) if cache is None else cache
        seen = jnp.concatenate([before, x.astype(before.dtype)], axis=1)
        convolve = nn.Conv(
            self.features or x.shape[-1],
            (self.kernel_size,),
            kernel_dilation=self.dilation,
            padding="VALID",
            dtype=self.dtype,
            name="conv",
        )
        out = convolve(seen)
        return out if cache is None else (out, seen[:, seen.shape[1] - before.shape[1] :])

    def empty_cache(self, batch: int, features: int) -> Float[Array, "B R F"]:
        """The inputs before the first token, `[batch, R, features]` zeros; ValueError for a kernel or dilation below 1.

        >>> CausalConv(kernel_size=3, dilation=4).empty_cache(batch=2, features=5).shape
        (2, 8, 5)
        """
        if min(self.kernel_size, self.dilation) < 1:
            raise ValueError(f"kernel_size, dilation = {self.kernel_size}, {self.dilation}: expected 1 or more of both")
        return jnp.zeros((batch, (self.kernel_size - 1) * self.dilation, features), self.dtype or jnp.float32)


def _check(what: str, x, mask: Mask | None, cache, empty_cache) -> None:
    if not (mask is None or isinstance(mask, Causal)):
        raise ValueError(f"mask is {type(mask).__name__}, but {what} sees what came before: leave it out")
    if jnp.ndim(x) != 3:
        raise ValueError(f"the inputs of {what} have shape {jnp.shape(x)}, expected [batch, length, features]")
    expected = empty_cache(*x.shape[::2]).shape
    if cache is not None and jnp.shape(cache) != expected:
        raise ValueError(f"the cache of {what} has shape {jnp.shape(cache)}, expected {expected}: see empty_cache")
