"""Cross-entropy for a large vocabulary, in few passes over the logits and, in chunks, without storing all of them.

For features x_t, embedding rows e_v and targets y_t, with logits s_tv = x_t·e_v in the features' type,

    m_t = max_v s_tv    l_t = log Σ_v e^(s_tv − m_t)    loss_t = l_t − (s_(t, y_t) − m_t)

and, with g_t the gradient of loss_t,

    p_tv = e^(s_tv − m_t − l_t)    ds_tv = g_t (p_tv − [v = y_t])    dx_t = Σ_v ds_tv e_v    de_v = Σ_t ds_tv x_t

The max and the log of the sum stay separate: if all logits share a large offset, m_t + l_t in float32 rounds l_t away.

The logits of a single chunk are stored for the backward pass. With several chunks, only one chunk's logits are in
memory at a time, and the backward pass recomputes them from x, e, m and l (Wijmans et al. 2024, arXiv 2411.09009).

Logits of bfloat16 features are rounded to bfloat16, which halves the memory traffic that limits the speed. Rounding the
operands changes the logits as much. In a GPT of 4 layers, after 1,000 steps with a vocabulary size of 1,024, loss and
gradient differ from float32 by 1.7e-4 nats and 0.81 %; with float32 logits, still by 1.5e-4 nats and 0.77 %.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Integer

from attnlab.ops import checks
from attnlab.ops.meshes import equally_varying, on_auto_axes, varying_like
from attnlab.types import Array, DType

MAX_LOGITS = 2**28  # 1 GiB in float32
MAX_NARROW_LOGITS = 2**30  # 2 GiB in bfloat16: enough for all GPT-2 logits for 16 sequences of 1,024


def cross_entropy(
    features: Float[Array, "*B T F"],
    embedding: Float[Array, "V F"],
    targets: Integer[Array, "*B T"],
    *,
    vocab_size: int | None = None,
    chunk: int | None = None,
    cap: float | None = None,
) -> Float[Array, "*B T"]:
    """Cross-entropy in nats of each target `[..., T]` under softmax(features·embeddingᵀ); reverse mode only.

    Products are in the features' type and accumulated in float32 (float64 for float64). Rows of the embedding from
    `vocab_size` on are padding. `chunk` None means `chunk_size` for all sequences; under `jit` over a mesh these span
    all devices, so pass `chunk_size` for one device. `cap` limits logits to cap·tanh(logits/cap) (Gemma Team 2024).
    """
    features, embedding = checks.floating("features", features), checks.floating("embedding", embedding)
    _check_shapes(features, embedding, targets)
    num_rows = embedding.shape[0]
    if not isinstance(vocab_size, int | None) or (vocab_size is not None and not 1 <= vocab_size <= num_rows):
        raise ValueError(
            f"vocab_size = {vocab_size}: expected 1 to {num_rows}, the rows of the embedding, or None for all"
        )
    if not isinstance(chunk, int | None) or (chunk is not None and chunk < 1):
        raise ValueError(f"chunk = {chunk}: expected an integer number of positions, 1 or more, or None to choose one")
    if cap is not None and not cap > 0:
        raise ValueError(f"cap = {cap}: expected a logit limit above 0, or None for no limit")
    head = _Head(num_rows if vocab_size is None else vocab_size, cap)
    targets = _checked_targets(targets, head.vocab_size)
    *batch, length, _ = features.shape
    chunk = chunk_size(math.prod(batch), length, num_rows, features.dtype) if chunk is None else chunk
    return _on_mesh(features, embedding, targets, head=head, chunk=chunk)[0]


class _Head(NamedTuple):
    vocab_size: int  # rows of the embedding from this index on are padding
    cap: float | None  # limit of the logits; None for no limit


def chunk_size(rows: int, length: int, vocab_size: int, dtype: DType = jnp.float32) -> int:
    """Positions per chunk: all, or the largest power of 2 with ≤ 2²⁸ logits for `rows` sequences (2³⁰ if 16-bit)."""
    budget = MAX_LOGITS if jnp.finfo(dtype).bits >= 32 else MAX_NARROW_LOGITS
    most = max(1, budget // max(1, rows * vocab_size))
    return min(max(1, length), 2 ** (most.bit_length() - 1))


def _check_shapes(features, embedding, targets):
    if features.ndim < 2:
        raise ValueError(f"features has shape {features.shape}, expected [..., length, features]: add an axis")
    if embedding.ndim != 2 or not embedding.shape[0]:
        raise ValueError(f"embedding has shape {embedding.shape}, expected [vocabulary, features]: one row for each id")
    if embedding.shape[1] != features.shape[-1]:
        raise ValueError(
            f"embedding has {embedding.shape[1]} features per id and features has {features.shape[-1]} per position: "
            "give both the same"
        )
    if jnp.shape(targets) != features.shape[:-1]:
        raise ValueError(
            f"targets has shape {jnp.shape(targets)}, expected {features.shape[:-1]}: one id for each position"
        )


def _checked_targets(targets, vocab_size):
    targets = targets if isinstance(targets, jax.Array | np.ndarray) else jnp.asarray(targets)
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"targets has type {targets.dtype}, expected integers: use .astype(jnp.int32)")
    remedy = "where there is no target use any id, and give its loss the weight 0"
    checks.in_range("targets", targets, vocab_size, remedy=remedy)
    return checks.clipped_to_int32(targets)


@on_auto_axes(lambda spec: (P(*spec[:-1]),))
def _on_mesh(features, embedding, targets, *, head, chunk):
    # Within `shard_map`, an embedding that all devices share is marked as varying; the transpose of this marking
    # sums the embedding's gradient over the devices.
    operands = equally_varying(tuple(jnp.asarray(x) for x in (features, embedding, targets)))
    return (_cross_entropy(*operands, head, chunk),)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _cross_entropy(features, embedding, targets, head, chunk):
    return _forward(features, embedding, targets, head, chunk)[0]


def _forward(features, embedding, targets, head, chunk):
    """Return (loss `[..., T]`, residuals)."""
    operand, length = _as_operand(embedding, features.dtype, head.vocab_size), targets.shape[-1]
    if length <= chunk:
        logits = _logits(features, operand)
        loss, log_sums = _losses(logits, targets, head)
        return loss, (features, embedding, targets, log_sums, logits)
    axis = targets.ndim - 1
    chunks = tuple(_chunked(x, axis, chunk) for x in (features, targets))
    losses = lax.map(lambda part: _losses(_logits(part[0], operand), part[1], head), chunks)
    loss, log_sums = jax.tree.map(lambda x: _joined(x, axis, length), losses)
    return loss, (features, embedding, targets, log_sums, None)


def _backward(head, chunk, residuals, g):
    features, embedding, targets, log_sums, logits = residuals
    operand, length = _as_operand(embedding, features.dtype, head.vocab_size), targets.shape[-1]
    if logits is not None:
        d_features, d_embedding = _gradients(features, operand, logits, targets, log_sums, g, head)
        return d_features, d_embedding.astype(embedding.dtype), None

    def step(total, part):
        x, *per_position = part
        dx, d_embedding = _gradients(x, operand, _logits(x, operand), *per_position, head)
        return total + d_embedding, dx

    axis = targets.ndim - 1
    zero = varying_like(features, jnp.zeros(embedding.shape, log_sums[0].dtype))
    # Padded positions have g = 0 and finite logits, so they add nothing.
    chunks = jax.tree.map(lambda x: _chunked(x, axis, chunk), (features, targets, log_sums, g))
    d_embedding, d_features = lax.scan(step, zero, chunks)
    return _joined(d_features, axis, length), d_embedding.astype(embedding.dtype), None


_cross_entropy.defvjp(_forward, _backward)


def _as_operand(embedding, dtype, vocab_size):
    """The embedding in the type of the products, with zeros for padding, because 0·NaN is NaN."""
    embedding = embedding.astype(dtype)
    if vocab_size == embedding.shape[0]:
        return embedding
    return jnp.where(jnp.arange(embedding.shape[0])[:, None] < vocab_size, embedding, 0)


def _logits(x, embedding):
    """Logits `[..., T, V]` in x's type, before the cap, with padding; summed in float32 (float64 for float64)."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum("...tf,vf->...tv", x, embedding, preferred_element_type=dtype).astype(x.dtype)


