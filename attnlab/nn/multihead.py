"""Multi-head attention and its key-value cache."""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from attnlab.nn import checks, sharding, taps
from attnlab.nn.norms import make_norm
from attnlab.nn.positions import within_segments
from attnlab.nn.rotations import Rotary, rotary
from attnlab.ops import products
from attnlab.ops.attention import attention, attention_weights
from attnlab.ops.masks import Padding, Segments, join
from attnlab.ops.score_mods import Forget
from attnlab.types import Array, DType


class KVCache(NamedTuple):
    """Keys and values of the previous positions, for decoding; a plain pytree.

    A ring buffer: position p is stored in slot p mod S. While the length of a sequence is at most the capacity S, a
    step attends to all previous positions and gives the same result as the full pass. Beyond that the newest S
    positions are kept. A step of several tokens then overwrites keys that its first query should attend to, so decode
    one token at a time.

    Attributes:
      key: `[B, S, Hk, D]`, in any floating type; keys and values are cast to it.
      value: `[B, S, Hk, D]`.
      length: int32 `[B]`, number of positions so far. Lower it to discard the newest, e.g. a prompt's right padding.
      forget: `[B, S, H]`, of a forget gate the running sum at each position, less a number for each head that is the
        same for all; None without the gate.

    >>> cache = KVCache.empty(batch=2, capacity=8, kv_heads=1, head_dim=4)
    >>> cache = cache.extend(jnp.ones((2, 3, 1, 4)), jnp.ones((2, 3, 1, 4)))
    >>> cache._replace(length=jnp.array([1, 3])).positions()[:, :4]
    Array([[ 0, -7, -6, -5],
           [ 0,  1,  2, -5]], dtype=int32)
    """

    key: Float[Array, "B S Hk D"]
    value: Float[Array, "B S Hk D"]
    length: Int[Array, " B"]
    forget: Float[Array, "B S H"] | None = None

    @classmethod
    def empty(
        cls,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype=jnp.float32,
        *,
        forget_heads: int | None = None,
    ) -> "KVCache":
        """An empty cache for `capacity` S positions, with keys and values of type `dtype`.

        `forget_heads` is the number of query heads H of a layer with a forget gate, whose sums are at least float32.
        """
        shape, wide = (batch, capacity, kv_heads, head_dim), jnp.promote_types(dtype, jnp.float32)
        forget = None if forget_heads is None else jnp.zeros((batch, capacity, forget_heads), wide)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((batch,), jnp.int32), forget)

    @property
    def capacity(self) -> int:
        """S, the number of positions kept."""
        return self.key.shape[1]

    def positions(self) -> Int[Array, "B S"]:
        """The position stored in each slot, negative for empty slots."""
        newest = self.length[:, None] - 1
        return newest - (newest - jnp.arange(self.capacity)) % self.capacity

    def extend(
        self,
        key: Float[Array, "B T Hk D"],
        value: Float[Array, "B T Hk D"],
        forget: Float[Array, "B T H"] | None = None,
    ) -> "KVCache":
        """Append T positions; ValueError where T exceeds the capacity.

        `forget` is the running sum of log forget gates, counted from the newest position of the cache.
        """
        new = key.shape[1]
        if new > self.capacity:
            raise ValueError(
                f"{new} tokens do not fit a cache of {self.capacity}: prefill only the last {self.capacity}"
            )

        def write(kept, fresh):
            # Sequences may differ in length, so each is written at its own slots.
            slots = (self.length[:, None] + jnp.arange(new)) % self.capacity
            set_slots = jax.vmap(lambda row, at, x: row.at[at].set(x.astype(row.dtype), unique_indices=True))
            return set_slots(kept, slots, fresh)

        if forget is not None:
            forget = write(self._forget_since_newest(), forget)
        return KVCache(write(self.key, key), write(self.value, value), self.length + new, forget)

    def _forget_since_newest(self):
        """The sums less the newest position's: however long the text, they stay small, and near keys' exact."""
        newest = ((self.length - 1) % self.capacity)[:, None, None]
        start = jnp.take_along_axis(self.forget, newest, axis=1)
        return self.forget - jnp.where(self.length[:, None, None] > 0, start, 0)


