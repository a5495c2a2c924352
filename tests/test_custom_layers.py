"""Commands that train, resume, sample, show and compare custom layers; none runs custom code without --import."""

import contextlib
import contextvars
import io
import json
import shutil

import flax.linen as nn
import numpy as np
import pytest

import attnlab
from attnlab import compare, comparing, sample, train
from attnlab import config as configs
from attnlab.masks import PrefixLM, SlidingWindow
from attnlab.nn import AttentionConfig, custom
from attnlab.nn.config import KINDS
from attnlab.score_mods import RelativeBias, ScoreFn, SoftCap
from attnlab.see.__main__ import main as see
from attnlab.support.errors import UserError
from tests.nn.user_parts import SOURCE, Doubling, forget
from tests.runs import SMALL, Bigram, quick, run

pytestmark = pytest.mark.usefixtures("shared_programs", "registry")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(The user's file, the folder of a run with its layer, the last line that the command prints)."""
    folder = tmp_path_factory.mktemp("custom")
    (folder / "mine.py").write_text(SOURCE)
    words = [f"--import={folder}/mine.py", "--config.model.layers=Average", "--config.model.Average.decay=0.5"]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert run(folder / "run", *words, "--config.steps=2") == 0
    forget()
    return folder / "mine.py", folder / "run", shown.getvalue().splitlines()[-1]


def test_config_remembers_the_file_and_the_recommended_command_works(trained):
    file, folder, last = trained
    command = last.partition("attnlab sample ")[2].split()
    assert command == [f"--workdir={folder}", f"--import={file}"]
    forget()
    assert sample.main(["sample", *command, "--max_tokens=3", "--temperature=0"]) == 0
    saved = json.loads((folder / "config.json").read_text())
    assert saved["format"] == 2 and saved["model"]["layers"][0]["decay"] == 0.5
    assert saved["code"]["Average"]["file"] == str(file) and "class Average" in (folder / "source/mine.py").read_text()


@pytest.mark.parametrize("main", [sample.main, see, train.main], ids=["sample", "see", "train"])
def test_run_folder_with_code_runs_none_of_it_without_import(trained, tmp_path, capsys, main):
    file, folder, _ = trained
    shutil.copytree(folder, tmp_path / "downloaded")
    words = ["command", f"--workdir={tmp_path}/downloaded"]
    assert main(words) == 2
    line = f"{tmp_path}/downloaded uses custom code, 'Average': pass --import={file}, or the run's copy, to run it"
    assert capsys.readouterr().err == f"error: {line}\n" and not any(map(custom.is_custom, KINDS))
    (tmp_path / "other.py").write_text("raise RuntimeError('it ran')")
    assert main([*words, f"--import={tmp_path}/other.py"]) == 2
    assert "other.py failed (RuntimeError: it ran)" in capsys.readouterr().err and not any(map(custom.is_custom, KINDS))
    forget()
    copy = tmp_path / "downloaded/source/mine.py"
    assert main([*words, f"--import={copy}", *(["--config.steps=3"] if main is train.main else [])]) == 0
    shown = capsys.readouterr().out
    assert f"--import={copy}" in shown or main is not train.main


def test_run_resumes_after_an_edit_unless_its_layer_changed(trained, tmp_path, capsys):
    file, workdir = trained[0], shutil.copytree(trained[1], tmp_path / "run")
    words = [f"--import={file}", "--config.model.layers=Average", "--config.model.Average.decay=0.5"]
    try:
        file.write_text(SOURCE.replace("0.1 * (i - j)", "0.2 * (i - j)"))
        forget()
        assert run(workdir, *words, "--config.steps=3") == 0
        file.write_text(SOURCE.replace("jnp.log(self.decay)", "2 * jnp.log(self.decay)"))
        forget()
        assert run(workdir, *words, "--config.steps=4") == 2
    finally:
        file.write_text(SOURCE)
    assert f"the code of 'Average' in {file} has changed since {workdir} began" in capsys.readouterr().err


def test_imported_file_used_by_no_layer_is_an_error(trained, tmp_path, capsys):
    assert run(tmp_path / "run", f"--import={trained[0]}") == 2
    line = f"--import={trained[0]}: no layer comes from it (layers: attention): set config.model.layers"
    assert capsys.readouterr().err == f"error: {line}\n"


# ---------------------------------------------------------------------------------------------------------- in Python


def test_train_takes_layers_mask_and_score_mod(tmp_path, capsys):
    config = quick(steps=2, sample__length=0)
    passed = {"mask": SlidingWindow(left=3), "score_mod": lambda score, b, h, i, j: score - 0.1 * (i - j)}
    run = train.train(config, tmp_path / "parts", **passed)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f'load it in this process with: attnlab.load("{tmp_path}/parts")'
    (layer,) = run.load().model.config.layers
    assert (layer.mask, layer.score_mod) == (passed["mask"], (ScoreFn(passed["score_mod"]),))
    assert attnlab.load(tmp_path / "parts", score_mod=passed["score_mod"]).model.config.layers == (layer,)
    with pytest.raises(UserError, match=r"^mask = SlidingWindow\(left=4, .*, but attention layers have .*left=3, "):
        attnlab.load(tmp_path / "parts", mask=SlidingWindow(left=4))
    with pytest.raises(
        UserError, match=r"another config .config.model.attention.mask = SlidingWindow\(left=4, .*left=3"
    ):
        train.train(config, tmp_path / "parts", **passed | {"mask": SlidingWindow(left=4)})
    train.train(config, tmp_path / "layers", layers=Doubling)
    assert config.model.layers == "attention"
    assert attnlab.load(tmp_path / "layers").model.config.layers[0].module is Doubling
    with pytest.raises(UserError, match="score_mod= applies to attention, which Doubling layers do not have: remove"):
        train.train(config, tmp_path / "both", layers=Doubling, score_mod=SoftCap(5.0))


def test_run_with_two_configs_of_a_kind_and_a_mask_resumes(tmp_path, capsys):
    bias = RelativeBias(np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3))
    masked = AttentionConfig(mask=SlidingWindow(left=3) | PrefixLM(2), score_mod=bias)
    config = configs.completed(quick(steps=2)).changed({"model.layers": (AttentionConfig(window=4), masked)})
    config = config.changed({"model.num_layers": 2})
    train.train(config, tmp_path / "run")
    assert (
        attnlab.load(tmp_path / "run").model.config.layers == config.model.layers == (AttentionConfig(window=4), masked)
    )
    assert train.is_finished(config, tmp_path / "run")
    with pytest.raises(UserError, match=r"another config .config.model.layers\[0\].window = 8, but it was 4"):
        train.train(config.changed({"model.layers[0].window": 8}), tmp_path / "run")
    capsys.readouterr()
    assert train.main(["train", f"--workdir={tmp_path}/run", "--config.steps=3", "--config.log.every=1"]) == 0
    assert sample.main(["sample", f"--workdir={tmp_path}/run", "--max_tokens=3"]) == 0
    assert attnlab.load(tmp_path / "run", 3).model.config.layers[1] == masked
    assert train.main(["train", f"--workdir={tmp_path}/run", "--config.model.attention.window=8"]) == 2
    assert "another config (config.model.layers[0].window = 8, but it was 4)" in capsys.readouterr().err


