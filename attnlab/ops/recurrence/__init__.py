"""The linear recurrence that linear attention, Mamba-2, GLA, DeltaNet and their relatives have in common.

Files: `terms` and `call` (the arrays of a call), `recurrent` (the specification), `chunked` (for CPUs), `parallel`
(for accelerators), `jla` (kernels of jax-linear-attention), `segments` (states of packed sequences), `devices`
(sequences split over devices); arithmetic within a chunk: `decays`, `by_feature`, `sums`, `substitution`, `products`.
"""

import functools
import inspect
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Integer

from attnlab.ops import checks, context, counting, meshes
from attnlab.ops.explanation import Explanation
from attnlab.ops.platforms import is_specified, is_tf32, platform_of
from attnlab.ops.recurrence import chunked, devices, jla, parallel, recurrent, segments
from attnlab.ops.recurrence.call import RecurrenceCall
from attnlab.ops.recurrence.terms import Terms, fitting, scaled, starts_of, terms_of, within_lengths
from attnlab.types import Array

# In the order in which "auto" prefers them; `call` says what a backend is.
_BACKENDS = {"recurrent": recurrent, "jla": jla, "parallel": parallel, "chunked": chunked}
# Tokens per chunk. With decays by feature, larger chunks need more products per token: on two EPYC cores, gradients
# with chunks of 16 tokens take 0.71 to 0.93 times as long as with 32 (0.87 and 1.07 times without erasure). On an
# H100, "parallel" with chunks of 128 took four times as long as with chunks of 64 (November 2026).
CHUNKS = {"chunked": 32, "parallel": 64}
_BY_FEATURE = 16  # for "chunked" with decays by feature


@checks.known_keywords
def linear_recurrence(
    q: Float[Array, "*B T HQ K"],
    k: Float[Array, "*B T H K"],
    v: Float[Array, "*B T HV V"],
    g: Float[Array, "*B T HV"] | Float[Array, "*B T HV K"] | None = None,
    beta: Float[Array, "*B T HV"] | None = None,
    *,
    erase: tuple[Float[Array, "*B T HV K"], Float[Array, "*B T HV K"]] | None = None,
    scale: float | Float[Array, ""] | None = None,
    segment_ids: Integer[Array, "*B T"] | None = None,
    lengths: Integer[Array, "*B"] | None = None,
    state: Float[Array, "*B HV K V"] | None = None,
    return_state: bool | str = False,
    impl: str = "auto",
    chunk_size: int | None = None,
):
    """The linear recurrence S_t = (I − e_t r_tᵀ) diag(exp g_t) S_{t−1} + k_t v_tᵀ, with output o_t = scale · q_tᵀ S_t.

    It is the causal core of linear attention and RetNet (e = 0, g fixed), Mamba-2 (g per head), GLA (g per feature),
    DeltaNet and Gated DeltaNet (`beta`), Kimi Delta Attention (`beta`, g per feature) and RWKV-7 (`erase`): see
    docs/guide/mixers.md. There is no feature map and no normalization; `linear_attention` has both. It computes in
    float32 (float64 for float64), except for products of "parallel" and "jla". Time and memory are linear in T.

    Args:
      q: `[..., T, HQ, K]`.
      k: `[..., T, H, K]`.
      v: `[..., T, HV, V]`. HQ and HV are multiples of H, and one of HQ and HV is a multiple of the other. Key head
        h // (HV / H) writes to state h; queries or states, whichever are fewer, are repeated in the same way.
      g: log of the decay, at most 0: `[..., T, HV]`, or `[..., T, HV, K]` per feature of the keys; None for 0.
      beta: `[..., T, HV]`, the step of the delta rule: e = βk, r = k, and βk is written instead of k. The state stays
        bounded for β‖k‖² ≤ 2.
      erase: (e, r), each `[..., T, HV, K]`, instead of `beta`.
      scale: factor of the queries; None for 1/√K.
      segment_ids: `[..., T]`; a token whose id differs from the previous token's starts from an empty state.
      lengths: `[...]`; tokens from this index on are padding: their outputs are 0 and the state ignores them.
      state: `[..., HV, K, V]`, before the first token; None for zeros.
      return_state: True also returns the last state; "segments" returns the last state of each segment, in order, and
        needs `segment_ids` that are not traced.
      impl: "chunked": one chunk after another; "parallel": all chunks at once except their states, with product
        operands in the type of q, k and v; "recurrent": the specification, which stores a state per token for the
        gradient; "jla": the kernels of jax-linear-attention on a Hopper GPU; "auto": "recurrent" for a few tokens,
        otherwise "parallel" on GPUs and TPUs and "chunked" on CPUs.
      chunk_size: tokens per chunk; None for 32 ("chunked"; 16 if g is by feature) or 64 ("parallel").

    Returns:
      `[..., T, max(HQ, HV), V]` in v's type. With return_state also the state `[..., HV, K, V]`, float32 or float64;
      with "segments" `[..., S, HV, K, V]`, where S is the most segments in a sequence; missing segments have zeros.

    Raises:
      ValueError: shapes, types or values do not fit.
      TypeError: an unknown argument; a forward-mode derivative of "chunked" or "parallel", which have none.

    >>> q, k = jax.random.normal(jax.random.key(0), (2, 1, 100, 4, 8))
    >>> k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    >>> v, g, beta = jnp.ones((1, 100, 4, 16)), jnp.full((1, 100, 4), -0.1), jnp.full((1, 100, 4), 0.5)
    >>> out, state = linear_recurrence(q, k, v, g, beta, return_state=True)  # Gated DeltaNet
    >>> out.shape, state.shape
    ((1, 100, 4, 16), (1, 4, 8, 16))
    """
    if return_state not in (False, True, "segments"):
        raise ValueError(f"return_state = {return_state!r}: expected False, True or 'segments'")
    if return_state == "segments" and segment_ids is None:
        raise ValueError("return_state = 'segments' needs segment_ids: pass them, or return_state=True")
    options = {"impl": impl, "chunk_size": chunk_size, "return_state": return_state}
    run = meshes.on_auto_axes(functools.partial(_specs, v, return_state))(_recur)
    return run(q, k, v, g, beta, erase, scale, segment_ids, lengths, state, **options)


