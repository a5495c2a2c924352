"""Certificates of a model's operators."""

import jax.numpy as jnp
import pytest

import attnlab
from attnlab.comparing import certificate, table
from attnlab.nn import GPT, custom
from attnlab.nn.config import KINDS
from attnlab.support.options import options
from attnlab.testing import FEATURES, RECURRENCE_FEATURES
from tests.nn.user_parts import SOURCE
from tests.testing import faults


def model(layers="attention", **fields):
    return GPT.of(layers=layers, vocab_size=8, num_layers=2, num_heads=2, width=8, context=8, **fields)


@pytest.mark.parametrize(
    "fields, features",
    [
        ({}, ("causal",)),
        ({"attention": {"window": 4}, "dtype": jnp.bfloat16}, ("window", "causal bfloat16")),
        ({"attention": {"kv_heads": 1}, "positions": "alibi"}, ("causal", "causal grouped heads", "ALiBi")),
        ({"layers": "forget"}, ("causal", "forget gate")),
        ({"layers": "gated_delta"}, ("beta and decay", "state")),
        ({"layers": "conv"}, ()),
    ],
)
def test_certificate_covers_the_features_that_a_model_uses(fields, features):
    gpt = model(**fields)
    assert certificate.features_of(gpt, gpt.config.layers[0]) == features


def test_features_of_all_kinds_exist():
    values = {"window": 4, "sinks": True, "soft_cap": 3.0, "scale": 0.5}
    for kind, config in KINDS.items():
        taken = {name: value for name, value in values.items() if name in options(config)}
        gpt = model(kind, **{kind: taken})
        known = FEATURES if config.module.operator == "attention" else RECURRENCE_FEATURES
        assert set(certificate.features_of(gpt, gpt.config.layers[0])) <= set(known)


def test_hybrid_has_a_certificate_for_each_kind_of_layer():
    result = certificate.certify(model("linear attention"))
    assert result["conforms"] and 0 < result["worst"] < 1 and list(result["features"]) == ["linear", "attention"]


def test_faulty_operator_does_not_conform(monkeypatch):
    def faulty(impl, return_lse, **call):
        return faults.attention(**call, fault="window one key too wide")

    monkeypatch.setattr(attnlab, "attention", faulty)
    result = certificate.certify(model(attention={"window": 4}))
    assert result["conforms"] is False and result["worst"] > 1
    assert result["wrong"][0].startswith("attention: window: ")


@pytest.mark.parametrize("kind", ["gru", "near", "odd", "Shifted"])
def test_model_without_a_specification_has_no_verdict(kind, tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    custom.import_file(tmp_path / "mine.py")
    result = certificate.certify(model(kind))
    assert (result["conforms"], result["worst"]) == (None, None)
    assert certificate.certify(model(f"{kind} attention"))["conforms"] is None


def test_table_shows_the_largest_error_or_no():
    (column,) = [each for each in table.columns("loss", 3, 2) if each.key == "conforms"]
    rows = [{"conforms": ok, "conforms_worst": 0.5} for ok in (True, False, None)]
    assert list(map(column.cell, rows)) == ["0.50", "no", ""]
