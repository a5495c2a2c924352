"""cuDNN is chosen where it honours every argument, and only there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab
from attnlab.masks import Causal, Padding, Segments, SlidingWindow
from attnlab.ops import cudnn
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
        ({"mask": SlidingWindow(10, 10)}, "of masks it supports"),
        ({"mask": Segments(np.zeros(200, np.int32))}, "of masks it supports"),
        ({"mask": Padding(7)}, "of masks it supports"),
        ({"score_mod": SoftCap(2.0)}, "no score mods"),
        ({"bias": np.zeros((200, 200), np.float32)}, "no bias"),
        ({"sinks": np.zeros(4, np.float32)}, "no sinks"),
        ({"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "dropout"),
        ({"kv_positions": np.arange(200, dtype=np.int32)}, "no positions"),
        ({"return_lse": True}, "lse has no gradient"),
        ({"block_sizes": (64, 64)}, "tile sizes"),
    ],
)
def test_unsupported_arguments_reject_cudnn(more, reason):
    given = {"q": Q, "k": K, "v": K} | more
    explained = attnlab.explain(given.pop("q"), given.pop("k"), given.pop("v"), **given)
    assert explained.backend == "blockwise" and reason in explained.rejected["cudnn"]