def _specs(v, return_state, spec: tuple):
    """Specs of the output and of states for queries split by `spec`; states are split like the heads of v."""
    *batch, length, heads = spec[:-1]
    out, state_heads = P(*batch, length, heads, None), (jax.typeof(v).sharding.spec + (None,) * v.ndim)[v.ndim - 2]
    by_segment = (None,) if return_state == "segments" else ()
    return (out, P(*batch, *by_segment, state_heads, None, None)) if return_state else out


def _recur(q, k, v, g, beta, erase, scale, segment_ids, lengths, state, *, impl, chunk_size, return_state):
    terms, state, split = _prepared(q, k, v, g, beta, erase, scale, segment_ids, lengths, state)
    if is_specified():
        impl, chunk_size = "recurrent", None
    call = RecurrenceCall(terms, jnp.result_type(q, k, v), split, platform_of(q, k, v))
    impl = _choose(impl, call).backend
    size = _chunk_size(impl, chunk_size, terms)
    with counting.scope():
        out, last, entering = _run(impl, call, state, size)
    # One product writes to the state, one per query reads it, and an erasure both reads and writes.
    (queries, values), erasures = out.shape[-2:], 2 * (terms.case != "no erasure")
    out = counting.marked(out, lambda: 2 * math.prod(state.shape[-2:]) * (1 + queries + erasures) / (queries * values))
    out = out.reshape(*out.shape[:-3], max(q.shape[-2], v.shape[-2]), out.shape[-1])
    out = out.astype(jax.dtypes.canonicalize_dtype(v.dtype))
    if return_state == "segments":
        if split is not None:
            raise ValueError("return_state='segments' needs whole sequences, but context_parallel splits this one")
        if entering is None:  # treat the sequence as one chunk
            entering, size = state[None], max(1, terms.v.shape[-3])
        return out, segments.states(terms, segment_ids, lengths, entering, size)
    return (out, last) if return_state else out


