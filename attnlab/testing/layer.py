"""Laws that every token-mixing layer must obey, whatever its formula."""

import contextlib
import functools
import re
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attnlab.nn.custom import as_layer
from attnlab.nn.layer import Context, Layer, LayerOut
from attnlab.support.errors import UserError
from attnlab.support.provenance import PACKAGE

LENGTH = 24  # tokens
PIECES = (1, 11, 1, 11)
CUT = 18  # within the last piece
DOCUMENTS = (7, 17)
PADDED = np.array([(5, 11), (6, 0)], np.int32)  # tokens of each sequence in two calls, padded to 11 tokens
# Relative to the largest output. Float32 sums in another order differ by a few times 6e-8 per layer; a token wrongly
# included changes outputs far more.
TOLERANCE = 1e-4
USUAL_CAUSES = (
    "usual causes are a norm or √x at 0, and a score mod that is not finite for a pair that the mask hides, such "
    "as log1p(i − j): its gradient there is 0 · NaN"
)
_ALONE = Context()


def check_layer(layer: nn.Module, features: int, *, capacity: int = LENGTH, seed: int = 0) -> list[str]:
    """Return the faults of a token-mixing layer, one sentence each; [] for none.

    The layer must be causal. Its outputs must not change if a sequence comes in pieces with a cache, if sequences are
    packed or padded, if layers are stacked in a loop, or if two devices split the batch. Its gradients must be finite,
    even for inputs of 0, and a piece without tokens must change nothing. An exception is a fault, reported with the
    call and the line of user code that raised it; a call that the layer rejects with UserError is skipped.

    Args:
      layer: any `attnlab.nn.Layer`, or a module from `[B, T, F]` to `[B, T, F]`, as for `attnlab.nn.register`.
      features: F, width of the inputs.
      capacity: tokens that its caches hold, 24 by default; if no token attends to more than N ≥ 12 tokens, N is enough.
      seed: seed for parameters and inputs.

    Raises:
      UserError: `layer` is not a module, or it rejects its own options.

    >>> from attnlab.nn import GatedDeltaNet
    >>> from flax.linen import Dense
    >>> check_layer(GatedDeltaNet(num_heads=2), features=8), check_layer(Dense(8), features=8)
    ([], [])
    """
    layer, x = as_layer(layer), np.random.default_rng(seed).standard_normal((2, LENGTH, features)).astype(np.float32)
    compiled = jax.jit(functools.partial(_forward, layer))

    def apply(params, x, context: Context = _ALONE, cache=None) -> LayerOut:
        packed = " of packed documents" * (context.segments is not None)
        parts = f"{packed}{', padded' * (context.lengths is not None)}{' and a cache' * (cache is not None)}"
        with _during(f"a call with {x.shape[1]} tokens{parts}"):
            return LayerOut(*compiled(params, x, context, cache))

    def init_cache():
        with _during("init_cache"):
            return layer.init_cache(2, features, capacity)

    try:
        with _during("init"):
            params = _parameters(layer, x, seed)
        whole = apply(params, x).out
    except _RaisedError as error:
        return [str(error)]
    if whole.shape != x.shape:
        return [f"its outputs have shape {list(whole.shape)}, expected {list(x.shape)}, like its inputs"]
    faults = {
        fault: _found(fault, law, _Run(layer, apply, params, x, whole, init_cache)) for fault, law in LAWS.items()
    }
    return list(dict.fromkeys(filter(None, faults.values())))


def _found(fault: str, law: Callable, run: "_Run") -> str:
    """The fault if a layer breaks a law or raises an exception; "" otherwise, or if it rejects the call."""
    try:
        error = law(run)
    except UserError:
        return ""
    except _RaisedError as raised:
        return str(raised)
    if isinstance(error, str):
        return error and f"{fault}: {error}"
    return "" if error <= TOLERANCE else fault + (f" (by {error:.2g} of the largest)" if np.isfinite(error) else "")


_FOLDERS = "|".join(re.escape(str(each)) for each in (PACKAGE, sysconfig.get_paths()["stdlib"]))
_LIBRARIES = re.compile(rf"({_FOLDERS})[/\\]|.*[/\\](site|dist)-packages|<frozen ")


class _RaisedError(Exception):
    """An exception of a layer, described in a sentence."""


@contextlib.contextmanager
def _during(what: str) -> Iterator[None]:
    """Context that turns any exception except UserError into a `_RaisedError` that begins with `what`."""
    try:
        yield
    except (UserError, _RaisedError):
        raise
    except Exception as error:  # whatever the user's code raises
        message = textwrap.shorten(str(error), 240, placeholder=" …")
        frames = [each for each in traceback.extract_tb(error.__traceback__) if not _LIBRARIES.match(each.filename)]
        line = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        raise _RaisedError(f"{what} raises {type(error).__name__}: {message}{line}") from error


def _forward(layer: Layer, params, x, context: Context = _ALONE, cache=None) -> LayerOut:
    return layer.apply(params, x, context, cache, method="forward")


def _parameters(layer: nn.Module, x: np.ndarray, seed: int):
    """Initial values; NumPy draws kernels (JAX would take seconds) and replaces zeros, which would hide faults."""
    rng, key = np.random.default_rng(seed), jax.random.key(seed)

    def without_kernels(path, leaf):
        return None if jax.tree_util.keystr(path[-1:], simple=True) == "kernel" else leaf

    def drawn(leaf, initial):
        if initial is not None and np.any(initial):
            return np.asarray(initial)
        scale = 0.1 if initial is not None else leaf.shape[0] ** -0.5
        return (scale * rng.standard_normal(leaf.shape)).astype(leaf.dtype)

    initial = jax.jit(lambda key: jax.tree_util.tree_map_with_path(without_kernels, layer.init(key, x)))(key)
    return jax.tree.map(drawn, jax.eval_shape(layer.init, key, x), initial)


