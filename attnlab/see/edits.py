"""Edits of a model's values: pytrees of arrays, so `jit`, `vmap` and `grad` accept them as arguments."""

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from attnlab.support.names import nearest

_node = jax.tree_util.register_dataclass


def _like(value, array, name):
    """The array of an edit, broadcast to the edited value."""
    shape, dtype = jnp.shape(array), jnp.result_type(array)
    if name == "where" and dtype.kind != "b":
        raise ValueError(f"where of an edit has type {dtype}, expected bools, e.g. jnp.arange(H)[:, None] == 3")
    if len(shape) > value.ndim or any(size not in (1, full) for size, full in zip(shape[::-1], value.shape[::-1])):
        raise ValueError(
            f"{name} of an edit has shape {shape}, expected one that broadcasts to the value's {value.shape}"
        )
    return jnp.broadcast_to(jnp.asarray(array, dtype if name == "where" else value.dtype), value.shape)


@_node
@dataclasses.dataclass(frozen=True)
class Put:
    """An array that replaces the value, or a part of it.

    Attributes:
      values: broadcast to the value's shape, e.g. 0.0, or the mean of captured z over examples and positions.
      where: bools, broadcast to the value's shape, that select the edited part; None for all of it. For example,
        `where=jnp.arange(H)[:, None] == 3` selects head 3 of z `[B, T, H, D]`.

    >>> Put(5.0, where=jnp.array([True, False]))(jnp.ones(2))
    Array([5., 1.], dtype=float32)
    """

    values: Any
    where: Any = None

    def __call__(self, value):
        """Return the value with the selected part replaced."""
        new = _like(value, self.values, "values")
        return new if self.where is None else jnp.where(_like(value, self.where, "where"), new, value)


@_node
@dataclasses.dataclass(frozen=True)
class Add:
    """The value plus `delta`, which broadcasts to it.

    The gradient with respect to a `delta` of zeros is the gradient with respect to the value.

    >>> Add(1.0)(jnp.ones(2))
    Array([2., 2.], dtype=float32)
    """

    delta: Any

    def __call__(self, value):
        """The sum."""
        return value + _like(value, self.delta, "delta")


@_node
@dataclasses.dataclass(frozen=True)
class Scale:
    """The value times `gate`, which broadcasts to it, e.g. `[H, 1]` for the heads of z.

    >>> Scale(jnp.array([1.0, 0.0]))(jnp.ones(2))
    Array([1., 0.], dtype=float32)
    """

    gate: Any

    def __call__(self, value):
        """The product."""
        return value * _like(value, self.gate, "gate")


def site_key(path: str, name: str) -> str:
    """The key "path/name" of a value in a mapping of edits; the model itself has an empty path."""
    return "/".join(filter(None, (path, name)))


def resolve(edits, known: Mapping[str, tuple[str, ...]]) -> dict[tuple[str, str], Callable]:
    """Expand edits by globs of "path/name" to edits by (path, name); `known` lists the names at each path."""
    sites = {site_key(path, name): (path, name) for path, names in known.items() for name in names}
    if not isinstance(edits, Mapping):
        raise ValueError(f"edits is a {type(edits).__name__}: expected a mapping from 'path/name' to an edit")
    resolved = {}
    for key, edit in edits.items():
        if not callable(edit):
            raise ValueError(f"edits[{key!r}] is a {type(edit).__name__}: expected an edit, e.g. attnlab.see.Put(0.0)")
        matched = [key] if key in sites else fnmatch.filter(sites, str(key))
        if not matched:
            close = nearest(str(key), sites)
            raise ValueError(f"edits: the model has no {key!r}{close or '; it has ' + ', '.join(sites)}")
        if twice := [site for site in matched if sites[site] in resolved]:
            raise ValueError(f"edits: {key!r} and an earlier key both edit {twice[0]}: give one edit for it")
        resolved |= {sites[site]: edit for site in matched}
    return resolved
