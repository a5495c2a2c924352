"""The TPU kernel: lowered for TPUs on this machine, and interpreted to check the adapter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import attnlab
from attnlab.masks import Causal, Padding, Segments, SlidingWindow
from attnlab.score_mods import ALiBi, SoftCap, alibi_slopes
from tests.ops.cases import slow

IDS = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (2, 256)), axis=-1), jnp.int32)
CALLS = {
    "full": {},
    "causal, tiles": {"mask": Causal(), "block_sizes": (256, 128)},
    "window, sinks": {"mask": SlidingWindow(100, 20), "sinks": np.arange(4, dtype=np.float32)},
    "segments, scale, cap": {"mask": Causal() & Segments(IDS), "scale": 0.3, "score_mod": SoftCap(5.0)},
    "shared segments": {"mask": Segments(IDS[0]) & Causal() & SlidingWindow(64)},
}


@pytest.fixture
def interpreted(monkeypatch):
    kernel = functools.partial(splash_attention_kernel.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_attention_kernel, "make_splash_mha", kernel)


def arguments(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=(2, 256, heads, 128)).astype(dtype) for heads in (4, 2, 2))


QUICK = {"window, sinks": jnp.float32, "segments, scale, cap": jnp.bfloat16}


@pytest.mark.parametrize(
    "call, dtype",
    [
        *QUICK.items(),
        slow("full", jnp.bfloat16),
        slow("causal, tiles", jnp.float32),
        slow("shared segments", jnp.bfloat16),
    ],
)
def test_splash_lowers_for_tpus_forward_and_backward(call, dtype):
    def attend(q, k, v):
        return attnlab.attention(q, k, v, impl="splash", **CALLS[call])

    def total(q, k, v):
        return attend(q, k, v).astype(jnp.float32).sum()

    for run, kernels in ((attend, 1), (jax.grad(total, argnums=(0, 1, 2)), 3)):
        exported = export.export(jax.jit(run), platforms=["tpu"])(*arguments(dtype))
        assert exported.mlir_module().count("tpu_custom_call") == kernels


@pytest.mark.parametrize("call", ["segments, scale, cap", slow("window, sinks")])
def test_interpreted_splash_equals_dense(call, interpreted):
    base_options = {name: x for name, x in CALLS[call].items() if name != "block_sizes"}

    def results(**how):
        def total(q, k, v, sinks):
            out = attnlab.attention(q, k, v, **base_options | how | ({} if sinks is None else {"sinks": sinks}))
            return (out**2).sum(), out

        return jax.jit(jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True))(*arguments(), base_options.get("sinks"))

    expected, actual = results(impl="dense"), results(impl="splash", **CALLS[call])
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        # Sums of up to 256 products of 128 terms each, in float32: about a hundred units of 6e-8.
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)


@pytest.mark.parametrize(
    "more, reason",
    [
        ({"mask": Padding(7)}, "the masks it supports"),
        ({"mask": Segments(IDS) & Segments(IDS[0])}, "the masks it supports"),
        ({"score_mod": ALiBi(alibi_slopes(4))}, "one SoftCap"),
        ({"score_mod": SoftCap(jnp.array(3.0))}, "one SoftCap"),
        ({"bias": np.zeros((256, 256), np.float32)}, "no bias"),
        ({"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "no dropout"),
        ({"q_positions": np.arange(256, dtype=np.int32)}, "no positions"),
        ({"return_lse": True}, "lse has no gradient"),
        ({"block_sizes": (64, 64)}, r"tiles of \(64, 64\)"),
        (dict.fromkeys("qkv", np.zeros((200, 4, 128), np.float32)), r"lengths \(200, 200\) are not multiples"),
        (dict.fromkeys("qkv", np.zeros((256, 4, 128), np.float16)), "no float16"),
    ],
)
def test_unsupported_arguments_reject_splash(more, reason, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    call = dict(zip("qkv", arguments())) | more
    explained = attnlab.explain(**call)
    assert explained.backend != "splash" and "splash" in explained.rejected
    with pytest.raises(ValueError, match=f"impl = 'splash' .*{reason}"):
        attnlab.attention(impl="splash", **call)


@pytest.mark.parametrize("call", CALLS)
def test_supported_calls_choose_splash_on_a_tpu(call, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert attnlab.explain(*arguments(), **CALLS[call]).backend == "splash"


@pytest.mark.parametrize("kind", [slow(AxisType.Auto), AxisType.Explicit])
def test_interpreted_splash_on_a_mesh_equals_dense_and_moves_nothing(kind, interpreted):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(kind,) * 2)
    split = NamedSharding(mesh, P("data", None, "tensor"))
    q, k, v = (jax.device_put(x, split) for x in arguments())
    terms = {"mask": Causal() & Segments(IDS), "sinks": np.arange(4, dtype=np.float32)}
    splash = jax.jit(functools.partial(attnlab.attention, impl="splash", **terms))
    out = splash(q, k, v)
    assert out.sharding.is_equivalent_to(split, out.ndim)
    assert "all-" not in splash.lower(q, k, v).compile().as_text()
    expected = jax.jit(functools.partial(attnlab.attention, impl="dense", **terms))(*arguments())
    assert np.linalg.norm(out - expected) <= 1e-5 * np.linalg.norm(expected)  # as above


def test_interpreted_splash_on_explicit_axes_has_the_types_of_dense(interpreted):
    for sizes, spec in (
        ((1, 4), P("data", None, "tensor")),  # four heads of queries, two of keys
        ((2, 2), P("data", "tensor")),  # the sequence
    ):
        mesh = jax.make_mesh(sizes, ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2)
        q = jax.device_put(arguments()[0], NamedSharding(mesh, spec))
        k, v = (jax.device_put(x, NamedSharding(mesh, P("data"))) for x in arguments()[1:])
        outs = []
        for impl in ("splash", "dense"):
            call = functools.partial(attnlab.attention, mask=Causal(), impl=impl)
            outs.append(jax.jit(call)(q, k, v))
        assert jax.typeof(outs[0]) == jax.typeof(outs[1])
        assert np.linalg.norm(outs[0] - outs[1]) <= 1e-5 * np.linalg.norm(outs[1])  # as above


def test_checked_shard_map_rejects_splash_in_one_line():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    call = jax.shard_map(
        functools.partial(attnlab.attention, impl="splash"), mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )
    with pytest.raises(ValueError, match="within shard_map it needs check_vma=False"):
        jax.eval_shape(call, *arguments())


def test_explain_answers_for_the_requested_platform():
    q, k, v = arguments(jnp.bfloat16)
    answers = {
        platform: attnlab.explain(q, k, v, Causal(), platform=platform).backend for platform in ("cpu", "gpu", "tpu")
    }
    assert answers == {"cpu": "blockwise", "gpu": "cudnn", "tpu": "splash"}
    with pytest.raises(ValueError, match="platform = 'npu' .*'tpu'"):
        attnlab.explain(q, k, v, platform="npu")
