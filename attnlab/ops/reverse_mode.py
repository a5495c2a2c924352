"""Refusal of forward-mode and second-order derivatives, by operations that have a reverse mode alone."""

import contextlib
import functools

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from attnlab.types import Array

_OTHERS = {"chunked": "recurrent"}  # what has all derivatives, where it is not "dense"


def _message(impl: str) -> str:
    return (
        f"impl = {impl!r} has first derivatives in reverse mode only: for forward mode or second order use "
        f"impl={_OTHERS.get(impl, 'dense')!r}"
    )


def refuse(impl: str, *_, **__):
    raise ValueError(_message(impl))


@contextlib.contextmanager
def forward_mode_refused(impl: str):
    """Turns JAX's TypeError for forward mode within `vmap` into the ValueError of `refuse`."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" in str(error):
            raise ValueError(_message(impl)) from error
        raise


def reverse_mode_only(impl: str, tree):
    """`tree`; forward-mode derivatives of computations with it raise ValueError, under `jit` too."""
    leaves, treedef = jax.tree.flatten(tree)
    is_floating = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in leaves]
    floating = iter(_identity(impl, [x for x, chosen in zip(leaves, is_floating) if chosen]))
    return jax.tree.unflatten(treedef, [next(floating) if chosen else x for x, chosen in zip(leaves, is_floating)])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _identity(impl: str, leaves: list[Array]) -> list[Array]:
    return leaves


@_identity.defjvp
def _identity_jvp(impl, primals, tangents):
    return primals[0], _tangents_p.bind(*tangents[0], impl=impl)


# The identity on tangents. Reverse mode transposes it without computing it, so computing it means forward mode.
_tangents_p = Primitive("reverse_mode_only")
_tangents_p.multiple_results = True
_tangents_p.def_impl(lambda *_, impl: refuse(impl))
_tangents_p.def_abstract_eval(lambda *tangents, impl: tangents)
ad.deflinear2(_tangents_p, lambda cotangents, *_, impl: cotangents)
batching.primitive_batchers[_tangents_p] = lambda tangents, axes, impl: (_tangents_p.bind(*tangents, impl=impl), axes)
mlir.register_lowering(_tangents_p, lambda *_, impl, **__: refuse(impl))
