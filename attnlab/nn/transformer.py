"""The transformer: its block, and the GPT, embeddings → layers → norm → logits."""

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float, Int

from attnlab.nn import checks, logits, sharding, stack
from attnlab.nn.config import ModelConfig
from attnlab.nn.layer import Context, Layer, LayerOut
from attnlab.nn.mlp import Mlp
from attnlab.nn.norms import NORM_AT, NORM_EPSILON, make_norm
from attnlab.nn.positions import LearnedPositions, sinusoidal, within_segments
from attnlab.ops import dropout
from attnlab.types import Array, DType


class Block(Layer):
    """Transformer block: x + attention(norm(x)), then x + mlp(norm(x)) (Radford et al. 2019, section 2.3).

    Attributes:
      attention: the layer that mixes tokens; a `Layer`, e.g. `MultiHeadAttention` or `GRU`.
      mlp: the feed-forward layer; None for attention alone (Elhage et al. 2021).
      dropout_rate: probability of dropping an element of either layer's output.
      use_bias: whether the norms add a bias.
      norm_epsilon: ε of the norms.
      norm: "layer", "rms" or "rms_plus_one", see `make_norm`.
      norm_at: "before" a layer; "after" it, x + norm(attention(x)) (OLMo Team 2024, section 3.2); "both" (Gemma Team
        2024); or "stream", norm(x + attention(x)), then norm(x + mlp(x)), the post-norm of Vaswani et al. 2017. Norms
        of a layer's output are named `attention_post_norm` and `mlp_post_norm`.
      dtype: type of the computation; None for the input's type.

    >>> block = Block(MultiHeadAttention(num_heads=2, mask=Causal()), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    attention: Layer
    mlp: nn.Module | None = None
    dropout_rate: float = 0.0
    use_bias: bool = True
    norm_epsilon: float = NORM_EPSILON
    dtype: DType | None = None
    norm: str = "layer"
    norm_at: str = "before"

    @property
    def value_residual(self) -> bool:
        """Whether the layer that mixes tokens has a value residual."""
        return self.attention.value_residual

    @property
    def drops(self) -> bool:
        return bool(self.dropout_rate) or self.attention.drops

    def init_cache(self, batch: int, features: int, capacity: int = 0) -> Any:
        """The cache of the layer that mixes tokens."""
        return self.attention.init_cache(batch, features, capacity)

    @nn.compact
    def forward(self, x: Float[Array, "B T F"], context: Context, cache: Any = None) -> LayerOut:
        """Compute the residual stream after both layers; ValueError also for an unknown `norm` or `norm_at`."""
        if self.norm_at not in (known := (*NORM_AT, "stream")):
            raise ValueError(f"norm_at = {self.norm_at!r}: expected one of {', '.join(known)}")
        is_before, is_after = self.norm_at in ("before", "both"), self.norm_at in ("after", "both")
        key = context.dropout_key  # folded with 0 for the mixer, 1 for its output, 2 for the mlp's output

        def norm(x, name):
            options = {"use_bias": self.use_bias, "dtype": self.dtype, "name": name}
            return make_norm(self.norm, self.norm_epsilon, **options)(x)

        def drop(x, site):
            if key is None or not self.dropout_rate:
                return x
            return dropout.dropout(x, dropout.fold_in(dropout.per_example(key, x.shape[:1]), site), self.dropout_rate)

        def residual(x, out, name, site):
            """Add the layer's output to the residual stream."""
            out = norm(out, f"{name}_post_norm") if is_after else out
            x = sharding.constrain(x + drop(out, site), "batch", "length", None)
            return norm(x, f"{name}_norm") if self.norm_at == "stream" else x

        def normed(x, name):
            return norm(x, f"{name}_norm") if is_before else x

        inputs = normed(x, "attention")
        inner = context._replace(dropout_key=None if key is None else dropout.fold_in(key, 0))
        mixed = self.attention.forward(inputs, inner, cache)
        x = residual(x, mixed.out, "attention", 1)
        if self.mlp is not None:
            x = residual(x, self.mlp(normed(x, "mlp")), "mlp", 2)
        return mixed._replace(out=x)