class _Run(NamedTuple):
    """A layer, `apply` (compiled once for each shape), the outputs `whole` of one pass, and `init_cache`."""

    layer: Layer
    apply: Callable
    params: Any
    x: np.ndarray
    whole: np.ndarray
    init_cache: Callable[[], Any]


def _causal(run: _Run) -> float:
    changed = run.x.copy()
    changed[:, CUT:] *= -2
    return _error(run.apply(run.params, changed).out[:, :CUT], run.whole[:, :CUT])


def _in_pieces(run: _Run) -> float:
    cache, outs = run.init_cache(), []
    for piece in np.split(run.x, np.cumsum(PIECES)[:-1], axis=1):
        out, cache, _ = run.apply(run.params, piece, cache=cache)
        outs.append(np.asarray(out))
    return _error(np.concatenate(outs, axis=1), run.whole)


def _packed(run: _Run) -> float:
    first, second = DOCUMENTS
    segments = np.repeat(np.arange(2, dtype=np.int32), DOCUMENTS)[None].repeat(2, axis=0)
    alone = run.apply(run.params, np.roll(run.x, -first, axis=1)).out[:, :second]  # followed by other tokens
    expected = np.concatenate([run.whole[:, :first], alone], axis=1)
    return _error(run.apply(run.params, run.x, Context(segments=segments)).out, expected)


def _padded(run: _Run) -> float:
    cache, starts, errors = run.init_cache(), np.zeros(2, np.int32), []
    for lengths in PADDED:
        at = starts[:, None] + np.arange(PIECES[-1])
        x, expected = (np.take_along_axis(tokens, at[..., None], axis=1) for tokens in (run.x, run.whole))
        is_token = np.arange(PIECES[-1]) < lengths[:, None]
        padded = np.where(is_token[..., None], x, np.float32(np.nan))
        out, cache, _ = run.apply(run.params, padded, Context(lengths=lengths), cache)
        errors.append(_error(np.asarray(out)[is_token], expected[is_token]))
        starts = starts + lengths
    following = run.apply(run.params, run.x[:, starts[0]][:, None], cache=cache).out
    return max(*errors, _error(following, run.whole[:, starts[0]][:, None]))


def _gradients(run: _Run) -> str:
    def size(params, x):
        return (_forward(run.layer, params, x).out ** 2).sum()

    slopes = jax.jit(jax.grad(size, (0, 1)))
    for inputs, x in {"random inputs": run.x, "inputs of 0": np.zeros_like(run.x)}.items():
        with _during("its gradient"):
            d_params, d_inputs = slopes(run.params, x)
        for path, leaf in [*jax.tree_util.tree_leaves_with_path(d_params), ((), d_inputs)]:
            if not np.isfinite(leaf).all():
                name = jax.tree_util.keystr(path[1:], simple=True, separator="/") or "the inputs"
                return f"the gradient of {name} at {inputs}; {USUAL_CAUSES}"
    return ""


def _stacked(run: _Run) -> float:
    def layer(x, params):
        return _forward(run.layer, params, x).out, None

    second = jax.tree.map(lambda leaf: (0.9 * leaf).astype(leaf.dtype), run.params)
    both = jax.tree.map(lambda *leaves: np.stack(leaves), run.params, second)
    with _during("a loop over stacked layers"):
        out, _ = jax.jit(lambda params, x: jax.lax.scan(layer, x, params))(both, run.x)
    return _error(out, run.apply(second, run.whole).out)


def _sharded(run: _Run) -> float:
    if jax.device_count() == 1:
        return 0.0
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with nn.logical_axis_rules((("batch", "data"),)):
        x = jax.device_put(run.x, NamedSharding(mesh, PartitionSpec("data")))
        params = jax.device_put(run.params, NamedSharding(mesh, PartitionSpec()))
        apply = jax.jit(lambda params, x: _forward(run.layer, params, x).out)  # `run.apply` was traced without rules
        with _during("a call split over two devices"):
            return _error(apply(params, x), run.whole)


def _no_tokens(run: _Run) -> float:
    first, second = np.split(run.x[:, : sum(PIECES[:2])], PIECES[:1], axis=1)
    cache = run.apply(run.params, first, cache=run.init_cache()).cache
    after = run.apply(run.params, run.x[:, :0], cache=cache).cache
    return _error(*(run.apply(run.params, second, cache=each).out for each in (after, cache)))


LAWS = {
    "it is not causal: outputs change with later tokens": _causal,
    "outputs in pieces, with a cache, differ from one pass": _in_pieces,
    "outputs of packed documents differ from the same documents alone": _packed,
    "outputs of padded sequences, or of tokens after them, differ from the same sequences alone": _padded,
    "its gradients are not finite": _gradients,
    "outputs of two layers stacked in a loop differ from the two layers in sequence": _stacked,
    "outputs of a batch split over two devices differ from one device": _sharded,
    "a piece without tokens changes later outputs": _no_tokens,  # last: the rarest concern, and it compiles again
}


def _error(actual, expected) -> float:
    """The largest difference divided by the largest value; NaN counts as infinite."""
    error = np.abs(np.asarray(actual) - expected).max() / max(np.abs(expected).max(), np.finfo(np.float32).tiny)
    return float(np.where(np.isnan(error), np.inf, error))
