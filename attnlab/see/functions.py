"""Experimental: attention in plain functions (Equinox, Haiku, plain JAX), found as softmaxes in their jaxprs.

A softmax is exp(s) divided by its own sum. A softmax that is contracted with another array over the same axis is
attention: the softmax is the pattern, the other array the values, the product z. The values can be read, not edited.
Attention within `lax.cond`, `lax.while_loop` and other programs is named, and not read.

A router's weights are contracted with the outputs of experts alike. They differ in that there are as many experts as
the variables have, not keys as the inputs have, and that the values of no two queries are the same.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from attnlab.nn import taps
from attnlab.ops import jaxprs
from attnlab.see import axes
from attnlab.see.linen import unwrapped
from attnlab.see.site import Site, Sites, natural

NAMES = ("pattern", "v", "z")
# Primitives allowed between exp, sum, quotient and the product with the values.
CARRIES = {"convert_element_type", "mul", "select_n", "transpose", "reshape", "copy", "name", "broadcast_in_dim"}
CARRIES |= {"squeeze", "expand_dims", "add", "max", "stop_gradient", "optimization_barrier"}
CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call"}
CALLS |= {"custom_vjp_call", "custom_vjp_call_jaxpr"}

_SHOWN = {"while": "while_loop"}


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of (variables, *args), called with options that are not arrays, by name and value."""

    call: Callable
    options: tuple[tuple[str, Any], ...] = ()

    def sites(self, variables, args: tuple, kwargs: Mapping) -> Sites:
        """The attention layers by number, "attention_0", …; within a scan also by iteration, "[0]", "[1]", …."""
        unread = []
        seen = jax.eval_shape(lambda *inputs: self._interpret(*inputs, unread)[1], variables, args, dict(kwargs))
        found = []
        for path in sorted(seen["z"], key=natural):
            shapes = {name: seen[name][path] for name in NAMES}
            *_, heads, q_length, kv_length = (1, *shapes["pattern"].shape)[-4:]
            tolerance = float(np.sqrt(jnp.finfo(shapes["z"].dtype).eps))
            kv_heads = shapes["v"].shape[-2]
            found.append(Site(path, "softmax", heads, kv_heads, q_length, kv_length, NAMES, False, tolerance=tolerance))
        return Sites(tuple(found), unread=tuple((f"{name}_{n}", name) for n, name in enumerate(unread)))

    def run(self, variables, args: tuple, kwargs: Mapping, sites: Sites, want: tuple[str, ...], edits: Mapping, rows):
        """(The function's result, values by name and path); arguments as for `Linen.run`."""
        out, seen = self._interpret(variables, args, kwargs)
        for name in want:
            if name not in (*NAMES, taps.MISMATCH):
                raise ValueError(f"want has {name!r}: of a plain function {', '.join(NAMES)} can be read")
        if rows is not None:
            seen["pattern"] = {path: jnp.take(x, rows, axis=-2) for path, x in seen["pattern"].items()}
        return out, {name: seen[name] for name in want}

    def _interpret(self, variables, args, kwargs, unread=None):
        def call(variables, args, kwargs):
            return self.call(variables, *unwrapped(args), **kwargs, **dict(self.options))

        closed, shape = jax.make_jaxpr(call, return_shape=True)(variables, args, kwargs)
        values, of_variables = jax.tree.leaves((variables, args, kwargs)), len(jax.tree.leaves(variables))
        origins = [axes.WEIGHTS] * of_variables + [axes.INPUTS] * (len(values) - of_variables)
        given = [axes.of_rank(jnp.ndim(x), origin) for x, origin in zip(values, origins)]
        outs, *_, found = _run(closed, values, given, unread=[] if unread is None else unread)
        seen = {name: {} for name in (*NAMES, taps.MISMATCH)}
        for number, (lifted, attention) in enumerate(found):
            # z is the product with the pattern by construction, so the check is that the pattern's rows sum to 1.
            rows = jnp.abs(attention["pattern"].sum(axis=-1) - 1)
            attention[taps.MISMATCH] = rows.max(axis=tuple(range(lifted, rows.ndim)))
            for at in np.ndindex(attention["z"].shape[:lifted]):
                path = f"attention_{number}" + "".join(f"[{n}]" for n in at)
                for name, value in attention.items():
                    seen[name][path] = value[at] if at else value
        return jax.tree.unflatten(jax.tree.structure(shape), outs), seen


