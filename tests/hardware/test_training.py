"""Training, evaluation and decode steps compiled for TPUs and H100s: collectives, kernels and memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attnlab import experiments
from attnlab.generation import drawing, loop
from attnlab.interop.export import export_step
from attnlab.nn import GPT
from attnlab.ops.cross_entropy import MAX_NARROW_LOGITS
from attnlab.training import precision

# Slices and meshes.
AXES = {
    "one chip": ("v5e:2x2", {"data": 1}),
    "data": ("v5e:2x2", {}),
    "all three": ("v5p:4x4x8", {"fsdp": 4, "tensor": 2}),
}
LAYERS, WIDTH = 2, 128


def config_of(name, **fields):
    """An experiment's config with a small model."""
    config = experiments.files()[name]
    module = {}
    exec(config.read_text(), module)
    config = module["get_config"]()
    config.model.update(num_layers=LAYERS, width=WIDTH, num_heads=4, scan=True, **fields)
    config.batch_size, config.optimizer.accumulation = 64, 1
    config.precision = "float32" if config.precision == "auto" else config.precision  # to compile both
    return config


CONFIGS = {
    "quickstart": lambda: config_of("quickstart"),
    "sancho": lambda: config_of("sancho", dropout=0.0),
    "gpt2": lambda: config_of("gpt2_124m", vocab_size=512),
}


@pytest.mark.parametrize(
    "name, axes", [("quickstart", "data"), ("sancho", "one chip"), ("gpt2", "data"), ("gpt2", "all three")]
)
def test_training_step_compiles_for_tpus_along_every_axis(name, axes, training_step):
    config, (topology, mesh) = CONFIGS[name](), AXES[axes]
    config.parallel.mesh.update(mesh)
    _, program = training_step(config, topology)
    if axes == "all three":
        assert {"all-reduce", "all-gather"} <= set(program.collectives)
    else:
        assert set(program.collectives) == {"one chip": set(), "data": {"all-reduce"}}[axes]
    if config.model.context % 128 == 0:  # splash's tiles
        runs = sum(count for kernel, count in program.kernels.items() if "splash" in kernel)
        assert runs == 3 * LAYERS  # forward, and dq and dk/dv


# A decoder, and the shapes of its parameters.
MODEL = GPT.of(vocab_size=64, num_layers=2, num_heads=2, width=32, context=128, dtype=jnp.bfloat16)
PARAMS = jax.eval_shape(MODEL.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))


def on_one_chip(topology, shapes):
    mesh = Mesh(np.array(topology.devices[:1]), ("x",), axis_types=(AxisType.Auto,))
    place = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, P()))
    return jax.tree.map(lambda x: place(x.shape, x.dtype), shapes)


def step_on_h100s(training_step, devices=8, **mesh):
    config = CONFIGS["gpt2"]()
    config.model.update(num_layers=6, width=512, num_heads=8, context=512, vocab_size=12288, remat="none")
    config.parallel.mesh.update(mesh)
    return training_step(config, f"h100:{devices}", vocab_size=12288)


def test_fsdp_gathers_and_scatters_each_layer_as_published(training_step):
    """Weights are gathered for the forward and again for the backward pass; gradients are reduced and scattered."""
    _, program = step_on_h100s(training_step, fsdp=8)
    block, table = 12 * 512**2, (12288 + 512) * 512  # parameters of a block's matrices, and of the embeddings
    gathered, scattered = program.collectives["all-gather"], program.collectives["reduce-scatter"]
    layers = 6
    # In bfloat16; the tables are gathered once or twice, in bfloat16 or float32.
    assert 2 * 2 * layers * block <= gathered[1] <= 2 * 2 * layers * block + 2 * 4 * table
    assert 2 * layers * block <= scattered[1] <= 2 * layers * block + 2 * 4 * table
    assert 2 * layers <= gathered[0] <= 2 * layers + 4  # one for all matrices of a layer, in each pass
    assert layers <= scattered[0] <= layers + 2
    small = program.collectives["all-reduce"][1]  # at most norms, scalars and learned positions
    assert small <= 4 * (12288 // 8 + 512) * 512


def test_tensor_axis_splits_features_and_sums_twice_per_layer(training_step):
    text, program = step_on_h100s(training_step, devices=4, tensor=4)
    activations = 2 * 64 * 512 * 512  # bfloat16
    # After attention and after the feed-forward layer, in the forward and in the backward pass (Shoeybi et al. 2019).
    assert 4 * 6 * activations <= program.collectives["all-reduce"][1] <= 5 * 6 * activations
    assert "bf16[64,512,2048]" not in text and "bf16[64,512,512]" in text  # hidden features in quarters


def test_loop_over_layers_compiles_one_layer_for_any_depth(training_step):
    texts = []
    for layers in (12, 48):
        config = CONFIGS["gpt2"]()
        config.model.num_layers = layers
        texts.append(training_step(config, "h100")[0])
    assert len(texts[1]) < 1.2 * len(texts[0])


def test_step_products_are_in_tf32_if_the_run_is(training_step):
    config = CONFIGS["quickstart"]()
    config.precision = "tf32"
    with precision.products("tf32"):
        text, _ = training_step(config, "h100")
    assert "operand_precision={high,high}" in text and "highest" not in text


@pytest.mark.parametrize("batch", [16, 32])
def test_logits_are_held_once_in_bfloat16_or_in_chunks(batch, training_step):
    config = CONFIGS["gpt2"]()
    config.model.update(num_layers=1, context=1024, vocab_size=50304)
    config.batch_size = batch
    text, program = training_step(config, "h100", vocab_size=50257)
    assert bool(re.search(rf"\[{batch},10\d\d,503\d\d\]", text)) == (batch == 16) and "50304" in text
    # Gradients of logits reuse their memory. The rest is the table's gradient and less than a chunk of activations.
    assert program.temporaries < 1.5 * 2 * MAX_NARROW_LOGITS


@pytest.mark.parametrize("name", ["v5e", "h100"])
def test_decode_step_compiles_with_a_cache_for_the_context(name, topology, compiled):
    token, key = jnp.zeros(1, jnp.int32), drawing.keys(seed=0, num_samples=1)
    state = jax.eval_shape(lambda: loop.State(token, MODEL.init_caches(1), key, token, jnp.ones(1, bool)))
    draw = drawing.Draw(temperature=0.8, vocab_size=MODEL.config.vocab_size)

    def decode(params, state):
        return loop.decode_ahead(MODEL, draw, (), params, state, loop.AHEAD, loop.AHEAD)

    _, program = compiled(decode, *on_one_chip(topology(name), (PARAMS, state)))
    assert program.arguments > 2 * sum(x.size for x in jax.tree.leaves(PARAMS))


@pytest.mark.parametrize("platform, name, tokens", [("tpu", "v5e", 128), ("cuda", "h100", 1)])
def test_exported_step_compiles_for_its_platform(platform, name, tokens, topology, compiled):
    exported = export.deserialize(export_step(MODEL, PARAMS, tokens=tokens, platforms=platform).serialize())
    arguments, _ = jax.tree.unflatten(exported.in_tree, on_one_chip(topology(name), list(exported.in_avals)))
    _, program = compiled(exported.call, *arguments)
    assert program.arguments > 2 * sum(x.size for x in jax.tree.leaves(PARAMS))
