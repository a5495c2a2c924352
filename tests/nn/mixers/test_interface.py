"""Mixers in bfloat16, and their errors for invalid inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.masks import Causal, SlidingWindow
from attnlab.nn import GRU, CausalConv, LayerOut, MixerState
from tests.nn import relatives
from tests.nn.mixers.cases import ALL, X
from tests.ops.cases import slow
from tests.parameters import parameters

BF16 = 2**-8  # relative rounding of bfloat16
BFLOAT16 = ("gated_delta", "latent", *map(slow, ("rwkv7", "mamba2", "gru", "conv", "differential")))


@pytest.mark.parametrize("name", BFLOAT16)
def test_layer_decoding_in_bfloat16_equals_full_pass(name):
    exact_module = (ALL | relatives.MODULES)[name]
    module, params = exact_module.clone(dtype=jnp.bfloat16), parameters(exact_module, X)
    apply = jax.jit(module.apply)
    x = X.astype(jnp.bfloat16)
    cache, steps = module.init_cache(2, 8, 12), []
    for part in (x[:, :4], x[:, 4:8], x[:, 8:]):
        out, after = apply(params, part, cache=cache)
        assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, cache)
        cache, steps = after, [*steps, np.asarray(out, np.float32)]
    whole = apply(params, x)
    state = getattr(cache, "state", None)
    assert whole.dtype == jnp.bfloat16 and (state is None or state.dtype == jnp.float32)
    exact = np.asarray(jax.jit(exact_module.apply)(params, X))
    size = np.abs(exact).max()
    np.testing.assert_allclose(np.concatenate(steps, axis=1), np.float32(whole), atol=4 * BF16 * size)
    # About ten roundings in a row, of inputs, projections, gates and outputs.
    np.testing.assert_allclose(np.float32(whole), exact, atol=10 * BF16 * size)


def test_gru_in_bfloat16_converges_by_steps_smaller_than_a_rounding():
    module, x = GRU(1, dtype=jnp.bfloat16), np.ones((1, 1000, 1), np.float32)
    params = jax.tree.map(np.zeros_like, parameters(module, x))
    params["params"]["cell"]["iz"]["bias"] += 4.0  # keeps 0.982 of the state at each token
    params["params"]["cell"]["in"]["bias"] += 3.0
    out, cache = jax.jit(module.apply)(params, x, cache=module.init_cache(1, 1))
    assert out.dtype == jnp.bfloat16
    # float32 errs by 2^-24 per step; with the factor 0.982 the errors of the last 55 steps remain.
    np.testing.assert_allclose(cache.state, np.tanh(3), atol=1e-5)


def test_hgrn2_with_closed_gate_has_finite_gradients():
    params = parameters(ALL["hgrn2"], X)
    slopes = jax.jit(jax.grad(lambda params: ALL["hgrn2"].apply(params, 1e4 * X).sum()))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


@pytest.mark.parametrize("name", ["gated_delta", "conv"])
def test_mixer_invalid_input_raises_one_line(own_errors, name):
    module = ALL[name]

    def fails(message, x=X, **options):
        with pytest.raises(ValueError, match=message) as raised:
            jax.eval_shape(lambda: module.init(jax.random.key(0), x, **options))
        assert "\n" not in str(raised.value)

    fails(r"inputs of \w+ have shape \(12, 8\), expected \[batch, length, features\]", X[0])
    fails(r"cache is a ndarray, expected a MixerState: .*init_cache\(batch=2", cache=np.zeros((2, 99)))
    fails(r"cache\.(state|conv) has shape \(3, .*, expected \(2, .*init_cache", cache=module.init_cache(3, 8))
    fails("mask is SlidingWindow, .*causal", mask=SlidingWindow(left=2))
    fails("segments", segments=np.zeros((2, 3), int))
    fails("segments", segments=np.zeros((2, 12), int), cache=module.init_cache(2, 8))
    fails("lengths", lengths=np.zeros(3, int))
    fails("lengths contains 13, expected 0 to 12", lengths=np.array([12, 13]))
    jax.eval_shape(lambda: module.init(jax.random.key(0), X, mask=Causal()))


class Odd(CausalConv):
    """Returns `result(x)` from `mix`."""

    result: object = None

    def mix(self, x, state, context):
        return self.result(x)


@pytest.mark.parametrize(
    "result, text",
    [
        (lambda x: (x, None), "a tuple"),
        (LayerOut, "a cache of type NoneType"),
        (lambda x: LayerOut(x[:, 0], MixerState()), r"outputs \[2, 8\]"),
    ],
    ids=["pair", "stateless", "shape"],
)
def test_mix_with_invalid_result_raises_one_line(own_errors, result, text):
    with pytest.raises(ValueError, match=rf"Odd.mix returned {text}: expected LayerOut\(outputs \[2, 12, 'd'\], Mix"):
        jax.eval_shape(Odd(result=result).init, jax.random.key(0), X)
