"""Values that are passed to `train`: remembered alike in every process, and compared by what they are."""

import functools

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import attnlab
from attnlab.masks import Causal, Dense, SlidingWindow
from attnlab.score_mods import ScoreFn
from attnlab.support.errors import UserError
from attnlab.training.passed import NOTHING, Passed, described, difference


class Tiny(nn.Module):
    width: int = 4
    mask: object = None
    dtype: object = None
    param_dtype: object = jnp.float32

    @nn.compact
    def __call__(self, tokens, deterministic=True, dropout_key=None):
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        return nn.Dense(8, **types)(nn.Embed(8, self.width, **types)(tokens))


def capped(cap):
    return ScoreFn(lambda score, b, h, i, j: jnp.minimum(score, cap))


@pytest.mark.parametrize(
    "one, same, other",
    [
        (SlidingWindow(3), SlidingWindow(3), SlidingWindow(4)),
        (Dense(np.eye(3, dtype=bool)), Dense(np.eye(3, dtype=bool)), Dense(np.ones((3, 3), bool))),
        (capped(2.0), capped(2.0), capped(3.0)),
        (Tiny(mask=Causal()), Tiny(mask=Causal()), Tiny(mask=SlidingWindow(2))),
        (functools.partial(np.add, 1), functools.partial(np.add, 1), functools.partial(np.add, 2)),
        ((1, [2.0]), (1, [2.0]), (1, [3.0])),
        ({"a": Causal()}, {"a": Causal()}, {"b": Causal()}),
    ],
    ids=lambda x: type(x).__name__,
)
def test_description_is_equal_for_equal_values_alone(one, same, other):
    assert described(one) == described(same) != described(other)
    assert " at 0x" not in described(one)


def test_difference_names_the_field_and_both_values():
    now, saved = Passed(model=Tiny(mask=SlidingWindow(2))), Passed(model=Tiny(mask=Causal())).metadata()
    with pytest.raises(UserError, match=r"whose mask was Causal\(\), and is SlidingWindow\(left=2, right=0\): pass an"):
        now.check_continues(saved, "runs/x")
    assert difference({"a": "1"}, {"a": "1"}) == ""


@pytest.mark.parametrize(
    "passed, saved, message",
    [
        (NOTHING, Passed(model=Tiny()), "holds a run with model = Tiny, and model= gives None: pass the same"),
        (Passed(optimizer=optax.sgd(1.0)), NOTHING, "whose optimizer is its config's, and now it is user-defined"),
        (Passed(mask=Causal()), NOTHING, r"with mask = None, and mask= gives Causal\(\)"),
    ],
    ids=["model", "optimizer", "mask"],
)
def test_run_continues_with_equal_values_alone(passed, saved, message):
    for equal in (passed, saved):
        equal.check_continues(equal.metadata(), "runs/x")
    with pytest.raises(UserError, match=message):
        passed.check_continues(saved.metadata(), "runs/x")


class Wrapped(nn.Module):
    inner: nn.Module


def test_modules_of_attnlab_are_compared_without_their_source():
    """Runs of before saved it, and with it fields that have left since."""
    passed = Passed(model=Wrapped(attnlab.nn.MultiHeadAttention(2)))
    saved = passed.metadata()
    fields = saved["user_defined"]["fields"]
    assert "source code" in fields and "source code" not in fields["inner"]
    fields["inner"] = "MultiHeadAttention(num_heads=2, rotary_base=None, source code=sha256 0123456789ab)"
    passed.check_continues(saved, "runs/x")
    with pytest.raises(UserError, match="whose inner was MultiHeadAttention, and is Dense: pass an equal one"):
        Passed(model=Wrapped(nn.Dense(2))).check_continues(saved, "runs/x")


@pytest.mark.parametrize("model, precision", [(Tiny(), "float32"), (Tiny(dtype=jnp.bfloat16), "bfloat16")])
def test_precision_is_what_the_model_computes_in(model, precision):
    passed, other = Passed(model=model), {"float32": "bfloat16", "bfloat16": "float32"}[precision]
    assert passed.precision("auto") == passed.precision(precision) == precision
    assert precision == "bfloat16" or passed.precision("tf32") == "tf32"
    with pytest.raises(UserError, match=f"config.precision = '{other}', but Tiny computes in {precision}: leave it"):
        passed.precision(other)


def test_precision_that_a_run_cannot_name_is_refused():
    with pytest.raises(UserError, match="Tiny computes in float16: expected float32 or bfloat16"):
        Passed(model=Tiny(param_dtype=jnp.float16)).precision("auto")
