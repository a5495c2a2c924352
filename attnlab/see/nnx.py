"""Models of `flax.nnx`: each call runs a copy of the model, from split and merge, with taps in its layers."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from attnlab.nn import taps
from attnlab.see.linen import ModuleCalls, base, heard, site_of, tapped_attention, unwrapped
from attnlab.see.site import Sites, blocks_of


class Seen(nnx.Intermediate):
    """A captured value; it is an nnx variable so that it passes through `nnx.jit` and `nnx.remat`."""


@dataclasses.dataclass(frozen=True)
class Nnx:
    """A `flax.nnx` module without its arrays, and the non-array options of its call, as (name, value) pairs."""

    graph: nnx.GraphDef
    options: tuple[tuple[str, Any], ...] = ()

    def sites(self, state, args: tuple, kwargs: Mapping) -> Sites:
        """The attention layers and blocks, found by tracing the call."""
        calls: dict[str, ModuleCalls] = {}

        def trace(state, args, kwargs):
            return self._call(state, args, kwargs, taps.ATTENTION, {}, None, (), calls)[1]

        seen = jax.eval_shape(trace, state, args, dict(kwargs))
        for path, shape in seen["z"].items():
            if len(shape.shape) != calls[base(path)].rank + 1:
                raise ValueError(
                    f"{path} is within nnx.scan or nnx.vmap: capture a function of the model's state instead"
                )
        sites = []
        for path in seen["z"]:
            call = calls[base(path)]
            shapes = {name: seen[name][path] for name in taps.ATTENTION}
            sites.append(site_of(path, call.kind, shapes, editable=call.count == 1))
        sites.sort(key=lambda site: list(calls).index(base(site.path)))
        streams = {path: call.is_stream and call.count == 1 for path, call in calls.items()}
        return Sites(tuple(sites), blocks_of(tuple(site.path for site in sites if site.editable), streams))

    def run(self, state, args: tuple, kwargs: Mapping, sites: Sites, want: tuple[str, ...], edits: Mapping, rows):
        """Return (result, values by name and path); arguments as for `Linen.run`."""
        return self._call(state, args, kwargs, want, edits, rows, sites.blocks, {})

    def _call(self, state, args, kwargs, want, edits, rows, blocks, calls):
        copy = nnx.merge(self.graph, jax.tree.map(lambda x: x, state))  # new variables, which belong to this trace
        modules = {"/".join(map(str, path)): module for path, module in nnx.iter_modules(copy)}
        attention = [path for path, module in modules.items() if isinstance(module, nnx.MultiHeadAttention)]
        for path, module in modules.items():
            if path in attention or any(layer.startswith(f"{path}/") or path == "" for layer in attention):
                _listen(module, path, functools.partial(_Port, path, want, edits, rows), blocks, calls)
        out = copy(*unwrapped(args), **kwargs, **dict(self.options))
        values = {name: {} for name in want}
        for path, module in modules.items():
            for name in want:
                seen = getattr(module, taps.asked(name), None)
                if isinstance(seen, Seen):
                    each = enumerate(seen.get_value())
                    values[name] |= {path + (f"@{n}" if n else ""): value for n, value in each}
        return out, values


class _Port:
    """The requests and edits of one module; see `taps.LinenPort`."""

    def __init__(self, path, want, edits, rows, module):
        self._path, self._want, self._edits, self.rows, self._module = path, want, edits, rows, module

    def is_asked(self, name):
        return name in self._want

    def edit(self, name):
        return self._edits.get((self._path, name))

    def send(self, name, value):
        before = getattr(self._module, taps.asked(name), None)
        values = (value,) if before is None else (*before.get_value(), value)
        setattr(self._module, taps.asked(name), Seen(values))


def _listen(module, path, port, blocks, calls) -> None:
    """Make the module's class a subclass that records calls and taps attention, and a block's streams."""
    kind = type(module)

    # `self` may be a copy of `module`, made by `nnx.remat` or `nnx.jit`.
    def __call__(self, *args, **kwargs):  # noqa: N807
        call = functools.partial(kind.__call__, self)
        with tapped_attention(self, port(self), nnx.MultiHeadAttention):
            return heard(calls, path, kind.__name__, port(self), path in blocks, call, args, kwargs)[1]

    # Unlike Linen, NNX has no interceptors, and a call looks up `__call__` in the class.
    object.__setattr__(module, "__class__", type(kind.__name__, (kind,), {"__call__": __call__}))
