"""Certificates of a model's operators."""

import jax.numpy as jnp
import pytest

import attnlab
from attnlab.comparing import certificate, table
from attnlab.nn import GPT, own, register
from attnlab.nn.kinds import KINDS
from attnlab.testing import FEATURES, RECURRENCE_FEATURES
from tests.nn.user_parts import SOURCE
from tests.testing import faults


def model(**fields):
    return GPT(vocab_size=8, num_layers=2, num_heads=2, width=8, context=8, **fields)


@pytest.mark.parametrize(
    "fields, kind, features",
    [
        ({}, "attention", ("causal",)),
        ({"window": 4, "dtype": jnp.bfloat16}, "attention", ("window", "causal bfloat16")),
        ({"kv_heads": 1, "positions": "alibi"}, "attention", ("causal", "causal grouped heads", "ALiBi")),
        ({"mixer": "forget"}, "forget", ("causal", "forget gate")),
        ({"mixer": "gated_delta"}, "gated_delta", ("beta and decay", "state")),
        ({"mixer": "conv"}, "conv", ()),
    ],
)
def test_features_are_those_that_a_model_uses(fields, kind, features):
    assert certificate.features_of(model(**fields), kind) == features


def test_features_of_all_kinds_exist():
    for kind in KINDS:
        known = FEATURES if KINDS[kind].operator == "attention" else RECURRENCE_FEATURES
        assert set(certificate.features_of(model(window=4, sinks=True, soft_cap=3.0, score_scale=0.5), kind)) <= set(
            known
        )


def test_hybrid_has_a_certificate_for_each_kind_of_layer():
    found = certificate.of_model(model(pattern="linear attention"))
    assert found["conforms"] and 0 < found["worst"] < 1 and list(found["features"]) == ["linear", "attention"]


def test_operator_with_a_fault_is_marked(monkeypatch):
    def faulty(impl, return_lse, **call):
        return faults.attention(**call, fault="window one key too wide")

    monkeypatch.setattr(attnlab, "attention", faulty)
    found = certificate.of_model(model(window=4))
    assert found["conforms"] is False and found["worst"] > 1
    assert found["wrong"][0].startswith("attention: window: ")


@pytest.mark.parametrize("mixer", ["gru", "near", "odd", "Shifted"])
def test_model_without_a_specification_has_no_verdict(mixer, tmp_path, monkeypatch):
    monkeypatch.setattr(own, "_PARTS", {})
    (tmp_path / "mine.py").write_text(SOURCE)
    found = certificate.of_model(model(mixer=mixer if mixer in KINDS else register(f"{tmp_path / 'mine.py'}:{mixer}")))
    assert (found["conforms"], found["worst"]) == (None, None)


def test_table_shows_the_largest_error_or_no():
    found = (("a", True), ("b", False), ("c", None))
    rows = [{"variant": name, "conforms": ok, "conforms_worst": 0.5} for name, ok in found]
    assert table.cells(rows) == [["variant", "conforms"], ["a", "0.50"], ["b", "no"], ["c", ""]]
