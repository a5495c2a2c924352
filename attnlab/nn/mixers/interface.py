"""The call and the state that mixers have in common."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from attnlab.nn import checks, projections, sharding, taps
from attnlab.nn.checks import check_lengths, check_segments
from attnlab.nn.groups import group
from attnlab.ops.masks import Causal, Mask
from attnlab.ops.recurrence import linear_recurrence
from attnlab.types import Array, DType


class MixerState(NamedTuple):
    """The state of a mixer after some tokens: a plain pytree whose size does not depend on their number.

    Attributes:
      state: of the recurrence, such as `[B, HV, K, V]` in float32; None for a convolution.
      conv: the last inputs of a convolution, `[B, W − 1, …]`; None without one.
      length: int32 `[B]`, number of tokens so far.

    >>> from attnlab.nn import GatedDeltaNet
    >>> GatedDeltaNet(num_heads=2).empty_cache(batch=1, features=8).state.shape
    (1, 2, 4, 4)
    """

    state: Any
    conv: Any
    length: Int[Array, " B"]


class Tokens(NamedTuple):
    """Arguments of a call besides its inputs and its cache; all but `layer` may be None."""

    segments: Int[Array, "B T"] | None
    lengths: Int[Array, " B"] | None
    first_values: Float[Array, "B T HV V"] | None
    layer: Int[Array, ""] | int


class CausalMixer(nn.Module):
    """The interface of the mixers; subclasses define `mix` and, if they keep something, `empty`.

    A layer that depends on its number has an attribute `numbered`, and one that takes the values of the first layer and
    returns its values an attribute `value_residual`.

    >>> class Convolution(CausalMixer):
    ...     def mix(self, x, before, tokens):
    ...         out, last = ShortConv(4, name="conv")(x, before.conv, tokens.segments, tokens.lengths)
    ...         return jax.nn.gelu(out), None, last
    ...
    ...     def empty(self, batch, features):
    ...         return None, jnp.zeros((batch, 3, features))
    >>> block = Block(Convolution(), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)

    Attributes:
      reads: the options of a `GPT` that `of_model` depends on: fields of the same names, but for `num_heads`.
    """

    reads: ClassVar[frozenset[str]] = frozenset()
    operator: ClassVar[str | None] = None  # in `attnlab`

    @checks.compact
    def __call__(
        self,
        x: Float[Array, "B T F"],
        *,
        mask: Mask | None = None,
        deterministic: bool = True,
        cache: Any = None,
        segments: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
        dropout_key: Array | None = None,
        first_values: Float[Array, "B T HV V"] | None = None,
        layer: Int[Array, ""] | int | None = None,
    ) -> Float[Array, "B T d"] | tuple[Any, ...]:
        """Mix the tokens of each sequence: `[B, T, F]` to `[B, T, d]`.

        Args:
          x: `[B, T, F]`.
          mask: None or `Causal()`.
          deterministic, dropout_key: no effect, as these modules have no dropout.
          cache: the `MixerState` after the previous tokens; `empty_cache` before the first.
          segments: `[B, T]`, the number of each token's document, where sequences are several documents, one after
            another: each begins from an empty state. Without a cache only.
          lengths: `[B]`, the tokens of each sequence: the others, at the right, are padding, which the cache does not
            see.
          first_values: `[B, T, HV, V]`, the values of the first layer, for `value_residual`; None in that layer.
          layer: the layer's number, from 0, for `numbered`; None for 0.

        Returns:
          `[B, T, d]`; with a cache also the new cache, and with `value_residual` also the values `[B, T, HV, V]`.

        Raises:
          ValueError: another mask, inputs, a cache, segments or lengths of another shape, segments with a cache,
            first_values without `value_residual`.
        """
        name = type(self).__name__
        if not (mask is None or isinstance(mask, Causal)):
            raise ValueError(f"mask is {type(mask).__name__}, but {name} is causal by construction: leave it out")
        if jnp.ndim(x) != 3:
            raise ValueError(f"the inputs of {name} have shape {jnp.shape(x)}, expected [batch, length, features]")
        x = jnp.asarray(x)
        check_segments(segments, x, cache=cache)
        check_lengths(lengths, x)
        if first_values is not None and not getattr(self, "value_residual", False):
            raise ValueError(f"first_values is set, but {name} has no value residual: leave it out")
        empty = self.empty_cache(*x.shape[::2])
        if cache is not None and (found := _described(cache)) != _described(empty):
            raise ValueError(f"the cache of {name} is {found}, expected {_described(empty)}: make it with empty_cache")
        if cache is None and getattr(self, "dtype", None) is None:  # float64 for inputs of float64
            state, conv = jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, x.dtype)), empty[:2])
            empty = empty._replace(state=state, conv=conv)
        before = empty if cache is None else cache
        tokens = Tokens(segments, lengths, first_values, 0 if layer is None else layer)
        out, state, conv, *values = self._checked(self.mix(x, before, tokens), x)
        length = before.length + (x.shape[1] if lengths is None else lengths)
        results = (out, *(() if cache is None else (MixerState(state, conv, length),)), *values)
        return results if len(results) > 1 else out

    def _checked(self, result, x):
        """The result of `mix`; ValueError for another number of values, or outputs of another shape."""
        values = len(result) if isinstance(result, tuple) else 0
        if values < 3 or jnp.shape(result[0])[:-1] != x.shape[:2]:
            found = f"outputs {list(jnp.shape(result[0]))}" if values > 2 else f"{values or 'no tuple of'} values"
            expected = f"(outputs {[*x.shape[:2], 'd']}, state, last inputs)"
            raise ValueError(f"{type(self).__name__}.mix returned {found}: expected {expected}")
        return result

    def mix(self, x, before: MixerState, tokens: Tokens):
        """(Outputs `[B, T, d]`, the state, the last inputs) after the tokens x `[B, T, F]`, from those before.

        A segment of `tokens.segments` begins from an empty state; tokens from `tokens.lengths` on do not change it.
        """
        raise TypeError(f"{type(self).__name__} defines no mix(x, before, tokens): write it in the subclass")

    def empty(self, batch: int, features: int):
        """The state and the last inputs before the first token, zeros."""
        return None, None

    @classmethod
    def of_model(cls, model, *, dtype: DType | None = None, parent=None, **fields) -> "CausalMixer":
        """The layer of a `GPT`, or of `config.model`; `fields` are defaults besides the module's, if it has them."""
        names = set(cls.reads) - {"heads"}
        read = {name: value for name in names if (value := getattr(group(model, "recurrence"), name)) is not None}
        known = {field.name for field in dataclasses.fields(cls)}
        fields = {name: value for name, value in (fields | {"dtype": dtype}).items() if name in known}
        return cls(**fields | read, parent=parent)

    def empty_cache(self, batch: int, features: int) -> MixerState:
        """The state before the first token, zeros; `features` is the input's width."""
        state, conv = self.empty(batch, features)
        return MixerState(state, conv, jnp.zeros((batch,), jnp.int32))


