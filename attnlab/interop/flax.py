"""The operator as the attention of Flax's own layers."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype as promote_types
from jaxtyping import Float, Integer

from attnlab.ops.attention import attention, attention_weights
from attnlab.ops.masks import Causal, Dense, Mask, Segments, join
from attnlab.ops.score_mods import ScoreMod
from attnlab.types import Array

__all__ = ["attention_fn"]


def attention_fn(
    mask: Mask | None = None,
    score_mod: ScoreMod | tuple[ScoreMod, ...] | None = None,
    impl: str = "auto",
    *,
    scale: float | Float[Array, ""] | None = None,
    sinks: Float[Array, " H"] | None = None,
    q_positions: Integer[Array, "..."] | None = None,
    kv_positions: Integer[Array, "..."] | None = None,
    block_sizes: tuple[int, int] | None = None,
) -> Callable[..., Array]:
    """`attnlab.attention` for `attention_fn=` of Flax's layers.

    They are `flax.linen.MultiHeadDotProductAttention`, `MultiHeadAttention` and `SelfAttention`, and
    `flax.nnx.MultiHeadAttention`. What a layer asks for is honoured, or refused by name: its mask (one of
    `attnlab.masks`, or an array of any type where nonzero is visible) is and-ed with `mask`, its weights are sown
    before dropout. The answers are those of flax's `dot_product_attention`, but for three things: a row that sees
    nothing gives 0, not an average; the softmax is float32 whatever the type; and each weight drops by itself, which
    a layer must ask for by `broadcast_dropout=False`.

    With `decode=True` flax masks what is not written yet, but does not tell at which position the query stands: leave
    out masks and score mods that compare positions.

    Args:
      mask: who may look at whom, besides the layer's mask.
      score_mod, impl, scale, sinks, q_positions, kv_positions, block_sizes: as in `attnlab.attention`.

    Returns:
      A function of query `[..., Tq, H, D]`, key `[..., Tk, Hk, D]`, value `[..., Tk, Hk, Dv]` and the other arguments
      of `flax.linen.dot_product_attention` and `flax.nnx.dot_product_attention`, to `[..., Tq, H, Dv]`. Its ValueErrors
      name an argument that it cannot honour, and what to do. Make it once: two of them are not equal, so that what is
      compiled for one layer is compiled again for the other.

    >>> import flax.linen as nn
    >>> layer = nn.MultiHeadDotProductAttention(num_heads=2, attention_fn=attention_fn(Causal()))
    >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """
    fixed, mods = mask, score_mod if isinstance(score_mod, tuple) else (score_mod,)

    # Flax looks here which arguments to give, so all that it knows are named.
    def attend(
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
        force_fp32_for_softmax=False,  # it always is
        einsum_dot_general=None,
        qk_attn_weights_einsum=None,
        attn_weights_value_einsum=None,
        promote_dtype=None,
        is_causal=False,
    ):
        """Attention as Flax calls it; see `attnlab.interop.flax.attention_fn`."""
        for name, given in (
            ("einsum_dot_general", einsum_dot_general),
            ("qk_attn_weights_einsum", qk_attn_weights_einsum),
            ("attn_weights_value_einsum", attn_weights_value_einsum),
        ):
            if given is not None:
                raise ValueError(f"{name} = {given!r}: expected None, as the products are attnlab's; leave it out")
        of_each = precision if isinstance(precision, tuple) else (precision,)
        if any(one not in (None, "default", jax.lax.Precision.DEFAULT) for one in of_each):
            raise ValueError(
                f"precision = {precision!r}: expected None, as it would not reach the gradient; put the whole step "
                "under jax.default_matmul_precision(...)"
            )
        drops = not deterministic and dropout_rate > 0
        if drops and broadcast_dropout:
            raise ValueError(
                f"broadcast_dropout = {broadcast_dropout} with dropout_rate = {dropout_rate}: expected False, as each "
                "weight drops by itself; give the layer broadcast_dropout=False"
            )
        if drops and dropout_rng is None:
            raise ValueError(
                f"dropout_rng = None with dropout_rate = {dropout_rate}: give a key, or deterministic=True"
            )

        if promote_dtype is None:
            query, key, value = promote_types(query, key, value, dtype=dtype)
        else:
            query, key, value = promote_dtype((query, key, value), dtype=dtype)
        *batch, q_length, num_heads, _ = query.shape
        scores = (*batch, num_heads, q_length, key.shape[-3])
        causal = Causal() if is_causal else None
        if q_positions is None or kv_positions is None:
            _refuse_to_guess({"mask": (fixed, mask), "is_causal": (causal,), "score_mod": mods}, *scores[-2:])
        terms = {
            "mask": join(fixed, causal, _as_mask(mask, scores)),
            "score_mod": score_mod,
            "bias": None if bias is None else _as_bias(bias, scores),
            "scale": scale,
            "sinks": sinks,
            "q_positions": q_positions,
            "kv_positions": kv_positions,
        }
        if module is not None:
            _sow(module, attention_weights(query, key, **terms).astype(query.dtype))
        if drops:
            terms |= {"dropout_rate": dropout_rate, "dropout_key": dropout_rng}
        return attention(query, key, value, impl=impl, block_sizes=block_sizes, **terms)

    return attend


def _refuse_to_guess(named, q_length, kv_length) -> None:
    for name, nodes in named.items():
        if q_length != kv_length and any(getattr(node, "positional", False) for node in nodes):
            raise ValueError(
                f"{name} compares positions, but Tq = {q_length} and Tk = {kv_length} differ and flax does not tell "
                "where the queries stand: leave causality to flax, whose decode=True masks by itself, or give "
                "attention_fn q_positions and kv_positions"
            )


def _as_mask(mask, scores) -> Mask | None:
    """An array that broadcasts to `[..., H, Tq, Tk]`, written out only for those that it tells apart."""
    if mask is None or isinstance(mask, Mask):
        return mask
    seen = _aligned("mask", jnp.asarray(mask).astype(bool), scores)
    *batch, _, q_length, kv_length = scores
    *lead, heads, rows, _ = seen.shape
    axes = (*batch, heads)
    if heads == 1 and set(lead) <= {1}:
        seen, axes = seen.reshape(seen.shape[-2:]), ()
    if heads == rows == 1:  # the keys are of two segments, and all queries of the one
        ids = jnp.broadcast_to(seen[..., 0, :], (*axes, kv_length)).reshape(*axes[:-1], kv_length)
        return Segments(jnp.ones(q_length, jnp.int32), ids.astype(jnp.int32))
    return Dense(jnp.broadcast_to(seen, (*axes, q_length, kv_length)))


def _as_bias(bias, scores):
    bias = _aligned("bias", jnp.asarray(bias), scores)
    return jnp.broadcast_to(bias, (*bias.shape[:-1], scores[-1]))


def _aligned(name, array, scores):
    """The array with every axis of the scores, of their size or 1."""
    shape = (1,) * (len(scores) - array.ndim) + array.shape
    if len(shape) > len(scores) or any(size not in (1, whole) for size, whole in zip(shape, scores)):
        raise ValueError(f"{name} has shape {array.shape}, expected one that broadcasts to the scores' {scores}")
    return array.reshape(shape)


def _sow(module, weights) -> None:
    if isinstance(module, nn.Module):
        module.sow("intermediates", "attention_weights", weights)
    else:
        from flax import nnx  # which `import attnlab` does not load, and whoever has such a module has

        module.sow(nnx.Intermediate, "attention_weights", weights)