def _prepared(q, k, v, g, beta, erase, scale, segment_ids, lengths, state):
    """Return (terms, the state before the first token, how `context_parallel` splits the call or None)."""
    terms = terms_of(q, k, v, g, beta, erase)
    *batch, length, heads, values = terms.v.shape
    state = fitting("state", state, (*batch, heads, terms.k.shape[-1], values))
    if state is None:
        state = jnp.zeros((*batch, heads, terms.k.shape[-1], values), terms.v.dtype)
    ids = checks.integers("segment_ids", segment_ids)
    segment_ids = segment_ids if isinstance(segment_ids, jax.core.Tracer) else ids  # traced ids keep all their bits
    if segment_ids is not None and segment_ids.shape != (*batch, length):
        raise ValueError(f"segment_ids has shape {segment_ids.shape}, expected {(*batch, length)}")
    split = context.current(q, k)
    split = split if split is not None and split.devices > 1 else None
    is_shard = split is not None and split.is_manual
    lengths = checks.lengths("lengths", lengths, tuple(batch), length * (split.devices if is_shard else 1))
    checks.warn_of_swapped_axes(q, k, v, segment_ids)
    if segment_ids is not None:
        before = devices.from_before(split, segment_ids[..., -1:], segment_ids[..., :1]) if is_shard else None
        terms = terms._replace(starts=starts_of(segment_ids, before))
    terms = within_lengths(terms, lengths, devices.index(split) * length if is_shard else 0)
    # Scale q only after zeroing padding, because a NaN there, even times 0, would reach the gradient of the scale.
    # Within `shard_map`, loops need all arrays to vary over the same axes.
    return *meshes.equally_varying((scaled(terms, scale), state.astype(terms.v.dtype))), split


def _choose(impl: str, call: RecurrenceCall) -> Explanation:
    """Return the backend to run and the reasons against others; raise ValueError if `impl` names one that cannot."""
    if impl not in ("auto", *_BACKENDS):
        raise ValueError(f"impl = {impl!r}: expected one of auto, {', '.join(_BACKENDS)}")
    rejected = {name: backend.reason_against(call) for name, backend in _BACKENDS.items()}
    if impl != "auto" and rejected[impl]:
        raise ValueError(f"impl = {impl!r} cannot run this: {rejected[impl]}; or use 'auto'")
    reasons = {name: why or _BACKENDS[name].untried(call) for name, why in rejected.items()}
    chosen = next(name for name, why in reasons.items() if not why) if impl == "auto" else impl
    why = f"it could, but impl names {impl}" if impl == chosen else f"it could, but {chosen} is preferred"
    return Explanation(chosen, {name: reasons[name] or why for name in _BACKENDS if name != chosen})


def _chunk_size(impl: str, chunk_size: int | None, terms: Terms) -> int:
    """The number of tokens per chunk."""
    if chunk_size is not None and (isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"chunk_size = {chunk_size!r}: expected an integer number of tokens, 1 or more")
    by_feature = terms.g is not None and terms.g.shape[-1] > 1
    size = _BY_FEATURE if impl == "chunked" and by_feature else CHUNKS.get(impl, 1)
    return min(chunk_size or size, max(terms.v.shape[-3], 1))


def _run(impl: str, call: RecurrenceCall, state, size: int):
    """Return (outputs `[..., T, H, G, V]`, the last state, the states before each chunk or None)."""
    if impl == "recurrent" or not call.length:
        return *recurrent.run(call.terms, state), None
    if impl == "jla":
        return *jla.run(call, state), None
    schedule = chunked.run if impl == "chunked" else functools.partial(parallel.run, operand=call.operand)
    if call.split is not None:
        return *devices.over_devices(schedule, call.split, call.terms, state, size), None
    return schedule(call.terms, state, size)


def explain(q, k, v, g=None, beta=None, *, impl="auto", chunk_size=None, platform=None, **named) -> Explanation:
    """The backend that `linear_recurrence` would run for these arguments, and the reasons against the others.

    `platform` is "cpu", "gpu" or "tpu"; None for the platform that the call is compiled for.
    """
    checks.require_known_keywords("explain", named, inspect.signature(linear_recurrence).parameters)
    named.pop("return_state", None)
    optional = dict.fromkeys(("erase", "scale", "segment_ids", "lengths", "state"))
    terms, _, split = _prepared(q, k, v, g, beta, **(optional | named))
    call = RecurrenceCall(terms, jnp.result_type(q, k, v), split, platform or platform_of(q, k, v))
    explanation = _choose(impl, call)
    size = _chunk_size(explanation.backend, chunk_size, terms)
    if explanation.backend in CHUNKS:
        over = f", over {split.devices} devices of {split.context.axis!r}" if split else ""
        explanation.split = f"by {size} tokens, {terms.case}{over}"
        explanation.products = "TF32" if is_tf32(call.operand, call.platform) else ""
    return explanation
