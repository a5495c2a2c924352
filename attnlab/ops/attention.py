"""The front door: checks the arguments, picks a backend, and can say why."""

import numbers
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Integer

from attnlab.ops import blockwise, checks, cudnn, dense, dropout, splash
from attnlab.ops.masks import Dense, Mask, require_positions
from attnlab.ops.score_mods import ScoreMod
from attnlab.types import Array

# In the order of preference of "auto". A backend is a module with `attend`, which returns (out, lse), and
# `reason_against`, which takes the same arguments and says in a few words why it cannot honour them, or None.
_BACKENDS = {"cudnn": cudnn, "splash": splash, "blockwise": blockwise, "dense": dense}


class Explanation(NamedTuple):
    """What `explain` answers.

    Attributes:
      backend: the name of the backend that would run.
      rejected: for every other backend, the reason why not.
    """

    backend: str
    rejected: dict[str, str]

    def __str__(self):
        return "\n".join([f"runs {self.backend}", *(f"not {name}: {why}" for name, why in self.rejected.items())])


def implementations() -> tuple[str, ...]:
    """The names that `impl` takes, besides "auto".

    >>> implementations()
    ('cudnn', 'splash', 'blockwise', 'dense')
    """
    return tuple(_BACKENDS)


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
    impl: str = "auto",
    block_sizes: tuple[int, int] | None = None,
    return_lse: bool = False,
) -> Float[Array, "*B Tq H Dv"] | tuple[Float[Array, "*B Tq H Dv"], Float[Array, "*B Tq H"]]:
    """Scaled dot-product attention, softmax(scale·q·kᵀ)·v (Vaswani et al. 2017, equation 1).

    The order is: scale·q·k, plus `bias`, score mods, mask, sinks, softmax, dropout. Scores, softmax and lse are
    float32 whatever the input (float64 stays float64). A row that sees nothing returns 0 and has lse −inf.

    Args:
      q: `[..., Tq, H, D]`, queries; any number of batch axes.
      k: `[..., Tk, Hk, D]`, keys; H must be a multiple of Hk (grouped heads).
      v: `[..., Tk, Hk, Dv]`, values.
      mask: who may look at whom, e.g. `masks.Causal()`; a bool array counts as `masks.Dense`.
      score_mod: one score mod or a tuple of them, e.g. `score_mods.SoftCap(30.0)`.
      bias: added to the scores, `[Tq or 1, Tk]` or `[..., H or 1, Tq or 1, Tk]`.
      scale: 1/√D when None.
      sinks: `[H]`, one extra logit a head in the softmax's sum, with no value.
      dropout_rate: probability that a weight drops, in [0, 1); the others are scaled by 1/(1 − rate).
      dropout_key: one PRNG key, or one for each example (q's batch axes).
      q_positions, kv_positions: `[Tq]` or `[..., Tq]`, and `[Tk]` or `[..., Tk]`; `arange` when None. Needed when
        Tq ≠ Tk and the mask or a score mod compares positions.
      impl: "auto", or a name from `implementations()`.
      block_sizes: (queries, keys) of a tile, for backends that work by tiles.
      return_lse: also return the log of the softmax's sum.

    Returns:
      `[..., Tq, H, Dv]` in q's type; with `return_lse` also the lse `[..., Tq, H]`.

    Raises:
      ValueError: axes that do not match, positions or a dropout key that are missing, an unknown `impl`, an `impl`
        that cannot honour an argument.

    >>> q = k = v = jnp.ones((2, 5, 4, 8))  # batch 2, length 5, 4 heads of 8
    >>> attention(q, k, v, mask=Causal()).shape
    (2, 5, 4, 8)
    """
    arguments = _checked(
        q, k, v, mask, score_mod, bias, scale, sinks, dropout_rate, dropout_key, q_positions, kv_positions
    )
    name = _choose(impl, arguments, block_sizes, return_lse).backend
    out, lse = _BACKENDS[name].attend(**arguments, block_sizes=block_sizes)
    return (out, lse) if return_lse else out


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
    """The softmax weights that `attention` gives to each key, before dropout.

    Args and errors are those of `attention`; `rows` `[Rq]` picks query indices, all of them when None.

    Returns:
      `[..., H, Tq, Tk]`, or `[..., H, Rq, Tk]`. A row sums to 1, to less with sinks, to 0 if it sees nothing.

    >>> weights = attention_weights(jnp.ones((3, 1, 4)), jnp.ones((3, 1, 4)), mask=Causal())
    >>> print(np.asarray(weights[0]).round(2))
    [[1.   0.   0.  ]
     [0.5  0.5  0.  ]
     [0.33 0.33 0.33]]
    """
    arguments = _checked(q, k, k, mask, score_mod, bias, scale, sinks, 0.0, None, q_positions, kv_positions)
    for name in ("v", "dropout_rate", "dropout_keys"):
        del arguments[name]
    if rows is not None:
        rows, length = checks.whole("rows", rows), arguments["q"].shape[-3]
        if np.ndim(rows) != 1:
            raise ValueError(f"rows has shape {np.shape(rows)}, expected (number of rows,): the indices of queries")
        low, high = (-length, length - 1) if isinstance(rows, jax.core.Tracer) else (np.min(rows), np.max(rows))
        if not -length <= low <= high < length:
            raise ValueError(f"rows from {low} to {high}: expected indices of {length} queries")
        rows = jnp.asarray(rows) % length
    return dense.weights(**arguments, rows=rows)[0]


