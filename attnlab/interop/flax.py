"""The operator as the attention function of Flax's layers."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype as promote_types
from jaxtyping import Bool, Float, Integer

from attnlab.ops.attention import attention, attention_weights
from attnlab.ops.masks import Causal, Dense, Mask, Segments, join
from attnlab.ops.score_mods import ScoreMod
from attnlab.types import Array

__all__ = ["attention_fn"]


def attention_fn(
    mask: Mask | Bool[Array, "..."] | None = None,
    score_mod: ScoreMod | tuple[ScoreMod, ...] | None = None,
    impl: str = "auto",
    *,
    scale: float | Float[Array, ""] | None = None,
    sinks: Float[Array, " H"] | None = None,
    q_positions: Integer[Array, "..."] | None = None,
    kv_positions: Integer[Array, "..."] | None = None,
    block_sizes: tuple[int, int] | None = None,
) -> Callable[..., Array]:
    """`attnlab.attention` as the `attention_fn=` of Flax's layers.

    It fits `flax.linen.MultiHeadDotProductAttention`, `MultiHeadAttention` and `SelfAttention`, and
    `flax.nnx.MultiHeadAttention`. Every argument of the layer is honored or rejected by name. The layer's mask (one of
    `attnlab.masks`, or an array of any type where nonzero is visible) is and-ed with `mask`, and weights are sown
    before dropout. Results equal flax's `dot_product_attention`, with three exceptions: fully masked rows return 0
    instead of an average; the softmax is float32 for every input type; and weights are dropped independently, which the
    layer must request with `broadcast_dropout=False`.

    With `decode=True` flax masks the unwritten slots of its cache but does not pass the query's position: do not use
    masks and score mods that compare positions.

    Args:
      mask: which keys each query may attend to, in addition to the layer's mask.
      score_mod, impl, scale, sinks, q_positions, kv_positions, block_sizes: as in `attnlab.attention`.

    Returns:
      A function of query `[..., Tq, H, D]`, key `[..., Tk, Hk, D]`, value `[..., Tk, Hk, Dv]` and the other arguments
      of `flax.linen.dot_product_attention` and `flax.nnx.dot_product_attention`, which returns `[..., Tq, H, Dv]`. It
      raises ValueError, naming the argument and the remedy, for unsupported arguments. Create it once: two such
      functions are not equal, so a layer compiled with one is compiled again with the other.

    >>> import flax.linen as nn
    >>> layer = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=attention_fn(Causal()))
    >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """
    terms = {"scale": scale, "sinks": sinks, "q_positions": q_positions, "kv_positions": kv_positions}
    return _AttentionFn({"mask": mask, "score_mod": score_mod, **terms}, {"impl": impl, "block_sizes": block_sizes})


class _AttentionFn:
    """The function that `attention_fn` returns: `terms` and `how` are its arguments for the operator."""

    def __init__(self, terms: dict, how: dict):
        self.terms, self.how = terms, how

    # Flax passes only the arguments that this signature names.
    def __call__(
        self,
        query,
        key,
        value,
        bias=None,
        mask=None,
        broadcast_dropout=True,
        dropout_rng=None,
        dropout_rate=0.0,
        deterministic=False,
        dtype=None,
        precision=None,
        module=None,
        *,
        force_fp32_for_softmax=False,  # the softmax is always float32 here
        einsum_dot_general=None,
        qk_attn_weights_einsum=None,
        attn_weights_value_einsum=None,
        promote_dtype=None,
        is_causal=False,
    ):
        """Attention as Flax calls it; see `attnlab.interop.flax.attention_fn`."""
        _check_products(
            precision,
            einsum_dot_general=einsum_dot_general,
            qk_attn_weights_einsum=qk_attn_weights_einsum,
            attn_weights_value_einsum=attn_weights_value_einsum,
        )
        drop = {}
        if not deterministic and dropout_rate > 0:
            _check_dropout(dropout_rate, dropout_rng, broadcast_dropout)
            drop = {"dropout_rate": dropout_rate, "dropout_key": dropout_rng}
        if promote_dtype is None:
            query, key, value = promote_types(query, key, value, dtype=dtype)
        else:
            query, key, value = promote_dtype((query, key, value), dtype=dtype)
        terms = _join(self.terms, query, key, bias, mask, is_causal)
        if module is not None:
            _sow(module, attention_weights(query, key, **terms).astype(query.dtype))
        return attention(query, key, value, **self.how, **terms, **drop)


def _check_products(precision, **einsums) -> None:
    for name, einsum in einsums.items():
        if einsum is not None:
            raise ValueError(f"{name} = {einsum!r}: expected None, as attnlab computes the products; remove it")
    precisions = precision if isinstance(precision, tuple) else (precision,)
    if any(one not in (None, "default", jax.lax.Precision.DEFAULT) for one in precisions):
        raise ValueError(
            f"precision = {precision!r}: expected None, as it would not reach the gradient; run the whole step under "
            "jax.default_matmul_precision(...)"
        )


def _check_dropout(rate, key, broadcast) -> None:
    if broadcast:
        raise ValueError(
            f"broadcast_dropout = {broadcast} with dropout_rate = {rate}: expected False, as weights are dropped "
            "independently; set broadcast_dropout=False in the layer"
        )
    if key is None:
        raise ValueError(f"dropout_rng = None with dropout_rate = {rate}: pass a key, or deterministic=True")


def _join(terms, query, key, bias, mask, is_causal) -> dict:
    """Combine the terms from `attention_fn` and from the layer's call into arguments of the operator."""
    *batch, q_length, num_heads, _ = query.shape
    scores = (*batch, num_heads, q_length, key.shape[-3])
    causal = Causal() if is_causal else None
    if terms["q_positions"] is None or terms["kv_positions"] is None:
        mods = terms["score_mod"] if isinstance(terms["score_mod"], tuple) else (terms["score_mod"],)
        positional = {"mask": (terms["mask"], mask), "is_causal": (causal,), "score_mod": mods}
        _require_positions(positional, q_length, key.shape[-3])
    if bias is not None:
        bias = _aligned("bias", jnp.asarray(bias), scores)
        bias = jnp.broadcast_to(bias, (*bias.shape[:-1], scores[-1]))
    return terms | {"mask": join(terms["mask"], causal, _as_mask(mask, scores)), "bias": bias}


