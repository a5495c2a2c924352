"""The plan of a run, before anything is loaded or written."""

import dataclasses
import json

import pytest

from attnlab import config as configs
from attnlab.support.errors import UserError
from attnlab.training import precision
from attnlab.training import run as runs


def config(**fields):
    config = configs.default()
    config.update_from_flattened_dict({"steps": 10, **fields})
    return config


def folder_of_a_run(folder, records=(), **metadata):
    """The files from which a plan is made: `config.json` and `metrics.jsonl`."""
    folder.mkdir()
    completed = configs.completed(config(precision="float32"))
    corpus = {"name": "text", "sha256": "0" * 64, "characters": 1}
    (folder / "config.json").write_text(configs.to_json(completed, corpus=corpus, **metadata))
    lines = [json.dumps({"step": step, "split": split, "loss": loss}) + "\n" for step, split, loss in records]
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


STALLED = [(2, "val", 1.0), (4, "val", 2.0), (6, "val", 2.0), (6, "final", 2.0)]


@pytest.mark.parametrize(
    "records, fields, origin, finished",
    [
        ([(4, "val", 2.0)], {}, "resumed", None),
        ([(4, "val", 2.0)], {"steps": 11}, "extended", None),
        ([(10, "final", 2.0)], {}, "finished", 10),
        ([(10, "final", 2.0)], {"steps": 11}, "extended", None),
        (STALLED, {"eval.patience": 2}, "finished", 6),
        (STALLED, {"eval.patience": 0}, "resumed", None),
    ],
)
def test_origin_of_a_run_in_a_folder(records, fields, origin, finished, tmp_path):
    folder = folder_of_a_run(tmp_path / "run", records)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    plan = runs.resolve(config(**fields), folder)
    assert (plan.origin, plan.finished, plan.config.precision) == (origin, finished, "float32")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    if "steps" not in fields:
        assert runs.resolve(config(**fields), folder, eval_only=True).origin == "resumed"


def test_plan_of_a_new_run_is_complete_and_cannot_be_changed(tmp_path):
    original = config(**{"data.path": "text.txt"})
    plan = runs.resolve(original, tmp_path / "new")
    assert plan.origin == "fresh" and not (tmp_path / "new").exists()
    assert plan.config.data.name == "text"
    assert plan.config.precision == precision.resolved("auto") and original.precision == "auto"
    for change in (lambda: setattr(plan.config, "steps", 3), lambda: setattr(plan.config.model, "width", 3)):
        with pytest.raises(AttributeError):
            change()
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.finished = 3


def test_evaluation_needs_no_log_and_training_names_the_damaged_line(tmp_path):
    folder = folder_of_a_run(tmp_path / "run")
    (folder / "metrics.jsonl").write_text('{"step": 4, "split"\n{"step": 5}\n')
    assert runs.resolve(config(), folder, eval_only=True).finished is None
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        runs.resolve(config(), folder)
