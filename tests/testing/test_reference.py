"""The formula in NumPy, and `dense` compared with it."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings

import attnlab
from attnlab import testing
from attnlab.masks import Causal, MaskFn, SlidingWindow
from attnlab.score_mods import ScoreFn, SoftCap
from attnlab.testing.subject import floating_of, with_gradients

# The others use the same lines of the reference.
FORMULAS = ["two-sided window", "padding", "segments", "prefix", "blocks", "masked rows", "bias", "shared bias"]
FORMULAS += ["ALiBi", "forget gate", "causal soft cap", "sinks", "scale", "causal grouped heads", "positions"]
FORMULAS += ["causal lse"]


def several(rng, shape):
    parts = [testing.FEATURES[name].fields(rng, shape) for name in ("bias", "sinks", "scale", "padding", "ALiBi")]
    fields = {name: x for part in parts for name, x in part.items()}
    mods = (*fields["score_mods"], SoftCap(1.5))
    return fields | {"score_mods": mods, "mask": Causal() & fields["mask"] | SlidingWindow(1)}


SEVERAL = testing.Feature("several, lse", several, lambda shape: shape._replace(heads=4, kv_heads=2))


@pytest.mark.parametrize("feature", [*(testing.FEATURES[name] for name in FORMULAS), SEVERAL], ids=lambda x: x.name)
def test_dense_equals_the_formula(float64, feature):
    case = testing.draw(replace(feature, dtype=np.float64), seed=1)
    call = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, case.call)
    exact = testing.answer(call, case.d_out, case.d_lse)

    @jax.jit
    def run(call):
        def outputs(arrays):
            call_of = testing.as_attnlab(call.replace(**arrays))
            return dict(zip(("out", "lse"), attnlab.attention(**call_of, impl="dense", return_lse=True)))

        return with_gradients(outputs, floating_of(call), lambda _: {"out": case.d_out, "lse": case.d_lse})

    expected = {"out": exact.out, "lse": exact.lse}
    expected |= {f"the gradient of {name}": x for name, x in exact.gradients.items()}
    actual = run(call)
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        # Sums of at most 13 products in float64, of scores up to a few hundred.
        largest = np.abs(x).max(where=np.isfinite(x), initial=1)
        np.testing.assert_allclose(actual[name], x, rtol=0, atol=1e-12 * largest, err_msg=name)


# The checker of annotations that runs with the tests draws from `random`.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module")
@settings(max_examples=10)
@given(call=testing.calls("causal", shapes=[testing.Shape(1, 3, 3, 1, 1, 2)], dtypes=[np.float64]))
def test_strategy_draws_calls_with_feature_shape_and_type(call):
    assert call.q.shape == (1, 3, 1, 2) and call.q.dtype == np.float64 and call.mask == Causal()
    assert (testing.answer(call).out[:, 0] == call.v[:, 0]).all()


def test_combined_masks_equal_the_masks_of_their_parts():
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
def test_user_defined_mask_or_mod_has_no_formula(fields, name):
    call = testing.draw(testing.FEATURES["plain"], 0).call.replace(**fields)
    with pytest.raises(TypeError, match=name):
        testing.answer(call)
