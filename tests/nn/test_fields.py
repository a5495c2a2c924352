"""Fields of a model that do not fit together, or that none of its layers reads, are one line that names them."""

import jax
import numpy as np
import pytest

from attnlab import config as configs
from attnlab.nn import GPT, GatedConv, Recurrence, Rotary, kinds
from attnlab.nn.fields import check_shape
from attnlab.ops.masks import Causal
from attnlab.support.options import options


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(kinds.KINDS, "toy", kinds.Mixer(GatedConv))  # reads recurrence.conv alone


def check(fields):
    """Complete the config of a model with these fields, by dotted name."""
    config = configs.default()
    config.model.update_from_flattened_dict(fields)
    config = configs.completed(config)
    configs.check_effects(config)
    return config


ALONE = {"pattern": "toy"}
UNREAD = {
    "of recurrent layers": ({"recurrence.conv": 4}, "recurrence.conv = 4, but no layer reads it: .*than attention"),
    "rotary of forgetting": ({"mixer": "forget", "rotary.base": 5.0}, "rotary.base = 5.0, but .*than forget"),
    "pattern and mixer": ({"pattern": "toy attention", "mixer": "forget"}, "mixer = 'forget', but pattern = 'toy a.*'"),
    "of attention": (ALONE | {"kv_heads": 2}, "kv_heads = 2, but no layer reads it: .*than toy"),
    "window of global layers": ({"window": 8, "pattern": "global"}, "window = 8, but no layer .*than global"),
    "base of no local layers": ({"local_base": 5.0}, "local_base = 5.0, but window = None"),
    "rotary without": ({"rotary.base": 5.0, "positions": "learned"}, "rotary.base = 5.0, but positions = 'learned'"),
    "base of all": ({"local_base": 5.0, "window": 8}, "local_base = 5.0, but all layers are local"),
    "factor of no scaling": ({"rotary.factor": 4.0}, "rotary.factor = 4.0 has no effect with scaling = 'none'"),
    "feed-forward": ({"mlp": "gated", "mlp_ratio": 0.0}, "mlp = 'gated', but mlp_ratio = 0"),
    "rotary by name": (ALONE | {"positions": "rotary"}, "positions = 'rotary', but no layer reads them"),
    "values of some": ({"pattern": "attention toy", "value_residual": True}, "value_residual = True, but .*of toy do"),
}


@pytest.mark.parametrize("fields, message", UNREAD.values(), ids=UNREAD)
def test_option_that_no_layer_reads_is_named(fields, message):
    with pytest.raises(ValueError, match=rf"config\.model\.{message}") as error:
        check(fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"pattern": "toy attention", "recurrence.conv": 4, "kv_heads": 2, "rotary.base": 5.0, "num_heads": 2},
        {"pattern": "toy attention", "window": 8, "local_base": 5.0},
        {"pattern": "attention local global", "window": 8, "soft_cap": 5.0, "qk_norm_joint": True},
        ALONE | {"recurrence.conv": 2, "dropout": 0.1, "use_bias": True, "positions": "learned", "norm": "rms"},
        ALONE | {"width": 129},  # that heads need not divide
        ALONE | {"qk_norm": False},  # the default of a GPT, where a config's is True
    ],
)
def test_option_that_a_layer_reads_or_that_is_a_default_is_valid(fields):
    check(fields)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"recurrence": Recurrence(heads=3)}, "recurrence.heads = 3, but no layer reads it"),
        ({"recurrence": Recurrence(conv=-1)}, "recurrence.conv = -1: expected 0 or more"),
        ({"pattern": "toy attention", "mask": Causal()}, "mask = Causal, but layers of toy"),
        ({"positions": "learned", "rotary": Rotary(fraction=0.5)}, "rotary.fraction = 0.5, but positions"),
        ({"mixer": "atention"}, "mixer = 'atention': .*did you mean attention"),
    ],
)
def test_fields_of_a_module_are_checked_at_its_call(fields, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(GPT(10, 2, 2, 8, 6, **fields).init, jax.random.key(0), np.zeros((1, 3), np.int32))


def test_heads_that_a_gpt_requires_may_be_unread():
    check_shape(GPT(10, 2, 3, 8, 6, pattern="toy"), options(GPT))


def test_auto_is_completed_to_what_it_stands_for():
    assert check({"mixer": "forget"}).model.positions == "none"
    stands_for = {"": "rotary", "toy": "none", "toy attention": "rotary", "toy toy": "none"}
    assert {pattern: check({"pattern": pattern}).model.positions for pattern in stands_for} == stands_for
