"""Objects passed to `train`: a run continues with objects that compute the same."""

import flax.linen as nn
import jax.numpy as jnp
import optax
import pytest

from attnlab import config as configs
from attnlab.masks import Causal, SlidingWindow
from attnlab.score_mods import ScoreFn
from attnlab.support.errors import UserError
from attnlab.training.overrides import NOTHING, Overrides, with_parts


class Tiny(nn.Module):
    width: int = 4
    mask: object = None
    dtype: object = None
    param_dtype: object = jnp.float32

    @nn.compact
    def __call__(self, tokens, deterministic=True, dropout_key=None):
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        return nn.Dense(8, **types)(nn.Embed(8, self.width, **types)(tokens))


pytestmark = pytest.mark.usefixtures("shared_programs")  # and traces
CONFIG = configs.RunConfig.of({"model.width": 8, "model.num_heads": 2, "model.context": 8, "model.num_layers": 1})


def capped(cap):
    return ScoreFn(lambda score, b, h, i, j: jnp.minimum(score, cap))


def saved(passed, config=CONFIG):
    """The metadata of `passed`, as in `config.json`."""
    return passed.metadata() | {"versions": {name: code.record() for name, code in passed.code(config).items()}}


@pytest.mark.parametrize(
    "one, same, other",
    [
        ({"model": Tiny()}, {"model": Tiny()}, {"model": Tiny(5)}),
        ({"optimizer": optax.sgd(0.1)}, {"optimizer": optax.sgd(0.1)}, {"optimizer": optax.sgd(0.2)}),
    ],
    ids=["model", "optimizer"],
)
def test_run_continues_only_with_objects_that_compute_the_same(one, same, other):
    metadata = saved(Overrides(**one))
    Overrides(**same).check_continues(metadata, CONFIG, "runs/x")
    with pytest.raises(UserError, match=f"^the code of {next(iter(other))} = .* has changed since runs/x began, "):
        Overrides(**other).check_continues(metadata, CONFIG, "runs/x")


def test_run_continues_with_equivalent_function_and_equal_mask():
    one, same, other = (with_parts(CONFIG, score_mod=capped(cap)) for cap in (2.0, 2.0, 0.01))
    begun = saved(NOTHING, one)
    NOTHING.check_continues(begun, same, "runs/x")
    assert not same.difference(one) and not other.difference(one)  # only the version differs
    with pytest.raises(UserError, match="^the code of 'capped.<locals>.<lambda>' in .* has changed since runs/x began"):
        NOTHING.check_continues(begun, other, "runs/x")
    three, four = (with_parts(CONFIG, mask=SlidingWindow(left)) for left in (3, 4))
    assert four.difference(three).startswith("config.model.attention.mask = SlidingWindow(left=4, right=0), but it ")
    assert not NOTHING.code(three) and three == with_parts(three, mask=SlidingWindow(3))
    with pytest.raises(UserError, match="^mask = .*left=4.*, but attention layers have .*left=3.*: remove one of them"):
        with_parts(three, mask=SlidingWindow(4))
    with pytest.raises(UserError, match="mask= applies to attention, which gru layers do not have: remove it"):
        with_parts(CONFIG, layers="gru", mask=Causal())


@pytest.mark.parametrize(
    "passed, before, message",
    [
        (NOTHING, Overrides(model=Tiny()), "holds a run with model = Tiny.*, but model is now None: pass the same"),
        (
            Overrides(optimizer=optax.sgd(1.0)),
            NOTHING,
            "a run with optimizer = None, but optimizer is now a user's: pass",
        ),
    ],
    ids=["model", "optimizer"],
)
def test_resuming_requires_the_passed_objects_again(passed, before, message):
    with pytest.raises(UserError, match=message):
        passed.check_continues(before.metadata(), CONFIG, "runs/x")


def test_run_with_older_code_versions_is_refused():
    passed = Overrides(model=Tiny())
    with pytest.raises(UserError, match="^runs/x was begun by an older attnlab, with other versions of code: train"):
        passed.check_continues(passed.metadata(), CONFIG, "runs/x")


def test_older_run_that_did_not_save_its_mask_is_refused():
    with pytest.raises(UserError, match="^runs/x was begun by an older attnlab, which did not save its mask: train it"):
        NOTHING.check_reads({"user_defined": {"mask": "Causal()", "model": None, "optimizer": False}}, CONFIG, "runs/x")


@pytest.mark.parametrize("model, precision", [(Tiny(), "float32"), (Tiny(dtype=jnp.bfloat16), "bfloat16")])
def test_precision_is_the_type_the_model_computes_in(model, precision):
    passed, other = Overrides(model=model), {"float32": "bfloat16", "bfloat16": "float32"}[precision]
    assert passed.precision("auto") == passed.precision(precision) == precision
    assert precision == "bfloat16" or passed.precision("tf32") == "tf32"
    with pytest.raises(UserError, match=f"config.precision = '{other}', but Tiny computes in {precision}: remove it"):
        passed.precision(other)


def test_unsupported_type_of_a_model_is_refused():
    with pytest.raises(UserError, match="Tiny computes in float16: expected float32 or bfloat16"):
        Overrides(model=Tiny(param_dtype=jnp.float16)).precision("auto")
