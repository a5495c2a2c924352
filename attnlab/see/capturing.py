"""Capture a model's values, and run the model with edits."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Integer

from attnlab.nn import taps
from attnlab.see.models import adapt
from attnlab.see.results import Run
from attnlab.see.site import Sites
from attnlab.types import Array


def sites(model, variables, *args, **kwargs) -> Sites:
    """Find a model's attention layers and blocks, and check whether z is the captured pattern times v in each layer.

    Args:
      model: a `flax.linen` or `flax.nnx` module with attention layers of `attnlab.nn` or Flax.
      variables: `{"params": …}` of the model; for an nnx module a state, or None for the module's current state.
      args, kwargs: arguments of the model, e.g. tokens.

    Returns:
      The attention layers and blocks, which print as a table.

    Raises:
      ValueError: the model has no attention, or an `nn.scan` around a layer lacks the collections of `attnlab.see`.

    >>> model = GPT.of(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
    >>> tokens = jnp.array([[1, 2, 3]])
    >>> result = sites(model, model.init(jax.random.key(0), tokens), tokens)
    >>> [(site.path, site.heads, site.verified) for site in result], result.blocks
    ([('block_0/attention', 2, True), ('block_1/attention', 2, True)], ('block_0', 'block_1'))
    """
    view, inputs = adapt(model, variables, args, kwargs)
    mismatch = jax.jit(lambda inputs: view.run(inputs, want=(taps.MISMATCH,)).values)(inputs)[taps.MISMATCH]
    measured = (dataclasses.replace(site, mismatch=float(mismatch[site.path])) for site in view.sites)
    return dataclasses.replace(view.sites, attention=tuple(measured))


def capture(
    model,
    variables,
    *args,
    want: Sequence[str] = ("pattern",),
    rows: Integer[Array, " R"] | Sequence[int] | None = None,
    **kwargs,
) -> Run:
    """Run a model and return values of its layers.

    The model and its result stay the same. This works in `jax.jit` (which makes it fast), `jax.vmap` and `jax.grad`.

    Args:
      model, variables, args, kwargs: as for `sites`.
      want: names of values. Attention layers have `q` `[B, Tq, H, D]`, `k` and `v` `[B, Tk, Hk, D]`, as they enter the
        scores (normalized and rotated) or the cache; `pattern` `[B, H, Tq, Tk]`, the softmax weights before dropout, or
        for a recurrence the weights of the tokens' values in each output, which may be negative; and `z`
        `[B, Tq, H, D]`, the heads' outputs after any output gate and norm of a mixer. Blocks have `in` and `out`
        `[B, T, F]`, the residual stream.
      rows: indices of the R queries whose patterns are returned, `[B, H, R, Tk]`, to save memory; None for all.

    Returns:
      `Run`, with `values[name][path]`.

    Raises:
      ValueError: as for `sites`, or for an unknown name; the message suggests the nearest.

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
    """Run a model with edits of some of its values.

    Edits are pytrees of arrays, so `jax.jit`, `jax.vmap` and `jax.grad` accept them as arguments. Besides `Put`, `Add`
    and `Scale`, an edit may be any pytree that can be called with the value, such as `jax.tree_util.Partial(function,
    *arrays)`. An edited value is captured after its edit.

    Args:
      model, variables, args, kwargs: as for `sites`.
      edits: a mapping from globs of "path/name" to edits, e.g. `{"block_0/attention/z": Put(0.0)}`.
      want, rows: as for `capture`.

    Returns:
      `Run`, with the edited model's result.

    Raises:
      ValueError: as for `capture`, or for a site that the model lacks; the message suggests the nearest.

    >>> model = GPT.of(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
    >>> tokens = jnp.array([[1, 2, 3]])
    >>> params = model.init(jax.random.key(0), tokens)
    >>> edited(model, params, tokens, edits={"*/z": Put(0.0)}).out.shape  # without attention
    (1, 3, 10)
    """
    want = (want,) if isinstance(want, str) else tuple(want)
    view, inputs = adapt(model, variables, args, kwargs)
    return view.run(inputs, want, edits, rows=rows)
