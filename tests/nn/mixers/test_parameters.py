"""Names, shapes and initial values of the mixers' parameters, and which of them the optimizer decays."""

import re

import flax.linen as linen
import jax
import numpy as np
import pytest

from attnlab import nn
from attnlab.nn import custom
from attnlab.nn.config import KINDS
from attnlab.nn.matrices import matrices_of
from attnlab.training.optimizer import decayed
from tests.nn.mixers.cases import doubled

X = np.zeros((1, 3, 8), np.float32)
SHAPES = {  # e.g. "A_log 4", "query/kernel 8×2×3"
    "gated_delta": (
        nn.GatedDeltaNet(2, key_dim=3, value_dim=5, value_heads=4),
        "query/kernel 8×2×3, key/kernel 8×2×3, value/kernel 8×4×5, out/kernel 4×5×8, query_conv/kernel 4×2×3, "
        "key_conv/kernel 4×2×3, value_conv/kernel 4×4×5, a/kernel 8×4, b/kernel 8×4, A_log 4, dt_bias 4, "
        "gate/kernel 8×4×5, norm/scale 5",
    ),
    "delta": (
        nn.GatedDeltaNet(2, decay=False, gate=False, conv=0),
        "query/kernel 8×2×4, key/kernel 8×2×4, value/kernel 8×2×4, out/kernel 2×4×8, b/kernel 8×2, norm/scale 4",
    ),
    "kda": (
        nn.KimiDeltaAttention(2, key_dim=3, value_dim=5, value_heads=4),
        "query/kernel 8×2×3, key/kernel 8×2×3, value/kernel 8×4×5, out/kernel 4×5×8, query_conv/kernel 4×2×3, "
        "key_conv/kernel 4×2×3, value_conv/kernel 4×4×5, decay_down/kernel 8×5, decay_up/kernel 5×4×3, "
        "decay_up/bias 4×3, b/kernel 8×4, A_log 4, gate_down/kernel 8×5, gate_up/kernel 5×4×5, norm/scale 5",
    ),
    "delta_product": (
        nn.GatedDeltaProduct(2, key_dim=3, value_heads=4, value_dim=5, steps=3, conv=0),
        "query/kernel 8×2×3, key/kernel 8×6×3, value/kernel 8×12×5, out/kernel 4×5×8, a/kernel 8×4, "
        "b/kernel 8×12, A_log 4, dt_bias 4, gate/kernel 8×4×5, norm/scale 5",
    ),
    "rwkv7": (
        nn.RWKV7(2, value_residual=True),
        "query/kernel 8×2×4, key/kernel 8×2×4, value/kernel 8×2×4, out/kernel 2×4×8, decay_down/kernel 8×32, "
        "a_down/kernel 8×32, v_down/kernel 8×32, gate_down/kernel 8×32, decay_up/kernel 32×2×4, "
        "a_up/kernel 32×2×4, v_up/kernel 32×2×4, gate_up/kernel 32×2×4, decay_up/bias 2×4, a_up/bias 2×4, "
        "v_up/bias 2×4, x_r 8, x_w 8, x_k 8, x_v 8, x_a 8, x_g 8, k_k 2×4, k_a 2×4, r_k 2×4, norm/scale 2×4, "
        "norm/bias 2×4",
    ),
    "hgrn2": (
        nn.HGRN2(2, layers=3),
        "query/kernel 8×2×4, key/kernel 8×2×4, value/kernel 8×2×4, out/kernel 2×4×8, lower_bound 2×4, norm/scale 8",
    ),
    "mamba2": (
        nn.Mamba2(2, key_dim=3, value_heads=4),
        "in/kernel 8×48, conv/kernel 4×28, conv/bias 28, out/kernel 4×4×8, A_log 4, dt_bias 4, D 4, norm/scale 16",
    ),
    "gla": (
        nn.GatedLinearAttention(2),
        "query/kernel 8×2×2, key/kernel 8×2×2, value/kernel 8×2×4, out/kernel 2×4×8, decay_down/kernel 8×16, "
        "decay_up/kernel 16×2×2, decay_up/bias 2×2, norm/scale 4, gate/kernel 8×2×4, gate/bias 2×4",
    ),
    "retention": (
        nn.Retention(2),
        "query/kernel 8×2×4, key/kernel 8×2×4, value/kernel 8×2×8, out/kernel 2×8×8, gate/kernel 8×2×8",
    ),
    "linear": (
        nn.LinearAttention(2, use_bias=False),
        "query/kernel 8×2×4, key/kernel 8×2×4, value/kernel 8×2×4, out/kernel 2×4×8",
    ),
    "conv": (nn.CausalConv(kernel_size=2, features=5), "conv/kernel 2×8×5, conv/bias 5"),
    "gated_conv": (nn.GatedConv(kernel_size=3), "conv/kernel 3×8, conv/bias 8, linear/kernel 8×8, linear/bias 8"),
}


