"""Multi-head attention."""

import inspect
from collections.abc import Callable
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from attnlab.nn import checks, projections, sharding, taps
from attnlab.nn.cache import KVCache, step
from attnlab.nn.layer import Context, Layer, LayerConfig, LayerOut
from attnlab.nn.mixers.short_conv import convolve, inputs_before
from attnlab.nn.norms import make_norm
from attnlab.nn.positions import within_segments
from attnlab.nn.rotations import Rotary, rotary
from attnlab.ops.attention import attention, attention_weights, implementations
from attnlab.ops.checks import known_keywords
from attnlab.ops.cpu import products
from attnlab.ops.masks import Causal, Dense, Mask, Padding, Segments, SlidingWindow, join
from attnlab.ops.score_mods import ALiBi, Forget, ScoreFn, ScoreMod, ScoreMods, SoftCap, alibi_slopes
from attnlab.support.options import FieldError, option
from attnlab.types import Array, DType


class MultiHeadAttention(checks.MaskedModule, Layer):
    """Multi-head attention of queries from x to keys and values from y (Vaswani et al. 2017, section 3.2.2):

        head_i = attention(x W_Q[i], y W_K[i], y W_V[i])        x [B, Tq, F], y [B, Tk, Fk]
        out    = Concat(head_1, …, head_H) W_O                  head_i [B, Tq, D], out [B, Tq, F]

    Self-attention has y = x. If Hk < H, H / Hk query heads share a key head. Head i is a `Head` with slice i of the
    parameters. Parameters have the names and shapes of `flax.linen.MultiHeadDotProductAttention`: `query/kernel`
    `[F, H, D]`, `key/kernel` and `value/kernel` `[Fk, Hk, D]`, `out/kernel` `[H, D, F]`, and biases, so checkpoints are
    interchangeable.

    Attributes:
      num_heads: H.
      out_features: width of the output; None for the input's width.
      use_bias: whether the projections add a bias.
      mask: which keys each query may attend to; and-ed with the call's `mask`. A bool array counts as
        `masks.Dense`. Pass masks with traced arrays to the call.
      score_mod: see `attnlab.attention`; a function `fn(score, b, h, i, j)` counts as a `ScoreFn`.
      dropout_rate: probability of dropping an attention weight.
      rotary: how queries and keys are rotated, a `Rotary` or its base alone; None for no rotary positions.
      norm, norm_epsilon: for `qk_norm`, the kind of norm ("layer", "rms" or "rms_plus_one") and its ε.
      forget_gate: whether to add c_i − c_j to the scores after other score mods, where c is the running sum of log
        σ(forget(x)) over the tokens in array order, in float32 (Lin et al. 2025, section 3); `forget/kernel` `[F, H]`
        and `forget/bias` `[H]`. Meant for a causal mask without rotary positions. Self-attention only.
      kernel_init, out_kernel_init: initializers; `out_kernel_init` None for `kernel_init`.
      dtype: type of the computation; None for the input's type.

    With `mutable=["intermediates"]` the weights `[B, H, Tq, Tk]` are sown as `attention_weights`. With a cache, Tk is S
    for a single query; for several it is S + Tq, and the keys are in order of position from max(0, length − S).

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
    head_dim: int | None = option("features of a head, D; None for width / num_heads", None, low=1)
    out_features: int | None = None
    kv_heads: int | None = option(
        "key and value heads, Hk, a divisor of num_heads (Ainslie et al. 2023); None for num_heads", None, low=1
    )
    use_bias: bool = True
    qkv_bias: bool | None = option("biases of queries, keys and values; None for use_bias", None)
    mask: checks.MaskLike | None = None
    score_mod: object = None
    dropout_rate: float = 0.0
    rotary: float | Rotary | None = None
    qk_norm: bool = option(
        "normalize queries and keys over D, without biases (query_ln, key_ln), which keeps large learning rates stable",
        False,
    )
    sinks: bool = option("a learned extra logit for each head, sinks [H], see attnlab.attention", False)
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    out_kernel_init: nn.initializers.Initializer | None = None
    dtype: DType | None = None
    impl: str = option("backend of the operator", "auto", choices=("auto", *implementations()))
    qk_norm_joint: bool = option("qk_norm over the features of all heads together (OLMo Team 2024, 3.2)", False)
    norm: str = "layer"
    norm_epsilon: float = 1e-6
    scale: float | None = option("factor applied to attention logits; None for 1/√head_dim", None, low=1e-9, high=1e6)
    value_residual: bool = option(
        "mix the values with the first layer's (Zhou et al. 2024, equation 5), with a learned weight, ½ at first", False
    )
    forget_gate: bool = False
    output_gate: bool = option(
        "multiply head outputs by σ(gate(x)) (Qiu et al. 2025, section 2.2), gate/kernel [F, H, D]", False
    )
    conv: int = option(
        "kernel size W of a short causal convolution of queries, keys and values, before norms and positions (So et "
        "al. 2021, multi-DConv-head attention); 0 for none. Self-attention only; query_conv/kernel [W, H, D]",
        0,
        low=0,
    )

    operator: ClassVar[str | None] = "attention"

    def init_cache(self, batch: int, features: int, capacity: int = 0) -> KVCache:
        """An empty cache for `capacity` positions; `features` is the input's width."""
        dtype, forget_heads = self.dtype or jnp.float32, self.num_heads if self.forget_gate else None
        cache = KVCache.empty(batch, capacity, *self._of_keys(features), dtype, forget_heads=forget_heads)
        value = jnp.zeros((batch, capacity, *self._of_values(features)), dtype)
        return cache._replace(value=value, conv=inputs_before(self._sizes(features), self.conv, batch, dtype))

    def operands(self, batch: int, length: int, features: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the operator's q, k and v, for inputs of width `features`."""
        sizes, dtype = self._sizes(features).values(), self.dtype or jnp.float32
        return tuple(jax.ShapeDtypeStruct((batch, length, *size), dtype) for size in sizes)

    @known_keywords
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
    ) -> Float[Array, "B Tq Fo"] | tuple[Float[Array, "B Tq Fo"], KVCache]:
        """Compute self-attention, or cross-attention from `inputs_q` to `inputs_kv`.

        Args:
          inputs_q: `[B, Tq, F]`.
          inputs_kv: `[B, Tk, Fk]`, the memory of cross-attention; None for self-attention.
          mask: and-ed with `self.mask`, e.g. `masks.Padding(lengths)`. With a cache, its keys are the cache's S slots.
          deterministic: False to drop attention weights.
          cache: keys and values of the previous tokens; this call appends its own. Self-attention only.
          positions: `[Tq]` or `[B, Tq]`, positions in the sequence; None for `arange`, and with a cache, which counts.
          segments, lengths: see `Context`; self-attention only. Rotary positions restart with each segment; masks and
            score mods use positions in the sequence, because distances within a segment are the same in both.
          dropout_key: one key, or one per example `[B]`; the `dropout` rng when None.

        Returns:
          `[B, Tq, out_features]`; with a cache also the extended cache.

        Raises:
          ValueError: the width or head counts do not divide; a cache has a wrong size, or comes with `inputs_kv` or
            `positions`; `segments` have a wrong shape, or come with any of these three; `rotary`, `forget_gate` or
            `conv` is set with `inputs_kv`; any error of `attnlab.attention`.
          flax.errors.InvalidRngError: dropout is on, but there is neither `dropout_key` nor a `dropout` rng.
        """
        context = Context(mask, segments, lengths, positions, dropout_key)
        if inputs_kv is None:
            return self._checked_call(inputs_q, context, deterministic, cache)
        self._check_cross(cache)
        return self._checked_call(inputs_q, context, deterministic, cache, inputs_kv=inputs_kv)

    @nn.compact
    def forward(
        self,
        x: Float[Array, "B T F"],
        context: Context,
        cache: KVCache | None = None,
        inputs_kv: Float[Array, "B Tk Fk"] | None = None,
    ) -> LayerOut:
        """Run the steps `project`, `extend`, `attend` and `after`; a subclass may override any of them."""
        memory = x if inputs_kv is None else inputs_kv
        if cache is not None:
            context = context._replace(positions=cache.length[:, None] + jnp.arange(x.shape[1]))
        q, k, v, conv = self.project(x, memory, context, cache)
        q, k, new_values = (taps.tap(self, name, y) for name, y in (("q", q), ("k", k), ("v", v)))
        cache = None if cache is None else cache._replace(conv=conv)
        k, v, terms, cache = self.extend(x, k, new_values, context, cache)
        if inputs_kv is not None and cache is None:
            terms["kv_positions"] = None
        z, weights = self.attend(q, k, v, terms, context)
        z = seen(self, z, weights, v, "dropout_rate" in terms)
        z = self.after(z, new_values, x, context)
        out = projections.out(self, z, self.out_features or x.shape[-1], use_bias=self.use_bias)
        return LayerOut(out, cache, new_values if self.value_residual else None)

    def project(self, x, memory, context: Context, cache: KVCache | None):
        """Return queries of x, keys and values of `memory`, `[B, T, heads, D]`, and the convolutions' last inputs."""
        self.check_options()
        width, (kv_heads, _) = x.shape[-1], self._of_keys(x.shape[-1])
        if self.head_dim is None and width % self.num_heads:
            raise ValueError(f"width {width} is not divisible by {self.num_heads} heads: change one, or set head_dim")
        if self.num_heads % kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} must be a multiple of kv_heads = {kv_heads}")
        inputs = {"query": x, "key": memory, "value": memory}
        heads = {name: self._heads(inputs[name], name, size) for name, size in self._sizes(width).items()}
        heads, conv = convolve(heads, self.conv, None if cache is None else cache.conv, context, self.dtype)
        q, k, v = heads.values()
        if self.qk_norm:
            q, k = self._normalize(q, "query_ln"), self._normalize(k, "key_ln")
        if self.rotary is not None:
            positions = context.positions if context.segments is None else within_segments(context.segments)
            positions = jnp.arange(q.shape[1]) if positions is None else positions
            q, k = rotary(q, positions, self.rotary), rotary(k, positions, self.rotary)
        q = sharding.constrain(q, "batch", "length", "heads", None)
        k, v = (sharding.constrain(y, "batch", "length", "kv_heads", None) for y in (k, v))
        if self.value_residual:  # the first layer has the parameter as well, so that layers can be stacked
            share = self.param("value_share", nn.initializers.constant(0.5), ()).astype(v.dtype)
            v = v if context.first_values is None else v + share * (context.first_values - v)
        return q, k, v, conv

    def extend(self, x, k, v, context: Context, cache: KVCache | None):
        """Return keys and values, including the cache's, the operator's other arguments, and the extended cache."""
        mask, kv_positions = mask_of(self, context, cache), context.positions
        forget, kv_forget = self._forget_sums(x) if self.forget_gate else None, None
        if cache is not None:
            stored, fresh = cache._replace(conv=None), KVCache(k, v, None, forget)
            keys, kv_positions, mask, stored = step(stored, fresh, mask, self.num_heads, context.lengths)
            cache, (k, v, _, kv_forget, _) = stored._replace(conv=cache.conv), keys
        terms = {"mask": mask, "q_positions": context.positions, "kv_positions": kv_positions}
        mods = as_tuple(self.score_mod)
        terms["score_mod"] = mods if forget is None else (*mods, Forget(forget, kv_forget))
        return k, v, terms | dropout_of(self, context), cache

    def attend(self, q, k, v, terms: dict, context: Context):
        """Return the operator's output `[B, T, H, Dv]`, and a function from query rows to weights `[B, H, Rq, Tk]`."""
        sinks = self.param("sinks", nn.initializers.zeros, (self.num_heads,)) if self.sinks else None
        terms = {**terms, "sinks": sinks, "scale": self.scale}
        out = attention(q, k.astype(q.dtype), v.astype(q.dtype), impl=self.impl, **terms)
        return out, lambda rows=None: attention_weights(q, k, rows=rows, **without_dropout(terms))

    def after(self, z, v, x, context: Context):
        """Compute the input of the output projection from z `[B, T, H, Dv]` and these tokens' values v and inputs x."""
        gate = nn.sigmoid(self._heads(x, "gate", (self.num_heads, z.shape[-1]))) if self.output_gate else None
        return z if gate is None else z * gate

    def _of_keys(self, features: int) -> tuple[int, int]:
        """Heads and features of the keys."""
        return self.kv_heads or self.num_heads, self.head_dim or features // self.num_heads

    def _of_values(self, features: int) -> tuple[int, int]:
        """Heads and features of the values."""
        return self._of_keys(features)

    def _sizes(self, features: int) -> dict[str, tuple[int, int]]:
        """Heads and features of each projection."""
        keys = self._of_keys(features)
        return {"query": (self.num_heads, keys[1]), "key": keys, "value": self._of_values(features)}

    def _check_cross(self, cache) -> None:
        """Raise ValueError for a cache, or for options that cross-attention does not support."""
        if cache is not None:
            raise ValueError("cache is for self-attention: remove inputs_kv or the cache")
        for name in ("rotary", "forget_gate", "conv"):
            if getattr(self, name):
                raise ValueError(f"{name} needs queries and keys of one sequence: remove it for cross-attention")

    def _heads(self, x, name, size):
        """Project x to `[B, T, heads, D]`."""
        use_bias = self.use_bias if self.qkv_bias is None else self.qkv_bias
        return projections.dense(self, name, *size, use_bias=use_bias)(x)

    def _forget_sums(self, x):
        """Running sums `[B, T, H]` of log forget gates."""
        wide = jnp.promote_types(x.dtype, jnp.float32)
        options = {"dtype": wide, "kernel_init": self.kernel_init, "dot_general": products.dot_general}
        gates = nn.Dense(self.num_heads, name="forget", **options)(x)
        gates = sharding.constrain(gates, "batch", "length", "heads")
        # At −100 a log gate already forgets everything; lower values would cost the sums digits of later gates.
        return jnp.cumsum(jnp.maximum(nn.log_sigmoid(gates), -100.0), axis=-2)

    def _normalize(self, x, name):
        norm = make_norm(self.norm, self.norm_epsilon, use_bias=False, dtype=self.dtype, name=name)
        return norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape) if self.qk_norm_joint else norm(x)


