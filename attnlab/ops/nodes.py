"""Frozen dataclasses as pytrees: what masks and score mods are made of."""

import functools
import numbers
from dataclasses import fields

import jax


class Node:
    """Every subclass, a frozen dataclass, is a pytree: arrays are leaves; numbers, functions and None are static.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Shift(Node):
    ...     by: object
    >>> jax.tree.leaves((Shift(1), Shift(jnp.ones(2))))
    [Array([1., 1.], dtype=float32)]
    """

    def __init_subclass__(cls):
        jax.tree_util.register_pytree_node(cls, _flatten, functools.partial(_unflatten, cls))


def is_static(value) -> bool:
    """Whether a field's value is no leaf but part of the program."""
    return value is None or callable(value) or isinstance(value, numbers.Number)


class _Leaf:
    def __repr__(self):
        return "<leaf>"


_LEAF = _Leaf()


def _flatten(node):
    values = [getattr(node, field.name) for field in fields(node)]
    static = tuple(value if is_static(value) else _LEAF for value in values)
    return [value for value in values if not is_static(value)], static


def _unflatten(cls, static, leaves):
    # Not through __init__: JAX also rebuilds pytrees around placeholders, which no check would let pass.
    node, leaves = object.__new__(cls), iter(leaves)
    for field, value in zip(fields(cls), static):
        object.__setattr__(node, field.name, next(leaves) if value is _LEAF else value)
    return node
