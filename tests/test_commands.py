"""Errors on the command line: one line each on stderr, exit code 2, nothing written."""

import fcntl
import gc
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings

import jax.numpy as jnp
import pytest
from absl import flags

import attnlab
from attnlab import commands, sample, train
from attnlab import config as configs
from attnlab.data import tokenizers
from attnlab.support.errors import UserError
from attnlab.training.checkpoints import Checkpoints
from tests.runs import REPOSITORY, SMALL, finished, unfinished

pytestmark = pytest.mark.usefixtures("shared_programs")

QUICKSTART = f"--config={REPOSITORY}/configs/quickstart.py"
DEFAULT = "from attnlab.config import default\ndef get_config():\n c = default()"


@pytest.fixture
def copy(tmp_path):
    """A copy of a finished run."""
    return shutil.copytree(finished()[0], tmp_path / "copy")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], r"--config is missing: .*--config=quickstart"),
        (["--config=quickstrat"], r"did you mean quickstart\?.*compare_positions, compare_recall, compare_tasks"),
        (["--config=configs/quickstrat.py"], r"did you mean configs/quickstart.py\?"),
        ([QUICKSTART, "--config.model.widht=64"], r"--config.model.widht is not a field .did you mean model.width\?"),
        (["--config=sancho:tny"], r"sancho:tny is unknown \(did you mean tiny\?\)"),
        (["--config=quickstart:tny"], r"--config=quickstart.py:tny: the experiment has no variants"),
        ([QUICKSTART, "--config.model.attention.sinks=yes"], r"sinks=yes: expected true or false; see --help$"),
        ([QUICKSTART, "--config.data.path="], r"--config.data.path= is empty"),
        ([QUICKSTART, "--config.data.name=quijote", "--config.data.path=x"], r"data.name has no effect with"),
        ([QUICKSTART, "--config.data.feature=x"], r"data.feature = 'x', but python_docs has no features"),
        ([QUICKSTART, "--config.data.tokenizer=byte", "--config.data.vocab_size=300"], r"300: it has no effect with"),
        ([QUICKSTART, "--config.optimizer.b2=0.9", "--config.optimizer.b2_halflife=9"], r"b2_halflife = 0$"),
        ([QUICKSTART, "--config.optimizer.muon_momentum=0.9"], r"keep the default 0.95, or choose name = muon"),
        ([QUICKSTART, "--config.optimizer.ema=1"], r"ema = 1.0: expected a number from 0 to 0.9999999$"),
        ([QUICKSTART, "--config.steps=abc"], r"config.steps=abc: invalid literal for int"),
        ([QUICKSTART, "--config.steps=None"], r"config.steps = None: .*2000"),
        ([QUICKSTART, "--config.steps"], r"Missing value for flag --config.steps"),
        ([QUICKSTART, "--wrokdir=x"], r"'wrokdir'.* workdir"),
        ([QUICKSTART, "--config=quickstart"], r"--config is given 2 times"),
        ([QUICKSTART, "--workdir=another"], r"--workdir is given 2 times"),
        ([QUICKSTART, "extra"], r"'extra' is not expected here"),
        ([QUICKSTART, "--config.model.attention.window=1099511627776"], r"attention.window = .* below 2\^31"),
        ([QUICKSTART, "--config.model.sinks=True"], r"model.sinks is not a field .did you mean model.\w+.sinks"),
        ([QUICKSTART, "--config.optimizer.learning_rate=inf"], r"learning_rate = inf"),
        ([QUICKSTART, "--config.parallel.mesh={'tensor': 2}"], r"config.parallel.mesh"),
        ([*SMALL, "--config.checkpoint.dir=/dev/null/kept"], r"checkpoint.dir = .*cannot be written"),
        ([QUICKSTART, "--flagfile=docs/images/compare.png"], r"--flagfile is not UTF-8"),
        ([QUICKSTART, "--config.data.path=~nosuchuser/x"], r"data.path = '~nosuchuser/x': no such file"),
        ([QUICKSTART, "--config.checkpoint.dir=~nosuchuser/x"], r"~NAME .* not a user .*: write the path in full"),
        ([QUICKSTART, "--import=/dev/zero"], r"/dev/zero: not a regular file"),
        ([QUICKSTART, "--config.model.num_layers=2147483647"], r"num_layers = 2147483647: .* 1 to 10000"),
        (["--config=./" + 300 * "x"], r"File name too long"),
        ([QUICKSTART, "--config.model.num_heads=3"], r"width = 128: .*num_heads = 3"),
        ([QUICKSTART, "--config.model.positions=rotery"], r"'rotery': .*did you mean rotary\?"),
        ([QUICKSTART, "--config.batch_size=10"], r"batch_size = 10 .*4 × 1"),
        ([QUICKSTART, "--config.log.profile=100"], r"log.profile = '100': .*FIRST:LAST.* = 2000"),
        ([QUICKSTART, "--config.log.profile=1990:2001"], r"log.profile = '1990:2001': .*FIRST:LAST.* = 2000"),
        (
            [QUICKSTART, "--config.model.layers[0].window=8"],
            r"layers\[0\].window needs Python: RunConfig.changed",
        ),
        ([QUICKSTART, "--noconfig.foo"], r"config.foo is not a field"),
        ([QUICKSTART, "--config.model.attention.windw=8"], r"not a field .did you mean model.attention.window"),
        ([QUICKSTART, "--eval_only"], r"no run to evaluate"),
    ],
)
def test_train_with_invalid_option_prints_one_line(mistake, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(REPOSITORY)
    line = mistake(train.main, f"--workdir={tmp_path}/run", *arguments)
    assert re.search(message, line), line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "option, content, message",
    [
        ("config.data.path", "a" * 9000, "only repeats 'a'"),
        ("config.data.path", "short text", "training text .*9 tokens.*model.context"),
        ("config", "def get_config(:", "SyntaxError"),
        ("config", "def get_config(): return 1 / 0", "ZeroDivisionError: division by zero"),
        ("config", "def get_config(): return 3", r"get_config\(\) returned 3"),
        ("config", "x = 3", r"--config=mine.py: define a function get_config\(\) that returns a modified"),
        ("config", f"{DEFAULT}; c.optimizer.learning_rat = 3.0; return c", "learning_rat .*did you mean optimizer.lea"),
        ("config", f"{DEFAULT}; c.model = dict(width=64); return c", "config.model.vocab_size is missing"),
    ],
)
def test_train_with_unusable_file_prints_one_line(mistake, tmp_path, option, content, message):
    (tmp_path / "mine.py").write_text(content)
    config = [QUICKSTART] if option != "config" else []
    line = mistake(train.main, *config, f"--{option}={tmp_path}/mine.py", f"--workdir={tmp_path}/run")
    assert re.search(message, line) and not (tmp_path / "run").exists(), line


