"""Mosaic accepts what its kernels honour, "auto" chooses it on Hopper, and interpreted kernels match dense."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab
from attnlab.masks import BlockSparse, Causal, Dense, MaskFn, Padding, PrefixLM, Segments, SlidingWindow
from attnlab.ops import mosaic
from attnlab.score_mods import ALiBi, Forget, RelativeBias, ScoreFn, SoftCap
from tests.ops.mosaic_calls import Shape, assert_near, drawn, needs_jax_011, results, specified, with_nan
from tests.runs import REPOSITORY

RANDOM = np.random.default_rng(0)


# Refusals


def zeros(*shape):
    return np.zeros(shape, jnp.bfloat16)


Q, K = zeros(2, 256, 4, 64), zeros(2, 256, 2, 64)
IDS, WEIGHTS = jnp.arange(256), jnp.ones(4)
PAIRS = jnp.ones((256, 256))


def why_not(**more):
    args = {"q": Q, "k": K, "v": K} | more
    return attnlab.explain(args.pop("q"), args.pop("k"), args.pop("v"), platform="gpu", **args).rejected["mosaic"]


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
        (mask_fn(lambda i, j, x: x[i // 2] > 0, IDS), "indexed by something other than b, h, i, j"),
        (mask_fn(lambda i, j, x: x[j] > 0, IDS) | {"kv_positions": IDS, "q_positions": IDS}, "positions that are"),
        (mask_fn(lambda i, j, x: x[j] > 0, IDS[:200]), "indexed beyond its 200 entries"),
        (mask_fn(lambda i, j, x: x[i] > 0, IDS[:1]), "indexed beyond its 1 entries"),
        ({"mask": MaskFn(lambda b, h, i, j, x: x[h] > 0, IDS[:2])}, "indexed beyond its 2 entries"),
        (mask_fn(lambda i, j, x: x > i, IDS), "it uses an array as a whole"),
        (mask_fn(lambda i, j, x: x.sum() > i, IDS), "not elementwise"),
        (mask_fn(lambda i, j: IDS[i] > 0), "closes over an array"),
        ({"score_mod": RelativeBias(jnp.zeros((4, 3)))}, "score mods cannot run in a kernel"),
        (score_fn(lambda s, i, j: jnp.sin(s)), "it has sin"),
        (score_fn(lambda s, i, j, x: s + x[i, j], PAIRS), "indexed by pairs"),
        (score_fn(lambda s, i, j: s + WEIGHTS.sum()), "closes over an array"),
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
    assert "runs only if named" in why_not(**more)
    assert attnlab.explain(Q, K, K, impl="mosaic", platform="gpu", **more).backend == "mosaic"


def test_older_jax_rejects_mosaic(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert "needs JAX 0.11 or newer" in why_not(mask=Causal())


@needs_jax_011
@pytest.mark.parametrize("capability, backend", [("9.0", "mosaic"), ("10.0", "blockwise"), ("8.0", "blockwise")])
def test_auto_runs_mosaic_only_on_hopper(capability, backend, monkeypatch):
    gpu = type("Gpu", (), {"platform": "gpu", "compute_capability": capability})()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda *_: [gpu])
    explained = attnlab.explain(Q, K, K, Segments(IDS), platform="gpu")
    assert explained.backend == backend and (backend == "mosaic" or "Hopper" in explained.rejected["mosaic"])


def test_mosaic_does_not_run_on_cpus():
    explained = attnlab.explain(Q, K, K, Causal())
    assert explained.backend == "blockwise" and explained.rejected["mosaic"] == "it needs a gpu, and this is a cpu"
    with pytest.raises(ValueError, match="impl = 'mosaic' cannot run this: it needs a gpu, and this is a cpu"):
        attnlab.attention(Q, K, K, impl="mosaic")


# Numbers, in JAX's interpreter of GPU kernels


def integers(below, *shape):
    return RANDOM.integers(0, below, shape).astype(np.int32)


def mask_of_arrays_of_every_kind(b, h, i, j, every, ids, is_hidden):
    return ~is_hidden[j] | (ids[b, i] == ids[b, j]) & ((i - j) % every[h] == 0) | (ids[b, 3] > 0) & (abs(i - j) < 9)


def score_of_arrays_of_every_kind(s, b, h, i, j, by_head, by_key, by_key_and_head, by_query, number):
    signs = jnp.where(i > j, by_head[h], 0.5) * by_key_and_head[j, h]
    return s * jnp.tanh(number) + signs + by_query[b, i] - by_key[j] ** 2


def shifted(s, b, h, i, j):
    """Lower some rows by 1e9, which leaves no digit of their scores in float32, and some by 1e5; also round float64."""
    return (s - jnp.where(i % 4 == 0, 1e9, jnp.where(i % 4 == 2, 1e5, 0.0))).astype(jnp.float32).astype(s.dtype)


def low(s, b, h, i, j):
    """Give some rows only the low scores that others write for masked pairs; `ndim` and `size` are a scalar's."""
    lowest = jnp.where(i % 12 == 0, -1e10, jnp.where(i % 12 == 4, -1e30, -3e38)).astype(jnp.float32)
    return jnp.where((i > j) & (i % 4 != 0), s * (1 + jnp.ndim(s)) / jnp.size(s), lowest)


def every_scalar(b, h, i, j):
    return jnp.ndim(i) == 0


