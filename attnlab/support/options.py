"""Options declared once, as fields of dataclasses: config, checks, help and documentation derive from them."""

import dataclasses
import functools
import numbers
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from attnlab.support.names import nearest

_REQUIRED = dataclasses.MISSING
_ACCEPTED = {int: numbers.Integral, float: numbers.Real}  # NumPy's numbers as well


class FieldError(ValueError):
    """An invalid value of a field.

    Attributes:
      field: its dotted name.
      value: the invalid value.
      expected: the valid values, or what to change, in words.
    """

    def __init__(self, field: str, value: Any, expected: str):
        super().__init__(f"{field} = {value!r}: {expected}")
        self.field, self.value, self.expected = field, value, expected

    def within(self, group: str) -> "FieldError":
        """Return this error with `group` before the field's name."""
        return FieldError(f"{group}.{self.field}", self.value, self.expected)


class Option(NamedTuple):
    """A declared option.

    Attributes:
      doc: one sentence.
      types: types of its values; float accepts integers as well.
      default: default of the field; `dataclasses.MISSING` if the option is required.
      low, high: inclusive bounds of a number; with `low` but no `high`, it must be below 2^31.
      choices: the valid names; empty for any.
      needs: by name, the values that other options of its group must have for this option to have an effect.
    """

    doc: str
    types: tuple[type, ...]
    default: Any
    low: float | None
    high: float | None
    choices: tuple[str, ...]
    needs: Mapping[str, tuple] = types.MappingProxyType({})

    def problem(self, value) -> str:
        """Return the expected value, in words, if `value` is invalid; otherwise ""."""
        if value is None and type(None) in self.types:
            return ""
        accepted = tuple(_ACCEPTED.get(each, each) for each in self.types)
        if not isinstance(value, accepted) or (isinstance(value, bool) and bool not in self.types):
            return f"expected a value like {self.default!r}"
        if self.choices and value not in self.choices:
            return f"expected one of {', '.join(self.choices)}{nearest(value, self.choices)}"
        if isinstance(value, bool | str):
            return ""
        if self.low is None and not abs(value) <= sys.float_info.max:
            return "expected a finite number"
        if self.low is not None and self.high is None:
            return "" if self.low <= value < 2**31 else f"expected {self.low} or more, below 2^31"
        if self.low is not None and not self.low <= value <= self.high:
            return f"expected a number from {self.low:g} to {self.high:.9g}"  # 0.9999999 is not shown as 1
        return ""

    def plain(self, value) -> Any:
        """Convert a valid value to a built-in type, for JSON: NumPy's numbers become int or float."""
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            return value
        is_integer = isinstance(value, numbers.Integral) and int in self.types
        return int(value) if is_integer else float(value) if float in self.types else value


def option(doc: str, default=_REQUIRED, *, low=None, high=None, choices=(), needs=None):
    """Return a dataclass field that declares an option.

    Args:
      doc: one sentence; for choices, what they mean.
      default: default of the field; without it the option is required.
      low, high: inclusive bounds.
      choices: the valid names.
      needs: values that other options of the group must have for it to have an effect: {"schedule": ("constant",)}.
    """
    declared = Option(doc, (), default, low, high, tuple(choices), needs or {})
    return dataclasses.field(default=default, metadata={"option": declared})


@functools.cache
def options(declaring: type) -> Mapping[str, Option]:
    """The options of a dataclass by name; options of a nested dataclass have dotted names."""
    declared = {}
    for field in dataclasses.fields(declaring):
        if "option" in field.metadata:
            accepted = typing.get_args(field.type) or (field.type,)  # the types of a union, or one type
            declared[field.name] = field.metadata["option"]._replace(types=accepted, default=field.default)
        elif _is_group(field):
            declared |= {f"{field.name}.{name}": each for name, each in options(field.type).items()}
    return types.MappingProxyType(declared)


def check_values(declared: Mapping[str, Option], values: Mapping[str, Any]) -> None:
    """Raise FieldError for the first invalid value, as in "width = 0: expected 1 or more, below 2^31"."""
    for name, each in declared.items():
        if expected := each.problem(values[name]):
            raise FieldError(name, values[name], expected)


def validate(record) -> None:
    """Check the options of a frozen dataclass instance and of its groups; convert NumPy's numbers to Python's.

    Raises:
      FieldError: the first invalid value.
    """
    declared = {name: each for name, each in options(type(record)).items() if "." not in name}
    check_values(declared, vars(record))
    for name, each in declared.items():
        object.__setattr__(record, name, each.plain(getattr(record, name)))
    for field in dataclasses.fields(record):
        if _is_group(field):
            group = getattr(record, field.name)
            if not isinstance(group, field.type):
                raise FieldError(field.name, group, f"expected {field.type.__name__}(…)")
            try:
                validate(group)
            except FieldError as error:
                raise error.within(field.name) from None


def is_recorded(field: dataclasses.Field) -> bool:
    """Whether a field is an option or a group of options."""
    return "option" in field.metadata or _is_group(field)


def _is_group(field: dataclasses.Field) -> bool:
    """Whether a field holds a group of options."""
    return "option" not in field.metadata and isinstance(field.type, type) and dataclasses.is_dataclass(field.type)


def changed(record, values: Mapping[str, Any]):
    """A copy of a frozen dataclass with some fields changed; all changes are checked together.

    Args:
      record: the dataclass; its groups of options are dataclasses as well.
      values: new values by dotted name; the value of a group may also be a mapping.

    Raises:
      FieldError: an unknown name, an invalid value.
    """
    fields, new_values, groups = {field.name: field for field in dataclasses.fields(record)}, {}, {}
    for name, value in values.items():
        first, _, rest = name.partition(".")
        if first not in fields or (rest and not _is_group(fields[first])):
            expected = f"no such option{nearest(first, fields)}: expected one of {', '.join(fields)}"
            raise FieldError(name, value, expected)
        if rest or (isinstance(value, Mapping) and _is_group(fields[first])):
            groups.setdefault(first, {}).update({rest: value} if rest else value)
        else:
            new_values[first] = value
    for name, inner in groups.items():
        try:
            new_values[name] = changed(new_values.get(name, getattr(record, name)), inner)
        except FieldError as error:
            raise error.within(name) from None
    check_values({name: each for name, each in options(type(record)).items() if name in new_values}, new_values)
    return dataclasses.replace(record, **new_values)


def option_values(record) -> dict[str, Any]:
    """The values of a dataclass instance's options, by dotted name."""
    return {name: functools.reduce(getattr, name.split("."), record) for name in options(type(record))}


def check_effects(declared: Mapping[str, Option], values: Mapping[str, Any]) -> None:
    """Raise FieldError for the first option that is set but has no effect because of another option."""
    for name, each in declared.items():
        for other, useful in each.needs.items():
            beside = values[name.removesuffix(name.rpartition(".")[2]) + other]
            if beside not in useful and values[name] != each.default:
                remedy = f"keep the default {each.default!r}, or choose {other} = {' or '.join(map(str, useful))}"
                raise FieldError(name, values[name], f"it has no effect with {other} = {beside!r}: {remedy}")


def documented(doc: str, declared: Mapping[str, Option]) -> str:
    """Return a docstring with a line for each option at the end of its "Attributes"."""
    before, head, after = doc.partition("\n    Attributes:")
    attributes, blank, rest = after.partition("\n\n")
    lines = "".join(f"\n      {name}: {each.doc}." for name, each in declared.items())
    return f"{before}{head}{attributes.rstrip()}{lines}{blank}{rest}" if head else doc
