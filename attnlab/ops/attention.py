"""The public attention functions, the checks of their arguments and the choice of a backend."""

import inspect
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Integer

from attnlab.ops import (
    blockwise,
    checks,
    context,
    counting,
    cudnn,
    decode,
    dense,
    dropout,
    fa4,
    mosaic,
    recurrence,
    splash,
)
from attnlab.ops.call import AttentionCall
from attnlab.ops.explanation import Explanation
from attnlab.ops.logsumexp import finite_shift, normalizer
from attnlab.ops.mask_algebra import Mask, require_positions
from attnlab.ops.masks import Dense
from attnlab.ops.platforms import PLATFORMS, is_specified, is_tf32, platform_of
from attnlab.ops.score_mods import ScoreMod
from attnlab.types import Array

# "auto" prefers them in this order, after decode and dense for small calls. `attnlab.ops.call` defines a backend.
_BACKENDS = {
    "cudnn": cudnn,
    "mosaic": mosaic,
    "fa4": fa4,
    "splash": splash,
    "decode": decode,
    "blockwise": blockwise,
    "dense": dense,
}


def implementations() -> tuple[str, ...]:
    """The values of `impl` besides "auto".

    >>> implementations()
    ('cudnn', 'mosaic', 'fa4', 'splash', 'decode', 'blockwise', 'dense')
    """
    return tuple(_BACKENDS)


