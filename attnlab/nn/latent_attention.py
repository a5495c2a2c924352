"""Multi-head latent attention."""

import functools
import math
from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from attnlab.nn import checks, projections, sharding, taps
from attnlab.nn.cache import LatentCache, step
from attnlab.nn.layer import Context, Layer, LayerOut
from attnlab.nn.matrices import Matrix
from attnlab.nn.multihead import SoftmaxConfig, dropout_of, mask_of, seen, without_dropout
from attnlab.nn.norms import RMSNorm
from attnlab.nn.positions import within_segments
from attnlab.nn.rotations import Rotary, rotary
from attnlab.ops.attention import attention, attention_weights, implementations
from attnlab.support.options import FieldError, option
from attnlab.types import Array, DType


class LatentAttention(checks.MaskedModule, Layer):
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1): keys and values from one latent.

    A token's latent c = RMSNorm(W x), with R features, gives the keys and values of all heads. A rotated part of D
    features, shared by all heads, is appended to each key. Queries have both parts too, projected from x or a query
    latent. Scores are (q·k + q_rotary·k_rotary) / √(N + D).

    A cache holds latents and rotated parts, R + D numbers per token. A step of few tokens does not expand the cache: it
    absorbs the projections of keys and values into queries, with R + D features, and outputs, with R features.

    Parameters: `query/kernel` `[F, H, N + D]`, or `query_down/kernel` `[F, Rq]`, `query_norm/scale` and
    `query/kernel` `[Rq, H, N + D]`; `latent/kernel` `[F, R]`, `latent_norm/scale`, `rotary/kernel` `[F, D]`,
    `key/kernel` `[R, H, N]`, `value/kernel` `[R, H, V]`, `out/kernel` `[H, V, F]`.

    Attributes:
      num_heads: H.
      kv_rank: R.
      nope_dim: N, features of a key without rotary position.
      rope_dim: D, rotated features, even.
      value_dim: V.
      use_bias: whether `query_down`, `latent`, `rotary` and `out` add a bias.
      mask, score_mod, dropout_rate, rotary, kernel_init, out_kernel_init, dtype: see `MultiHeadAttention`.
      norm_epsilon: ε of the latents' norms.

    >>> layer = LatentAttention(num_heads=2, kv_rank=6, nope_dim=4, rope_dim=2, value_dim=4, mask=Causal())
    >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    num_heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = option("features of the query latent, Rq; None to project queries from x", None, low=1)
    use_bias: bool = False
    mask: checks.MaskLike | None = None
    score_mod: object = None
    dropout_rate: float = 0.0
    rotary: float | Rotary | None = None
    scale: float | None = option("factor applied to attention logits; None for 1/√(N + D)", None, low=1e-9, high=1e6)
    norm_epsilon: float = 1e-6
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    out_kernel_init: nn.initializers.Initializer | None = None
    dtype: DType | None = None
    impl: str = option("backend of the operator", "auto", choices=("auto", *implementations()))

    operator: ClassVar[str | None] = "attention"

    def init_cache(self, batch: int, features: int, capacity: int = 0) -> LatentCache:
        """An empty cache for `capacity` positions; `features` is the input's width."""
        if self.rope_dim % 2:
            raise FieldError("rope_dim", self.rope_dim, "expected an even number, as pairs of features are rotated")
        return LatentCache.empty(batch, capacity, self.kv_rank, self.rope_dim, self.dtype or jnp.float32)

    def operands(self, batch: int, length: int, features: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes of the operator's q, k and v when the layer expands keys and values."""
        sizes = (self.nope_dim + self.rope_dim,) * 2 + (self.value_dim,)
        shape, dtype = (batch, length, self.num_heads), self.dtype or jnp.float32
        return tuple(jax.ShapeDtypeStruct((*shape, size), dtype) for size in sizes)

    @nn.compact
    def forward(self, x: Float[Array, "B T F"], context: Context, cache: LatentCache | None = None) -> LayerOut:
        """Project, extend the cache, and attend to the latents, by expanding them or absorbing the projections."""
        positions = jnp.arange(x.shape[1])[None] if context.segments is None else within_segments(context.segments)
        positions = positions if cache is None else cache.length[:, None] + positions
        query, latent, rotated = self._project(x, positions)
        mask, scale, is_step = mask_of(self, context, cache), self.scale, cache is not None
        scale = (self.nope_dim + self.rope_dim) ** -0.5 if scale is None else scale
        terms = {"score_mod": self.score_mod, "scale": scale} | dropout_of(self, context)
        if is_step:
            fresh = LatentCache(latent, rotated, None)
            (latent, rotated, _), kv_positions, mask, cache = step(cache, fresh, mask, self.num_heads, context.lengths)
            terms |= {"q_positions": positions, "kv_positions": kv_positions}
        latent, rotated = (y.astype(query[0].dtype) for y in (latent, rotated))
        z = self._attend(query, latent, rotated, terms | {"mask": mask}, is_step)
        return LayerOut(projections.out(self, z, x.shape[-1], use_bias=self.use_bias), cache)

    def _project(self, x, positions):
        """Queries (`[B, T, H, N]`, rotated `[B, T, H, D]`), latents `[B, T, R]`, rotated parts of keys `[B, T, D]`."""

        linear = functools.partial(projections.dense, self, use_bias=self.use_bias)

        def norm(name, y):
            return RMSNorm(self.norm_epsilon, dtype=self.dtype, name=name)(y)

        def rotate(y):
            return y if self.rotary is None else rotary(y, positions, self.rotary)

        query_input = x if self.q_rank is None else norm("query_norm", linear("query_down", self.q_rank)(x))
        size = self.num_heads, self.nope_dim + self.rope_dim
        query = projections.dense(self, "query", *size, use_bias=False)(query_input)
        query = sharding.constrain(query, "batch", "length", "heads", None)
        plain, rotated = jnp.split(query, (self.nope_dim,), axis=-1)
        latent = norm("latent_norm", linear("latent", self.kv_rank)(x))
        rotated_key = rotate(linear("rotary", self.rope_dim)(x)[..., None, :])[..., 0, :]
        return (plain, rotate(rotated)), latent, rotated_key

    def _attend(self, query, latent, rotated, terms, is_step):
        """The heads' outputs `[B, T, H, V]`."""
        shapes = {"key": (self.num_heads, self.nope_dim), "value": (self.num_heads, self.value_dim)}
        key, value = (
            _Kernel((self.kv_rank, *shape), self.kernel_init, name=name)().astype(latent.dtype)
            for name, shape in shapes.items()
        )
        attend = functools.partial(attention, impl=self.impl, **terms)
        if is_step and query[0].shape[1] < self._break_even and not taps.is_used(self):
            plain = jnp.einsum("bthn,rhn->bthr", query[0], key)
            q, k = jnp.concatenate([plain, query[1]], axis=-1), jnp.concatenate([latent, rotated], axis=-1)
            return jnp.einsum("bthr,rhv->bthv", attend(q, k[..., None, :], latent[..., None, :]), value)
        q = jnp.concatenate(query, axis=-1)
        k, v = jnp.einsum("bsr,rhn->bshn", latent, key), jnp.einsum("bsr,rhv->bshv", latent, value)
        shared = jnp.broadcast_to(rotated[..., None, :], (*k.shape[:-1], self.rope_dim))
        k = jnp.concatenate([k, shared], axis=-1)
        q, k, v = (sharding.constrain(y, "batch", "length", "heads", None) for y in (q, k, v))
        q, k, v = (taps.tap(self, name, y) for name, y in (("q", q), ("k", k), ("v", v)))

        def weights(rows=None):
            return attention_weights(q, k, rows=rows, **without_dropout(terms))

        return seen(self, attend(q, k, v), weights, v, "dropout_rate" in terms)

    @property
    def _break_even(self) -> float:
        """The number of tokens per step from which expanding a cache costs less than absorbing the projections.

        For each slot and head, expanding costs R·(N + V) products once, and saves 2·R − N − V products per token.
        """
        expansion, saved = self.nope_dim + self.value_dim, 2 * self.kv_rank - self.nope_dim - self.value_dim
        return self.kv_rank * expansion / saved if saved > 0 else float("inf")


class _Kernel(nn.Module):
    """A projection's kernel, which expands latents or is absorbed into queries or outputs."""

    shape: tuple[int, ...]
    init: nn.initializers.Initializer

    def matrices(self, _) -> dict[str, Matrix]:
        axes = tuple(range(-len(self.shape), 0))
        return {"kernel": Matrix(axes[:1], axes[1:])}

    @nn.compact
    def __call__(self):
        def init(key):
            matrix = self.init(key, (self.shape[0], math.prod(self.shape[1:])), jnp.float32)
            return matrix.reshape(self.shape)

        return self.param("kernel", init)


class LatentConfig(SoftmaxConfig, of=LatentAttention, kind="latent"):
    """Multi-head latent attention; default sizes as in DeepSeek-AI 2024 (arXiv 2405.04434), section 3.1.2."""

    kv_rank: int | None = option("features of the key-value latent; None for 4·width / num_heads", None, low=1)
    nope_dim: int | None = option("features of a key without rotary position; None for width / num_heads", None, low=1)
    rope_dim: int | None = option("rotated features of a key, shared by all heads; None for half nope_dim", None, low=2)
    value_dim: int | None = option("features of a value; None for nope_dim", None, low=1)

    def shared(self, model):
        head_size = max(1, model.width // self.num_heads(model))
        nope_dim = self.nope_dim or head_size
        return super().shared(model) | {
            "kv_rank": self.kv_rank or 4 * head_size,
            "nope_dim": nope_dim,
            "rope_dim": self.rotated_features(model),
            "value_dim": self.value_dim or nope_dim,
        }

    def rotated_features(self, model) -> int:
        """D, the number of rotated features of a key."""
        nope_dim = self.nope_dim or max(1, model.width // self.num_heads(model))
        return self.rope_dim or max(2, nope_dim // 4 * 2)
