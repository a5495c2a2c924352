"""A model with its inputs, ready to run; only this module distinguishes linen and nnx."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from attnlab.nn import GPT, stack, taps
from attnlab.see import edits as editing
from attnlab.see.linen import Linen, Static
from attnlab.see.results import Run
from attnlab.see.site import Sites
from attnlab.support.names import nearest

NAMES = (*taps.ATTENTION, *taps.STREAMS, taps.NORM, taps.MISMATCH, taps.MADE)


@dataclasses.dataclass(frozen=True)
class ModelView:
    """A model's adapter and its sites: the hashable part, which is a static argument of compiled programs."""

    adapter: Any
    sites: Sites

    def run(self, inputs: tuple, want: tuple[str, ...] = (), edits: Any = None, rows=None) -> Run:
        """Run the model on inputs from `adapt`; `edits` as for `edited`."""
        resolved = {} if edits is None else editing.resolve(edits, self.sites.values())
        rows = None if rows is None else self._checked(rows)
        for name in want:
            self._check(name)
        out, values = self.adapter.run(*inputs, self.sites, want, resolved, rows)
        order = self.sites.order
        # Outputs of modules within blocks have paths that are not sites.
        values = {
            name: {path: by_path[path] for path in (by_path if name == taps.MADE else order) if path in by_path}
            for name, by_path in values.items()
        }
        return Run(out, values, order)

    def _checked(self, rows):
        if isinstance(rows, jax.core.Tracer):
            return rows
        rows, length = np.asarray(rows), min(site.q_length for site in self.sites)
        if rows.size and not -length <= rows.min() <= rows.max() < length:
            raise ValueError(f"rows = {rows.tolist()}: out of range for {length} queries")
        return jnp.asarray(rows)

    def _check(self, name):
        if name not in NAMES:
            raise ValueError(f"want has {name!r}{nearest(name, NAMES)}: expected some of {', '.join(NAMES)}")
        if name in taps.STREAMS and not self.sites.blocks:
            raise ValueError(f"want has {name!r}, but the model has no blocks, layers that take and return one stream")


class _ByIdentity(ModelView):
    """The view of a model that cannot be hashed, such as one with arrays as fields."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def adapt(model, variables, args: tuple, kwargs: Mapping) -> tuple[ModelView, tuple]:
    """The view of a model, and its inputs as a pytree of arrays; `variables` may be None for an nnx module."""
    arrays = {name: value for name, value in kwargs.items() if _is_dynamic(value)}
    options = tuple((name, value) for name, value in sorted(kwargs.items()) if name not in arrays)
    adapter, state = _adapter(model, options)
    args = tuple(arg if _is_dynamic(arg) else Static(arg) for arg in args)
    inputs = (state if variables is None else _unstacked(model, variables), args, arrays)
    sites = _sites(adapter, inputs)
    if not len(sites):
        kinds = ", ".join(dict.fromkeys(kind for _, kind in sites.others))
        why = f"layers of {kinds} have no pattern and no heads" if kinds else "expected layers of attnlab.nn or of Flax"
        raise ValueError(f"{type(model).__name__} has no attention that can be seen: {why}")
    view = ModelView(adapter, sites)
    try:
        hash(view)
    except TypeError:
        return _ByIdentity(adapter, sites), inputs
    return view, inputs


def _sites(adapter, inputs: tuple) -> Sites:
    leaves, tree = jax.tree.flatten(inputs)
    try:
        return _sites_at(adapter, tree, tuple(map(jax.typeof, leaves)))
    except TypeError:  # the model cannot be hashed
        return adapter.sites(*inputs)


@functools.lru_cache(maxsize=64)
def _sites_at(adapter, tree, types: tuple) -> Sites:
    """The sites of a model, found once for all inputs of the same shapes, because finding them traces the model."""
    return adapter.sites(*jax.tree.unflatten(tree, types))


def _adapter(model, options) -> tuple[Any, Any]:
    """The adapter of a model, and the state of an nnx module."""
    if isinstance(model, nn.Module):
        return Linen(model, options), None
    if any(kind.__module__.startswith("flax.nnx") for kind in type(model).__mro__):
        from flax import nnx  # slow to import, and not needed for linen

        from attnlab.see.nnx import Nnx

        graph, state = nnx.split(model)
        return Nnx(graph, options), state
    raise ValueError(f"model is a {type(model).__name__}: expected a module of flax.linen or flax.nnx")


def _unstacked(model, variables):
    """Unstack the layers in a GPT's variables, so that each layer has a site; other variables stay as they are."""
    if isinstance(model, GPT) and isinstance(variables, Mapping) and stack.is_stacked(variables.get("params")):
        return {**variables, "params": stack.unstack_layers(variables["params"])}
    return variables


def _is_dynamic(value) -> bool:
    return all(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(value))
