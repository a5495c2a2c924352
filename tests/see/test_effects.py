"""Effects of edits: all in one program, equal to a loop of single edits."""

import functools

import flax.linen as nn
import jax
import numpy as np
import pytest

from attnlab import see
from attnlab.nn import GPT, MultiHeadAttention
from attnlab.see import effects
from attnlab.see.models import adapt
from tests.parameters import parameters
from tests.see import models
from tests.see.models import OTHERS, TOKENS, random, slow


def metric(logits):
    return (logits[:, -1, 3] - logits[:, -1, 5]).mean()


@functools.cache
def grouped():
    return models.gpt(attention={"kv_heads": 2})


@functools.cache
def measured(model):
    """`metric` of a model with one edit, compiled once for all heads: `measured(model)(params, key, values, where)`."""

    @functools.partial(jax.jit, static_argnums=1)
    def run(params, key, values, where):
        return metric(see.edited(model, params, TOKENS, edits={key: see.Put(values, where)}).out)

    return run


@functools.cache
def values_of(name, others=False):
    """The values of `grouped` for `TOKENS` or `OTHERS`, by path."""
    run = models.capture(*grouped(), np.concatenate([TOKENS, OTHERS]), want=("k", "pattern", "z", "in", "out"))
    return {path: x[2 * others :][:2] for path, x in run.values[name].items()}


def test_ablation_equals_a_loop_over_heads():
    model, params = grouped()
    ablated = see.ablate(model, params, TOKENS, metric, chunk=3)  # of 8 heads
    z = values_of("z")
    for layer, (path, values) in enumerate(z.items()):
        for head in range(models.HEADS):
            here = np.arange(models.HEADS)[:, None] == head
            expected = measured(model)(params, f"{path}/z", np.broadcast_to(values.mean((0, 1)), values.shape), here)
            np.testing.assert_allclose(ablated.values[layer, head], expected, rtol=0, atol=3e-6)
    np.testing.assert_allclose(ablated.baseline, metric(jax.jit(model.apply)(params, TOKENS)), atol=3e-6)
    assert ablated.axes == ("layer", "head") and ablated.paths == tuple(z) and np.abs(ablated.change).max() > 0.01


def test_all_heads_compile_once_and_other_weights_compile_nothing():
    model, params = models.gpt(num_layers=1)
    compiled = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    def own_metric(logits):
        return logits[:, 0, 1].mean()

    see.ablate(model, params, TOKENS, metric)  # compiles the small programs around the sweep
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        see.ablate(model, params, TOKENS, own_metric)
        assert len(compiled) == 1
        doubled = jax.tree.map(lambda x: np.asarray(x) * 2, params)
        see.ablate(model, doubled, TOKENS, own_metric)
        assert len(compiled) == 1
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
def test_ablating_a_head_computes_only_layers_from_its_own_on():
    """The sweep takes one forward pass, and for each head (L + 1) / 2L of one on average."""
    layers, heads = 3, 4
    model = GPT.of(vocab_size=32, num_layers=layers, num_heads=heads, width=64, context=32)
    tokens = np.zeros((1, 32), np.int32)
    params = parameters(model, tokens)
    frame, inputs = adapt(model, params, (tokens,), {})
    sweep, arrays = effects._sweep(frame, inputs, metric, "z", ("layer", "head"), None)
    all_heads = effects._swept.lower(sweep, arrays, inputs).compile().cost_analysis()["flops"]
    forward = jax.jit(lambda p: metric(model.apply(p, tokens))).lower(params).compile().cost_analysis()["flops"]
    assert all_heads <= (1 + heads * (layers + 1) / 2) * forward


@pytest.mark.parametrize(
    ("site", "over", "shape"),
    [
        ("k", ("position", "layer", "head"), (2, 2, 7)),
        ("pattern", ("layer", "head", "position"), (2, 4, 7)),
        slow("in", ("layer", "position"), (2, 7)),
        slow("out", "layer", (2,)),
    ],
)
def test_patching_equals_single_edits(site, over, shape):
    model, params = grouped()
    patched = see.patch(model, params, OTHERS, TOKENS, metric, site=site, over=over)
    assert patched.values.shape == shape
    clean = values_of(site, others=True)
    sizes = dict(zip([axis for axis in ("layer", "head", "position") if axis in over], shape))
    rng = np.random.default_rng(0)
    for _ in range(4):
        place = {axis: int(rng.integers(size)) for axis, size in sizes.items()}
        path = list(clean)[place["layer"]]
        values = clean[path]
        axes = {"head": -3 if site == "pattern" else -2}
        axes["position"] = -2 if site in ("pattern", "in", "out") else -3
        where = np.ones(values.shape, bool)
        for axis, index in place.items():
            if axis != "layer":
                selected = np.arange(values.shape[axes[axis]]) == index
                where &= np.expand_dims(selected, tuple(n for n in range(-values.ndim, 0) if n != axes[axis]))
        expected = measured(model)(params, f"{path}/{site}", values, where)
        np.testing.assert_allclose(patched.values[tuple(place.values())], expected, atol=5e-6)


