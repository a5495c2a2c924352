"""Helpers for drawing tasks: the random key of a batch, and compiled draw functions."""

import functools
import inspect
from collections.abc import Callable

import jax
from jaxtyping import Integer

from attnlab.types import Array

TEST = 2**30  # training uses only steps below this
Number = int | Integer[Array, ""]  # may be traced


def key_of(step: Number, seed: Number) -> Array:
    return jax.random.fold_in(jax.random.key(seed), step)


def compiled(function: Callable) -> Callable:
    """Compile a function of a step, a seed, and arguments that are constants of the program."""
    names = [name for name in inspect.signature(function).parameters if name not in ("step", "seed")]
    drawn = jax.jit(function, static_argnames=names)

    @functools.wraps(function)
    def draw(*args, **options):
        return drawn(*args, **{name: tuple(x) if isinstance(x, list) else x for name, x in options.items()})

    return draw


def check_least(least: int = 1, **sizes: int) -> None:
    """Raise ValueError for a size below `least`."""
    for name, size in sizes.items():
        if size < least:
            raise ValueError(f"{name} = {size}: expected {least} or more")
