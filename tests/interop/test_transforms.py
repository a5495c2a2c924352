"""attnlab's modules under the transforms of JAX and Flax."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from attnlab.interop.flax import attention_fn
from attnlab.masks import Causal
from attnlab.nn import GPT, Block, Mlp, MultiHeadAttention
from tests.parameters import parameters

X = np.random.default_rng(0).standard_normal((4, 6, 8)).astype(np.float32)
TOKENS = np.arange(24, dtype=np.int32).reshape(4, 6) % 10
LAYER = MultiHeadAttention(num_heads=4, mask=Causal())
MODEL = GPT.of(vocab_size=10, num_layers=1, num_heads=2, width=8, context=6)


def assert_close(ours, plain):
    """Allow for about a hundred reordered float32 operations, each with an error of 2^-24 of the largest value."""
    atol = 100 * 2**-24 * max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), ours, plain)


def assert_same_gradient(ours, plain, params):
    """Assert close values and gradients, computed by one program."""

    def square(params, apply):
        return (apply(params) ** 2).sum()

    assert_close(*jax.jit(lambda params: [jax.value_and_grad(square)(params, f) for f in (ours, plain)])(params))


def mesh(shape, names):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def test_vmap_over_parameters_and_examples_equals_loop():
    """An ensemble of two, and per-example gradients."""
    module, inputs = LAYER.clone(impl="blockwise"), X
    stack = [parameters(module, inputs, seed=seed) for seed in range(2)]

    def gradient(params, inputs):
        return jax.grad(lambda params: (module.apply(params, inputs) ** 2).sum())(params)

    @jax.jit
    def run(stack):
        together = jax.vmap(module.apply, (0, None))(jax.tree.map(lambda *leaves: jnp.stack(leaves), *stack), inputs)
        each = jax.vmap(lambda params, one: gradient(params, one[None]), (None, 0))(stack[0], inputs)
        summed = jax.tree.map(lambda leaf: leaf.sum(0), each)
        return (together, summed), (jnp.stack([module.apply(one, inputs) for one in stack]), gradient(stack[0], inputs))

    assert_close(*run(stack))


def test_grad_equals_finite_differences(float64):
    block = Block(LAYER.clone(impl="blockwise"), Mlp())
    params, x = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (parameters(block, X), X))
    # Differences over steps of 1e-6, of sums near 100, err by 100·1e-16/1e-6.
    check_grads(jax.jit(lambda params: jnp.sin(block.apply(params, x)).sum()), (params,), 1, ["rev"], atol=1e-6)


class Stack(nn.Module):
    """Two rematerialized blocks whose parameters are stacked by `nn.scan`."""

    @nn.compact
    def __call__(self, x):
        @nn.remat
        def layer(block, x, _):
            return block(x), None

        block = Block(MultiHeadAttention(num_heads=4, mask=Causal(), parent=None), Mlp(parent=None), name="block")
        scanned = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return scanned(block, x, None)[0]


def test_nn_scan_over_layers_equals_loop():
    params, block = parameters(Stack(), X), Block(LAYER, Mlp())

    def in_turn(params):
        x = X
        for layer in range(2):
            one = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["params"]["block"])
            x = block.apply({"params": one}, x)
        return x

    assert params["params"]["block"]["attention"]["query"]["kernel"].shape == (2, 8, 4, 2)
    assert_same_gradient(lambda params: Stack().apply(params, X), in_turn, params)


def test_logically_partitioned_kernels_are_sharded_by_flax_rules():
    init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "heads", "kv"))
    layer = LAYER.clone(kernel_init=init, use_bias=False)
    specs = nn.get_partition_spec(jax.eval_shape(layer.init, jax.random.key(1), X))
    rules = [("embed", None), ("heads", "tensor"), ("kv", None)]
    shardings = nn.logical_to_mesh_sharding(specs, mesh((2, 2), ("data", "tensor")), rules)
    params = nn.unbox(jax.jit(layer.init, out_shardings=shardings)(jax.random.key(1), X))
    assert params["params"]["query"]["kernel"].sharding.shard_shape((8, 4, 2)) == (8, 2, 2)
    alone = jax.device_put(params, jax.devices()[0])
    assert_close(*(jax.jit(layer.apply)(each, X) for each in (params, alone)))


def split_over_data(apply, *specs):
    """`apply` with replicated parameters, and arguments split over four devices."""
    return jax.shard_map(apply, mesh=mesh((4,), ("data",)), in_specs=(P(), *specs), out_specs=P("data"))


def test_shard_map_of_flax_layer_with_padding_equals_plain():
    layer = nn.MultiHeadAttention(num_heads=4, attention_fn=attention_fn(Causal(), impl="blockwise"))
    visible = (np.arange(6) < np.array([[6], [3], [2], [5]]))[:, None, None]

    def apply(params, x, visible):
        return layer.apply(params, x, mask=visible)

    sharded = split_over_data(apply, P("data"), P("data"))
    assert_same_gradient(
        lambda params: sharded(params, X, visible), lambda params: apply(params, X, visible), parameters(layer, X)
    )


def test_shard_map_dropout_with_example_keys_equals_plain():
    model = MODEL.replace(dropout=0.5)

    def apply(params, tokens, keys):
        return model.apply(params, tokens, deterministic=False, dropout_key=keys)

    sharded = split_over_data(apply, P("data"), P("data"))
    keys = jax.jit(lambda: jax.random.split(jax.random.key(2), 4))()
    assert_close(*jax.jit(lambda *args: (sharded(*args), apply(*args)))(parameters(model, TOKENS), TOKENS, keys))
