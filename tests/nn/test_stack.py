"""Stacked layers compute what single ones do, and a policy of `remat` stores what it says."""

import contextlib
import functools
import io

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attnlab import see
from attnlab.nn import GPT, Block, stack_layers, taps, unstack_layers
from attnlab.nn.remat import REMAT
from attnlab.nn.stack import is_stacked
from tests.parameters import parameters

SIZES = {"vocab_size": 40, "num_layers": 2, "num_heads": 2, "width": 16, "context": 12}
MODEL = GPT.of(**SIZES, dropout=0.1)
TOKENS = np.arange(24).reshape(2, 12)
PARAMS = parameters(MODEL, TOKENS)["params"]


@functools.cache
def value_and_gradient(model):
    """Of the loss with dropout, compiled once for each model."""

    def loss(params, key):
        options = {"deterministic": False, "dropout_key": key, "targets": TOKENS}
        return model.apply({"params": params}, TOKENS, **options).mean()

    run = jax.jit(jax.value_and_grad(loss))
    return lambda params: run(params, jax.random.key(1))


def test_stacked_layers_unstack_to_the_same_arrays_in_order():
    names = [f"block_{n}" for n in range(12)]  # 10 and 11 come after 9, not after 1
    params = {"norm": np.ones(3)} | {name: {"w": np.full(3, n)} for n, name in enumerate(names)}
    stacked = stack_layers(params)
    assert is_stacked(stacked) and not is_stacked(params)
    np.testing.assert_array_equal(stacked["blocks"]["w"][:, 0], np.arange(12))
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(stacked), params)
    assert jax.tree.structure(stack_layers(stacked)) == jax.tree.structure(stacked)


def test_shapes_of_stacked_layers_keep_their_shardings():
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    given = {"block_0": {"w": jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))}}
    stacked = stack_layers(given)
    assert stacked["blocks"]["w"].sharding.spec == P(None, "fsdp")
    assert unstack_layers(stacked)["block_0"]["w"].sharding.spec == P("fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("remat", REMAT)
def test_stacked_layers_have_the_loss_and_gradients_of_single_ones(remat):
    expected, slopes = jax.tree.map(np.asarray, value_and_gradient(MODEL)(PARAMS))
    loss, stacked = jax.tree.map(np.asarray, value_and_gradient(MODEL.replace(remat=remat))(stack_layers(PARAMS)))
    # Float32 sums in another order: some units of 6e-8 of the largest element.
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    largest = max(float(abs(x).max()) for x in jax.tree.leaves(slopes))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6 * largest), unstack_layers(stacked), slopes)


def test_stacked_layers_decode_drop_and_sow_as_single_ones_do():
    stacked = {"params": stack_layers(PARAMS)}

    @jax.jit
    def run(params):
        decoded = MODEL.apply(params, TOKENS[:, :5], caches=MODEL.init_caches(2))
        dropped = {"deterministic": False, "dropout_key": jax.random.key(1)}
        return decoded, MODEL.apply(params, TOKENS, **dropped, mutable=["intermediates"])

    # The same operations, compiled into two programs: at most some units of 6e-8 of the logits, up to 16.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), run({"params": PARAMS}), run(stacked))


def saved(model, params):
    """How many numbers are kept between the forward and the backward pass, besides arguments."""

    def loss(params):
        return model.apply({"params": params}, TOKENS, targets=TOKENS).sum()

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        jax.ad_checkpoint.print_saved_residuals(loss, params)
    shapes = [line.split()[0] for line in printed.getvalue().splitlines() if "argument" not in line]
    return sum(int(np.prod([int(n) for n in s[s.index("[") + 1 : -1].split(",") if n])) for s in shapes)


def test_remat_policies_store_less_in_the_order_none_dots_attention_block():
    model = GPT.of(**SIZES, attention={"impl": "blockwise"})
    stored = {remat: saved(model.replace(remat=remat), PARAMS) for remat in REMAT}
    assert stored["none"] > stored["dots"] > stored["attention"] > stored["block"]
    # out, and the max and the log of the sum of two heads
    assert stored["attention"] - stored["block"] == MODEL.config.num_layers * 24 * (16 + 4)


def test_traced_targets_out_of_range_have_a_loss_of_nan():
    targets = np.where(TOKENS < 2, -1, TOKENS)
    losses = np.asarray(jax.jit(lambda targets: MODEL.apply({"params": PARAMS}, TOKENS, targets=targets))(targets))
    assert np.isnan(losses[0, :2]).all() and np.isfinite(losses[0, 2:]).all()


@pytest.fixture(scope="module")
def hybrid():
    """A model whose layers are of two kinds, and its parameters."""
    model = GPT.of(**SIZES | {"num_layers": 5}, positions="none", layers="attention conv", mlp_ratio=1.0)
    return model, parameters(model, TOKENS)["params"]


