"""Argument checks shared by the operators: an error is one line that names the axis, the sizes and the remedy."""

import functools
import inspect
import numbers
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np

INT32_MAX = 2**31 - 1
POSITION_LIMIT = 2**30  # so that the difference of two positions fits int32

ORDER = "q, k and v are [..., length, heads, features]"

# Remedies for arguments of other libraries and of older versions.
_REMEDIES = {
    "is_causal": "use mask=masks.Causal()",
    "causal": "use mask=masks.Causal()",
    "attn_mask": "use mask=",
    "local_window_size": "use mask=masks.SlidingWindow(left, right)",
    "dropout_p": "use dropout_rate=",
    "implementation": "use impl=",
    "dropout_rng": "pass attention_fn=attnlab.interop.flax.attention_fn() to the Flax module",
    "enable_gqa": "use k and v with fewer heads; it needs no flag",
    "way": "remove it, every device gathers all keys",
}


def known_keywords(function):
    """Decorator whose TypeError for an unknown keyword names the argument to use, e.g. `mask` for `is_causal`."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @functools.wraps(function)
    def checked(*args, **kwargs):
        require_known_keywords(function.__qualname__, kwargs, known)
        return function(*args, **kwargs)

    return checked


def require_known_keywords(function: str, names, known) -> None:
    """Raise TypeError for a name in `names` that is not in `known`, the function's arguments."""
    for name in names:
        if name not in known:
            remedy = _REMEDIES.get(name, f"expected one of {', '.join(known)}")
            raise TypeError(f"{function} has no argument {name!r}: {remedy}")


def queries_keys_values(q, k, v) -> tuple:
    """Check q `[..., Tq, H, D]`, k `[..., Tk, Hk, D]` and v `[..., Tk, Hk, Dv]`; return them as floating arrays."""
    q, k, v = (floating(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if jnp.ndim(x) < 3:
            raise ValueError(f"{name} has shape {jnp.shape(x)}, expected [..., length, heads, features]")
    batch, (_, num_heads, head_dim) = q.shape[:-3], q.shape[-3:]
    kv_length, kv_heads, _ = k.shape[-3:]
    for name, x in (("k", k), ("v", v)):
        if x.shape[:-3] != batch:
            raise ValueError(f"{name} has batch axes {x.shape[:-3]} and q has {batch}: give both the same")
    for name, x in (("q", q), ("k", k)):
        if 0 in x.shape[-2:]:
            raise ValueError(f"{name} has shape {x.shape}: expected at least one head and one feature")
    if k.shape[-1] != head_dim:
        raise ValueError(f"k has {k.shape[-1]} features per head and q has {head_dim}: give both the same")
    if v.shape[-3:-1] != (kv_length, kv_heads):
        raise ValueError(
            f"v has (length, heads) {v.shape[-3:-1]} and k has {(kv_length, kv_heads)}: each key needs a value"
        )
    if num_heads % kv_heads:
        raise ValueError(f"q has {num_heads} heads and k has {kv_heads}: q's heads must be a multiple of k's")
    return q, k, v


def floating(name: str, x):
    """Check and return a floating array; None for None. float64 becomes float32 unless JAX enables 64-bit types."""
    if x is None:
        return None
    x = x if isinstance(x, jax.Array | np.ndarray) else jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        remedy = "use mask= for which keys are visible" if x.dtype == bool else "use .astype(jnp.float32)"
        raise ValueError(f"{name} has type {x.dtype}, expected a floating type: {remedy}")
    # Without 64-bit types, JAX warns at every operation on a float64 NumPy array.
    return x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False) if isinstance(x, np.ndarray) else x


def integers(name: str, x, limit: int = INT32_MAX, remedy: str = "use smaller ones"):
    """Convert indices or positions to int32, because unsigned integers wrap when subtracted; None for None."""
    if x is None:
        return None
    if not isinstance(x, jax.Array | np.ndarray):
        try:
            x = jnp.asarray(x)
        except OverflowError:
            x = np.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} has type {x.dtype}, expected integers")
    is_concrete = not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)
    if is_concrete and x.size:
        values = np.asarray(x)
        low, high = int(values.min()), int(values.max())
        if low < -limit or high > limit:
            raise ValueError(f"{name} has values from {low} to {high}, expected int32 values within ±{limit}: {remedy}")
    return x.astype(np.int32) if is_concrete else clipped_to_int32(x)


def is_cut(dtype) -> bool:
    """Whether JAX would keep only the low bits of integers of this type."""
    return jnp.issubdtype(dtype, jnp.integer) and jax.dtypes.canonicalize_dtype(dtype) != dtype


def in_range(name: str, x, size: int, low: int = 0, remedy: str = "") -> None:
    """Raise ValueError for integers outside `[low, size)`; traced arrays have no values to check."""
    if isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True):
        return
    x = np.asarray(x)
    wrong = x[(x < low) | (x >= size)]
    if wrong.size:
        raise ValueError(f"{name} contains {wrong[0]}, expected {low} to {size - 1}" + (remedy and f": {remedy}"))


