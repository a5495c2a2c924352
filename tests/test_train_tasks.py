"""Tasks in the trainer: learned, scored by accuracy, resumed, and refused with options for texts."""

import json

import jax
import numpy as np
import pytest

import attnlab
from attnlab import config as configs
from attnlab import sample, train
from attnlab.data.tasks.named import parse
from tests.runs import CrashError, crash_at, flags, records

pytestmark = pytest.mark.usefixtures("shared_programs")

FIELDS = {
    "data.name": "task:induction kinds=2", "steps": 60, "precision": "float32", "batch_size": 64,
    "parallel.mesh.data": 1, "optimizer.warmup_steps": 5, "model.num_layers": 1, "model.layers": "conv",
    "model.conv.kernel_size": 6, "model.width": 32, "model.context": 6, "eval.every": 30, "eval.windows": 100,
    "checkpoint.every": 30, "log.every": 10, "log.tensorboard": False, "log.peak_tflops": 1.0,
}  # fmt: skip


def config(**changes):
    options = configs.default()
    options.update_from_flattened_dict(FIELDS | {name.replace("__", "."): value for name, value in changes.items()})
    return options


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    train.train(config(), workdir)
    return workdir


def test_task_is_learned_beyond_chance_and_its_accuracy_recorded(finished):
    scores = [record for record in records(finished) if record["split"] in ("val", "final")]
    assert [record["step"] for record in scores] == [30, 60, 60]
    assert scores[-1]["accuracy"] == scores[-2]["accuracy"] > 0.95 > parse(FIELDS["data.name"]).chance
    assert not any(name.startswith("bits") for record in records(finished) for name in record)
    saved = json.loads((finished / "config.json").read_text())
    assert saved["corpus"]["name"] == FIELDS["data.name"] and saved["vocab_size"] == 3


def test_task_run_crashed_and_resumed_is_bit_exact(finished, tmp_path):
    with pytest.raises(CrashError):
        train.train(config(), tmp_path / "run", on_step=crash_at(37))
    train.train(config(), tmp_path / "run")
    assert records(tmp_path / "run") == records(finished)


def test_evaluation_of_a_finished_run_prints_its_accuracy(finished, capsys):
    train.train(config(), finished, eval_only=True)
    assert f"accuracy {records(finished)[-1]['accuracy']:.4f}  over 100 windows" in capsys.readouterr().out


def test_loaded_run_answers_in_the_characters_of_its_task(finished, capsys):
    run = attnlab.load(finished)
    logits = jax.jit(run.model.apply)(run.params, run.tokenizer.encode("ba0ab0")[None])
    assert run.tokenizer.decode(np.argmax(logits[:, -1], axis=-1)) == "a"
    assert sample.main(["sample", f"--workdir={finished}", "--prompt=ba0ab0", "--max_tokens=1", "--temperature=0"]) == 0
    assert "ba0ab0a" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model.context": 2}, "config.model.context = 2: 'task:induction kinds=2' needs 3 or more"),
        ({"data.packing": "documents"}, "config.data.packing = 'documents': it applies to texts"),
    ],
)
def test_impossible_task_prints_one_line(mistake, tmp_path, changes, message):
    line = mistake(train.main, "--config=quickstart", *flags(FIELDS | changes), f"--workdir={tmp_path}/run")
    assert message in line and not (tmp_path / "run").exists()
