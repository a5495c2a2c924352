"""Read and edit values of attention layers in `flax.linen` models, through variable collections."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from attnlab.nn import AdditiveAttention, Head, Layer, LayerOut, MultiHeadAttention, taps
from attnlab.nn.mixers.interface import CausalMixer, RecurrentMixer
from attnlab.nn.norms import LayerNorm, RMSNorm
from attnlab.see.site import Site, Sites, blocks_of

OURS = (MultiHeadAttention, Head, AdditiveAttention, RecurrentMixer)
NORMS = (LayerNorm, RMSNorm, nn.LayerNorm, nn.RMSNorm)
_fresh = itertools.count()


@dataclasses.dataclass(frozen=True)
class Linen:
    """A `flax.linen` module, and options of its call such as `deterministic` and `method`, as (name, value) pairs."""

    model: nn.Module
    options: tuple[tuple[str, Any], ...] = ()

    def sites(self, variables, args: tuple, kwargs: Mapping) -> Sites:
        """The attention layers and blocks, found by tracing the call."""
        calls: dict[str, ModuleCalls] = {}
        # A new collection each time, because otherwise `nn.jit` would not trace again.
        fresh = f"sites_{next(_fresh)}"

        def trace(variables, args, kwargs):
            return self._apply(variables, args, kwargs, taps.ATTENTION, {}, (), calls, fresh)[1]

        sown = jax.eval_shape(trace, variables, args, dict(kwargs))
        unseen = set(sown["z"]) - set(calls)
        if unseen:
            raise ValueError(
                f"nn.jit compiles {', '.join(sorted(unseen))} and another layer as one, so their calls cannot be "
                "distinguished: remove nn.jit, and compile the whole call"
            )
        sites = []
        for path, call in calls.items():
            for name, shapes in _shapes_at(sown, path, call.rank).items():
                sites.append(site_of(name, call.kind, shapes, editable="[" not in name and call.count == 1))
        streams = {path: call.is_stream and call.count == 1 for path, call in calls.items()}
        others = tuple((path, call.kind) for path, call in calls.items() if call.is_mixer and path not in sown["z"])
        mixing = (*(site.path for site in sites if site.editable), *(path for path, _ in others))
        blocks = blocks_of(mixing, streams)
        outside = [
            path for path, call in calls.items() if call.is_norm and call.count == 1 and not _is_in(path, blocks)
        ]
        return Sites(tuple(sites), blocks, tuple(outside) if blocks else (), others)

    def run(self, variables, args: tuple, kwargs: Mapping, sites: Sites, want: tuple[str, ...], edits: Mapping, rows):
        """Return (result, values by name and path); `edits` maps (path, name) to an edit.

        `rows` `[R]` are the query rows of patterns to return; None for all.
        """
        requests = {}
        for (path, name), edit in edits.items():
            _put(requests.setdefault(taps.edits(name), {}), path, edit)
        if rows is not None:
            for site in sites:
                _put(requests.setdefault(taps.ROWS, {}), base(site.path), rows)
        out, sown = self._apply(variables, args, kwargs, want, requests, sites.blocks + sites.norms, {})
        lifted = {base(site.path): site.path.count("[") for site in sites}
        values = {name: {} for name in want}
        for name in want:
            for path, calls in sown[name].items():
                values[name] |= _split(calls, path, lifted.get(path, 0))
        return out, values

    def _apply(self, variables, args, kwargs, names, requests, tapped, calls, *collections):
        options = dict(self.options)
        mutable = options.pop("mutable", False)
        requested = [] if mutable is False else [mutable] if isinstance(mutable, str) else mutable
        if requested is True or not isinstance(requested, list | tuple):
            raise ValueError(f"mutable = {mutable!r}: expected a list of the names of collections")
        tap_names, args = [taps.asked(name) for name in names], unwrapped(args)
        listen = _Listener(names, frozenset(tapped), calls)
        with nn.intercept_methods(listen):
            out, changed = self.model.apply(
                {**variables, **requests}, *args, **kwargs, **options, mutable=[*requested, *tap_names, *collections]
            )
        sown = {name: _by_path(changed.get(taps.asked(name), {})) for name in names}
        if mutable is False:
            return out, sown
        return (out, {name: value for name, value in changed.items() if name not in tap_names}), sown


class ModuleCalls(NamedTuple):
    """The calls of one module: its type, its first array's rank, whether its output has that shape, and their count."""

    kind: str
    rank: int
    is_norm: bool = False
    is_mixer: bool = False
    is_stream: bool = False
    count: int = 0


