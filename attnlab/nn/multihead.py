"""Multi-head attention with split weights, and its key-value cache."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from attnlab.nn.norms import LayerNorm
from attnlab.nn.positions import rotary
from attnlab.ops import products
from attnlab.ops.attention import attention, attention_weights
from attnlab.ops.masks import Mask, Padding, join
from attnlab.types import Array, DType


class KVCache(NamedTuple):
    """Keys and values of the positions seen so far, for decoding; a plain pytree.

    A ring: position p stands in slot p mod S. While a row's length is at most the capacity S, a step sees all that
    went before, and gives the same answer as the full pass. Past it the newest S positions remain; a step of several
    tokens then overwrites what its first query could still see, so take steps of one.

    Attributes:
      key: `[B, S, Hk, D]`.
      value: `[B, S, Hk, D]`.
      length: int32 `[B]`, positions seen so far. Set it back to forget the newest (e.g. right padding of a prefill).

    >>> cache = KVCache.empty(batch=2, capacity=8, kv_heads=1, head_dim=4)
    >>> cache = cache.extend(jnp.ones((2, 3, 1, 4)), jnp.ones((2, 3, 1, 4)))
    >>> cache._replace(length=jnp.array([1, 3])).positions()[:, :4]
    Array([[ 0, -7, -6, -5],
           [ 0,  1,  2, -5]], dtype=int32)
    """

    key: Float[Array, "B S Hk D"]
    value: Float[Array, "B S Hk D"]
    length: Int[Array, " B"]

    @classmethod
    def empty(cls, batch: int, capacity: int, kv_heads: int, head_dim: int, dtype=jnp.float32) -> "KVCache":
        """A cache of `capacity` S positions that has seen nothing, its keys and values of type `dtype`."""
        shape = (batch, capacity, kv_heads, head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((batch,), jnp.int32))

    @property
    def capacity(self) -> int:
        """S, how many positions are kept.

        >>> KVCache.empty(batch=2, capacity=8, kv_heads=1, head_dim=4).capacity
        8
        """
        return self.key.shape[1]

    def positions(self) -> Int[Array, "B S"]:
        """The position that stands in each slot, negative where none does yet."""
        newest = self.length[:, None] - 1
        return newest - (newest - jnp.arange(self.capacity)) % self.capacity

    def extend(self, key: Float[Array, "B T Hk D"], value: Float[Array, "B T Hk D"]) -> "KVCache":
        """The cache after T more positions.

        Raises:
          ValueError: T is more than the capacity.
        """
        new = key.shape[1]
        if new > self.capacity:
            raise ValueError(f"{new} tokens do not fit a cache of {self.capacity}: prefill with the last ones only")

        def write(kept, fresh):
            # Rows may differ in length, so each writes at its own slots.
            slots = (self.length[:, None] + jnp.arange(new)) % self.capacity
            return jax.vmap(lambda row, at, x: row.at[at].set(x.astype(row.dtype), unique_indices=True))(
                kept, slots, fresh
            )

        return KVCache(write(self.key, key), write(self.value, value), self.length + new)


class MultiHeadAttention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, section 3.2.2): Concat(head_1, …, head_H) W_O.

    Every head projects the full input; head i is the `Head` with slice i of the parameters. Parameters have the names
    and shapes of `flax.linen.MultiHeadDotProductAttention`: `query/kernel` `[F, H, D]`, `key/kernel` and
    `value/kernel` `[F, Hk, D]`, `out/kernel` `[H, D, F]`, and biases, so checkpoints move between the two.

    Attributes:
      num_heads: H.
      head_dim: D; None for input width / H.
      out_features: width of the output; None for the input's.
      kv_heads: Hk, heads of keys and values; None for H. H must be a multiple (grouped queries, Ainslie et al. 2023).
      use_bias: whether the projections add a bias.
      qkv_bias: whether the first three do; None for `use_bias`.
      mask: who may look at whom, fixed and without arrays; and-ed with the mask of the call.
      score_mod, impl: see `attnlab.attention`.
      dropout_rate: probability that an attention weight drops.
      rotary_base: base of rotary positions on queries and keys; None for none.
      qk_norm: layer-normalise queries and keys over D (`query_ln`, `key_ln`, as flax's `normalize_qk`).
      sinks: one learned extra logit a head, `sinks` `[H]`.
      kernel_init, out_kernel_init: initialisers; `out_kernel_init` None for `kernel_init`.
      dtype: type of the computation; the input's when None.

    Under `mutable=["intermediates"]` the weights `[B, H, Tq, Tk]` are sown as `attention_weights`.

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
    mask: Mask | None = None
    score_mod: object = None
    dropout_rate: float = 0.0
    rotary_base: float | None = None
    qk_norm: bool = False
    sinks: bool = False
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    out_kernel_init: nn.initializers.Initializer | None = None
    dtype: DType | None = None
    impl: str = "auto"

    @nn.compact
    def __call__(
        self,
        inputs_q: Float[Array, "B Tq F"],
        inputs_kv: Float[Array, "B Tk Fk"] | None = None,
        *,
        mask: Mask | None = None,
        deterministic: bool = True,
        cache: KVCache | None = None,
        positions: Int[Array, "..."] | None = None,
        dropout_key: Array | None = None,
    ) -> Float[Array, "B Tq Fo"] | tuple[Float[Array, "B Tq Fo"], KVCache]:
        """Self-attention, or cross-attention from `inputs_q` to `inputs_kv`.

        Args:
          inputs_q: `[B, Tq, F]`.
          inputs_kv: `[B, Tk, Fk]`, the memory of cross-attention; None for self-attention.
          mask: and-ed with the field; the place for masks that hold arrays, e.g. `masks.Padding(lengths)`.
          deterministic: False drops weights.
          cache: keys and values so far; this step's are added. Self-attention only.
          positions: `[Tq]` or `[B, Tq]`, places in the sequence; `arange` when None. A cache counts by itself.
          dropout_key: one key, or one an example `[B]`; the `dropout` rng when None.

        Returns:
          `[B, Tq, out_features]`, and with a cache the extended cache.

        Raises:
          ValueError: a width that the heads do not divide, head counts that do not divide, a cache with `inputs_kv` or
            with `positions`, `rotary_base` with `inputs_kv`, and what `attnlab.attention` raises.
          flax.errors.InvalidRngError: weights drop, but there is neither `dropout_key` nor a `dropout` rng.
        """
        width = inputs_q.shape[-1]
        kv_heads = self.kv_heads or self.num_heads
        if self.head_dim is None and width % self.num_heads:
            raise ValueError(f"width {width} is not divisible by {self.num_heads} heads: change one, or give head_dim")
        if self.num_heads % kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} must be a multiple of kv_heads = {kv_heads}")
        if cache is not None and inputs_kv is not None:
            raise ValueError("cache is for self-attention: leave out inputs_kv, or the cache")
        if cache is not None and positions is not None:
            raise ValueError("a cache counts positions by itself: leave out positions, or set cache.length")
        memory = inputs_q if inputs_kv is None else inputs_kv
        head_dim = self.head_dim or width // self.num_heads

        def project(x, heads, name):
            return nn.DenseGeneral(
                (heads, head_dim),
                use_bias=self.use_bias if self.qkv_bias is None else self.qkv_bias,
                dtype=self.dtype,
                kernel_init=self.kernel_init,
                name=name,
                dot_general=products.dot_general,
            )(x)

        q = project(inputs_q, self.num_heads, "query")
        k = project(memory, kv_heads, "key")
        v = project(memory, kv_heads, "value")
        if self.qk_norm:
            q = LayerNorm(use_bias=False, dtype=self.dtype, name="query_ln")(q)
            k = LayerNorm(use_bias=False, dtype=self.dtype, name="key_ln")(k)

        if cache is not None:
            positions = cache.length[:, None] + jnp.arange(q.shape[1])
        kv_positions = positions if inputs_kv is None else None
        if self.rotary_base is not None:
            if inputs_kv is not None:
                raise ValueError("rotary_base compares places in one sequence: cross-attention has two, leave it None")
            places = jnp.arange(q.shape[1]) if positions is None else positions
            q, k = rotary(q, places, self.rotary_base), rotary(k, places, self.rotary_base)

        mask = join(self.mask, mask)
        if cache is not None:
            cache = cache.extend(k, v)
            k, v, kv_positions = cache.key, cache.value, cache.positions()
            mask = join(mask, Padding(cache.length))
        terms = {
            "mask": mask,
            "score_mod": self.score_mod,
            "sinks": self.param("sinks", nn.initializers.zeros, (self.num_heads,)) if self.sinks else None,
            "q_positions": positions,
            "kv_positions": kv_positions,
        }
        if self.is_mutable_collection("intermediates"):
            self.sow("intermediates", "attention_weights", attention_weights(q, k, **terms))
        if self.dropout_rate and not deterministic:
            terms |= {
                "dropout_rate": self.dropout_rate,
                "dropout_key": self.make_rng("dropout") if dropout_key is None else dropout_key,
            }
        out = attention(q, k.astype(q.dtype), v.astype(q.dtype), impl=self.impl, **terms)
        out = nn.DenseGeneral(
            self.out_features or width,
            axis=(-2, -1),
            use_bias=self.use_bias,
            dtype=self.dtype,
            kernel_init=self.out_kernel_init or self.kernel_init,
            name="out",
            dot_general=products.dot_general,
        )(out)
        return out if cache is None else (out, cache)
