"""Check an attention function against the specification, feature by feature."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.ops.call import AttentionCall
from attnlab.ops.platforms import is_tf32
from attnlab.testing import cases as drawn
from attnlab.testing import reference
from attnlab.testing.cases import Case, Feature, Shape
from attnlab.testing.code import code_of
from attnlab.testing.report import BOTTOM_RIGHT, DIAGONAL, LSE_TYPE, MASKED_ROW, NEITHER, TOP_LEFT, Outcome, Report, Row
from attnlab.testing.subject import AdapterError, ResultError, Subject, Unsupported, as_attnlab, failure, outputs_of

# Shapes for shrunk calls, smallest first; some faults need several keys, examples or heads.
SMALL = tuple(
    Shape(batch, length, length, heads, heads, 1 + (heads > 1))
    for batch, heads in ((1, 1), (1, 2), (2, 2))
    for length in (2, 3, 5, 8)
)


def check_attention(
    function: Callable,
    adapter: Callable[[AttentionCall], dict] | None = None,
    features: str | Iterable[str] = "all",
    gradients: bool = True,
    cases: int = 200,
    shapes: Sequence[Shape] = drawn.SHAPES,
    on_row: Callable[[Row], None] = lambda row: None,
) -> Report:
    """Compare an attention function with the specification, feature by feature, over random calls.

    Each output and gradient is compared row by row: its error may be four times the error of a naive computation in
    the same type, plus a floor of a few roundings (`bounds`). Failing calls are shrunk.

    Args:
      function: returns the output `[B, Tq, H, Dv]`, or (output, lse `[B, Tq, H]`).
      adapter: returns the function's keyword arguments for a call, or raises `Unsupported`; None for a function that is
        called like `attnlab.attention`.
      features: names in `attnlab.testing.FEATURES`, or "all".
      gradients: whether gradients are compared.
      cases: number of calls over all features, at least one for each feature and shape.
      shapes: sizes of the calls; all but the first get one call per feature, because they may be large.
      on_row: called with the row of each feature as soon as it is known.

    Returns:
      a `Report`: each feature is right, wrong (with the smallest failing call), ignored, refused or slow.

    Raises:
      ValueError: an unknown feature, no feature, fewer than one case, a function that is not callable, or an adapter
        that returns no keyword arguments.

    >>> report = check_attention(attention, features=["causal", "sinks"], cases=4, gradients=False)
    >>> report["causal"].outcome, report["sinks"].outcome
    ('right', 'right')
    """
    if not callable(function):
        raise ValueError(f"function is {function!r}: expected a function of attention")
    subject = Subject(_outputs(function, adapter or as_attnlab))
    code = functools.partial(code_of, function=function, adapter=adapter or as_attnlab)
    operator = Operator(drawn.draw, _judge, code, SMALL, _is_slow)
    rows = rows_of(operator, subject, drawn.features_named(features), gradients, cases, shapes, on_row)
    if any(row.feature == "causal" and row.outcome == "right" for row in rows):
        subject.meanings[DIAGONAL] = _diagonal(subject)
        if subject.meanings[DIAGONAL] == NEITHER:
            why = "its causal mask is aligned neither to the first nor to the last keys"
            rows.append(Row(DIAGONAL, "wrong", why, math.inf, 1))
            on_row(rows[-1])
    return Report(tuple(rows), dict(subject.meanings))


def results(function: Callable, case: Case, adapter: Callable | None = None, gradients: bool = True) -> dict:
    """(actual, expected, their ratio) of a case's outputs and gradients, by name; arguments as in `check_attention`.

    >>> actual, expected, ratio = results(attention, draw(FEATURES["causal"], seed=0))["the gradient of q"]
    >>> actual.shape == expected.shape == (2, 13, 8, 4)
    True
    """
    actual, (expected, _) = Subject(_outputs(function, adapter or as_attnlab)).run(case, gradients), answers(case)
    with np.errstate(divide="ignore", invalid="ignore"):
        return {name: (x, expected[name], x / expected[name]) for name, x in actual.items()}


def _outputs(function: Callable, adapter: Callable) -> Callable:
    """Return a function from a call to out and any lse; with `as_attnlab`, it sets `return_lse` if accepted."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a C function, which has no signature
        parameters = ()
    asks = adapter is as_attnlab and "return_lse" in parameters
    return outputs_of(
        function,
        (lambda call: adapter(call) | {"return_lse": True}) if asks else adapter,
        "lse",
        lambda call: ((*call.q.shape[:-1], call.v.shape[-1]), call.q.shape[:-1]),
    )


# Any operator


class Finding(NamedTuple):
    """The outcome of one case."""

    outcome: Outcome
    why: str = ""
    worst: float = 0.0
    fault: str = ""  # what the function computes instead, or the first wrong result