def merge(
    parts: Sequence[tuple[Float[Array, "*B Tq H Dv"], Float[Array, "*B Tq H"]]],
) -> tuple[Float[Array, "*B Tq H Dv"], Float[Array, "*B Tq H"]]:
    """Joins attention over disjoint sets of keys into attention over all of them.

    With o_p and lse_p those of part p: lse = log Σ_p e^lse_p, o = Σ_p e^(lse_p − lse) o_p (Milakov and Gimelshein
    2018, section 3.1). Sinks go to one part only, or they count as often as they are given.

    Args:
      parts: what `attention(..., return_lse=True)` gave for the same queries and each set of keys, (`[..., Tq, H, Dv]`,
        `[..., Tq, H]`).

    Returns:
      (out, lse) of the same shapes, as one call would have given them, differentiable.

    Raises:
      ValueError: no parts, or parts of different shapes.

    >>> q, k, v = jnp.ones((2, 1, 4)), jnp.ones((6, 1, 4)), jnp.ones((6, 1, 4))
    >>> parts = [attention(q, k[at], v[at], return_lse=True) for at in (slice(0, 2), slice(2, 6))]
    >>> out, lse = merge(parts)
    >>> bool(jnp.allclose(lse, attention(q, k, v, return_lse=True)[1]))
    True
    """
    parts = list(parts)
    shapes = [tuple(map(jnp.shape, part)) for part in parts]
    if not parts or any(shape != shapes[0] or len(shape) != 2 or shape[0][:-1] != shape[1] for shape in shapes):
        raise ValueError(f"merge was given shapes {shapes}: expected one or more (out, lse) of the same queries")
    lses = jnp.stack([lse for _, lse in parts])
    # A part that saw nothing has lse −inf and weight 0; if none saw anything, so has the whole.
    largest = jax.lax.stop_gradient(lses.max(axis=0))
    saw = ~jnp.isneginf(lses)
    shares = jnp.where(saw, jnp.exp(jnp.where(saw, lses - jnp.where(jnp.isneginf(largest), 0, largest), 0)), 0)
    total = shares.sum(axis=0)
    sees = total > 0
    total = jnp.where(sees, total, 1)
    out = sum((share / total)[..., None] * out.astype(total.dtype) for share, (out, _) in zip(shares, parts))
    return out.astype(parts[0][0].dtype), jnp.where(sees, largest + jnp.log(total), -jnp.inf)


def explain(q, k, v, *terms, impl: str = "auto", block_sizes=None, return_lse: bool = False, **named) -> Explanation:
    """Which backend `attention` would run for these arguments, and for every other one the reason it would not.

    Takes the arguments of `attention` and raises what it raises. Nothing runs: under `jit` it answers as well.

    Returns:
      (backend, rejected): a name, and a dict from the other names to reasons; printed, one line each.

    >>> q = k = v = jnp.ones((5, 4, 8))
    >>> print(explain(q, k, v, mask=Causal()))
    runs dense
    not cudnn: it needs a gpu, and this is a cpu
    not splash: it needs a tpu, and this is a cpu
    not blockwise: it could, but dense is the better for these lengths
    """
    return _choose(impl, _checked(q, k, v, *terms, **named), block_sizes, return_lse)


def _choose(impl, arguments, block_sizes, return_lse) -> Explanation:
    if impl != "auto" and impl not in _BACKENDS:
        raise ValueError(f'impl = {impl!r} is unknown: use "auto" or one of {", ".join(map(repr, _BACKENDS))}')
    if block_sizes is not None and not (
        isinstance(block_sizes, tuple | list)
        and len(block_sizes) == 2
        and all(isinstance(size, numbers.Integral) and size >= 1 for size in block_sizes)
    ):
        raise ValueError(f"block_sizes = {block_sizes}: expected two sizes of 1 or more, (queries, keys) of a tile")
    asked = {"block_sizes": block_sizes, "return_lse": return_lse}
    reasons = {
        name: _platform_against(name, impl, arguments["q"]) or backend.reason_against(**asked, **arguments)
        for name, backend in _BACKENDS.items()
    }
    rejected = {name: why for name, why in reasons.items() if why}
    able = [name for name in reasons if name not in rejected]
    if impl in rejected or not able:
        why = rejected[impl] if impl in rejected else "; ".join(f"{name}: {why}" for name, why in rejected.items())
        others = f"; use one of {', '.join(map(repr, able))}" if able else ""
        raise ValueError(f"impl = {impl!r} cannot run this: {why}{others}")
    small = is_small(arguments["q"].shape[-3], arguments["k"].shape[-3])
    chosen = impl if impl != "auto" else "dense" if "dense" in able and small else able[0]
    for name in able:
        if name != chosen:
            rejected[name] = "it could, but " + (
                f"impl names {impl}" if impl != "auto" else f"{chosen} is the better for these lengths"
            )
    return Explanation(chosen, rejected)


