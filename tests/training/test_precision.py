"""The precision of a run: what "auto" means on each device, which devices have TF32, and precision of products."""

from unittest import mock

import jax
import pytest

from attnlab.config import RunConfig, default, to_json
from attnlab.support.errors import UserError
from attnlab.training import precision, run
from attnlab.training.program import TrainProgram


def device(platform, **attributes):
    return mock.NonCallableMagicMock(spec=jax.Device, platform=platform, **attributes)


@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [
        ("tpu", None, "bfloat16"),
        ("gpu", "7.5", "float32"),
        ("gpu", "8.0", "bfloat16"),
        ("gpu", "10.0", "bfloat16"),
        ("gpu", "gfx90a", "float32"),  # not measured
        ("unknown", None, "float32"),
    ],
)
def test_auto_is_bfloat16_on_accelerators_that_multiply_it_faster(platform, capability, expected):
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
    experiment = TrainProgram(run.resolve(config).config, vocab_size=65)
    assert experiment.config.precision == experiment.model.dtype == expected and config.precision == "auto"


A100, V100 = (device("gpu", compute_capability=version, device_kind="Tesla V100") for version in ("8.0", "7.0"))


def test_tf32_is_kept_on_ampere_and_an_error_on_devices_that_lack_it():
    assert precision.resolved("tf32", A100) == "tf32"
    for lacking, kind in ((V100, "Tesla V100"), (device("tpu", device_kind="TPU v5"), "TPU v5"), (None, "cpu")):
        with pytest.raises(UserError, match=f"'tf32' needs NVIDIA's Ampere or newer, not a {kind}: use float32"):
            precision.resolved("tf32", lacking)


def test_tf32_run_trains_only_with_tf32_and_is_evaluated_anywhere(tmp_path):
    plan = run.resolve(RunConfig.of({"precision": "tf32"}), device=A100)
    assert plan.config.precision == "tf32" and plan.config.model.dtype == "float32"
    corpus = {"name": "text", "sha256": "0" * 64, "characters": 1}
    (tmp_path / "config.json").write_text(to_json(plan.config, corpus=corpus))
    for folder in (tmp_path, tmp_path / "new"):
        with pytest.raises(UserError, match="'tf32' needs"):
            run.resolve(plan.config, folder)
    assert run.resolve(default(), tmp_path, eval_only=True).config.precision == "tf32"
    (tmp_path / "metrics.jsonl").write_text('{"step": 2000, "split": "final", "loss": 1.0}\n')
    assert run.resolve(default(), tmp_path).origin == "finished"


@pytest.mark.parametrize("name, jax_name", [("float32", "highest"), ("tf32", "tensorfloat32"), ("bfloat16", None)])
def test_products_use_the_precision_of_the_run(name, jax_name):
    with precision.products(name):
        assert jax.config.jax_default_matmul_precision == jax_name
