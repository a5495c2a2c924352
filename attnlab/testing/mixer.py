"""Checks of a layer that has no specification: what every causal mixer must do, whatever its formula."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

LENGTH = 24  # tokens
PIECES = (1, 1, 5, 17)
DOCUMENTS = (7, 17)
# Of the largest output. Float32 sums in another order differ by some units of 6e-8 a layer; a token that a check must
# find changes outputs by its share of them.
TOLERANCE = 1e-4


def check_mixer(layer: nn.Module, empty_cache: Callable[[int], object], features: int, seed: int = 0) -> list[str]:
    """The faults of a layer of mixing, each a sentence; [] for none.

    The layer must be causal; must give in pieces, with a cache, what it gives in one pass; must give packed documents
    what they have alone; and must have finite gradients, also where its inputs are 0.

    Args:
      layer: called as `attnlab.nn.MultiHeadAttention` is.
      empty_cache: of a batch of some size, for 24 tokens.
      features: F, width of the inputs.
      seed: of parameters and inputs.

    >>> from attnlab.nn import GatedDeltaNet
    >>> layer = GatedDeltaNet(num_heads=2)
    >>> check_mixer(layer, lambda batch: layer.empty_cache(batch, 8), features=8)
    []
    """
    x = np.random.default_rng(seed).standard_normal((2, LENGTH, features)).astype(np.float32)
    params = jax.jit(layer.init)(jax.random.key(seed), x)
    apply = jax.jit(layer.apply)
    whole = _out(apply(params, x))
    if whole.shape != x.shape:
        return [f"its outputs have shape {list(whole.shape)}, expected {list(x.shape)}, as its inputs"]
    checks = {
        "it is not causal: outputs change with later tokens": _later_tokens,
        "in pieces, with a cache, it does not give what it gives in one pass": _pieces,
        "packed documents do not give what they give alone": _documents,
        "its gradients are not finite": _gradients,
    }
    faults = []
    for fault, check in checks.items():
        try:
            error = check(layer, apply, params, x, whole, empty_cache)
        except Exception as error:  # whatever a user's code raises
            faults.append(f"{fault} ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})")
            continue
        if not error <= TOLERANCE:
            faults.append(fault + (f" (by {error:.2g} of the largest)" if np.isfinite(error) else ""))
    return faults


def _later_tokens(layer, apply, params, x, whole, empty_cache) -> float:
    changed = x.copy()
    changed[:, LENGTH // 2 :] *= -2
    return _distance(_out(apply(params, changed))[:, : LENGTH // 2], whole[:, : LENGTH // 2])


def _pieces(layer, apply, params, x, whole, empty_cache) -> float:
    cache, outs, start = empty_cache(len(x)), [], 0
    for size in PIECES:
        out, cache, *_ = apply(params, x[:, start : start + size], cache=cache)
        outs.append(out)
        start += size
    return _distance(np.concatenate(outs, axis=1), whole)


def _documents(layer, apply, params, x, whole, empty_cache) -> float:
    first, _ = DOCUMENTS
    segments = np.repeat(np.arange(2, dtype=np.int32), DOCUMENTS)[None].repeat(len(x), axis=0)
    alone = [_out(apply(params, part)) for part in (x[:, :first], x[:, first:])]
    return _distance(_out(apply(params, x, segments=segments)), np.concatenate(alone, axis=1))


def _gradients(layer, apply, params, x, whole, empty_cache) -> float:
    def size(params, x):
        return (_out(layer.apply(params, x)) ** 2).sum()

    slopes = jax.jit(jax.grad(size, (0, 1)))
    finite = all(np.isfinite(leaf).all() for x in (x, np.zeros_like(x)) for leaf in jax.tree.leaves(slopes(params, x)))
    return 0.0 if finite else np.inf


def _out(result):
    return result[0] if isinstance(result, tuple) else result


def _distance(found, expected) -> float:
    """The largest difference over the largest value; NaN counts as infinite."""
    error = jnp.abs(found - expected).max() / jnp.maximum(jnp.abs(expected).max(), np.finfo(np.float32).tiny)
    return float(jnp.where(jnp.isnan(error), np.inf, error))
