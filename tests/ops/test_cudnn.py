"""cuDNN is chosen only if it honours every argument, and the code around its kernel is right."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab
from attnlab.masks import Causal, Padding, Segments, SlidingWindow
from attnlab.ops import cudnn, dense
from attnlab.ops.attention import make_call
from attnlab.score_mods import SoftCap

Q, K = np.zeros((2, 200, 4, 64), jnp.bfloat16), np.zeros((2, 200, 2, 64), jnp.bfloat16)


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cudnn, "_is_there", lambda: True)


@pytest.mark.parametrize("mask", [None, Causal(), SlidingWindow(left=10), Causal() & SlidingWindow(10, 10)])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_supported_calls_choose_cudnn_on_a_gpu(mask, dtype):
    assert attnlab.explain(Q.astype(dtype), K.astype(dtype), K.astype(dtype), mask, scale=0.2).backend == "cudnn"


@pytest.mark.parametrize(
    "more, reason",
    [
        ({"q": Q.astype(jnp.float32)}, "no float32"),
        ({"q": Q.astype(jnp.float16)}, "one type"),
        ({"v": K[..., :32]}, "heads of 64 and 32 features"),
        ({"q": Q[..., :60], "k": K[..., :60], "v": K[..., :60]}, "heads of 60 and 60 features"),
        ({"mask": SlidingWindow(10, 10)}, "the masks it supports"),
        ({"mask": Segments(np.zeros(200, np.int32))}, "the masks it supports"),
        ({"mask": ~Padding(7)}, "the masks it supports"),
        ({"mask": Causal() | Padding(7)}, "the masks it supports"),
        ({"mask": SlidingWindow(left=10) & Padding(7)}, "no SlidingWindow with Padding"),
        ({"q": Q[:, :199], "mask": Padding(7)}, "with Padding, lengths (199, 200) must be even"),
        ({"score_mod": SoftCap(2.0)}, "no score mods"),
        ({"bias": np.zeros((200, 200), np.float32)}, "the gradient of a bias came out wrong"),
        ({"sinks": np.zeros(4, np.float32)}, "no sinks"),
        ({"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "dropout"),
        ({"kv_positions": np.arange(200, dtype=np.int32)}, "no positions"),
        ({"return_lse": True}, "lse has no gradient"),
        ({"block_sizes": (64, 64)}, "tile sizes"),
    ],
)
def test_unsupported_arguments_reject_cudnn(more, reason):
    arguments = {"q": Q, "k": K, "v": K} | more
    explained = attnlab.explain(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
    assert explained.backend == "blockwise" and reason in explained.rejected["cudnn"]


LENGTHS = np.array([7, 0])
NEW = {"padding": {"mask": Padding(LENGTHS)}, "causal padding": {"mask": Padding(5) & (Causal() & Padding(LENGTHS))}}


@pytest.mark.parametrize("terms", NEW.values(), ids=NEW)
def test_cases_untested_on_a_gpu_run_only_when_cudnn_is_named(terms):
    q, k = np.zeros((2, 256, 4, 64), jnp.bfloat16), np.zeros((2, 256, 2, 64), jnp.bfloat16)
    chosen = attnlab.explain(q, k, k, **terms)
    assert chosen.backend == "blockwise" and "runs only if named" in chosen.rejected["cudnn"]
    for impl in ("cudnn", ("cudnn", "blockwise"), ("cudnn", "auto")):
        assert attnlab.explain(q, k, k, impl=impl, **terms).backend == "cudnn"


def test_heads_over_128_features_need_hopper_and_cudnn_by_name(monkeypatch):
    wide = np.zeros((2, 256, 2, 256), jnp.bfloat16)
    assert "multiples of 8 up to 128" in attnlab.explain(wide, wide, wide).rejected["cudnn"]
    monkeypatch.setattr(cudnn, "is_hopper", lambda *arrays: True)
    chosen = attnlab.explain(wide, wide, wide)
    assert chosen.backend == "blockwise" and "more than 128 features: it runs only if named" in chosen.rejected["cudnn"]
    assert attnlab.explain(wide, wide, wide, impl="cudnn").backend == "cudnn"


@pytest.fixture
def by_xla(monkeypatch):
    """Replace the kernel with JAX's XLA implementation, so that this CPU runs the code around it."""
    attend = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *args, **options: attend(*args, **options | {"implementation": "xla"})
    )


def outs_and_gradients(backend, arrays, mask):
    def total(arrays):
        out, _ = backend.attend(make_call(*arrays, mask, None, None, 0.3, None, 0.0, None, None, None))
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

    return jax.jit(jax.grad(total, has_aux=True))(arrays)


@pytest.mark.parametrize("terms", ["padding", "causal padding"])
def test_padding_of_nan_keys_and_of_all_keys_equals_dense(terms, by_xla):
    random, mask = np.random.default_rng(0), NEW[terms]["mask"]
    arrays = [random.normal(size=(2, 12, heads, 8)).astype(np.float32) for heads in (4, 2, 2)]
    for x in arrays[1:3]:
        x[0, 7:], x[1] = np.nan, np.nan
    gradients, out = outs_and_gradients(cudnn, arrays, mask)
    expected = outs_and_gradients(dense, arrays, mask)
    assert not out[1].any() and not any(x[1].any() for x in gradients[:3])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), (gradients, out), expected)