@checks.known_keywords
def attention(
    q: Float[Array, "*B Tq H D"],
    k: Float[Array, "*B Tk Hk D"],
    v: Float[Array, "*B Tk Hk Dv"],
    mask: Mask | Bool[Array, "..."] | None = None,
    score_mod: ScoreMod | tuple[ScoreMod, ...] | None = None,
    bias: Float[Array, "..."] | None = None,
    scale: float | Float[Array, ""] | None = None,
    sinks: Float[Array, " H"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    q_positions: Integer[Array, "..."] | None = None,
    kv_positions: Integer[Array, "..."] | None = None,
    impl: str | tuple[str, ...] = "auto",
    block_sizes: tuple[int, int] | None = None,
    return_lse: bool = False,
) -> Float[Array, "*B Tq H Dv"] | tuple[Float[Array, "*B Tq H Dv"], Float[Array, "*B Tq H"]]:
    """Scaled dot-product attention, softmax(scale·q·kᵀ)·v (Vaswani et al. 2017, equation 1).

    The order is: scale·q·k, plus `bias`, score mods, mask, sinks, softmax, dropout. Scores, softmax and lse are
    float32 (float64 for float64 inputs). Fully masked rows return 0 and have lse −inf.

    Args:
      q: `[..., Tq, H, D]`, queries; any number of batch axes.
      k: `[..., Tk, Hk, D]`, keys; H must be a multiple of Hk (grouped heads).
      v: `[..., Tk, Hk, Dv]`, values.
      mask: which keys each query may attend to, e.g. `masks.Causal()`; a bool array counts as `masks.Dense`.
      score_mod: one score mod or a tuple of them, e.g. `score_mods.SoftCap(30.0)`.
      bias: added to the scores, `[Tq or 1, Tk]` or `[..., H or 1, Tq or 1, Tk]`.
      scale: factor of the products q·k; 1/√D when None.
      sinks: `[H]`, one extra logit per head in the softmax's denominator; a sink has no value vector.
      dropout_rate: probability of dropping a weight, in [0, 1); the remaining weights are scaled by 1/(1 − rate).
      dropout_key: one PRNG key, or one per example (q's batch axes).
      q_positions, kv_positions: `[Tq]` or `[..., Tq]`, and `[Tk]` or `[..., Tk]`; `arange` when None. Needed when
        Tq ≠ Tk and the mask or a score mod compares positions. Below 2³⁰ in absolute value.
      impl: "auto", a name from `implementations()`, or a tuple of these: the first that can run the call is used.
      block_sizes: (queries, keys) of a tile, for backends that compute tile by tile.
      return_lse: also return the log of the softmax's denominator (lse).

    Returns:
      `[..., Tq, H, Dv]` in q's type; with `return_lse` also the lse `[..., Tq, H]`.

    Raises:
      ValueError: axes that do not match, missing positions or dropout key, an unknown `impl`, or an `impl` that
        cannot honour an argument.
      TypeError: an unknown argument; for `is_causal` and the like, the message names the argument to use.
      UserWarning, a warning: q, k and v may be `[..., H, T, D]`: all three have the same numbers of tokens and heads,
        fewer tokens (at most 64) than heads, and no array in the other arguments settles the order of the axes.

    >>> q = k = v = jnp.ones((2, 5, 4, 8))  # batch 2, length 5, 4 heads of 8
    >>> attention(q, k, v, mask=Causal()).shape
    (2, 5, 4, 8)
    """
    if is_specified():
        impl, block_sizes = "dense", None
    terms = (mask, score_mod, bias, scale, sinks, dropout_rate, dropout_key, q_positions, kv_positions)
    call, split, layout, (name, _) = _planned(q, k, v, *terms, impl, block_sizes, return_lse)
    if layout is not None and name != "dense":
        call = call.replace(block_sizes=layout.block_sizes)
    run = _BACKENDS[name].attend
    with counting.scope():
        out, log_sums = run(call) if split is None else context.attend(split, layout, run, call)
    out = counting.of_attention(out, call)
    if not return_lse:
        return out
    maximum, log_sum = log_sums
    # The max is a constant, so lse and log_sum have the same gradient.
    return out, jax.lax.stop_gradient(maximum) + log_sum


def _planned(q, k, v, *rest, platform=None):
    """Return (call, split over devices, layout of the split, `Explanation`) for the arguments of `attention`."""
    *terms, impl, block_sizes, return_lse = rest
    q, k, v = checks.queries_keys_values(q, k, v)
    split = context.current(q, k)
    call = make_call(q, k, v, *terms, split).replace(block_sizes=checks.block_sizes(block_sizes))
    call = context.prepared(split, call)
    layout = None if split is None else context.layout(split, call, platform or platform_of(q, k, v))
    return call, split, layout, _choose(impl, call, return_lse, platform, split, layout)


@checks.known_keywords
def attention_weights(
    q: Float[Array, "*B Tq H D"],
    k: Float[Array, "*B Tk Hk D"],
    mask: Mask | Bool[Array, "..."] | None = None,
    score_mod: ScoreMod | tuple[ScoreMod, ...] | None = None,
    bias: Float[Array, "..."] | None = None,
    scale: float | Float[Array, ""] | None = None,
    sinks: Float[Array, " H"] | None = None,
    q_positions: Integer[Array, "..."] | None = None,
    kv_positions: Integer[Array, "..."] | None = None,
    rows: Integer[Array, " Rq"] | None = None,
) -> Float[Array, "*B H Rq Tk"]:
    """The softmax weights of `attention`, before dropout.

    Arguments and errors are as in `attention`; `rows` `[Rq]` selects queries by index; None for all.

    Returns:
      `[..., H, Tq, Tk]`, or `[..., H, Rq, Tk]`. A row sums to 1, or to less with sinks, or to 0 if it is fully masked.

    >>> weights = attention_weights(jnp.ones((3, 1, 4)), jnp.ones((3, 1, 4)), mask=Causal())
    >>> print(np.asarray(weights[0]).round(2))
    [[1.   0.   0.  ]
     [0.5  0.5  0.  ]
     [0.33 0.33 0.33]]
    """
    q, k, _ = checks.queries_keys_values(q, k, k)
    split = context.current(q, k)
    if split is not None and split.is_manual:
        raise ValueError("attention_weights needs whole sequences: call it outside of shard_map")
    call = make_call(q, k, k, mask, score_mod, bias, scale, sinks, 0.0, None, q_positions, kv_positions)
    return dense.weights(call, None if rows is None else _checked_rows(rows, call.lengths[0]))


def merge(
    parts: Sequence[tuple[Float[Array, "*B Tq H Dv"], Float[Array, "*B Tq H"]]],
) -> tuple[Float[Array, "*B Tq H Dv"], Float[Array, "*B Tq H"]]:
    """Join attention over disjoint sets of keys into attention over all of them.

    From (o_p, lse_p) of each part p: lse = log Σ_p e^lse_p, o = Σ_p e^(lse_p − lse) o_p (Milakov and Gimelshein 2018,
    section 3.1). Pass sinks to one part only; otherwise they count more than once. A float32 lse of size s has an error
    of s·2^-24, and so have the parts' weights: if a bias shifts whole rows by −1e9, use one call over all keys.

    Args:
      parts: the results of `attention(..., return_lse=True)` for the same queries and each set of keys,
        (`[..., Tq, H, Dv]`, `[..., Tq, H]`).

    Returns:
      (out, lse) of the same shapes, equal to one call over all keys; differentiable.

    Raises:
      ValueError: no parts, or parts of different shapes.

    >>> q, k, v = jnp.ones((2, 1, 4)), jnp.ones((6, 1, 4)), jnp.ones((6, 1, 4))
    >>> parts = [attention(q, k[at], v[at], return_lse=True) for at in (slice(0, 3), slice(3, 6))]
    >>> out, lse = merge(parts)
    >>> bool(jnp.allclose(lse, attention(q, k, v, return_lse=True)[1]))
    True
    """
    parts = list(parts)
    shapes = [tuple(map(jnp.shape, part)) for part in parts]
    if not parts or any(shape != shapes[0] or len(shape) != 2 or shape[0][:-1] != shape[1] for shape in shapes):
        raise ValueError(f"merge got shapes {shapes}: expected one or more (out, lse) of the same queries")
    outs, lses = zip(*((checks.floating("out", out), checks.floating("lse", lse)) for out, lse in parts))
    lses = jnp.stack(lses)
    # A fully masked part has lse −inf and so weight 0.
    shift = jax.lax.stop_gradient(finite_shift(lses.max(axis=0)))
    weights = jnp.exp(lses - shift)
    denominator, log_sum = normalizer(weights.sum(axis=0))
    out = sum((weight / denominator)[..., None] * out.astype(weight.dtype) for weight, out in zip(weights, outs))
    return out.astype(outs[0].dtype), shift + log_sum


def explain(q, k, v, *terms, platform: str | None = None, operator=None, **named) -> Explanation:
    """The backend that `attention` would run for these arguments, and the reason against each other backend.

    Takes the arguments of `attention` and raises its errors. Computes nothing; works under `jit`.

    Args:
      operator: `attnlab.linear_recurrence` to explain that operator; the other arguments are then its arguments.
      platform: "cpu", "gpu" or "tpu"; the platform that the call is compiled for when None.

    Returns:
      (backend, rejected): a name, and a dict from the other names to reasons; it prints as one line per backend.

    >>> q = k = v = jnp.ones((5, 4, 8))
    >>> print(explain(q, k, v, mask=Causal()))
    runs dense
    not cudnn: it needs a gpu, and this is a cpu
    not mosaic: it needs a gpu, and this is a cpu
    not fa4: it needs fa4-jax 0.1.0, and it is not installed: pip install 'attnlab[fa4]'
    not splash: it needs a tpu, and this is a cpu
    not decode: it is for up to 16 queries, 64 queries × heads, and at least 4 times as many keys
    not blockwise: it could, but dense is preferred for these lengths
    >>> q = k = v = jnp.ones((256, 4, 64))
    >>> explain(q, k, v, mask=Causal(), platform="tpu").backend
    'splash'
    """
    if platform is not None and platform not in PLATFORMS:
        raise ValueError(f"platform = {platform!r} is unknown: use one of {', '.join(map(repr, PLATFORMS))}")
    if operator is recurrence.linear_recurrence:
        return recurrence.explain(q, k, v, *terms, platform=platform, **named)
    if operator not in (None, attention):
        raise ValueError(f"operator = {operator!r}: expected attnlab.attention or attnlab.linear_recurrence")
    signature = inspect.signature(attention)
    checks.require_known_keywords("explain", named, signature.parameters)
    arguments = signature.bind(q, k, v, *terms, **named)
    arguments.apply_defaults()
    *_, explanation = _planned(*arguments.args, platform=platform)
    return explanation


def _choose(impl, call: AttentionCall, return_lse, platform=None, split=None, layout=None) -> Explanation:
    names = (impl,) if isinstance(impl, str) else tuple(impl)
    if unknown := [name for name in names if name != "auto" and name not in _BACKENDS] or ([] if names else [impl]):
        known = ", ".join(map(repr, _BACKENDS))
        raise ValueError(f'impl = {unknown[0]!r} is unknown: use "auto" or one of {known}, or a tuple of them')
    reasons = {
        name: _platform_against(name, names, call, platform)
        or _context_against(name, split)
        or backend.reason_against(call)
        or ("its lse has no gradient" if return_lse and not has_lse(backend) else None)
        or (None if name in names else _untried(backend, call))
        for name, backend in _BACKENDS.items()
    }
    rejected = {name: why for name, why in reasons.items() if why}
    able = [name for name in reasons if name not in rejected]
    lengths = list(call.lengths)
    if layout is not None and not split.is_manual:
        lengths[0] //= split.devices
    small = [name for name in ("decode", "dense") if name in able and is_small(*lengths)]
    automatic = next(iter(small + able), None)
    chosen = next((name for name in (automatic if n == "auto" else n for n in names) if name in able), None)
    if chosen is None:
        named = {name: rejected[name] for name in (rejected if "auto" in names else names)}
        why = named[names[0]] if len(named) == 1 else "; ".join(f"{name}: {why}" for name, why in named.items())
        others = f"; use one of {', '.join(map(repr, able))}" if able else ""
        raise ValueError(f"impl = {impl!r} cannot run this: {why}{others}")
    why = f"impl names {chosen}" if chosen in names else f"{chosen} is preferred for these lengths"
    rejected |= {name: f"it could, but {why}" for name in able if name != chosen}
    explanation = Explanation(chosen, rejected)
    explanation.split = "" if layout is None else str(layout)
    explanation.products = "TF32" if is_tf32(call.q.dtype, platform or platform_of(call.q, call.k, call.v)) else ""
    return explanation


def has_lse(backend) -> bool:
    """Whether a backend returns the max and the log-sum of each row, with their gradients."""
    return getattr(backend, "HAS_LSE", True)


def _untried(backend, call: AttentionCall) -> str | None:
    """The reason why a backend runs a call only when `impl` names it, or None."""
    return backend.untried(call) if hasattr(backend, "untried") else None


def _context_against(name, split) -> str | None:
    """The reason why a backend cannot compute the shards of a call, or None."""
    if split is not None and (name in ("decode", "mosaic") or not has_lse(_BACKENDS[name])):
        return "within context_parallel it cannot compute one shard of a call"
    return None


def _platform_against(name, names, call: AttentionCall, platform) -> str | None:
    """The reason against a backend on the platform, or None; on an unknown platform, `impl` can force one backend."""
    needs, actual = getattr(_BACKENDS[name], "PLATFORM", None), platform or platform_of(call.q, call.k, call.v)
    if needs in (None, actual) or getattr(_BACKENDS[name], "is_interpreted", lambda: False)():
        return None
    is_unknown = platform is None and actual == jax.default_backend() and isinstance(call.q, jax.core.Tracer)
    if is_unknown and names == (name,):  # of several names, the first that is sure to run is chosen
        return None
    return f"it needs a {needs}, and this is a {actual}"


def is_small(q_length: int, kv_length: int) -> bool:
    """Whether to compute all scores at once rather than in tiles: few scores per head, or a decoding step."""
    return q_length * kv_length <= 96 * 96 or q_length <= 16


def make_call(
    q, k, v, mask, score_mod, bias, scale, sinks, dropout_rate, dropout_key, q_positions, kv_positions, split=None
) -> AttentionCall:
    """Build a call from q, k and v that `checks.queries_keys_values` has checked; check all other arguments."""
    batch, q_length, num_heads, kv_length = q.shape[:-3], *q.shape[-3:-1], k.shape[-3]
    shape = (batch, num_heads, q_length, kv_length)
    # Within a user's `shard_map`, masks and score mods describe the whole call, not this device's shard.
    whole = shape if split is None else split.whole(*shape)
    positions = {
        "q_positions": checks.positions("q_positions", q_positions, batch, q_length),
        "kv_positions": checks.positions("kv_positions", kv_positions, batch, kv_length),
    }
    if np.shape(scale) != ():
        raise ValueError(f"scale has shape {np.shape(scale)}, expected (): one number for all scores")
    dropout_rate = checks.dropout_rate(dropout_rate, dropout_key)
    checks.warn_of_swapped_axes(q, k, v, mask, score_mod, bias, sinks, q_positions, kv_positions)
    per_example = dropout.per_example if split is None else split.per_example
    return AttentionCall(
        q,
        k,
        v,
        mask=None if mask is None else _checked_mask(mask, whole, positions),
        score_mods=_checked_score_mods(score_mod, whole, positions),
        bias=checks.bias(bias, *shape[:3], whole[3]),
        scale=scale,
        sinks=checks.sinks(sinks, num_heads),
        dropout_rate=dropout_rate,
        dropout_keys=per_example(dropout_key, batch) if dropout_rate else None,
        **positions,
    )


def _checked_mask(mask, shape, positions) -> Mask:
    if isinstance(mask, jax.Array | np.ndarray):
        mask = Dense(mask)
    if not isinstance(mask, Mask):
        raise ValueError(
            f"mask is {_described(mask, 'masks.MaskFn(fn)')}: expected one of masks, e.g. masks.Causal(), "
            "or a bool array"
        )
    _require_arrays("mask", mask)
    *_, q_length, kv_length = shape
    mask.check(*shape)
    require_positions(mask, q_length, kv_length, **positions)
    return mask


def _checked_score_mods(score_mods, shape, positions) -> tuple[ScoreMod, ...]:
    if score_mods is None:
        return ()
    *_, q_length, kv_length = shape
    score_mods = score_mods if isinstance(score_mods, tuple) else (score_mods,)
    for mod in score_mods:
        if not isinstance(mod, ScoreMod):
            raise ValueError(
                f"score_mod is {_described(mod, 'score_mods.ScoreFn(fn)')}: expected one of score_mods, "
                "e.g. score_mods.SoftCap(30.0), or a tuple of them"
            )
        _require_arrays("score_mod", mod)
        mod.check(*shape)
        require_positions(mod, q_length, kv_length, **positions, what="score mod")
    return score_mods


def _described(value, wrapped) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}, call it"
    return f"a function, wrap it as {wrapped}" if callable(value) else f"a {type(value).__name__}"


def _checked_rows(rows, length):
    rows = checks.integers("rows", rows)
    if np.ndim(rows) != 1:
        raise ValueError(f"rows has shape {np.shape(rows)}, expected (number of rows,): the indices of queries")
    if rows.size and not isinstance(rows, jax.core.Tracer):
        low, high = np.min(rows), np.max(rows)
        if not -length <= low <= high < length:
            raise ValueError(f"rows from {low} to {high}: expected indices of {length} queries")
    return jnp.asarray(rows) % length


def _require_arrays(name, node):
    for leaf in jax.tree.leaves(node):
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise ValueError(f"{name} {type(node).__name__} holds {leaf!r}, expected arrays: use jnp.array(...)")