class _Listener:
    """Interceptor that records module calls and taps norms, blocks' streams and the attention of Flax's layers."""

    def __init__(self, names, tapped, calls):
        self.names, self.tapped, self.calls = names, tapped, calls
        self.running: set[str] = set()  # paths of the modules that are running

    def __call__(self, call, args, kwargs, context):
        module, method = context.module, context.method_name
        is_call = method == "__call__" or (method == "forward" and isinstance(module, Layer))
        # A layer's `__call__` calls `forward`, which may call `super()`; these count as one call.
        if not is_call or module.is_initializing() or (path := "/".join(module.path)) in self.running:
            return call(*args, **kwargs)
        self.running.add(path)
        port, is_norm = taps.LinenPort(module), isinstance(module, NORMS)
        if isinstance(module, (*OURS, nn.MultiHeadDotProductAttention)):
            self._require_collections(module, path)
        is_tapped = path in self.tapped
        about = {"is_norm": is_norm, "is_mixer": isinstance(module, CausalMixer)}
        hear = functools.partial(heard, self.calls, path, type(module).__name__, port, is_tapped and not is_norm)
        with tapped_attention(module, port):
            x, out, stream = hear(call, args, kwargs, **about)
        self.running.remove(path)
        if is_tapped and is_norm:
            return _tapped_norm(module, port, x, out)
        if _is_in(path, self.tapped) and not is_tapped and isinstance(stream, jax.Array):
            taps.tap(port, taps.MADE, stream)
        return out

    def _require_collections(self, module, path):
        if not all(module.is_mutable_collection(taps.asked(name)) for name in self.names):
            raise ValueError(
                f"{path} is within nn.scan or nn.vmap, which passes on only the collections that it names: add "
                "**dict.fromkeys(attnlab.see.COLLECTIONS, 0) to its variable_axes"
            )


def heard(calls, path: str, kind: str, port, is_block: bool, call, args: tuple, kwargs: Mapping, **about) -> tuple:
    """Run a module, record its call and tap a block's streams; return (first array, output, stream in the output)."""
    # The index or keyword of the first array argument.
    at = 0 if args else next((name for name, value in kwargs.items() if isinstance(value, jax.Array)), None)
    x = None if at is None else args[at] if args else kwargs[at]
    noted = calls.get(path, ModuleCalls(kind, np.ndim(x), **about))
    calls[path] = noted = noted._replace(count=noted.count + 1)
    if is_block:
        tapped = taps.tap(port, "in", x)
        args, kwargs = ((tapped, *args[1:]), kwargs) if args else (args, {**kwargs, at: tapped})
    out = call(*args, **kwargs)
    stream = out[0] if isinstance(out, tuple) and out else out
    is_stream = isinstance(x, jax.Array) and x.ndim > 2 and isinstance(stream, jax.Array)
    calls[path] = noted._replace(is_stream=is_stream and stream.shape == x.shape)
    if is_block:
        stream = taps.tap(port, "out", stream)
        edited = (stream, *out[1:]) if isinstance(out, tuple) else stream
        out = LayerOut(*edited) if isinstance(out, LayerOut) else edited
    return x, out, stream


def _tapped_norm(module, port, x, out):
    """The output of a norm of `x`, computed with the edited divisor if there is an edit."""
    if not port.is_asked(taps.NORM) and port.edit(taps.NORM) is None:
        return out
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centred = x if isinstance(module, RMSNorm | nn.RMSNorm) else x - x.mean(axis=-1, keepdims=True)
    divisor = jnp.sqrt((centred**2).mean(axis=-1, keepdims=True) + module.epsilon)
    edited = taps.tap(port, taps.NORM, divisor)
    if port.edit(taps.NORM) is None:
        return out
    # As for patterns, an edit that changes nothing leaves the output bitwise equal.
    scale = module.get_variable("params", "scale") if module.has_variable("params", "scale") else 1
    scale = scale + 1 if getattr(module, "plus_one", False) else scale
    return (out + (centred / edited - centred / divisor) * scale).astype(out.dtype)


@contextlib.contextmanager
def tapped_attention(module, port, kind=nn.MultiHeadDotProductAttention):
    """While a module runs, route its `attention_fn` through the taps of `port`, if it is a Flax layer of this kind."""
    if not isinstance(module, kind):
        yield
        return
    original = module.attention_fn
    object.__setattr__(module, "attention_fn", tapped(original, port))
    try:
        yield
    finally:
        object.__setattr__(module, "attention_fn", original)