def check_cache(cache: KVCache, batch: int, kv_heads: int, head_dim: int, name: str = "cache") -> None:
    """Raise ValueError unless a cache fits the keys and values of a call."""
    if not isinstance(cache, KVCache):
        raise ValueError(f"{name} is a {type(cache).__name__}: expected a KVCache, see KVCache.empty")
    expected = (batch, *jnp.shape(cache.key)[1:2], kv_heads, head_dim)
    remedy = f"make it with KVCache.empty(batch={batch}, capacity=..., kv_heads={kv_heads}, head_dim={head_dim})"
    for field, shape in (("key", expected), ("value", expected), ("length", (batch,))):
        array = getattr(cache, field)
        if jnp.shape(array) != shape:
            raise ValueError(f"{name}.{field} has shape {jnp.shape(array)}, expected {shape}: {remedy}")
        kind, article = (jnp.integer, "an integer") if field == "length" else (jnp.floating, "a floating")
        if not jnp.issubdtype(array.dtype, kind):
            raise ValueError(f"{name}.{field} has type {array.dtype}, expected {article} type: {remedy}")


def check_forget(cache: KVCache, heads: int | None) -> None:
    """Raise ValueError unless a cache has the sums of `heads` forget gates, or none where `heads` is None."""
    expected = None if heads is None else (*jnp.shape(cache.key)[:2], heads)
    found = None if cache.forget is None else jnp.shape(cache.forget)
    if found != expected:
        raise ValueError(
            f"cache.forget has shape {found}, expected {expected}: make it with KVCache.empty(..., "
            f"forget_heads={heads}), as forget_gate = {heads is not None}"
        )
    if heads is not None and cache.forget.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(f"cache.forget has type {cache.forget.dtype}, expected float32 or float64: KVCache.empty")


def check_segments(segments, tokens, **excluded) -> None:
    """Raise ValueError unless `segments` are `[B, T]`, like tokens, and all other arguments are None."""
    if segments is None:
        return
    if not isinstance(segments, jax.Array | np.ndarray) or not jnp.issubdtype(segments.dtype, jnp.integer):
        kind = getattr(segments, "dtype", type(segments).__name__)
        raise ValueError(f"segments is {kind}, expected an integer array: the number of each token's document")
    if jnp.shape(segments) != jnp.shape(tokens)[:2]:
        raise ValueError(
            f"segments has shape {jnp.shape(segments)}, expected {jnp.shape(tokens)[:2]}: the number of each token's "
            "document"
        )
    for name, value in excluded.items():
        if value is not None:
            raise ValueError(f"segments are of whole sequences, whose positions they tell: leave out {name}")


def check_lengths(lengths, tokens, **excluded) -> None:
    """Raise ValueError unless `lengths` are integers `[B]`, and all other arguments are None."""
    if lengths is None:
        return
    if not jnp.issubdtype(jnp.result_type(lengths), jnp.integer) or jnp.shape(lengths) != jnp.shape(tokens)[:1]:
        raise ValueError(
            f"lengths has shape {jnp.shape(lengths)} and type {jnp.result_type(lengths)}, expected integers "
            f"{jnp.shape(tokens)[:1]}: the tokens of each sequence that are not padding"
        )
    for name, value in excluded.items():
        if value is not None:
            raise ValueError(f"lengths are of a sequence that attends to itself: leave out {name}, or give a mask")


