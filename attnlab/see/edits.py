"""Edits of a model's values: pytrees of arrays and gates, which `jit`, `vmap` and `grad` pass through."""

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Integer

from attnlab.see.results import Run
from attnlab.support.names import nearest
from attnlab.types import Array

_node = jax.tree_util.register_dataclass


class Edit:
    """A change of one value of a model.

    The field `where` of an edit is an array of bools that broadcasts to the value and selects the edited part; None for
    all of it. Head 3 of z `[B, T, H, D]` is `where=jnp.arange(H)[:, None] == 3`.

    A custom edit is a pytree with a `__call__`:

    >>> @jax.tree_util.register_pytree_node_class
    ... class Flip(Edit):
    ...     tree_flatten = lambda self: ((), None)
    ...     tree_unflatten = classmethod(lambda cls, *_: cls())
    ...     __call__ = lambda self, value: -value
    >>> Flip()(jnp.ones(2))
    Array([-1., -1.], dtype=float32)
    """

    def __call__(self, value: Array) -> Array:
        """The edited value, of the same shape and type."""
        raise NotImplementedError


def _within(value, new, where):
    new = _like(value, new, "values")
    return new if where is None else jnp.where(_like(value, where, "where"), new, value)


def _like(value, array, name):
    """The array of an edit, broadcast to the edited value."""
    shape = jnp.shape(array)
    if len(shape) > value.ndim or any(size not in (1, full) for size, full in zip(shape[::-1], value.shape[::-1])):
        raise ValueError(
            f"{name} of an edit has shape {shape}, expected one that broadcasts to the value's {value.shape}"
        )
    return jnp.broadcast_to(jnp.asarray(array, bool if name == "where" else value.dtype), value.shape)


@_node
@dataclasses.dataclass(frozen=True)
class Zero(Edit):
    """Zeros in place of the value.

    >>> Zero(where=jnp.array([True, False]))(jnp.ones(2))
    Array([0., 1.], dtype=float32)
    """

    where: Any = None

    def __call__(self, value):
        """Zeros."""
        return _within(value, 0, self.where)


@_node
@dataclasses.dataclass(frozen=True)
class Put(Edit):
    """An array in place of the value; it broadcasts to the value's shape.

    >>> Put(jnp.array([5.0]))(jnp.ones(2))
    Array([5., 5.], dtype=float32)
    """

    values: Any
    where: Any = None

    def __call__(self, value):
        """The array."""
        return _within(value, self.values, self.where)


@_node
@dataclasses.dataclass(frozen=True)
class Mean(Edit):
    """The mean of an array over examples and positions in place of the value.

    Attributes:
      values: a captured value, e.g. z `[N, T, H, D]` of a larger set of examples.
      axes: axes of the mean: examples and positions, (0, 1); 0 for patterns.
      where: see `Edit`.

    >>> Mean(jnp.array([[1.0], [3.0]]))(jnp.ones((1, 1)))
    Array([[2.]], dtype=float32)
    """

    values: Any
    where: Any = None
    axes: int | tuple[int, ...] = dataclasses.field(metadata={"static": True}, default=(0, 1))

    def __call__(self, value):
        """The mean."""
        return _within(value, jnp.mean(self.values, axis=self.axes, keepdims=True), self.where)


@_node
@dataclasses.dataclass(frozen=True)
class Resample(Edit):
    """The value of another example of the batch.

    Attributes:
      permutation: `[B]`, the index of each example's source.
      where: see `Edit`.

    >>> Resample(jnp.array([1, 0]))(jnp.array([[1.0], [2.0]]))
    Array([[2.],
           [1.]], dtype=float32)
    """

    permutation: Integer[Array, " B"]
    where: Any = None

    def __call__(self, value):
        """The permuted value."""
        return _within(value, jnp.take(value, self.permutation, axis=0), self.where)


@_node
@dataclasses.dataclass(frozen=True)
class Add(Edit):
    """The value plus `delta`, which broadcasts to it. The gradient by a `delta` of zeros is the gradient by the value.

    >>> Add(1.0)(jnp.ones(2))
    Array([2., 2.], dtype=float32)
    """

    delta: Any

    def __call__(self, value):
        """The sum."""
        return value + _like(value, self.delta, "delta")


@_node
@dataclasses.dataclass(frozen=True)
class Scale(Edit):
    """The value times `gate`, which broadcasts to it, e.g. `[H, 1]` for the heads of z.

    >>> Scale(jnp.array([1.0, 0.0]))(jnp.ones(2))
    Array([1., 0.], dtype=float32)
    """

    gate: Any

    def __call__(self, value):
        """The product."""
        return value * _like(value, self.gate, "gate")


@_node
@dataclasses.dataclass(frozen=True)
class Freeze:
    """The values of another run at the same site.

    Attributes:
      run: its values are put. `edits=Freeze(run)`, in place of a mapping, freezes everything that the run captured.
      where: see `Edit`.

    >>> run = Run(out=None, values={"z": {"attention": jnp.ones(2)}}, order=("attention",))
    >>> Freeze(run).at("attention", "z")
    Put(values=Array([1., 1.], dtype=float32), where=None)
    """

    run: Run
    where: Any = None

    def at(self, path: str, name: str) -> Put:
        """The edit of one site.

        Raises:
          ValueError: the run did not capture it.
        """
        captured = self.run.values.get(name, {})
        if path not in captured:
            raise ValueError(f"Freeze: its run has no {name!r} of {path!r}: capture it with want=({name!r},)")
        return Put(captured[path], self.where)


def site_key(path: str, name: str) -> str:
    """The key "path/name" of a value among edits; the model itself has an empty path."""
    return "/".join(filter(None, (path, name)))


def resolve(edits, known: Mapping[str, tuple[str, ...]]) -> dict[tuple[str, str], Edit]:
    """Edits by (path, name), from a mapping of globs "path/name", or `Freeze`, and the names known at each path."""
    sites = {site_key(path, name): (path, name) for path, names in known.items() for name in names}
    if isinstance(edits, Freeze):
        edits = {site_key(path, name): edits for name, paths in edits.run.values.items() for path in paths}
    if not isinstance(edits, Mapping):
        raise ValueError(
            f"edits is a {type(edits).__name__}: expected a mapping from 'path/name' to an edit, or Freeze"
        )
    resolved = {}
    for key, edit in edits.items():
        if not isinstance(edit, Edit | Freeze):
            found = f"the class {edit.__name__}, call it" if isinstance(edit, type) else f"a {type(edit).__name__}"
            raise ValueError(f"edits[{key!r}] is {found}: expected an edit, e.g. attnlab.see.Zero()")
        matched = [key] if key in sites else fnmatch.filter(sites, str(key))
        if not matched:
            close = nearest(str(key), sites)
            raise ValueError(f"edits: the model has no {key!r}{close or '; it has ' + ', '.join(sites)}")
        for site in matched:
            path, name = sites[site]
            resolved[path, name] = edit.at(path, name) if isinstance(edit, Freeze) else edit
    return resolved
