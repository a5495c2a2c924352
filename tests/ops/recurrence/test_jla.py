"""The portable form of jax-linear-attention's kernels: run `make test-jla`, because they need their own JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab
from attnlab import linear_recurrence
from attnlab.testing import RECURRENCE_FEATURES, RecurrenceShape, check_recurrence, recurrence_call

pytest.importorskip("jla", reason="jax-linear-attention is not installed: make test-jla")
SHAPES = [RecurrenceShape(1, length, 2, 64, 64) for length in (130, 65, 63, 1)]
run = functools.partial(linear_recurrence, impl="jla", return_state=True)


@pytest.mark.parametrize("feature", RECURRENCE_FEATURES)
def test_every_feature_is_right_except_the_gradient_of_decays(feature):
    def fixed_decays(g=None, **arrays):
        return run(g=None if g is None else jax.lax.stop_gradient(g), **arrays)

    call = recurrence_call(feature, 0)
    checked, gradients = (run, True) if "g" not in call else (fixed_decays, False)
    row = check_recurrence(checked, None, feature, gradients, 1, shapes=SHAPES, dtype=jnp.bfloat16)[feature]
    assert (row.outcome, row.gradients) == ("right", gradients), row


def test_reset_erases_the_state_without_nan():
    call = recurrence_call("resets", 0, SHAPES[0], "bfloat16")
    after = {name: x[:, 115:] for name, x in call.items()}  # g is −∞ at 115
    for whole, part in zip(run(**call), run(**after)):
        np.testing.assert_array_equal(np.isfinite(np.float32(whole)), True)
        tail = np.float32(whole)[:, 115:] if whole.ndim == 4 and whole.shape[1] == 130 else np.float32(whole)
        np.testing.assert_allclose(tail, np.float32(part), rtol=2**-7, atol=2**-7)  # chunks begin elsewhere


def test_gradient_of_decays_raises_one_line():
    call = recurrence_call("fast decay", 0, SHAPES[1], "bfloat16")
    with pytest.raises(ValueError, match="impl = 'jla' has no gradient of g, .*: use impl='auto'") as error:
        jax.grad(lambda g: run(**call | {"g": g})[0].astype(jnp.float32).sum())(call["g"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        (SHAPES[1], "float32", "it has no float32, only bfloat16"),
        (RecurrenceShape(), "bfloat16", "keys of 8 and values of 5 features: it supports 64 or 128 for both"),
    ],
)
def test_unsupported_calls_raise_and_auto_never_chooses_jla(shape, dtype, message):
    call = recurrence_call("beta", 0, shape, dtype)
    with pytest.raises(ValueError, match=f"impl = 'jla' cannot run this: {message}"):
        run(**call)
    good = recurrence_call("beta", 0, SHAPES[1], "bfloat16")
    assert "runs only if named" in attnlab.explain(**good, operator=linear_recurrence).rejected["jla"]
