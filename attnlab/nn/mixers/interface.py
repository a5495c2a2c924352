"""The call and the state that all mixers share."""

import functools
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from attnlab.nn import projections, sharding, taps
from attnlab.nn.layer import Context, Layer, LayerConfig, LayerOut
from attnlab.ops.masks import Causal
from attnlab.ops.recurrence import linear_recurrence
from attnlab.support.options import FieldError, option
from attnlab.types import Array, DType


class MixerState(NamedTuple):
    """The state of a mixer after some tokens: a plain pytree whose size does not depend on the number of tokens.

    Attributes:
      state: state of the recurrence, such as `[B, HV, K, V]` in float32; None for a convolution.
      conv: the last inputs of a convolution, `[B, W − 1, …]`; None without a convolution.
      length: int32 `[B]`, number of tokens so far; set by `CausalMixer`, not by `mix`.

    >>> from attnlab.nn import GatedDeltaNet
    >>> GatedDeltaNet(num_heads=2).init_cache(batch=1, features=8).state.shape
    (1, 2, 4, 4)
    """

    state: Any = None
    conv: Any = None
    length: Int[Array, " B"] | None = None


class CausalMixer(Layer):
    """The interface of the mixers; subclasses define `mix` and, if they have a state, `init_state`.

    >>> class Convolution(CausalMixer):
    ...     def mix(self, x, state, context):
    ...         out, last = ShortConv(4, name="conv")(x, state.conv, context.segments, context.lengths)
    ...         return LayerOut(jax.nn.gelu(out), MixerState(conv=last))
    ...
    ...     def init_state(self, batch, features):
    ...         return MixerState(conv=jnp.zeros((batch, 3, features)))
    >>> block = Block(Convolution(), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    @nn.compact
    def forward(self, x: Float[Array, "B T F"], context: Context, cache: MixerState | None = None) -> LayerOut:
        """Mix the tokens, starting from the cache or an empty state; ValueError for a mask other than `Causal`."""
        name, mask = type(self).__name__, context.mask
        if not (mask is None or isinstance(mask, Causal)):
            raise ValueError(f"mask is {type(mask).__name__}, but {name} is causal by construction: remove it")
        x = jnp.asarray(x)
        state = cache
        if state is None:
            state = self.init_cache(*x.shape[::2])
            if getattr(self, "dtype", None) is None:  # float64 for float64 inputs
                wide = jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, x.dtype)), state[:2])
                state = MixerState(*wide, state.length)
        result = self._checked(self.mix(x, state, context), x)
        if cache is None:
            return result._replace(cache=None)
        length = state.length + (x.shape[1] if context.lengths is None else context.lengths)
        return result._replace(cache=result.cache._replace(length=length))

    def _checked(self, result, x) -> LayerOut:
        """Check and return the result of `mix`; ValueError for a wrong type or wrong output shape."""
        if not isinstance(result, LayerOut):
            shown = f"a {type(result).__name__}"
        elif not isinstance(result.cache, MixerState):
            shown = f"a cache of type {type(result.cache).__name__}"
        elif jnp.shape(result.out)[:-1] != x.shape[:2]:
            shown = f"outputs {list(jnp.shape(result.out))}"
        else:
            return result
        expected = f"LayerOut(outputs {[*x.shape[:2], 'd']}, MixerState(…))"
        raise ValueError(f"{type(self).__name__}.mix returned {shown}: expected {expected}")

    def mix(self, x, state: MixerState, context: Context) -> LayerOut:
        """Compute outputs `[B, T, d]` and the new state from the tokens x `[B, T, F]` and the state before them.

        Each segment of `context.segments` starts from an empty state. Tokens beyond `context.lengths` do not change it.
        """
        raise TypeError(f"{type(self).__name__} defines no mix(x, state, context): write it in the subclass")

    def init_state(self, batch: int, features: int) -> MixerState:
        """The state before the first token, zeros; its length may be None."""
        return MixerState()

    def init_cache(self, batch: int, features: int, capacity: int = 0) -> MixerState:
        """The state before the first token, zeros; `features` is the input's width, `capacity` has no effect."""
        return self.init_state(batch, features)._replace(length=jnp.zeros((batch,), jnp.int32))