def by_path(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def initial(module, x):
    """Initial values by path, without the large kernels, which take long to compile."""

    def init(key):
        params = by_path(module.init(key, x)["params"])
        return {path: leaf for path, leaf in params.items() if path.endswith("_conv/kernel") or "kernel" not in path}

    return jax.device_get(jax.jit(init)(jax.random.key(0)))


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_have_the_names_and_shapes_of_the_paper(name):
    module, expected = SHAPES[name]
    params = by_path(jax.eval_shape(module.init, jax.random.key(0), X)["params"])
    shapes = {f"{path} {'×'.join(map(str, leaf.shape))}" for path, leaf in params.items()}
    assert shapes == set(expected.split(", "))
    assert {leaf.dtype for leaf in params.values()} == {np.dtype("float32")}


@pytest.mark.parametrize(
    "module, low",
    [
        (nn.GatedDeltaNet(1, value_heads=400, value_dim=1), 0.01),
        (nn.KimiDeltaAttention(1, value_heads=400, key_dim=1, value_dim=1), 1.0),
        (nn.Mamba2(value_heads=400, value_dim=1), 1.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_decays_start_in_the_ranges_of_the_papers(module, low):
    params = initial(module, X)
    dt_bias = params["decay_up/bias" if "decay_up/bias" in params else "dt_bias"]
    a, dt = np.exp(params["A_log"]), np.logaddexp(0, dt_bias)
    # Uniform and log-uniform: 400 values reach within a few hundredths of the bounds.
    assert low <= a.min() < low + 0.5 and 15.5 < a.max() <= 16.001 and abs(a.mean() - (16 + low) / 2) < 1
    assert 0.000999 <= dt.min() < 0.0012 and 0.09 < dt.max() <= 0.1001 and abs(np.log(dt).mean() - np.log(0.01)) < 0.2
    if "D" in params:
        np.testing.assert_array_equal(params["D"], 1)
        np.testing.assert_array_equal(params["conv/bias"], 0)
    np.testing.assert_array_equal(params["norm/scale"], 1)


def test_short_convolution_starts_uniform_within_one_over_root_width():
    kernel = initial(nn.GatedDeltaNet(4), np.zeros((1, 3, 64), np.float32))["query_conv/kernel"]
    assert 0.45 < kernel.max() <= 0.5 and -0.5 <= kernel.min() < -0.45 and abs(kernel.mean()) < 0.1


def test_hgrn2_lower_bound_parameters_start_at_zero():
    np.testing.assert_array_equal(initial(nn.HGRN2(2, layers=3), X)["lower_bound"], 0)


# Parameters that AdamW updates instead of Muon, besides norms and biases; "-" is none.
LEFT_TO_ADAMW = {
    "attention local latent stick_breaking linear retention gla gru conv": "-",
    "forget": "-",
    "differential": "lambda_k1 lambda_k2 lambda_q1 lambda_q2",
    "delta": "key_conv/kernel query_conv/kernel value_conv/kernel",
    "kda": "A_log key_conv/kernel query_conv/kernel value_conv/kernel",
    "gated_delta delta_product": "A_log dt_bias key_conv/kernel query_conv/kernel value_conv/kernel",
    "mamba2": "A_log D conv/kernel dt_bias",
    "rwkv7": "k_a k_k r_k x_a x_g x_k x_r x_v x_w",
    "hgrn2": "lower_bound",
    "gated_conv": "conv/kernel",
}


@pytest.mark.parametrize(
    "kind, left", [(kind, left) for kinds, left in LEFT_TO_ADAMW.items() for kind in kinds.split()]
)
def test_muon_updates_feature_matrices_and_weight_decay_only_kernels(kind, left):
    options = {"use_bias": True} | ({"local": {"window": 3}} if kind == "local" else {})
    model = nn.GPT.of(vocab_size=11, num_layers=2, num_heads=2, width=8, context=6, layers=kind, **options)
    tokens = np.zeros((1, 2), np.int32)
    mixing = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]["block_1"]["attention"]
    for path, is_decayed in by_path(decayed(mixing)).items():
        assert is_decayed == path.endswith("kernel"), path
    matrices = matrices_of(model, tokens)
    others = {path for path in by_path(mixing) if f"block_1/attention/{path}" not in matrices}
    assert " ".join(sorted(x for x in others if not re.search("(^|/)(bias|scale)$", x))) == left.strip("-")
    assert {f"block_1/mlp/{name}/kernel" for name in ("up", "down")} <= set(matrices)
    assert {path.split("/")[0] for path in matrices} == {"block_0", "block_1"}


def test_parameter_lists_cover_every_kind():
    listed, known = set(" ".join(LEFT_TO_ADAMW).split()), {kind for kind in KINDS if not custom.is_custom(kind)}
    assert listed == known, "a kind needs rows in SHAPES and LEFT_TO_ADAMW, and in LAYERS of tests/nn/test_layers.py"


def test_linear_attention_state_has_mapped_features_and_sum_of_keys():
    # 4 features per head, doubled by the map; 4 values and the sum of keys.
    cache = nn.LinearAttention(num_heads=2, feature_map=doubled).init_cache(batch=3, features=8)
    assert cache.state.shape == (3, 2, 8, 5) and cache.conv is None


def test_gru_gradients_equal_flax_when_packed_or_padded(float64):
    ours, theirs = (
        nn.GRU(5, dtype=np.float64),
        linen.RNN(linen.GRUCell(5, dtype=np.float64, param_dtype=np.float64), return_carry=True),
    )
    x = np.random.default_rng(0).standard_normal((2, 7, 3))
    params = jax.jit(theirs.init)(jax.random.key(0), x)

    def loss(outs, state):
        return sum((out**2).sum() for out in outs) + (state**3).sum()

    def our_loss(params, x):
        packed = ours.apply(params, x, segments=np.array([[0] * 4 + [1] * 3] * 2))
        out, cache = ours.apply(params, x, cache=ours.init_cache(2, 3), lengths=np.array([5, 5]))
        return loss((packed, out[:, :5]), cache.state)

    def their_loss(params, x):
        (_, first), (_, second), (state, out) = (theirs.apply(params, x[:, part]) for part in np.s_[:4, 4:, :5])
        return loss((first, second, out), state)

    actual, expected = (jax.jit(jax.grad(each, (0, 1)))(params, x) for each in (our_loss, their_loss))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), actual, expected)
