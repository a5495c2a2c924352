"""attnlab's modules under the transforms of JAX and Flax."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

from attnlab.interop.flax import attention_fn
from attnlab.masks import Causal, Padding
from attnlab.nn import GPT, Block, KVCache, Mlp, MultiHeadAttention
from tests.parameters import parameters

X = np.random.default_rng(0).standard_normal((4, 6, 8)).astype(np.float32)
TOKENS = np.arange(24, dtype=np.int32).reshape(4, 6) % 10
LAYER = MultiHeadAttention(num_heads=4, mask=Causal())
MODEL = GPT(vocab_size=10, num_layers=1, num_heads=2, width=8, context=6)
MODULES = {"attention": (LAYER, X), "gpt": (MODEL, TOKENS)}

# Each module with one backend; the other is slow.
both = pytest.mark.parametrize(
    "module, inputs",
    [
        pytest.param(module.clone(impl=impl), inputs, id=f"{impl}-{name}", marks=[] if fast else pytest.mark.slow)
        for name, (module, inputs) in MODULES.items()
        for impl in ("dense", "blockwise")
        for fast in [(name, impl) in (("attention", "blockwise"), ("gpt", "dense"))]
    ],
)
impls = pytest.mark.parametrize("impl", [pytest.param("dense", marks=pytest.mark.slow), "blockwise"])


def assert_close(ours, plain):
    """Allow for some hundred reordered float32 operations, each with an error of 2^-24 of the largest value."""
    atol = 100 * 2**-24 * max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), ours, plain)


def initialized(module, inputs):
    return jax.jit(module.init)(jax.random.key(1), inputs)


def value_and_gradient(apply):
    return jax.value_and_grad(lambda params: (apply(params) ** 2).sum())


def assert_same_gradient(ours, plain, params):
    """Both, and their values, in one program."""
    assert_close(*jax.jit(lambda params: [value_and_gradient(apply)(params) for apply in (ours, plain)])(params))


def mesh(shape, names):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


@both
def test_vmap_over_parameters_equals_loop(module, inputs):
    stack = jax.jit(jax.vmap(lambda seed: module.init(jax.random.key(seed), inputs)))(np.arange(3))
    several = np.asarray(jax.jit(jax.vmap(module.apply, (0, None)))(stack, inputs))
    apply, stack = jax.jit(module.apply), jax.tree.map(np.asarray, stack)
    for i in range(3):
        assert_close(several[i], apply(jax.tree.map(lambda leaf, i=i: leaf[i], stack), inputs))


@both
def test_vmap_over_examples_equals_batch(module, inputs):
    def gradient(params, inputs):
        return jax.grad(lambda params: (module.apply(params, inputs) ** 2).sum())(params)

    each = jax.vmap(lambda params, one: gradient(params, one[None]), (None, 0))
    several, whole = jax.jit(lambda *args: (each(*args), gradient(*args)))(parameters(module, inputs), inputs)
    assert_close(jax.tree.map(lambda leaf: np.asarray(leaf).sum(0), several), whole)


def test_nn_vmap_makes_ensemble():
    ensemble = nn.vmap(
        MultiHeadAttention, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=3
    )
    ensemble = ensemble(num_heads=4, mask=Causal())
    params = jax.tree.map(np.asarray, initialized(ensemble, X))
    apply = jax.jit(LAYER.apply)
    plain = np.stack([apply(jax.tree.map(lambda leaf, i=i: leaf[i], params), X) for i in range(3)])
    assert_close(jax.jit(ensemble.apply)(params, X), plain)


@impls
def test_grad_equals_finite_differences(impl, float64):
    block = Block(LAYER.clone(impl=impl), Mlp())
    params, x = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (parameters(block, X), X))
    # Differences over steps of 1e-6, of sums near 100, err by 100·1e-16/1e-6.
    check_grads(jax.jit(lambda params: jnp.sin(block.apply(params, x)).sum()), (params,), 1, ["rev"], atol=1e-6)


@impls
def test_nn_remat_equals_plain(impl):
    layer = LAYER.clone(impl=impl)
    again = nn.remat(MultiHeadAttention)(num_heads=4, mask=Causal(), impl=impl)
    lengths = Padding(np.array([6, 3, 2, 5]))
    assert_same_gradient(
        lambda params: again.apply(params, X, mask=lengths),
        lambda params: layer.apply(params, X, mask=lengths),
        parameters(layer, X),
    )


class Stack(nn.Module):
    """Three rematerialized blocks whose parameters are stacked by `nn.scan`."""

    dropout_rate: float = 0.0

    @nn.compact
    def __call__(self, x, caches=None, deterministic=True):
        @nn.remat
        def layer(block, x, cache):
            y = block(x, cache=cache, deterministic=deterministic)
            return (y, None) if cache is None else y

        attention = MultiHeadAttention(num_heads=4, mask=Causal(), dropout_rate=self.dropout_rate, parent=None)
        block = Block(attention, Mlp(parent=None), self.dropout_rate, name="block")
        scanned = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=3)
        return scanned(block, x, caches)


def blocks(params):
    """The blocks of a `Stack` as a list of functions."""
    block = Block(LAYER, Mlp())
    for layer in range(3):
        one = {"params": jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["params"]["block"])}
        yield lambda x, one=one, **call: block.apply(one, x, **call)


def test_nn_scan_over_layers_equals_loop():
    params = initialized(Stack(), X)

    def in_turn(params):
        x = X
        for block in blocks(params):
            x = block(x)
        return x

    assert params["params"]["block"]["attention"]["query"]["kernel"].shape == (3, 8, 4, 2)
    assert_same_gradient(lambda params: Stack().apply(params, X)[0], in_turn, params)


def test_nn_scan_over_layers_decodes_with_caches():
    params = parameters(Stack(), X)
    caches = jax.tree.map(lambda leaf: np.stack([leaf] * 3), KVCache.empty(4, 6, 4, 2))

    @jax.jit
    def decode(params, caches):
        first, caches = Stack().apply(params, X[:, :4], caches)
        last, caches = Stack().apply(params, X[:, 4:], caches)
        return (first, last), Stack().apply(params, X)[0], caches.length

    parts, whole, length = decode(params, caches)
    assert_close(np.concatenate(parts, axis=1), whole)
    assert length.tolist() == [[6] * 4] * 3


def test_nn_scan_dropout_differs_between_layers():
    params = parameters(Stack(), np.ones((1, 1, 8), np.float32))
    same = jax.tree.map(lambda leaf: np.broadcast_to(leaf[:1], leaf.shape), params)
    dropping = Stack(dropout_rate=0.5)

    @jax.jit
    def run(seed):
        return dropping.apply(same, X, deterministic=False, rngs={"dropout": jax.random.key(seed)})[0]

    np.testing.assert_array_equal(run(1), run(1))
    assert not np.allclose(run(1), run(2))
    assert_close(*jax.jit(lambda: [stack.apply(same, X)[0] for stack in (dropping, Stack())])())


def test_logical_axes_shard_parameters():
    def named(*names):
        return nn.with_logical_partitioning(nn.initializers.lecun_normal(), names)

    layer = MultiHeadAttention(
        num_heads=4,
        mask=Causal(),
        kernel_init=named("embed", "heads", "kv"),
        out_kernel_init=named("heads", "kv", "embed"),
        use_bias=False,
    )
    rules = [("embed", None), ("heads", "tensor"), ("kv", None), ("batch", "data")]
    grid = mesh((2, 2), ("data", "tensor"))
    specs = nn.get_partition_spec(jax.eval_shape(layer.init, jax.random.key(1), X))
    shardings = nn.logical_to_mesh_sharding(specs, grid, rules)
    assert shardings["params"]["out"]["kernel"].spec == P("tensor", None, None)
    params = nn.unbox(jax.jit(layer.init, out_shardings=shardings)(jax.random.key(1), X))
    assert params["params"]["query"]["kernel"].sharding.shard_shape((8, 4, 2)) == (8, 2, 2)

    @jax.jit
    def step(params, x):
        with nn.logical_axis_rules(rules):
            x = nn.with_logical_constraint(x, ("batch", None, "embed"), mesh=grid)
            return value_and_gradient(lambda params: layer.apply(params, x))(params)

    x = jax.device_put(X, NamedSharding(grid, P("data")))
    value, gradient = step(params, x)
    plain = LAYER.clone(use_bias=False)
    alone = jax.device_put(params, jax.devices()[0])
    assert_close((value, gradient), jax.jit(value_and_gradient(lambda params: plain.apply(params, X)))(alone))
    assert gradient["params"]["query"]["kernel"].sharding.shard_shape((8, 4, 2)) == (8, 2, 2)


def split_over_data(apply, *specs):
    """Parameters on every device, the arguments split over four."""
    return jax.shard_map(apply, mesh=mesh((4,), ("data",)), in_specs=(P(), *specs), out_specs=P("data"))


@both
def test_shard_map_over_data_equals_plain(module, inputs):
    sharded = split_over_data(module.apply, P("data"))
    assert_same_gradient(
        lambda params: sharded(params, inputs),
        lambda params: module.apply(params, inputs),
        parameters(module, inputs),
    )


@impls
def test_shard_map_of_flax_layer_with_padding_equals_plain(impl):
    layer = nn.MultiHeadAttention(num_heads=4, attention_fn=attention_fn(Causal(), impl=impl))
    visible = (np.arange(6) < np.array([[6], [3], [2], [5]]))[:, None, None]

    def apply(params, x, visible):
        return layer.apply(params, x, mask=visible)

    sharded = split_over_data(apply, P("data"), P("data"))
    assert_same_gradient(
        lambda params: sharded(params, X, visible), lambda params: apply(params, X, visible), parameters(layer, X)
    )


def test_shard_map_dropout_with_example_keys_equals_plain():
    model = MODEL.clone(dropout=0.5)

    def apply(params, tokens, keys):
        return model.apply(params, tokens, deterministic=False, dropout_key=keys)

    sharded = split_over_data(apply, P("data"), P("data"))
    keys = jax.jit(lambda: jax.random.split(jax.random.key(2), 4))()
    assert_close(*jax.jit(lambda *args: (sharded(*args), apply(*args)))(parameters(model, TOKENS), TOKENS, keys))