class RecurrentMixer(CausalMixer):
    """A mixer whose core is `linear_recurrence`, with the projections that they have in common.

    Projections have the names and shapes of `MultiHeadAttention`'s, `query/kernel` `[F, H, K]` to `out/kernel`
    `[HV, V, F]`, so one optimizer and one sharding serve both.

    Attributes:
      num_heads: H.
      key_dim: K; None for input width / H.
      value_dim: V; None for input width / H.
      kernel_init, out_kernel_init: initializers; `out_kernel_init` None for `kernel_init`.
      dtype: type of the computation; the input's when None. Decays and states are float32.

    A subclass projects with `_dense`, calls `_recur`, and projects back with `_out`:

    >>> class Decaying(RecurrentMixer):
    ...     def mix(self, x, before, tokens):
    ...         size = (self.num_heads, self.key_features(x.shape[-1]))
    ...         q, k, v = (self._dense(name, *size)(x) for name in ("query", "key", "value"))
    ...         z, state = self._recur(q, k, v, before.state, tokens, g=jnp.full(v.shape[:-1], -0.1))
    ...         return self._out(z, x.shape[-1]), state, None
    >>> block = Block(Decaying(num_heads=2), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    num_heads: int = 1
    key_dim: int | None = None
    value_dim: int | None = None
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    out_kernel_init: nn.initializers.Initializer | None = None
    dtype: DType | None = None

    operator: ClassVar[str | None] = "linear_recurrence"

    @classmethod
    def of_model(cls, model, **fields):
        return super().of_model(model, num_heads=cls.heads_of(model), **fields)

    @classmethod
    def heads_of(cls, model) -> int:
        """H of the layer of a `GPT`."""
        return group(model, "recurrence").heads or model.num_heads

    @property
    def states(self) -> int:
        """HV, the heads of the values, each with a state."""
        return self.num_heads

    def key_features(self, features: int) -> int:
        """K."""
        return self.key_dim or _share(features, self.num_heads)

    def value_features(self, features: int) -> int:
        """V."""
        return self.value_dim or _share(features, self.num_heads)

    def empty(self, batch, features):
        shape = (batch, self.states, self.key_features(features), self.value_features(features))
        if self.states % self.num_heads:
            raise ValueError(f"value_heads = {self.states} is not a multiple of num_heads = {self.num_heads}")
        return jnp.zeros(shape, self._wide), None

    @property
    def _wide(self):
        """The type of states: float32, and float64 for this `dtype`."""
        return jnp.promote_types(self.dtype or jnp.float32, jnp.float32)

    def _dense(self, name, *features, use_bias=False, **options):
        """A linear layer to heads and features, or to `features` alone."""
        return projections.dense(self, name, *features, use_bias=use_bias, **options)

    def _recur(self, q, k, v, state, tokens: Tokens, *, after: Callable | None = None, **terms):
        """(What `out` projects, `[B, T, HV, V]`, and the state after the tokens), with the taps of `attnlab.see`.

        `after` takes the recurrence's output to what is projected; None where it is that. The pattern is the
        recurrence's output for values that are the identity: what it reads of these tokens' values.
        """
        q, k, v = (sharding.constrain(x, "batch", "length", "heads", None) for x in (q, k, v))
        q, k, v = (taps.tap(self, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
        options = {**terms, "segment_ids": tokens.segments, "lengths": tokens.lengths}
        recurrence = functools.partial(self._recurrence, q, k, **options)
        z, state = recurrence(v, state=state)

        def pattern(rows):
            batch, length, heads, _ = v.shape
            identity = jnp.broadcast_to(jnp.eye(length)[:, None], (batch, length, heads, length))
            weights = jnp.moveaxis(recurrence(identity)[0], 1, 2)
            return weights if rows is None else jnp.take(weights, rows, axis=-2)

        z = taps.attended(self, lambda: z, pattern, v, after=after)
        return sharding.constrain(z, "batch", "length", "heads", None), state

    def _recurrence(self, q, k, v, **options):
        """(Output `[B, T, HV, V]`, the state after the tokens)."""
        return linear_recurrence(q, k, v, return_state=True, **options)

    def _out(self, z, features):
        """The projection of `[B, T, HV, V]` to `[B, T, features]`."""
        return projections.out(self, features, use_bias=False)(z)


def last(x: Float[Array, "B N ..."], count: int, lengths: Int[Array, " B"] | None):
    """The last `count` of the first `count + lengths` inputs of each sequence, of all where lengths are None."""
    if lengths is None:
        return x[:, x.shape[1] - count :]
    return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, count))(x, lengths)


def _share(features: int, heads: int) -> int:
    if heads < 1 or features % heads:
        raise ValueError(f"num_heads = {heads}: expected a divisor of the input width {features}, or sizes of a head")
    return features // heads


def _described(cache) -> str:
    """The type of a cache and the shapes of its arrays, in words."""
    return f"{type(cache).__name__} of {', '.join(str(jnp.shape(x)) for x in jax.tree.leaves(cache))}"