class GPT(nn.Module):
    """A decoder-only transformer: by default pre-norm blocks and a tied embedding (Radford et al. 2019).

    The config can make it a GPT-2, Llama, Gemma, Qwen or OLMo: `attnlab.interop.huggingface` reads the config of a
    checkpoint, and docs/guide/models.md lists the fields.

    Weights are drawn from a normal distribution with standard deviation 0.02, or 0.02/√(2L) if they project onto the
    residual stream. Biases start at 0.

    Tokens are 0 … vocab_size − 1. The token tables have `padded_vocab_size` rows if it is set. The rows after the
    tokens are padding: they have no logits, no part in the softmax, and a gradient of 0.

    >>> model = GPT.of(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
    >>> tokens = jnp.zeros((1, 6), jnp.int32)
    >>> params = model.init(jax.random.key(0), tokens)
    >>> jax.jit(model.apply)(params, tokens).shape  # logits of the next token, at each position
    (1, 6, 10)

    Layers may also be stacked (`stack_layers`). They then run in a loop that compiles only one pattern of layers; with
    caches, or with collections other than parameters, they run one by one:

    >>> stacked = {"params": stack_layers(params["params"])}
    >>> bool(jnp.allclose(model.apply(stacked, tokens), model.apply(params, tokens), atol=1e-6))
    True

    Here two documents are packed into one sequence, and neither attends to the other:

    >>> segments = jnp.array([[0, 0, 0, 0, 1, 1]])
    >>> model.apply(params, tokens, segments=segments).shape
    (1, 6, 10)
    """

    config: ModelConfig

    @classmethod
    def of(cls, **values) -> "GPT":
        """The model of the config `ModelConfig.of(**values)`."""
        return cls(ModelConfig.of(**values))

    @property
    def dtype(self) -> DType:
        """The type of the computation."""
        return self.config.dtype

    def replace(self, **fields) -> "GPT":
        """The model with some fields of its config replaced."""
        return self.clone(config=self.config.replace(**fields))

    def over_tokens(self, vocab_size: int) -> "GPT":
        """The model with the same parameters and the first `vocab_size` tokens; other rows of its tables are padding.

        >>> model = GPT.of(vocab_size=16, num_layers=1, num_heads=2, width=8, context=6).over_tokens(10)
        >>> model.config.vocab_size, model.config.padded_vocab_size
        (10, 16)
        """
        config = self.config
        if vocab_size == config.vocab_size:
            return self
        return self.replace(vocab_size=vocab_size, padded_vocab_size=config.vocab_rows)

    @checks.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        mask: checks.MaskLike | None = None,
        deterministic: bool = True,
        caches: Sequence[Any] | None = None,
        dropout_key: Array | None = None,
        targets: Int[Array, "B R"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
        places: Int[Array, "B R"] | None = None,
    ) -> Float[Array, "B R V"] | Float[Array, "B R"] | tuple[Float[Array, "B R V"], tuple[Any, ...]]:
        """Compute logits of the next token at each position, or the cross-entropy of `targets`.

        Args:
          tokens: int `[B, T]`, each in [0, vocab_size); checked unless traced.
          mask: and-ed with the causal mask or window of every layer, e.g. `masks.Segments(ids)`; a bool array counts
            as `masks.Dense`. With caches, its keys are the caches' S slots, so a bool array is `[T, S]`.
          deterministic: False for dropout.
          caches: one per layer (`init_caches`), each with a length `[B]`; `tokens` continue the cached sequences.
          dropout_key: one key, or one per example `[B]`; the `dropout` rng when None.
          targets: the next tokens, int `[B, T]`, or `[B, R]` with `places`, each in [0, vocab_size); checked unless
            traced (then others have loss NaN). Large logits are computed in chunks: see `ops.cross_entropy`.
          segments: int `[B, T]`, each token's document number, where a sequence holds several documents one after
            another: a token attends only to its own document, and positions restart with each document.
          lengths: int `[B]`, the number of tokens in each sequence. Later tokens are padding: no token attends to
            padding, and no cache stores it.
          places: int `[B, R]`, the positions whose logits or losses are computed; None for all T.

        Returns:
          Logits, float32 `[B, R, V]` (R is T without `places`, unless an edit of `attnlab.see` selects positions) and,
          with caches, the extended caches; with targets, their cross-entropy in nats, float32 `[B, R]`.

        Raises:
          ValueError: tokens are out of range; a sequence is longer than the learned positions; caches, a mask, targets,
            segments or places have a wrong size or shape; targets or segments come with caches; the number of stacked
            layers is not num_layers.
        """
        config = self.config
        checks.check_tokens(config, tokens, caches, segments, lengths)
        checks.check_outputs(config, tokens, caches, places, targets)
        keys = None
        if config.dropout and not deterministic:
            key = self.make_rng("dropout") if dropout_key is None else dropout_key
            keys = dropout.per_example(key, tokens.shape[:1])

        embed, output = self._tables()
        x = sharding.gathering(self, lambda embed: embed(tokens))(embed)
        x = x if config.embedding_scale == 1 else x * jnp.asarray(config.embedding_scale, x.dtype)
        x = self._add_positions(x, caches, segments)
        if keys is not None:
            x = dropout.dropout(x, dropout.fold_in(keys, config.num_layers), config.dropout)
        x = sharding.constrain(x, "batch", "length", None)
        x, caches = stack.fold(self, x, Context(mask, segments, lengths), keys, caches)
        x = x if places is None else jnp.take_along_axis(x, places[..., None], axis=1)
        options = {"use_bias": config.use_bias, "dtype": config.dtype, "name": "final_norm"}
        x = make_norm(config.norm, config.norm_epsilon, **options)(x)
        x = x if config.logit_scale == 1 else x * jnp.asarray(config.logit_scale, x.dtype)
        if targets is not None:
            return sharding.gathering(self, functools.partial(logits.losses, config, x, targets))(output)
        out = sharding.gathering(self, functools.partial(logits.logits, config, x))(output)
        out = out[..., : config.vocab_size]
        return out if caches is None else (out, caches)

    def _tables(self) -> tuple[nn.Embed, nn.Embed]:
        """The embeddings of tokens and of the output layer, which may be the same."""
        rows, width = self.config.vocab_rows, self.config.width
        options = {"dtype": self.dtype, "embedding_init": self.config.kernel_init}
        embed = nn.Embed(rows, width, name="embed", **options)
        return embed, embed if self.config.tie_embeddings else nn.Embed(rows, width, name="output", **options)

    def _add_positions(self, x, caches, segments):
        """Add positional embeddings to `[B, T, F]`, if the model has them."""
        encoding, width = self.config.position_encoding, self.config.width
        if encoding not in ("learned", "sinusoidal"):
            return x
        positions = jnp.arange(x.shape[1]) if segments is None else within_segments(segments)
        if caches is not None:
            positions = caches[0].length[:, None] + positions
        if encoding == "learned":
            table = LearnedPositions(self.config.context, width, dtype=self.dtype, name="positions")
            return x + sharding.gathering(self, lambda table: table(positions))(table)
        # Scaled as in Vaswani et al. 2017, section 3.4: otherwise sines would dominate embeddings of std 0.02.
        return x * width**0.5 + sinusoidal(positions, width).astype(self.dtype)

    def block(self, layer: int) -> Block:
        """The block of layer number `layer`."""
        config = self.config
        initializers = {"kernel_init": config.kernel_init, "out_kernel_init": config.out_kernel_init, "parent": None}
        options = {"gated": config.mlp == "gated", "dtype": config.dtype, **initializers}
        mlp = Mlp(config.hidden, config.activation, config.use_bias, **options) if config.hidden else None
        return Block(
            config.layer(layer).make(config),
            mlp,
            config.dropout,
            config.use_bias,
            norm_epsilon=config.norm_epsilon,
            norm=config.norm,
            norm_at=config.norm_of(layer),
            dtype=config.dtype,
            name=f"block_{layer}",
        )

    def init_caches(self, batch: int, capacity: int | None = None) -> tuple[Any, ...]:
        """One empty cache per layer, a `KVCache` for attention, for `capacity` positions (the context when None).

        >>> model = GPT.of(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 6), jnp.int32))
        >>> logits, caches = model.apply(params, jnp.array([[1, 2, 3]]), caches=model.init_caches(batch=1))
        >>> logits, caches = model.apply(params, jnp.array([[4]]), caches=caches)  # one more token
        >>> logits.shape
        (1, 1, 10)
        """
        config, sizes = self.config, (batch, self.config.width, capacity or self.config.context)
        # A fresh cache for each layer, because a donated buffer must not appear twice.
        return tuple(config.layer(n).make(config).init_cache(*sizes) for n in range(config.num_layers))
