"""The GPT: initialization, causality, options, masks and decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from attnlab.masks import Segments
from attnlab.nn import GPT, Block, KVCache, Mlp, MultiHeadAttention, stack_layers

TOKENS = np.random.default_rng(0).integers(0, 11, (2, 8), dtype=np.int32)
OPTIONS = {
    "learned": {},
    "sinusoidal": {"positions": "sinusoidal"},
    "rotary": {"positions": "rotary"},
    "alibi": {"positions": "alibi"},
    "none": {"positions": "none"},
    "window": {"window": 3},
    "soft cap": {"soft_cap": 0.5, "positions": "alibi"},
    "grouped": {"kv_heads": 2, "qk_norm": True},
    "no bias": {"use_bias": False},
    "relu": {"mlp_ratio": 2.3, "activation": "relu", "norm_epsilon": 1e-3},
}


def gpt(**options):
    return GPT(**({"vocab_size": 11, "num_layers": 2, "num_heads": 4, "width": 16, "context": 8} | options))


@functools.cache
def made(option):
    """Model, variables and compiled `apply` of one of `OPTIONS`, shared between tests."""
    model = gpt(**OPTIONS[option])
    return model, jax.jit(model.init)(jax.random.key(1), TOKENS), jax.jit(model.apply)


@pytest.mark.parametrize("option", OPTIONS)
def test_gpt_later_token_changes_no_earlier_logits(option):
    _, params, apply = made(option)
    changed = TOKENS.copy()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = np.asarray(apply(params, TOKENS)), np.asarray(apply(params, changed))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert not np.allclose(before[:, 5], after[:, 5])


@pytest.mark.parametrize("option", OPTIONS)
def test_gpt_decoding_with_caches_equals_full_pass(option):
    model, params, apply = made(option)
    parts, caches = [], model.empty_caches(batch=2)
    for chunk in (TOKENS[:, :3], TOKENS[:, 3:4], TOKENS[:, 4:5], TOKENS[:, 5:]):
        logits, caches = apply(params, chunk, caches=caches)
        parts.append(logits)
    # Float32 sums of 16 to 64 terms in another order, through two layers.
    np.testing.assert_allclose(np.concatenate(parts, axis=1), apply(params, TOKENS), atol=1e-5)


SEGMENTS = np.array([0, 0, 0, 1, 1, 1, 1, 1])


def test_gpt_segments_mask_separates_packed_documents():
    _, params, apply = made("rotary")
    packed = np.asarray(apply(params, TOKENS, mask=Segments(SEGMENTS)))
    # Rotary scores depend on differences of positions alone, so the second document may start at any position.
    apart = [apply(params, TOKENS[:, :3]), apply(params, TOKENS[:, 3:])]
    np.testing.assert_allclose(packed, np.concatenate(apart, axis=1), atol=1e-5)
    assert not np.allclose(packed[:, 3:], np.asarray(apply(params, TOKENS))[:, 3:], atol=1e-3)


LENGTHS = (5, 1, 9, 3, 6)  # of documents
DOCUMENTS = np.repeat(np.arange(5), LENGTHS)[None]
PACKED = np.random.default_rng(1).integers(0, 11, (1, 25))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary", "alibi"])
def test_gpt_loss_of_packed_document_equals_that_of_the_document_alone(positions, stacked, float64):
    model = gpt(positions=positions, context=24, dtype=jnp.float64, remat="block", impl="blockwise")
    inputs, targets = PACKED[:, :-1], PACKED[:, 1:]
    params = jax.tree.map(lambda x: x.astype(jnp.float64), model.init(jax.random.key(0), inputs[:, :1]))
    params = {"params": stack_layers(params["params"])} if stacked else params
    packed = model.apply(params, inputs, targets=targets, segments=DOCUMENTS)
    assert packed.dtype == jnp.float64
    for start, length in zip(np.cumsum((0, *LENGTHS)), LENGTHS):
        at = np.s_[:, start : start + length]
        np.testing.assert_allclose(model.apply(params, inputs[at], targets=targets[at]), packed[at], rtol=0, atol=1e-10)


def test_gpt_segments_of_another_shape_or_with_caches_raise(own_errors):
    model, variables, _ = made("learned")
    with pytest.raises(ValueError, match=r"segments has shape \(2, 7\), expected \(2, 8\): the number of each token's"):
        model.apply(variables, TOKENS, segments=np.zeros((2, 7), int))
    with pytest.raises(
        ValueError, match="segments are of whole sequences, whose positions they tell: leave out caches"
    ):
        model.apply(variables, TOKENS, segments=np.zeros((2, 8), int), caches=model.empty_caches(2))


@pytest.mark.parametrize("remat", ["none", "block"])
def test_gpt_bool_mask_equals_segments(remat):
    model, params, apply = made("rotary")
    array = np.equal.outer(SEGMENTS, SEGMENTS)
    masked = jax.jit(lambda params: model.clone(remat=remat).apply(params, TOKENS, mask=array))(params)
    np.testing.assert_allclose(masked, apply(params, TOKENS, mask=Segments(SEGMENTS)), atol=1e-6)


def test_gpt_mask_with_caches_equals_full_pass():
    model, params, apply = made("rotary")
    parts, caches = [], model.empty_caches(batch=2)
    for at in (slice(0, 5), slice(5, 8)):
        mask = Segments(SEGMENTS[at], SEGMENTS)  # the cache has 8 slots
        logits, caches = apply(params, TOKENS[:, at], caches=caches, mask=mask)
        parts.append(logits)
    whole = apply(params, TOKENS, mask=Segments(SEGMENTS))
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=1e-5)


TOO_LARGE = TOKENS.copy()
TOO_LARGE[1, 2] = 11


@pytest.mark.parametrize(
    "tokens, options, error, message",
    [
        (jnp.asarray(TOO_LARGE), {}, ValueError, "tokens contains 11, expected ids from 0 to 10: encode the text"),
        (np.full((2, 8), -1), {}, ValueError, "tokens contains -1, expected ids from 0 to 10"),
        (TOKENS[0], {}, ValueError, r"tokens has shape \(8,\), expected \[batch, length\]"),
        (TOKENS, {"is_causal": True}, TypeError, "GPT.__call__ has no argument 'is_causal': use mask=masks.Causal"),
        (TOKENS, {"mask": np.ones((3, 3), bool)}, ValueError, r"mask has shape \(3, 3\), expected exactly \(8, 8\)"),
        (TOKENS, {"mask": lambda b, h, i, j: i > j}, TypeError, "function"),
        (TOKENS, {"caches": gpt().empty_caches(batch=3)}, ValueError, r"caches\[0\].key has shape \(3, 8, 4, 4\)"),
        (TOKENS, {"caches": gpt().empty_caches(batch=2)[:1]}, ValueError, "caches is 1 of them, .* num_layers = 2"),
        (TOKENS, {"caches": KVCache.empty(2, 8, 4, 4)}, ValueError, "caches is one KVCache, .* num_layers = 2"),
    ],
)
def test_gpt_invalid_argument_raises_one_line(tokens, options, error, message, own_errors):
    _, params, _ = made("learned")
    with pytest.raises(error, match=message) as raised:
        gpt().apply(params, tokens, **options)
    assert "\n" not in str(raised.value)


def test_gpt_initial_weights_follow_gpt2():
    model = gpt(width=256, num_layers=8, vocab_size=500)
    # Not compiled as a whole: eight equal layers share their operations' programs.
    logits, variables = model.init_with_output(jax.random.key(1), TOKENS)
    params = jax.tree.map(np.asarray, variables["params"])
    block = params["block_3"]
    for leaf, deviation in (
        (params["embed"]["embedding"], 0.02),
        (block["attention"]["query"]["kernel"], 0.02),
        (block["mlp"]["up"]["kernel"], 0.02),
        (block["attention"]["out"]["kernel"], 0.02 / np.sqrt(16)),
        (block["mlp"]["down"]["kernel"], 0.02 / np.sqrt(16)),
    ):
        # The deviation of n draws is known to 1/√(2n): five times that.
        np.testing.assert_allclose(leaf.std(), deviation, rtol=5 / np.sqrt(2 * leaf.size))
    assert all((leaf == 0).all() for leaf in (block["mlp"]["up"]["bias"], block["attention"]["query"]["bias"]))
    loss = -jax.nn.log_softmax(logits).mean()  # over all targets
    np.testing.assert_allclose(loss, np.log(500), rtol=0.02)


def test_gpt_output_layer_is_tied_to_embedding():
    params = jax.eval_shape(gpt().init, jax.random.key(1), TOKENS)["params"]
    assert [leaf.shape for leaf in jax.tree.leaves(params) if 11 in leaf.shape] == [(11, 16)]


def test_gpt_of_gpt2_size_has_its_parameter_count():
    model = GPT(vocab_size=50257, num_layers=12, num_heads=12, width=768, context=1024)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 124_439_808  # Hugging Face's GPT2LMHeadModel


def test_gpt_dropout_depends_on_example_key_alone():
    model = gpt(dropout=0.3)
    _, params, _ = made("learned")  # those of the model with dropout, too

    @jax.jit
    def run(params, keys):
        drop = functools.partial(model.apply, params, deterministic=False)
        cases = ((TOKENS, keys), (TOKENS[1:], keys[1:]), (TOKENS, keys[::-1]))
        return [drop(tokens, dropout_key=keys) for tokens, keys in cases]

    both, second, swapped = map(np.asarray, run(params, jax.random.split(jax.random.key(2), 2)))
    np.testing.assert_allclose(both[1:], second, atol=1e-5)
    assert not np.allclose(both, swapped)


def test_gpt_dropout_without_key_uses_linen_rng():
    model = gpt(dropout=0.3)
    _, params, apply = made("learned")
    dropping = jax.jit(functools.partial(model.apply, deterministic=False))
    out = dropping(params, TOKENS, rngs={"dropout": jax.random.key(0)})
    assert not np.allclose(out, apply(params, TOKENS))


def test_gpt_bfloat16_keeps_float32_parameters():
    model = gpt(dtype=jnp.bfloat16)
    logits, params = jax.jit(model.init_with_output)(jax.random.key(1), TOKENS)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert logits.dtype == jnp.float32
    exact = np.asarray(made("learned")[2](params, TOKENS))
    # Eight bits of mantissa, through some ten roundings.
    assert 0 < np.abs(logits - exact).max() < 10 * 2**-8 * np.abs(exact).max()


@pytest.mark.parametrize(
    "options, length, message",
    [
        ({}, 9, "a sequence of 9 tokens is longer than the 8 learned positions"),
        ({"num_heads": 3}, 8, "width = 16 is not divisible by num_heads = 3: use a multiple, e.g. 15"),
        ({"positions": "absolute"}, 8, "positions = 'absolute': expected one of learned, sinusoidal, rotary"),
        ({"window": 0}, 8, "window = 0: expected 1 position or more"),
        ({"window": -1}, 8, "window = -1: expected 1 position or more"),
        ({"kv_heads": 3}, 8, "num_heads = 4 is not a multiple of kv_heads = 3: use a divisor, e.g. 1"),
        ({"kv_heads": 0}, 8, "kv_heads = 0: expected 1 or more"),
        ({"num_heads": 0}, 8, "num_heads = 0: expected 1 or more"),
        ({"num_heads": 16, "positions": "rotary"}, 8, "a head has 1 .* choose an even width / num_heads"),
        ({"width": 15, "num_heads": 3, "positions": "sinusoidal"}, 8, "width = 15 is odd: sinusoidal positions need"),
        ({"mlp_ratio": 0.01}, 8, "mlp_ratio = 0.01 times width = 16 rounds to 0: use 1/16 or more"),
        ({"activation": "swiglu"}, 8, "activation = 'swiglu': expected one of gelu_tanh, gelu, relu, silu"),
    ],
)
def test_gpt_invalid_option_raises_one_line(options, length, message):
    with pytest.raises(ValueError, match=message):
        gpt(**options).init(jax.random.key(0), jnp.zeros((1, length), jnp.int32))


@pytest.mark.parametrize(
    "activation, function",
    [
        ("gelu_tanh", lambda x: x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))),
        ("gelu", lambda x: x * scipy.special.ndtr(x)),
        ("relu", lambda x: np.maximum(x, 0)),
        ("silu", lambda x: x / (1 + np.exp(-x))),
    ],
)
def test_mlp_equals_formula(activation, function, float64):
    x = np.random.default_rng(0).standard_normal((3, 8))
    y, variables = jax.jit(Mlp(19, activation).init_with_output)(jax.random.key(1), x)
    params = jax.tree.map(np.asarray, variables["params"])
    up, down = params["up"], params["down"]
    assert up["kernel"].shape == (8, 19)
    expected = function(x @ up["kernel"] + up["bias"]) @ down["kernel"] + down["bias"]
    np.testing.assert_allclose(y, expected, rtol=1e-12)


def test_block_post_norm_equals_formula(float64):
    x = 3 * np.random.default_rng(0).standard_normal((2, 5, 8)) + 1
    block = Block(MultiHeadAttention(num_heads=2), Mlp(), norm_first=False, norm_epsilon=0.1)

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 0.1)

    @jax.jit
    def run(key):
        y, variables = block.init_with_output(key, x)
        params = variables["params"]
        attended = norm(x + MultiHeadAttention(num_heads=2).apply({"params": params["attention"]}, x))
        return y, norm(attended + Mlp().apply({"params": params["mlp"]}, attended))

    np.testing.assert_allclose(*run(jax.random.key(1)), rtol=1e-10)


def test_gpt_mlp_ratio_sets_hidden_width():
    params = jax.eval_shape(gpt(mlp_ratio=19 / 16).init, jax.random.key(0), TOKENS)["params"]
    assert params["block_0"]["mlp"]["up"]["kernel"].shape == (16, 19)


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "alibi", "none"])
def test_gpt_accepts_long_input_without_learned_positions(positions):
    model, params, _ = made(positions)
    long = np.tile(TOKENS, (1, 2))
    assert jax.eval_shape(model.apply, params, long).shape == (2, 16, 11)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gpt_remat_recomputes_blocks_for_same_gradients(dropout):
    model = GPT(vocab_size=11, num_layers=2, num_heads=2, width=32, context=16, dropout=dropout)
    tokens = np.arange(4 * 16, dtype=np.int32).reshape(4, 16) % 11
    params = jax.jit(model.init)(jax.random.key(0), tokens)

    def compiled(model):
        def loss(params, tokens, key):
            logits = model.apply(params, tokens, deterministic=False, dropout_key=key)
            return jax.nn.logsumexp(logits, axis=-1).mean()

        return jax.jit(jax.grad(loss)).lower(params, tokens, jax.random.key(1)).compile()

    kept, again = compiled(model), compiled(model.clone(remat="block"))
    gradients = [program(params, tokens, jax.random.key(1)) for program in (kept, again)]
    # Other programs, other orders of float32 sums over 64 tokens, relative to the largest gradient.
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(gradients[0]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * largest), *gradients)
    flops = [program.cost_analysis()["flops"] for program in (kept, again)]
    assert flops[1] > 1.15 * flops[0]