def tapped(attention_fn: Callable, port) -> Callable:
    """Wrap a Flax layer's attention function with taps, keeping its signature, which Flax inspects."""

    @functools.wraps(attention_fn)
    def run(query, key, value, *args, **kwargs):
        q, k, v = (taps.tap(port, name, x) for name, x in (("q", query), ("k", key), ("v", value)))

        def weights(rows):
            undropped = {"module": None, "deterministic": True, "dropout_rate": 0.0, "dropout_rng": None}
            pattern = _weights(attention_fn, q, k, v, *args, **{**kwargs, **undropped})
            return pattern if rows is None else jnp.take(pattern, rows, axis=-2)

        drops = bool(kwargs.get("dropout_rate")) and not kwargs.get("deterministic", False)
        z = attention_fn(q, k, v, *args, **kwargs)
        return taps.tap(port, "z", taps.attended(port, z, weights, v, drops=drops))

    return run


def _weights(attention_fn, q, k, v, *args, **kwargs):
    """The pattern `[..., H, Tq, Tk]` of any attention function: its output when the values are the identity matrix."""
    accepted = inspect.signature(attention_fn).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted):
        kwargs = {name: kwargs[name] for name in kwargs if name in {parameter.name for parameter in accepted}}
    length, width = k.shape[-3], v.shape[-1]
    # The identity is split into parts as wide as the values, because some functions accept no other width.
    eye = jnp.eye(length, -(-length // width) * width, dtype=v.dtype).reshape(length, -1, 1, width)

    def columns(part):
        return attention_fn(q, k, jnp.broadcast_to(part, v.shape), *args, **kwargs)

    parts = jax.vmap(columns, in_axes=1)(eye)  # [P, ..., Tq, H, Dv]
    parts = jnp.moveaxis(parts, (0, -2), (-2, -4))
    return parts.reshape(*parts.shape[:-2], -1)[..., :length]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
    """Wraps a non-array argument, such as a flag, as a pytree without leaves."""

    value: Any


def unwrapped(args: tuple) -> tuple:
    """Arguments with each `Static` replaced by its value."""
    return tuple(arg.value if isinstance(arg, Static) else arg for arg in args)


def _put(tree: dict, path: str, value) -> None:
    for part in filter(None, path.split("/")):
        tree = tree.setdefault(part, {})
    tree[taps.KEY] = value


def _is_in(path: str, blocks: Collection[str]) -> bool:
    return any(f"{path}/".startswith(f"{block}/") for block in blocks)


def base(path: str) -> str:
    """The module path that a site's path starts with: "attention" in "attention@1"."""
    return path.partition("[")[0].partition("@")[0]


def _by_path(tree, path: tuple[str, ...] = ()) -> dict[str, tuple]:
    values = {}
    for name, node in tree.items():
        if name == taps.KEY:
            values["/".join(path)] = node
        else:
            values |= _by_path(node, (*path, name))
    return values


def _split(calls: tuple, path: str, lifted: int) -> dict:
    """The values of a module's calls by site; `lifted` leading axes come from `nn.scan` or `nn.vmap`."""
    by_site = {}
    for number, value in enumerate(calls):
        for at in np.ndindex(value.shape[:lifted]):
            site = path + (f"@{number}" if number else "") + "".join(f"[{n}]" for n in at)
            is_array = isinstance(value, jax.Array)
            by_site[site] = value[at] if is_array else jax.ShapeDtypeStruct(value.shape[lifted:], value.dtype)
    return by_site


def _shapes_at(sown, path, rank) -> dict[str, dict]:
    """The shapes of a module's values by site and name; the module's first array has `rank` axes."""
    shapes: dict[str, dict] = {}
    for name in taps.ATTENTION:
        calls = sown[name].get(path, ())
        for site, value in _split(calls, path, len(calls[0].shape) - rank - 1 if calls else 0).items():
            shapes.setdefault(site, {})[name] = value
    return shapes


def site_of(path, kind, shapes, editable) -> Site:
    """Build a site from the shapes of its values."""
    *_, heads, q_length, kv_length = shapes["pattern"].shape
    keys = shapes.get("v", shapes["pattern"] if "k" not in shapes else shapes["k"])
    return Site(
        path,
        kind,
        heads,
        keys.shape[-2] if "k" in shapes else heads,
        q_length,
        kv_length,
        tuple(name for name in taps.ATTENTION if name in shapes),
        editable=editable,
        tolerance=float(np.sqrt(jnp.finfo(shapes["z"].dtype).eps)),
    )
