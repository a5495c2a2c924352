"""The reference for every implementation of attention: the formula in NumPy, for one call at a time.

It shares no computation with `attnlab.ops`: visibility is written out for each mask from its definition, and gradients
are the textbook's, with the whole weight matrix. In float64 it is exact up to a few roundings. In another type it is
the naive computation, whose error shows how large errors in that type are.

    s_ij = mods(scale · q_i·k_j + bias_ij)      p_ij = e^(s_ij) / (Σ_j e^(s_ij) + e^sink)      o_i = Σ_j p_ij v_j
    dv_j = Σ_i p_ij do_i      ds_ij = p_ij (do_i·v_j − o_i·do_i + dlse_i)      dq_i = Σ_j ds_ij mods′ scale k_j

(Vaswani et al. 2017, equation 1; Dao et al. 2022, appendix B.4.)
"""

from typing import NamedTuple

import numpy as np

from attnlab import masks, score_mods
from attnlab.ops.call import AttentionCall


class Answer(NamedTuple):
    """The correct results of a call: `out`, `lse`, and the gradients of `Σ out·d_out + Σ lse·d_lse` by argument.

    >>> case = draw(FEATURES["causal"], seed=0)
    >>> sorted(answer(case.call, case.d_out, case.d_lse).gradients)
    ['k', 'q', 'v']
    """

    out: np.ndarray
    lse: np.ndarray
    gradients: dict[str, np.ndarray]


