"""The results of a check: a row for each feature, and the report of all rows."""

import collections
import dataclasses
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

Outcome = Literal["right", "wrong", "ignored", "refused", "slow"]
# Choices in which libraries legitimately differ, and what some libraries do.
MASKED_ROW, DIAGONAL = "a fully masked row returns", "causal with fewer queries than keys"
LSE_TYPE = "the lse of bfloat16 is in"
TOP_LEFT, BOTTOM_RIGHT = "the first query attends to the first key", "the last query attends to all keys"
NEITHER = "another mask"
PROFILES = {
    "attnlab": {MASKED_ROW: "0", DIAGONAL: "refused"},
    "jax.nn": {MASKED_ROW: "the mean of all values", DIAGONAL: TOP_LEFT},
    "torch": {MASKED_ROW: "0", DIAGONAL: TOP_LEFT},  # NaN before torch 2.5
    "ONNX": {MASKED_ROW: "0", DIAGONAL: TOP_LEFT},  # according to its published test vectors
    "flash-attention": {MASKED_ROW: "0", DIAGONAL: BOTTOM_RIGHT},  # TOP_LEFT before 2.1
}


@dataclasses.dataclass(frozen=True)
class Row:
    """The result for one feature.

    Attributes:
      feature: its name.
      outcome: "right"; "wrong"; "ignored", if the output is the same as without the feature; "refused"; "slow", if
        memory grows with Tq·Tk only because of the feature.
      why: one line; "" if the outcome is right, unless the bound is wide, as in bfloat16 and TF32.
      worst: the largest error in units of its bound.
      cases: how many calls were computed.
      gradients: whether gradients were compared.
      code: Python code that shows the smallest failing call found, or "".
      fault: the first wrong result, what is computed in its place, or the exception; rows with the same fault have the
        same text.

    >>> Row("causal", "refused").cases
    0
    """

    feature: str
    outcome: Outcome
    why: str = ""
    worst: float = 0.0
    cases: int = 0
    gradients: bool = False
    code: str = ""
    fault: str = ""

    def line(self, width: int, like: str = "") -> str:
        """Format the row as a line; `like` is the first feature with the same fault."""
        why = f"like {like}: {self.fault}" if like else self.why
        calls = f"{self.cases:3} calls" + ("" if self.gradients or not self.cases else ", no gradients")
        return f"{self.feature:{width}}  {self.outcome:8}{self.worst:8.2f}  {calls}" + (f"  {why}" if why else "")


class Report(str):
    """The results of a check as a string, so that pytest prints it in full for `assert report.ok, report`.

    Attributes:
      rows: one per feature.
      meanings: choices in which libraries legitimately differ, and what the function does.

    >>> Report((Row("causal", "right"),)).ok
    True
    """

    rows: tuple[Row, ...]
    meanings: dict[str, str]

    def __new__(cls, rows: tuple[Row, ...], meanings: Mapping[str, str] = types.MappingProxyType({})):
        """Create the report of these rows."""
        width, first = max((len(row.feature) for row in rows), default=0), likes(rows)
        lines = [row.line(width, first.get(row.feature, "")) for row in rows]
        lines += [f"{choice}: {meaning}" for choice, meaning in meanings.items()]
        followed = follows(meanings)
        report = super().__new__(
            cls, "\n".join([*lines, *[f"as {', '.join(followed)}"] * bool(followed), counts(rows)])
        )
        report.rows, report.meanings = rows, dict(meanings)
        return report

    __repr__ = str.__str__

    @property
    def ok(self) -> bool:
        """Whether something was compared and nothing is wrong or silently ignored."""
        outcomes = {row.outcome for row in self.rows}
        return not outcomes & {"wrong", "ignored"} and bool(outcomes & {"right", "slow"})

    def __getitem__(self, feature: str) -> Row:
        """Return the row of a feature; raise KeyError if it was not checked."""
        rows = {row.feature: row for row in self.rows}
        if feature not in rows:
            raise KeyError(f"{feature!r} was not checked, only {', '.join(rows)}")
        return rows[feature]

    @property
    def follows(self) -> list[str]:
        """The names of the `PROFILES` with the same choices as the function."""
        return follows(self.meanings)


def likes(rows: Iterable[Row]) -> dict[str, str]:
    """Map each feature that repeats an earlier feature's fault to the first feature with that fault.

    A fault that only names the first wrong result is the same only if "plain", part of every feature, has it.
    """
    first, repeats = {}, {}
    for row in rows:
        is_unexplained = row.fault in ("out", "lse", "state") or row.fault.startswith("the gradient of ")
        if is_unexplained and row.feature != "plain" and first.get((row.outcome, row.fault)) != "plain":
            continue
        if row.outcome in ("wrong", "ignored") and row.fault:
            earlier = first.setdefault((row.outcome, row.fault), row.feature)
            repeats |= {row.feature: earlier} if earlier != row.feature else {}
    return repeats


def counts(rows: Sequence[Row]) -> str:
    """Say how many features have each outcome, and how many distinct faults there are."""
    by_outcome = collections.Counter(row.outcome for row in rows)
    parts = [f"{by_outcome[outcome]} {outcome}" for outcome in get_args(Outcome) if by_outcome[outcome]]
    wrong = by_outcome["wrong"] + by_outcome["ignored"]
    faults = wrong - len(likes(rows))
    ending = f"; {faults} fault{'s' * (faults > 1)}" if wrong else ""
    return f"{len(rows)} features: {', '.join(parts)}{ending}"


def follows(meanings: Mapping[str, str]) -> list[str]:
    """The names of the `PROFILES` that agree with `meanings`; none unless both choices of a profile are known."""
    seen = {choice: meaning for choice, meaning in meanings.items() if choice in (MASKED_ROW, DIAGONAL)}
    return [name for name, profile in PROFILES.items() if len(seen) == 2 and seen.items() <= profile.items()]
