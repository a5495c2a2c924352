"""Starts are timed from outside, until what is waited for has been said. No test asserts how long they take."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from attnlab.bench import start
from attnlab.bench.__main__ import main
from attnlab.errors import UserError

CONFIG = f"--config={Path(__file__).parents[2]}/configs/quickstart.py"
TINY = ["model.num_layers=1", "model.width=16", "model.context=16", "batch_size=4", "log.tensorboard=False"]
OVERRIDES = [f"--config.{field}" for field in TINY]


def python(program):
    return [sys.executable, "-c", program]


def test_a_process_is_timed_until_its_sign_and_then_ended(tmp_path):
    pid = tmp_path / "pid"
    program = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid()))"
    command = python(program + "; print('wait'); print('now', end=''); time.sleep(600)")
    assert 0 < start.seconds_until(rb"(?m)^now", command, tmp_path) < 60
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_a_process_that_ends_too_early_is_told_with_what_it_said(tmp_path):
    with pytest.raises(UserError, match="ended: ValueError: no"):
        start.seconds_until(rb"never", python("print('first'); raise ValueError('no')"), tmp_path)


def test_a_process_sees_its_environment_and_its_folder(tmp_path):
    program = "import os; print(os.environ['JAX_COMPILATION_CACHE_DIR'], os.getcwd())"
    sign = rb"here " + str(tmp_path).encode()
    assert start.seconds_until(sign, python(program), tmp_path, {"JAX_COMPILATION_CACHE_DIR": "here"}, tmp_path) > 0


def test_cold_and_warm_take_turns_on_caches_of_their_own(tmp_path, monkeypatch, peer, capsys):
    asked = []

    def seconds_until(sign, command, folder, environment=None, cwd=None):
        asked.append((sign, command, Path((environment or {}).get("JAX_COMPILATION_CACHE_DIR", "none")).name))
        if cwd:
            tokens = np.fromfile(cwd / "data" / "text" / "train.bin", np.uint16)
            assert len(tokens) > 1000 and (cwd / "configurator.py").is_symlink()
        return float(len(asked))

    monkeypatch.setattr(start, "seconds_until", seconds_until)
    monkeypatch.setattr(start, "_finish", lambda command, folder: None)
    options = [CONFIG, *OVERRIDES, *peer(), "--rounds=2", f"--json={tmp_path}/figures.json"]
    assert main(["bench", "start", *options]) == 0
    signs = [
        start.IMPORTED,
        start.IMPORTED,
        start.FIRST_STEP,
        start.FIRST_STEP,
        start.FIRST_CHARACTER,
        start.FIRST_CHARACTER,
        start.FIRST_STEP_OF_PEER,
    ]
    assert [sign for sign, _, _ in asked] == signs * 2
    assert [command[-1] for _, command, _ in asked[:2]] == [f"{i}; print('imported')" for i in start.IMPORTS.values()]
    asked = [ask for ask in asked if ask[0] != start.IMPORTED]
    caches = [cache for _, _, cache in asked]
    assert caches[0] == caches[1] and caches[2] == caches[3]
    assert len({caches[0], caches[2], caches[5], caches[7]}) == 4
    assert "--config.model.width=16" in asked[0][1] and "--n_embd=16" in asked[4][1]
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures == {
        "import_flax_s": 4.5,
        "import_attnlab_s": 5.5,
        "start_cold_s": 6.5,
        "start_warm_s": 7.5,
        "start_nanogpt_s": 10.5,
        "first_character_cold_s": 8.5,
        "first_character_warm_s": 9.5,
    }
    assert "from the command" in capsys.readouterr().out


@pytest.mark.slow
def test_the_real_commands_come_to_their_first_step_and_character(tmp_path):
    figures = tmp_path / "figures.json"
    assert main(["bench", "start", CONFIG, *OVERRIDES, "--rounds=1", f"--json={figures}"]) == 0
    kept = json.loads(figures.read_text())
    kinds = ("cold", "warm")
    expected = {f"{what}_{kind}_s" for what in ("start", "first_character") for kind in kinds}
    assert set(kept) == expected | {"import_flax_s", "import_attnlab_s"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([CONFIG, "--rounds=0"], "--rounds=0: expected 1 or more"),
        ([CONFIG, "--peer_path=/nowhere"], "--peer_path=/nowhere holds no model.py: name a checkout of nanoGPT"),
        ([CONFIG, "--config.batch_size=0"], "config.batch_size = 0: expected 1 or more"),
        (["--config=nowhere.py"], "--config=nowhere.py: no such file"),
        ([CONFIG, "--json=/nowhere/x.json"], "--json=/nowhere/x.json lies in no folder: name a new file"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, message):
    assert main(["bench", "start", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_the_quickstart_is_what_starts_when_nothing_is_said(monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert main(["bench", "start", "--config.batch_size=0"]) == 2
    assert "config.batch_size = 0" in capsys.readouterr().err
