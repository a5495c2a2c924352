"""Axis-name rules shard parameters and activations; without rules nothing is constrained."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attnlab.nn import GPT, sharding, stack_layers
from attnlab.nn.config import KINDS
from tests.parameters import parameters

SIZES = {"vocab_size": 40, "num_layers": 2, "num_heads": 4, "width": 16, "context": 12}
MODEL = GPT.of(**SIZES, use_bias=True, attention={"kv_heads": 2})
RULES = (("batch", "data"), ("embed", "data"), ("heads", "tensor"), ("kv_heads", "tensor"), ("mlp", "tensor"))


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize("kind", [name for name in KINDS if name not in ("attention", "local", "forget")])
def test_matrices_of_mixers_are_split_along_embed_and_heads(kind):
    model = GPT.of(**SIZES | {"num_layers": 1}, layers=kind)
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 2), np.int32))["params"]
    for params in (shapes, stack_layers(shapes)):
        for path, x in jax.tree_util.tree_leaves_with_path(params):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            names = sharding.parameter_names(name, x.ndim)
            assert len(names) == x.ndim
            # Exceptions: projections to one column per head, low-rank factors and short convolutions.
            if path[-1].key == "kernel" and not re.search(r"/(a|b|\w+_up|\w+_down|\w+_conv)/kernel", name):
                assert "embed" in names, name
            by_head = r"/(query|key|value|gate|out|a|b|decay_up|\w+_conv)/kernel|/(A_log|dt_bias|D)$"
            if "attention" in name and re.search(by_head, name):
                (at,) = (n for n, axis in enumerate(names) if axis in ("heads", "kv_heads"))
                assert x.shape[at] % 2 == 0, name  # differential has half as many values, delta_product twice as many


def test_every_matrix_and_bias_of_gpt_has_axis_names():
    params = jax.eval_shape(MODEL.init, jax.random.key(0), np.zeros((1, 2), np.int32))["params"]
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        names = sharding.parameter_names(name, x.ndim)
        assert len(names) == x.ndim
        assert ("embed" in names) == (path[-1].key in ("kernel", "embedding")), name


def test_user_jit_with_own_rules_splits_heads_and_matches_one_device(mesh):
    tokens = np.arange(24).reshape(2, 12)
    params = parameters(MODEL, tokens)

    def logits(params, tokens):
        with nn.logical_axis_rules(RULES):
            return MODEL.apply(params, tokens)

    spread = jax.device_put(params, NamedSharding(mesh, P()))
    run = jax.jit(logits)
    placed = jax.device_put(tokens, NamedSharding(mesh, P("data")))
    out = run(spread, placed)
    assert out.sharding.spec[0] == "data"
    expected = np.asarray(jax.jit(MODEL.apply)(params, tokens))
    # Float32 sums of 16 to 64 terms in another order: a few units of 6e-8 of the largest logit.
    np.testing.assert_allclose(out, expected, atol=1e-6 * np.abs(expected).max())
    text = run.lower(spread, placed).compile().as_text()
    assert "f32[1,12,2,4]" in text and "f32[1,12,4,4]" not in text  # half of the four heads, for half of the batch


def test_constrain_without_rules_or_mesh_is_the_identity(mesh):
    x = jnp.ones((4, 6))
    assert sharding.constrain(x, "batch", None) is x
    with nn.logical_axis_rules(RULES):
        assert sharding.constrain(x, "batch", None) is x
        split = jax.device_put(x, NamedSharding(mesh, P()))
        assert sharding.constrain(split, "batch", None).sharding.spec == P("data", None)
        assert sharding.shards("batch", split) == 2 and sharding.shards("length", split) == 1


def test_gradients_of_gathered_parameters_are_sharded(mesh):
    def loss(params, x):
        with nn.logical_axis_rules(RULES):
            return (x @ sharding.gathered(params)["mlp"]["up"]["kernel"]).sum()

    kernel = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, P("data", "tensor")))
    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    placed = jax.device_put(x, NamedSharding(mesh, P("data")))
    slope = jax.jit(jax.grad(loss))({"mlp": {"up": {"kernel": kernel}}}, placed)["mlp"]["up"]["kernel"]
    assert slope.sharding.spec == P("data", "tensor")
    np.testing.assert_allclose(slope, np.broadcast_to(x.sum(axis=0)[:, None], (8, 4)))