def lengths(name: str, x, batch: tuple[int, ...], length: int):
    """Check lengths of sequences of `length` tokens and return them as int32 `[*batch]`; None for None."""
    x = integers(name, x)
    if x is not None and x.shape != batch:
        raise ValueError(f"{name} has shape {x.shape}, expected {batch}: one for each sequence")
    if x is not None:
        in_range(name, x, length + 1, remedy=ORDER)
    return x


def warn_of_swapped_axes(q, k, v, *terms) -> None:
    """Warn the operator's caller of fewer tokens than heads, unless an array in `terms` settles the axes' order."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("attnlab.ops.", "jax", "beartype")):
        frame, level = frame.f_back, level + 1
    is_ours = frame.f_globals.get("__name__", "").startswith("attnlab.")  # our modules lay out the axes themselves
    length, heads = q.shape[-3:-1]
    fits = 1 < length < heads and length <= 64 and k.shape[-3:-1] == v.shape[-3:-1] == (length, heads)
    if is_ours or not fits or any(jnp.shape(x) not in ((), q.shape[:-3]) for x in jax.tree.leaves(terms)):
        return
    warnings.warn(
        f"q has shape {q.shape}, which is {length} tokens of {heads} heads: if it is [..., heads, tokens, features], "
        "use q.swapaxes(-3, -2), and k and v likewise",
        stacklevel=level,
    )


def positions(name: str, x, batch: tuple[int, ...], length: int):
    """Check positions and return them as int32 `[length]` or `[*batch, length]`; None for None."""
    x = integers(name, x, POSITION_LIMIT - 1, "subtract the same offset from q_positions and kv_positions")
    if x is not None and jnp.shape(x) not in ((length,), (*batch, length)):
        raise ValueError(
            f"{name} has shape {jnp.shape(x)}, expected {(length,)} or {(*batch, length)}: one position per token"
        )
    return x


def bias(x, batch: tuple[int, ...], num_heads: int, q_length: int, kv_length: int):
    """Check and return a bias `[Tq or 1, Tk]` or `[..., H or 1, Tq or 1, Tk]`; None for None."""
    x = floating("bias", x)
    if x is None:
        return None
    *lead, rows, columns = jnp.shape(x) if jnp.ndim(x) >= 2 else (0, 0)
    fits = rows in (1, q_length) and columns == kv_length
    fits &= not lead or (
        len(lead) == len(batch) + 1
        and lead[-1] in (1, num_heads)
        and all(size in (1, expected) for size, expected in zip(lead, batch))
    )
    if not fits:
        raise ValueError(
            f"bias has shape {jnp.shape(x)}, expected {(q_length, kv_length)} or "
            f"{(*batch, num_heads, q_length, kv_length)}, where any axis but the last may be 1"
        )
    return x


def sinks(x, num_heads: int):
    """Check and return sinks `[H]`; None for None."""
    x = floating("sinks", x)
    if x is not None and jnp.shape(x) != (num_heads,):
        raise ValueError(f"sinks has shape {jnp.shape(x)}, expected {(num_heads,)}: one logit per head")
    return x


def dropout_rate(rate, key) -> float:
    """Check and return a dropout rate in [0, 1); a rate above 0 needs a key."""
    if isinstance(rate, jax.core.Tracer):
        raise ValueError("dropout_rate is traced: expected a Python number, e.g. a static argument of jit")
    rate = float(rate)
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate = {rate}: expected a probability in [0, 1)")
    if rate and key is None:
        fn = "in a Flax module use attention_fn=attnlab.interop.flax.attention_fn()"
        raise ValueError(f"dropout_rate = {rate} needs dropout_key: one PRNG key, or one per example; {fn}")
    if rate and not isinstance(key, jax.Array | np.ndarray):
        raise ValueError(f"dropout_key = {key!r}: expected a PRNG key, e.g. jax.random.key(0)")
    return rate


def clipped_to_int32(x):
    """Convert integers to int32; types that do not fit int32 are first clipped to ±2³⁰, so that no value wraps."""
    if not np.can_cast(x.dtype, np.int32):
        info, xp = jnp.iinfo(x.dtype), np if isinstance(x, np.ndarray) else jnp
        x = xp.clip(x, max(info.min, -POSITION_LIMIT), min(info.max, POSITION_LIMIT))
    return x.astype(np.int32)


def block_sizes(sizes) -> tuple[int, int] | None:
    if sizes is None:
        return None
    is_pair = isinstance(sizes, tuple | list) and len(sizes) == 2
    if not is_pair or not all(isinstance(size, numbers.Integral) and size >= 1 for size in sizes):
        raise ValueError(f"block_sizes = {sizes}: expected two sizes of 1 or more, (queries, keys) of a tile")
    return tuple(sizes)
