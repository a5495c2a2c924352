"""The GPT: initialization, causality, options, masks and decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from attnlab.masks import Causal, PrefixLM, Segments
from attnlab.nn import GPT, Block, KVCache, Mlp, MultiHeadAttention, Rotary, stack_layers

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
    "attention only": {"mlp_ratio": 0, "positions": "rotary"},
    "llama": {
        "positions": "rotary",
        "rotary": Rotary(scaling="llama3", factor=4.0, original_context=20, fast_turns=2.0),
        "norm": "rms",
        "mlp": "gated",
        "activation": "silu",
        "use_bias": False,
        "qkv_bias": True,
        "tie_embeddings": False,
        "head_dim": 6,
        "kv_heads": 2,
    },
    "gemma": {
        "positions": "rotary",
        "rotary": Rotary(base=100.0, scaling="linear", factor=2.0),
        "local_base": 10.0,
        "num_layers": 5,
        "pattern": "local local global",
        "window": 3,
        "norm": "rms_plus_one",
        "norm_at": "both",
        "mlp": "gated",
        "qk_norm": True,
        "use_bias": False,
        "embedding_scale": 4.0,
        "score_scale": 0.7,
        "logit_cap": 2.0,
        "soft_cap": 1.5,
    },
    "olmo": {
        "positions": "rotary",
        "norm": "rms",
        "norm_at": "after",
        "qk_norm": True,
        "qk_norm_joint": True,
        "use_bias": False,
        "attention_bias": True,
        "sinks": True,
        "logit_scale": 3.0,
        "kv_heads": 2,
        "activation": "relu_squared",
    },
    "residual": {
        "positions": "rotary",
        "num_layers": 4,
        "value_residual": True,
        "bigrams": True,
        "kv_heads": 2,
        "window": 3,
        "pattern": "local local global",
    },
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
        ({"mlp_ratio": -1}, 8, "mlp_ratio = -1 times width = 16 rounds to -16: use 1/16 or more, or 0 for no feed"),
        ({"activation": "swiglu"}, 8, "activation = 'swiglu': expected one of gelu_tanh, gelu, relu, relu_squared"),
        ({"norm": "batch"}, 8, "norm = 'batch': expected one of layer, rms, rms_plus_one"),
        ({"norm_at": "start"}, 8, "norm_at = 'start': expected one of before, after, both"),
        ({"mlp": "swiglu"}, 8, "mlp = 'swiglu': expected one of plain, gated"),
        ({"pattern": "local far"}, 8, "pattern = 'local far' has 'far': expected the words local and global"),
        ({"pattern": "local global"}, 8, "pattern = 'local global', but window = None: give the window of its local"),
        ({"head_dim": 3, "positions": "rotary"}, 8, "a head has 3 .* or head_dim"),
        ({"local_base": 0.0}, 8, "local_base = 0.0: expected a number above 0, or None"),
        ({"logit_cap": 0.0}, 8, "logit_cap = 0.0: expected a number of logits above 0, or None"),
        ({"qk_norm_joint": True}, 8, "qk_norm_joint = True, but qk_norm = False: set both"),
        ({"positions": "rotary", "rotary": Rotary(scaling="x")}, 8, "rotary.scaling = 'x': expected one of none"),
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
        ("relu_squared", lambda x: np.maximum(x, 0) ** 2),
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


def test_gated_mlp_equals_formula(float64):
    x = np.random.default_rng(0).standard_normal((3, 8))
    y, variables = jax.jit(Mlp(19, "silu", gated=True).init_with_output)(jax.random.key(1), x)
    up, gate, down = (variables["params"][name] for name in ("up", "gate", "down"))
    gates = np.asarray(x @ gate["kernel"] + gate["bias"])
    expected = (gates / (1 + np.exp(-gates)) * (x @ up["kernel"] + up["bias"])) @ down["kernel"] + down["bias"]
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


@pytest.mark.parametrize("norm_first", [True, False])
def test_block_without_mlp_equals_formula(norm_first, float64):
    x = 3 * np.random.default_rng(0).standard_normal((2, 5, 8)) + 1
    block = Block(MultiHeadAttention(num_heads=2), norm_first=norm_first, norm_epsilon=0.1)

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 0.1)

    @jax.jit
    def run(key):
        y, variables = block.init_with_output(key, x)
        attention = functools.partial(
            MultiHeadAttention(num_heads=2).apply, {"params": variables["params"]["attention"]}
        )
        return y, x + attention(norm(x)) if norm_first else norm(x + attention(x))

    np.testing.assert_allclose(*run(jax.random.key(1)), rtol=1e-10)


def test_gpt_of_attention_alone_has_no_mlp_parameters():
    _, variables, _ = made("attention only")
    params = variables["params"]
    assert set(params["block_0"]) == {"attention", "attention_norm"}
    # Embedding, two layers of four projections, three norms.
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 11 * 16 + 2 * 4 * (16 + 1) * 16 + 3 * 2 * 16


@pytest.mark.parametrize("remat", ["none", "block"])
def test_gpt_of_attention_alone_stacked_equals_plain_pass(remat):
    model, variables, apply = made("attention only")
    stacked = {"params": stack_layers(variables["params"])}
    looped = jax.jit(model.clone(remat=remat).apply)
    logits = np.asarray(apply(variables, TOKENS))
    # Float32 sums of 16 terms in another order, through two layers.
    np.testing.assert_allclose(looped(stacked, TOKENS), logits, atol=1e-5)
    targets = np.roll(TOKENS, -1, axis=1)
    expected = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), targets[..., None], axis=-1)[..., 0]
    for params in (variables, stacked):
        np.testing.assert_allclose(looped(params, TOKENS, targets=targets), expected, atol=1e-5)


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


def reference(params, tokens, *, window, base, norm_at, plus_one, epsilon=1e-5):
    """Logits of a GPT of one layer and two heads of four features, written from the formulas, float64."""

    def norm(x, params):
        scale = params["scale"] + plus_one
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale

    x = params["embed"]["embedding"][tokens] * 3.0
    block = params["block_0"]
    attention = block["attention"]
    y = norm(x, block["attention_norm"]) if norm_at != "after" else x
    q, k, v = (np.einsum("tf,fhd->thd", y, attention[name]["kernel"]) for name in ("query", "key", "value"))
    q, k = (norm(a, attention[name]) for a, name in ((q, "query_ln"), (k, "key_ln")))
    angles = np.arange(len(tokens))[:, None] / base ** (np.arange(0, 4, 2) / 4)
    turn = np.exp(1j * angles)[:, None]

    def rotated(a):
        z = (a[..., :2] + 1j * a[..., 2:]) * turn
        return np.concatenate([z.real, z.imag], -1)

    scores = np.einsum("qhd,khd->hqk", rotated(q), rotated(k)) * 0.7
    i, j = np.indices(scores.shape[1:])
    scores = np.where((j <= i) & (i - j < window), scores, -np.inf)
    weights = scipy.special.softmax(
        np.concatenate([scores, np.tile(attention["sinks"][:, None, None], (1, 8, 1))], -1), -1
    )
    made = np.einsum("hqk,khd,hdf->qf", weights[..., :-1], v, attention["out"]["kernel"])
    x = x + (norm(made, block["attention_post_norm"]) if norm_at != "before" else made)
    y = norm(x, block["mlp_norm"]) if norm_at != "after" else x
    gates = y @ block["mlp"]["gate"]["kernel"]
    made = (gates * scipy.special.expit(gates) * (y @ block["mlp"]["up"]["kernel"])) @ block["mlp"]["down"]["kernel"]
    x = x + (norm(made, block["mlp_post_norm"]) if norm_at != "before" else made)
    return 2.0 * np.tanh(norm(x, params["final_norm"]) @ params["output"]["embedding"].T * 1.5 / 2.0)


@pytest.mark.parametrize("norm_at", ["before", "after", "both"])
@pytest.mark.parametrize("kind", ["local", "global"])
def test_gpt_of_todays_models_equals_formula(norm_at, kind, float64):
    options = {"norm": "rms_plus_one" if kind == "local" else "rms", "norm_at": norm_at, "qk_norm": True}
    model = gpt(
        num_layers=1,
        num_heads=2,
        head_dim=4,
        positions="rotary",
        rotary=Rotary(base=100.0),
        local_base=10.0,
        window=3,
        pattern=kind,
        mlp="gated",
        activation="silu",
        use_bias=False,
        tie_embeddings=False,
        sinks=True,
        score_scale=0.7,
        embedding_scale=3.0,
        logit_scale=1.5,
        logit_cap=2.0,
        dtype=jnp.float64,
        **options,
    )
    key = jax.random.key(0)
    params = jax.tree.map(
        lambda x: 0.3 * jax.random.normal(jax.random.fold_in(key, x.size), x.shape, jnp.float64),
        jax.eval_shape(model.init, key, TOKENS),
    )
    window, base = (3, 10.0) if kind == "local" else (99, 100.0)
    plus_one = 1 if kind == "local" else 0
    arrays = jax.tree.map(np.asarray, params["params"])
    expected = reference(arrays, TOKENS[0], window=window, base=base, norm_at=norm_at, plus_one=plus_one)
    # Angles are float32: 7 radians to 5e-7, and all else float64.
    np.testing.assert_allclose(jax.jit(model.apply)(params, TOKENS)[0], expected, atol=5e-7)


@pytest.mark.parametrize("option", ["llama", "gemma", "olmo", "residual"])
@pytest.mark.parametrize("remat", ["none", "block"])
def test_gpt_stacked_layers_have_the_same_losses_and_gradients(option, remat):
    model, variables, _ = made(option)
    targets = np.roll(TOKENS, -1, axis=1)

    @jax.jit
    def run(params, stacked):
        def loss(params):
            return model.clone(remat=remat).apply({"params": params}, TOKENS, targets=targets).mean()

        return jax.value_and_grad(loss)(params), jax.value_and_grad(loss)(stacked)

    params = variables["params"]
    (loss, gradient), (looped, its_gradient) = run(params, stack_layers(params))
    # Float32 sums of 16 to 64 terms in another order, through up to five layers.
    np.testing.assert_allclose(looped, loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), its_gradient, stack_layers(gradient))


def test_gpt_mask_field_equals_mask_of_the_call():
    model, params, apply = made("rotary")
    segments = Segments(np.broadcast_to(SEGMENTS, TOKENS.shape))
    prefix = model.clone(mask=PrefixLM(3) & Causal())
    np.testing.assert_allclose(prefix.apply(params, TOKENS), apply(params, TOKENS, mask=Causal()), atol=1e-6)
    field = model.clone(mask=np.equal.outer(SEGMENTS, SEGMENTS)).apply(params, TOKENS)
    np.testing.assert_allclose(field, apply(params, TOKENS, mask=segments), atol=1e-6)


def test_gpt_values_are_mixed_with_those_of_the_first_layer():
    _, variables, apply = made("residual")
    without = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.zeros_like(x) if path[-1].key == "value_share" else x, variables
    )
    plain = gpt(**(OPTIONS["residual"] | {"value_residual": False}))
    same = jax.tree_util.tree_map_with_path(lambda path, x: x, without["params"])
    for layer in range(4):
        share = same[f"block_{layer}"]["attention"].pop("value_share")
        assert share.shape == ()
    np.testing.assert_allclose(apply(without, TOKENS), plain.apply({"params": same}, TOKENS), atol=1e-6)
    assert not np.allclose(apply(variables, TOKENS), apply(without, TOKENS), atol=1e-4)


def test_gpt_bigrams_are_added_to_the_logits():
    _, variables, apply = made("residual")
    table = np.random.default_rng(0).standard_normal((11, 11)).astype(np.float32)
    changed = {"params": variables["params"] | {"bigrams": {"embedding": table}}}
    np.testing.assert_allclose(apply(changed, TOKENS), apply(variables, TOKENS) + table[TOKENS], atol=1e-5)


def test_gpt_with_zero_outputs_starts_as_its_embedding():
    model = gpt(zero_outputs=True, num_layers=3, positions="rotary")
    logits, variables = jax.jit(model.init_with_output)(jax.random.key(0), TOKENS)
    x = variables["params"]["embed"]["embedding"][TOKENS]
    normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(logits, normal @ variables["params"]["embed"]["embedding"].T, atol=1e-5)
