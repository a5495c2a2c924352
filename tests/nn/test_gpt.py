"""The GPT: initialisation, causality, its options, and decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.nn import GPT, Block, Mlp, MultiHeadAttention

TOKENS = jax.random.randint(jax.random.key(0), (2, 8), 0, 11)
OPTIONS = {
    "learned": {},
    "sinusoidal": {"positions": "sinusoidal"},
    "rotary": {"positions": "rotary"},
    "alibi": {"positions": "alibi"},
    "none": {"positions": "none"},
    "window": {"window": 3},
    "grouped": {"kv_heads": 2, "qk_norm": True},
    "no bias": {"use_bias": False},
    "relu": {"mlp_ratio": 2.3, "activation": "relu", "norm_epsilon": 1e-3},
}


def gpt(**options):
    return GPT(**({"vocab_size": 11, "num_layers": 2, "num_heads": 4, "width": 16, "context": 8} | options))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_no_token_sees_a_later_one(options):
    model = gpt(**options)
    params = model.init(jax.random.key(1), TOKENS)
    changed = TOKENS.at[:, 5].set((TOKENS[:, 5] + 1) % 11)
    apply = jax.jit(model.apply)
    before, after = apply(params, TOKENS), apply(params, changed)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert not np.allclose(before[:, 5], after[:, 5])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_decoding_through_caches_gives_the_answers_of_the_full_pass(options):
    model = gpt(**options)
    params = model.init(jax.random.key(1), TOKENS)
    parts, caches = [], model.empty_caches(batch=2)
    for chunk in (TOKENS[:, :3], TOKENS[:, 3:4], TOKENS[:, 4:]):
        logits, caches = jax.jit(model.apply)(params, chunk, caches=caches)
        parts.append(logits)
    # Float32 sums of 16 to 64 terms in another order, through two layers.
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), model.apply(params, TOKENS), atol=1e-5)


def test_it_starts_as_gpt_2_does():
    model = gpt(width=256, num_layers=8, vocab_size=500)
    params = model.init(jax.random.key(1), TOKENS)["params"]
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
    logits = model.apply({"params": params}, TOKENS)
    loss = -jax.nn.log_softmax(logits).mean()  # over all targets
    np.testing.assert_allclose(loss, np.log(500), rtol=0.02)


def test_output_and_input_share_one_embedding():
    params = gpt().init(jax.random.key(1), TOKENS)["params"]
    assert [leaf.shape for leaf in jax.tree.leaves(params) if 11 in leaf.shape] == [(11, 16)]


def test_gpt2_sizes_have_gpt2s_number_of_parameters():
    model = GPT(vocab_size=50257, num_layers=12, num_heads=12, width=768, context=1024)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 124_439_808  # Hugging Face's GPT2LMHeadModel


def test_dropout_of_an_example_depends_on_its_key_alone():
    model = gpt(dropout=0.3)
    params = model.init(jax.random.key(1), TOKENS)
    keys = jax.random.split(jax.random.key(2), 2)

    def run(tokens, keys):
        return model.apply(params, tokens, deterministic=False, dropout_key=keys)

    np.testing.assert_allclose(run(TOKENS, keys)[1:], run(TOKENS[1:], keys[1:]), atol=1e-5)
    assert not np.allclose(run(TOKENS, keys), run(TOKENS, keys[::-1]))


def test_dropout_also_takes_the_rng_of_linen():
    model = gpt(dropout=0.3)
    params = model.init(jax.random.key(1), TOKENS)
    out = model.apply(params, TOKENS, deterministic=False, rngs={"dropout": jax.random.key(0)})
    assert not np.allclose(out, model.apply(params, TOKENS))


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_parameters():
    model = gpt(dtype=jnp.bfloat16)
    params = model.init(jax.random.key(1), TOKENS)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    logits = model.apply(params, TOKENS)
    assert logits.dtype == jnp.float32
    exact = gpt().apply(params, TOKENS)
    # Eight bits of mantissa, through some ten roundings.
    assert 0 < jnp.abs(logits - exact).max() < 10 * 2**-8 * jnp.abs(exact).max()


@pytest.mark.parametrize(
    "options, length, message",
    [
        ({}, 9, "a sequence of 9 tokens is longer than the 8 learned positions"),
        ({"num_heads": 3}, 8, "width 16 is not divisible by 3 heads"),
        ({"positions": "absolute"}, 8, "positions = 'absolute': expected one of learned, sinusoidal, rotary"),
        ({"window": 0}, 8, "window = 0: expected 1 position or more"),
        ({"mlp_ratio": 0.01}, 8, "mlp_ratio = 0.01 of width 16 leaves no width: use 1/width or more"),
        ({"activation": "swiglu"}, 8, "activation = 'swiglu': expected one of gelu_tanh, gelu, relu, silu"),
    ],
)
def test_a_bad_option_is_one_line(options, length, message):
    with pytest.raises(ValueError, match=message):
        gpt(**options).init(jax.random.key(0), jnp.zeros((1, length), jnp.int32))


@pytest.mark.parametrize(
    "activation, function",
    [
        ("gelu_tanh", lambda x: x / 2 * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (x + 0.044715 * x**3)))),
        ("gelu", lambda x: x * jax.scipy.stats.norm.cdf(x)),
        ("relu", lambda x: jnp.maximum(x, 0)),
        ("silu", lambda x: x / (1 + jnp.exp(-x))),
    ],
)
def test_a_feed_forward_layer_is_its_formula(activation, function, float64):
    x = jax.random.normal(jax.random.key(0), (3, 8))
    y, variables = Mlp(19, activation).init_with_output(jax.random.key(1), x)
    up, down = variables["params"]["up"], variables["params"]["down"]
    assert up["kernel"].shape == (8, 19)
    expected = function(x @ up["kernel"] + up["bias"]) @ down["kernel"] + down["bias"]
    np.testing.assert_allclose(y, expected, rtol=1e-12)


def test_a_block_may_normalise_what_comes_out_as_in_the_paper(float64):
    x = 3 * jax.random.normal(jax.random.key(0), (2, 5, 8)) + 1
    block = Block(MultiHeadAttention(num_heads=2), Mlp(), norm_first=False, norm_epsilon=0.1)
    y, variables = block.init_with_output(jax.random.key(1), x)
    params = variables["params"]

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 0.1)

    x = norm(x + MultiHeadAttention(num_heads=2).apply({"params": params["attention"]}, x))
    np.testing.assert_allclose(y, norm(x + Mlp().apply({"params": params["mlp"]}, x)), rtol=1e-10)


def test_the_feed_forward_layer_may_have_any_width():
    params = gpt(mlp_ratio=19 / 16).init(jax.random.key(0), TOKENS)["params"]
    assert params["block_0"]["mlp"]["up"]["kernel"].shape == (16, 19)


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "alibi", "none"])
def test_without_learned_positions_a_sequence_may_be_longer_than_the_context(positions):
    model = gpt(positions=positions)
    params = model.init(jax.random.key(1), TOKENS)
    assert model.apply(params, jnp.tile(TOKENS, (1, 2))).shape == (2, 16, 11)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_remat_computes_blocks_again_for_the_same_gradients(dropout):
    model = GPT(vocab_size=11, num_layers=2, num_heads=2, width=32, context=16, dropout=dropout)
    tokens = jnp.arange(4 * 16).reshape(4, 16) % 11
    params = model.init(jax.random.key(0), tokens)

    def compiled(model):
        def loss(params, tokens, key):
            logits = model.apply(params, tokens, deterministic=False, dropout_key=key)
            return jax.nn.logsumexp(logits, axis=-1).mean()

        return jax.jit(jax.grad(loss)).lower(params, tokens, jax.random.key(1)).compile()

    kept, again = compiled(model), compiled(model.clone(remat=True))
    gradients = [program(params, tokens, jax.random.key(1)) for program in (kept, again)]
    # Other programs, other orders of float32 sums over 64 tokens, relative to the largest gradient.
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradients[0]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * largest), *gradients)
    flops = [program.cost_analysis()["flops"] for program in (kept, again)]
    assert flops[1] > 1.15 * flops[0]
