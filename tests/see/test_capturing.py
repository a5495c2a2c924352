"""Capture in linen, nnx and plain JAX, in every form of attention, and what it leaves untouched."""

import concurrent.futures
import functools
import threading

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
from tests.see import models
from tests.see.models import OTHERS, TOKENS

ALL = ("q", "k", "v", "pattern", "z")


def capture(model, variables, *args, **options):
    """`see.capture`, compiled: in less time than the operations one by one."""
    arrays = {name: value for name, value in options.items() if name not in ("want", "at", "rows", "deterministic")}
    chosen = {name: value for name, value in options.items() if name not in arrays}
    return jax.jit(lambda *inputs: see.capture(model, *inputs[0], **inputs[1], **chosen))((variables, *args), arrays)


def assert_close(found, expected, tolerance=1e-6):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def captured():
    """What each kind of model with the same weights computes."""
    params, want = models.variables(), (*ALL, "in", "out")
    return {
        "flax": capture(models.Flax(), params, TOKENS, want=want),
        "ours": capture(models.Ours(), params, TOKENS, want=want),
        "nnx": capture(models.nnx_model(), None, TOKENS, want=want),
        "function": capture(models.function, params, TOKENS, want=("pattern", "v", "z")),
    }


@pytest.mark.parametrize("kind", ["ours", "nnx", "function"])
def test_models_of_the_same_weights_give_the_same_captures(captured, kind):
    # Sums of some ten terms of size 1 to 10, in another order: a few units of 1e-7.
    expected, found = captured["flax"], captured[kind]
    assert_close(found.out, expected.out, 5e-6)
    assert set(found.values) == ({"pattern", "v", "z"} if kind == "function" else {*ALL, "in", "out"})
    for name in found.values:
        assert_close(
            found.stack(name) / np.abs(expected.stack(name)).max(),
            expected.stack(name) / np.abs(expected.stack(name)).max(),
        )


def test_captures_are_those_that_flax_sows(captured):
    params = models.variables()
    block = models.FlaxBlock()
    x = captured["flax"].values["in"]["block_0"]
    layer = nn.MultiHeadDotProductAttention(models.HEADS)
    h = nn.LayerNorm().apply({"params": params["params"]["block_0"]["attention_norm"]}, x)
    mask = nn.make_causal_mask(TOKENS)
    variables = {"params": params["params"]["block_0"]["attention"]}
    _, sown = layer.apply(variables, h, mask=mask, sow_weights=True, mutable=["intermediates"])
    (expected,) = sown["intermediates"]["attention_weights"]
    assert_close(captured["flax"].values["pattern"]["block_0/attention"], expected)
    assert_close(
        captured["flax"].values["out"]["block_0"], block.apply({"params": params["params"]["block_0"]}, x), 2e-6
    )


def test_printed_sites_name_path_kind_lengths_and_whether_the_pattern_is_right():
    found = see.sites(models.Flax(), models.variables(), TOKENS)
    assert str(found).splitlines()[1].split()[:5] == [
        "block_0/attention",
        "MultiHeadDotProductAttention",
        "4",
        "7",
        "7",
    ]
    assert all(site.verified for site in found) and found.blocks == ("block_0", "block_1") and found.norms == ("norm",)


def test_dropout_makes_the_pattern_another_than_that_of_z():
    layer = MultiHeadAttention(2, dropout_rate=0.5)
    x = jax.random.normal(jax.random.key(0), (1, 6, 8))
    params = layer.init(jax.random.key(1), x)
    (site,) = see.sites(layer, params, x, deterministic=False, rngs={"dropout": jax.random.key(2)})
    assert not site.verified and "NO, differs" in str(see.Sites((site,)))
    assert see.sites(layer, params, x)[0].verified