class _Tag(NamedTuple):
    """A variable between scores and z: "exp" of the scores, "sum" of "exp" over one axis, or "pattern"."""

    kind: str
    source: object  # one for each exp
    axis: int | None = None  # of a sum, the axis that it is over


def _run(closed, args, given, tags=(), *, unread):
    """(Outputs of a jaxpr, their axes, a tag or None for each, [(leading axes from loops, values of one attention)]).

    `given` are the axes of `args`; the names of primitives whose attention is not read are appended to `unread`.
    """
    jaxpr, found = closed.jaxpr, []
    known = {var: tag for var, tag in zip(jaxpr.invars, tags) if tag is not None}
    origins = dict(zip(jaxpr.invars, given))
    origins |= {var: axes.of_rank(var.aval.ndim, axes.WEIGHTS) for var in jaxpr.constvars}

    def tags_of(atoms):
        return [None if isinstance(atom, core.Literal) else known.get(atom) for atom in atoms]

    def axes_of(atoms):
        return [axes.of_rank(atom.aval.ndim) if isinstance(atom, core.Literal) else origins[atom] for atom in atoms]

    def visit(eqn, values):
        tags_in, axes_in, name = tags_of(eqn.invars), axes_of(eqn.invars), eqn.primitive.name
        called, more = jaxprs.inner(eqn), []
        if called is not None and name == "scan" and _has_exp(called.jaxpr):
            outs, axes_out, more = _scan(eqn.params, called, values, axes_in, unread)
            tags_out = [None] * len(outs)
        elif called is not None and name in CALLS and (any(tags_in) or _has_exp(called.jaxpr)):
            outs, axes_out, tags_out, more = _run(called, values, axes_in, tags_in, unread=unread)
        else:
            outs, axes_out = jaxprs.bind(eqn, values), axes.after(eqn, axes_in, CALLS)
            attention = _attention(eqn, values, tags_in, axes_in, outs[0]) if name == "dot_general" else None
            more = [] if attention is None else [(0, attention)]
            tags_out = [_tag(eqn, tags_in)] * len(outs)
            if name == "div" and tags_out[0] and tags_out[0].kind == "pattern":
                axes_out = [axes.normalized(axes_out[0], tags_in[1].axis)]
            unread.extend([_SHOWN.get(name, name)] if _hides_attention(eqn) else [])
        found.extend(more)
        known.update({var: tag for var, tag in zip(eqn.outvars, tags_out) if tag is not None})
        origins.update(zip(eqn.outvars, axes_out))
        return outs

    outs = jaxprs.evaluate(closed, args, visit)
    return outs, axes_of(jaxpr.outvars), tags_of(jaxpr.outvars), found


def _tag(eqn, tags_in) -> _Tag | None:
    """The tag of an equation's output, from its inputs' tags."""
    name, tags = eqn.primitive.name, [tag for tag in tags_in if tag is not None]
    if name == "exp":
        return _Tag("exp", object())
    if name == "reduce_sum" and tags and tags[0].kind == "exp" and len(eqn.params["axes"]) == 1:
        return _Tag("sum", tags[0].source, int(eqn.params["axes"][0]))
    if name == "div" and [tag.kind for tag in tags] == ["exp", "sum"] and tags[0].source is tags[1].source:
        return _Tag("pattern", tags[0].source)
    return tags[0] if name in CARRIES and tags else None


def _has_exp(jaxpr) -> bool:
    named = any(eqn.primitive.name == "exp" for eqn in jaxpr.eqns)
    return named or any(_has_exp(called.jaxpr) for eqn in jaxpr.eqns for called in jaxprs.called(eqn))


