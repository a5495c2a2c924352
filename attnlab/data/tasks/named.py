"""Tasks that a config names: `config.data.name = "task:recall pairs=8 rewrites=8"`.

Each task draws sequences of tokens, with answers at some of the positions.
"""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from attnlab.data.tasks.associations import recall, spread_recall
from attnlab.data.tasks.copying import selective_copies
from attnlab.data.tasks.modular import running_sums
from attnlab.data.tasks.repetition import inductions
from attnlab.data.tasks.task_draws import Number
from attnlab.support.errors import UserError
from attnlab.support.names import nearest
from attnlab.support.options import check_effects, check_values, option, options
from attnlab.types import Array

PREFIX = "task:"
_END = {"queries": ("end",)}
Drawn = tuple[Int[Array, "B T"], Int[Array, "B T"]]


class Task:
    """A task: a frozen dataclass with its options as fields.

    Attributes:
      alphabet: the characters of tokens 0, 1, …, in code point order.
      shortest_context: the fewest tokens of a sequence.
      chance: the accuracy of the best predictor that ignores the sequence.
    """

    alphabet: str
    shortest_context: int
    chance: float

    def answers_of(self, length: int) -> int:
        """The largest number of answers in a sequence of `length` tokens."""
        raise NotImplementedError

    def blind(self, length: int) -> float:
        """The accuracy of the best guess that uses only a sequence's tokens, not their order or the question."""
        return self.chance

    def draw(self, step: Number, *, batch_size: int, length: int, seed: Number = 0) -> Drawn:
        """Return (tokens, targets), int32 `[B, T]` with T = `length`; targets are −1 where there is no answer."""
        raise NotImplementedError

    def longer(self, length: int) -> "Task | None":
        """The task with sequences of `length` tokens, to test a model on; None if the task's length is fixed."""
        return self  # blanks or noise fill any length


@dataclasses.dataclass(frozen=True)
class Recall(Task):
    """Pairs of keys and values, then keys that query their values; `pairs` does not grow with the length.

    With `queries=spread`, the keys recur among filler, each with its value as the answer: see `spread_recall`.
    """

    pairs: int = option("key-value pairs per sequence", 8, low=1)
    fewest: int = option(
        "fewest pairs; doubled up to `pairs`, all numbers equally often; 0: always `pairs`", 0, low=0, needs=_END
    )
    rewrites: int = option("additional pairs, which write earlier keys again with other values", 0, low=0, needs=_END)
    symbols: int = option("number of different keys, and of different values", 26, low=1, high=5000)
    queries: str = option("queries side by side at the end, or spread over the rest", "end", choices=("end", "spread"))
    filler: str = option(
        "tokens between spread queries", "blank", choices=("blank", "noise"), needs={"queries": ("spread",)}
    )

    def __post_init__(self):
        if self.fewest > self.pairs:
            raise ValueError(f"fewest = {self.fewest}: expected pairs = {self.pairs} or fewer")
        if self.symbols < self.pairs + self.rewrites:
            raise ValueError(
                f"symbols = {self.symbols}: expected pairs + rewrites = {self.pairs + self.rewrites} or more, as the "
                "values of a sequence differ"
            )

    @property
    def alphabet(self) -> str:
        if self.symbols <= 26:
            return "." + _from("A", self.symbols) + _from("a", self.symbols)
        return "." + _from("가", 2 * self.symbols)

    @property
    def shortest_context(self) -> int:
        return 4 * self.pairs if self.queries == "spread" else 3 * self.pairs + 2 * self.rewrites

    @property
    def chance(self) -> float:
        return 1 / self.symbols

    def answers_of(self, length) -> int:
        return self.pairs

    def blind(self, length) -> float:
        return sum(1 / pairs for pairs in self._numbers) / len(self._numbers)  # all values in a sequence differ

    @property
    def _numbers(self) -> list[int]:
        """The possible numbers of pairs, all equally likely."""
        doubled = (self.fewest << n for n in range(self.pairs.bit_length())) if self.fewest else ()
        return [*(number for number in doubled if number < self.pairs), self.pairs]

    def draw(self, step, *, batch_size, length, seed=0) -> Drawn:
        """Draw from `recall`, padded with blanks to T tokens, or from `spread_recall`; see `Task.draw`."""
        if self.queries == "spread":
            sizes = {"batch_size": batch_size, "pairs": self.pairs, "length": length, "noise": self.filler == "noise"}
            return tuple(spread_recall(step, vocab_size=2 * self.symbols + 1, seed=seed, **sizes))
        sizes = {"batch_size": batch_size, "pairs": self._numbers, "rewrites": self.rewrites}
        drawn = recall(step, vocab_size=2 * self.symbols + 1, seed=seed, **sizes)
        blanks = ((0, 0), (0, length - drawn.tokens.shape[1]))
        tokens = jnp.pad(drawn.tokens, blanks)
        return tokens, jnp.pad(_at_end(drawn.targets, drawn.tokens.shape[1]), blanks, constant_values=-1)

    def longer(self, length) -> "Recall | None":
        """This task if queries are spread, because they spread further; else None: more blanks add no queries."""
        return self if self.queries == "spread" else None


