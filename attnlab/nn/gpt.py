"""The GPT: embeddings, transformer blocks, and an output layer."""

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import optax
from jaxtyping import Float, Int

from attnlab.nn import checks, own, sharding, stack
from attnlab.nn.block import NORM_AT, NORM_EPSILON, Block
from attnlab.nn.checks import check_lengths, check_segments
from attnlab.nn.fields import POSITIONS, check_shape
from attnlab.nn.groups import GROUPS, Latent, Recurrence, group
from attnlab.nn.kinds import MIXERS, kind_of, named, norm_at_of
from attnlab.nn.layer import Context
from attnlab.nn.mlp import ACTIVATIONS, MLPS, Mlp
from attnlab.nn.norms import NORMS, make_norm
from attnlab.nn.positions import LearnedPositions, sinusoidal, within_segments
from attnlab.nn.remat import REMAT
from attnlab.nn.resolved import resolved
from attnlab.nn.rotations import Rotary
from attnlab.ops import dropout
from attnlab.ops.attention import implementations
from attnlab.ops.cross_entropy import chunk_size, cross_entropy, without_padding
from attnlab.ops.score_mods import ScoreMod
from attnlab.support.errors import UserError
from attnlab.support.options import described, option, options
from attnlab.types import Array, DType

_CAP = {"low": 1e-3, "high": 1e6}  # of logits