class Operator(NamedTuple):
    """The parts of a check that depend on the operator: drawing, judging and printing a case, small shapes, memory."""

    draw: Callable[..., Case]
    judge: Callable[[Subject, Case, dict], Finding]
    code: Callable[[Case, str, bool], str]
    small: Sequence = ()
    is_slow: Callable[..., bool] = lambda subject, feature: False


def rows_of(operator: Operator, subject: Subject, features: Sequence, gradients, cases: int, shapes, on_row) -> list:
    """Return the row of each feature; raise ValueError for no feature or fewer than one case."""
    if cases < 1 or not features:
        raise ValueError(f"cases = {cases} of {len(features)} features: expected 1 or more of each")
    first, *others = shapes
    each = max(1, round(cases / len(features)) - len(others))
    where, rows = [(seed, first) for seed in range(each)] + [(0, shape) for shape in others], []
    for feature in features:
        rows.append(_row(operator, subject, feature, gradients, where))
        on_row(rows[-1])
    return rows


def _row(operator: Operator, subject: Subject, feature, gradients: bool, where: Sequence[tuple]) -> Row:
    worst, compared, compares = 0.0, 0, gradients and feature.name != "dropout"
    for seed, shape in where:
        case = operator.draw(feature, seed, shape)
        finding, compares = _judged(operator, subject, case, compares, compared > 0)
        if finding.outcome == "refused":
            return Row(feature.name, "refused", finding.why, worst, compared)
        worst, compared = max(worst, finding.worst), compared + 1
        if finding.outcome != "right":
            case, finding = _shrunk(operator, subject, case, finding, compares)
            code = operator.code(case, finding.why, compares)
            why, fault = finding.why, finding.fault or finding.why
            return Row(feature.name, finding.outcome, why, finding.worst, compared, compares, code, fault)
    if operator.is_slow(subject, feature):
        return Row(feature.name, "slow", "its memory grows with Tq·Tk", worst, compared, compares)
    return Row(feature.name, "right", _blind_spot(feature.dtype, where[0][1]), worst, compared, compares)


def _blind_spot(dtype, shape) -> str:
    """Describe the errors that the bound of a coarse type allows; "" for float32."""
    precision = rounding(dtype)
    if precision <= np.finfo(np.float32).eps:
        return ""
    roundings = 8 + math.sqrt(shape.kv_length) if isinstance(shape, Shape) else 4  # as in `bounds`; 4 for recurrences
    floor = roundings * precision
    products = "its products are in TF32: " if precision > float(jnp.finfo(dtype).eps) else ""
    return f"{products}errors up to {floor:.0%} of the largest value are within its bound"


def _judged(operator: Operator, subject: Subject, case: Case, gradients: bool, computed: bool) -> tuple[Finding, bool]:
    """The finding of a case, and whether gradients were compared: if the first gradients raise, only outputs are."""
    try:
        actual = subject.run(case, gradients)
    except AdapterError:
        raise
    except Exception as error:  # whatever the function under test raises
        if gradients and not isinstance(error, Unsupported | ResultError):
            finding, _ = _judged(operator, subject, case, False, computed)
            is_new = computed and not isinstance(error, NotImplementedError)  # earlier calls had gradients
            if finding.outcome != "refused" and not (is_new and finding.outcome == "right"):
                return finding, False
        outcome, why = failure(error, computed)
        return Finding(outcome, why, math.inf if outcome == "wrong" else 0.0), False
    return operator.judge(subject, case, actual), gradients


def _shrunk(operator: Operator, subject: Subject, case: Case, finding: Finding, gradients: bool):
    """The first small case that fails in the same way, or the original case if there is none; and its finding."""
    for shape in operator.small if case.feature.name != "dropout" else ():
        small = operator.draw(case.feature, case.seed, shape)
        other, _ = _judged(operator, subject, small, gradients, True)
        if (other.outcome, other.fault) == (finding.outcome, finding.fault):
            return small, other
    return case, finding


def compared(case: Case, actual: dict, answers: Callable, error: Callable) -> Finding:
    """Judge a case's results by name; `answers` returns exact and naive results, `error` returns error / bound."""
    exact, naive = answers(case)
    errors = {name: error(case, name, x, exact[name], naive[name]) for name, x in actual.items()}
    worst, wrong = max(errors.values()), [name for name in sorted(errors, key="out".__ne__) if not errors[name] <= 1]
    if not wrong:
        return Finding("right", worst=worst)
    for words, call in case.feature.instead(case.call).items() if wrong[0] == "out" else ():
        other, _ = answers(case._replace(call=call))
        if error(case, "out", actual["out"], other["out"], other["out"]) <= 1:
            outcome = "ignored" if words == drawn.WITHOUT else "wrong"
            return Finding(outcome, f"it computes {words}", worst, words)
    sizes = (f"has an error of {errors[name]:.1f} times its bound{_ratio(actual[name], exact[name])}" for name in wrong)
    sizes = (size if math.isfinite(errors[name]) else "is not finite" for name, size in zip(wrong, sizes))
    return Finding("wrong", ", ".join(map(" ".join, zip(wrong, sizes))), worst, wrong[0])


