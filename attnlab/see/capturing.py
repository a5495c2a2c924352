"""Capture a model's values, and run it with edits."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Integer

from attnlab.nn import taps
from attnlab.see.models import framed
from attnlab.see.results import Run
from attnlab.see.site import Sites
from attnlab.types import Array


def sites(model, variables, *args, **kwargs) -> Sites:
    """The attention layers and blocks of a model, and whether each pattern found is the one that z is computed with.

    Args:
      model: a `flax.linen` or `flax.nnx` module, whose attention is layers of `attnlab.nn` or of Flax.
      variables: of the model, `{"params": …}`; of an nnx module its state, None for the module's state.
      args, kwargs: arguments of the model, e.g. tokens.

    Returns:
      The attention layers and blocks; printed, a table.

    Raises:
      ValueError: the model has no attention, or has it within `nn.scan` without the collections of `attnlab.see`.

    >>> model = GPT.of(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
    >>> tokens = jnp.array([[1, 2, 3]])
    >>> found = sites(model, model.init(jax.random.key(0), tokens), tokens)
    >>> [(site.path, site.heads, site.verified) for site in found], found.blocks
    ([('block_0/attention', 2, True), ('block_1/attention', 2, True)], ('block_0', 'block_1'))
    """
    frame, inputs = framed(model, variables, args, kwargs)
    mismatch = jax.jit(lambda inputs: frame.run(inputs, want=(taps.MISMATCH,)).values)(inputs)[taps.MISMATCH]
    measured = (dataclasses.replace(site, mismatch=float(mismatch[site.path])) for site in frame.sites)
    return dataclasses.replace(frame.sites, attention=tuple(measured))


def capture(
    model,
    variables,
    *args,
    want: Sequence[str] = ("pattern",),
    rows: Integer[Array, " R"] | Sequence[int] | None = None,
    **kwargs,
) -> Run:
    """Run a model, and return values of its layers.

    The model and its result do not change. Works within `jax.jit`, which makes it fast, `jax.vmap` and `jax.grad`.

    Args:
      model, variables, args, kwargs: as for `sites`.
      want: names of values: of attention `q` `[B, Tq, H, D]`, `k` and `v` `[B, Tk, Hk, D]`, as they enter the scores
        (normalized and rotated) or the cache; `pattern`, the softmax's weights before dropout, `[B, H, Tq, Tk]`, or
        what the recurrence of a mixer reads of each token's values, which may be negative; `z`, the heads' outputs,
        after an output gate and the norm of a mixer, `[B, Tq, H, D]`; of blocks `in` and `out`, the residual stream,
        `[B, T, F]`.
      rows: queries whose patterns are returned, as `[B, H, R, Tk]`, for long sequences; all when None.

    Returns:
      `Run`, with `values[name][path]`.

    Raises:
      ValueError: as for `sites`; an unknown name, with the nearest one.

    >>> model = GPT.of(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
    >>> tokens = jnp.array([[1, 2, 3]])
    >>> run = capture(model, model.init(jax.random.key(0), tokens), tokens, want=("pattern", "out"))
    >>> run.stack("pattern").shape, run.values["out"]["block_1"].shape  # [L, B, H, Tq, Tk], [B, T, F]
    ((2, 1, 2, 3, 3), (1, 3, 8))
    """
    return edited(model, variables, *args, edits={}, want=want, rows=rows, **kwargs)


def edited(
    model,
    variables,
    *args,
    edits: Any,
    want: Sequence[str] = (),
    rows: Integer[Array, " R"] | Sequence[int] | None = None,
    **kwargs,
) -> Run:
    """Run a model with some of its values replaced.

    Edits are pytrees of arrays, so `jax.jit`, `jax.vmap` and `jax.grad` pass through them. Besides `Put`, `Add` and
    `Scale`, any pytree is one that is a function of the value, such as `jax.tree_util.Partial(function, *arrays)`. An
    edited value is captured after its edit.

    Args:
      model, variables, args, kwargs: as for `sites`.
      edits: by glob of "path/name", e.g. `{"block_0/attention/z": Put(0.0)}`.
      want, rows: as for `capture`.

    Returns:
      `Run`, with the edited model's result.

    Raises:
      ValueError: as for `capture`; a site that the model does not have, with the nearest one.

    >>> model = GPT.of(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
    >>> tokens = jnp.array([[1, 2, 3]])
    >>> params = model.init(jax.random.key(0), tokens)
    >>> edited(model, params, tokens, edits={"*/z": Put(0.0)}).out.shape  # without attention
    (1, 3, 10)
    """
    want = (want,) if isinstance(want, str) else tuple(want)
    frame, inputs = framed(model, variables, args, kwargs)
    return frame.run(inputs, want, edits, rows=rows)
