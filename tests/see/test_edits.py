"""Edits: identities change no bit, each edit does what it says, and invalid edits raise one line."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab import see
from attnlab.masks import Causal, Padding
from attnlab.nn import KVCache, MultiHeadAttention
from tests.parameters import parameters
from tests.see import models
from tests.see.models import OTHERS, TOKENS, capture, edited, random, slow
from tests.see.pages import softmax

ALL = ("q", "k", "v", "pattern", "z", "in", "out")


def frozen(run):
    """Edits that put all values of a run back in place."""
    return {f"{path}/{name}": see.Put(x) for name, values in run.values.items() for path, x in values.items()}


@pytest.mark.parametrize(
    "fields",
    [
        {"attention": {"kv_heads": 2}, "num_layers": 1},
        slow({"attention": {"impl": "blockwise", "window": 3, "kv_heads": 1}}),
    ],
    ids=["grouped", "blockwise"],
)
def test_identity_edits_change_no_bit(fields):
    model, params = models.gpt(**fields)
    run = capture(model, params, TOKENS, want=ALL)
    assert (run.out == jax.jit(model.apply)(params, TOKENS)).all()
    gates = {f"*/{name}": see.Scale(np.ones((), np.float32)) for name in ALL}
    for again in edited(model, params, TOKENS, edits=[frozen(run), gates, {"*": see.Add(0.0)}], want=ALL):
        assert again.order == run.order
        assert all((a == b).all() for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(run), strict=True))


def state_of(model):
    return nnx.state(model) if isinstance(model, nnx.Module) else ()


def test_identity_edits_of_flax_layers_change_no_bit():
    for model, params in ((models.Flax(), models.variables()), (models.nnx_model(), None)):
        run, own_state = capture(model, params, TOKENS, want=("pattern", "z")), state_of(model)
        again, _ = edited(model, params, TOKENS, edits=[frozen(run), {"*/z": see.Put(0.0)}])
        assert (again.out == run.out).all()
        jax.tree.map(np.testing.assert_array_equal, state_of(model), own_state)  # a model of nnx keeps its state


@pytest.mark.parametrize("kind", [slow("ours"), "nnx", slow("flax")])
def test_edit_of_one_head_changes_only_its_output(kind):
    model, params = {
        "flax": (models.Flax(), models.variables()),
        "ours": (models.Ours(), models.variables()),
        "nnx": (models.nnx_model(), None),
    }[kind]
    head = np.arange(models.HEADS)[:, None] == 2
    run = capture(model, params, TOKENS, want=("z", "out"))
    z = run.values["z"]["block_0/attention"]
    edits = [{"block_0/attention/z": edit} for edit in (see.Put(0.0, where=head), see.Put(np.where(head, 0, z)))]
    after, zeroed = edited(model, params, TOKENS, edits=edits, want=("z", "out"))
    np.testing.assert_array_equal(after.values["z"]["block_0/attention"], np.where(head, 0, z))
    assert not np.allclose(after.out, run.out)
    np.testing.assert_array_equal(after.out, zeroed.out)


def test_edited_pattern_multiplies_the_values():
    layer, x = MultiHeadAttention(4, kv_heads=2, sinks=True, mask=Causal()), random(2, 5, 8)
    pattern = softmax(random(2, 4, 5, 5))
    edits = [{"pattern": see.Put(pattern)}]
    (run,) = edited(layer, parameters(layer, x), x, edits=edits, want=("v", "z", "pattern"))
    v = np.repeat(run.values["v"][""], 2, axis=2)
    np.testing.assert_allclose(run.values["z"][""], np.einsum("bhqk,bkhd->bqhd", pattern, v), atol=2e-6)
    np.testing.assert_array_equal(run.values["pattern"][""], pattern)


def test_an_edited_pattern_ignores_the_values_of_padding():
    layer, x = MultiHeadAttention(2), random(1, 4, 8)
    params = parameters(layer, x)
    x[:, 3] = np.nan
    options = {"mask": Padding(np.array([3])), "want": ("z",)}
    (run,) = edited(layer, params, x, edits=[{"pattern": see.Scale(0.5)}], **options)
    plain = capture(layer, params, x, **options)
    np.testing.assert_allclose(run.values["z"][""][:, :3], 0.5 * plain.values["z"][""][:, :3], atol=1e-6)


def test_edited_keys_enter_the_cache():
    layer, x = MultiHeadAttention(2, mask=Causal(), kv_heads=1), random(1, 2, 8)
    cache = jax.jit(lambda: KVCache.empty(1, 4, 1, 4))()
    (run,) = edited(layer, parameters(layer, x), x, edits=[{"k": see.Put(7.0)}], cache=cache)
    np.testing.assert_array_equal(run.out[1].key[0, :2], np.full((2, 1, 4), 7.0))


def test_cross_attention_patterns_can_be_edited():
    layer, x, memory = MultiHeadAttention(2), np.ones((2, 3, 8), np.float32), random(2, 5, 6)
    params, first = parameters(layer, x, memory), np.eye(5, dtype=np.float32)[[0] * 3]
    (site,) = see.sites(layer, params, x, memory)
    assert site.verified and (site.q_length, site.kv_length) == (3, 5)
    (run,) = edited(layer, params, x, memory, edits=[{"pattern": see.Put(first)}], want=("v", "z", "pattern"))
    assert run.values["pattern"][""].shape == (2, 2, 3, 5)
    z, v = run.values["z"][""], run.values["v"][""]
    np.testing.assert_allclose(z, np.broadcast_to(v[:, :1], z.shape), atol=1e-6)


def test_edits_put_another_run_or_its_mean_or_apply_a_function():
    model, params = models.gpt()
    run = capture(model, params, np.concatenate([TOKENS, OTHERS]), want=("z",))
    z, other = np.split(run.values["z"]["block_1/attention"], 2)
    cases = (
        (see.Put(other.mean((0, 1))), np.broadcast_to(other.mean((0, 1)), z.shape)),
        (jax.tree_util.Partial(jnp.multiply, 3.0), 3 * z),
        (see.Put(other, where=np.arange(7)[:, None, None] > 3), np.concatenate([z[:, :4], other[:, 4:]], axis=1)),
    )
    edits = [{"block_1/attention/z": edit} for edit, _ in cases]
    for run, (_, values) in zip(edited(model, params, TOKENS, edits=edits, want=("z",)), cases):
        np.testing.assert_allclose(run.values["z"]["block_1/attention"], values, rtol=1e-6)


def test_edits_pass_through_jit_vmap_and_grad():
    model, params = models.gpt(num_layers=1)

    @jax.jit
    def outputs(gates):
        def one(edit):
            return see.edited(model, params, TOKENS, edits={"block_0/attention/z": edit}).out

        def gated(gate):
            return one(see.Scale(gate[:, None]))

        outs, gradient = jax.vmap(gated)(gates), jax.grad(lambda gate: gated(gate).sum())(gates[0])
        return outs, gradient, model.apply(params, TOKENS), one(see.Put(0.0))

    outs, gradient, plain, without = outputs(np.stack([np.ones(4, np.float32), np.zeros(4, np.float32)]))
    np.testing.assert_allclose(outs[0], plain, atol=5e-6)
    np.testing.assert_allclose(outs[1], without, atol=5e-6)
    assert gradient.shape == (4,) and np.abs(gradient).min() > 0


def test_blocks_take_edited_streams():
    for model, params in ((models.Flax(), models.variables()), (models.nnx_model(), None)):
        run = capture(model, params, TOKENS, want=("in", "out"))
        np.testing.assert_array_equal(run.values["in"]["block_1"], run.values["out"]["block_0"])
        skipped = {"block_1/out": see.Put(run.values["in"]["block_1"])}
        (after,) = edited(model, params, TOKENS, edits=[skipped], want=("out",))
        np.testing.assert_array_equal(after.values["out"]["block_1"], run.values["in"]["block_1"])
        assert not np.allclose(after.out, run.out)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"block_0/atention/z": see.Put(0.0)}, r"'block_0/atention/z' .*did you mean block_0/attention/z"),
        ({"block_0/attention/z": 0.0}, r"\['block_0/attention/z'\] is a float"),
        ({"block_0/attention/z": see.Put(np.ones(3))}, r"shape \(3,\), .*\(2, 7, 4, 4\)"),
        ([see.Put(0.0)], "edits is a list"),
        ({"*/z": see.Put(0.0), "block_1/attention/z": see.Put(1.0)}, "'block_1/attention/z' and an earlier key both"),
        ({"block_0/attention/z": see.Put(0.0, where=3)}, "where of an edit has type int32, expected bools"),
    ],
    ids=["misspelt", "number", "shape", "list", "twice", "index"],
)
def test_invalid_edits_raise_one_line(edits, message):
    model, params = models.gpt()
    with pytest.raises(ValueError, match=message) as error:
        jax.eval_shape(lambda: see.edited(model, params, TOKENS, edits=edits))
    assert "\n" not in str(error.value)