class MultiHeadAttention(checks.MaskedModule):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2): Concat(head_1, …, head_H) W_O.

    Each head projects the full input; head i equals a `Head` with slice i of the parameters. Parameters have the names
    and shapes of `flax.linen.MultiHeadDotProductAttention`: `query/kernel` `[F, H, D]`, `key/kernel` and
    `value/kernel` `[F, Hk, D]`, `out/kernel` `[H, D, F]`, and biases, so checkpoints are interchangeable.

    Attributes:
      num_heads: H.
      head_dim: D; None for input width / H.
      out_features: width of the output; None for the input's.
      kv_heads: Hk, key and value heads; None for H. Must divide H (grouped queries, Ainslie et al. 2023).
      use_bias: whether the projections add a bias.
      qkv_bias: whether the query, key and value projections do; None for `use_bias`.
      mask: which keys each query may attend to; and-ed with the mask of the call. A bool array counts as
        `masks.Dense`. Pass masks with traced arrays to the call.
      score_mod, impl: see `attnlab.attention`.
      dropout_rate: probability of dropping an attention weight.
      rotary: rotary positions of queries and keys, or their base alone; None for no rotary positions.
      rotary_base: an older name of `rotary`.
      qk_norm: normalize queries and keys over D, without biases (`query_ln`, `key_ln`, like Flax's `normalize_qk`).
      qk_norm_joint: over the features of all heads of a token together (OLMo Team 2024, section 3.2).
      norm, norm_epsilon: of `qk_norm`: "layer", "rms" or "rms_plus_one", and ε.
      scale: of the scores; None for 1/√D.
      value_residual: mix the values with the first layer's values (Zhou et al. 2024, equation 5), by a learned
        share `value_share` that starts at ½.
      sinks: one learned extra logit per head, `sinks` `[H]`.
      forget_gate: add c_i − c_j to the scores after other score mods, c the running sum of log σ(forget(x)) over the
        tokens in their order in the array, computed in float32 (Lin et al. 2025, section 3); `forget/kernel` `[F, H]`
        and `forget/bias` `[H]`. Meant for a causal mask without rotary positions. Self-attention only.
      output_gate: multiply the heads' outputs by σ(gate(x)) (Qiu et al. 2025, section 2.2), `gate/kernel` `[F, H, D]`,
        with a bias where queries have one.
      kernel_init, out_kernel_init: initializers; `out_kernel_init` None for `kernel_init`.
      dtype: type of the computation; the input's when None.

    With `mutable=["intermediates"]` the weights `[B, H, Tq, Tk]` are sown as `attention_weights`.

    >>> module = MultiHeadAttention(num_heads=4, mask=Causal())
    >>> x = jnp.ones((2, 5, 8))  # [batch, length, features]
    >>> params = module.init(jax.random.key(0), x)
    >>> jax.jit(module.apply)(params, x).shape
    (2, 5, 8)
    >>> params["params"]["query"]["kernel"].shape
    (8, 4, 2)
    """

    num_heads: int
    head_dim: int | None = None
    out_features: int | None = None
    kv_heads: int | None = None
    use_bias: bool = True
    qkv_bias: bool | None = None
    mask: checks.MaskLike | None = None
    score_mod: object = None
    dropout_rate: float = 0.0
    rotary: float | Rotary | None = None
    qk_norm: bool = False
    sinks: bool = False
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    out_kernel_init: nn.initializers.Initializer | None = None
    dtype: DType | None = None
    impl: str = "auto"
    qk_norm_joint: bool = False
    norm: str = "layer"
    norm_epsilon: float = 1e-6
    scale: float | None = None
    value_residual: bool = False
    rotary_base: float | Rotary | None = None
    forget_gate: bool = False
    output_gate: bool = False

    def __post_init__(self):
        if self.rotary_base is not None:
            self.rotary, self.rotary_base = self.rotary_base, None
        super().__post_init__()

    @checks.compact
    def __call__(
        self,
        inputs_q: Float[Array, "B Tq F"],
        inputs_kv: Float[Array, "B Tk Fk"] | None = None,
        *,
        mask: checks.MaskLike | None = None,
        deterministic: bool = True,
        cache: KVCache | None = None,
        positions: Int[Array, "..."] | None = None,
        segments: Int[Array, "B Tq"] | None = None,
        lengths: Int[Array, " B"] | None = None,
        dropout_key: Array | None = None,
        first_values: Float[Array, "B Tk Hk D"] | None = None,
    ) -> Float[Array, "B Tq Fo"] | tuple[Any, ...]:
        """Self-attention, or cross-attention from `inputs_q` to `inputs_kv`.

        Args:
          inputs_q: `[B, Tq, F]`.
          inputs_kv: `[B, Tk, Fk]`, the memory of cross-attention; None for self-attention.
          mask: and-ed with the field, e.g. `masks.Padding(lengths)`. With a cache, its keys are the cache's S slots.
          deterministic: False to drop attention weights.
          cache: previous keys and values, which this step's are appended to. Self-attention only.
          positions: `[Tq]` or `[B, Tq]`, positions in the sequence; `arange` when None. Not with a cache, which counts.
          segments: `[B, Tq]`, the number of each token's document, where sequences are several documents, one after
            another. A token attends to its own document alone, and rotary positions start again with each. Masks and
            score mods see positions in the sequence: their distances are those within the document. Self-attention
            without a cache or `positions` only.
          lengths: `[B]`, the tokens of each sequence: the others, at the right, are padding that no token sees and that
            a cache does not keep. Self-attention only.
          dropout_key: one key, or one per example `[B]`; the `dropout` rng when None.
          first_values: `[B, Tk, Hk, D]`, the values of the first layer, for `value_residual`; None in that layer.

        Returns:
          `[B, Tq, out_features]`; with a cache also the extended cache, and with `value_residual` also the values,
          `[B, Tk, Hk, D]`.

        Raises:
          ValueError: a width or head counts that do not divide, a cache of another size or with `inputs_kv` or
            `positions`, `segments` of another shape or with one of these, `rotary` or `forget_gate` with `inputs_kv`,
            and any error of `attnlab.attention`.
          flax.errors.InvalidRngError: dropout is on, but there is neither `dropout_key` nor a `dropout` rng.
        """
        self._check(inputs_q, inputs_kv, cache, positions)
        check_segments(segments, inputs_q, inputs_kv=inputs_kv, cache=cache, positions=positions)
        check_lengths(lengths, inputs_q, inputs_kv=inputs_kv)
        if cache is not None:
            positions = cache.length[:, None] + jnp.arange(inputs_q.shape[1])
        q, k, v = self._project(inputs_q, inputs_kv, positions if segments is None else within_segments(segments))
        if self.value_residual:  # the first layer has the parameter as well, so that layers can be stacked
            share = self.param("value_share", nn.initializers.constant(0.5), ()).astype(v.dtype)
            v = v if first_values is None else v + share * (first_values - v)
        q, k, v = (taps.tap(self, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
        values = (v,) if self.value_residual else ()
        mask = mask if segments is None else join(mask, Segments(segments))
        mask = mask if lengths is None or cache is not None else join(mask, Padding(lengths))
        mask, kv_positions = join(self.mask, mask), positions if inputs_kv is None else None
        forget, kv_forget = self._forget_sums(inputs_q) if self.forget_gate else None, None
        if cache is not None:
            cache = cache.extend(k, v, forget)
            k, v, kv_positions, kv_forget = cache.key, cache.value, cache.positions(), cache.forget
            mask = join(mask, Padding(cache.length))
            if lengths is not None:
                cache = cache._replace(length=cache.length - inputs_q.shape[1] + lengths)
        terms = {"mask": mask, "q_positions": positions, "kv_positions": kv_positions}
        terms["score_mod"] = self.score_mod if forget is None else (*self._score_mods(), Forget(forget, kv_forget))
        gate = nn.sigmoid(self._heads(inputs_q, self.num_heads, "gate", q.shape[-1])) if self.output_gate else None
        out = self._attend(q, k, v, terms, gate, deterministic, dropout_key)
        out = self._out(out, self.out_features or inputs_q.shape[-1])
        results = (out, *(() if cache is None else (cache,)), *values)
        return results if len(results) > 1 else out

    def _out(self, z, features):
        """The output projection of the heads."""
        return nn.DenseGeneral(
            features,
            axis=(-2, -1),
            use_bias=self.use_bias,
            dtype=self.dtype,
            kernel_init=self.out_kernel_init or self.kernel_init,
            name="out",
            dot_general=products.dot_general,
        )(z)

    def _check(self, inputs_q, inputs_kv, cache, positions) -> None:
        width, kv_heads = inputs_q.shape[-1], self.kv_heads or self.num_heads
        if self.head_dim is None and width % self.num_heads:
            raise ValueError(f"width {width} is not divisible by {self.num_heads} heads: change one, or give head_dim")
        if self.num_heads % kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} must be a multiple of kv_heads = {kv_heads}")
        if self.rotary is not None and inputs_kv is not None:
            raise ValueError("rotary needs queries and keys of one sequence: leave it None for cross-attention")
        if self.forget_gate and inputs_kv is not None:
            raise ValueError("forget_gate needs queries and keys of one sequence: leave it out for cross-attention")
        if cache is None:
            return
        if inputs_kv is not None:
            raise ValueError("cache is for self-attention: leave out inputs_kv, or the cache")
        if positions is not None:
            raise ValueError("a cache counts positions by itself: leave out positions, or set cache.length")
        check_cache(cache, inputs_q.shape[0], kv_heads, self.head_dim or width // self.num_heads)
        check_forget(cache, self.num_heads if self.forget_gate else None)

    def _project(self, inputs_q, inputs_kv, positions):
        """Queries, keys and values `[B, T, heads, D]`, with normalization and rotary positions applied."""
        memory = inputs_q if inputs_kv is None else inputs_kv
        head_dim, kv_heads = self.head_dim or inputs_q.shape[-1] // self.num_heads, self.kv_heads or self.num_heads
        q = self._heads(inputs_q, self.num_heads, "query", head_dim)
        k = self._heads(memory, kv_heads, "key", head_dim)
        v = self._heads(memory, kv_heads, "value", head_dim)
        if self.qk_norm:
            q, k = self._normalize(q, "query_ln"), self._normalize(k, "key_ln")
        if self.rotary is not None:
            positions = jnp.arange(q.shape[1]) if positions is None else positions
            q, k = rotary(q, positions, self.rotary), rotary(k, positions, self.rotary)
        q = sharding.constrain(q, "batch", "length", "heads", None)
        return q, *(sharding.constrain(x, "batch", "length", "kv_heads", None) for x in (k, v))

    def _heads(self, x, heads, name, head_dim):
        """A projection `[B, T, heads, head_dim]`."""
        return nn.DenseGeneral(
            (heads, head_dim),
            use_bias=self.use_bias if self.qkv_bias is None else self.qkv_bias,
            dtype=self.dtype,
            kernel_init=self.kernel_init,
            name=name,
            dot_general=products.dot_general,
        )(x)

    def _forget_sums(self, x):
        """Running sums `[B, T, H]` of log forget gates."""
        wide = jnp.promote_types(x.dtype, jnp.float32)
        options = {"dtype": wide, "kernel_init": self.kernel_init, "dot_general": products.dot_general}
        gates = nn.Dense(self.num_heads, name="forget", **options)(x)
        gates = sharding.constrain(gates, "batch", "length", "heads")
        return jnp.cumsum(nn.log_sigmoid(gates), axis=-2)

    def _score_mods(self) -> tuple:
        if self.score_mod is None:
            return ()
        return self.score_mod if isinstance(self.score_mod, tuple) else (self.score_mod,)

    def _normalize(self, x, name):
        norm = make_norm(self.norm, self.norm_epsilon, use_bias=False, dtype=self.dtype, name=name)
        return norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape) if self.qk_norm_joint else norm(x)

    def _attend(self, q, k, v, terms, gate, deterministic, dropout_key):
        """Apply the operator to projected heads, times `gate`, and sow the attention weights."""
        sinks = self.param("sinks", nn.initializers.zeros, (self.num_heads,)) if self.sinks else None
        terms = {**terms, "sinks": sinks, "scale": self.scale}
        weights = functools.partial(attention_weights, q, k, **terms)
        if self.is_mutable_collection("intermediates"):
            self.sow("intermediates", "attention_weights", weights())
        drops = bool(self.dropout_rate) and not deterministic
        if drops:
            key = self.make_rng("dropout") if dropout_key is None else dropout_key
            terms |= {"dropout_rate": self.dropout_rate, "dropout_key": key}
        k, v = k.astype(q.dtype), v.astype(q.dtype)
        attend = functools.partial(attention, q, k, v, impl=self.impl, **terms)
        after = None if gate is None else lambda z: z * gate
        out = taps.attended(self, attend, lambda rows: weights(rows=rows), v, after=after, drops=drops)
        return sharding.constrain(out, "batch", "length", "heads", None)
