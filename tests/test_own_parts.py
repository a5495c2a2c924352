"""Commands with a part of the user's: trained, resumed, sampled, looked into, compared; never run unasked."""

import contextlib
import io
import json
import shutil

import pytest

import attnlab
from attnlab import compare, sample, train
from attnlab.masks import SlidingWindow
from attnlab.nn import own
from attnlab.score_mods import SoftCap
from attnlab.see.__main__ import main as see
from attnlab.support.errors import UserError
from tests.nn.user_parts import SOURCE
from tests.runs import SMALL, Bigram, quick, run
from tests.runs import shared_programs as shared_programs  # a fixture of this module too


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """A registry of each test's own, as of a new process."""
    monkeypatch.setattr(own, "_PARTS", {})
    monkeypatch.setattr(own, "_OFFERED", {})


def forget():
    own._PARTS.clear()
    own._OFFERED.clear()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(The user's file, the folder of a run with its mixer, the last line that the command printed)."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(SOURCE)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert run(folder / "run", f"--config.model.mixer={folder}/mine.py:Average", "--config.steps=2") == 0
    return folder / "mine.py", folder / "run", shown.getvalue().splitlines()[-1]


def test_config_remembers_the_file_and_the_recommended_command_works(trained):
    file, folder, last = trained
    command = last.partition("attnlab sample ")[2].split()
    assert command == [f"--workdir={folder}", f"--mixer={file}"]
    forget()
    assert sample.main(["sample", *command, "--max_tokens=3", "--temperature=0"]) == 0
    (word,) = json.loads((folder / "config.json").read_text())["code"]
    assert word == f"{file}:Average"


@pytest.mark.parametrize("main", [sample.main, see, train.main], ids=["sample", "see", "train"])
def test_folder_that_names_code_runs_none_unless_it_is_named_again(trained, tmp_path, capsys, main):
    file, folder, _ = trained
    shutil.copytree(folder, tmp_path / "downloaded")
    words = ["command", f"--workdir={tmp_path}/downloaded"]
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/downloaded names code, which runs only if you name")
    assert not own.files()
    (tmp_path / "other.py").write_text("raise RuntimeError('it ran')")
    assert main([*words, f"--mixer={tmp_path}/other.py"]) == 2
    assert "other.py has " in capsys.readouterr().err and not own.files()
    forget()
    moved = shutil.copy(file, tmp_path / "moved.py")
    assert main([*words, f"--mixer={moved}", *(["--config.steps=3"] if main is train.main else [])]) == 0
    shown = capsys.readouterr().out
    assert f"--mixer={moved}" in shown or main is not train.main


def test_changed_file_does_not_continue_a_run(trained, tmp_path, capsys):
    file, workdir = trained[0], shutil.copytree(trained[1], tmp_path / "run")
    try:
        file.write_text(SOURCE.replace("-0.5", "-0.6"))
        forget()
        assert run(workdir, f"--config.model.mixer={file}:Average", "--config.steps=3") == 2
    finally:
        file.write_text(SOURCE)
    assert f"{file} has changed since {workdir} began" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------- in Python


def test_train_takes_mixer_mask_and_score_mod(trained, tmp_path, capsys):
    config = quick(steps=2, sample__length=0)
    passed = {"mask": SlidingWindow(left=3), "score_mod": SoftCap(5.0)}
    assert train.train(config, tmp_path / "parts", **passed) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f'load it in Python with: attnlab.load("{tmp_path}/parts", mask=…, score_mod=…)'
    model = attnlab.load(tmp_path / "parts", **passed).model
    assert (model.mask, model.score_mod) == tuple(passed.values())
    with pytest.raises(UserError, match=r"with mask = SlidingWindow\(left=3, right=0\), and mask= gives None"):
        attnlab.load(tmp_path / "parts")
    with pytest.raises(UserError, match=r"and mask= gives SlidingWindow\(left=4"):
        train.train(config, tmp_path / "parts", **passed | {"mask": SlidingWindow(left=4)})
    assert train.train(config, tmp_path / "mixer", mixer=f"{trained[0]}:Average") == 0
    assert config.model.mixer == "attention"
    with pytest.raises(UserError, match="score_mod = SoftCap, but layers of .*Average do not read it"):
        train.train(config, tmp_path / "both", mixer=f"{trained[0]}:Average", score_mod=SoftCap(5.0))


def test_own_model_says_its_precision_and_what_works(tmp_path, capsys):
    config = quick(steps=2, data__tokenizer="byte", precision="auto")
    assert train.train(config, tmp_path / "run", model=Bigram()) == 0
    shown = capsys.readouterr().out
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert "in float32, into" in shown and saved["precision"] == "float32"
    assert shown.splitlines()[-1] == f'load it in Python with: attnlab.load("{tmp_path}/run", model=…)'
    config.steps += 2
    with pytest.raises(UserError, match="holds a run of a Bigram whose vocab_size was 256, and is 300: pass an equal"):
        train.train(config, tmp_path / "run", model=Bigram(300))
    config.precision = "bfloat16"
    with pytest.raises(UserError, match="config.precision = 'bfloat16', but Bigram computes in float32: leave it out"):
        train.train(config, tmp_path / "other", model=Bigram())


def test_part_of_a_gpt_beside_an_own_model_is_an_error(tmp_path):
    for name, part in {"mask": SlidingWindow(3), "score_mod": SoftCap(2.0), "mixer": "mine.py:near"}.items():
        with pytest.raises(UserError, match=f"^{name}= is for the config's GPT, and model= takes its place"):
            train.train(quick(), tmp_path / "run", model=Bigram(), **{name: part})
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------------------ compare


def test_compare_checks_a_mixer_before_any_run(tmp_path, capsys):
    (tmp_path / "bad.py").write_text(SOURCE.replace("self._out(z,", "self._out(z + v.mean(axis=1, keepdims=True),"))
    words = ["compare", *SMALL, "--variant=softmax:", f"--variant=mine: model.mixer={tmp_path}/bad.py:Average"]
    words += ["--seeds=2", f"--workdir={tmp_path}/compared", "--dry_run"]
    assert compare.main(words) == 2
    assert "Average: it is not causal: outputs change with later tokens" in capsys.readouterr().err
    assert compare.main([*words, "--check=off"]) == 0
    assert not (tmp_path / "compared").exists()