def attention(call: AttentionCall, d_out=None, d_lse=None, dtype=np.float64, products=None, scores=None) -> Answer:
    """Compute the results of a call with NumPy; dropout is ignored.

    Args:
      call: may have any mask of `attnlab.masks` except `MaskFn`, and the score mods `SoftCap`, `ALiBi` and `Forget`.
      d_out, d_lse: weights of the outputs in the differentiated sum; without `d_out` there are no gradients.
      dtype: the type of the whole computation.
      products: a narrower type to which weights and results are rounded, as in implementations in bfloat16.
      scores: a narrower type to which scores are rounded before the softmax.

    Returns:
      out `[*B, Tq, H, Dv]`, lse `[*B, Tq, H]` and the gradients of q, k and v, and of bias, sinks
      and the arrays of `ALiBi` and `Forget` if there are any.

    Raises:
      TypeError: a mask or a score mod that has no formula here.

    >>> answer(draw(FEATURES["causal"], seed=0).call).lse.shape
    (2, 13, 8)
    """

    def rounded(x):
        return x if products is None else x.astype(products).astype(dtype)

    group = call.num_heads // call.k.shape[-2]
    shown = visible(call)
    q, k, v = (np.moveaxis(np.asarray(x, dtype), -2, -3) for x in (call.q, call.k, call.v))  # [*B, H, T, D]
    hidden = ~shown.any(axis=-2)[..., None]
    k, v = (np.where(hidden, 0, np.repeat(x, group, axis=-3)) for x in (k, v))  # hidden keys may hold NaN
    scale = dtype(q.shape[-1] ** -0.5 if call.scale is None else call.scale)
    with np.errstate(over="ignore"):
        s = scale * (q @ np.swapaxes(k, -1, -2))
        s = s if call.bias is None else s + np.asarray(call.bias, dtype)
        s, derivatives = _modified(call, s)
    s = s if scores is None else s.astype(scores).astype(dtype)
    s = np.where(shown, s, -np.inf)
    sinks = None if call.sinks is None else np.asarray(call.sinks, dtype)[:, None, None]
    shift = s.max(axis=-1, keepdims=True, initial=-np.inf)
    shift = shift if sinks is None else np.maximum(shift, sinks)
    shift = np.where(np.isneginf(shift), dtype(0), shift)
    e = np.exp(s - shift)
    total = e.sum(axis=-1, keepdims=True) + (0 if sinks is None else np.exp(sinks - shift))
    p = e / np.where(total == 0, dtype(1), total)
    with np.errstate(divide="ignore"):
        lse = shift + np.log(total)
    out = rounded(rounded(p) @ v)
    answer = Answer(np.moveaxis(out, -3, -2), np.moveaxis(lse[..., 0], -1, -2), {})
    if d_out is None:
        return answer

    d_out = np.moveaxis(np.asarray(d_out, dtype), -2, -3)
    d_lse = 0 if d_lse is None else np.moveaxis(np.asarray(d_lse, dtype), -1, -2)[..., None]
    ds = rounded(p * (d_out @ np.swapaxes(v, -1, -2) - (out * d_out).sum(axis=-1, keepdims=True) + d_lse))
    raw, learned = ds, []
    for mod, derivative in reversed([*zip(call.score_mods, derivatives)]):
        learned = [*_of_mod(call, mod, raw), *learned]
        raw = raw * derivative
    raw = rounded(raw)

    def sum_groups(x):
        *batch, heads, length, features = x.shape
        return x.reshape(*batch, heads // group, group, length, features).sum(axis=-3)

    gradients = {
        "q": scale * (raw @ k),
        "k": sum_groups(scale * (np.swapaxes(raw, -1, -2) @ q)),
        "v": sum_groups(np.swapaxes(rounded(p), -1, -2) @ d_out),
    }
    gradients = {name: rounded(np.moveaxis(x, -3, -2)) for name, x in gradients.items()}
    if call.bias is not None:
        gradients["bias"] = _summed_to(raw, np.shape(call.bias))
    if sinks is not None:
        sink_weight = np.exp(sinks - shift) / total
        gradients["sinks"] = (sink_weight * (d_lse - (out * d_out).sum(axis=-1, keepdims=True))).sum(
            axis=(*range(len(call.batch)), -1, -2)
        )
    names = ["score_mods"] if len(learned) == 1 else [f"score_mods[{n}]" for n in range(len(learned))]
    return answer._replace(gradients=gradients | dict(zip(names, learned)))


def visible(call: AttentionCall) -> np.ndarray:
    """Which keys each query of a call may attend to, bool `[*B, H, Tq, Tk]`."""
    pairs = np.ones((1, 1), bool) if call.mask is None else _visible(call.mask, call)
    return np.broadcast_to(pairs, (*call.batch, call.num_heads, *call.lengths))


def visible_rows(call: AttentionCall) -> np.ndarray:
    """Which queries attend to any key, bool `[*B, Tq, H]`."""
    return np.moveaxis(visible(call).any(axis=-1), -1, -2)


def _visible(mask: masks.Mask, call: AttentionCall) -> np.ndarray:
    """Which keys each query may attend to under one mask; broadcasts to `[*B, H, Tq, Tk]`."""
    i, j = _positions(call)
    match mask:
        case masks.Causal():
            return j <= i
        case masks.SlidingWindow(left, right):
            return (i - left <= j) & (j <= i + right)
        case masks.PrefixLM(length):
            return (j < _of_example(length)) | (j <= i)
        case masks.Padding(lengths):
            return np.arange(call.lengths[1]) < _of_example(lengths)
        case masks.Segments(q_ids, kv_ids):
            q_ids, kv_ids = np.asarray(q_ids), np.asarray(q_ids if kv_ids is None else kv_ids)
            return q_ids[..., None, :, None] == kv_ids[..., None, None, :]
        case masks.BlockSparse(blocks, size):
            wide = np.repeat(np.repeat(np.asarray(blocks), size, axis=-1), size, axis=-2)
            return wide[..., : call.lengths[0], : call.lengths[1]]
        case masks.Dense(array):
            return np.asarray(array)
    name, parts = type(mask).__name__, [getattr(mask, side) for side in ("a", "b") if hasattr(mask, side)]
    if name == "Not":
        return ~_visible(*parts, call)
    if name in ("And", "Or"):
        a, b = (_visible(part, call) for part in parts)
        return a & b if name == "And" else a | b
    raise TypeError(f"the reference has no formula for the mask {name}")


def _positions(call: AttentionCall) -> tuple[np.ndarray, np.ndarray]:
    """Positions of queries and keys, `[…, 1, Tq, 1]` and `[…, 1, 1, Tk]`."""
    positions = (call.q_positions, call.kv_positions)
    i, j = (np.arange(n) if x is None else np.asarray(x) for n, x in zip(call.lengths, positions))
    return i[..., None, :, None], j[..., None, None, :]


def _of_example(x) -> np.ndarray:
    return np.asarray(x)[..., None, None, None]


def _modified(call: AttentionCall, s: np.ndarray) -> tuple[np.ndarray, list]:
    """The scores after the score mods, and each mod's derivative with respect to the scores before it."""
    derivatives = []
    for mod in call.score_mods:
        derivatives.append(1)
        match mod:
            case score_mods.SoftCap(cap):
                tanh = np.tanh(s / s.dtype.type(cap))
                s, derivatives[-1] = s.dtype.type(cap) * tanh, 1 - tanh**2
            case score_mods.ALiBi(slopes):
                i, j = _positions(call)
                s = s - np.asarray(slopes, s.dtype)[:, None, None] * abs(i - j).astype(s.dtype)
            case score_mods.Forget(queries, keys):
                c = [np.swapaxes(np.asarray(x, s.dtype), -1, -2) for x in (queries, queries if keys is None else keys)]
                s = s + c[0][..., :, None] - c[1][..., None, :]
            case _:
                raise TypeError(f"the reference has no formula for the score mod {type(mod).__name__}")
    return s, derivatives


def _of_mod(call: AttentionCall, mod, ds: np.ndarray) -> list[np.ndarray]:
    """Gradients of a score mod's arrays, from the gradient of its output `[*B, H, Tq, Tk]`."""
    match mod:
        case score_mods.ALiBi():
            i, j = _positions(call)
            return [-(ds * abs(i - j)).sum(axis=(*range(len(call.batch)), -2, -1))]
        case score_mods.Forget(_, keys):
            by_query, by_key = (np.swapaxes(sign * ds.sum(axis=axis), -1, -2) for sign, axis in ((1, -1), (-1, -2)))
            return [by_query + by_key] if keys is None else [by_query, by_key]
    return []


def _summed_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum over the axes along which a bias of this shape is broadcast."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    return x.sum(axis=tuple(at for at, n in enumerate(shape) if n == 1 and x.shape[at] > 1), keepdims=True)
