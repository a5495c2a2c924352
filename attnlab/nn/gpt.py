"""The GPT: embeddings, pre-norm blocks of attention and a feed-forward layer, and a tied output."""

import functools
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from attnlab.nn.multihead import KVCache, MultiHeadAttention
from attnlab.nn.norms import LayerNorm
from attnlab.nn.positions import LearnedPositions, sinusoidal
from attnlab.ops import dropout, pointwise, products
from attnlab.ops.masks import Causal, Mask, SlidingWindow
from attnlab.ops.score_mods import ALiBi, alibi_slopes
from attnlab.types import Array, DType

NORM_EPSILON = 1e-5  # GPT-2's
POSITIONS = ("learned", "sinusoidal", "rotary", "alibi", "none")
ACTIVATIONS = {
    "gelu_tanh": pointwise.gelu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


class Mlp(nn.Module):
    """Feed-forward layer: W_2 activation(W_1 x) (Vaswani et al. 2017, section 3.3).

    Attributes:
      hidden: width between the two layers; None for four times the input's.
      activation: "gelu_tanh" (GELU's tanh form, as in GPT-2), "gelu" (Hendrycks and Gimpel 2016), "relu" or "silu".
      use_bias: whether the layers add a bias.
      kernel_init, out_kernel_init: initialisers of `up/kernel` `[F, hidden]` and `down/kernel` `[hidden, F]`.
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
        """`[..., F]` to `[..., F]`, each row by itself; ValueError for an unknown activation."""
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation = {self.activation!r}: expected one of {', '.join(ACTIVATIONS)}")
        width = x.shape[-1]
        options = {"use_bias": self.use_bias, "dtype": self.dtype, "dot_general": products.dot_general}
        hidden = 4 * width if self.hidden is None else self.hidden
        x = nn.Dense(hidden, kernel_init=self.kernel_init, name="up", **options)(x)
        x = ACTIVATIONS[self.activation](x)
        return nn.Dense(width, kernel_init=self.out_kernel_init or self.kernel_init, name="down", **options)(x)


class Block(nn.Module):
    """Transformer block: x + attention(norm(x)), then x + mlp(norm(x)) (Radford et al. 2019, section 2.3).

    Attributes:
      attention: the layer that mixes tokens; any module called like `MultiHeadAttention`, e.g. `GRU`, `CausalConv`.
      mlp: the feed-forward layer.
      dropout_rate: probability that an element of either layer's output drops.
      use_bias: whether the norms add a bias.
      norm_first: False for the order of Vaswani et al. 2017: norm(x + attention(x)), then norm(x + mlp(x)).
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

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T F"],
        *,
        mask: Mask | None = None,
        deterministic: bool = True,
        cache: KVCache | Array | None = None,
        dropout_key: Array | None = None,
    ) -> Float[Array, "B T F"] | tuple[Float[Array, "B T F"], KVCache | Array]:
        """`[B, T, F]` to `[B, T, F]`; arguments and errors are those of `MultiHeadAttention`."""
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
        )
        if cache is not None:
            attended, cache = attended
        x = x + drop(attended, 1)
        if not self.norm_first:
            x = attention_norm(x)
        x = x + drop(self.mlp(mlp_norm(x) if self.norm_first else x), 2)
        if not self.norm_first:
            x = mlp_norm(x)
        return x if cache is None else (x, cache)


