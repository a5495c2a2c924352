"""Options declared once, as fields of dataclasses: config, checks, help and documentation derive from them."""

import dataclasses
import numbers
import re
import types
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from attnlab.support.names import nearest

_REQUIRED = dataclasses.MISSING
_ACCEPTED = {int: numbers.Integral, float: numbers.Real}  # of NumPy as well


class Option(NamedTuple):
    """A declared option.

    Attributes:
      doc: one sentence.
      types: of its values; float takes integers as well.
      default: in a config.
      low, high: bounds of a number, inclusive; of an integer, high is below 2^31 where it is None.
      choices: the valid names; empty for any.
      pattern: of other names that are valid; None for none.
      needs: values of other options of its group, by name, without which it has no effect.
      unset: value of a field that is left out; `dataclasses.MISSING` if it is required.
    """

    doc: str
    types: tuple[type, ...]
    default: Any
    low: float | None
    high: float | None
    choices: tuple[str, ...]
    pattern: re.Pattern | None = None
    needs: Mapping[str, tuple] = types.MappingProxyType({})
    unset: Any = _REQUIRED

    def is_default(self, value) -> bool:
        """Whether a value is a default, in a config or of the field."""
        return value in (self.default, self.unset)

    def problem(self, value) -> str:
        """The expected value, in words, if `value` is invalid; otherwise ""."""
        if value is None and type(None) in self.types:
            return ""
        accepted = tuple(_ACCEPTED.get(each, each) for each in self.types)
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in self.types):
            return f"expected a value like {self.default!r}"
        if self.choices and value not in self.choices and not (self.pattern and self.pattern.fullmatch(value)):
            other = ", or FILE.py:NAME" if self.pattern else ""
            return f"expected one of {', '.join(self.choices)}{other}{nearest(value, self.choices)}"
        if isinstance(value, bool | str):
            return ""
        if self.low is not None and self.high is None:
            return "" if self.low <= value < 2**31 else f"expected {self.low} or more, below 2^31"
        if self.low is not None and not self.low <= value <= self.high:
            return f"expected a number from {self.low:g} to {self.high:.9g}"  # below 1 for 0.9999999
        return ""


def option(doc: str, default=_REQUIRED, *, start=_REQUIRED, low=None, high=None, choices=(), pattern=None, needs=None):
    """A dataclass field that is an option.

    Args:
      doc: one sentence; for names, what they mean.
      default: of the field; required where missing.
      start: default in a config, where it differs.
      low, high: bounds, inclusive.
      choices: the valid names.
      pattern: a regular expression of other names that are valid.
      needs: the options beside it, and their values, without which it has no effect: {"schedule": ("constant",)}.
    """
    start = default if start is _REQUIRED else start
    declared = Option(doc, (), start, low, high, tuple(choices), pattern, needs or {})
    return dataclasses.field(default=default, metadata={"option": declared})


def options(declaring: type) -> dict[str, Option]:
    """The options of a dataclass by name; by dotted name where a field's type declares some itself."""
    found = {}
    for field in dataclasses.fields(declaring):
        if "option" in field.metadata:
            accepted = typing.get_args(field.type) or (field.type,)  # of a union, or one
            found[field.name] = field.metadata["option"]._replace(types=accepted, unset=field.default)
        elif isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            found |= {f"{field.name}.{name}": each for name, each in options(field.type).items()}
    return found


def first_problem(declared: Mapping[str, Option], values: Mapping[str, Any]) -> str:
    """The first invalid value, as in "width = 0: expected 1 or more, below 2^31"; "" if all are valid."""
    problems = ((name, values[name], each.problem(values[name])) for name, each in declared.items())
    return next((f"{name} = {value!r}: {expected}" for name, value, expected in problems if expected), "")


def first_idle(declared: Mapping[str, Option], values: Mapping[str, Any]) -> str:
    """The first option that is set, although others take its effect; "" if there is none."""
    for name, each in declared.items():
        for other, useful in each.needs.items():
            beside = values[name.removesuffix(name.rpartition(".")[2]) + other]
            if beside not in useful and not each.is_default(values[name]):
                return (
                    f"{name} = {values[name]!r} has no effect with {other} = {beside!r}: leave it at {each.default!r}, "
                    f"or choose {other} = {' or '.join(map(str, useful))}"
                )
    return ""


def described(declared: Mapping[str, Option]) -> str:
    """A line for each option, as in the "Attributes" of a docstring."""
    return "\n".join(f"  {name}: {each.doc}." for name, each in declared.items())