@pytest.mark.parametrize(
    ("fields", "call"),
    [
        ({"kv_heads": 1}, {}),
        ({"kv_heads": 2, "mask": Causal(), "rotary_base": 100.0, "qk_norm": True}, {}),
        ({"sinks": True, "mask": Causal()}, {}),
        ({"mask": SlidingWindow(2)}, {}),
        ({"mask": SlidingWindow(1, 1), "impl": "blockwise", "kv_heads": 2}, {}),
        ({}, {"mask": Padding(jnp.array([3, 7]))}),
        ({"impl": "blockwise", "sinks": True}, {"mask": Padding(jnp.array([0, 5]))}),
        ({"mask": Causal()}, {"segments": jnp.array([[0] * 4 + [1] * 3, [0] * 2 + [1] * 5])}),
    ],
    ids=["multi_query", "grouped_rotary", "sinks", "window", "blockwise_window", "padding", "masked_rows", "segments"],
)
def test_pattern_of_every_form_of_attention_is_that_of_z(fields, call):
    layer = MultiHeadAttention(4, **fields)
    x = jax.random.normal(jax.random.key(0), (2, 7, 16))
    params = jax.tree.map(lambda p: p + 0.3, layer.init(jax.random.key(1), x))
    (site,) = see.sites(layer, params, x, **call)
    assert site.verified and (site.heads, site.kv_heads) == (4, fields.get("kv_heads", 4))
    run = capture(layer, params, x, want=ALL, **call)
    out, sown = jax.jit(lambda p: layer.apply(p, x, **call, mutable=["intermediates"]))(params)
    assert_close((run.out, run.values["pattern"][""]), (out, sown["intermediates"]["attention_weights"][0]), 2e-6)
    assert run.values["k"][""].shape == (2, 7, site.kv_heads, 4)


def test_cross_attention_has_patterns_from_queries_to_memory():
    layer = MultiHeadAttention(2)
    x, memory = jnp.ones((2, 3, 8)), jax.random.normal(jax.random.key(0), (2, 5, 6))
    params = layer.init(jax.random.key(1), x, memory)
    run = capture(layer, params, x, memory)
    assert run.values["pattern"][""].shape == (2, 2, 3, 5) and see.sites(layer, params, x, memory)[0].verified


def test_a_step_with_a_cache_attends_to_its_slots():
    layer = MultiHeadAttention(2, mask=Causal())
    x = jax.random.normal(jax.random.key(0), (2, 6, 8))
    params = layer.init(jax.random.key(1), x)
    _, cache = layer.apply(params, x[:, :4], cache=KVCache.empty(2, 8, 2, 4))
    run = capture(layer, params, x[:, 4:], cache=cache, want=("pattern", "k"))
    whole = capture(layer, params, x).values["pattern"][""]
    assert_close(run.values["pattern"][""][..., :6], whole[:, :, 4:])
    assert run.values["k"][""].shape == (2, 2, 2, 4)  # what the step adds
    assert see.sites(layer, params, x[:, 4:], cache=cache)[0].verified


def test_flax_decoding_returns_its_own_collections_beside():
    layer = nn.MultiHeadDotProductAttention(2, decode=True)
    x = jax.random.normal(jax.random.key(0), (1, 4, 8))
    variables = layer.init(jax.random.key(1), x)
    run = see.capture(layer, variables, x[:, :1], mutable=["cache"])
    out, changed = layer.apply(variables, x[:, :1], mutable=["cache"])
    assert_close(run.out, (out, changed), 0)
    assert run.values["pattern"][""].shape == (1, 2, 1, 4)


def test_additive_attention_and_stacked_heads_have_sites():
    x = jax.random.normal(jax.random.key(0), (2, 5, 8))
    additive = AdditiveAttention(4)
    (site,) = see.sites(additive, additive.init(jax.random.key(1), x), x)
    assert site.verified and site.names == ("pattern", "z")
    heads = StackedHeads(3, 4)
    params = heads.init(jax.random.key(1), x)
    assert [(site.path, site.verified) for site in see.sites(heads, params, x)] == [
        (f"heads[{n}]", True) for n in range(3)
    ]
    pattern = capture(heads, params, x).stack("pattern")  # [heads, B, 1, T, T]
    _, sown = heads.apply(params, x, mutable=["intermediates"])
    assert_close(pattern[:, :, 0], sown["intermediates"]["heads"]["attention_weights"][0])