def _hides_attention(eqn) -> bool:
    """Whether an equation, which is not interpreted, runs a program in which attention would be found.

    The programs of `lax.cond` and `lax.while_loop` are searched; of others an exp tells.
    """
    programs = [called for called in jaxprs.called(eqn) if _has_exp(called.jaxpr)]
    return bool(programs) and (eqn.primitive.name not in ("cond", "while") or any(map(_attends, programs)))


def _attends(closed) -> bool:
    found = []

    def run(*values):
        found.extend(_run(closed, values, [axes.of_rank(x.ndim) for x in values], unread=found)[-1])

    jax.eval_shape(run, *closed.in_avals)
    return bool(found)


def _scan(params, inner, values, given, unread):
    """Evaluate a loop's body here; its attention gets a leading axis."""
    consts, carry = jaxprs.consts_and_carry(params)
    given = [*given[: consts + carry], *(of_all[1:] for of_all in given[consts + carry :])]
    lifted, axes_out, within = [], [], []

    def body(carried, each):  # JAX may trace it more than once
        within.clear()
        outs, axes_out[:], _, found = _run(inner, [*values[:consts], *carried, *each], given, unread=within)
        lifted[:] = [count + 1 for count, _ in found]
        return outs[:carry], (outs[carry:], [attention for _, attention in found])

    start, each = values[consts : consts + carry], values[consts + carry :]
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carried, (stacked, found) = jax.lax.scan(body, start, each, **options)
    unread.extend(within)
    axes_out[carry:] = [(axes.UNKNOWN, *of_one) for of_one in axes_out[carry:]]
    return [*carried, *stacked], axes_out, list(zip(lifted, found))


def _attention(eqn, values, tags_in, axes_in, out) -> dict | None:
    """Pattern `[..., H, Tq, Tk]`, values `[..., Tk, H, Dv]` and z `[..., Tq, H, Dv]` of a product, or None."""
    sides = [n for n, tag in enumerate(tags_in) if tag is not None and tag.kind == "pattern"]
    contracted, batch = eqn.params["dimension_numbers"]
    if len(sides) != 1 or len(contracted[0]) != 1:
        return None
    (side,) = sides
    pattern, other = values[side], values[1 - side]
    (keys,), (keys_of_other,) = contracted[side], contracted[1 - side]
    free = [axis for axis in range(pattern.ndim) if axis != keys and axis not in batch[side]]
    if axes.is_of_other_than(axes_in[side], keys) or (not free and axes.origin(axes_in[side][keys]) == axes.WEIGHTS):
        return None  # a softmax over another axis; a router
    kept = [*sorted(batch[side]), *free]  # with grouped heads [B, Hk, G, Tq], wherever they were
    features = [n for n in range(other.ndim) if n not in (keys_of_other, *batch[1 - side])]
    # A product has the batch axes first, then the free axes of its left side, then of its right side.
    first = len(batch[side]) + (len(features) if side == 1 else 0)
    place = dict(zip(batch[side], itertools.count())) | dict(zip(free, itertools.count(first)))
    order = [place[axis] for axis in kept]
    z = jnp.transpose(out, [*order, *(n for n in range(out.ndim) if n not in order)])
    shared = [axis for _, axis in sorted(zip(batch[side], batch[1 - side]))]
    v = jnp.transpose(other, [*shared, keys_of_other, *features])
    pattern, z, v = jnp.transpose(pattern, [*kept, keys]), _flat(z, len(order)), _flat(v, len(shared) + 1)
    return {"pattern": _heads(pattern), "v": _heads_last(_heads(v)), "z": _heads_last(_heads(z))}


def _flat(x, rank: int):
    """Merge the axes from `rank` on."""
    return x.reshape(*x.shape[:rank], -1)


def _heads(x):
    """Merge grouped heads `[B, Hk, G, T, X]` to `[B, H, T, X]`."""
    return x.reshape(x.shape[0], -1, *x.shape[-2:]) if x.ndim > 4 else x


def _heads_last(x):
    return jnp.swapaxes(x, -3, -2) if x.ndim > 2 else x[:, None]
