"""Multi-head attention."""

import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from attnlab.nn import checks, projections, sharding, taps
from attnlab.nn.cache import KVCache, check_cache, check_forget, step
from attnlab.nn.checks import check_lengths, check_segments
from attnlab.nn.norms import make_norm
from attnlab.nn.positions import within_segments
from attnlab.nn.resolved import as_tuple, resolved, score_mods
from attnlab.nn.rotations import Rotary, rotary
from attnlab.ops.attention import attention, attention_weights
from attnlab.ops.cpu import products
from attnlab.ops.masks import Padding, Segments, join
from attnlab.ops.score_mods import Forget
from attnlab.types import Array, DType


class MultiHeadAttention(checks.MaskedModule):
    """Multi-head attention of queries from x to keys and values from y (Vaswani et al. 2017, section 3.2.2):

        head_i = attention(x W_Q[i], y W_K[i], y W_V[i])        x [B, Tq, F], y [B, Tk, Fk]
        out    = Concat(head_1, …, head_H) W_O                  head_i [B, Tq, D], out [B, Tq, F]

    Self-attention has y = x. With fewer key heads, H / Hk query heads share one. Head i equals a `Head` with slice i of
    the parameters. Parameters have the names and shapes of `flax.linen.MultiHeadDotProductAttention`: `query/kernel`
    `[F, H, D]`, `key/kernel` and `value/kernel` `[Fk, Hk, D]`, `out/kernel` `[H, D, F]`, and biases, so checkpoints are
    interchangeable.

    Attributes:
      num_heads: H.
      head_dim: D; None for input width / H.
      out_features: width of the output; None for the input's.
      kv_heads: Hk, key and value heads; None for H. Must divide H (grouped queries, Ainslie et al. 2023).
      use_bias: whether the projections add a bias.
      qkv_bias: whether the query, key and value projections add a bias; None for `use_bias`.
      mask: which keys each query may attend to; and-ed with the mask of the call. A bool array counts as
        `masks.Dense`. Pass masks with traced arrays to the call.
      score_mod, impl: see `attnlab.attention`.
      dropout_rate: probability of dropping an attention weight.
      rotary: rotary positions of queries and keys, or their base alone; None for no rotary positions.
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

    With `mutable=["intermediates"]` the weights `[B, H, Tq, Tk]` are sown as `attention_weights`; with a cache Tk is S,
    or S + Tq for several queries, by position from max(0, length − S).

    >>> module = MultiHeadAttention(num_heads=4, mask=Causal())
    >>> x = jnp.ones((2, 5, 8))  # [batch, length, features]
    >>> params = module.init(jax.random.key(0), x)
    >>> jax.jit(module.apply)(params, x).shape  # self-attention
    (2, 5, 8)
    >>> memory = jnp.ones((2, 7, 8))
    >>> MultiHeadAttention(num_heads=4).apply(params, x, memory).shape  # cross-attention, the same parameters
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
    forget_gate: bool = False
    output_gate: bool = False

    reads: ClassVar[frozenset[str]] = frozenset(
        (
            *("num_heads", "head_dim", "kv_heads", "attention_bias", "qkv_bias", "qk_norm", "qk_norm_joint"),
            *("soft_cap", "score_scale", "sinks", "output_gate", "value_residual", "impl", "mask", "score_mod"),
            *("rotary", "alibi"),
        )
    )  # the options of a `GPT` that `of_model` depends on
    operator: ClassVar[str | None] = "attention"  # in `attnlab`
    numbered: ClassVar[bool] = False  # whether it depends on the number of its layer

    @classmethod
    def of_model(cls, model, **fields) -> "MultiHeadAttention":
        """The layer of a `GPT`, or of `config.model`; `fields` are those that depend on the kind of layer."""
        sizes = resolved(model)
        norm = {"norm": model.norm, "norm_epsilon": model.norm_epsilon}
        options = {
            "num_heads": model.num_heads,
            "head_dim": sizes.head_dim,
            "kv_heads": sizes.kv_heads,
            "use_bias": sizes.attention_bias,
            "qkv_bias": sizes.qkv_bias,
            "score_mod": score_mods(model) or None,
            "dropout_rate": model.dropout,
            "qk_norm": model.qk_norm,
            "qk_norm_joint": model.qk_norm_joint,
            "scale": model.score_scale,
            "sinks": model.sinks,
            "value_residual": model.value_residual,
            "output_gate": model.output_gate,
            "impl": model.impl,
            "parent": None,
            **({} if model.norm == "layer" else norm),  # ε of layer norms is Flax's, 1e-6
        }
        return cls(**options | fields)

    def empty_cache(self, batch: int, features: int, capacity: int) -> KVCache:
        """An empty cache for `capacity` positions; `features` is the input's width."""
        dtype, forget_heads = self.dtype or jnp.float32, self.num_heads if self.forget_gate else None
        cache = KVCache.empty(batch, capacity, *self._of_keys(features), dtype, forget_heads=forget_heads)
        return cache._replace(value=jnp.zeros((batch, capacity, *self._of_values(features)), dtype))

    def operands(self, batch: int, length: int, features: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """q, k and v of the operator, for inputs of width `features`."""
        cache = jax.eval_shape(lambda: self.empty_cache(batch, features, length))
        q = jax.ShapeDtypeStruct((batch, length, self.num_heads, cache.key.shape[-1]), cache.key.dtype)
        return q, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (cache.key, cache.value))

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
        layer: Int[Array, ""] | int | None = None,
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
          layer: the number of the layer in its model, for subclasses that depend on it (`numbered`).

        Returns:
          `[B, Tq, out_features]`; with a cache also the extended cache, and with `value_residual` also the values,
          `[B, Tk, Hk, D]`.

        Raises:
          ValueError: a width or head counts that do not divide, a cache of another size or with `inputs_kv` or
            `positions`, `segments` of another shape or with one of these, `rotary` or `forget_gate` with `inputs_kv`,
            and any error of `attnlab.attention`.
          flax.errors.InvalidRngError: dropout is on, but there is neither `dropout_key` nor a `dropout` rng.
        """
        self._check(inputs_q, inputs_kv, cache, positions, layer)
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
            fresh = KVCache(k, v, None, forget)
            (k, v, _, kv_forget), kv_positions, mask, cache = step(cache, fresh, mask, self.num_heads, lengths)
        terms = {"mask": mask, "q_positions": positions, "kv_positions": kv_positions}
        mods = as_tuple(self.score_mod)
        terms["score_mod"] = mods if forget is None else (*mods, Forget(forget, kv_forget))
        gate = nn.sigmoid(self._heads(inputs_q, self.num_heads, "gate", q.shape[-1])) if self.output_gate else None
        if not deterministic and self.dropout_rate:
            key = self.make_rng("dropout") if dropout_key is None else dropout_key
            terms |= {"dropout_rate": self.dropout_rate, "dropout_key": key}
        out = self._attend(q, k, v, terms, gate, layer)
        out = projections.out(self, self.out_features or inputs_q.shape[-1], use_bias=self.use_bias)(out)
        results = (out, *(() if cache is None else (cache,)), *values)
        return results if len(results) > 1 else out

    def _of_keys(self, features: int) -> tuple[int, int]:
        """Heads and features of the keys."""
        return self.kv_heads or self.num_heads, self.head_dim or features // self.num_heads

    def _of_values(self, features: int) -> tuple[int, int]:
        """Heads and features of the values."""
        return self._of_keys(features)

    def _check(self, inputs_q, inputs_kv, cache, positions, layer) -> None:
        width, kv_heads = inputs_q.shape[-1], self.kv_heads or self.num_heads
        if layer is not None and not self.numbered:
            raise ValueError(f"layer is set, but {type(self).__name__} does not depend on it: leave it out")
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
        check_cache(cache, inputs_q.shape[0], *self._of_keys(width), value=self._of_values(width))
        check_forget(cache, self.num_heads if self.forget_gate else None)

    def _project(self, inputs_q, inputs_kv, positions):
        """Queries, keys and values `[B, T, heads, D]`, with normalization and rotary positions applied."""
        memory = inputs_q if inputs_kv is None else inputs_kv
        kv_heads, head_dim = self._of_keys(inputs_q.shape[-1])
        q = self._heads(inputs_q, self.num_heads, "query", head_dim)
        k = self._heads(memory, kv_heads, "key", head_dim)
        heads, features = self._of_values(inputs_q.shape[-1])
        v = self._heads(memory, heads, "value", features)
        if self.qk_norm:
            q, k = self._normalize(q, "query_ln"), self._normalize(k, "key_ln")
        if self.rotary is not None:
            positions = jnp.arange(q.shape[1]) if positions is None else positions
            q, k = rotary(q, positions, self.rotary), rotary(k, positions, self.rotary)
        q = sharding.constrain(q, "batch", "length", "heads", None)
        return q, *(sharding.constrain(x, "batch", "length", "kv_heads", None) for x in (k, v))

    def _heads(self, x, heads, name, head_dim):
        """A projection `[B, T, heads, head_dim]`."""
        use_bias = self.use_bias if self.qkv_bias is None else self.qkv_bias
        return projections.dense(self, name, heads, head_dim, use_bias=use_bias)(x)

    def _forget_sums(self, x):
        """Running sums `[B, T, H]` of log forget gates."""
        wide = jnp.promote_types(x.dtype, jnp.float32)
        options = {"dtype": wide, "kernel_init": self.kernel_init, "dot_general": products.dot_general}
        gates = nn.Dense(self.num_heads, name="forget", **options)(x)
        gates = sharding.constrain(gates, "batch", "length", "heads")
        # Below −100 a gate forgets all, and the sums would lose the digits of what follows.
        return jnp.cumsum(jnp.maximum(nn.log_sigmoid(gates), -100.0), axis=-2)

    def _normalize(self, x, name):
        norm = make_norm(self.norm, self.norm_epsilon, use_bias=False, dtype=self.dtype, name=name)
        return norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape) if self.qk_norm_joint else norm(x)

    def _attend(self, q, k, v, terms, gate, layer):
        """Apply the operator to projected heads, times `gate`, and sow the attention weights."""
        sinks = self.param("sinks", nn.initializers.zeros, (self.num_heads,)) if self.sinks else None
        terms = {**terms, "sinks": sinks, "scale": self.scale}
        attend = functools.partial(attention, q, k.astype(q.dtype), v.astype(q.dtype), impl=self.impl, **terms)
        weights = functools.partial(attention_weights, q, k, **without_dropout(terms))
        return self._seen(attend, weights, v, None if gate is None else lambda z: z * gate, "dropout_rate" in terms)

    def _seen(self, attend, weights, v, after, drops):
        """The input of the output projection, with the taps of `attnlab.see`; `weights` takes `rows=`."""
        if self.is_mutable_collection("intermediates"):
            self.sow("intermediates", "attention_weights", weights())
        out = taps.attended(self, attend, lambda rows: weights(rows=rows), v, after=after, drops=drops)
        return sharding.constrain(out, "batch", "length", "heads", None)


def without_dropout(terms: dict) -> dict:
    """The arguments of `attention` that `attention_weights` takes as well."""
    return {name: value for name, value in terms.items() if not name.startswith("dropout")}