class RecurrentMixer(CausalMixer):
    """Base class of mixers whose core is `linear_recurrence`, with the projections that they share.

    Projections are named and shaped as in `MultiHeadAttention`, from `query/kernel` `[F, H, K]` to `out/kernel`
    `[HV, V, F]`, so that one optimizer and one sharding serve both.

    Attributes:
      num_heads: H.
      kernel_init, out_kernel_init: initializers; `out_kernel_init` None for `kernel_init`.
      dtype: type of the computation; None for the input's type. Decays and states are float32.

    A subclass projects with `_dense`, calls `_recur`, and projects back with `_out`:

    >>> class Decaying(RecurrentMixer):
    ...     def mix(self, x, state, context):
    ...         size = (self.num_heads, self.key_features(x.shape[-1]))
    ...         q, k, v = (self._dense(name, *size)(x) for name in ("query", "key", "value"))
    ...         z, state = self._recur(q, k, v, state, context, g=jnp.full(v.shape[:-1], -0.1))
    ...         return LayerOut(self._out(z, x.shape[-1]), MixerState(state))
    >>> block = Block(Decaying(num_heads=2), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    num_heads: int = 1
    key_dim: int | None = option(
        "features of a key, K; None for the mixer's default, or width / H if it has none", None, low=1
    )
    value_dim: int | None = option("features of a value, V; None as for key_dim", None, low=1)
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    out_kernel_init: nn.initializers.Initializer | None = None
    dtype: DType | None = None

    operator: ClassVar[str | None] = "linear_recurrence"

    @property
    def states(self) -> int:
        """HV, the number of value heads, each with a state."""
        return self.num_heads

    def key_features(self, features: int) -> int:
        """K, the features of a key."""
        return self.key_dim or _share(features, self.num_heads)

    def value_features(self, features: int) -> int:
        """V, the features of a value."""
        return self.value_dim or _share(features, self.num_heads)

    def init_state(self, batch, features):
        shape = (batch, self.states, self.key_features(features), self.value_features(features))
        if self.states % self.num_heads:
            raise FieldError("value_heads", self.states, f"expected a multiple of num_heads = {self.num_heads}")
        return MixerState(jnp.zeros(shape, self._wide))

    @property
    def _wide(self):
        """The type of states: float64 if `dtype` is, otherwise float32."""
        return jnp.promote_types(self.dtype or jnp.float32, jnp.float32)

    def _dense(self, name, *features, use_bias=False, **options):
        """A linear layer to heads and features, or to `features` alone."""
        return projections.dense(self, name, *features, use_bias=use_bias, **options)

    def _recur(self, q, k, v, state: MixerState, context: Context, **terms):
        """Run the recurrence, with the taps of `attnlab.see`: (output `[B, T, HV, V]`, the state after the tokens).

        The pattern is the output for an identity matrix as values, that is, the weight of each value in each output.
        """
        q, k, v = (sharding.constrain(x, "batch", "length", "heads", None) for x in (q, k, v))
        q, k, v = (taps.tap(self, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
        options = {**terms, "segment_ids": context.segments, "lengths": context.lengths}
        recurrence = functools.partial(self._recurrence, q, k, **options)
        z, last_state = recurrence(v, state=state.state)

        def pattern(rows):
            batch, length, heads, _ = v.shape
            identity = jnp.broadcast_to(jnp.eye(length)[:, None], (batch, length, heads, length))
            weights = jnp.moveaxis(recurrence(identity)[0], 1, 2)
            return weights if rows is None else jnp.take(weights, rows, axis=-2)

        return taps.attended(self, z, pattern, v), last_state

    def _recurrence(self, q, k, v, **options):
        """(Output `[B, T, HV, V]`, the state after the tokens)."""
        return linear_recurrence(q, k, v, return_state=True, **options)

    def _out(self, z, features):
        """Project `[B, T, HV, V]`, which `attnlab.see` calls z, to `[B, T, features]`."""
        return projections.out(self, z, features, use_bias=False)


class RecurrentConfig(LayerConfig, of=RecurrentMixer):
    """Base class of the configs of recurrent mixers."""

    heads: int | None = option("key heads; None for num_heads", None, low=1)


def last(x: Float[Array, "B N ..."], count: int, lengths: Int[Array, " B"] | None):
    """The last `count` of the first `count + lengths` inputs of each sequence, or of all inputs without `lengths`."""
    if lengths is None:
        return x[:, x.shape[1] - count :]
    return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, count))(x, lengths)


def _share(features: int, heads: int) -> int:
    if heads < 1 or features % heads:
        raise FieldError("num_heads", heads, f"expected a divisor of the input width {features}; or set head sizes")
    return features // heads