def test_layers_of_unlike_kinds_are_a_stack_for_each_place(hybrid):
    _, params = hybrid
    stacked = stack_layers(params)
    assert {"blocks_0", "blocks_1", "block_4"} <= set(stacked) and "block_3" not in stacked
    assert stacked["blocks_1"]["attention"]["conv"]["kernel"].shape == (2, 4, 16, 16)
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(stacked), params)


def test_stacked_layers_of_unlike_kinds_compute_what_single_ones_do(hybrid):
    model, params = hybrid
    stacked = stack_layers(params)
    expected, slopes = jax.device_get(value_and_gradient(model)(params))
    found, of_stacked = jax.device_get(value_and_gradient(model.replace(remat="dots"))(stacked))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    # Sums of float32 in another order, through five layers: some tens of units of 6e-8 of the largest.
    near = functools.partial(
        np.testing.assert_allclose, atol=5e-6 * max(np.abs(x).max() for x in jax.tree.leaves(slopes))
    )
    jax.tree.map(near, unstack_layers(of_stacked), slopes)
    _, sown = jax.eval_shape(lambda p: model.apply({"params": p}, TOKENS, mutable=["intermediates"]), stacked)
    assert sorted(sown["intermediates"]) == ["block_0", "block_2", "block_4"]


def test_learned_positions_of_a_model_without_attention_go_on_where_its_caches_end(hybrid):
    layers = hybrid[0].config.layers[1:]
    model = hybrid[0].replace(layers=layers, num_layers=1, positions="learned", context=14)
    params = {"params": parameters(model, TOKENS)["params"]}
    apply, caches, found = jax.jit(model.apply), model.init_caches(2), []
    expected = apply(params, TOKENS)
    for start in (0, 4, 8):  # each call with two tokens of padding
        part = np.pad(TOKENS[:, start : start + 4], ((0, 0), (0, 2)))
        logits, caches = apply(params, part, caches=caches, lengths=np.array([4, 4]))
        found.append(logits[:, :-2])
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected, atol=1e-5)


def test_cache_of_one_layer_instead_of_all_raises_one_line(hybrid):
    model, params = hybrid
    with pytest.raises(ValueError, match="caches is one MixerState, expected a sequence of num_layers = 5"):
        model.apply({"params": params}, TOKENS, caches=model.init_caches(2)[1])


@pytest.mark.parametrize(
    "layers, number",
    [
        ("local*2 attention", 2),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("local attention", 1), ("local*2 attention", 5))),
    ],
)
def test_stacked_layers_of_fewer_than_a_pattern_compute_what_single_ones_do(layers, number):
    residual = {"value_residual": True}
    options = {"layers": layers, "local": {"window": 3, **residual}, "attention": residual, "mlp_ratio": 1.0}
    model = GPT.of(**SIZES | {"num_layers": number}, **options)
    params = parameters(model, TOKENS)["params"]
    expected, found = (jax.jit(model.apply)({"params": p}, TOKENS) for p in (params, stack_layers(params)))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_stacked_layers_read_other_collections():
    edit = {taps.edits("z"): {"block_1": {"attention": {taps.KEY: see.Put(0.0)}}}}
    cases = (PARAMS, edit), (stack_layers(PARAMS), edit), (PARAMS, {})
    run = jax.jit(lambda: [MODEL.apply({"params": params, **more}, TOKENS) for params, more in cases])
    single, stacked, unedited = run()
    np.testing.assert_allclose(stacked, single, atol=1e-6)
    assert not np.allclose(single, unedited, atol=1e-3)


def test_layers_drop_other_elements_than_each_other():
    model = GPT.of(**SIZES, use_bias=True, mlp_ratio=0.0, dropout=0.5)
    params = jax.tree.map(np.zeros_like, parameters(model, TOKENS)["params"])
    for layer in range(2):  # adds 1 to each feature, or 2 and 0 where half of them are dropped
        params[f"block_{layer}"]["attention"]["out"]["bias"] = np.ones(16, np.float32)

    @jax.jit
    def run(params):
        kept = {"capture_intermediates": lambda module, method: isinstance(module, Block) and method == "forward"}
        return model.apply({"params": params}, TOKENS, deterministic=False, dropout_key=jax.random.key(0), **kept)

    _, seen = run(params)
    first, second = (seen["intermediates"][f"block_{n}"]["forward"][0].out for n in range(2))
    np.testing.assert_array_equal(np.unique(first), [0, 2])
    assert 0.4 < np.mean(first == second - first) < 0.6


def test_init_caches_share_no_buffer():
    caches = MODEL.init_caches(2)
    step = jax.jit(lambda caches: MODEL.apply({"params": PARAMS}, TOKENS[:, :1], caches=caches)[1], donate_argnums=0)
    assert len(step(caches)) == 2


def test_layers_with_a_gap_raise_one_line():
    with pytest.raises(ValueError, match="block_0, block_2"):
        stack_layers({"block_0": {"w": np.ones(2)}, "block_2": {"w": np.ones(2)}})
