"""The adapter to fa4-jax: its reference on CPUs, predicates run by CuTe on CPUs, kernels compiled: `make test-fa4`."""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab
from attnlab.masks import BlockSparse, Causal, Dense, MaskFn, Padding, PrefixLM, Segments, SlidingWindow
from attnlab.ops import fa4
from attnlab.ops.attention import make_call
from attnlab.score_mods import SoftCap
from tests.ops.cases import draw_mask
from tests.ops.mosaic_calls import Shape, assert_near, drawn, specified, with_nan
from tests.runs import REPOSITORY

pytest.importorskip("fa4_jax", reason="fa4-jax is not installed: make test-fa4")
import cutlass
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fa4-jax calls what CuTe will remove
SHAPE = Shape(batch=2, queries=96, keys=96, heads=4, kv_heads=2, features=64)
ARCHITECTURES = {80: "sm_80", 90: "sm_90a", 100: "sm_100a", 120: "sm_120a"}
RANDOM = np.random.default_rng(0)


def integers(below, *shape):
    return RANDOM.integers(0, below, shape).astype(np.int32)


def of_every_operation(b, h, i, j, every, bounds, ids, number):
    """Quotients and remainders of numbers of both signs, choices, extremes, floats and bits."""
    near = jax.lax.clamp(-2, jnp.minimum(i - j, 9) // every[h], jnp.maximum(3, b)) == jnp.sign(j - i)
    rows = jnp.where(i > 5, jax.lax.rem(i - j, every[h]), jax.lax.div(j - i, every[h])) != 0
    floats = (i.astype(jnp.float32) * number[()] / 7 < bounds[j]) ^ (abs(j - i) < 8) ^ ((j - i) ** 3 > 700)
    return ~near & (rows | floats) | ((i ^ j) & 3 == (ids[b, i] == ids[b, j]).astype(jnp.int32)) & ~(j & ~i == 4)


MASKS = {
    "none": None,
    "causal": Causal(),
    "window": SlidingWindow(7, 3),
    "causal documents": Causal() & Segments(np.sort(integers(4, 2, 96))),
    "padding with an empty example": Causal() & Padding(np.array([50, 0])),
    "prefixes": PrefixLM(np.array([20, 0])),
    "blocks by head": BlockSparse(RANDOM.random((2, 4, 2, 2)) < 0.6, 64),
    "algebra": ~Causal() | (SlidingWindow(3) & ~SlidingWindow(0)),
    "every operation": MaskFn(
        of_every_operation,
        np.array([1, 2, 3, 5], np.int32),
        RANDOM.normal(size=96) + 3,
        integers(3, 2, 96),
        np.array(1.5),
    ),
} | {f"drawn {n}": draw_mask(np.random.default_rng(n), (2,), 4, 96, 96, size=64, dense=False) for n in range(6)}


def results(impl, mask, arrays, weight):
    def run(q, k, v):
        return attnlab.attention(q, k, v, mask, impl=impl)

    out, pull = jax.vjp(run, *arrays)
    return {"out": out} | dict(zip("qkv", pull(weight.astype(out.dtype))))


@pytest.mark.parametrize("name", MASKS)
def test_outputs_and_gradients_are_those_of_the_specification_with_nan_in_hidden_keys(name):
    mask, ((q, k, v, _), (d_out, _)) = MASKS[name], drawn(SHAPE, {})
    if mask is not None:
        k, v = (with_nan(SHAPE, x, mask) for x in (k, v))
    actual = jax.jit(functools.partial(results, "fa4", mask))((q, k, v), d_out)
    assert_near(actual, specified(functools.partial(results, "dense", mask), (q, k, v), d_out))


def call_of(mask, shape=SHAPE):
    (q, k, v, _), _ = drawn(shape, {})
    return make_call(q, k, v, mask, None, None, None, None, 0.0, None, None, None)


@pytest.mark.parametrize("name", [name for name in MASKS if name not in ("none", "causal", "window")])
def test_predicate_compiled_by_cute_is_the_mask(name):
    call = call_of(MASKS[name])
    band, predicate, operands = fa4._predicate(call)
    if predicate is None:  # the kernels know this drawn mask
        return
    batch, heads, length = 2, call.num_heads, 96

    @cute.jit
    def evaluate(out: cute.Tensor, *arrays: cute.Tensor):
        for n in cutlass.range(batch * heads * length * length):
            b, h = n // (heads * length * length), n // (length * length) % heads
            q, k = n // length % length, n % length
            out[b, h, q, k] = cutlass.Int32(1 if predicate(arrays, b, h, q, k) else 0)

    out = np.zeros((batch, heads, length, length), np.int32)
    arrays = [from_dlpack(x) for x in (out, *map(np.array, operands))]
    cute.compile(evaluate, *arrays)(*arrays)
    distance = np.arange(length)[:, None] - np.arange(length)
    in_band = (band.left is None or distance <= band.left) & (band.right is None or -distance <= band.right)
    expected = call.mask.dense(length, length, num_heads=heads, batch=(batch,))
    np.testing.assert_array_equal(np.broadcast_to(expected, out.shape), (out != 0) & in_band)


COMPILE = """
import sys, jax, fa4_jax.kernels
from attnlab.ops import fa4
from tests.ops.test_fa4 import MASKS, call_of, results
fa4_jax.kernels._device_arch, fa4.platform_of = lambda: int(sys.argv[1]), lambda *arrays: "gpu"
for name in sys.argv[2:]:
    call = call_of(MASKS[name])
    step = jax.jit(lambda arrays, d_out: results("fa4", MASKS[name], arrays, d_out))
    text = step.trace((call.q, call.k, call.v), call.q).lower(lowering_platforms=("cuda",)).as_text()
    print(*(kernel in text for kernel in ("cutejax.fa4_fwd", "cutejax.fa4_bwd_gqa")))
"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_with_their_gradients(architecture):
    environment = os.environ | {"CUTE_DSL_ARCH": ARCHITECTURES[architecture]}  # which a process reads once
    names = ["causal", "causal documents", "every operation"]
    names = names[:1] if architecture == 100 else names  # with predicates, those for B200 ask the driver for its size
    command = [sys.executable, "-c", COMPILE, str(architecture), *names]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.stdout == len(names) * "True True\n", done.stdout + done.stderr


def test_masks_of_other_arrays_share_a_program():
    first, again = (fa4._predicate(call_of(Causal() & Segments(integers(4, 2, 96))))[1] for _ in range(2))
    other = fa4._predicate(call_of(Causal() | Segments(integers(4, 2, 96))))[1]
    assert first == again and hash(first) == hash(again) and first != other


Q = np.zeros((2, 96, 4, 64), jnp.bfloat16)


@pytest.mark.parametrize(
    "more, reason",
    [
        ({"q": Q.astype(np.float32), "k": Q.astype(np.float32), "v": Q.astype(np.float32)}, "no float32"),
        ({"q": Q.astype(np.float16)}, "one type"),
        ({"v": Q[..., :32]}, "heads of 64 and 32 features"),
        ({"mask": Dense(np.eye(96, dtype=bool))}, "mask cannot run in a kernel: an array of all pairs"),
        ({"mask": MaskFn(lambda b, h, i, j: jnp.sin(i - j) > 0)}, "mask cannot run in a kernel: a function .* sin"),
        (
            {"mask": MaskFn(lambda b, h, i, j: jnp.exp2(i - j) > 0.1)},
            "mask cannot run in a kernel: a function has exp2",
        ),
        ({"mask": MaskFn(lambda b, h, i, j: i.astype(jnp.int8) > j)}, "a function computes in int8"),
        ({"score_mod": SoftCap(2.0)}, "no score mods"),
        ({"bias": np.zeros((96, 96), np.float32)}, "no bias"),
        ({"sinks": np.zeros(4, np.float32)}, "no sinks"),
        ({"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "no dropout"),
        ({"scale": jnp.float32(0.1)}, "static scale"),
        ({"block_sizes": (64, 64)}, "tile sizes"),
        ({"return_lse": True}, "lse has no gradient"),
    ],
)
def test_unsupported_arguments_are_refused_by_name(more, reason):
    arguments = {"q": Q, "k": Q, "v": Q} | more
    with pytest.raises(ValueError, match=f"impl = 'fa4' cannot run this: .*{reason}"):
        attnlab.attention(**arguments, impl="fa4")


def test_auto_never_chooses_it():
    assert "runs only if named" in attnlab.explain(Q, Q, Q, Causal(), platform="gpu").rejected["fa4"]


def test_keys_of_other_positions_are_masked_by_them():
    shape = Shape(batch=1, queries=40, keys=96, heads=2, kv_heads=2)
    (q, k, v, _), _ = drawn(shape, {})
    positions = {"q_positions": np.arange(40) + 30, "kv_positions": np.arange(96)}
    out, expected = (attnlab.attention(q, k, v, Causal(), impl=impl, **positions) for impl in ("fa4", "dense"))
    assert_near({"out": out}, {"out": np.float64(np.asarray(expected, np.float32))})
