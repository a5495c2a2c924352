"""The race to nanoGPT's loss: its recipes, its table, and what it refuses. No test asserts a time."""

import json

import pytest

from attnlab._benchmarks.harness import recording
from attnlab.bench import main

RECIPE = """
from attnlab.config import default


def get_config(variant=""):
    config = default()
    config.steps, config.batch_size = 9, 4
    config.model.update(num_layers=1, num_heads=2, width=8, context=8)
    config.optimizer.ema = 0.5
    config.data.packing = {packing!r}
    return config
"""


@pytest.fixture
def recipe(tmp_path):
    def write(packing="stream"):
        (tmp_path / "mine.py").write_text(RECIPE.format(packing=packing))
        return f"--recipes={tmp_path / 'mine.py'}"

    return write


@pytest.mark.slow
@pytest.mark.parametrize("reached", [False, True], ids=["missed", "reached"])
def test_loss_trains_a_recipe_to_its_end_beside_both_peers(recipe, peer, tmp_path, capsys, reached):
    """The stand-ins' loss is out of reach of nine steps, or above any."""
    path, text, loss = tmp_path / "figures.json", tmp_path / "text.txt", 9 if reached else 1
    text.write_text("Tell me, O muse, of that ingenious hero. " * 200)
    flags = [recipe(), *peer(loss=loss), f"--path={text}", "--steps=20", "--rounds=3", f"--json={path}"]
    assert main(["bench", "loss", *flags, f"--record={tmp_path}"]) == 0
    figures, name = json.loads(path.read_text()), str(tmp_path / "mine.py")
    assert figures["tokens_nanoGPT compiled"] == 20 * 12 * 64 and figures[f"tokens_{name}"] == 9 * 4 * 8
    assert figures["loss_nanoGPT compiled"] == loss and 1 < figures[f"loss_{name}"] < 5  # ln 20 letters is 3
    seconds = figures["seconds_nanoGPT compiled"], figures["seconds_nanoGPT autocast compiled"]
    assert seconds == (19, 19 / 4) and figures[f"parameters_{name}"] > 500
    ratios = [figures.get(f"ratio_{name}"), figures.get(f"ratio_{name}_over_autocast")]
    assert ratios == ([pytest.approx(each / figures[f"seconds_{name}"]) for each in seconds] if reached else [None] * 2)
    assert ("not reached" in capsys.readouterr().out.replace("\n", " ")) != reached
    recorded = json.loads((tmp_path / recording.file_name(recording.machine())).read_text())["benchmarks"]["loss"]
    assert list(recorded) == ["text.txt, 20 steps of nanoGPT"]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--recipes=quikstart"], "quikstart"),
        (["--recipes=speedrun:slow"], "speedrun:slow is unknown"),
        (["--recipes=quickstart", "--rounds=2000"], "quickstart has 2000 steps"),
        (["--path=nowhere.txt"], "nowhere.txt"),
    ],
)
def test_loss_with_a_wrong_flag_is_one_line(error_line, flags, message):
    assert message in error_line("loss", *flags)


def test_loss_of_a_recipe_that_packs_documents_is_refused(recipe, error_line):
    assert "the race is with config.data.packing='stream'" in error_line("loss", recipe("documents"))