class SoftmaxConfig(LayerConfig):
    """Base class of configs of softmax attention, to all tokens so far or to the last `window`.

    Attributes:
      mask: and-ed with the causal mask or the window.
      score_mod: one score mod or several, applied after the soft cap and ALiBi.
    """

    heads: int | None = option("query heads, H; None for num_heads", None, low=1)
    window: int | None = option("positions that a token attends to, including itself; None for all", None, low=1)
    use_bias: bool | None = option("biases of the projections; None for the model's use_bias", None)
    soft_cap: float | None = option(
        "limit on attention logits (Gemma Team 2024); None for no limit", None, low=1e-3, high=1e6
    )
    rotary: Rotary = Rotary()
    mask: checks.MaskLike | None = None
    score_mod: ScoreMods | None = None

    def __post_init__(self):
        if isinstance(self.mask, jax.Array | np.ndarray):
            object.__setattr__(self, "mask", Dense(self.mask))
        if self.score_mod is not None and "score_mod" in vars(self):
            object.__setattr__(self, "score_mod", as_tuple(self.score_mod))
        if self.mask is not None and not isinstance(self.mask, Mask):
            raise FieldError("mask", self.mask, "expected a mask, such as masks.PrefixLM(4)")
        if not all(isinstance(mod, ScoreMod) for mod in as_tuple(self.score_mod)):
            raise FieldError("score_mod", self.score_mod, "expected score mods, or functions of (score, b, h, i, j)")
        super().__post_init__()

    def shared(self, model):
        heads, mask = self.num_heads(model), Causal() if self.window is None else SlidingWindow(left=self.window - 1)
        cap = () if self.soft_cap is None else (SoftCap(self.soft_cap),)
        alibi = (ALiBi(alibi_slopes(heads)),) if model.position_encoding == "alibi" else ()
        return super().shared(model) | {
            "num_heads": heads,
            "use_bias": model.use_bias if self.use_bias is None else self.use_bias,
            "mask": join(mask, self.mask),
            "score_mod": (*cap, *alibi, *as_tuple(self.score_mod)) or None,
            "rotary": self.rotary if model.position_encoding == "rotary" else None,
            "dropout_rate": model.dropout,
            "kernel_init": model.kernel_init,
            "out_kernel_init": model.out_kernel_init,
        }

    def num_heads(self, model) -> int:
        """H, the layer's number of heads in a model."""
        return self.heads or model.num_heads

    def check(self, model):
        super().check(model)
        if self.rotary is not None and model.position_encoding == "rotary":
            try:
                self.rotary.check(self.rotated_features(model))
            except FieldError as error:
                raise error.within("rotary").within(self.kind) from None