class GPT(checks.MaskedModule):
    """A decoder-only transformer: by default pre-norm blocks and a tied embedding, as GPT-2 (Radford et al. 2019).

    Its fields make it a Llama, Gemma, Qwen or OLMo as well: `attnlab.interop.huggingface` sets them from a checkpoint,
    and docs/guide/models.md lists them.

    Weights are drawn from a normal distribution with standard deviation 0.02, those that project onto the residual
    stream with 0.02/√(2L). Biases start at 0.

    Tokens are 0 … vocab_size − 1. The tables of tokens have `padded_vocab_size` rows, where that is set; the rows after
    the tokens are padding: they have no logits, no part in the softmax, and a gradient of 0.

    >>> model = GPT(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
    >>> tokens = jnp.zeros((1, 6), jnp.int32)
    >>> params = model.init(jax.random.key(0), tokens)
    >>> jax.jit(model.apply)(params, tokens).shape  # logits of the next token, at each position
    (1, 6, 10)

    Parameters may also have their layers stacked (`stack_layers`). They are then one loop, which is compiled in the
    time of one pattern; with caches, or other collections than parameters, layers are slices of the stacks:

    >>> stacked = {"params": stack_layers(params["params"])}
    >>> bool(jnp.allclose(model.apply(stacked, tokens), model.apply(params, tokens), atol=1e-6))
    True

    Two documents packed into one sequence, which do not attend to each other:

    >>> segments = jnp.array([[0, 0, 0, 0, 1, 1]])
    >>> model.apply(params, tokens, segments=segments).shape
    (1, 6, 10)
    """

    vocab_size: int
    num_layers: int = option("layers of blocks, L", start=4, low=1, high=10_000)
    num_heads: int = option("query heads of a layer, H", start=4, low=1)
    width: int = option("features of the residual stream, F", start=128, low=1)
    context: int = option("tokens of the longest training sequence; the number of learned positions", start=64, low=1)
    kv_heads: int | None = option("key and value heads, a divisor of num_heads; None for num_heads", None, low=1)
    dropout: float = option(
        "probability of dropping an embedding, an attention weight or an element of a layer's output",
        0.0,
        low=0,
        high=0.999,
    )
    positions: str = option(
        "how positions are encoded; auto is rotary for layers of attention, none for others",
        "learned",
        start="auto",
        choices=POSITIONS,
    )
    window: int | None = option(
        "positions that a token attends to, including itself; None for all before it", None, low=1
    )
    soft_cap: float | None = option("limit of attention logits (Gemma Team 2024); None for no limit", None, **_CAP)
    qk_norm: bool = option("normalize queries and keys, which keeps large learning rates stable", False, start=True)
    use_bias: bool = option("biases of linear layers and norms", True, start=False)
    mlp_ratio: int | float = option(
        "width of the feed-forward layer over the model's; 0 for attention alone", 4, start=4.0, low=0, high=1e3
    )
    activation: str = option("of the feed-forward layer", "gelu_tanh", choices=ACTIVATIONS)
    norm_epsilon: float = option("ε of the norms; of qk_norm where norm is not layer", NORM_EPSILON, low=1e-30, high=1)
    remat: str = option(
        "values of a block that are stored for the gradient; the rest is computed again: none recomputes nothing (in a "
        "loop no product), dots stores matrix products, attention the block's input and the operator's output, block "
        "the input alone: a third more operations, the least memory",
        "none",
        choices=REMAT,
    )
    dtype: DType = jnp.float32
    impl: str = option("backend of the attention operator", "auto", choices=("auto", *implementations()))
    head_dim: int | None = option("features of a head, D; None for width / num_heads", None, low=1)
    norm: str = option("kind of norm; the gain of rms_plus_one is 1 + scale", "layer", choices=NORMS)
    norm_at: str = option(
        "where the norms of attention and feed-forward layers are; hybrid is after in blocks of attention, before in "
        "blocks of other mixers",
        "before",
        choices=(*NORM_AT, "hybrid"),
    )
    mlp: str = option("kind of feed-forward layer", "plain", choices=MLPS)
    attention_bias: bool | None = option("biases of attention's layers; None for use_bias", None)
    qkv_bias: bool | None = option("biases of queries, keys and values; None for attention_bias", None)
    qk_norm_joint: bool = option("qk_norm over the features of all heads together", False)
    tie_embeddings: bool = option("the output layer shares the weights of the embedding", True)
    rotary: Rotary = Rotary()
    pattern: str = option(
        "the kind of each layer, repeated, as in 'local local global': a mixer, local (within window) or global; "
        "or FILE.py:NAME; empty for mixer in all layers",
        "",
    )
    mixer: str = option(
        "the layer that mixes tokens, or FILE.py:NAME for your own; pattern for layers of several kinds",
        "attention",
        choices=MIXERS,
        pattern=own.WORD,
    )
    recurrence: Recurrence = Recurrence()
    local_base: float | None = option("rotary base of local layers; None for rotary in all", None, low=1e-3, high=1e12)
    score_scale: float | None = option("factor of attention logits; None for 1/√head_dim", None, low=1e-9, high=1e6)
    sinks: bool = option("a learned extra logit for each head, see attnlab.attention", False)
    embedding_scale: int | float = option("factor of the embeddings", 1.0, low=1e-6, high=1e6)
    logit_scale: int | float = option("factor of the logits", 1.0, low=1e-6, high=1e6)
    logit_cap: int | float | None = option("limit of the logits, after their factor; None for no limit", None, **_CAP)
    value_residual: bool = option("mix the values of each layer with the first layer's (Zhou et al. 2024)", False)
    output_gate: bool = option("multiply the outputs of attention's heads by a learned gate (Qiu et al. 2025)", False)
    zero_outputs: bool = option("layers that project onto the residual stream start at 0", False)
    bigrams: bool = option("a table of logits for each last token, of vocab_size² parameters", False)
    mask: checks.MaskLike | None = None
    latent: Latent = Latent()
    score_mod: ScoreMod | tuple[ScoreMod, ...] | None = None
    padded_vocab_size: int | None = None

    @property
    def vocab_rows(self) -> int:
        """Rows of the tables of tokens: vocab_size, and those after it that pad them."""
        return self.padded_vocab_size or self.vocab_size

    def over_tokens(self, vocab_size: int) -> "GPT":
        """The model of the same parameters whose tokens are the first `vocab_size`, the others being padding.

        >>> model = GPT(vocab_size=16, num_layers=1, num_heads=2, width=8, context=6).over_tokens(10)
        >>> model.vocab_size, model.padded_vocab_size
        (10, 16)
        """
        return (
            self
            if vocab_size == self.vocab_size
            else self.clone(vocab_size=vocab_size, padded_vocab_size=self.vocab_rows)
        )

    @classmethod
    def from_config(cls, config, vocab_size: int) -> "GPT":
        """The model of a run's `config.model` and `config.precision`, "float32" or "bfloat16".

        `vocab_size` is the tokenizer's; `config.model.vocab_size` pads it if it is larger. UserError if it is smaller.
        """
        size = config.model.vocab_size or vocab_size
        if size < vocab_size:
            raise UserError(
                f"config.model.vocab_size = {size} is less than the tokenizer's {vocab_size}: leave it out, or with "
                "config.init_from choose the tokenizer that the model was trained with"
            )
        values = {name: getattr(config.model, name) for name in options(cls) if "." not in name}
        values |= {name: group(config.model, name) for name in GROUPS}
        return cls(vocab_size=size, dtype=jnp.dtype(config.precision), **values).over_tokens(vocab_size)

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
        """Logits of the next token at each position, or the cross-entropy of given ones.

        Args:
          tokens: int `[B, T]`, each in [0, vocab_size); checked unless traced.
          mask: and-ed with the causal mask or window of every layer, e.g. `masks.Segments(ids)`; a bool array counts
            as `masks.Dense`. With caches, its keys are the caches' S slots: a bool array is `[T, S]`.
          deterministic: False for dropout.
          caches: one per layer (`init_caches`), each with a length `[B]`; `tokens` continue the cached sequences.
          dropout_key: one key, or one per example `[B]`; the `dropout` rng when None.
          targets: int `[B, T]`, or `[B, R]` with `places`, the next tokens, each in [0, vocab_size); checked unless
            traced, where the loss of others is NaN. Large logits are then never held at once, but with `bigrams`: see
            `ops.cross_entropy`.
          segments: int `[B, T]`, the number of each token's document, where sequences are several documents, one after
            another: a token attends to its own alone, and positions start again with each.
          lengths: int `[B]`, the tokens of each sequence: the others, at the right, are padding that no token sees and
            that caches do not keep.
          places: int `[B, R]`, the positions whose logits or losses are computed; None for all T.

        Returns:
          float32 `[B, R, V]` (R is T without `places`, or what `attnlab.see` keeps), and with caches also the extended
          caches; with targets their cross-entropy in nats, float32 `[B, R]`.

        Raises:
          ValueError: fields that do not fit together (`check_shape`), tokens out of range, a sequence longer than the
            learned positions, caches or a mask of another size, targets of another shape or together with caches,
            segments of another shape or with caches, places of another shape, stacked layers of another number than
            num_layers.
        """
        check_shape(self, options(type(self)))
        self._check_inputs(tokens, caches, segments, lengths)
        self._check_outputs(tokens, caches, places, targets)
        drops = bool(self.dropout) and not deterministic
        keys = None
        if drops:
            key = self.make_rng("dropout") if dropout_key is None else dropout_key
            keys = dropout.per_example(key, tokens.shape[:1])

        embed, output = self._tables()
        x = sharding.gathering(self, lambda embed: embed(tokens))(embed)
        x = x if self.embedding_scale == 1 else x * jnp.asarray(self.embedding_scale, x.dtype)
        x = self._add_positions(x, caches, segments)
        if drops:
            x = dropout.dropout(x, dropout.fold_in(keys, self.num_layers), self.dropout)
        x = sharding.constrain(x, "batch", "length", None)
        context = Context(mask, segments, lengths)
        x, caches = stack.fold(self, x, context, keys, caches)
        if places is not None:
            x = jnp.take_along_axis(x, places[..., None], axis=1)
            tokens = jnp.take_along_axis(tokens, places, axis=1)
        x = make_norm(self.norm, self.norm_epsilon, use_bias=self.use_bias, dtype=self.dtype, name="final_norm")(x)
        x = x if self.logit_scale == 1 else x * jnp.asarray(self.logit_scale, x.dtype)
        pairs = self._bigrams(tokens) if self.bigrams else None
        if targets is not None:
            return sharding.gathering(self, functools.partial(self._losses, x, targets, pairs))(output)
        logits = sharding.gathering(self, functools.partial(self._logits, x, pairs))(output)
        logits = logits[..., : self.vocab_size]
        return logits if caches is None else (logits, caches)

    def _tables(self) -> tuple[nn.Embed, nn.Embed]:
        """The embeddings of tokens and of the output layer, which may be the same."""
        options = {"dtype": self.dtype, "embedding_init": nn.initializers.normal(0.02)}
        embed = nn.Embed(self.vocab_rows, self.width, name="embed", **options)
        if self.tie_embeddings:
            return embed, embed
        return embed, nn.Embed(self.vocab_rows, self.width, name="output", **options)

    def _bigrams(self, tokens):
        table = nn.Embed(self.vocab_rows, self.vocab_rows, embedding_init=nn.initializers.zeros, name="bigrams")
        return table(tokens)

    def _logits(self, x, bigrams, embed):
        logits = sharding.constrain(embed.attend(x), "batch", "length", "vocab")
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        if bigrams is not None:
            if bigrams.shape != logits.shape:
                raise ValueError("bigrams = True needs the logits of all positions: leave out `positions`")
            logits = logits + bigrams
        return logits if self.logit_cap is None else self.logit_cap * jnp.tanh(logits / self.logit_cap)

    def _losses(self, x, targets, bigrams, embed):
        batch, length, _ = x.shape
        length = -(-length // sharding.shards("length", x))
        chunk = chunk_size(-(-batch // sharding.shards("batch", x)), length, self.vocab_rows)
        if chunk < length and bigrams is None:
            losses = functools.partial(cross_entropy, vocab_size=self.vocab_size, chunk=chunk, cap=self.logit_cap)
            return sharding.over_tokens(losses, x, embed.embedding, targets)
        logits = without_padding(self._logits(x, bigrams, embed), self.vocab_size)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.where((targets >= 0) & (targets < self.vocab_size), losses, jnp.nan)  # as in chunks

    def _check_outputs(self, tokens, caches, places, targets) -> None:
        predicted = tokens if places is None else places
        if places is not None:
            batch, length = jnp.shape(tokens)
            if jnp.ndim(places) != 2 or jnp.shape(places)[0] != batch:
                raise ValueError(f"places has shape {jnp.shape(places)}, expected [{batch}, places]")
            checks.in_range("places", places, length, remedy="positions of the tokens of this call")
        if targets is None:
            return
        if caches is not None:
            raise ValueError("targets are for whole sequences: leave out caches")
        if jnp.shape(targets) != jnp.shape(predicted):
            raise ValueError(
                f"targets has shape {jnp.shape(targets)}, expected {jnp.shape(predicted)}, as tokens or places"
            )
        checks.in_range("targets", targets, self.vocab_size, remedy="shift the tokens by one")

    def _check_inputs(self, tokens, caches, segments, lengths) -> None:
        if jnp.ndim(tokens) != 2:
            raise ValueError(f"tokens has shape {jnp.shape(tokens)}, expected [batch, length]: add the missing axis")
        checks.in_range("tokens", tokens, self.vocab_size, remedy="encode the text with the model's tokenizer")
        check_segments(segments, tokens, caches=caches)
        check_lengths(lengths, tokens)
        if caches is None:
            return
        remedy = f"make them with model.init_caches(batch={tokens.shape[0]})"
        alone = hasattr(caches, "length")  # one layer's cache, itself a tuple
        if alone or len(caches) != self.num_layers:
            given = f"one {type(caches).__name__}" if alone else f"{len(caches)} of them"
            raise ValueError(f"caches is {given}, expected a sequence of num_layers = {self.num_layers}: {remedy}")
        for layer, cache in enumerate(caches):
            made = named(kind_of(self, layer)).module(self, dtype=self.dtype)
            made.check_cache(cache, tokens.shape[0], self.width, f"caches[{layer}]")

    def _add_positions(self, x, caches, segments):
        """Add positional embeddings to `[B, T, F]`, where the model has them; sinusoidal ones to scaled embeddings."""
        if self.positions not in ("learned", "sinusoidal"):
            return x
        positions = jnp.arange(x.shape[1]) if segments is None else within_segments(segments)
        if caches is not None:
            positions = caches[0].length[:, None] + positions
        if self.positions == "learned":
            table = LearnedPositions(self.context, self.width, dtype=self.dtype, name="positions")
            return x + sharding.gathering(self, lambda table: table(positions))(table)
        # As in Vaswani et al. 2017, section 3.4: sines of size 1 would dominate embeddings of deviation 0.02.
        return x * self.width**0.5 + sinusoidal(positions, self.width).astype(self.dtype)

    def block(self, layer: int) -> Block:
        """A layer of the model, by its number."""
        normal, zeros = nn.initializers.normal, nn.initializers.zeros
        shared = {
            "kernel_init": normal(0.02),
            "out_kernel_init": zeros if self.zero_outputs else normal(0.02 / (2 * self.num_layers) ** 0.5),
            "dtype": self.dtype,
            "parent": None,
        }
        hidden, gated = resolved(self).hidden, self.mlp == "gated"
        return Block(
            named(kind_of(self, layer)).module(self, **shared),
            Mlp(hidden, self.activation, self.use_bias, gated=gated, **shared) if hidden else None,
            self.dropout,
            self.use_bias,
            norm_epsilon=self.norm_epsilon,
            norm=self.norm,
            norm_at=norm_at_of(self, layer),
            dtype=self.dtype,
            name=f"block_{layer}",
        )

    def init_caches(self, batch: int, capacity: int | None = None) -> tuple[Any, ...]:
        """One empty cache per layer, a `KVCache` of attention, for `capacity` positions (the context when None).

        >>> model = GPT(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
        >>> params = model.init(jax.random.key(0), jnp.zeros((1, 6), jnp.int32))
        >>> logits, caches = model.apply(params, jnp.array([[1, 2, 3]]), caches=model.init_caches(batch=1))
        >>> logits, caches = model.apply(params, jnp.array([[4]]), caches=caches)  # one more token
        >>> logits.shape
        (1, 1, 10)
        """
        kinds = (named(kind_of(self, layer)) for layer in range(self.num_layers))
        # No buffer twice: they may be donated.
        return tuple(kind.init_cache(self, batch, capacity or self.context) for kind in kinds)


GPT.__doc__ += "\nAttributes:\n" + described(options(GPT))