@dataclasses.dataclass(frozen=True)
class Modular(Task):
    """Digits and their running sums modulo the base."""

    base: int = option("digits are 0 … base − 1", 3, low=2, high=10)
    shortest: int = option("fewest digits in a sequence", 3, low=1)
    longest: int = option("most digits in a sequence", 40, low=1)
    answers: str = option("answers at each digit, or only at the last", "each", choices=("each", "last"))

    def __post_init__(self):
        if self.shortest > self.longest:
            raise ValueError(f"shortest = {self.shortest}: expected longest = {self.longest} or less")

    @property
    def alphabet(self) -> str:
        return "." + _from("0", self.base)

    @property
    def shortest_context(self) -> int:
        return self.longest

    @property
    def chance(self) -> float:
        return 1 / self.base

    def answers_of(self, length) -> int:
        return 1 if self.answers == "last" else length

    def draw(self, step, *, batch_size, length, seed=0) -> Drawn:
        """Draw from `running_sums`, with blanks after the last digit; see `Task.draw`."""
        span = {"shortest": self.shortest, "longest": self.longest, "length": length}
        digits, sums = running_sums(step, batch_size=batch_size, base=self.base, seed=seed, **span)
        if self.answers == "last":
            is_last = (digits >= 0) & (jnp.pad(digits[:, 1:], ((0, 0), (0, 1)), constant_values=-1) < 0)
            sums = jnp.where(is_last, sums, -1)
        return digits + 1, jnp.where(sums >= 0, sums + 1, -1)

    def longer(self, length) -> "Modular":
        """Sequences of `length` digits."""
        return dataclasses.replace(self, shortest=length, longest=length)


@dataclasses.dataclass(frozen=True)
class Parity(Modular):
    """Bits and their running parity."""

    base: int = option("digits are 0 … base − 1", 2, low=2, high=10)


@dataclasses.dataclass(frozen=True)
class Copy(Task):
    """Symbols among blanks, then their copy."""

    symbols: int = option("symbols to copy", 16, low=1)
    kinds: int = option("number of different symbols", 16, low=1, high=26)

    @property
    def alphabet(self) -> str:
        return ".?" + _from("a", self.kinds)

    @property
    def shortest_context(self) -> int:
        return 2 * self.symbols

    @property
    def chance(self) -> float:
        return 1 / self.kinds

    def answers_of(self, length) -> int:
        return self.symbols

    def blind(self, length) -> float:
        return _most_frequent(self.symbols, self.kinds)

    def draw(self, step, *, batch_size, length, seed=0) -> Drawn:
        """Draw from `selective_copies`; see `Task.draw`."""
        sizes = {"batch_size": batch_size, "length": length, "symbols": self.symbols, "vocab_size": 2 + self.kinds}
        tokens, targets = selective_copies(step, seed=seed, **sizes)
        return tokens, _at_end(targets, length)


@dataclasses.dataclass(frozen=True)
class Induction(Task):
    """Noise with triggers, then the triggers again; the answer to each is the token that followed it."""

    triggers: int = option("number of different triggers", 1, low=1, high=10)
    kinds: int = option("number of different noise tokens", 16, low=1, high=26)

    @property
    def alphabet(self) -> str:
        return _from("0", self.triggers) + _from("a", self.kinds)

    @property
    def shortest_context(self) -> int:
        return 3 * self.triggers

    @property
    def chance(self) -> float:
        return 1 / self.kinds

    def answers_of(self, length) -> int:
        return self.triggers

    def blind(self, length) -> float:
        return _most_frequent(length - 2 * self.triggers, self.kinds)

    def draw(self, step, *, batch_size, length, seed=0) -> Drawn:
        """Draw from `inductions`; see `Task.draw`."""
        sizes = {"triggers": self.triggers, "vocab_size": self.triggers + self.kinds}
        tokens, targets = inductions(step, batch_size=batch_size, length=length, seed=seed, **sizes)
        return tokens, _at_end(targets, length)


TASKS = {"recall": Recall, "parity": Parity, "modular": Modular, "copy": Copy, "induction": Induction}


def parse(name: str) -> Task | None:
    """The task of a `config.data.name`; None for a name of another kind.

    Raises:
      UserError: an unknown task or option, or a value that an option cannot have.
    """
    if not name.startswith(PREFIX):
        return None
    kind, *words = name.removeprefix(PREFIX).split() or [""]
    if kind not in TASKS:
        raise UserError(f"data.name = {name!r}: no task {kind!r}{nearest(kind, TASKS)}: expected {', '.join(TASKS)}")
    declared, values = options(TASKS[kind]), {}
    for word in words:
        field, equals, value = word.partition("=")
        if field not in declared or not equals:
            known = ", ".join(f"{known}={each.default}" for known, each in declared.items())
            raise UserError(f"data.name = {name!r}: {word!r} is not an option of {kind}: expected some of {known}")
        values[field] = int(value) if re.fullmatch("[0-9]{1,18}", value) else value
    try:
        complete = {known: each.default for known, each in declared.items()} | values
        check_values(declared, complete)
        check_effects(declared, complete)
        return TASKS[kind](**values)
    except ValueError as error:
        raise UserError(f"data.name = {name!r}: {error}") from error


def _at_end(targets, length: int):
    """Extend targets of the last tokens to all tokens, with −1 before them."""
    return jnp.pad(targets, ((0, 0), (length - targets.shape[1], 0)), constant_values=-1)


def _most_frequent(count: int, kinds: int) -> float:
    """The mean share of the most frequent symbol among `count` random symbols of `kinds` kinds, from 10,000 draws."""
    drawn = np.random.default_rng(0).multinomial(count, [1 / kinds] * kinds, size=10_000)
    return float(drawn.max(axis=1).mean() / count)


def _from(first: str, count: int) -> str:
    return "".join(chr(ord(first) + n) for n in range(count))
