"""Laws of every layer that mixes tokens, whatever its formula."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attnlab.nn.layer import Context, Layer, LayerOut
from attnlab.support.errors import UserError

LENGTH = 24  # tokens
PIECES = (1, 0, 11, 1, 11)
CUT = 18  # within the last piece
DOCUMENTS = (7, 17)
PADDED = np.array([(5, 11), (6, 0)], np.int32)  # tokens of each sequence, in two calls of 11
# Of the largest output. Float32 sums in another order differ by some units of 6e-8 a layer; a token that a check must
# find changes outputs by its share of them.
TOLERANCE = 1e-4
_ALONE = Context()


def check_layer(layer: Layer, features: int, *, capacity: int = LENGTH, seed: int = 0) -> list[str]:
    """The faults of a layer that mixes tokens, each a sentence; [] for none.

    The layer must be causal; must give in pieces, with a cache, what it gives in one pass; must give packed and padded
    sequences what they have alone; must have finite gradients, also where its inputs are 0; and must compute the same
    in a loop over stacked layers, and on several devices, which split the batch.

    Args:
      layer: any `attnlab.nn.Layer`.
      features: F, width of the inputs.
      capacity: of its caches, 24 tokens; 12 or more suffice if its tokens attend to as few.
      seed: of parameters and inputs.

    >>> from attnlab.nn import GatedDeltaNet
    >>> check_layer(GatedDeltaNet(num_heads=2), features=8)
    []
    """
    x = np.random.default_rng(seed).standard_normal((2, LENGTH, features)).astype(np.float32)
    params = _parameters(layer, x, seed)
    apply = jax.jit(functools.partial(_forward, layer))
    whole = apply(params, x).out
    if whole.shape != x.shape:
        return [f"its outputs have shape {list(whole.shape)}, expected {list(x.shape)}, as its inputs"]
    faults, run = [], _Run(layer, apply, params, x, whole, functools.partial(layer.init_cache, 2, features, capacity))
    for fault, law in LAWS.items():
        try:
            error = law(run)
        except UserError:
            continue  # what a layer refuses, it does not compute wrongly
        except Exception as error:  # whatever a user's code raises
            faults.append(f"{fault} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})")
            continue
        if not error <= TOLERANCE:
            faults.append(fault + (f" (by {error:.2g} of the largest)" if np.isfinite(error) else ""))
    return faults


def _forward(layer: Layer, params, x, context: Context = _ALONE, cache=None) -> LayerOut:
    return layer.apply(params, x, context, cache, method="forward")


def _parameters(layer: nn.Module, x: np.ndarray, seed: int):
    """Initial values, but for kernels, whose draws take seconds to compile, and zeros, which have no effect."""
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
    """A layer, `apply`, which compiles once for each shape, the outputs `whole` of one pass, and its empty cache."""

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
    alone = run.apply(run.params, np.roll(run.x, -first, axis=1)).out[:, :second]  # and tokens after it
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


def _gradients(run: _Run) -> float:
    def size(params, x):
        return (_forward(run.layer, params, x).out ** 2).sum()

    slopes = jax.jit(jax.grad(size, (0, 1)))
    leaves = (leaf for x in (run.x, np.zeros_like(run.x)) for leaf in jax.tree.leaves(slopes(run.params, x)))
    return 0.0 if all(np.isfinite(leaf).all() for leaf in leaves) else np.inf


def _stacked(run: _Run) -> float:
    def layer(x, params):
        return _forward(run.layer, params, x).out, None

    second = jax.tree.map(lambda leaf: (0.9 * leaf).astype(leaf.dtype), run.params)
    both = jax.tree.map(lambda *leaves: np.stack(leaves), run.params, second)
    found, _ = jax.jit(lambda params, x: jax.lax.scan(layer, x, params))(both, run.x)
    return _error(found, run.apply(second, run.whole).out)


def _sharded(run: _Run) -> float:
    if jax.device_count() == 1:
        return 0.0
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with nn.logical_axis_rules((("batch", "data"),)):
        x = jax.device_put(run.x, NamedSharding(mesh, PartitionSpec("data")))
        params = jax.device_put(run.params, NamedSharding(mesh, PartitionSpec()))
        apply = jax.jit(lambda params, x: _forward(run.layer, params, x).out)  # not `run.apply`, which has no rules
        return _error(apply(params, x), run.whole)


LAWS = {
    "it is not causal: outputs change with later tokens": _causal,
    "in pieces, with a cache, it does not give what it gives in one pass": _in_pieces,
    "packed documents do not give what they give alone": _packed,
    "padded sequences, and the tokens after them, do not give what they give alone": _padded,
    "its gradients are not finite": _gradients,
    "stacked in a loop, two layers do not give what they give one after another": _stacked,
    "where two devices split the batch, it does not give what it gives on one": _sharded,
}


def _error(found, expected) -> float:
    """The largest difference over the largest value; NaN counts as infinite."""
    error = np.abs(np.asarray(found) - expected).max() / max(np.abs(expected).max(), np.finfo(np.float32).tiny)
    return float(np.where(np.isnan(error), np.inf, error))
