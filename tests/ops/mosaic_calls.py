"""Calls of the Mosaic kernels in JAX's interpreter of GPU kernels, compared with dense attention."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab

needs_jax_011 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic GPU's kernels need JAX 0.11")


class Shape(NamedTuple):
    batch: int = 1
    queries: int = 256
    keys: int = 256
    heads: int = 2
    kv_heads: int = 1
    features: int = 64


def drawn(shape: Shape, learned: dict):
    """(q, k, v, learned arrays), and cotangents of out and lse. The cotangent of lse is positive, so that sums over
    rows do not cancel."""
    rng = np.random.default_rng(1)
    lengths = (shape.queries, shape.heads), *[(shape.keys, shape.kv_heads)] * 2, (shape.queries, shape.heads)
    q, k, v, d_out = (rng.normal(size=(shape.batch, *x, shape.features)).astype(jnp.bfloat16) for x in lengths)
    d_lse = 1 + rng.random((shape.batch, *lengths[0])).astype(np.float32)
    return (q, k, v, {name: x.astype(np.float32) for name, x in learned.items()}), (d_out, d_lse)


def with_nan(shape: Shape, x, mask, **terms):
    """x `[B, Tk, Hk, D]`, with NaN for keys that are hidden from all queries."""
    lead, positions = (shape.batch, shape.heads), {name: terms[name] for name in terms if name.endswith("positions")}
    shown = mask.dense(shape.queries, shape.keys, num_heads=shape.heads, batch=lead[:1], **positions)
    shown = np.broadcast_to(shown, (*lead, shape.queries, shape.keys)).any(-2)
    shown = shown.reshape(shape.batch, shape.kv_heads, -1, shape.keys).any(2).swapaxes(1, 2)
    return np.where(shown[..., None], x, np.asarray(np.nan, x.dtype))


def results(impl, terms, arrays, weights):
    """out, lse and the gradients of all arrays, by name."""

    def run(q, k, v, learned):
        return attnlab.attention(q, k, v, impl=impl, return_lse=True, **terms(**learned))

    (out, lse), pull = jax.vjp(run, *arrays)
    d_out, d_lse = (weight.astype(x.dtype) for weight, x in zip(weights, (out, lse)))
    q, k, v, learned = pull((d_out, jnp.where(jnp.isfinite(lse), d_lse, 0)))
    return {"out": out, "lse": lse, "q": q, "k": k, "v": v} | learned


def specified(run, *arguments):
    """The results of dense attention in float64."""
    with jax.enable_x64(True):
        widened = jax.tree.map(lambda x: x if x.dtype == np.int32 else np.asarray(x, np.float64), arguments)
        return jax.jit(run)(*widened)


def assert_near(actual, expected, bound=2**-6):
    """Rounding weights, outputs and score gradients to bfloat16 errs by at most 2^-9, and about 2^-10 on average.
    Relative errors are 1e-3 to 3e-3, and 1e-2 in rows with few keys, where do·v and do·o cancel. A missing key of 256
    would change a row by about 3e-2 of its size plus the mean size."""
    for name, x in expected.items():
        x, y = np.asarray(x), np.asarray(actual[name], np.float64)
        if name == "lse":
            np.testing.assert_allclose(y, x, rtol=1e-6, atol=1e-5)
            continue
        size, error = (np.linalg.norm(z, axis=-1 if x.ndim == 4 else None) for z in (x, x - y))
        allowed = bound * (size + np.sqrt((size**2).mean()))  # 0 where nothing is visible
        assert (error <= allowed).all(), f"{name} errs by up to {error.max():.1e}"
