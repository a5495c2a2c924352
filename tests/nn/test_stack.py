"""Stacked layers compute what single layers do, and `remat` policies store what they name."""

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
from tests.nn.gpts import OPTIONS
from tests.ops.cases import slow
from tests.parameters import parameters

SIZES = {"vocab_size": 40, "num_layers": 2, "num_heads": 2, "width": 16, "context": 12}
MODEL = GPT.of(**SIZES, dropout=0.1)
TOKENS = np.arange(24).reshape(2, 12)
PARAMS = parameters(MODEL, TOKENS)["params"]


@functools.cache
def value_and_gradient(model):
    """Value and gradient of the loss with dropout, compiled once for each model."""

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
    shapes = {"block_0": {"w": jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))}}
    stacked = stack_layers(shapes)
    assert stacked["blocks"]["w"].sharding.spec == P(None, "fsdp")
    assert unstack_layers(stacked)["block_0"]["w"].sharding.spec == P("fsdp")


def test_stacked_layers_decode_drop_and_sow_like_single_layers():
    stacked = {"params": stack_layers(PARAMS)}

    @jax.jit
    def run(params):
        decoded = MODEL.apply(params, TOKENS[:, :5], caches=MODEL.init_caches(2))
        dropped = {"deterministic": False, "dropout_key": jax.random.key(1)}
        return decoded, MODEL.apply(params, TOKENS, **dropped, mutable=["intermediates"])

    # The same operations, compiled into two programs: a few roundings, of 6e-8 each, of logits up to 16.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), run({"params": PARAMS}), run(stacked))


def saved(model, params):
    """Count the numbers stored between the forward and backward passes, besides arguments."""

    def loss(params):
        return model.apply({"params": params}, TOKENS, targets=TOKENS).sum()

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        jax.ad_checkpoint.print_saved_residuals(loss, params)
    shapes = [line.split()[0] for line in printed.getvalue().splitlines() if "argument" not in line]
    return sum(int(np.prod([int(n) for n in s[s.index("[") + 1 : -1].split(",") if n])) for s in shapes)


def test_remat_stores_less_from_none_to_dots_attention_and_block():
    model = GPT.of(**SIZES, attention={"impl": "blockwise"})
    stored = {remat: saved(model.replace(remat=remat), PARAMS) for remat in REMAT}
    assert stored["none"] > stored["dots"] > stored["attention"] > stored["block"]
    # the output, and the running max and log of the sum for each of the two heads
    assert stored["attention"] - stored["block"] == MODEL.config.num_layers * 24 * (16 + 4)


def test_traced_targets_out_of_range_have_nan_loss():
    targets = np.where(TOKENS < 2, -1, TOKENS)
    losses = np.asarray(jax.jit(lambda targets: MODEL.apply({"params": PARAMS}, TOKENS, targets=targets))(targets))
    assert np.isnan(losses[0, :2]).all() and np.isfinite(losses[0, 2:]).all()


HYBRID = {"num_layers": 5, "positions": "none", "layers": "attention conv", "mlp_ratio": 1.0}


@pytest.mark.parametrize(
    "options, remat",
    [
        (HYBRID, "dots"),
        *(slow({"dropout": 0.1}, remat) for remat in REMAT),
        slow({"layers": "gru"}, "attention"),
        slow({"layers": "mamba2"}, "dots"),
        *(slow({"layers": kind}, "block") for kind in ("gated_delta", "latent")),
        *(slow(OPTIONS[name] | {"num_layers": 5, "num_heads": 4}, "block") for name in ("gemma", "olmo")),
        slow(OPTIONS["residual"] | {"num_layers": 5, "num_heads": 4}, "none"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.get("layers", "attention"),
)
def test_stacked_layers_have_loss_and_gradients_of_single_layers(options, remat):
    model = GPT.of(**SIZES | options)
    params = parameters(model, TOKENS)["params"]
    expected, slopes = jax.device_get(value_and_gradient(model)(params))
    loss, stacked = jax.device_get(value_and_gradient(model.replace(remat=remat))(stack_layers(params)))
    # Float32 sums in another order: per layer, a few units of 6e-8 of the largest element. The delta rule
    # amplifies them where it normalizes short keys.
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    per_layer = 5e-6 if options.get("layers") == "gated_delta" else 1e-6
    largest = max(np.abs(x).max() for x in jax.tree.leaves(slopes))
    atol = min(1e-5, per_layer * model.config.num_layers * largest)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), unstack_layers(stacked), slopes)


LOCAL = {"local": {"window": 3, "value_residual": True}, "attention": {"value_residual": True}}


@pytest.mark.parametrize(
    "layers, number, options",
    [
        ("local*2 attention", 2, LOCAL),
        slow("local attention", 1, LOCAL),
        slow("local*2 attention", 5, LOCAL),
        ("attention hgrn2", 4, {}),
        slow("rwkv7 hgrn2", 3, {}),
        slow("rwkv7", 1, {}),
    ],
)
def test_stacked_layers_receive_layer_numbers_and_first_values(layers, number, options):
    model = GPT.of(**SIZES | {"num_layers": number}, layers=layers, mlp_ratio=1.0, **options)
    params = parameters(model, TOKENS)["params"]
    expected, actual = (jax.jit(model.apply)({"params": p}, TOKENS) for p in (params, stack_layers(params)))
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_hybrid_layers_stack_by_position_in_the_pattern():
    model = GPT.of(**SIZES | HYBRID)
    params = parameters(model, TOKENS)["params"]
    stacked = stack_layers(params)
    assert {"blocks_0", "blocks_1", "block_4"} <= set(stacked) and "block_3" not in stacked
    assert stacked["blocks_1"]["attention"]["conv"]["kernel"].shape == (2, 4, 16, 16)
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(stacked), params)
    _, sown = jax.eval_shape(lambda p: model.apply({"params": p}, TOKENS, mutable=["intermediates"]), stacked)
    assert sorted(sown["intermediates"]) == ["block_0", "block_2", "block_4"]


def test_stacked_layers_read_other_collections():
    edit = {taps.edits("z"): {"block_1": {"attention": {taps.KEY: see.Put(0.0)}}}}
    cases = (PARAMS, edit), (stack_layers(PARAMS), edit), (PARAMS, {})
    run = jax.jit(lambda: [MODEL.apply({"params": params, **more}, TOKENS) for params, more in cases])
    single, stacked, unedited = run()
    np.testing.assert_allclose(stacked, single, atol=1e-6)
    assert not np.allclose(single, unedited, atol=1e-3)


def test_dropout_masks_differ_between_layers():
    model = GPT.of(**SIZES, use_bias=True, mlp_ratio=0.0, dropout=0.5)
    params = jax.tree.map(np.zeros_like, parameters(model, TOKENS)["params"])
    for layer in range(2):  # adds 1 to each feature; when half of them are dropped, 2 or 0
        params[f"block_{layer}"]["attention"]["out"]["bias"] = np.ones(16, np.float32)

    @jax.jit
    def run(params):
        capture = {"capture_intermediates": lambda module, method: isinstance(module, Block) and method == "forward"}
        return model.apply({"params": params}, TOKENS, deterministic=False, dropout_key=jax.random.key(0), **capture)

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