class AttentionConfig(SoftmaxConfig, of=MultiHeadAttention, kind="attention"):
    """Softmax attention."""

    qk_norm: bool = True

    def shared(self, model):
        shared, heads = super().shared(model), self.num_heads(model)
        norm = {} if model.norm == "layer" else {"norm": model.norm, "norm_epsilon": model.norm_epsilon}
        return (
            shared
            | norm
            | {  # norms of kind "layer" keep Flax's ε, 1e-6
                "head_dim": self.head_dim or model.width // heads,
                "kv_heads": self.kv_heads or heads,
                "qkv_bias": shared["use_bias"] if self.qkv_bias is None else self.qkv_bias,
            }
        )

    def rotated_features(self, model) -> int:
        """D, the number of features of a head."""
        return self.head_dim or model.width // self.num_heads(model)

    def check(self, model):
        heads, width = self.num_heads(model), model.width
        if self.head_dim is None and width % heads:
            near = max(1, round(width / heads)) * heads
            expected = f"expected a multiple of num_heads = {heads}, e.g. {near}; or set {self.kind}.head_dim"
            raise FieldError("width", width, expected)
        if self.kv_heads and heads % self.kv_heads:
            expected = f"expected a divisor of num_heads = {heads}, e.g. 1"
            raise FieldError(f"{self.kind}.kv_heads", self.kv_heads, expected)
        if self.qk_norm_joint and not self.qk_norm:
            raise FieldError(f"{self.kind}.qk_norm_joint", True, "expected False, as qk_norm is False; or set both")
        super().check(model)


