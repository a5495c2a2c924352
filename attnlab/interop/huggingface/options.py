"""The options in a config.json: typed, with the defaults of `transformers`, and errors that name them."""

import math
from collections.abc import Mapping
from typing import Any

from attnlab.errors import UserError

# `hidden_act` in config.json; of several names for one activation, the first is written.
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu_squared",
    "silu": "silu",
    "swish": "silu",
}


class Options:
    """The options of a config.json, or of an object within it.

    Args:
      given: option to value.
      defaults: values of options that are not given.
      name: name of the source in errors.

    >>> Options({"num_hidden_layers": 2}, {"head_dim": 8}, "config.json").integer("head_dim")
    8
    """

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any], name: str):
        self.name = name
        self._values = {**defaults, **given}

    def get(self, option: str) -> Any:
        """The value of an option; None where it is missing."""
        return self._values.get(option)

    def error(self, option: str, expected: str) -> UserError:
        """An error that names an option, its value, and what was expected."""
        return UserError(f"{self.name}: {option} = {self.get(option)!r} in its config, expected {expected}")

    def integer(self, option: str, default: int | None = None) -> int:
        """An integer from 1 to 2³¹ − 1; `default` where it is missing or null."""
        value = default if self.get(option) is None else self.get(option)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise self.error(option, "an integer, 1 or more and below 2^31")
        return value

    def number(self, option: str) -> float:
        """A finite number above 0."""
        value = self.get(option)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(option, "a number above 0")
        return float(value)

    def optional_number(self, option: str) -> float | None:
        """A finite number above 0, or null."""
        return None if self.get(option) is None else self.number(option)

    def flag(self, option: str) -> bool:
        """True or False."""
        value = self.get(option)
        if not isinstance(value, bool):
            raise self.error(option, "true or false")
        return value

    def activation(self, option: str) -> str:
        """The name that attnlab has for an activation."""
        value = self.get(option)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.error(option, f"one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[value]

    def only(self, supported: Mapping[str, Any]) -> None:
        """Raise UserError where an option has another value than the one that is supported."""
        for option, value in supported.items():
            if self.get(option) not in (None, value):
                raise self.error(option, f"{value!r}: GPT supports no other")


def activation_name(activation: str, first: str = "") -> str | None:
    """The name in config.json for an activation of attnlab, `first` if that is one; None if there is none.

    >>> activation_name("gelu_tanh"), activation_name("gelu_tanh", "gelu_pytorch_tanh")
    ('gelu_new', 'gelu_pytorch_tanh')
    """
    names = [name for name, ours in ACTIVATIONS.items() if ours == activation]
    return first if first in names else names[0] if names else None