def test_a_layer_that_is_called_twice_has_a_site_for_each_call():
    class Shared(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = MultiHeadAttention(2, name="shared")
            return layer(layer(x))

    x = jax.random.normal(jax.random.key(0), (1, 5, 8))
    params = Shared().init(jax.random.key(1), x)
    run = capture(Shared(), params, x, want=("pattern", "z"))
    assert run.paths("pattern") == ("shared", "shared@1")
    with pytest.raises(ValueError, match="no 'shared@1/z'"):
        see.edited(Shared(), params, x, edits={"shared@1/z": see.Zero()})


def test_stacked_layers_give_the_captures_of_single_ones():
    model, params = models.gpt(positions="rotary", kv_heads=2)
    stacked = {"params": attnlab.nn.stack_layers(params["params"])}
    assert_close(capture(model, stacked, TOKENS, want=ALL), capture(model, params, TOKENS, want=ALL), 2e-6)


@pytest.mark.parametrize("wrap", [nn.remat, nn.jit], ids=["remat", "jit"])
def test_values_leave_lifted_layers(wrap):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(models.VOCABULARY, models.WIDTH)(tokens)
            return wrap(models.FlaxBlock)(name="block")(x)

    params = Net().init(jax.random.key(0), TOKENS)
    expected = Net().apply(params, TOKENS)  # compiled without taps before
    found = [jax.jit(lambda p: see.capture(Net(), p, TOKENS, want=("z", "out")))(params) for _ in range(2)]
    assert_close(found[1].out, expected, 2e-6)
    assert found[1].paths("z") == ("block/attention",) and found[1].paths("out") == ("block",)


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


def test_scanned_layers_need_the_collections_and_then_have_a_site_each():
    params = Looped({}).init(jax.random.key(0), TOKENS)
    with pytest.raises(
        ValueError, match=r"blocks/block/attention is within nn.scan .* add \*\*dict.fromkeys\(attnlab.see.COLL"
    ):
        see.capture(Looped({}), params, TOKENS)
    model = Looped(dict.fromkeys(see.COLLECTIONS, 0))
    run = capture(model, params, TOKENS)
    assert run.paths("pattern") == tuple(f"blocks/block/attention[{n}]" for n in range(3))
    assert_close(run.out, Looped({}).apply(params, TOKENS), 2e-6)


def test_capture_passes_through_jit_vmap_and_grad():
    model, params = models.gpt()
    run = see.capture(model, params, TOKENS, want=("pattern",))
    jitted = jax.jit(functools.partial(see.capture, model))(params, TOKENS)
    assert jitted.order == run.order and jitted.paths("pattern") == ("block_0/attention", "block_1/attention")
    assert_close(jitted, run, 5e-6)
    each = jax.jit(jax.vmap(lambda tokens: see.capture(model, params, tokens[None]).stack("pattern")))(TOKENS)
    assert_close(each[:, :, 0], jnp.moveaxis(run.stack("pattern"), 1, 0), 5e-6)
    squares = lambda p: (see.capture(model, p, TOKENS).stack("pattern") ** 2).sum()  # noqa: E731
    gradient = jax.jit(jax.grad(squares))(params)["params"]["block_0"]["attention"]["query"]["kernel"]
    assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0


def test_chosen_rows_and_paths():
    model, params = models.gpt()
    whole = capture(model, params, TOKENS).values["pattern"]
    run = capture(model, params, TOKENS, at="block_1/*", rows=[6, 0])
    assert list(run.values["pattern"]) == ["block_1/attention"]
    assert_close(run.values["pattern"]["block_1/attention"], whole["block_1/attention"][:, :, [6, 0]], 2e-6)
    flax = capture(models.Flax(), models.variables(), TOKENS, rows=[2]).values["pattern"]["block_1/attention"]
    assert flax.shape == (2, 4, 1, 7)


def test_without_a_listener_the_program_is_the_same_text(monkeypatch):
    model, params = models.gpt(kv_heads=2)
    run = lambda p: model.apply(p, TOKENS)  # noqa: E731
    tapped = str(jax.make_jaxpr(run)(params))
    see.capture(model, params, TOKENS)
    assert str(jax.make_jaxpr(run)(params)) == tapped
    monkeypatch.setattr(taps, "tap", lambda module, name, value: value)
    monkeypatch.setattr(taps, "attended", lambda module, attend, weights, v, drops: attend())
    assert str(jax.make_jaxpr(run)(params)) == tapped


def test_init_creates_no_collections_of_its_own():
    assert set(models.gpt()[1]) == {"params"}


def test_models_are_unchanged_after_success_and_after_an_exception():
    def failing(query, key, value, mask=None, is_causal=False, **kwargs):
        raise RuntimeError("attention failed")

    class Holding(nn.Module):
        attention: nn.Module

        def __call__(self, x):
            return self.attention(x)

    x = jnp.ones((1, 4, 8))
    layer = nn.MultiHeadDotProductAttention(2, attention_fn=nn.dot_product_attention)
    params = Holding(layer).init(jax.random.key(0), x)
    bound = Holding(layer).bind(params)
    see.capture(Holding(layer), params, x)
    assert layer.attention_fn is bound.attention.attention_fn is nn.dot_product_attention
    broken = nn.MultiHeadDotProductAttention(2, attention_fn=failing)
    with pytest.raises(RuntimeError, match="attention failed"):
        see.capture(Holding(broken), params, x)
    assert broken.attention_fn is failing

    model = models.nnx_model()
    before, state = nnx.split(model)
    see.capture(model, None, TOKENS, want=("pattern", "out"))
    model.block_1.attention.attention_fn = failing
    with pytest.raises(RuntimeError, match="attention failed"):
        see.capture(model, None, TOKENS)
    assert model.block_1.attention.attention_fn is failing and type(model.block_0) is models.NnxBlock
    model.block_1.attention.attention_fn = nnx.dot_product_attention
    assert nnx.graphdef(model) == before
    assert_close(nnx.state(model), state, 0)


def test_two_threads_do_not_mix():
    model, params = models.gpt()
    both = threading.Barrier(3)

    def run(tokens, want):
        both.wait()
        return [see.capture(model, params, tokens, want=want) for _ in range(3)]

    def plain():
        both.wait()
        return [model.apply(params, TOKENS) for _ in range(6)]

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(run, TOKENS, ("pattern",)), pool.submit(run, OTHERS, ("z", "out")), pool.submit(plain)]
        first, second, outs = (job.result() for job in jobs)
    assert_close(first, [see.capture(model, params, TOKENS, want=("pattern",))] * 3, 0)
    assert_close(second, [see.capture(model, params, OTHERS, want=("z", "out"))] * 3, 0)
    assert_close(outs, [model.apply(params, TOKENS)] * 6, 0)