class GPT(nn.Module):
    """A decoder-only transformer: pre-norm blocks, tied embedding, GPT-2's initialisation (Radford et al. 2019).

    Weights start normal with deviation 0.02, those of layers that end on the residual stream with 0.02/√(2L), biases
    at 0.

    Attributes:
      vocab_size: V, number of tokens.
      num_layers: L.
      num_heads: H.
      width: F, width of the residual stream.
      context: longest sequence that training sees; the number of learned positions.
      kv_heads: heads of keys and values; None for H.
      dropout: probability that an embedding, an attention weight or a layer's output drops.
      positions: "learned", "sinusoidal", "rotary", "alibi" or "none".
      window: attend to this many positions, the token's own included; None for all before it.
      qk_norm: layer-normalise queries and keys.
      use_bias: whether linear layers and norms add a bias.
      mlp_ratio: width of the feed-forward layer over F, rounded to a whole width.
      activation: of the feed-forward layer, see `Mlp`.
      norm_epsilon: ε of the norms.
      remat: keep each block's input alone for the gradient and compute the rest again (Chen et al. 2016).
      dtype: type of the computation; parameters are float32.
      impl: see `attnlab.attention`.

    >>> model = GPT(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
    >>> tokens = jnp.zeros((1, 6), jnp.int32)
    >>> params = model.init(jax.random.key(0), tokens)
    >>> jax.jit(model.apply)(params, tokens).shape  # logits of the token after each
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
    qk_norm: bool = False
    use_bias: bool = True
    mlp_ratio: int | float = 4
    activation: str = "gelu_tanh"
    norm_epsilon: float = NORM_EPSILON
    remat: bool = False
    dtype: DType = jnp.float32
    impl: str = "auto"

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        deterministic: bool = True,
        caches: Sequence[KVCache] | None = None,
        dropout_key: Array | None = None,
    ) -> Float[Array, "B T V"] | tuple[Float[Array, "B T V"], tuple[KVCache, ...]]:
        """Logits of the next token after each.

        Args:
          tokens: int `[B, T]`, each in [0, vocab_size).
          deterministic: False drops.
          caches: one `KVCache` a layer (`empty_caches`); `tokens` then continue where they end.
          dropout_key: one key, or one an example `[B]`; the `dropout` rng when None.

        Returns:
          float32 `[B, T, V]`, and with caches the extended caches.

        Raises:
          ValueError: a width that the heads do not divide, an unknown kind of positions, a sequence longer than the
            learned positions.
        """
        length = tokens.shape[1]
        if self.positions not in POSITIONS:
            raise ValueError(f"positions = {self.positions!r}: expected one of {', '.join(POSITIONS)}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window = {self.window}: expected 1 position or more (a token sees itself), or None")
        if round(self.mlp_ratio * self.width) < 1:
            raise ValueError(f"mlp_ratio = {self.mlp_ratio} of width {self.width} leaves no width: use 1/width or more")
        drops = bool(self.dropout) and not deterministic
        if drops:
            key = self.make_rng("dropout") if dropout_key is None else dropout_key
            keys = dropout.per_example(key, tokens.shape[:1])

        normal = nn.initializers.normal(0.02)
        embed = nn.Embed(self.vocab_size, self.width, dtype=self.dtype, embedding_init=normal, name="embed")
        x = embed(tokens)
        positions = jnp.arange(length)
        if caches is not None:
            positions = caches[0].length[:, None] + positions
        if self.positions == "learned":
            x = x + LearnedPositions(self.context, self.width, dtype=self.dtype, name="positions")(positions)
        elif self.positions == "sinusoidal":
            # As in Vaswani et al. 2017, section 3.4: embeddings of deviation 0.02 would drown in sines of size 1.
            x = x * self.width**0.5 + sinusoidal(positions, self.width).astype(self.dtype)
        if drops:
            x = dropout.dropout(x, dropout.fold_in(keys, self.num_layers), self.dropout)

        extended = []
        for layer in range(self.num_layers):
            block, key = self._block(layer), dropout.fold_in(keys, layer) if drops else None
            if caches is not None:
                x, cache = block(x, deterministic=deterministic, cache=caches[layer], dropout_key=key)
                extended.append(cache)
            elif self.remat:
                x = nn.remat(lambda block, x, key: block(x, deterministic=deterministic, dropout_key=key))(
                    block, x, key
                )
            else:
                x = block(x, deterministic=deterministic, dropout_key=key)
        x = LayerNorm(self.norm_epsilon, use_bias=self.use_bias, dtype=self.dtype, name="final_norm")(x)
        logits = embed.attend(x).astype(jnp.float32)
        return logits if caches is None else (logits, tuple(extended))

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
            score_mod=ALiBi(alibi_slopes(self.num_heads)) if self.positions == "alibi" else None,
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
        """One empty `KVCache` a layer, of `capacity` positions (the context when None).

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
