"""The GPT: embeddings, pre-norm transformer blocks, and a tied output layer."""

import functools
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float, Int

from attnlab.nn import checks, layers, sharding
from attnlab.nn.multihead import KVCache, MultiHeadAttention, check_cache, check_segments
from attnlab.nn.norms import LayerNorm
from attnlab.nn.positions import LearnedPositions, sinusoidal, within_segments
from attnlab.ops import dropout, pointwise, products
from attnlab.ops.cross_entropy import chunk_size, cross_entropy
from attnlab.ops.masks import Causal, SlidingWindow
from attnlab.ops.score_mods import ALiBi, ScoreMod, SoftCap, alibi_slopes
from attnlab.types import Array, DType

NORM_EPSILON = 1e-5  # GPT-2's
POSITIONS = ("learned", "sinusoidal", "rotary", "alibi", "none")
ACTIVATIONS = {
    "gelu_tanh": pointwise.gelu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


def check_shape(model) -> None:
    """Check the constraints between the fields of a model.

    Args:
      model: a `GPT`, or any object with its fields, e.g. `config.model`.

    Raises:
      ValueError: the model cannot be built; the message begins with the name of a field.

    >>> check_shape(GPT(vocab_size=10, num_layers=2, num_heads=3, width=8, context=6))
    Traceback (most recent call last):
    ValueError: width = 8 is not divisible by num_heads = 3: use a multiple, e.g. 9
    """
    for field in ("num_layers", "num_heads", "kv_heads", "width", "context"):
        size = getattr(model, field)
        if size is not None and size < 1:
            raise ValueError(f"{field} = {size}: expected 1 or more")
    width, num_heads, kv_heads = model.width, model.num_heads, model.kv_heads or model.num_heads
    if width % num_heads:
        multiple = max(1, round(width / num_heads)) * num_heads
        raise ValueError(
            f"width = {width} is not divisible by num_heads = {num_heads}: use a multiple, e.g. {multiple}"
        )
    if num_heads % kv_heads:
        raise ValueError(f"num_heads = {num_heads} is not a multiple of kv_heads = {kv_heads}: use a divisor, e.g. 1")
    if model.positions not in POSITIONS:
        raise ValueError(f"positions = {model.positions!r}: expected one of {', '.join(POSITIONS)}")
    if model.positions == "rotary" and width // num_heads % 2:
        raise ValueError(
            f"positions = 'rotary' rotates pairs of features, but a head has {width // num_heads} "
            f"(width = {width}, num_heads = {num_heads}): choose an even width / num_heads"
        )
    if model.positions == "sinusoidal" and width % 2:
        raise ValueError(f"width = {width} is odd: sinusoidal positions need an even width")
    if model.window is not None and model.window < 1:
        raise ValueError(f"window = {model.window}: expected 1 position or more (a token attends to itself), or None")
    if model.soft_cap is not None and not model.soft_cap > 0:
        raise ValueError(f"soft_cap = {model.soft_cap}: expected a number of logits above 0, or None")
    if round(model.mlp_ratio * width) < 1:
        raise ValueError(f"mlp_ratio = {model.mlp_ratio} times width = {width} rounds to 0: use 1/{width} or more")
    if model.activation not in ACTIVATIONS:
        raise ValueError(f"activation = {model.activation!r}: expected one of {', '.join(ACTIVATIONS)}")
    if model.remat not in layers.REMAT:
        raise ValueError(f"remat = {model.remat!r}: expected one of {', '.join(layers.REMAT)}")


def score_mods(model) -> tuple[ScoreMod, ...]:
    """The score mods of a GPT's attention, by its fields `soft_cap`, `positions` and `num_heads`.

    >>> score_mods(GPT(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6, soft_cap=50.0))
    (SoftCap(cap=50.0),)
    """
    cap = () if model.soft_cap is None else (SoftCap(model.soft_cap),)
    return (*cap, ALiBi(alibi_slopes(model.num_heads))) if model.positions == "alibi" else cap


class Mlp(nn.Module):
    """Feed-forward layer: W_2 activation(W_1 x) (Vaswani et al. 2017, section 3.3).

    Attributes:
      hidden: width between the two layers; None for four times the input's.
      activation: "gelu_tanh" (GELU's tanh form, as in GPT-2), "gelu" (Hendrycks and Gimpel 2016), "relu" or "silu".
      use_bias: whether the layers add a bias.
      kernel_init, out_kernel_init: initializers of `up/kernel` `[F, hidden]` and `down/kernel` `[hidden, F]`.
      dtype: type of the computation; the input's when None.

    >>> Mlp().init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    hidden: int | None = None
    activation: str = "gelu_tanh"
    use_bias: bool = True
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    out_kernel_init: nn.initializers.Initializer | None = None
    dtype: DType | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
        """Apply the layer to each token: `[..., F]` to `[..., F]`; ValueError for an unknown activation."""
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation = {self.activation!r}: expected one of {', '.join(ACTIVATIONS)}")
        width = x.shape[-1]
        options = {"use_bias": self.use_bias, "dtype": self.dtype, "dot_general": products.dot_general}
        hidden = 4 * width if self.hidden is None else self.hidden
        x = nn.Dense(hidden, kernel_init=self.kernel_init, name="up", **options)(x)
        x = sharding.constrain(x, *("batch", "length", *(None,) * x.ndim)[: x.ndim - 1], "mlp")
        x = ACTIVATIONS[self.activation](x)
        return nn.Dense(width, kernel_init=self.out_kernel_init or self.kernel_init, name="down", **options)(x)


class Block(nn.Module):
    """Transformer block: x + attention(norm(x)), then x + mlp(norm(x)) (Radford et al. 2019, section 2.3).

    Attributes:
      attention: the layer that mixes tokens; any module with the interface of `MultiHeadAttention`, e.g. `GRU`.
      mlp: the feed-forward layer.
      dropout_rate: probability of dropping an element of either layer's output.
      use_bias: whether the norms add a bias.
      norm_first: False for the post-norm of Vaswani et al. 2017: norm(x + attention(x)), then norm(x + mlp(x)).
      norm_epsilon: ε of the norms.
      dtype: type of the computation; the input's when None.

    >>> block = Block(MultiHeadAttention(num_heads=2, mask=Causal()), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    attention: nn.Module
    mlp: nn.Module
    dropout_rate: float = 0.0
    use_bias: bool = True
    norm_first: bool = True
    norm_epsilon: float = NORM_EPSILON
    dtype: DType | None = None

    @checks.compact
    def __call__(
        self,
        x: Float[Array, "B T F"],
        *,
        mask: checks.MaskLike | None = None,
        deterministic: bool = True,
        cache: KVCache | Array | None = None,
        segments: Int[Array, "B T"] | None = None,
        dropout_key: Array | None = None,
    ) -> Float[Array, "B T F"] | tuple[Float[Array, "B T F"], KVCache | Array]:
        """Apply the block to `[B, T, F]`; arguments, results and errors are those of the attention layer."""
        if dropout_key is None and self.dropout_rate and not deterministic:
            dropout_key = self.make_rng("dropout")

        def drop(x, site):
            if deterministic or not self.dropout_rate:
                return x
            keys = dropout.per_example(dropout_key, x.shape[:1])
            return dropout.dropout(x, dropout.fold_in(keys, site), self.dropout_rate)

        def norm(name):
            return LayerNorm(self.norm_epsilon, use_bias=self.use_bias, dtype=self.dtype, name=name)

        attention_norm, mlp_norm = norm("attention_norm"), norm("mlp_norm")
        attended = self.attention(
            attention_norm(x) if self.norm_first else x,
            mask=mask,
            deterministic=deterministic,
            cache=cache,
            dropout_key=None if dropout_key is None else dropout.fold_in(dropout_key, 0),
            **({} if segments is None else {"segments": segments}),  # a layer may have none
        )
        if cache is not None:
            attended, cache = attended
        x = sharding.constrain(x + drop(attended, 1), "batch", "length", None)
        if not self.norm_first:
            x = attention_norm(x)
        x = sharding.constrain(x + drop(self.mlp(mlp_norm(x) if self.norm_first else x), 2), "batch", "length", None)
        if not self.norm_first:
            x = mlp_norm(x)
        return x if cache is None else (x, cache)


class GPT(nn.Module):
    """A decoder-only transformer: pre-norm blocks, tied embedding, GPT-2's initialization (Radford et al. 2019).

    Weights are drawn from a normal distribution with standard deviation 0.02, those that project onto the residual
    stream with 0.02/√(2L). Biases start at 0.

    Attributes:
      vocab_size: V, number of tokens.
      num_layers: L.
      num_heads: H.
      width: F, width of the residual stream.
      context: longest training sequence; the number of learned positions.
      kv_heads: key and value heads; None for H.
      dropout: probability of dropping an embedding, an attention weight or an element of a layer's output.
      positions: "learned", "sinusoidal", "rotary", "alibi" or "none".
      window: number of positions a token attends to, its own included; None for all previous ones.
      soft_cap: limits the logits of attention to ±soft_cap (Gemma Team 2024, section 2); None for no limit.
      qk_norm: layer-normalize queries and keys.
      use_bias: whether linear layers and norms add a bias.
      mlp_ratio: width of the feed-forward layer over F, rounded to an integer width.
      activation: of the feed-forward layer, see `Mlp`.
      norm_epsilon: ε of the norms.
      remat: what of a block is stored for the gradient (Chen et al. 2016); the rest is computed again. "none":
        everything is stored; "block": its input alone; "dots": that and its matrix products; "attention": its input
        and what the attention operator returns, so that attention alone is not computed again.
      dtype: type of the computation; parameters are float32.
      impl: see `attnlab.attention`.

    >>> model = GPT(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
    >>> tokens = jnp.zeros((1, 6), jnp.int32)
    >>> params = model.init(jax.random.key(0), tokens)
    >>> jax.jit(model.apply)(params, tokens).shape  # logits of the next token, at each position
    (1, 6, 10)

    Parameters may also have their layers stacked (`stack_layers`). They are then one loop, which is compiled in the
    time of one layer (with caches, or where weights are sown, layers are slices of them, and of
    `capture_intermediates` only what modules sow is kept):

    >>> stacked = {"params": stack_layers(params["params"])}
    >>> bool(jnp.allclose(model.apply(stacked, tokens), model.apply(params, tokens), atol=1e-6))
    True

    Two documents packed into one sequence, which do not attend to each other:

    >>> segments = jnp.array([[0, 0, 0, 0, 1, 1]])
    >>> model.apply(params, tokens, segments=segments).shape
    (1, 6, 10)
    """

    vocab_size: int
    num_layers: int
    num_heads: int
    width: int
    context: int
    kv_heads: int | None = None
    dropout: float = 0.0
    positions: str = "learned"
    window: int | None = None
    soft_cap: float | None = None
    qk_norm: bool = False
    use_bias: bool = True
    mlp_ratio: int | float = 4
    activation: str = "gelu_tanh"
    norm_epsilon: float = NORM_EPSILON
    remat: str = "none"
    dtype: DType = jnp.float32
    impl: str = "auto"

    @checks.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        mask: checks.MaskLike | None = None,
        deterministic: bool = True,
        caches: Sequence[KVCache] | None = None,
        dropout_key: Array | None = None,
        targets: Int[Array, "B T"] | None = None,
        segments: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B R V"] | Float[Array, "B T"] | tuple[Float[Array, "B R V"], tuple[KVCache, ...]]:
        """Logits of the next token at each position, or the cross-entropy of given ones.

        Args:
          tokens: int `[B, T]`, each in [0, vocab_size); checked unless traced.
          mask: and-ed with the causal mask or window of every layer, e.g. `masks.Segments(ids)`; a bool array counts
            as `masks.Dense`. With caches, its keys are the caches' S slots: a bool array is `[T, S]`.
          deterministic: False for dropout.
          caches: one `KVCache` per layer (`empty_caches`); `tokens` continue the cached sequences.
          dropout_key: one key, or one per example `[B]`; the `dropout` rng when None.
          targets: int `[B, T]`, the next tokens, each in [0, vocab_size); checked unless traced, where the loss of
            others is NaN. Large logits are then never held at once, see `ops.cross_entropy`.
          segments: int `[B, T]`, the number of each token's document, where sequences are several documents, one after
            another: a token attends to its own alone, and positions start again with each.

        Returns:
          float32 `[B, T, V]` (`[B, R, V]` where `attnlab.see` keeps R positions), and with caches also the extended
          caches; with targets their cross-entropy in nats, float32 `[B, T]`.

        Raises:
          ValueError: fields that do not fit together (`check_shape`), tokens out of range, a sequence longer than the
            learned positions, caches or a mask of another size, targets of another shape or together with caches,
            segments of another shape or with caches, stacked layers of another number than num_layers.
        """
        check_shape(self)
        self._check_inputs(tokens, caches)
        check_segments(segments, tokens, caches=caches)
        if targets is not None:
            self._check_targets(targets, tokens, caches)
        drops = bool(self.dropout) and not deterministic
        keys = None
        if drops:
            key = self.make_rng("dropout") if dropout_key is None else dropout_key
            keys = dropout.per_example(key, tokens.shape[:1])

        normal = nn.initializers.normal(0.02)
        embed = nn.Embed(self.vocab_size, self.width, dtype=self.dtype, embedding_init=normal, name="embed")
        x = self._add_positions(self._gathering(lambda embed: embed(tokens))(embed), caches, segments)
        if drops:
            x = dropout.dropout(x, dropout.fold_in(keys, self.num_layers), self.dropout)
        x = sharding.constrain(x, "batch", "length", None)
        options = {"mask": mask, "segments": segments, "deterministic": deterministic}
        self._check_depth()
        if not self.has_variable("params", layers.STACKED):
            x, caches = self._layer_by_layer(x, options, keys, caches)
        elif caches is None and not self.is_mutable_collection("intermediates"):
            x = self._in_a_loop(x, options, keys)
        else:
            x, caches = self._slice_by_slice(x, options, keys, caches)
        x = LayerNorm(self.norm_epsilon, use_bias=self.use_bias, dtype=self.dtype, name="final_norm")(x)
        if targets is not None:
            return self._gathering(functools.partial(self._losses, x, targets))(embed)
        logits = self._gathering(functools.partial(self._logits, x))(embed)
        return logits if caches is None else (logits, caches)

    def _layer_by_layer(self, x, options, keys, caches):
        """The layers as modules, whose parameters are `block_0`, `block_1`, …."""

        def apply(block, x, given, key, cache=None):
            return block(x, **{**options, **given}, cache=cache, dropout_key=key)

        given = {name: options[name] for name in ("mask", "segments")}

        gathers = not self.is_initializing() and sharding.is_active(x)
        recomputes, policy = layers.remat_policy(self.remat, gathers=gathers, loop=False)
        extended = []
        for layer in range(self.num_layers):
            block, key = self._block(layer), None if keys is None else dropout.fold_in(keys, layer)
            run = self._gathering(apply)
            if caches is not None:
                x, cache = run(block, x, given, key, caches[layer])
                extended.append(cache)
            else:
                x = (nn.remat(run, policy=policy) if recomputes else run)(block, x, given, key)
        return x, None if caches is None else tuple(extended)

    def _in_a_loop(self, x, options, keys):
        """The layers as one loop over stacked parameters: one layer is compiled, whatever their number."""
        block, stacked = self._block(0).clone(parent=None, name=None), self.get_variable("params", layers.STACKED)
        recomputes, policy = layers.remat_policy(self.remat, gathers=sharding.is_active(x), loop=True)

        def apply(x, params, layer, keys):
            key = None if keys is None else dropout.fold_in(keys, layer)
            return block.apply({"params": sharding.gathered(params, self.dtype)}, x, **options, dropout_key=key)

        # A loop is a barrier by itself.
        run = jax.checkpoint(apply, policy=policy, prevent_cse=False) if recomputes else apply
        each = (stacked, jnp.arange(self.num_layers))
        return jax.lax.scan(lambda x, layer: (run(x, *layer, keys), None), x, each)[0]

    def _slice_by_slice(self, x, options, keys, caches):
        """The layers of stacked parameters one by one, for caches and for what modules sow."""
        unstacked = layers.unstack_layers({layers.STACKED: self.get_variable("params", layers.STACKED)})
        block, extended = self._block(0).clone(parent=None, name=None), []
        sows = self.is_mutable_collection("intermediates")
        for layer in range(self.num_layers):
            name = f"block_{layer}"
            key = None if keys is None else dropout.fold_in(keys, layer)
            params = sharding.gathered(unstacked[name], self.dtype)
            cache = None if caches is None else caches[layer]
            result, sown = block.apply(
                {"params": params},
                x,
                **options,
                cache=cache,
                dropout_key=key,
                mutable=["intermediates"] if sows else [],
            )
            x, cache = (result, None) if cache is None else result
            extended.append(cache)
            if sows:
                self.put_variable("intermediates", name, sown["intermediates"])
        return x, None if caches is None else tuple(extended)

    def _gathering(self, call):
        """`call(module, …)` with the module's parameters gathered, where `nn.sharding` has split them."""
        if self.is_initializing() or not nn.get_logical_axis_rules():
            return call

        def run(module, *args):
            def gather(variables):
                return {"params": sharding.gathered(variables["params"], self.dtype, prefix=module.name)}

            return nn.map_variables(call, "params", trans_in_fn=gather)(module, *args)

        return run

    def _logits(self, x, embed):
        logits = sharding.constrain(embed.attend(x), "batch", "length", "vocab")
        return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

    def _losses(self, x, targets, embed):
        batch, length, _ = x.shape
        length = -(-length // sharding.shards("length", x))
        chunk = chunk_size(-(-batch // sharding.shards("batch", x)), length, self.vocab_size)
        if chunk < length:
            losses = functools.partial(cross_entropy, chunk=chunk)
            return sharding.over_tokens(losses, x, embed.embedding, targets)
        losses = optax.softmax_cross_entropy_with_integer_labels(self._logits(x, embed), targets)
        return jnp.where((targets >= 0) & (targets < self.vocab_size), losses, jnp.nan)  # as in chunks

    def _check_targets(self, targets, tokens, caches) -> None:
        if caches is not None:
            raise ValueError("targets are for whole sequences: leave out caches")
        if jnp.shape(targets) != jnp.shape(tokens):
            raise ValueError(f"targets has shape {jnp.shape(targets)}, expected that of tokens, {jnp.shape(tokens)}")
        checks.ids_in_range("targets", targets, self.vocab_size, remedy="shift the tokens by one")

    def _check_depth(self) -> None:
        if self.has_variable("params", layers.STACKED):
            depth = layers.depth({layers.STACKED: self.get_variable("params", layers.STACKED)})
            if depth != self.num_layers:
                raise ValueError(f"params have {depth} stacked layers, expected num_layers = {self.num_layers}")

    def _check_inputs(self, tokens, caches) -> None:
        if jnp.ndim(tokens) != 2:
            raise ValueError(f"tokens has shape {jnp.shape(tokens)}, expected [batch, length]: add the missing axis")
        checks.ids_in_range("tokens", tokens, self.vocab_size, remedy="encode the text with the model's tokenizer")
        if caches is None:
            return
        remedy = f"make them with model.empty_caches(batch={tokens.shape[0]})"
        if isinstance(caches, KVCache) or len(caches) != self.num_layers:
            given = "one KVCache" if isinstance(caches, KVCache) else f"{len(caches)} of them"
            raise ValueError(f"caches is {given}, expected a sequence of num_layers = {self.num_layers}: {remedy}")
        for layer, cache in enumerate(caches):
            kv_heads, head_dim = self.kv_heads or self.num_heads, self.width // self.num_heads
            check_cache(cache, tokens.shape[0], kv_heads, head_dim, f"caches[{layer}]")

    def _add_positions(self, x, caches, segments):
        """Scale the embeddings `[B, T, F]` and add positional embeddings, where the model has them."""
        positions = jnp.arange(x.shape[1]) if segments is None else within_segments(segments)
        if caches is not None:
            positions = caches[0].length[:, None] + positions
        if self.positions == "learned":
            table = LearnedPositions(self.context, self.width, dtype=self.dtype, name="positions")
            return x + self._gathering(lambda table: table(positions))(table)
        if self.positions == "sinusoidal":
            # As in Vaswani et al. 2017, section 3.4: sines of size 1 would dominate embeddings of deviation 0.02.
            return x * self.width**0.5 + sinusoidal(positions, self.width).astype(self.dtype)
        return x

    def _block(self, layer: int) -> Block:
        normal = nn.initializers.normal
        shared = {
            "use_bias": self.use_bias,
            "kernel_init": normal(0.02),
            "out_kernel_init": normal(0.02 / (2 * self.num_layers) ** 0.5),
            "dtype": self.dtype,
        }
        attention = MultiHeadAttention(
            self.num_heads,
            kv_heads=self.kv_heads,
            mask=Causal() if self.window is None else SlidingWindow(left=self.window - 1),
            score_mod=score_mods(self) or None,
            dropout_rate=self.dropout,
            rotary_base=10_000.0 if self.positions == "rotary" else None,
            qk_norm=self.qk_norm,
            impl=self.impl,
            parent=None,
            **shared,
        )
        mlp = Mlp(round(self.mlp_ratio * self.width), self.activation, parent=None, **shared)
        return Block(
            attention,
            mlp,
            self.dropout,
            self.use_bias,
            norm_epsilon=self.norm_epsilon,
            dtype=self.dtype,
            name=f"block_{layer}",
        )

    def empty_caches(self, batch: int, capacity: int | None = None) -> tuple[KVCache, ...]:
        """One empty `KVCache` per layer, for `capacity` positions (the context when None).

        >>> model = GPT(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 6), jnp.int32))
        >>> logits, caches = model.apply(params, jnp.array([[1, 2, 3]]), caches=model.empty_caches(batch=1))
        >>> logits, caches = model.apply(params, jnp.array([[4]]), caches=caches)  # one more token
        >>> logits.shape
        (1, 1, 10)
        """
        kv_heads, head_dim = self.kv_heads or self.num_heads, self.width // self.num_heads
        cache = KVCache.empty(batch, capacity or self.context, kv_heads, head_dim, self.dtype)
        return (cache,) * self.num_layers