def test_custom_attention_functions_show_their_patterns():
    """By their output for the identity as values; one of attnlab's with a score mod, and one of a few arguments."""

    def scaled(query, key, value, mask=None):
        scores = jnp.einsum("...qhd,...khd->...hqk", 3 * query, key)
        return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(jnp.where(mask, scores, -1e9)), value)

    for fn in (scaled, attnlab.interop.flax.attention_fn(score_mod=attnlab.score_mods.SoftCap(1.0))):
        block = models.FlaxBlock(attention_fn=fn)
        x = jax.random.normal(jax.random.key(0), (2, 7, models.WIDTH))
        params = block.init(jax.random.key(1), x)
        assert see.sites(block, params, x)[0].verified
        pattern = capture(block, params, x).values["pattern"]["attention"]
        assert_close(pattern.sum(-1), np.ones(pattern.shape[:-1]), 1e-5)


def test_linen_modules_that_write_attention_out_are_read_as_functions():
    class Handmade(nn.Module):
        @nn.compact
        def __call__(self, x):
            weights = nn.softmax(x @ jnp.swapaxes(x, -1, -2))
            return nn.Dense(3)(weights @ x)

    x = jnp.ones((2, 5, 4))
    params = Handmade().init(jax.random.key(0), x)
    run = capture(Handmade(), params, x)
    assert_close(run.values["pattern"]["attention_0"], np.full((2, 5, 5), 0.2))
    with pytest.raises(ValueError, match="edits need a module of Flax"):
        see.edited(Handmade(), params, x, edits={"attention_0/z": see.Zero()})