EXPERIMENT = """
from attnlab.config import RunConfig
from attnlab.masks import MaskFn
from attnlab.nn import AttentionConfig, register
from tests.nn.user_parts import Doubling

def strided(b, h, i, j):
    return (i - j) % 2 == 0

register(Doubling, "twice")

def get_config():
    return RunConfig.of({"model.layers": (AttentionConfig(mask=MaskFn(strided)), AttentionConfig(window=4))})
"""


def test_commands_load_a_run_with_a_function_from_an_imported_file(tmp_path, capsys):
    (file := tmp_path / "mine.py").write_text(EXPERIMENT)
    words = [f"--config={file}", *SMALL[1:], "--config.model.num_layers=2", f"--workdir={tmp_path}/run"]
    assert train.main(["train", *words, "--config.steps=2"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    command = last.partition("attnlab sample ")[2].split()
    assert command == [f"--workdir={tmp_path}/run", f"--import={file}"]
    assert sample.main(["sample", *command, "--max_tokens=3"]) == 0
    assert "def strided" in (tmp_path / "run/source/mine.py").read_text()
    assert train.main(["train", *words[:-1], "--config.model.twice.kernel_size=2", "--config.model.layers=gru"]) == 2
    assert "config.model.twice.kernel_size = 2: expected 4, as layers = 'gru' has no twice" in capsys.readouterr().err


FACTOR = 0.1


def test_edit_of_a_global_that_a_function_uses_is_noticed(tmp_path, monkeypatch):
    run = train.train(quick(steps=2, sample__length=0), tmp_path / "run", score_mod=steep)
    assert run.load().config.steps == 2
    monkeypatch.setitem(globals(), "FACTOR", 0.2)
    with pytest.raises(UserError, match="of 'steep' in .*test_custom_layers.py has changed since .*, its gradient, by"):
        contextvars.Context().run(run.load)  # in a new context: calls in this module share their traces


def steep(score, b, h, i, j):
    return score - FACTOR * (i - j)


def test_custom_model_prints_its_precision_and_how_to_load_it(tmp_path, capsys):
    config = quick(steps=2, data__tokenizer="byte", precision="auto")
    train.train(config, tmp_path / "run", model=Bigram())
    shown = capsys.readouterr().out
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert "in float32 (products in full precision), into" in shown and saved["precision"] == "float32"
    assert shown.splitlines()[-1] == f'load it in Python with: attnlab.load("{tmp_path}/run", model=…)'
    config.steps += 2
    with pytest.raises(
        UserError, match=r"of model = Bigram\(vocab_size=300\) \(then Bigram\(vocab_size=256\)\) has changed"
    ):
        train.train(config, tmp_path / "run", model=Bigram(300))
    config.precision = "bfloat16"
    with pytest.raises(UserError, match="config.precision = 'bfloat16', but Bigram computes in float32: remove it"):
        train.train(config, tmp_path / "other", model=Bigram())


def test_gpt_options_with_a_custom_model_are_an_error(tmp_path):
    for name, part in {"mask": SlidingWindow(3), "score_mod": SoftCap(2.0), "layers": Doubling}.items():
        with pytest.raises(UserError, match=f"^{name}= applies to the config's GPT, which model= replaces"):
            train.train(quick(), tmp_path / "run", model=Bigram(), **{name: part})
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------------------ compare


def test_compare_checks_custom_layers_before_any_run(tmp_path, capsys):
    (tmp_path / "bad.py").write_text(
        SOURCE.replace("return LayerOut(self._out(z,", "return LayerOut(self._out(z + v.mean(axis=1, keepdims=True),")
    )
    words = ["compare", *SMALL, f"--import={tmp_path}/bad.py", "--variant=softmax:"]
    words += ["--variant=mine: model.layers=Average", "--seeds=2", f"--workdir={tmp_path}/compared", "--dry_run"]
    assert compare.main(words) == 2
    assert "Average: it is not causal: outputs change with later tokens" in capsys.readouterr().err
    assert compare.main([*words, "--check=off"]) == 0
    assert not (tmp_path / "compared").exists()


SEEN, MEMO = [], {}


class Remembering(nn.Module):
    """A layer that leaves a list of tracers, a memo and a counter in globals."""

    @nn.compact
    def __call__(self, x):
        SEEN.append(x)
        MEMO["calls"] = MEMO.get("calls", 0) + 1
        decay = MEMO.setdefault(x.shape[1], np.tril(np.ones((x.shape[1], x.shape[1]), np.float32)))
        return nn.Dense(x.shape[-1])(decay @ x)


@pytest.mark.slow
def test_layer_with_global_state_is_compared_and_its_runs_are_reused(tmp_path, capsys):
    variants = {"softmax": {}, "mine": Remembering}
    options = {"workdir": tmp_path / "compared", "seeds": 2, "learning_rates": [1e-2]}
    comparison = comparing.compare([*SMALL, "--config.sample.length=0"], variants, **options)
    assert not comparison.failed and [row["seeds"] for row in comparison.rows] == [2, 2] and comparison.verdict("mine")
    folders = sorted((tmp_path / "compared").glob("*/config.json"))
    again = comparing.compare([*SMALL, "--config.sample.length=0"], variants, **options)
    assert again.verdict("mine") == comparison.verdict("mine")
    assert sorted((tmp_path / "compared").glob("*/config.json")) == folders
    assert attnlab.load(folders[0].parent).config.steps == 12