DOCUMENTS, IDS_OF_TWO = np.sort(integers(4, 2, 256)), integers(3, 2, 128)
BLOCKS, HIDDEN = RANDOM.random((1, 4, 3, 3)) < 0.4, RANDOM.random(128) < 0.8
BLOCKS[0, 0, 2:, :2] = True  # a tile fully visible to one head of a group and partly to the other
FORGOTTEN = np.cumsum(-0.1 * RANDOM.random((2, 256, 2)), axis=-2)
POSITIONS = {"q_positions": np.arange(100) + 450, "kv_positions": np.arange(600)}
ARRAYS = {"by_head": (4,), "by_key": (200,), "by_key_and_head": (200, 4), "by_query": (1, 200), "number": ()}

# By name: a shape, learned arrays, and a function from these to the call's terms. Tiles are 128 × 128.
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
    "causal documents, forget": (
        Shape(batch=2),
        {"sums": FORGOTTEN},
        lambda sums: {"mask": Segments(DOCUMENTS) & Causal(), "score_mod": Forget(sums)},
    ),
    "prefix, soft cap of an array, 128 features": (
        Shape(heads=1, features=128),
        {"cap": np.array(1.5)},
        lambda cap: {"mask": PrefixLM(np.array([200])), "score_mod": SoftCap(cap)},
    ),
    "algebra": (Shape(), {}, lambda: {"mask": ~Causal() | (SlidingWindow(3) & ~SlidingWindow(0))}),
    "blocks of heads, ragged": (
        Shape(queries=190, keys=190, heads=4, kv_heads=2),
        {},
        lambda: {"mask": BlockSparse(BLOCKS, 64) & Causal()},
    ),
    "mask function of arrays of every kind": (
        Shape(batch=2, queries=128, keys=128),
        {},
        lambda: {"mask": MaskFn(mask_of_arrays_of_every_kind, np.array([1, 3]), IDS_OF_TWO, HIDDEN)},
    ),
    "positions, ragged keys, alibi, sinks": (
        Shape(queries=100, keys=600),
        {"sinks": np.array([-1.0, 2.0]), "slopes": np.array([0.02, 0.1])},
        lambda sinks, slopes: {"mask": Causal(), "score_mod": ALiBi(slopes), "sinks": sinks} | POSITIONS,
    ),
    "score function of arrays of every kind, ragged": (
        Shape(queries=200, keys=200, heads=4, kv_heads=2),
        {name: RANDOM.normal(size=shape) for name, shape in ARRAYS.items()},
        lambda **arrays: {"score_mod": (SoftCap(3.0), ScoreFn(score_of_arrays_of_every_kind, *arrays.values()))},
    ),
    "rows of low scores, scalars": (
        Shape(),
        {"sinks": np.array([0.5, -np.inf])},
        lambda sinks: {"mask": Causal() & MaskFn(every_scalar), "score_mod": ScoreFn(low), "sinks": sinks},
    ),
    "rows shifted by a billion": (Shape(heads=1), {}, lambda: {"mask": Causal(), "score_mod": ScoreFn(shifted)}),
}


@functools.cache
def interpreted(name):
    """(The compiled function of a case, its arguments)."""
    shape, learned, terms = CASES[name]
    (q, k, v, learned), weights = drawn(shape, learned)
    named = terms(**learned)
    if "mask" in named:
        k, v = (with_nan(shape, x, **named) for x in (k, v))
    arguments = (q, k, v, learned), weights
    with mosaic.interpreted():
        return jax.jit(functools.partial(results, "mosaic", terms)).lower(*arguments).compile(), arguments


@needs_jax_011
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_equal_the_specification(name):
    run, arguments = interpreted(name)
    assert_near(run(*arguments), specified(functools.partial(results, "dense", CASES[name][2]), *arguments))


@needs_jax_011
def test_equal_inputs_give_equal_bits():
    run, arguments = interpreted("window, soft cap, sinks")
    jax.tree.map(np.testing.assert_array_equal, run(*arguments), run(*arguments))


@needs_jax_011
def test_vmap_over_some_arguments_equals_the_specification():
    (q, k, v, _), weights = drawn(Shape(batch=2), {})

    def run(impl, q, k, v, ids, slopes, sinks, weights):
        def terms(slopes, sinks):
            return {"mask": Segments(ids) & Causal(), "score_mod": ALiBi(slopes), "sinks": sinks}

        return results(impl, terms, (q, k, v, {"sinks": sinks, "slopes": slopes}), weights)

    def mapped(impl):
        return jax.vmap(functools.partial(run, impl), in_axes=(None, 0, None, 0, 0, None, 0))

    slopes, sinks = np.array([[0.1, 0.2], [0.0, 0.05]], np.float32), np.array([0.5, 2.0], np.float32)
    arguments = q[0], k, v[0], DOCUMENTS, slopes, sinks, weights
    with mosaic.interpreted():
        actual = jax.jit(mapped("mosaic"))(*arguments)
    assert_near(actual, specified(mapped("dense"), *arguments))


@needs_jax_011
def test_second_order_derivatives_raise_an_error_that_names_mosaic():
    def total(q):
        return attnlab.attention(q, K, K, impl="mosaic").astype(jnp.float32).sum()

    with mosaic.interpreted(), pytest.raises(ValueError, match="impl = 'mosaic' has no derivatives of second order"):
        jax.eval_shape(jax.grad(lambda q: jax.grad(total)(q).astype(jnp.float32).sum()), Q)


def test_recorded_hopper_run_passed_all_mosaic_checks():
    record = json.loads((REPOSITORY / "docs" / "benchmarks" / "nvidia-h100-80gb-hbm3.json").read_text())
    figures = record["benchmarks"]["gpu"]["checks"]["figures"]
    verdicts = [x for name, x in figures.items() if name.startswith("check_mosaic") and name.endswith("bfloat16")]
    assert record["machine"]["compute_capability"] == "9.0" and verdicts == ["ok"] * 10