def test_functions_skip_softmaxes_that_attend_to_nothing():
    def router(params, x):
        gates = jax.nn.softmax(x @ params)
        return gates * 2, jax.nn.softmax(x)

    with pytest.raises(ValueError, match="router has no attention that can be seen: expected layers"):
        see.capture(router, jnp.ones((4, 4)), jnp.ones((3, 4)))


def dense():
    return nn.Dense(3), nn.Dense(3).init(jax.random.key(0), jnp.ones((1, 2, 3)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m, p: see.capture(m, p, TOKENS, want="patern"),
            r"'patern' \(did you mean pattern\?\): expected some of",
        ),
        (lambda m, p: see.capture(m, p, TOKENS, at="block_7/attention"), r"'block_7/attention' \(did you mean block_"),
        (lambda m, p: see.capture(*dense(), jnp.ones((1, 2, 3))), "Dense has no attention that can be seen"),
        (lambda m, p: see.capture(3, p, TOKENS), "model is a int: expected a module of Flax"),
        (lambda m, p: see.capture(models.function, p, TOKENS, want="q"), "'q': of a plain function pattern, v, z can"),
    ],
    ids=["want", "at", "no_attention", "no_model", "function"],
)
def test_bad_input_is_one_line(call, message):
    model, params = models.gpt()
    params = models.variables() if "function" in message else params
    with pytest.raises((ValueError, TypeError), match=message) as error:
        call(model, params)
    assert "\n" not in str(error.value)


def test_attention_called_by_keyword_and_flags_by_position():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens, train):
            x = nn.Embed(models.VOCABULARY, models.WIDTH)(tokens)
            layer = MultiHeadAttention(2, dropout_rate=0.5, name="attention")
            return layer(inputs_q=x, deterministic=not train)

    params = Net().init(jax.random.key(0), TOKENS, False)
    (site,) = see.sites(Net(), params, TOKENS, False)
    assert site.verified and (site.path, site.heads, site.q_length) == ("attention", 2, 7)
    with pytest.raises(ValueError, match="the pattern is edited before dropout, which is on"):
        edits = {"attention/pattern": see.Zero()}
        see.edited(Net(), params, TOKENS, True, edits=edits, rngs={"dropout": jax.random.key(0)})


def test_patterns_of_flax_are_those_before_dropout():
    layer = nn.MultiHeadDotProductAttention(2, dropout_rate=0.5)
    x = jax.random.normal(jax.random.key(0), (1, 6, 8))
    params = layer.init(jax.random.key(1), x, deterministic=True)
    run = capture(layer, params, x, rngs={"dropout": jax.random.key(2)}, deterministic=False)
    np.testing.assert_allclose(run.values["pattern"][""].sum(-1), 1, atol=1e-6)


def test_layers_that_nn_jit_compiles_as_one_are_refused():
    compiled = nn.jit(models.FlaxBlock)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return compiled(name="block_1")(compiled(name="block_0")(x))

    x = jnp.ones((1, 4, models.WIDTH))
    params = Net().init(jax.random.key(0), x)
    with pytest.raises(ValueError, match="nn.jit compiles block_1/attention and another layer as one"):
        see.capture(Net(), params, x)


def test_rows_that_a_sequence_does_not_have_are_one_line():
    with pytest.raises(ValueError, match=r"rows = \[99\]: expected indices of 7 queries"):
        see.capture(models.Flax(), models.variables(), TOKENS, rows=[99])


def test_nnx_modules_that_write_attention_out_are_read_as_functions():
    class Handmade(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(jnp.zeros(()))

        def __call__(self, x):
            return jax.nn.softmax(self.scale * (x @ jnp.swapaxes(x, -1, -2))) @ x

    run = see.capture(Handmade(), None, jnp.ones((2, 5, 4)))
    assert_close(run.values["pattern"]["attention_0"], np.full((2, 5, 5), 0.2))
