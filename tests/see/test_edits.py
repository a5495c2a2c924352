"""Edits: identities leave every bit, each does what it says, and what the model does not have is one line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab import see
from attnlab.masks import Causal, Padding
from attnlab.nn import KVCache, MultiHeadAttention
from tests.see import models
from tests.see.models import OTHERS, TOKENS

ALL = ("q", "k", "v", "pattern", "z", "in", "out")


@pytest.mark.parametrize(
    "fields",
    [{}, {"kv_heads": 2, "positions": "rotary", "qk_norm": True}, {"impl": "blockwise", "window": 3, "kv_heads": 1}],
    ids=["plain", "grouped", "blockwise"],
)
def test_freezing_a_run_onto_itself_and_gates_of_one_leave_every_bit(fields):
    model, params = models.gpt(**fields)
    run = see.capture(model, params, TOKENS, want=ALL)
    assert (run.out == model.apply(params, TOKENS)).all()
    gates = {f"*/{name}": see.Scale(jnp.ones(())) for name in ALL}
    for edits in (see.Freeze(run), gates, {"*": see.Add(0.0)}):
        again = see.edited(model, params, TOKENS, edits=edits, want=ALL)
        assert again.order == run.order
        assert all((a == b).all() for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(run), strict=True))


def test_freezing_a_run_onto_itself_leaves_every_bit_of_flax_layers():
    for model, params in ((models.Flax(), models.variables()), (models.nnx_model(), None)):
        run = see.capture(model, params, TOKENS, want=("pattern", "z"))
        edited = see.edited(model, params, TOKENS, edits=see.Freeze(run)).out
        assert (edited == run.out).all()


@pytest.mark.parametrize("kind", ["flax", "ours", "nnx"])
def test_an_edit_of_one_head_changes_its_output_alone(kind):
    model, params = {
        "flax": (models.Flax(), models.variables()),
        "ours": (models.Ours(), models.variables()),
        "nnx": (models.nnx_model(), None),
    }[kind]
    head = jnp.arange(models.HEADS)[:, None] == 2
    edit = {"block_0/attention/z": see.Zero(where=head)}
    run = see.capture(model, params, TOKENS, want=("z", "out"))
    edited = see.edited(model, params, TOKENS, edits=edit, want=("z", "out"))
    z, after = run.values["z"]["block_0/attention"], edited.values["z"]["block_0/attention"]
    np.testing.assert_array_equal(after, jnp.where(head, 0, z))
    assert not np.allclose(edited.out, run.out)
    zeroed = see.edited(model, params, TOKENS, edits={"block_0/attention/z": see.Put(jnp.where(head, 0, z))})
    np.testing.assert_array_equal(edited.out, zeroed.out)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_an_edited_pattern_gives_that_pattern_times_values(kv_heads):
    layer = MultiHeadAttention(4, kv_heads=kv_heads, sinks=True, mask=Causal())
    x = jax.random.normal(jax.random.key(0), (2, 5, 8))
    params = jax.tree.map(lambda p: p + 0.2, layer.init(jax.random.key(1), x))
    pattern = jax.nn.softmax(jax.random.normal(jax.random.key(2), (2, 4, 5, 5)))
    run = see.edited(layer, params, x, edits={"pattern": see.Put(pattern)}, want=("v", "z", "pattern"))
    v = jnp.repeat(run.values["v"][""], 4 // kv_heads, axis=2)
    np.testing.assert_allclose(run.values["z"][""], jnp.einsum("bhqk,bkhd->bqhd", pattern, v), atol=2e-6)
    np.testing.assert_array_equal(run.values["pattern"][""], pattern)


def test_an_edited_pattern_ignores_the_values_of_padding():
    layer = MultiHeadAttention(2)
    x = jax.random.normal(jax.random.key(0), (1, 4, 8)).at[:, 3].set(jnp.nan)
    params = layer.init(jax.random.key(1), jnp.ones((1, 4, 8)))
    options = {"mask": Padding(jnp.array([3]))}
    run = see.edited(layer, params, x, edits={"pattern": see.Scale(0.5)}, want=("z",), **options)
    plain = see.capture(layer, params, x, want=("z",), **options)
    np.testing.assert_allclose(run.values["z"][""][:, :3], 0.5 * plain.values["z"][""][:, :3], atol=1e-6)


def test_edited_keys_enter_the_cache():
    layer = MultiHeadAttention(2, mask=Causal(), kv_heads=1)
    x = jax.random.normal(jax.random.key(0), (1, 2, 8))
    params = layer.init(jax.random.key(1), x)
    cache = KVCache.empty(1, 4, 1, 4)
    _, after = see.edited(layer, params, x, edits={"k": see.Put(7.0)}, cache=cache).out
    np.testing.assert_array_equal(after.key[0, :2], np.full((2, 1, 4), 7.0))


def test_edits_of_cross_attention():
    layer = MultiHeadAttention(2)
    x, memory = jnp.ones((2, 3, 8)), jax.random.normal(jax.random.key(0), (2, 5, 6))
    params = layer.init(jax.random.key(1), x, memory)
    first = jnp.zeros((3, 5)).at[:, 0].set(1.0)
    run = see.edited(layer, params, x, memory, edits={"pattern": see.Put(first)}, want=("v", "z"))
    np.testing.assert_allclose(
        run.values["z"][""], jnp.broadcast_to(run.values["v"][""][:, :1], (2, 3, 2, 4)), atol=1e-6
    )


def test_mean_resample_and_put_of_other_runs():
    model, params = models.gpt()
    z = see.capture(model, params, TOKENS, want=("z",)).values["z"]["block_1/attention"]
    other = see.capture(model, params, OTHERS, want=("z",)).values["z"]["block_1/attention"]
    for edit, expected in (
        (see.Mean(other), jnp.broadcast_to(other.mean((0, 1)), z.shape)),
        (see.Mean(other, axes=0), jnp.broadcast_to(other.mean(0), z.shape)),
        (see.Resample(jnp.array([1, 0])), z[::-1]),
        (see.Put(other, where=jnp.arange(7)[:, None, None] > 3), jnp.concatenate([z[:, :4], other[:, 4:]], axis=1)),
    ):
        run = see.edited(model, params, TOKENS, edits={"block_1/attention/z": edit}, want=("z",))
        np.testing.assert_allclose(run.values["z"]["block_1/attention"], expected, rtol=1e-6)


def test_edits_pass_through_jit_vmap_and_grad():
    model, params = models.gpt()

    @jax.jit
    def outputs(gates):
        def one(gate):
            return see.edited(model, params, TOKENS, edits={"block_1/attention/z": see.Scale(gate[:, None])}).out

        return jax.vmap(one)(gates), jax.jacobian(lambda gate: one(gate).sum())(gates[0])

    outs, gradient = outputs(jnp.stack([jnp.ones(4), jnp.zeros(4)]))
    without = see.edited(model, params, TOKENS, edits={"block_1/attention/z": see.Zero()}).out
    np.testing.assert_allclose(outs[0], model.apply(params, TOKENS), atol=5e-6)
    np.testing.assert_allclose(outs[1], without, atol=5e-6)
    assert gradient.shape == (4,) and np.abs(gradient).min() > 0


def test_blocks_take_edited_streams():
    for model, params in ((models.Flax(), models.variables()), (models.nnx_model(), None)):
        run = see.capture(model, params, TOKENS, want=("in", "out"))
        skipped = {"block_1/out": see.Put(run.values["in"]["block_1"])}
        np.testing.assert_array_equal(run.values["in"]["block_1"], run.values["out"]["block_0"])
        edited = see.edited(model, params, TOKENS, edits=skipped, want=("out",))
        np.testing.assert_array_equal(edited.values["out"]["block_1"], run.values["in"]["block_1"])
        assert not np.allclose(edited.out, run.out)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"block_0/atention/z": see.Zero()}, r"no 'block_0/atention/z' \(did you mean block_0/attention/z\?\)"),
        ({"7": see.Zero()}, "no '7'; it has block_0/attention/q, "),
        ({"block_0/attention/z": 0.0}, r"\['block_0/attention/z'\] is a float: expected an edit"),
        ({"block_0/attention/z": see.Zero}, "is the class Zero, call it: expected an edit"),
        ([see.Zero()], "edits is a list: expected a mapping"),
    ],
    ids=["misspelt", "unknown", "number", "class", "list"],
)
def test_wrong_edits_are_one_line(edits, message):
    model, params = models.gpt()
    with pytest.raises(ValueError, match=message) as error:
        see.edited(model, params, TOKENS, edits=edits)
    assert "\n" not in str(error.value)


def test_edits_of_a_wrong_shape_and_of_a_run_without_the_value_are_one_line():
    model, params = models.gpt()
    with pytest.raises(
        ValueError,
        match=r"values of an edit has shape \(3,\), expected one that broadcasts to the value.s \(2, 7, 4, 4\)",
    ) as error:
        see.edited(model, params, TOKENS, edits={"block_0/attention/z": see.Put(jnp.ones(3))})
    assert "\n" not in str(error.value)
    run = see.capture(model, params, TOKENS)
    with pytest.raises(ValueError, match=r"its run has no 'z' of 'block_0/attention': capture it with want=\('z',\)"):
        see.edited(model, params, TOKENS, edits={"block_0/attention/z": see.Freeze(run)})


def test_a_model_of_nnx_keeps_its_own_state_after_an_edit():
    model = models.nnx_model()
    before = nnx.state(model)
    see.edited(model, None, TOKENS, edits={"*/z": see.Zero()})
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)