def _require_positions(named, q_length, kv_length) -> None:
    for name, nodes in named.items():
        if q_length != kv_length and any(getattr(node, "positional", False) for node in nodes):
            raise ValueError(
                f"{name} compares positions, but Tq = {q_length} and Tk = {kv_length} differ and flax passes no "
                "query positions: leave causality to flax, because its decode=True masks by itself, or pass "
                "q_positions and kv_positions to attention_fn"
            )


def _as_mask(mask, scores) -> Mask | None:
    """Convert an array that broadcasts to `[..., H, Tq, Tk]` to a mask; an axis H of size 1 is not expanded."""
    if mask is None or isinstance(mask, Mask):
        return mask
    visible = _aligned("mask", jnp.asarray(mask).astype(bool), scores)
    *batch, _, q_length, kv_length = scores
    *lead, heads, rows, _ = visible.shape
    axes = (*batch, heads)
    if heads == 1 and set(lead) <= {1}:
        visible, axes = visible.reshape(visible.shape[-2:]), ()
    if heads == rows == 1:  # equal for all heads and queries: queries and visible keys form segment 1
        ids = jnp.broadcast_to(visible[..., 0, :], (*axes, kv_length)).reshape(*axes[:-1], kv_length)
        return Segments(jnp.ones(q_length, jnp.int32), ids.astype(jnp.int32))
    return Dense(jnp.broadcast_to(visible, (*axes, q_length, kv_length)))


def _aligned(name, array, scores):
    """Reshape an array to the rank of the scores; each axis has the scores' size or 1."""
    shape = (1,) * (len(scores) - array.ndim) + array.shape
    if len(shape) > len(scores) or any(size not in (1, full) for size, full in zip(shape, scores)):
        raise ValueError(f"{name} has shape {array.shape}, expected one that broadcasts to the scores' {scores}")
    return array.reshape(shape)


def _sow(module, weights) -> None:
    if isinstance(module, nn.Module):
        module.sow("intermediates", "attention_weights", weights)
    else:
        from flax import nnx  # imported here because `import attnlab` does not load it

        module.sow(nnx.Intermediate, "attention_weights", weights)
