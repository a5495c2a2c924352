"""Options: declared once; everything else derives from them."""

import dataclasses
import json
import re

import numpy as np
import pytest

from attnlab import config as configs
from attnlab import train
from attnlab.nn import ModelConfig
from attnlab.support.errors import UserError
from attnlab.support.options import FieldError, check_values, option, options


@dataclasses.dataclass
class Inner:
    share: float | None = option("a share", 0.5, low=0, high=1)


@dataclasses.dataclass
class Outer:
    size: int = option("a size", 4, low=1)
    kind: str = option("a kind", "plain", choices=("plain", "gated"))
    bias: bool = option("a bias", False)
    inner: Inner = dataclasses.field(default_factory=Inner)
    other: int = 3


VALID = {"size": 2, "kind": "gated", "bias": True, "inner.share": 1}


def test_options_are_the_declared_fields_by_dotted_name():
    defaults = {name: each.default for name, each in options(Outer).items()}
    assert defaults == {"size": 4, "kind": "plain", "bias": False, "inner.share": 0.5}
    assert Outer(size=1).kind == "plain"


def test_valid_values_have_no_problem():
    for change in ({}, {"inner.share": None}, {"size": np.int64(7)}, {"inner.share": np.float32(0.5)}):
        check_values(options(Outer), VALID | change)


INVALID = {"size": [0, 1.5, None, True, 2**31], "bias": [1, None], "kind": ["gate", None]}
INVALID |= {"inner.share": [1.1, float("nan"), "1"]}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_value_is_named_with_its_value(name):
    for value in INVALID[name]:
        with pytest.raises(FieldError, match=f"^{re.escape(f'{name} = {value!r}')}: expected "):
            check_values(options(Outer), VALID | {name: value})
    with pytest.raises(FieldError, match="did you mean gated?"):
        check_values(options(Outer), VALID | {"kind": "gate"})


def test_every_field_of_a_config_is_declared_and_valid():
    declared = configs.declared()
    assert configs.completed(configs.default()) == configs.RunConfig() == configs.RunConfig.of({})
    assert configs.RunConfig().fields == {name: declared[name].default for name in configs.RunConfig().fields}


def test_numpy_numbers_become_json_numbers(own_errors):
    values = {"steps": np.int64(7), "optimizer.learning_rate": np.float32(0.5), "model.width": np.int32(8)}
    values |= {"model.mlp_ratio": np.float64(2), "model.attention.rotary.base": np.int64(50)}
    numbers = {int: np.int64, float: np.float64}
    for config in (
        configs.RunConfig.of(values),
        configs.RunConfig(steps=np.int64(7), optimizer=configs.Optimizer(learning_rate=np.float32(0.5))),
        configs.RunConfig(model=ModelConfig(width=np.int32(8), mlp_ratio=np.float64(2))),
        configs.RunConfig.of({n: numbers.get(type(x), type(x))(x) for n, x in configs.RunConfig().fields.items() if x}),
    ):
        assert configs.from_json(json.loads(configs.to_json(config))).fields == config.fields


@pytest.mark.parametrize(
    ("name", "value"),
    [("data.name", 3), ("steps", {"a": 1}), ("model.width", {"a": 1}), ("data.validation_fraction", 10**400)],
)
def test_value_of_another_type_raises_one_line(own_errors, name, value):
    with pytest.raises(UserError, match=rf"^config\.{re.escape(name)} = .*: expected a "):
        configs.RunConfig.of({name: value})


def test_groups_reject_numbers_and_options_reject_dictionaries(own_errors):
    with pytest.raises(FieldError, match=r"^width = \{'a': 1\}: expected a value like 128"):
        ModelConfig.of(width={"a": 1})
    with pytest.raises(FieldError, match=r"^attention\.rotary = 3: expected Rotary\(…\)$"):
        ModelConfig.of(attention={"rotary": 3})
    with pytest.raises(FieldError, match=r"^optimizer = 3: expected Optimizer\(…\)$"):
        configs.RunConfig(optimizer=3)


def test_help_has_a_sentence_for_every_option(capsys):
    assert train.main(["train", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, each in configs.declared().items():
        at = lines.index(f"  --config.{name}={each.default}")
        assert re.search(r"\w{3}", lines[at + 1]) and lines[at + 1].startswith(" " * 6), name
        assert each.doc and not each.doc.endswith("."), name


def test_model_documents_every_option():
    for name, each in options(ModelConfig).items():
        assert f"  {name}: {each.doc}." in ModelConfig.__doc__


def test_model_of_a_config_has_its_fields():
    fields = {"precision": "bfloat16", "model.norm": "rms", "model.attention.rotary.base": 50.0}
    model = configs.RunConfig.of(fields).over_tokens(11)
    assert (model.vocab_size, model.norm, model.layers[0].rotary.base, model.dtype) == (11, "rms", 50.0, "bfloat16")
    with pytest.raises(ValueError, match=r"config\.model\.vocab_size = 7 .* 11"):
        configs.RunConfig.of({"model.vocab_size": 7}).over_tokens(11)
