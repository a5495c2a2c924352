"""The function that is checked: how it is called, and what it returned."""

import functools
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from attnlab.ops.call import AttentionCall
from attnlab.testing.cases import Case
from attnlab.testing.reference import Answer

FLOATING = ("q", "k", "v", "bias", "sinks")  # the arguments that have gradients
_REFUSALS = (TypeError, ValueError, NotImplementedError, AssertionError)
_NEEDS_VALUES = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)


class Unsupported(Exception):  # noqa: N818  the word of an adapter for what its function does not offer
    """Raised by an adapter for a call that its function cannot compute.

    >>> raise Unsupported("it has no sinks")
    Traceback (most recent call last):
      ...
    attnlab.testing.subject.Unsupported: it has no sinks
    """


class ResultError(Exception):
    """A function returned what is neither an output nor (output, lse or state)."""


class AdapterError(ValueError):
    """An adapter, which belongs to the check and not to what is checked, returned no keyword arguments."""


def as_attnlab(call: AttentionCall) -> dict:
    """The keyword arguments of a function that is called as `attnlab.attention` is: those that the call has.

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


def called(function: Callable, kwargs, second: str) -> tuple:
    """(output, what `second` names or None) of a function.

    Raises:
      AdapterError: the arguments are no dictionary.
      ResultError: it returned something else.
    """
    if not isinstance(kwargs, Mapping):
        raise AdapterError(
            f"the adapter returned a {type(kwargs).__name__}, expected a dictionary of keyword arguments"
        )
    found = function(**kwargs)
    parts = found if isinstance(found, tuple) else (found, None)
    if len(parts) != 2 or not all(hasattr(x, "shape") for x in parts if x is not None) or parts[0] is None:
        what = f"a tuple of {len(parts)}" if isinstance(found, tuple) else f"a {type(found).__name__}"
        raise ResultError(f"it returned {what}, expected an array, the output, or (output, {second})")
    return parts


def require_shapes(**shapes: tuple) -> None:
    """Raises ResultError for a result whose shape is not the expected one: name=(array or None, shape)."""
    for name, (x, shape) in shapes.items():
        if x is not None and tuple(x.shape) != tuple(shape):
            raise ResultError(f"{name} has shape {tuple(x.shape)}, expected {tuple(shape)}")


def failure(error: Exception) -> tuple[str, str]:
    """(outcome, why) of an error of a stranger's function: "refused" for errors of arguments."""
    if isinstance(error, Unsupported | ResultError):
        return "refused" if isinstance(error, Unsupported) else "wrong", str(error)
    said = (str(error).strip().splitlines() or [""])[0][:160]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    own = [frame for frame in frames if "attnlab/testing" not in frame.filename.replace("\\", "/")]
    place = f" ({own[-1].filename.rpartition('/')[2]}:{own[-1].lineno})" if own else ""
    return "refused" if isinstance(error, _REFUSALS) else "wrong", f"{type(error).__name__}: {said}{place}"


class Subject:
    """A function of attention, and what was seen of it.

    Attributes:
      meanings: the choices that it made, in which libraries rightly differ.
      is_quadratic: by feature, whether its memory grows with Tq·Tk.
      lse_type: the type of the lse of its last call.
    """

    def __init__(self, function: Callable, adapter: Callable):
        if not callable(function):
            raise ValueError(f"function is {function!r}: expected a function of attention")
        self.function, self.adapter = function, adapter
        self.meanings: dict[str, str] = {}
        self.is_quadratic: dict[str, bool] = {}
        self.lse_type = np.dtype(np.float32)
        self._takes_return_lse = adapter is as_attnlab and "return_lse" in _parameters(function)
        self._compiled = {}

    def outputs(self, call: AttentionCall) -> tuple:
        """(out, lse or None)."""
        more = {"return_lse": True} if self._takes_return_lse else {}
        kwargs = self.adapter(call)
        out, lse = called(self.function, kwargs | more if more else kwargs, "lse")
        rows = call.q.shape[:-1]
        require_shapes(out=(out, (*rows, call.v.shape[-1])), lse=(lse, rows))
        return out, lse

    def run(self, case: Case, gradients: bool) -> Answer:
        """The function's results and gradients; the call's arrays are traced, where the function allows it."""
        transform = case.feature.transform
        if transform == "sharded" and jax.device_count() < 4:
            raise Unsupported("it needs four devices, which attnlab conform has")
        floating = {name: getattr(case.call, name) for name in FLOATING if getattr(case.call, name) is not None}
        if transform == "sharded":
            floating = jax.device_put(floating, _over_batch_and_heads())
        if (transform, gradients) not in self._compiled:
            run = functools.partial(_results, self.outputs, transform, gradients)
            self._compiled[transform, gradients] = run if transform == "eager" else jax.jit(run)
        try:
            found = self._compiled[transform, gradients](case.call, floating, case.d_out, case.d_lse)
        except _NEEDS_VALUES:
            run = functools.partial(_results, self.outputs, transform, gradients, case.call)
            found = jax.jit(run)(floating, case.d_out, case.d_lse)
        self.lse_type = self.lse_type if found[1] is None else found[1].dtype
        return Answer(*jax.tree.map(lambda x: np.asarray(x).astype(np.float64), found))


def _over_batch_and_heads() -> jax.sharding.NamedSharding:
    axes = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=axes, devices=jax.devices()[:4])
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch", None, "heads"))


def _parameters(function) -> Sequence[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a function of C, which has none
        return []


def _results(outputs, transform, gradients, call, floating, d_out, d_lse):
    """(out, lse or None, gradients by name)."""

    def of_arrays(arrays):
        whole = call.replace(**arrays)
        if transform != "vmap":
            return outputs(whole)
        return jax.tree.map(lambda x: x[:, 0], jax.vmap(outputs)(jax.tree.map(lambda x: x[:, None], whole)))

    of_arrays = jax.checkpoint(of_arrays) if transform == "remat" else of_arrays
    if not gradients or call.dropout_rate:
        return *of_arrays(floating), {}
    (out, lse), pull_back = jax.vjp(of_arrays, floating)
    cotangents = (d_out.astype(out.dtype), None if lse is None else d_lse.astype(lse.dtype))
    return out, lse, pull_back(cotangents)[0]
