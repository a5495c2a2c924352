"""Points at which `attnlab.see` reads and edits the values of a module; without it they add nothing to the program.

Requests and edits are variable collections, not global state, so they reach modules within `nn.jit`, `nn.remat` and
`nn.scan`, belong to the key of every cache of compiled programs, and are not shared between threads.
`mutable=["see_pattern"]` requests the patterns, and the variables `{"edit_z": {"block_0": {"attention": {"tapped":
edit}}}}` replace z of that module with `edit(z)`.
"""

from collections.abc import Callable

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float

from attnlab.types import Array

KEY = "tapped"  # no submodule has this name
ATTENTION = ("q", "k", "v", "pattern", "z")
STREAMS = ("in", "out")
NORM = "norm"  # the divisor of a norm
MISMATCH = "mismatch"
MADE = "made"  # the output of a module within a block
ROWS = "see_rows"


def asked(name: str) -> str:
    """The collection into which a value is sown; a caller requests the value by making the collection mutable."""
    return f"see_{name}"


def edits(name: str) -> str:
    """The collection with the edits of a value."""
    return f"edit_{name}"


COLLECTIONS = (*(f(name) for name in (*ATTENTION, *STREAMS, NORM, MISMATCH, MADE) for f in (asked, edits)), ROWS)
"""The collections of `attnlab.see`, for the `variable_axes` of `nn.scan` and `nn.vmap`, which pass on no others."""


class LinenPort:
    """The requests and edits for one `flax.linen` module, while it runs."""

    def __init__(self, module: nn.Module):
        self._module = module

    @property
    def rows(self):
        """The indices of the queries whose patterns are requested; None for all."""
        return self._read(ROWS)

    def is_asked(self, name: str) -> bool:
        """Whether a value is requested."""
        module = self._module
        # `mutable=True` and `init` make all collections mutable, but `attnlab.see` requests none of them.
        everything = module.is_initializing() or module.is_mutable_collection(asked("everything"))
        return module.is_mutable_collection(asked(name)) and not everything

    def edit(self, name: str) -> Callable | None:
        """The edit of a value, if there is one."""
        return self._read(edits(name))

    def send(self, name: str, value) -> None:
        """Return a value to the caller."""
        self._module.sow(asked(name), KEY, value)

    def _read(self, collection):
        return self._module.get_variable(collection, KEY) if self._module.has_variable(collection, KEY) else None


def is_used(module: nn.Module) -> bool:
    """Whether a value of an attention layer is requested or edited."""
    port = LinenPort(module)
    return any(port.is_asked(name) or port.edit(name) is not None for name in (*ATTENTION, MISMATCH))


def tap(module, name: str, value):
    """Return `value` after its edit, if any, and send it if requested; `module` may be a port such as `LinenPort`."""
    port = LinenPort(module) if isinstance(module, nn.Module) else module
    edit = port.edit(name)
    value = value if edit is None else edit(value)
    if port.is_asked(name):
        port.send(name, value)
    return value


def attended(module, z, weights: Callable, v: Float[Array, "*B Tk Hk Dv"], *, drops: bool = False):
    """Pass the operator's output z = pattern·v, `[..., Tq, H, Dv]`, through the tap of the pattern.

    `weights(rows)` returns the pattern `[..., H, Rq, Tk]` of the query indices `rows` (None for all), and `drops` says
    whether z has dropout. An edited pattern p' adds (p' − p)·v to z, so the same kernel computes z with and without an
    edit, and an edit that changes nothing changes no bit.
    """
    port = LinenPort(module) if isinstance(module, nn.Module) else module
    edit = port.edit("pattern")
    if edit is not None:
        if drops:
            raise ValueError(
                "the pattern is edited before dropout, which is on: call the model with deterministic=True"
            )
        pattern = weights(None)
        edited = edit(pattern)
        z = (z + _weighted(edited - pattern, v, jnp.maximum(jnp.abs(pattern), jnp.abs(edited)))).astype(z.dtype)
        if port.is_asked("pattern"):
            port.send("pattern", edited if port.rows is None else jnp.take(edited, port.rows, axis=-2))
    elif port.is_asked("pattern"):
        port.send("pattern", weights(port.rows))
    if port.is_asked(MISMATCH):
        pattern = weights(None)
        expected = _weighted(pattern, v, jnp.abs(pattern))
        apart = jnp.abs(z.astype(expected.dtype) - expected).max(initial=0)
        port.send(MISMATCH, apart / jnp.maximum(jnp.abs(expected).max(initial=0), jnp.finfo(expected.dtype).tiny))
    return z


def _weighted(pattern, v, weights):
    """pattern·v for `[..., H, Tq, Tk]` and `[..., Tk, Hk, Dv]`: `[..., Tq, H, Dv]`."""
    # A key without positive weight is not read: its value may even be NaN. NaN weights, of NaN queries, do not count.
    is_read = (weights > 0).any(axis=(-3, -2))[..., None, None]
    v = jnp.repeat(jnp.where(is_read, v, 0), pattern.shape[-3] // v.shape[-2], axis=-2)
    return jnp.einsum("...hqk,...khd->...qhd", pattern, v.astype(pattern.dtype))