def capped(logits: Float[Array, "*B V"], cap: float | None) -> Float[Array, "*B V"]:
    """cap·tanh(logits/cap) in float32 (float64 for float64); without a cap, the logits."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def without_padding(logits: Float[Array, "*B V"], vocab_size: int) -> Float[Array, "*B V"]:
    """The logits, with −∞ from `vocab_size` on; they keep their shape, and so their layout over devices."""
    if vocab_size == logits.shape[-1]:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)


def loss_of_logits(
    logits: Float[Array, "*B V"], targets: Integer[Array, "*B"], vocab_size: int | None = None
) -> Float[Array, "*B"]:
    """Cross-entropy in nats of each target under softmax(logits); NaN for a target outside the vocabulary.

    Adding a number to all logits of a row changes the loss only by rounding errors. Derivatives of any order exist.
    """
    return _loss_and_log_sums(capped(logits, None), targets, logits.shape[-1] if vocab_size is None else vocab_size)[0]


def _losses(logits, targets, head):
    """Return (loss, (max, log_sum)) of some positions."""
    return _loss_and_log_sums(capped(logits, head.cap), targets, head.vocab_size)


def _loss_and_log_sums(logits, targets, vocab_size):
    logits = without_padding(logits, vocab_size)
    largest = lax.stop_gradient(logits.max(axis=-1))
    largest = jnp.where(jnp.isfinite(largest), largest, 0)  # with +∞ or NaN in a row, the loss is not finite either way
    log_sum = jnp.log(jnp.exp(logits - largest[..., None]).sum(axis=-1))
    target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]
    is_in_vocabulary = (targets >= 0) & (targets < vocab_size)
    return jnp.where(is_in_vocabulary, log_sum - (target_logits - largest), jnp.nan), (largest, log_sum)


def _gradients(x, embedding, logits, targets, log_sums, g, head):
    """Return dx in x's type, and the gradient of the embedding in float32 (float64 for float64)."""
    logits, (largest, log_sum) = capped(logits, head.cap), log_sums
    p = jnp.exp(without_padding(logits, head.vocab_size) - largest[..., None] - log_sum[..., None])
    is_target = jnp.arange(embedding.shape[0]) == targets[..., None]
    slope = 1 if head.cap is None else 1 - (logits / head.cap) ** 2
    # Products in a narrow type are faster on devices that support it.
    d_logits = (g[..., None] * (p - is_target) * slope).astype(x.dtype)
    dx = jnp.einsum("...tv,vf->...tf", d_logits, embedding, preferred_element_type=log_sum.dtype).astype(x.dtype)
    positions = tuple(range(targets.ndim))
    return dx, jnp.tensordot(d_logits, x, (positions, positions), preferred_element_type=log_sum.dtype)


def _chunked(x, axis, chunk):
    """Cut `[..., T, …]` into `[n, ..., size, …]`: the fewest equal chunks with size ≤ `chunk`, padded with zeros."""
    length = x.shape[axis]
    count = -(-length // chunk)
    size = -(-length // count)
    x = jnp.pad(x, [(0, count * size - length if n == axis else 0) for n in range(x.ndim)])
    return jnp.moveaxis(x.reshape(*x.shape[:axis], count, size, *x.shape[axis + 1 :]), axis, 0)


def _joined(x, axis, length):
    """The inverse of `_chunked`."""
    x = jnp.moveaxis(x, 0, axis)
    x = x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    return lax.slice_in_dim(x, 0, length, axis=axis)
