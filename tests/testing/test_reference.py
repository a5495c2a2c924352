"""The formula in NumPy, and `dense`, which is held to it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import attnlab
from attnlab import testing
from attnlab.masks import Causal, MaskFn
from attnlab.score_mods import ScoreFn

NOT_RANDOM = [name for name in testing.FEATURES if name != "dropout"]


# The checker of annotations that runs with the tests draws from `random`.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
@settings(max_examples=60, deadline=None)
@given(call=testing.calls(NOT_RANDOM, shapes=testing.SHAPES[:1], dtypes=[np.float64]))
def test_dense_is_the_formula(call):
    call = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, call)
    d_out = np.random.default_rng(0).normal(size=(*call.q.shape[:-1], call.v.shape[-1]))
    expected = testing.answer(call, d_out)
    floating = {
        name: getattr(call, name) for name in ("q", "k", "v", "bias", "sinks") if getattr(call, name) is not None
    }

    @jax.jit
    def run(call, floating):
        def outputs(floating):
            return attnlab.attention(**testing.as_attnlab(call.replace(**floating)), impl="dense", return_lse=True)

        (out, lse), pull_back = jax.vjp(outputs, floating)
        return out, lse, pull_back((jnp.asarray(d_out), jnp.zeros_like(lse)))[0]

    with jax.enable_x64(True):
        out, lse, gradients = run(call, floating)
    for name, found in {"out": out, "lse": lse, **gradients}.items():
        exact = getattr(expected, name) if name in ("out", "lse") else expected.gradients[name]
        # Sums of at most 37 products in float64, of scores up to some hundred.
        largest = np.abs(exact).max(where=np.isfinite(exact), initial=1)
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-12 * largest, err_msg=name)


def test_masks_combined_are_the_masks_of_their_parts():
    call = testing.draw(testing.FEATURES["window"], 0).call
    both = testing.answer(call.replace(mask=~call.mask | call.mask & Causal())).out
    np.testing.assert_array_equal(both, testing.answer(call.replace(mask=None)).out)


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"mask": MaskFn(lambda b, h, i, j: i == j)}, "MaskFn"),
        ({"score_mods": (ScoreFn(lambda s, b, h, i, j: s),)}, "ScoreFn"),
    ],
)
def test_mask_or_mod_of_a_user_has_no_formula(fields, name):
    call = testing.draw(testing.FEATURES["plain"], 0).call.replace(**fields)
    with pytest.raises(TypeError, match=name):
        testing.answer(call)