def _platform_against(name, impl, q) -> str | None:
    """Whoever names a kernel while tracing may be compiling for another machine; nobody else is."""
    needs, here = getattr(_BACKENDS[name], "PLATFORM", None), jax.default_backend()
    may_be_elsewhere = name == impl and isinstance(q, jax.core.Tracer)
    return None if needs in (None, here) or may_be_elsewhere else f"it needs a {needs}, and this is a {here}"


def is_small(q_length: int, kv_length: int) -> bool:
    """Whether tiles would not pay: few scores an example, or a step of decoding, whose scores are linear anyway."""
    return q_length * kv_length <= 96 * 96 or q_length <= 16


def _checked(
    q,
    k,
    v,
    mask=None,
    score_mod=None,
    bias=None,
    scale=None,
    sinks=None,
    dropout_rate=0.0,
    dropout_key=None,
    q_positions=None,
    kv_positions=None,
) -> dict:
    """The arguments of a backend, or ValueError in one line that names the axis, the sizes and the remedy."""
    q, k, v = checks.queries_keys_values(q, k, v)
    bias, sinks = checks.floating("bias", bias), checks.floating("sinks", sinks)
    q_positions, kv_positions = checks.whole("q_positions", q_positions), checks.whole("kv_positions", kv_positions)
    batch, q_length, num_heads, kv_length = q.shape[:-3], *q.shape[-3:-1], k.shape[-3]

    for name, positions, length in (("q_positions", q_positions, q_length), ("kv_positions", kv_positions, kv_length)):
        if positions is not None and jnp.shape(positions) not in ((length,), (*batch, length)):
            raise ValueError(
                f"{name} has shape {jnp.shape(positions)}, expected {(length,)} or {(*batch, length)}: one place a row"
            )
    if mask is not None and not isinstance(mask, Mask):
        if not isinstance(mask, jax.Array | np.ndarray):
            raise ValueError(f"mask is a {type(mask).__name__}: expected one of masks, e.g. Causal(), or a bool array")
        mask = Dense(mask)
    if mask is not None:
        _arrays("mask", mask)
        mask.check(batch, num_heads, q_length, kv_length)
        require_positions(mask, q_length, kv_length, q_positions, kv_positions)
    score_mods = () if score_mod is None else score_mod if isinstance(score_mod, tuple) else (score_mod,)
    for mod in score_mods:
        if not isinstance(mod, ScoreMod):
            raise ValueError(
                f"score_mod has a {type(mod).__name__}: expected score mods, e.g. score_mods.SoftCap(30.0)"
            )
        _arrays("score_mod", mod)
        mod.check(num_heads)
        require_positions(mod, q_length, kv_length, q_positions, kv_positions, what="score mod")

    if bias is not None:
        *lead, rows, columns = jnp.shape(bias) if jnp.ndim(bias) >= 2 else (0, 0)
        fits = rows in (1, q_length) and columns == kv_length
        fits &= not lead or (
            len(lead) == len(batch) + 1
            and lead[-1] in (1, num_heads)
            and all(size in (1, given) for size, given in zip(lead, batch))
        )
        if not fits:
            raise ValueError(
                f"bias has shape {jnp.shape(bias)}, expected {(q_length, kv_length)} or "
                f"{(*batch, num_heads, q_length, kv_length)}, where 1 may stand for any axis but the last"
            )
    if sinks is not None and jnp.shape(sinks) != (num_heads,):
        raise ValueError(f"sinks has shape {jnp.shape(sinks)}, expected {(num_heads,)}: one logit a head")
    if np.shape(scale) != ():
        raise ValueError(f"scale has shape {np.shape(scale)}, expected (): one number for all scores")
    if isinstance(dropout_rate, jax.core.Tracer):
        raise ValueError("dropout_rate is traced: expected a number that is known, e.g. a static argument of jit")
    dropout_rate = float(dropout_rate)
    if not 0 <= dropout_rate < 1:
        raise ValueError(f"dropout_rate = {dropout_rate}: expected a probability in [0, 1)")
    if dropout_rate and dropout_key is None:
        raise ValueError(f"dropout_rate = {dropout_rate} needs dropout_key: one PRNG key, or one an example")
    if dropout_rate and not isinstance(dropout_key, jax.Array | np.ndarray):
        raise ValueError(f"dropout_key = {dropout_key!r}: expected a PRNG key, e.g. jax.random.key(0)")
    return {
        "q": q,
        "k": k,
        "v": v,
        "mask": mask,
        "score_mods": score_mods,
        "bias": bias,
        "scale": scale,
        "sinks": sinks,
        "dropout_rate": dropout_rate,
        "dropout_keys": dropout.per_example(dropout_key, batch) if dropout_rate else None,
        "q_positions": q_positions,
        "kv_positions": kv_positions,
    }


def _arrays(name, node):
    for leaf in jax.tree.leaves(node):
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise ValueError(f"{name} {type(node).__name__} holds a list with {leaf!r}: expected jnp.array(...)")
