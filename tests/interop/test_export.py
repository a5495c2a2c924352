"""Exported steps equal the model's, even after serialization and for absent platforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from attnlab import config as configs
from attnlab.data.batches import Batch
from attnlab.interop.export import export_step
from attnlab.nn import GPT
from attnlab.training import optimizer as optimizers
from attnlab.training import state
from tests.parameters import parameters

PLATFORMS = ("cpu", "cuda", "tpu")
SIZES = {"vocab_size": 10, "num_layers": 1, "num_heads": 2, "width": 8, "context": 24}
MODEL = GPT.of(**SIZES)
PARAMS = parameters(MODEL, np.zeros((1, 1), np.int32))
TOKENS = np.random.default_rng(1).integers(0, 10, (2, 22), dtype=np.int32)


def through_bytes(exported):
    pytest.importorskip("flatbuffers")
    return export.deserialize(exported.serialize())


@pytest.mark.parametrize(
    "options",
    [
        {"attention": {"kv_heads": 1, "window": 5, "conv": 3}},
        pytest.param({"dtype": jnp.bfloat16, "attention": {"impl": "blockwise"}}, marks=pytest.mark.slow),
        pytest.param({"layers": "gated_delta"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_exported_prefill_and_steps_equal_model(options):
    model = GPT.of(**SIZES, **options)
    params = jax.tree.map(lambda x: x / 4, parameters(model, TOKENS[:, :1]))  # for logits below 1
    prefill, step = (through_bytes(export_step(model, params, batch=2, tokens=tokens)) for tokens in (18, 1))
    caches = jax.tree.map(np.zeros_like, tuple(map(tuple, model.init_caches(batch=2))))
    logits, caches = prefill.call(params, TOKENS[:, :18], caches)
    parts = [logits]
    for at in range(18, 22):
        logits, caches = step.call(params, TOKENS[:, at : at + 1], caches)
        parts.append(logits)
    expected = jax.jit(model.apply)(params, TOKENS)
    # Logits are below 1: float32, or about ten results in a row rounded to the 8 bits of bfloat16.
    atol = 10 * 2**-8 if model.dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, atol=atol)
    assert caches[0][2].tolist() == [22, 22]


@pytest.mark.parametrize("dtype, tokens", [(jnp.float32, 1), (jnp.bfloat16, 300)])  # 300 tokens run by tiles
def test_export_targets_every_platform_from_any(dtype, tokens):
    model = MODEL.replace(dtype=dtype)
    exported = export_step(model, jax.eval_shape(lambda: PARAMS), tokens=tokens, capacity=300)
    assert exported.platforms == PLATFORMS


def test_export_uses_cpu_barriers_on_cpu_only():
    model = MODEL.replace(dtype=jnp.bfloat16)
    exported = {name: export_step(model, PARAMS, platforms=name) for name in PLATFORMS}
    assert all(step.platforms == (name,) for name, step in exported.items())
    assert [name for name, step in exported.items() if "optimization_barrier" in step.mlir_module()] == ["cpu"]


def test_export_capacity_may_exceed_context():
    exported = export_step(MODEL, PARAMS, batch=3, tokens=2, capacity=40)
    assert exported.out_avals[1].shape == (3, 40, 2, 4)
    assert exported.out_avals[0].shape == (3, 2, 10)


def test_export_keeps_named_backend():
    models = {impl: GPT.of(**SIZES, attention={"impl": impl}) for impl in ("auto", "dense", "blockwise")}
    programs = {impl: export_step(model, PARAMS).mlir_module() for impl, model in models.items()}
    assert programs["auto"] == programs["dense"] != programs["blockwise"]


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"tokens": 8, "capacity": 4}, "8 tokens .* cache of 4"),
        ({"batch": 0}, "batch = 0"),
        ({"tokens": 0}, "tokens = 0"),
    ],
)
def test_impossible_export_size_raises_by_name(sizes, message):
    with pytest.raises(ValueError, match=message):
        export_step(MODEL, PARAMS, **sizes)


@pytest.mark.slow
def test_exported_training_step_equals_local_step():
    """The state is passed as a list of arrays, because JAX cannot serialize other libraries' types."""
    model = GPT.of(**SIZES, dtype=jnp.bfloat16, dropout=0.1, attention={"impl": "blockwise"})
    optimizer = optimizers.make(configs.Optimizer(), steps=10)
    before = state.create(model, optimizer, seed=0)
    batch = Batch(np.asarray(TOKENS), np.arange(2, dtype=np.int32), np.ones(2, np.float32))
    leaves, structure = jax.tree.flatten(before)

    @jax.jit
    def step(leaves, batch):
        after, metrics = state.train_step(model, optimizer, 0, 1, jax.tree.unflatten(structure, leaves), Batch(*batch))
        return jax.tree.leaves(after), metrics

    exported = through_bytes(export.export(step, platforms=PLATFORMS)(leaves, tuple(batch)))
    assert exported.platforms == PLATFORMS
    run, here = exported.call(leaves, tuple(batch)), step(leaves, tuple(batch))
    jax.tree.map(np.testing.assert_array_equal, run, here)
