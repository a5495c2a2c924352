"""Check a linear recurrence against a loop over tokens in NumPy float64, feature by feature.

    S′_t = diag(e^g_t) S_{t−1}      S_t = S′_t − e_t (r_tᵀ S′_t) + w_t v_tᵀ      o_t = scale · q_tᵀ S_t

By default e = r = 0 and w = k. With `beta` β, e = w = βk and r = k (Yang et al. 2024, "Gated Delta Networks"). With
`erase`, e and r are its two arrays.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import jax
import ml_dtypes
import numpy as np

from attnlab.testing.cases import WITHOUT, Case, features_named
from attnlab.testing.check import Finding, Operator, compared, rounding, rows_of
from attnlab.testing.report import Report, Row
from attnlab.testing.subject import FLOATING, Subject, outputs_of


class RecurrenceShape(NamedTuple):
    """The sizes of a call; the default length is not a multiple of any chunk size.

    >>> [RecurrenceShape(length=length, features=64, values=64).length for length in (1, 63, 65, 130)]
    [1, 63, 65, 130]
    """

    batch: int = 2
    length: int = 75
    heads: int = 2
    features: int = 8
    values: int = 5

    @property
    def by_head(self) -> tuple[int, int, int]:
        """The shape of an array with one number for each token and head."""
        return self.batch, self.length, self.heads


_USUAL = RecurrenceShape()


@dataclass(frozen=True)
class RecurrenceFeature:
    """A feature of the recurrence.

    Attributes:
      name: e.g. "beta".
      fields: takes a random generator and a shape; returns the arguments of a call besides q, k and v.
      left_out: names of the arguments that an implementation without the feature would ignore.
      dtype: type of q, k and v.
    """

    name: str
    fields: Callable[[np.random.Generator, RecurrenceShape], dict] = lambda rng, shape: {}
    left_out: tuple[str, ...] = ()
    dtype: type = np.float32
    transform: ClassVar[str] = "jit"

    def instead(self, call: dict) -> dict[str, dict]:
        """The calls that an implementation without the feature would compute, as in `Feature.instead`."""
        left = {name: x for name, x in call.items() if name not in self.left_out}
        return {WITHOUT: left} if self.left_out else {}


def recurrence_answer(call: dict, d_out=None, dtype=np.float64, d_state=None) -> dict[str, np.ndarray]:
    """Compute out `[B, T, H, V]`, the last state `[B, H, K, V]`, and gradients of Σ out·d_out + Σ state·d_state.

    Args:
      call: arguments of `attnlab.linear_recurrence` as NumPy arrays; q, k and v have the same number of heads.
      d_out: weights of the outputs, `[B, T, H, V]`; without them there are no gradients.
      dtype: the type of the whole computation.
      d_state: weights of the last state, `[B, H, K, V]`; None for zeros.

    >>> call = recurrence_call("beta", seed=0)
    >>> recurrence_answer(call)["out"].shape == call["v"].shape
    True
    """
    arrays = {name: np.asarray(x, dtype) for name, x in call.items() if name in FLOATING and hasattr(x, "dtype")}
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    batch, length, heads, features = q.shape
    scale = dtype(features**-0.5 if call.get("scale") is None else call["scale"])
    g, beta, pair = arrays.get("g"), arrays.get("beta"), call.get("erase")
    decay = np.ones((batch, length, heads, 1), dtype) if g is None else np.exp(g if g.ndim == 4 else g[..., None])
    w = k if beta is None else beta[..., None] * k
    e, r = (w, k) if beta is not None else (np.asarray(x, dtype) for x in pair) if pair else (0 * k, 0 * k)
    ids = call.get("segment_ids")
    starts = np.zeros((batch, length), bool) if ids is None else np.diff(ids, axis=1, prepend=ids[:, :1]) != 0
    lengths = call.get("lengths")
    inside = np.ones((batch, length), bool) if lengths is None else np.arange(length) < np.asarray(lengths)[:, None]
    q, k, v, w, e, r = (np.where(inside[..., None, None], x, 0) for x in (q, k, v, w, e, r))
    decay = np.where(inside[..., None, None], decay, 1)
    S = arrays.get("state", np.zeros((batch, heads, features, v.shape[-1]), dtype))
    out, before = np.zeros_like(v), []
    for t in range(length):
        S = np.where(starts[:, t, None, None, None], 0, S)
        before.append(S)
        decayed = decay[:, t, ..., None] * S
        erased = np.einsum("bhk,bhkv->bhv", r[:, t], decayed)
        S = decayed - e[:, t, ..., None] * erased[..., None, :] + w[:, t, ..., None] * v[:, t, :, None]
        out[:, t] = scale * np.einsum("bhk,bhkv->bhv", q[:, t], S)
    results = {"out": out, "state": S}
    if d_out is None:
        return results

    d_out = np.where(inside[..., None, None], np.asarray(d_out, dtype), 0)
    d = {name: np.zeros_like(x) for name, x in {"q": q, "v": v, "w": w, "e": e, "r": r, "decay": k}.items()}
    dS = np.zeros_like(S) if d_state is None else np.asarray(d_state, dtype)
    for t in reversed(range(length)):
        decayed = decay[:, t, ..., None] * before[t]
        erased = np.einsum("bhk,bhkv->bhv", r[:, t], decayed)
        after = decayed - e[:, t, ..., None] * erased[..., None, :] + w[:, t, ..., None] * v[:, t, :, None]
        d["q"][:, t] = scale * np.einsum("bhkv,bhv->bhk", after, d_out[:, t])
        dS = dS + scale * q[:, t, ..., None] * d_out[:, t, :, None]
        d["w"][:, t] = np.einsum("bhkv,bhv->bhk", dS, v[:, t])
        d["v"][:, t] = np.einsum("bhkv,bhk->bhv", dS, w[:, t])
        d["e"][:, t] = -np.einsum("bhkv,bhv->bhk", dS, erased)
        d_erased = -np.einsum("bhkv,bhk->bhv", dS, e[:, t])
        d["r"][:, t] = np.einsum("bhkv,bhv->bhk", decayed, d_erased)
        dS = dS + r[:, t, ..., None] * d_erased[..., None, :]
        d["decay"][:, t] = (dS * decayed).sum(axis=-1)  # the gradient of g, because the decay is e^g
        dS = np.where(starts[:, t, None, None, None], 0, decay[:, t, ..., None] * dS)
    gradients = {"q": d["q"], "k": d["w"], "v": d["v"], "state": dS}
    if beta is not None:
        both = d["e"] + d["w"]
        gradients |= {"k": beta[..., None] * both + d["r"], "beta": (k * both).sum(axis=-1)}
    if g is not None:
        d["decay"] = np.where(inside[..., None, None], d["decay"], 0)  # padding does not decay
        gradients["g"] = d["decay"] if g.ndim == 4 else d["decay"].sum(axis=-1)
    gradients = {name: x for name, x in gradients.items() if name in arrays}
    gradients |= {"erase[0]": d["e"], "erase[1]": d["r"]} if pair else {}
    return results | {f"the gradient of {name}": x for name, x in gradients.items()}


def check_recurrence(
    function: Callable,
    adapter: Callable[[dict], dict] | None = None,
    features: str | Iterable[str] = "all",
    gradients: bool = True,
    cases: int = 40,
    on_row: Callable[[Row], None] = lambda row: None,
    shapes: Sequence[RecurrenceShape] = (_USUAL,),
    dtype: type = np.float32,
) -> Report:
    """Compare a linear recurrence function with a loop over tokens, feature by feature.

    Each result may have four times the error of the loop in float32, plus 4ε(√(K + 3·64) + |G|) times its largest
    element, for the rounding of algorithms with chunks of up to 64 tokens. |G| is 64 times the largest |g|, but at
    most 104, because e^−104 is 0 in float32. If products are in bfloat16 or TF32, four roundings of that type are
    added. The median relative error of a gate's gradient must also be within this bound, because a gradient computed
    as a difference of large running sums loses its digits where it is small.

    Args:
      function: returns the output `[B, T, H, V]`, or (output, last state `[B, H, K, V]`).
      adapter: returns the function's keyword arguments for the arguments of `attnlab.linear_recurrence`, or raises
        `Unsupported`; None for a function that takes the same arguments.
      features: names in `RECURRENCE_FEATURES`, or "all".
      gradients: whether gradients are compared.
      cases: number of calls over all features, at least one for each feature and shape.
      on_row: called with the row of each feature as soon as it is known.
      shapes: sizes of the calls; all but the first get one call per feature. GPU kernels need sizes such as
        `RecurrenceShape(length=130, features=64, values=64)`.
      dtype: type of q, k and v in all features but "bfloat16": float32 or `jnp.bfloat16`.

    Returns:
      a `Report`.

    Raises:
      ValueError: an unknown feature, no feature, fewer than one case, or an adapter that returns no keyword arguments.

    >>> report = check_recurrence(linear_recurrence, features=["beta"], cases=1)
    >>> report["beta"].outcome
    'right'
    """
    subject = Subject(outputs_of(function, adapter or dict, "state", _shapes))
    operator, chosen = Operator(_draw, _judge, _code), features_named(features, RECURRENCE_FEATURES)
    chosen = [replace(each, dtype=np.dtype(dtype).type) if each.dtype == np.float32 else each for each in chosen]
    return Report(tuple(rows_of(operator, subject, chosen, gradients, cases, tuple(shapes), on_row)))


def _shapes(call: dict) -> tuple:
    batch, _, heads, values = call["v"].shape
    return call["v"].shape, (batch, heads, call["q"].shape[-1], values)


def _draw(feature: RecurrenceFeature, seed: int, shape: RecurrenceShape) -> Case:
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, *shape.by_head, shape.features))
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    v, d_out = rng.normal(size=(2, *shape.by_head, shape.values))
    call = {"q": q, "k": k, "v": v} | feature.fields(rng, shape)
    ints = ("segment_ids", "lengths")
    call = {name: x if name in ints else jax.tree.map(lambda x: x.astype(np.float32), x) for name, x in call.items()}
    call |= {name: call[name].astype(feature.dtype) for name in ("q", "k", "v")}
    d_state = rng.normal(size=(shape.batch, shape.heads, shape.features, shape.values))
    return Case(feature, seed, shape, call, d_out.astype(np.float32), d_state.astype(np.float32))


def recurrence_call(feature: str, seed: int, shape: RecurrenceShape = _USUAL, dtype: str = "float32") -> dict:
    """Draw the arguments of a feature's call as `check_recurrence` does; `dtype` is the type of q, k and v.

    >>> sorted(recurrence_call("beta", 0))
    ['beta', 'k', 'q', 'v']
    """
    return _draw(replace(RECURRENCE_FEATURES[feature], dtype=np.dtype(dtype).type), seed, shape).call


def _code(case: Case, why: str, gradients: bool) -> str:
    name, sizes = case.feature.name, "" if case.shape == _USUAL else f", testing.{case.shape}"
    dtype = f", dtype={np.dtype(case.feature.dtype).name!r}" if case.feature.dtype != np.float32 else ""
    return (
        f"# {name}: {why}\nfrom attnlab import testing\n\n"
        f"call = testing.recurrence_call({name!r}, {case.seed}{sizes}{dtype})\n"
        "expected = testing.recurrence_answer(call)['out']  # compare with my_function(**call)\n"
    )


def _judge(subject: Subject, case: Case, actual: dict) -> Finding:
    d_state = case.d_lse if "state" in actual else None  # a case has room for the weights of one second result

    def answers(case):
        return [recurrence_answer(case.call, case.d_out, dtype, d_state) for dtype in (np.float64, np.float32)]

    return compared(case, actual, answers, _error)


def _error(case: Case, name: str, actual, exact, naive) -> float:
    """The largest error in units of its bound; infinite if a number is not finite."""
    if not np.isfinite(actual).all():
        return math.inf
    chunk_decay = min(float(abs(np.asarray(case.call.get("g", 0), np.float64)).max()) * 64, 104)
    floor = 4 * float(np.finfo(np.float32).eps) * (math.sqrt(case.shape.features + 3 * 64) + chunk_decay)
    epsilon = rounding(case.feature.dtype)  # the rounding of operands and results; the sums above round in float32
    floor += 4 * epsilon * (epsilon > float(np.finfo(np.float32).eps))

    def ratio(measure, size):
        error, naive_error = (measure(abs(x - exact) / size) for x in (actual, naive))
        return float(error / (4 * naive_error + floor))

    largest = ratio(np.max, max(abs(exact).max(), 1e-30))
    if name != "the gradient of g" or not exact.any():
        return largest
    # A gate through which nothing passes has a gradient of 0, and does not count.
    return max(largest, ratio(lambda error: np.median(error[exact != 0]), np.where(exact == 0, 1, abs(exact))))


def _decay(sizes: str, strongest: float):
    def fields(rng, shape):
        size = shape.by_head if sizes == "head" else (*shape.by_head, shape.features)
        return {"g": -np.exp(rng.uniform(np.log(1e-3), np.log(strongest), size))}

    return fields


def _fast(rng, shape):
    """Decay the state by about e^−20 per token: gradients of gates are tiny compared with running sums."""
    return {"g": -rng.uniform(15, 25, shape.by_head)}


def _resets(rng, shape):
    gates = np.full(shape.by_head, -0.3)
    gates[:, 9::20], gates[:, 15::20] = -1e9, -np.inf
    return {"g": gates}


def _beta(rng, shape):
    return {"beta": rng.uniform(0, 1, shape.by_head)}


def _erase(rng, shape):
    e, r = rng.normal(size=(2, *shape.by_head, shape.features))
    e, r = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (e, r))
    return {"erase": (0.8 * e, r)}


def _state(rng, shape):
    return {"state": rng.normal(size=(shape.batch, shape.heads, shape.features, shape.values))}


def _segments(rng, shape):
    return {"segment_ids": np.cumsum(rng.random(shape.by_head[:2]) < 0.1, axis=1).astype(np.int32)}


def _lengths(rng, shape):
    return {"lengths": rng.integers(0, shape.length, shape.batch).astype(np.int32) + 1}


def _both(*parts):
    return lambda rng, shape: {name: x for part in parts for name, x in part(rng, shape).items()}


_GATED_DELTA = _both(_decay("head", 1.0), _beta)
RECURRENCE_FEATURES = {
    feature.name: feature
    for feature in (
        RecurrenceFeature("plain"),
        RecurrenceFeature("decay", _decay("head", 1.0), ("g",)),
        RecurrenceFeature("decay by feature", _decay("feature", 1.0), ("g",)),
        RecurrenceFeature("strong decay", _decay("head", 90.0), ("g",)),
        RecurrenceFeature("strong decay by feature", _decay("feature", 90.0), ("g",)),
        RecurrenceFeature("fast decay", _fast, ("g",)),
        RecurrenceFeature("resets", _resets, ("g",)),
        RecurrenceFeature("beta", _beta, ("beta",)),
        RecurrenceFeature("beta and decay", _GATED_DELTA, ("g",)),
        RecurrenceFeature("beta and decay by feature", _both(_decay("feature", 1.0), _beta), ("g",)),
        RecurrenceFeature("erase", _erase, ("erase",)),
        RecurrenceFeature("scale", lambda rng, shape: {"scale": np.float32(0.7)}, ("scale",)),
        RecurrenceFeature("state", _both(_GATED_DELTA, _state), ("state",)),
        RecurrenceFeature("segments", _both(_GATED_DELTA, _segments), ("segment_ids",)),
        RecurrenceFeature("lengths", _both(_GATED_DELTA, _lengths), ("lengths",)),
        RecurrenceFeature("bfloat16", _GATED_DELTA, dtype=ml_dtypes.bfloat16),
    )
}