class LocalConfig(AttentionConfig, kind="local"):
    """Attention to the last `window` tokens, as a separate kind that can alternate with full attention."""

    def check(self, model):
        if self.window is None:
            raise FieldError("local.window", None, "expected the positions that a token attends to")
        super().check(model)


class ForgetConfig(AttentionConfig, kind="forget"):
    """Attention with a forget gate in place of rotary positions (Lin et al. 2025)."""

    rotary: ClassVar[None] = None

    def shared(self, model):
        return super().shared(model) | {"forget_gate": True, "rotary": None}


def as_tuple(score_mod) -> tuple[ScoreMod, ...]:
    """Convert a score mod, several, or None to a tuple; functions `fn(score, b, h, i, j)` become `ScoreFn`."""
    mods = () if score_mod is None else score_mod if isinstance(score_mod, tuple) else (score_mod,)
    return tuple(ScoreFn(mod) if inspect.isfunction(mod) else mod for mod in mods)


def mask_of(layer, context: Context, cache) -> Mask | None:
    """The mask of a call: the masks of the layer, the caller, documents and (without a cache) padding, and-ed."""
    mask = context.mask if context.segments is None else join(context.mask, Segments(context.segments))
    mask = mask if context.lengths is None or cache is not None else join(mask, Padding(context.lengths))
    return join(layer.mask, mask)


def dropout_of(layer, context: Context) -> dict:
    """The operator's arguments for dropout of attention weights; {} without dropout."""
    if context.dropout_key is None or not layer.dropout_rate:
        return {}
    return {"dropout_rate": layer.dropout_rate, "dropout_key": context.dropout_key}


def without_dropout(terms: dict) -> dict:
    """The arguments in `terms` that `attention_weights` takes, too: all except dropout."""
    return {name: value for name, value in terms.items() if not name.startswith("dropout")}


def seen(layer: nn.Module, z, weights: Callable, v, drops: bool):
    """Pass the operator's output z through `attnlab.see`'s tap of the pattern; sow the weights if requested."""
    if layer.is_mutable_collection("intermediates"):
        layer.sow("intermediates", "attention_weights", weights())
    return taps.attended(layer, z, weights, v, drops=drops)
