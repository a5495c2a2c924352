"""Capture in linen and nnx, in every form of attention, and what it leaves untouched."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attnlab
from attnlab import see
from attnlab.masks import Causal, Padding, SlidingWindow
from attnlab.nn import AdditiveAttention, KVCache, MultiHeadAttention, StackedHeads, taps
from tests.parameters import parameters
from tests.see import models
from tests.see.models import TOKENS, capture, random, slow

ALL = ("q", "k", "v", "pattern", "z")


def assert_close(actual, expected, tolerance=1e-6):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


def test_models_with_the_same_weights_give_the_same_captures():
    params, want = models.variables(), (*ALL, "in", "out")
    expected = capture(models.Flax(), params, TOKENS, want=want)
    for model, variables in ((models.Ours(), params), (models.nnx_model(), None)):
        captured = capture(model, variables, TOKENS, want=want)
        # Sums of some ten terms of size 1 to 10, in another order: a few units of 1e-7.
        assert_close(captured.out, expected.out, 5e-6)
        assert set(captured.values) == set(want)
        for name in want:
            actual, wanted = (np.stack(list(run.values[name].values())) for run in (captured, expected))
            assert_close(actual / np.abs(wanted).max(), wanted / np.abs(wanted).max())


def test_printed_sites_show_path_kind_heads_and_lengths():
    sites = see.sites(models.Flax(), models.variables(), TOKENS)
    shown = str(sites).splitlines()[1].split()
    assert shown[:5] == ["block_0/attention", "MultiHeadDotProductAttention", "4", "7", "7"]
    assert all(site.verified for site in sites) and sites.blocks == ("block_0", "block_1") and sites.norms == ("norm",)


def test_site_with_dropout_is_not_verified():
    layer, x = MultiHeadAttention(2, dropout_rate=0.5), random(1, 6, 8)
    params = parameters(layer, x)
    (site,) = see.sites(layer, params, x, deterministic=False, rngs={"dropout": jax.random.key(2)})
    assert not site.verified and "NO, differs" in str(see.Sites((site,)))
    assert see.sites(layer, params, x)[0].verified


@pytest.mark.parametrize(
    ("fields", "call"),
    [
        slow({"kv_heads": 2, "mask": Causal(), "rotary": 100.0, "qk_norm": True}, {}),
        (
            {"kv_heads": 1, "mask": SlidingWindow(2), "sinks": True},
            {"segments": np.array([[0] * 4 + [1] * 3, [0] * 2 + [1] * 5])},
        ),
        ({"impl": "blockwise", "sinks": True}, {"mask": Padding(np.array([0, 5]))}),
    ],
    ids=["grouped_rotary", "multi_query_window_sinks_segments", "masked_rows"],
)
def test_pattern_of_every_form_of_attention_is_verified(fields, call):
    layer, x = MultiHeadAttention(4, **fields), random(2, 7, 16)
    params = parameters(layer, x)
    (site,) = see.sites(layer, params, x, **call)
    assert site.verified and (site.heads, site.kv_heads) == (4, fields.get("kv_heads", 4))
    run, (out, sown) = jax.jit(
        lambda p: (see.capture(layer, p, x, want=ALL, **call), layer.apply(p, x, **call, mutable=["intermediates"]))
    )(params)
    assert_close((run.out, run.values["pattern"][""]), (out, sown["intermediates"]["attention_weights"][0]), 2e-6)
    assert run.values["k"][""].shape == (2, 7, site.kv_heads, 4)


def test_a_step_with_a_cache_attends_to_its_slots():
    layer, x = MultiHeadAttention(2, mask=Causal()), random(2, 6, 8)
    params = parameters(layer, x)

    @jax.jit
    def captured(params):
        _, cache = layer.apply(params, x[:, :4], cache=KVCache.empty(2, 8, 2, 4))
        run = see.capture(layer, params, x[:, 4:], cache=cache, want=("pattern", "k"))
        return cache, run, see.capture(layer, params, x).values["pattern"][""]

    cache, run, whole = captured(params)
    assert_close(run.values["pattern"][""][..., :6], whole[:, :, 4:])
    assert run.values["k"][""].shape == (2, 2, 2, 4)  # what the step adds
    assert see.sites(layer, params, x[:, 4:], cache=cache)[0].verified


def test_additive_attention_and_stacked_heads_have_sites():
    additive, x = AdditiveAttention(4), random(2, 5, 8)
    (site,) = see.sites(additive, parameters(additive, x), x)
    assert site.verified and site.names == ("pattern", "z")
    heads = StackedHeads(3, 4)
    params = parameters(heads, x)
    assert [(site.path, site.verified) for site in see.sites(heads, params, x)] == [
        (f"heads[{n}]", True) for n in range(3)
    ]
    pattern, (_, sown) = jax.jit(
        lambda p: (see.capture(heads, p, x).stack("pattern"), heads.apply(p, x, mutable=["intermediates"]))
    )(params)  # [heads, B, 1, T, T]
    assert_close(pattern[:, :, 0], sown["intermediates"]["heads"]["attention_weights"][0])


def test_a_layer_that_is_called_twice_has_a_site_for_each_call():
    model, params = models.Shared(), models.variables(models.Shared())
    run = capture(model, params, TOKENS, want=("pattern", "z"))
    assert run.paths("pattern") == ("block/attention", "block/attention@1")
    assert see.sites(model, params, TOKENS).blocks == ()
    with pytest.raises(ValueError, match="no 'block/attention@1/z'"):
        see.edited(model, params, TOKENS, edits={"block/attention@1/z": see.Put(0.0)})


def test_stacked_layers_give_the_captures_of_single_layers():
    model, params = models.gpt(attention={"kv_heads": 2})

    @jax.jit
    def both(params):
        stacked = {"params": attnlab.nn.stack_layers(params["params"])}
        return [see.capture(model, variables, TOKENS, want=ALL) for variables in (stacked, params)]

    assert_close(*both(params), 2e-6)


class ScannedBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return models.FlaxBlock(name="block")(x), None


class Looped(nn.Module):
    axes: dict

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(models.VOCABULARY, models.WIDTH, name="embed")(tokens)
        axes = {"params": 0, **self.axes}
        scanned = nn.scan(ScannedBlock, variable_axes=axes, split_rngs={"params": True}, length=3)
        return scanned(name="blocks")(x, None)[0]


def test_scanned_layers_have_a_site_each_if_collections_are_scanned():
    params = parameters(Looped({}), TOKENS)
    with pytest.raises(ValueError, match=r"blocks/block/attention .*nn.scan .*attnlab.see.COLL"):
        see.capture(Looped({}), params, TOKENS)
    model = Looped(dict.fromkeys(see.COLLECTIONS, 0))
    run, out = jax.jit(lambda p: (see.capture(model, p, TOKENS), Looped({}).apply(p, TOKENS)))(params)
    assert run.paths("pattern") == tuple(f"blocks/block/attention[{n}]" for n in range(3))
    assert_close(run.out, out, 2e-6)


def test_capture_passes_through_jit_vmap_and_grad():
    model, params = models.gpt()

    @jax.jit
    def transformed(params):
        each = jax.vmap(lambda tokens: see.capture(model, params, tokens[None]).stack("pattern"))(TOKENS)
        squares = lambda p: (see.capture(model, p, TOKENS).stack("pattern") ** 2).sum()  # noqa: E731
        return see.capture(model, params, TOKENS), each, jax.grad(squares)(params)

    run, each, gradient = transformed(params)
    assert run.paths("pattern") == ("block_0/attention", "block_1/attention")
    assert_close(each[:, :, 0], np.moveaxis(run.stack("pattern"), 1, 0), 5e-6)
    gradient = gradient["params"]["block_0"]["attention"]["query"]["kernel"]
    assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0


def test_program_without_a_listener_is_unchanged(monkeypatch):
    model, params = models.gpt(attention={"kv_heads": 2})
    run = lambda p: model.apply(p, TOKENS)  # noqa: E731
    assert set(params) == {"params"}  # `init` creates no collections of its own
    tapped = str(jax.make_jaxpr(run)(params))
    jax.make_jaxpr(lambda: see.capture(model, params, TOKENS))()
    assert str(jax.make_jaxpr(run)(params)) == tapped
    monkeypatch.setattr(taps, "tap", lambda module, name, value: value)
    monkeypatch.setattr(taps, "attended", lambda module, z, weights, v, drops: z)
    assert str(jax.make_jaxpr(run)(params)) == tapped


def test_models_are_unchanged_after_success_and_after_an_exception():
    def failing(query, key, value, mask=None, is_causal=False, **kwargs):
        raise RuntimeError("attention failed")

    class Holding(nn.Module):
        attention: nn.Module

        def __call__(self, x):
            return self.attention(x)

    def traced(model, *args, **options):
        """`see.capture`, which changes models while it is traced."""
        jax.make_jaxpr(lambda: see.capture(model, *args, **options))()

    x = np.ones((1, 4, 8), np.float32)
    layer = nn.MultiHeadDotProductAttention(2, attention_fn=nn.dot_product_attention)
    params = parameters(Holding(layer), x)
    bound = Holding(layer).bind(params)
    traced(Holding(layer), params, x)
    assert layer.attention_fn is bound.attention.attention_fn is nn.dot_product_attention
    broken = nn.MultiHeadDotProductAttention(2, attention_fn=failing)
    with pytest.raises(RuntimeError, match="attention failed"):
        traced(Holding(broken), params, x)
    assert broken.attention_fn is failing

    model = models.nnx_model()
    before, state = nnx.split(model)
    traced(model, None, TOKENS, want=("pattern", "out"))
    model.block_1.attention.attention_fn = failing
    with pytest.raises(RuntimeError, match="attention failed"):
        traced(model, None, TOKENS)
    assert model.block_1.attention.attention_fn is failing and type(model.block_0) is models.NnxBlock
    model.block_1.attention.attention_fn = nnx.dot_product_attention
    assert nnx.graphdef(model) == before
    assert_close(nnx.state(model), state, 0)


def test_custom_attention_functions_show_their_patterns():
    """The pattern is their output with the identity as values."""

    def scaled(query, key, value, mask=None):
        scores = jnp.einsum("...qhd,...khd->...hqk", 3 * query, key)
        return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(jnp.where(mask, scores, -1e9)), value)

    block, x = models.FlaxBlock(attention_fn=scaled), random(2, 7, models.WIDTH)
    params = parameters(block, x)
    assert see.sites(block, params, x)[0].verified
    pattern = capture(block, params, x).values["pattern"]["attention"]
    assert_close(pattern.sum(-1), np.ones(pattern.shape[:-1]), 1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, p: see.capture(m, p, TOKENS, want="patern"), r"'patern' \(did you mean pattern\?\)"),
        (lambda m, p: see.capture(m, p, TOKENS, rows=[99]), r"rows = \[99\]: .*7 queries"),
        (lambda m, p: see.capture(nn.Embed(11, 16), {"params": p["params"]["embed"]}, TOKENS), "has no attention"),
        (lambda m, p: see.capture(m.apply, p, TOKENS), "model is a method: expected a module of flax"),
    ],
    ids=["want", "rows", "no_attention", "no_model"],
)
def test_bad_input_raises_one_line(call, message):
    model, params = models.gpt()
    with pytest.raises((ValueError, TypeError), match=message) as error:
        jax.eval_shape(lambda: call(model, params))
    assert "\n" not in str(error.value)


def test_capture_takes_inputs_by_keyword_and_flags_by_position():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens, train):
            x = nn.Embed(models.VOCABULARY, models.WIDTH)(tokens)
            layer = MultiHeadAttention(2, dropout_rate=0.5, name="attention")
            return layer(inputs_q=x, deterministic=not train)

    params = parameters(Net(), TOKENS, False)
    (site,) = see.sites(Net(), params, TOKENS, False)
    assert site.verified and (site.path, site.heads, site.q_length) == ("attention", 2, 7)
    with pytest.raises(ValueError, match="pattern is edited before dropout"):
        options = {"edits": {"attention/pattern": see.Put(0.0)}, "rngs": {"dropout": jax.random.key(0)}}
        jax.eval_shape(lambda: see.edited(Net(), params, TOKENS, True, **options))


def test_patterns_of_flax_are_taken_before_dropout():
    layer, x = nn.MultiHeadDotProductAttention(2, dropout_rate=0.5), random(1, 6, 8)
    params = parameters(layer, x, deterministic=True)
    run = capture(layer, params, x, rngs={"dropout": jax.random.key(2)}, deterministic=False)
    np.testing.assert_allclose(run.values["pattern"][""].sum(-1), 1, atol=1e-6)


def test_layers_that_nn_jit_compiles_as_one_are_refused():
    compiled = nn.jit(models.FlaxBlock)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return compiled(name="block_1")(compiled(name="block_0")(x))

    x = np.ones((1, 4, models.WIDTH), np.float32)
    params = parameters(Net(), x)
    with pytest.raises(ValueError, match="nn.jit .*block_1/attention"):
        see.capture(Net(), params, x)
