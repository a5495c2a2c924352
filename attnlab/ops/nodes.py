"""Frozen dataclasses as pytrees (the base class of calls, masks and score mods); splitting and joining of trees."""

import functools
import numbers
from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.ops import checks


class Node:
    """Base class of frozen dataclasses that are pytrees: arrays are leaves; numbers, functions, None and the
    fields that a class names in `STATIC` are static.

    A field keeps its role through `jax.tree` operations, so trees of shapes, booleans or `in_axes` keep the structure.
    Nodes compare and hash by value, arrays included, so a Flax module can hold them; nodes with tracers have no hash.
    """

    def __init_subclass__(cls):
        jax.tree_util.register_pytree_node(cls, _flatten, functools.partial(_unflatten, cls))
        # The dataclass decorator would define both on tuples of fields, but tuples of arrays neither compare nor hash.
        for method in ("__eq__", "__hash__"):
            if method not in cls.__dict__:
                setattr(cls, method, Node.__dict__[method])

    def __post_init__(self):
        for field in fields(self):
            for leaf in jax.tree.leaves(getattr(self, field.name)):
                # JAX would drop the high bits, even if the node is an argument of a compiled function.
                if isinstance(leaf, np.ndarray) and checks.is_cut(leaf.dtype):
                    checks.integers(f"{type(self).__name__} {field.name}", leaf)

    def __eq__(self, other):
        if type(other) is not type(self):
            return NotImplemented
        (leaves, treedef), (other_leaves, other_treedef) = jax.tree.flatten(self), jax.tree.flatten(other)
        return treedef == other_treedef and all(map(_equal, leaves, other_leaves))

    def __hash__(self):
        leaves, treedef = jax.tree.flatten(self)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            raise TypeError(
                f"{type(self).__name__} holds a traced array, which has no hash: construct it outside the traced "
                "function, or remove nn.jit"
            )
        return hash((treedef, tuple(map(_contents, leaves))))

    @property
    def __fn_or_cls__(self):
        """The fingerprint of a module's field for `flax.linen.jit`; its default fails on arrays in dataclasses."""
        return hash(self)


def _flatten(node):
    """Return (children, names and values of the static fields)."""
    values = {field.name: getattr(node, field.name) for field in fields(node)}
    names = node.__dict__.get("_static_names")
    if names is None:
        static = getattr(type(node), "STATIC", ())
        names = tuple(
            name
            for name, x in values.items()
            if x is None or callable(x) or isinstance(x, numbers.Number) or name in static
        )
    static = tuple((name, values.pop(name)) for name in names)
    return tuple(values.values()), static


def _unflatten(cls, static, children):
    # Not through __init__: JAX also rebuilds pytrees around placeholders, which fail its checks.
    node, values, children = object.__new__(cls), dict(static), iter(children)
    for field in fields(cls):
        object.__setattr__(node, field.name, values[field.name] if field.name in values else next(children))
    object.__setattr__(node, "_static_names", tuple(values))
    return node


def _equal(a, b) -> bool:
    if a is b:
        return True
    traced = isinstance(a, jax.core.Tracer) or isinstance(b, jax.core.Tracer)
    return not traced and bool(_contents(a) == _contents(b))


def _contents(leaf):
    """A hashable value that is equal for equal arrays."""
    if not isinstance(leaf, jax.Array | np.ndarray):
        return leaf
    words = leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        with jax.ensure_compile_time_eval():
            words = jax.random.key_data(leaf)
    return leaf.shape, leaf.dtype, np.asarray(words).tobytes()


def partition(tree, is_chosen):
    """Split `tree` by a tree of booleans into the chosen and the other leaves, with None in place of missing leaves."""
    chosen = jax.tree.map(lambda x, choose: x if choose else None, tree, is_chosen)
    others = jax.tree.map(lambda x, choose: None if choose else x, tree, is_chosen)
    return chosen, others


def combine(a, b):
    """The inverse of `partition`."""
    return jax.tree.map(lambda x, y: y if x is None else x, a, b, is_leaf=lambda x: x is None)