def _ratio(actual, exact) -> str:
    """The range of found/expected in the middle 90% of the numbers whose expected value is not small."""
    actual, exact = np.broadcast_arrays(np.asarray(actual, np.float64), np.asarray(exact, np.float64))
    large = (abs(exact) > 0.1 * abs(exact).max(initial=0)) & np.isfinite(actual)
    if not large.any():
        return ""
    low, high = (f"{end:.3g}" for end in np.quantile(actual[large] / exact[large], [0.05, 0.95]))
    return f" (found/expected {low}{f' to {high}' if high != low else ''})"


# Attention


def _judge(subject: Subject, case: Case, actual: dict) -> Finding:
    if case.feature.name == "dropout":
        other = case._replace(call=case.call.replace(dropout_keys=case.call.dropout_keys ^ np.uint32(1)))
        return _judged_dropout(case, actual["out"], subject.run(other, gradients=False)["out"])
    if case.feature.name.endswith("lse") and "lse" not in actual:
        return Finding("refused", "it returns no lse")
    rows = reference.visible_rows(case.call)
    if not rows.all():
        subject.meanings[MASKED_ROW] = _of_masked_rows(case, actual["out"][~rows])
    if "lse" in actual and case.feature.dtype != np.float32:
        subject.meanings[LSE_TYPE] = subject.types["lse"].name
    return compared(case, actual, answers, functools.partial(_error, subject))


def answers(case: Case) -> tuple[dict, dict]:
    """(exact results, results of a naive computation in the case's type), each by name."""
    is_half = case.feature.dtype != np.float32
    # In float32, −1e9 plus a score is −1e9: the scores of such a row are all equal.
    scores = np.float32 if case.feature.name == "shifted rows" else None
    exact = reference.attention(case.call, case.d_out, case.d_lse, scores=scores)
    products = case.feature.dtype if is_half else None
    naive = reference.attention(case.call, case.d_out, case.d_lse, np.float32, products)
    return tuple(
        {"out": x.out, "lse": x.lse} | {f"the gradient of {name}": y for name, y in x.gradients.items()}
        for x in (exact, naive)
    )


def _error(subject: Subject, case: Case, name: str, actual, exact, naive) -> float:
    """The largest error of any row in units of its bound; infinite if a number is not finite."""
    if name == "lse" and subject.types["lse"] == np.float32:
        case = case._replace(feature=dataclasses.replace(case.feature, dtype=np.float32))
    if name in ("out", "lse"):
        rows = reference.visible_rows(case.call)
        actual, exact, naive = (x[rows] for x in (actual, exact, naive))
    if not np.isfinite(actual).all():
        return math.inf
    return float((abs(actual - exact) / bounds(case, name, exact, naive)).max(initial=0))


def rounding(dtype) -> float:
    """The ε of the type to which products round their operands."""
    return 2.0**-10 if is_tf32(dtype, jax.default_backend()) else float(jnp.finfo(dtype).eps)


def bounds(case: Case, name: str, exact: np.ndarray, naive: np.ndarray) -> np.ndarray:
    """The largest allowed error for each row of a result: four times a naive computation's error, plus a floor.

    The error of a sum of n products is √n roundings on average and n at worst, so two orders of summation differ by a
    few roundings of the largest value. A score of size |s| has an error of ε|s|, which changes weights and results by
    that fraction; gradients contain a weight twice. With ε for the type of the products and ε₃₂ for float32:

        floor = (8 + √Tk) ε · (the largest value) + 4 ε₃₂ · max|s| · (the largest value)

    Args:
      case: determines the type, the lengths and the size of the scores.
      name: "out", "lse", or e.g. "the gradient of q".
      exact, naive: results `[…, features]`; one number per row for lse and the gradient of sinks.

    Returns:
      bounds that broadcast to `exact`.
    """
    epsilon = float(np.finfo(np.float32).eps)
    precision = rounding(case.feature.dtype)
    errors = abs(np.asarray(naive, np.float64) - exact)
    has_features = name not in ("lse", "the gradient of sinks")
    errors = errors.max(axis=-1, keepdims=True) if has_features else errors
    largest = max(float(abs(exact).max(initial=0)), 1.0 if name == "lse" else 0.0, 2.0**-20)
    size = 0.0 if case.feature.name == "shifted rows" else _score_size(case)
    return 4 * errors + ((8 + math.sqrt(case.shape.kv_length)) * precision + 4 * epsilon * size) * largest


