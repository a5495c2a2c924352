"""Mosaic takes what its kernels honour, and only when it is named; in JAX's interpreter its numbers are dense's."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab
from attnlab.masks import BlockSparse, Causal, Dense, MaskFn, Padding, PrefixLM, Segments, SlidingWindow
from attnlab.ops import mosaic
from attnlab.score_mods import ALiBi, Forget, RelativeBias, ScoreFn, SoftCap

needs_jax_011 = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic GPU's kernels need JAX 0.11")
RANDOM = np.random.default_rng(0)


# Refusals


def zeros(*shape):
    return np.zeros(shape, jnp.bfloat16)


Q, K = zeros(2, 256, 4, 64), zeros(2, 256, 2, 64)
IDS, WEIGHTS = jnp.arange(256), jnp.ones(4)
PAIRS = jnp.ones((256, 256))


def why_not(**more):
    given = {"q": Q, "k": K, "v": K} | more
    return attnlab.explain(given.pop("q"), given.pop("k"), given.pop("v"), platform="gpu", **given).rejected["mosaic"]


def mask_fn(fn, *arrays):
    return {"mask": MaskFn(lambda b, h, i, j, *x: fn(i, j, *x), *arrays)}


def score_fn(fn, *arrays):
    return {"score_mod": ScoreFn(lambda s, b, h, i, j, *x: fn(s, i, j, *x), *arrays)}


@needs_jax_011
@pytest.mark.parametrize(
    "more, reason",
    [
        ({"q": Q.astype(np.float32), "k": K.astype(np.float32), "v": K.astype(np.float32)}, "no float32"),
        ({"q": Q.astype(np.float16)}, "no float16"),
        ({"k": K.astype(np.float32)}, "one type"),
        ({"v": K[..., :32]}, "heads of 64 and 32 features"),
        ({"q": Q[..., :32], "k": K[..., :32], "v": K[..., :32]}, "heads of 32 and 32 features"),
        ({"bias": np.zeros((256, 256), np.float32)}, "no bias"),
        ({"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "no dropout"),
        ({"scale": jnp.float32(0.1)}, "static scale"),
        ({"block_sizes": (128, 128)}, "tile sizes"),
        ({"k": K[:, :0], "v": K[:, :0], "q_positions": IDS, "kv_positions": IDS[:0]}, "length 0"),
        ({"mask": Dense(np.eye(256, dtype=bool))}, "mask cannot run in a kernel: an array of all pairs"),
        ({"mask": Causal() | Dense(np.eye(256, dtype=bool))}, "an array of all pairs"),
        ({"mask": BlockSparse(np.eye(8, dtype=bool), 32)}, "blocks of 32: their size must be a multiple of 64"),
        (mask_fn(lambda i, j, x: x[i, j] > 0, PAIRS), "indexed by pairs"),
        (mask_fn(lambda i, j, x: x[i // 2] > 0, IDS), "indexed by other than b, h, i, j"),
        (mask_fn(lambda i, j, x: x[j] > 0, IDS) | {"kv_positions": IDS, "q_positions": IDS}, "positions that the call"),
        (mask_fn(lambda i, j: IDS[i] > 0), "not elementwise"),
        (mask_fn(lambda i, j, x: x.sum() > i, IDS), "not elementwise"),
        ({"score_mod": RelativeBias(jnp.zeros((4, 3)))}, "score mods cannot run in a kernel"),
        (score_fn(lambda s, i, j: jnp.sin(s)), "it has sin"),
        (score_fn(lambda s, i, j, x: s + x[i, j], PAIRS), "indexed by pairs"),
        (score_fn(lambda s, i, j: s + WEIGHTS.sum()), "not elementwise"),
    ],
)
def test_unsupported_arguments_reject_mosaic(more, reason):
    assert reason in why_not(**more)


@needs_jax_011
@pytest.mark.parametrize(
    "more",
    [
        {"mask": Causal() & Segments(IDS) | ~Padding(7)},
        {"mask": BlockSparse(np.eye(4, dtype=bool), 64), "sinks": WEIGHTS, "scale": -0.1, "return_lse": True},
        mask_fn(lambda i, j, x: x[i] == x[j], IDS) | score_fn(lambda s, i, j, x: jnp.tanh(s) * x, jnp.ones(())),
        {"score_mod": (ALiBi(WEIGHTS), SoftCap(2.0), Forget(jnp.zeros((256, 4))))},
    ],
)
def test_supported_calls_run_on_a_gpu_when_mosaic_is_named(more):
    assert "runs when it is named" in why_not(**more) and why_not(impl="cudnn") != why_not(**more)
    assert attnlab.explain(Q, K, K, impl="mosaic", platform="gpu", **more).backend == "mosaic"


def test_older_jax_rejects_mosaic(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert "needs JAX 0.11 or newer" in why_not(mask=Causal())


@needs_jax_011
@pytest.mark.parametrize("capability, reason", [("9.0", "runs when it is named"), ("10.0", "needs a Hopper GPU")])
def test_another_gpu_than_hopper_rejects_mosaic(capability, reason, monkeypatch):
    gpu = type("Gpu", (), {"platform": "gpu", "compute_capability": capability})()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda *_: [gpu])
    assert reason in why_not(mask=Causal())


def test_cpus_run_no_mosaic():
    explained = attnlab.explain(Q, K, K, Causal())
    assert explained.backend == "blockwise" and explained.rejected["mosaic"] == "it needs a gpu, and this is a cpu"
    with pytest.raises(ValueError, match="impl = 'mosaic' cannot run this: it needs a gpu, and this is a cpu"):
        attnlab.attention(Q, K, K, impl="mosaic")


# Numbers, in the interpreter


class Shape(NamedTuple):
    batch: int = 1
    queries: int = 256
    keys: int = 256
    heads: int = 2
    kv_heads: int = 1
    features: int = 64


def normal(*shape, scale=1.0):
    return scale * RANDOM.normal(size=shape)


def falling(*shape):
    """Running sums of log forget gates `[..., T, H]`."""
    return np.cumsum(-0.1 * RANDOM.random(shape), axis=-2)


IDS_OF_TWO = np.sort(RANDOM.integers(0, 4, (2, 256)), axis=-1).astype(np.int32)
UNSORTED = RANDOM.integers(0, 3, (2, 256)).astype(np.int32)
BLOCKS = RANDOM.random((1, 4, 4, 4)) < 0.4
SHIFTED = ScoreFn(lambda s, b, h, i, j: jnp.where(i % 3 == 0, (s - 1e9).astype(jnp.float32).astype(s.dtype), s))
OF_ALL = ScoreFn(
    lambda s, b, h, i, j, x, y, z, w: s * (1 + 0.1 * jnp.tanh(w)) + x[h] * jnp.cos(0.0) * (i > j) + y[b, i] - z[j] ** 2,
)

# By name: a shape, arrays that have gradients, and the terms of the call that they make.
CASES = {
    "causal, 128 features": (Shape(queries=384, keys=384, heads=1, features=128), {}, lambda: {"mask": Causal()}),
    "window, soft cap, sinks": (
        Shape(),
        {"sinks": np.array([0.5, 3.0])},
        lambda sinks: {"mask": SlidingWindow(60, 3), "score_mod": SoftCap(2.0), "sinks": sinks},
    ),
    "no mask, negative scale": (Shape(queries=128, keys=128, heads=1), {}, lambda: {"scale": -0.2}),
    "causal padding with an empty example, alibi": (
        Shape(batch=2, heads=1),
        {"slopes": np.array([0.05])},
        lambda slopes: {"mask": Causal() & Padding(np.array([0, 77])), "score_mod": ALiBi(slopes)},
    ),
    "causal documents, forget, grouped heads": (
        Shape(batch=2),
        {"sums": falling(2, 256, 2)},
        lambda sums: {"mask": Segments(IDS_OF_TWO) & Causal(), "score_mod": Forget(sums)},
    ),
    "prefix, soft cap of an array, 128 features": (
        Shape(batch=2, heads=1, features=128),
        {"cap": np.array(1.5)},
        lambda cap: {"mask": PrefixLM(np.array([3, 200])), "score_mod": SoftCap(cap)},
    ),
    "algebra, ragged": (
        Shape(queries=200, keys=200),
        {},
        lambda: {"mask": ~Causal() | (SlidingWindow(3) & ~SlidingWindow(0))},
    ),
    "blocks of heads, grouped heads": (
        Shape(heads=4, kv_heads=2),
        {},
        lambda: {"mask": BlockSparse(BLOCKS, 64) & Causal()},
    ),
    "function of heads and ids": (
        Shape(batch=2),
        {},
        lambda: {
            "mask": MaskFn(
                lambda b, h, i, j, s, ids: ((i - j) % s[h] == 0) & (ids[b, i] == ids[b, j]),
                np.array([1, 3]),
                UNSORTED,
            )
        },
    ),
    "positions, ragged, alibi, sinks": (
        Shape(queries=100, keys=600),
        {"slopes": np.array([0.02, 0.1]), "sinks": np.array([-1.0, 2.0])},
        lambda slopes, sinks: {
            "mask": Causal(),
            "score_mod": ALiBi(slopes),
            "sinks": sinks,
            "q_positions": np.arange(100) + 450,
            "kv_positions": np.arange(600),
        },
    ),
    "score function of arrays of every kind": (
        Shape(heads=2, kv_heads=2, batch=2, queries=128, keys=128),
        {"x": normal(2), "y": normal(2, 128), "z": normal(128), "w": np.array(0.5)},
        lambda *arrays: {"score_mod": (SoftCap(3.0), ScoreFn(OF_ALL.fn, *arrays))},
    ),
    "rows shifted by a billion": (
        Shape(heads=1),
        {},
        lambda: {"mask": Causal(), "score_mod": SHIFTED},
    ),
}


def drawn(shape, learned, dtype=np.float64):
    """(q, k, v, arrays that have gradients), and weights of out and lse; q, k, v and the first are of bfloat16."""
    rng = np.random.default_rng(1)
    batch, queries, keys, heads, kv_heads, features = shape
    shapes = (queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads)
    q, k, v, d_out = (rng.normal(size=(batch, *x, features)).astype(jnp.bfloat16) for x in shapes)
    d_lse = rng.normal(size=(batch, queries, heads)).astype(np.float32)
    return (q, k, v, {name: x.astype(np.float32) for name, x in learned.items()}), (d_out, d_lse)


def results(impl, terms, arrays, weights):
    """out, lse and the gradients of all arrays, by name."""

    def run(q, k, v, learned):
        return attnlab.attention(q, k, v, impl=impl, return_lse=True, **terms(*learned.values()))

    (out, lse), pull = jax.vjp(run, *arrays)
    d_out, d_lse = (w.astype(x.dtype) for w, x in zip(weights, (out, lse)))
    q, k, v, learned = pull((d_out, jnp.where(jnp.isfinite(lse), d_lse, 0)))
    return {"out": out, "lse": lse, "q": q, "k": k, "v": v} | learned


@functools.cache
def interpreted_case(name):
    """(the compiled function of a case in the interpreter, its arguments)."""
    shape, learned, terms = CASES[name]
    arrays, weights = drawn(shape, learned)
    with mosaic.interpreted():
        return jax.jit(functools.partial(results, "mosaic", terms)).lower(arrays, weights).compile(), (arrays, weights)


def assert_near(found, expected):
    for name, x in expected.items():
        y = np.asarray(found[name], np.float64)
        print(name, np.linalg.norm(y-x)/np.linalg.norm(x))
    

@needs_jax_011
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_in_the_interpreter_equal_the_specification(name, float64):
    with jax.enable_x64(False):
        run, (arrays, weights) = interpreted_case(name)
        found = run(arrays, weights)
    exact = jax.tree.map(lambda x: np.asarray(x, np.float64), (arrays, weights))
    assert_near(found, jax.jit(functools.partial(results, "dense", CASES[name][2]))(*exact))
