"""The precision that "auto" stands for, by platform, GPU generation and the instructions of a CPU."""

from unittest import mock

import jax
import pytest

from attnlab.config import default
from attnlab.training import precision, run
from attnlab.training.experiment import Experiment


def device(platform, **attributes):
    return mock.NonCallableMagicMock(spec=jax.Device, platform=platform, **attributes)


@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [
        ("tpu", None, "bfloat16"),
        ("gpu", "7.5", "float32"),
        ("gpu", "8.0", "bfloat16"),
        ("gpu", "10.0", "bfloat16"),
        ("gpu", "gfx90a", "float32"),  # no figures of it
        ("unknown", None, "float32"),
    ],
)
def test_auto_is_bfloat16_where_an_accelerator_multiplies_it_faster(platform, capability, expected):
    assert precision.resolved("auto", device(platform, compute_capability=capability)) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [({"avx2", "avx512_bf16"}, "bfloat16"), ({"amx_bf16"}, "bfloat16"), ({"avx512f"}, "float32"), (set(), "float32")],
)
def test_auto_on_a_cpu_depends_on_its_instructions(monkeypatch, flags, expected):
    monkeypatch.setattr(precision, "_cpu_flags", lambda: flags)
    assert precision.resolved("auto") == expected
    config = default()
    config.parallel.mesh.data = 1
    experiment = Experiment(run.resolve(config).config, vocab_size=65)
    assert experiment.config.precision == experiment.model.dtype == expected and config.precision == "auto"


def test_precision_that_is_given_is_kept():
    assert precision.resolved("float32", device("tpu")) == "float32"
