"""The function under test: how it is called and what it returns."""

import functools
import traceback
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.ops.call import AttentionCall
from attnlab.testing.cases import Case

# Arguments whose gradients are compared.
FLOATING = ("q", "k", "v", "bias", "sinks", "score_mods", "g", "beta", "erase", "state")
_REFUSALS = (TypeError, ValueError, NotImplementedError, AssertionError)
_NEEDS_VALUES = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)


class Unsupported(Exception):  # noqa: N818  not an error: an adapter says what its function lacks
    """Raised by an adapter for a call that its function cannot compute.

    >>> raise Unsupported("it has no sinks")
    Traceback (most recent call last):
      ...
    attnlab.testing.subject.Unsupported: it has no sinks
    """


class ResultError(Exception):
    """Raised for results that are neither an output nor (output, lse or state), or that have a wrong shape."""


class AdapterError(ValueError):
    """Raised if an adapter returns no dictionary of arguments: the adapter is part of the check, not under test."""


def as_attnlab(call: AttentionCall) -> dict:
    """Return the arguments that a call has, as keyword arguments of `attnlab.attention`.

    >>> call = AttentionCall(*3 * [np.ones((1, 2, 1, 4), np.float32)], mask=masks.Causal())
    >>> list(as_attnlab(call))
    ['q', 'k', 'v', 'mask']
    """
    names = ("q", "k", "v", "mask", "bias", "scale", "sinks", "q_positions", "kv_positions")
    kwargs = {name: getattr(call, name) for name in names if getattr(call, name) is not None}
    if call.score_mods:
        kwargs["score_mod"] = call.score_mods if len(call.score_mods) > 1 else call.score_mods[0]
    if call.dropout_rate:
        kwargs |= {"dropout_rate": call.dropout_rate, "dropout_key": jax.random.wrap_key_data(call.dropout_keys)}
    return kwargs


def outputs_of(function: Callable, adapter: Callable, second: str, shapes: Callable) -> Callable:
    """Return a function that maps a call to its results by name: "out" and, if there is a second result, `second`.

    It raises AdapterError unless the adapter returns a dictionary, and ResultError unless shapes are `shapes(call)`.
    """

    def outputs(call) -> dict:
        kwargs = adapter(call)
        if not isinstance(kwargs, Mapping):
            raise AdapterError(
                f"the adapter returned a {type(kwargs).__name__}, expected a dictionary of keyword arguments"
            )
        returned = function(**kwargs)
        parts = returned if isinstance(returned, tuple) else (returned, None)
        if len(parts) != 2 or not all(hasattr(x, "shape") for x in parts if x is not None) or parts[0] is None:
            what = f"a tuple of {len(parts)}" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
            raise ResultError(f"it returned {what}, expected an output array, or (output, {second})")
        results = {name: x for name, x in zip(("out", second), parts) if x is not None}
        for (name, x), shape in zip(results.items(), shapes(call)):
            if tuple(x.shape) != tuple(shape):
                raise ResultError(f"{name} has shape {tuple(x.shape)}, expected {tuple(shape)}")
        return results

    return outputs


def failure(error: Exception, computed: bool) -> tuple[str, str]:
    """(outcome, why) for an error of the function under test: "refused" for `Unsupported` and NotImplementedError, and
    for other argument errors unless the function has `computed` other calls with the same feature."""
    if isinstance(error, Unsupported | ResultError):
        return "refused" if isinstance(error, Unsupported) else "wrong", str(error)
    message = (str(error).strip().splitlines() or [""])[0][:160]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    user_frames = [frame for frame in frames if "attnlab/testing" not in frame.filename.replace("\\", "/")]
    place = f" ({user_frames[-1].filename.rpartition('/')[2]}:{user_frames[-1].lineno})" if user_frames else ""
    refusals = NotImplementedError if computed else _REFUSALS
    return "refused" if isinstance(error, refusals) else "wrong", f"{type(error).__name__}: {message}{place}"


class Subject:
    """A function under test, compiled once for each transform, with observations of its behavior.

    Attributes:
      outputs: takes a call and returns the function's results by name.
      meanings: its choices where libraries legitimately differ.
      is_quadratic: by feature, whether memory grows with Tq·Tk.
      types: types of the last call's results, by name.
    """

    def __init__(self, outputs: Callable):
        self.outputs = outputs
        self.meanings: dict[str, str] = {}
        self.is_quadratic: dict[str, bool] = {}
        self.types: dict[str, np.dtype] = {}
        self._compiled = {}

    def run(self, case: Case, gradients: bool) -> dict[str, np.ndarray]:
        """Return results and, if `gradients`, gradients; masks and positions are traced if the function allows it."""
        transform, weights = case.feature.transform, {"out": case.d_out, "lse": case.d_lse, "state": case.d_lse}
        if transform == "sharded" and jax.device_count() < 4:
            raise Unsupported("it needs four devices: run attnlab conform, which simulates them")
        floating = floating_of(case.call)
        if transform == "sharded":
            floating = jax.device_put(floating, _over_batch_and_heads())
        if (transform, gradients) not in self._compiled:
            run = functools.partial(_results, self.outputs, transform, gradients)
            self._compiled[transform, gradients] = run if transform == "eager" else jax.jit(run)
        try:
            results = self._compiled[transform, gradients](case.call, floating, weights)
        except _NEEDS_VALUES:
            floating.pop("score_mods", None)  # its values, too, at the price of its gradient
            run = functools.partial(_results, self.outputs, transform, gradients, case.call)
            results = jax.jit(run)(floating, weights)
        self.types = {name: x.dtype for name, x in results.items()}
        return {name: np.asarray(x).astype(np.float64) for name, x in results.items()}


def _over_batch_and_heads() -> jax.sharding.NamedSharding:
    axes = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=axes, devices=jax.devices()[:4])
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch", None, "heads"))


def floating_of(call) -> dict:
    """The arguments of a call whose gradients are compared, by name: those with arrays."""
    fields = call if isinstance(call, dict) else vars(call)
    return {name: fields[name] for name in FLOATING if jax.tree.leaves(fields.get(name))}


def _results(outputs, transform, gradients, call, floating, weights) -> dict:
    def on_arrays(arrays):
        whole = call | arrays if isinstance(call, dict) else call.replace(**arrays)
        if transform != "vmap":
            return outputs(whole)
        return jax.tree.map(lambda x: x[:, 0], jax.vmap(outputs)(jax.tree.map(lambda x: x[:, None], whole)))

    on_arrays = jax.checkpoint(on_arrays) if transform == "remat" else on_arrays
    return with_gradients(on_arrays, floating, lambda _: weights) if gradients else on_arrays(floating)


def with_gradients(outputs: Callable, arrays: dict, weigh: Callable[[dict], dict]) -> dict:
    """Return, by name, outputs and the gradients of their sum weighted by `weigh(outputs)`; a missing weight is 0."""
    results, pull_back = jax.vjp(outputs, arrays)
    weights = weigh(results)
    weights = {
        name: jnp.zeros_like(x) if weights.get(name) is None else weights[name].astype(x.dtype)
        for name, x in results.items()
    }
    for name, leaves in {name: jax.tree.leaves(x) for name, x in pull_back(weights)[0].items()}.items():
        names = [name] if len(leaves) == 1 else [f"{name}[{n}]" for n in range(len(leaves))]
        results |= {f"the gradient of {name}": x for name, x in zip(names, leaves)}
    return results
