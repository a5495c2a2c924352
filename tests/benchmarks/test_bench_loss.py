"""The race to nanoGPT's loss: its recipes, its table, and what it refuses. No test asserts a time."""

import json

import pytest

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
def test_loss_trains_a_recipe_to_its_end_beside_the_peer(recipe, peer, tmp_path, capsys):
    """The peer's stand-in has a loss of 1, which nine steps do not reach."""
    path, text = tmp_path / "figures.json", tmp_path / "text.txt"
    text.write_text("Tell me, O muse, of that ingenious hero. " * 200)
    flags = [recipe(), *peer(), f"--path={text}", "--steps=20", "--rounds=3", f"--json={path}"]
    assert main(["bench", "loss", *flags]) == 0
    figures, name = json.loads(path.read_text()), str(tmp_path / "mine.py")
    assert figures["tokens_nanoGPT compiled"] == 20 * 12 * 64 and figures[f"tokens_{name}"] == 9 * 4 * 8
    assert figures["loss_nanoGPT compiled"] == 1 < figures[f"loss_{name}"] < 5  # ln 20 letters is 3
    assert figures["seconds_nanoGPT compiled"] == 2 * 19 and f"ratio_{name}" not in figures
    assert figures[f"parameters_{name}"] > 500 and "not reached" in capsys.readouterr().out.replace("\n", " ")


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