def test_patching_everything_recovers_the_other_run():
    model, params = grouped()
    patched = see.patch(model, params, OTHERS, TOKENS, metric, site="out", over=("layer",))
    np.testing.assert_allclose(patched.recovered[-1], 1, atol=1e-4)
    same = see.patch(model, params, TOKENS, TOKENS, metric, site="out", over=("layer",))
    np.testing.assert_allclose(same.change, 0, atol=3e-6)
    with pytest.raises(ValueError, match="recovered needs two runs"):
        same.recovered  # noqa: B018


@pytest.mark.parametrize("kind", [slow("flax"), "nnx"])
def test_models_of_flax_have_the_same_effects_as_ours(kind):
    model, params = {"flax": (models.Flax(), models.variables()), "nnx": (models.nnx_model(), None)}[kind]
    expected = see.ablate(models.Ours(), models.variables(), TOKENS, metric).values
    np.testing.assert_allclose(see.ablate(model, params, TOKENS, metric).values, expected, atol=5e-6)


def test_a_model_with_arrays_as_fields_can_be_ablated():
    attention = MultiHeadAttention(2, mask=np.tril(np.ones((7, 7), bool)))
    x = random(2, 7, 8)
    assert see.ablate(attention, parameters(attention, x), x, lambda out: out.sum()).values.shape == (1, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, p: see.ablate(m, p, TOKENS, lambda x: x), r"metric returned \(2, 7, 11\)"),
        (lambda m, p: see.ablate(m, p, TOKENS, metric, chunk=0), "chunk = 0"),
        (lambda m, p: jax.jit(lambda p: see.ablate(m, p, TOKENS, metric).values)(p), "call this outside of jax.jit"),
        (lambda m, p: see.patch(m, p, TOKENS, TOKENS[:1], metric), r"clean has shapes .*corrupt"),
        (lambda m, p: see.patch(m, p, TOKENS, OTHERS, metric, site="w"), "site = 'w'"),
        (lambda m, p: see.patch(m, p, TOKENS, OTHERS, metric, site="in"), "site = 'in' has no heads"),
        (lambda m, p: see.patch(m, p, TOKENS, OTHERS, metric, over="head"), "expected 'layer', alone or with"),
    ],
    ids=["metric", "chunk", "jit", "shapes", "site", "heads", "over"],
)
def test_bad_input_raises_one_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call(*grouped())
    assert "\n" not in str(error.value)


def test_metric_with_changed_numbers_or_arrays_is_recomputed():
    """Programs are cached by what the metric computes, not by the function."""
    model, params = models.gpt(num_layers=1)
    logits = np.asarray(jax.jit(model.apply)(params, TOKENS))
    for token in (3, 5):  # the same function with another closure
        ablated = see.ablate(model, params, TOKENS, lambda out: out[:, -1, token].mean())  # noqa: B023
        np.testing.assert_allclose(ablated.baseline, logits[:, -1, token].mean(), atol=3e-6)
    weights = {"now": np.ones(models.VOCABULARY, np.float32)}

    def weighted(out):
        return (out[:, -1] * weights["now"]).mean()

    size = None
    for factor in (1.0, -2.0):
        weights["now"] = np.full(models.VOCABULARY, factor, np.float32)
        ablated = see.ablate(model, params, TOKENS, weighted)
        np.testing.assert_allclose(ablated.baseline, factor * logits[:, -1].mean(), atol=3e-6)
        size = size or effects._swept._cache_size()
    assert effects._swept._cache_size() == size  # the same program with another array


def test_unbatched_attention_is_averaged_only_over_positions():
    layer, x = MultiHeadAttention(2), random(1, 6, 8)
    params = parameters(layer, x)
    flax = nn.MultiHeadDotProductAttention(2)
    whole = see.ablate(layer, params, x, lambda out: out[0, 0, 0]).values
    np.testing.assert_allclose(see.ablate(flax, params, x[0], lambda out: out[0, 0]).values, whole, atol=1e-6)


def test_ablation_of_layers_called_twice_is_refused():
    with pytest.raises(ValueError, match="called several times"):
        see.ablate(models.Shared(), models.variables(models.Shared()), TOKENS, metric)
