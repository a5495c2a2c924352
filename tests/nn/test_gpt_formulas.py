"""Feed-forward layers, blocks and GPTs with modern options equal their formulas in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from attnlab.nn import Block, Mlp, MultiHeadAttention
from tests.nn.gpts import TOKENS, gpt
from tests.parameters import parameters


def test_mlp_equals_formula_with_each_activation_and_gated(float64):
    functions = {
        "gelu_tanh": lambda x: x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
        "gelu": lambda x: x * scipy.special.ndtr(x),
        "relu": lambda x: np.maximum(x, 0),
        "silu": lambda x: x / (1 + np.exp(-x)),
        "relu_squared": lambda x: np.maximum(x, 0) ** 2,
    }
    x = np.random.default_rng(0).standard_normal((3, 8))
    variables = parameters(Mlp(19, gated=True), x)
    up, gate, down = (variables["params"][name] for name in ("up", "gate", "down"))
    plain = {"params": {"up": up, "down": down}}
    assert up["kernel"].shape == (8, 19) and jax.tree.structure(parameters(Mlp(19), x)) == jax.tree.structure(plain)

    @jax.jit
    def run():
        gated = Mlp(19, "silu", gated=True).apply(variables, x)
        return {name: Mlp(19, name).apply(plain, x) for name in functions}, gated

    outputs, gated = run()
    hidden = x @ up["kernel"] + up["bias"]
    for name, function in functions.items():
        expected = function(hidden) @ down["kernel"] + down["bias"]
        np.testing.assert_allclose(outputs[name], expected, rtol=1e-12, err_msg=name)
    gates = functions["silu"](x @ gate["kernel"] + gate["bias"])
    np.testing.assert_allclose(gated, (gates * hidden) @ down["kernel"] + down["bias"], rtol=1e-12)


@pytest.mark.parametrize(
    "norm_first, mlp", [(False, Mlp()), (True, None), pytest.param(False, None, marks=pytest.mark.slow)]
)
def test_block_with_norms_before_or_after_equals_formula(norm_first, mlp, float64):
    x = 3 * np.random.default_rng(0).standard_normal((2, 5, 8)) + 1
    attention = MultiHeadAttention(num_heads=2)
    block = Block(attention, mlp, norm_at="before" if norm_first else "stream", norm_epsilon=0.1)

    def norm(x, params):
        normal = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 0.1)
        return normal * params["scale"] + params["bias"]

    @jax.jit
    def run(variables):
        params = variables["params"]
        expected = x
        for name, layer in (("attention", attention), ("mlp", mlp)):
            if layer is not None:
                layer_variables, norms = {"params": params[name]}, params[f"{name}_norm"]
                if norm_first:
                    expected = expected + layer.apply(layer_variables, norm(expected, norms))
                else:
                    expected = norm(expected + layer.apply(layer_variables, expected), norms)
        return block.apply(variables, x), expected

    np.testing.assert_allclose(*run(parameters(block, x)), rtol=1e-10)


def reference(params, tokens, *, window, base, norm_at, plus_one, epsilon=1e-5):
    """Float64 logits, by formula, of a GPT with one layer and two heads of eight features, four of them rotated."""

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
        z = (a[..., :2] + 1j * a[..., 2:4]) * turn
        return np.concatenate([z.real, z.imag, a[..., 4:]], -1)

    scores = np.einsum("qhd,khd->hqk", rotated(q), rotated(k)) * 0.7
    i, j = np.indices(scores.shape[1:])
    scores = np.where((j <= i) & (i - j < window), scores, -np.inf)
    weights = scipy.special.softmax(
        np.concatenate([scores, np.tile(attention["sinks"][:, None, None], (1, 8, 1))], -1), -1
    )
    branch = np.einsum("hqk,khd,hdf->qf", weights[..., :-1], v, attention["out"]["kernel"])
    x = x + (norm(branch, block["attention_post_norm"]) if norm_at != "before" else branch)
    y = norm(x, block["mlp_norm"]) if norm_at != "after" else x
    gates = y @ block["mlp"]["gate"]["kernel"]
    branch = (gates * scipy.special.expit(gates) * (y @ block["mlp"]["up"]["kernel"])) @ block["mlp"]["down"]["kernel"]
    x = x + (norm(branch, block["mlp_post_norm"]) if norm_at != "before" else branch)
    return 2.0 * np.tanh(norm(x, params["final_norm"]) @ params["output"]["embedding"].T * 1.5 / 2.0)


@pytest.mark.parametrize(
    "kind, norm_at",
    [
        pytest.param(kind, norm_at, marks=[pytest.mark.slow] * (fast != norm_at))
        for kind, fast in (("local", "both"), ("attention", "after"))
        for norm_at in ("before", "after", "both")
    ],
)
def test_gpt_with_modern_options_equals_formula(kind, norm_at, float64):
    window, base = (3, 10.0) if kind == "local" else (None, 100.0)
    layer = {"head_dim": 8, "rotary": {"base": base, "fraction": 0.5}, "sinks": True, "scale": 0.7}
    model = gpt(
        num_layers=1,
        num_heads=2,
        layers=kind,
        norm="rms_plus_one" if kind == "local" else "rms",
        norm_at=norm_at,
        mlp="gated",
        activation="silu",
        tie_embeddings=False,
        embedding_scale=3.0,
        logit_scale=1.5,
        logit_cap=2.0,
        dtype=jnp.float64,
        **{kind: layer | ({"window": window} if window else {})},
    )
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    params = jax.tree.map(lambda leaf: 0.3 * rng.standard_normal(leaf.shape), shapes)
    options = {"window": window or 99, "base": base, "norm_at": norm_at, "plus_one": int(kind == "local")}
    expected = reference(params["params"], TOKENS[0], **options)
    # Angles are float32, with errors of 5e-7 at 7 radians; all else is float64.
    np.testing.assert_allclose(jax.jit(model.apply)(params, TOKENS)[0], expected, atol=5e-7)