def test_train_in_a_folder_with_other_files_writes_nothing(mistake, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert "holds other files and no run" in mistake(train.main, *SMALL, f"--workdir={tmp_path}")
    assert "thesis.tex is a file" in mistake(train.main, *SMALL, f"--workdir={tmp_path}/thesis.tex")
    assert [path.read_text() for path in tmp_path.rglob("*")] == ["years of work"]


def test_full_disk_under_standard_output_prints_one_line(capsys, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert train.main(["train", "--help"]) == 2
    assert capsys.readouterr().err == "error: No space left on device: standard output\n"


def test_run_without_checkpoints_prints_one_line(mistake, copy):
    shutil.rmtree(copy / "checkpoints")
    assert "--workdir is missing" in mistake(sample.main, "--prompt=x")
    assert "holds no checkpoint yet" in mistake(sample.main, f"--workdir={copy}")
    line = mistake(train.main, *SMALL, f"--workdir={copy}", "--eval_only")
    assert "holds no checkpoint, but the run had reached step 12" in line


def test_tokenizer_of_another_run_is_rejected(mistake, copy):
    (copy / "metrics.jsonl").unlink()  # makes the run unfinished
    tokenizers.save(tokenizers.make("char", "otro texto, con otras letras."), copy / "tokenizer.json")
    for main, *options in ([sample.main], [train.main, *SMALL], [train.main, *SMALL, "--eval_only"]):
        line = mistake(main, f"--workdir={copy}", *options)
        assert f"{copy}/tokenizer.json belongs to another run (sha256" in line
    with pytest.raises(UserError, match="tokenizer.json belongs to another run"):
        attnlab.load(copy)


DAMAGED = ["{", "[]", "{}", '{"steps": 6, "corpus": 1}', '{"steps": "many", "corpus": {"sha256": ""}}']
DAMAGED += ["[" * 100_000]  # deeper than Python's stack
DAMAGED += [{"model.num_heads": 0}, {"precision": "bogus"}, {"model.context": 3.5}, {"seed": None}]
OF_TRAINING = [{"user_defined": {}}, {"extensions": None}, {"extensions": [4]}, {"extensions": {"at_step": 4}}]
OF_TRAINING += [{"versions": {"model": {"trace": ""}}}, {"format": 0}]


@pytest.mark.parametrize("damage", [*DAMAGED, *OF_TRAINING], ids=lambda damage: str(damage)[:40])
def test_damaged_config_json_prints_one_line(mistake, copy, damage):
    training_only = damage in OF_TRAINING
    message = "config.json has format 0, and this" if damage == {"format": 0} else "config.json is damaged"
    if isinstance(damage, dict):
        ((field, value),) = damage.items()
        saved = json.loads((copy / "config.json").read_text())
        group, _, name = field.rpartition(".")
        (saved[group] if group else saved)[name] = value
        damage = json.dumps(saved)
    (copy / "config.json").write_text(damage)
    assert message in mistake(train.main, *SMALL, f"--workdir={copy}")
    if not training_only:
        assert "config.json is damaged" in mistake(sample.main, f"--workdir={copy}")


def test_manifest_with_paths_outside_the_checkpoint_is_rejected(mistake, copy, tmp_path):
    other = tmp_path / "secret"
    other.write_text("secret")
    manifest = copy / "checkpoints" / "12" / "manifest.json"
    saved = json.loads(manifest.read_text())
    saved["sha256"] = {str(other): hashlib.sha256(b"secret").hexdigest()}
    manifest.write_text(json.dumps(saved))
    assert f"{other} is missing" in mistake(sample.main, f"--workdir={copy}")


@pytest.mark.parametrize("saved", [True, False])
def test_optional_field_accepts_none(saved):
    for texts, expected in ((["None"], None), (["8", "None"], None), (["None", "8"], 8)):
        argv = ["train", *[QUICKSTART] * (not saved), *(f"--config.model.attention.window={text}" for text in texts)]
        values = flags.FlagValues()
        before = configs.RunConfig.of({"model.attention.window": 16})
        commands.define_config(values, argv, before if saved else None)
        commands.parse(values, argv)
        config, _ = commands.config_of(values)
        assert config.model.layers[0].window == expected


def test_help_shows_command_flags_and_experiments(capsys):
    assert train.main(["attnlab", "--help"]) == 0
    out = capsys.readouterr().out
    assert "attnlab train --" in out and "--workdir" in out and "Traceback" not in out
    assert ", sancho:full, sancho:small, sancho:tiny, shakespeare_char, " in out


def test_failed_allocation_prints_one_line(capsys):
    assert commands.run(lambda *_: None, lambda _: jnp.zeros(2**50).sum(), "", ["attnlab"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: out of memory: lower config.batch_size") and err.count("\n") == 1 and not out


def test_interrupt_during_import_prints_one_line(tmp_path):
    (tmp_path / "jax.py").write_text("import signal, time\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(9)")
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    for module in (["attnlab", "train"], ["attnlab.sample"]):
        ended = subprocess.run([sys.executable, "-m", *module], capture_output=True, text=True, env=env, cwd=tmp_path)
        assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


def test_interrupt_during_garbage_collection_ends_the_command(capsys):
    def callback(*_):
        gc.callbacks.remove(callback)
        signal.raise_signal(signal.SIGINT)

    def main(_):
        gc.callbacks.append(callback)
        gc.collect()
        time.sleep(20)

    assert commands.run(lambda *_: None, main, "", ["attnlab"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("content", [b"\xff\xfe", b'{"step": "x", "split": "val"}\n', b"[" * 100_000 + b"\n"], ids=len)
def test_damaged_metrics_print_one_line(mistake, copy, content):
    (copy / "metrics.jsonl").write_bytes(content)
    assert "metrics.jsonl" in mistake(train.main, *SMALL, f"--workdir={copy}")


def test_workdir_in_use_is_rejected(mistake, copy):
    (copy / "metrics.jsonl").unlink()  # makes the run unfinished
    with (copy / "tokenizer.json").open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another command is running there" in mistake(train.main, *SMALL, f"--workdir={copy}")


def test_moved_checkpoints_are_found_by_checkpoint_dir(mistake, tmp_path):
    copy = unfinished(tmp_path / "copy")
    elsewhere = f"--config.checkpoint.dir={tmp_path}/elsewhere"
    line = mistake(train.main, *SMALL, f"--workdir={copy}", elsewhere)
    assert "elsewhere holds no checkpoint, but the run had reached step 12" in line
    shutil.copytree(copy / "checkpoints", tmp_path / "elsewhere")
    shutil.rmtree(copy / "checkpoints")
    assert train.main(["train", *SMALL, f"--workdir={copy}", elsewhere]) == 0
    assert sample.main(["sample", f"--workdir={copy}", "--max_tokens=3"]) == 0  # the run remembers the new folder


@pytest.mark.slow
def test_damaged_checkpoint_prints_one_line(copy):
    """Runs in a subprocess, because Orbax's threads could write to stderr when the process exits."""
    for data in copy.glob("checkpoints/12/params/**/d/*"):
        data.write_bytes(data.read_bytes()[:-7])
    command = [sys.executable, "-m", "attnlab.sample", f"--workdir={copy}"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("error: checkpoint 12 in") and ended.stderr.count("\n") == 1
    assert "differs from what was written" in ended.stderr and len(ended.stderr) < 500


def test_checkpoint_dir_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.main(["train", *SMALL, "--workdir=run", "--config.checkpoint.dir=kept"]) == 0
    assert Checkpoints("kept").steps() and not (tmp_path / "run" / "checkpoints").exists()
    assert sample.main(["sample", "--workdir=run", "--max_tokens=3"]) == 0


def test_experiment_is_found_by_name_from_any_folder(mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for named in (["--config=quickstart"], ["--config=sancho:tiny"], ["--config", "quickstart"]):
        assert "config.steps = 0" in mistake(train.main, *named, "--config.steps=0")
    assert not list(tmp_path.iterdir())


def test_library_warning_prints_one_line(monkeypatch):
    """Calls Python's formatter of warnings directly, because pytest would catch the warning."""
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # `run` replaces it; this restores it
    assert commands.run(lambda *_: None, lambda _: 0, "", ["attnlab"]) == 0
    assert warnings.formatwarning(UserWarning("x"), UserWarning, "library.py", 7) == "warning: x\n"


@pytest.mark.parametrize("words", [["--seeds=5"], ["--seeds", "5"], ["-seeds=3", "--seeds", "5"], []])
def test_flag_is_removed_in_any_spelling(words):
    assert commands.without(["compare", *words, "--jobs=1"], "seeds") == ["compare", "--jobs=1"]