def _score_size(case: Case) -> float:
    q, k = (np.linalg.norm(np.nan_to_num(np.asarray(x, np.float64)), axis=-1).max() for x in (case.call.q, case.call.k))
    return float(q * k * (case.shape.features**-0.5 if case.call.scale is None else abs(case.call.scale)))


def _of_masked_rows(case: Case, out: np.ndarray) -> str:
    if np.isnan(out).any():
        return "NaN"
    if not out.any():
        return "0"
    means = np.asarray(case.call.v, np.float64).mean(axis=1, keepdims=True)
    means = np.repeat(means, case.shape.heads // case.shape.kv_heads, axis=2)
    rows = reference.visible_rows(case.call)
    means = np.broadcast_to(means, (*rows.shape, out.shape[-1]))[~rows]
    return "the mean of all values" if np.allclose(means, out, atol=1e-2) else "another value"


def _diagonal(subject: Subject) -> str:
    """How a function aligns its causal mask if there are fewer queries than keys, and no positions."""
    case = drawn.draw(drawn.FEATURES["causal"], 0, Shape(2, 5, 9, 2, 2, 4))
    try:
        out = subject.run(case, gradients=False)["out"]
    except Exception:  # whatever the function under test raises
        return "refused"
    first, last = (np.arange(5, dtype=np.int32) + start for start in (0, 4))
    for meaning, q_positions in ((TOP_LEFT, first), (BOTTOM_RIGHT, last)):
        other, _ = answers(case._replace(call=case.call.replace(q_positions=q_positions, kv_positions=np.arange(9))))
        if _error(subject, case, "out", out, other["out"], other["out"]) <= 1:
            return meaning
    return NEITHER


def _judged_dropout(case: Case, out: np.ndarray, other: np.ndarray) -> Finding:
    """Check that dropout sets a share `RATE` of the weights 1/Tk to 0, varying by row and key (`other` is the output
    with another key), and the rest to 1/Tk/(1 − rate)."""
    rate, kept = drawn.RATE, out != 0
    deviation = math.sqrt(rate * (1 - rate) / kept.size)  # standard deviation of the dropped share
    dropped = 1 - kept.mean()
    if dropped == 0:
        return Finding("ignored", f"it computes {drawn.WITHOUT}", math.inf)
    if abs(dropped - rate) > 5 * deviation:
        why = f"it drops {dropped:.4f} of the weights, expected {rate} ± {5 * deviation:.4f}"
        return Finding("wrong", why, math.inf)
    scaled = 1 / case.shape.kv_length / (1 - rate)
    if not np.allclose(out[kept], scaled, rtol=1e-5):
        return Finding("wrong", "kept weights are not scaled by 1/(1 − rate)", math.inf)
    for axis, what in ((0, "examples"), (1, "queries"), (2, "heads")):
        first, second = (np.take(kept, at, axis=axis) for at in (0, 1))
        if (first == second).all():
            return Finding("wrong", f"it drops the same weights for different {what}", math.inf)
    if (kept == (other != 0)).all():
        return Finding("wrong", "it drops the same weights for different random keys", math.inf)
    return Finding("right", worst=abs(dropped - rate) / (5 * deviation))


# Memory


_LENGTHS = (2048, 4096)  # many tiles, whatever their size


def _is_slow(subject: Subject, feature: Feature) -> bool:
    """Whether a feature makes memory grow with Tq·Tk although its inputs and a plain call's memory do not."""
    if feature.transform != "jit" or feature.name in ("plain", "dropout"):
        return False
    return _is_quadratic(subject, feature) and not _is_quadratic(subject, drawn.FEATURES["plain"])


def _is_quadratic(subject: Subject, feature: Feature) -> bool:
    if feature.name not in subject.is_quadratic:
        sizes = [_temporary_bytes(subject, feature, length) for length in _LENGTHS]
        subject.is_quadratic[feature.name] = None not in sizes and sizes[1] > 3 * sizes[0]
    return subject.is_quadratic[feature.name]


def _temporary_bytes(subject: Subject, feature: Feature, length: int) -> int | None:
    """The memory of a compiled call besides inputs and results; None if unknown, or if inputs grow with Tq·Tk."""
    call = drawn.draw(feature, 0, Shape(1, length, length, 1, 1, 8)).call
    if any(np.size(x) >= length * length // 64 for x in jax.tree.leaves(call)):
        return None
    try:
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), call)
        compiled = jax.jit(lambda call: subject.outputs(call)["out"]).lower(abstract).compile()
        return compiled.memory_analysis().temp_size_in_bytes
    except Exception:  # a function that needs values, or a backend without memory analysis
        return None
