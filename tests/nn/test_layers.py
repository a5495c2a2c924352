"""Stacked layers compute what single ones do, and a policy of `remat` stores what it says."""

import contextlib
import io

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attnlab.nn import GPT, stack_layers, unstack_layers
from attnlab.nn.layers import REMAT, is_stacked

MODEL = GPT(vocab_size=40, num_layers=12, num_heads=2, width=16, context=12, dropout=0.1)
TOKENS = jnp.arange(24).reshape(2, 12)
PARAMS = jax.jit(MODEL.init)(jax.random.key(0), TOKENS)["params"]


def value_and_gradient(model):
    def loss(params):
        options = {"deterministic": False, "dropout_key": jax.random.key(1), "targets": TOKENS}
        return model.apply({"params": params}, TOKENS, **options).mean()

    return jax.jit(jax.value_and_grad(loss))


def test_stacked_layers_unstack_to_the_same_arrays_in_order():
    stacked = stack_layers(PARAMS)
    assert is_stacked(stacked) and not is_stacked(PARAMS)
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(stacked), PARAMS)
    assert stack_layers(stacked) is not None and jax.tree.structure(stack_layers(stacked)) == jax.tree.structure(
        stacked
    )


def test_shapes_of_stacked_layers_keep_their_shardings():
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    given = {"block_0": {"w": jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))}}
    stacked = stack_layers(given)
    assert stacked["blocks"]["w"].sharding.spec == P(None, "fsdp")
    assert unstack_layers(stacked)["block_0"]["w"].sharding.spec == P("fsdp")


@pytest.mark.parametrize("remat", REMAT)
def test_stacked_layers_have_the_loss_and_gradients_of_single_ones(remat):
    expected, slopes = value_and_gradient(MODEL)(PARAMS)
    loss, stacked = value_and_gradient(MODEL.clone(remat=remat))(stack_layers(PARAMS))
    # Float32 sums in another order: some units of 6e-8 of the largest element.
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    largest = max(float(abs(x).max()) for x in jax.tree.leaves(slopes))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6 * largest), unstack_layers(stacked), slopes)


def test_stacked_layers_decode_and_sow_as_single_ones_do():
    stacked = {"params": stack_layers(PARAMS)}
    caches, found = MODEL.empty_caches(2), []
    for params in ({"params": PARAMS}, stacked):
        decoded = MODEL.apply(params, TOKENS[:, :5], caches=caches)
        found.append((decoded, MODEL.apply(params, TOKENS, mutable=["intermediates"])))
    jax.tree.map(np.testing.assert_array_equal, *found)


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
    stored = {remat: saved(MODEL.clone(remat=remat, dropout=0.0, impl="blockwise"), PARAMS) for remat in REMAT}
    assert stored["none"] > stored["dots"] > stored["attention"] > stored["block"]
    assert stored["attention"] - stored["block"] == MODEL.num_layers * 24 * (16 + 2)  # out, and lse of two heads


def test_unknown_remat_is_one_line_that_lists_the_policies():
    with pytest.raises(ValueError, match="remat = 'all': expected one of none, block, dots, attention"):
        MODEL.clone(remat="all").init(jax.random.key(0), TOKENS)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"targets": TOKENS, "caches": MODEL.empty_caches(2)}, "targets are for whole sequences: leave out caches"),
        ({"targets": TOKENS[:1]}, r"targets has shape \(1, 12\), expected that of tokens, \(2, 12\)"),
        ({"targets": TOKENS - 1}, "targets contains -1, expected ids from 0 to 39"),
    ],
)
def test_unusable_targets_are_one_line(options, message, own_errors):
    with pytest.raises(ValueError, match=message):
        MODEL.apply({"params": PARAMS}, TOKENS, **options)


def test_traced_targets_out_of_range_have_a_loss_of_nan():
    losses = jax.jit(lambda targets: MODEL.apply({"params": PARAMS}, TOKENS, targets=targets))(TOKENS.at[0, :2].set(-1))
    assert np.isnan(losses[0, :2]).all() and np.isfinite(losses[0, 2:]).all()


def test_stacked_layers_of_another_number_are_refused():
    with pytest.raises(ValueError, match="params have 12 stacked layers, expected num_layers = 7"):
        MODEL.clone(num_layers=7).apply({"params": stack_layers(PARAMS)}, TOKENS)


def test_frozen_parameters_are_stacked_too():
    assert is_stacked(stack_layers(FrozenDict(PARAMS)))
