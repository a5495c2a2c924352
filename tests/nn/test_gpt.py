"""The GPT: initialization, options, masks and decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from attnlab.masks import Causal, PrefixLM, Segments
from attnlab.nn import GPT, KVCache, stack_layers
from tests.nn.gpts import OPTIONS, TOKENS, gpt
from tests.parameters import parameters

QUICK = ("gemma", "plain", "learned, no attention", "first values")


@functools.cache
def made(option):
    """Model, variables and compiled `apply` of one of `OPTIONS`, shared between tests."""
    model = gpt(**OPTIONS[option])
    return model, parameters(model, TOKENS), jax.jit(model.apply)


@pytest.mark.parametrize("option", [pytest.param(x, marks=[pytest.mark.slow] * (x not in QUICK)) for x in OPTIONS])
def test_gpt_decoding_with_caches_equals_full_pass(option):
    model, params, apply = made(option)
    parts, caches = [], model.init_caches(batch=2)
    for chunk in (TOKENS[:, :3], TOKENS[:, 3:4], TOKENS[:, 4:5], TOKENS[:, 5:]):
        logits, caches = apply(params, chunk, caches=caches)
        parts.append(logits)
    expected = np.asarray(apply(params, TOKENS))
    # Float32 sums of up to 64 terms in another order, and √64 roundings of logits of up to 40.
    atol = max(1e-5, 8 * 2**-24 * np.abs(expected).max())
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, atol=atol)
    # A chunk of three tokens, the last one padding in the first sequence, then one more token each.
    padded, caches = apply(params, TOKENS[:, :3], caches=model.init_caches(batch=2), lengths=np.array([2, 3]))
    np.testing.assert_allclose(padded[0, :2], expected[0, :2], atol=atol)
    following, _ = apply(params, TOKENS[[0, 1], [2, 3]][:, None], caches=caches)
    np.testing.assert_allclose(following[:, 0], expected[[0, 1], [2, 3]], atol=atol)


SEGMENTS = np.repeat([0, 1], 4)
SAME = np.equal.outer(SEGMENTS, SEGMENTS)
LENGTHS = np.array([5, 1, 9, 3, 6])  # of documents
DOCUMENTS = np.repeat(np.arange(5), LENGTHS)[None]
PACKED = np.random.default_rng(1).integers(0, 11, (1, 25))


@pytest.mark.parametrize(
    "positions, stacked", [("learned", False), ("alibi", True), pytest.param("rotary", True, marks=pytest.mark.slow)]
)
def test_gpt_loss_of_packed_document_equals_loss_of_document_alone(positions, stacked, float64):
    model = gpt(positions=positions, context=24, dtype=jnp.float64, remat="block", attention={"impl": "blockwise"})
    inputs, targets = PACKED[:, :-1], PACKED[:, 1:]
    params = parameters(model, inputs[:, :1])
    params = {"params": stack_layers(params["params"])} if stacked else params
    # Each document alone, padded at its end, which a causal model ignores.
    inside = np.arange(9) < LENGTHS[:, None]
    padded = np.zeros((2, 5, 9), int)
    padded[:, inside] = inputs[0], targets[0]

    @jax.jit
    def run(params):
        packed = model.apply(params, inputs, targets=targets, segments=DOCUMENTS)
        return packed, model.apply(params, padded[0], targets=padded[1])

    packed, alone = run(params)
    assert packed.dtype == jnp.float64
    np.testing.assert_allclose(packed[0], np.asarray(alone)[inside], rtol=0, atol=1e-10)


def test_gpt_masks_in_field_and_call_equal_segments_and_causal():
    model = gpt(num_layers=1)
    fields = [model, *(gpt(num_layers=1, attention={"mask": mask}) for mask in (SAME, PrefixLM(3) & Causal()))]

    @jax.jit
    def run(params):
        expected = model.apply(params, TOKENS, mask=Segments(SEGMENTS))
        called = model.replace(remat="block").apply(params, TOKENS, mask=SAME)
        return expected, called, *(field.apply(params, TOKENS) for field in fields)

    expected, called, plain, field, prefix = run(parameters(model, TOKENS))
    np.testing.assert_allclose(called, expected, atol=1e-6)
    np.testing.assert_allclose(field, expected, atol=1e-6)
    np.testing.assert_allclose(prefix, plain, atol=1e-6)


@pytest.mark.slow
def test_gpt_mask_with_caches_equals_full_pass():
    model, params, apply = made("rotary")
    parts, caches = [], model.init_caches(batch=2)
    for at in (slice(0, 5), slice(5, 8)):
        mask = Segments(SEGMENTS[at], SEGMENTS)  # the cache has 8 slots
        logits, caches = apply(params, TOKENS[:, at], caches=caches, mask=mask)
        parts.append(logits)
    whole = apply(params, TOKENS, mask=Segments(SEGMENTS))
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=1e-5)


TOO_LARGE = TOKENS.copy()
TOO_LARGE[1, 2] = 11
CACHES = gpt().init_caches(batch=2)


@pytest.mark.parametrize(
    "tokens, options, error, message",
    [
        (jnp.asarray(TOO_LARGE), {}, ValueError, "tokens contains 11, .*0 to 10"),
        (TOKENS[0], {}, ValueError, r"tokens has shape \(8,\)"),
        (TOKENS, {"is_causal": True}, TypeError, "GPT.__call__ .*'is_causal': use mask=masks.Causal"),
        (TOKENS, {"mask": np.ones((3, 3), bool)}, ValueError, r"mask has shape \(3, 3\).*\(8, 8\)"),
        (TOKENS, {"mask": lambda b, h, i, j: i > j}, TypeError, "function"),
        (TOKENS, {"caches": gpt().init_caches(batch=3)}, ValueError, r"caches\[0\].key has shape \(3, 8, 4, 4\)"),
        (TOKENS, {"caches": KVCache.empty(2, 8, 4, 4)}, ValueError, "caches is one KVCache.*num_layers = 2"),
        (np.zeros((1, 9), int), {}, ValueError, "sequence of 9 .*8 learned positions"),
        (TOKENS, {"segments": np.zeros((2, 7), int)}, ValueError, r"segments has shape \(2, 7\).*\(2, 8\)"),
        (TOKENS, {"segments": TOKENS.astype(int) << 32}, ValueError, "segments has values from 0 to .*int32"),
        (TOKENS, {"segments": TOKENS, "caches": CACHES}, ValueError, "segments cannot be combined with caches"),
        (TOKENS, {"places": np.zeros(2, int)}, ValueError, r"places has shape \(2,\), expected \[2, places\]"),
        (TOKENS, {"places": np.full((2, 1), 8)}, ValueError, "places contains 8, expected 0 to 7"),
        (TOKENS, {"targets": TOKENS, "caches": CACHES}, ValueError, "targets .*: remove caches"),
        (TOKENS, {"targets": TOKENS[:1]}, ValueError, r"targets has shape \(1, 8\)"),
        (TOKENS, {"targets": TOKENS - 1}, ValueError, "targets contains -1, .*0 to 10"),
    ],
)
def test_gpt_invalid_argument_raises_one_line(tokens, options, error, message, own_errors):
    model, params, _ = made("learned")
    with pytest.raises(error, match=message) as raised:
        jax.eval_shape(lambda params: model.apply(params, tokens, **options), params)  # tokens is not traced
    assert "\n" not in str(raised.value)


def test_gpt_initial_weights_follow_gpt2():
    model = gpt(width=128, vocab_size=500, use_bias=True)
    logits, variables = jax.jit(model.init_with_output)(jax.random.key(1), TOKENS)
    params = jax.tree.map(np.asarray, variables["params"])
    block = params["block_1"]
    for leaf, deviation in (
        (params["embed"]["embedding"], 0.02),
        (block["attention"]["query"]["kernel"], 0.02),
        (block["mlp"]["up"]["kernel"], 0.02),
        (block["attention"]["out"]["kernel"], 0.02 / np.sqrt(4)),
        (block["mlp"]["down"]["kernel"], 0.02 / np.sqrt(4)),
    ):
        # The deviation of n draws has a relative error of 1/√(2n); five times this is allowed.
        np.testing.assert_allclose(leaf.std(), deviation, rtol=5 / np.sqrt(2 * leaf.size))
    assert all((leaf == 0).all() for leaf in (block["mlp"]["up"]["bias"], block["attention"]["query"]["bias"]))
    loss = -scipy.special.log_softmax(logits, axis=-1).mean()  # over all targets
    np.testing.assert_allclose(loss, np.log(500), rtol=0.02)


def test_gpt_output_layer_is_tied_and_mlp_ratio_sets_hidden_width():
    params = jax.eval_shape(gpt(mlp_ratio=19 / 16).init, jax.random.key(1), TOKENS)["params"]
    assert [leaf.shape for leaf in jax.tree.leaves(params) if 11 in leaf.shape] == [(11, 16)]
    assert params["block_0"]["mlp"]["up"]["kernel"].shape == (16, 19)


def test_gpt_of_gpt2_size_has_its_parameter_count():
    sizes = {"vocab_size": 50257, "num_layers": 12, "num_heads": 12, "width": 768, "context": 1024}
    model = GPT.of(**sizes, positions="learned", use_bias=True, attention={"qk_norm": False})
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 124_439_808  # Hugging Face's GPT2LMHeadModel


def test_gpt_dropout_depends_on_example_key_or_linen_rng_alone():
    model = gpt(dropout=0.3, num_layers=1)

    @jax.jit
    def run(params, key):
        keys = jax.random.split(key, 2)
        drop = jax.jit(functools.partial(model.apply, params, deterministic=False))  # traced once for each shape
        cases = ((TOKENS, keys), (TOKENS, keys[::-1]), (TOKENS[1:], keys[1:]))
        dropped = [drop(tokens, dropout_key=keys) for tokens, keys in cases]
        return *dropped, drop(TOKENS, rngs={"dropout": key}), model.apply(params, TOKENS)

    both, swapped, second, by_rng, plain = map(np.asarray, run(parameters(model, TOKENS), jax.random.key(2)))
    np.testing.assert_allclose(both[1:], second, atol=1e-5)
    assert not np.allclose(both, swapped)
    assert not np.allclose(by_rng, plain) and not np.allclose(both, plain)


def test_gpt_bfloat16_keeps_float32_parameters():
    model, (_, params, apply) = gpt(dtype=jnp.bfloat16), made("rotary")
    shapes = jax.eval_shape(model.init, jax.random.key(1), TOKENS)
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}
    logits, exact = np.asarray(jax.jit(model.apply)(params, TOKENS)), np.asarray(apply(params, TOKENS))
    assert logits.dtype == np.float32
    # Eight bits of mantissa, through about ten roundings.
    assert 0 < np.abs(logits - exact).max() < 10 * 2**-8 * np.abs(exact).max()


def test_gpt_mixes_values_with_first_layer_values():
    _, variables, apply = made("gemma")

    def logits(share, sign=1):
        """Logits with this share of the first layer's values, and later layers' own values times `sign`."""

        def changed(path, x):
            names = [key.key for key in path]
            if names[-1] == "value_share":
                return np.full_like(x, share)
            return sign * x if "value" in names and "block_0" not in names else x

        return np.asarray(apply(jax.tree_util.tree_map_with_path(changed, variables), TOKENS))

    without = {kind: OPTIONS["gemma"][kind] | {"value_residual": False} for kind in ("local", "attention")}
    plain = gpt(**OPTIONS["gemma"] | without)
    same = jax.tree.map(lambda x: x, variables["params"])
    for layer in range(3):
        share = same[f"block_{layer}"]["attention"].pop("value_share")
        assert share.shape == ()
    np.testing.assert_allclose(logits(0), jax.jit(plain.apply)({"params": same}, TOKENS), atol=1e-6)
    assert not np.allclose(logits(0.5), logits(0), atol=1e-4)
    # Float32 roundings of v + (first − v), through three layers.
    np.testing.assert_allclose(logits(1, sign=-1), logits(1), atol=1e-5)


def test_gpt_logits_and_losses_at_places_equal_full_pass():
    (model, params, _), targets = made("plain"), np.roll(TOKENS, -1, axis=1)
    places = np.array([[7, 0, 3], [2, 2, 5]], np.int32)

    def at(x):
        return np.take_along_axis(np.asarray(x), places.reshape(2, 3, *[1] * (np.ndim(x) - 2)), axis=1)

    @jax.jit
    def run(params):
        calls = {}, {"targets": targets}, {"places": places}, {"targets": at(targets), "places": places}
        return [model.apply(params, TOKENS, **options) for options in calls]

    *expected, logits, losses = run(params)
    np.testing.assert_allclose(logits, at(expected[0]), atol=1e-5)
    np.testing.assert_allclose(losses, at(expected[1]), atol=1e-5)


@pytest.mark.parametrize(
    "options, chunk",
    [pytest.param({}, 8, marks=pytest.mark.slow), ({"tie_embeddings": False, "logit_cap": 2.0}, 3)],
    ids=["tied", "untied, capped and in chunks"],
)
def test_gpt_with_padded_vocabulary_equals_unpadded_model(options, chunk, monkeypatch):
    monkeypatch.setattr("attnlab.nn.logits.chunk_size", lambda *sizes: chunk)
    model = gpt(num_layers=1, **options)
    padded = model.replace(padded_vocab_size=16)
    assert gpt(vocab_size=16, num_layers=1, **options).over_tokens(11) == padded
    params = parameters(padded, TOKENS)["params"]
    tables = [name for name in ("embed", "output") if name in params]

    def without_padding(params):
        return params | {name: {"embedding": params[name]["embedding"][:11]} for name in tables}

    def computed(model, params):
        def loss(params):
            return model.apply({"params": params}, TOKENS, targets=np.roll(TOKENS, -1, axis=1)).mean()

        return model.apply({"params": params}, TOKENS), *jax.value_and_grad(loss)(params)

    actual, expected = jax.jit(lambda p: (computed(padded, p), computed(model, without_padding(p))))(params)
    for name in tables:
        assert not np.asarray(actual[2][name]["embedding"])[11:].any()
    actual = *actual[:2], without_padding(actual[2])
    # Sums of 16 products, computed by two programs, through one layer.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), actual, expected)


def test_gpt_with_zero_outputs_starts_as_its_embedding():
    model = gpt(zero_outputs=True, num_layers=1)
    logits, variables = jax.jit(model.init_with_output)(jax.random.key(0), TOKENS)
    embedding = np.asarray(variables["params"]["embed"]["embedding"])
    x = embedding[TOKENS]
    normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(logits, normal @ embedding.T, atol=1e-5)


def test_gpt_attention_biases_default_to_biases_of_model():
    for use_bias, qkv_bias, expected in (
        (None, None, (True, True)),
        (False, None, (False, False)),
        (False, True, (False, True)),
        (None, False, (True, False)),
    ):
        model = gpt(use_bias=True, attention={"use_bias": use_bias, "qkv_bias": qkv_bias})
        shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]["block_0"]["attention"]
        assert ("bias" in shapes["out"], "bias" in shapes["query"]) == expected
