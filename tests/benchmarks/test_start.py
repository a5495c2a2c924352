"""The benchmark of start-up. No test asserts a time."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from attnlab._benchmarks import start
from attnlab.support.errors import UserError

TINY = ["model.num_layers=1", "model.width=16", "model.context=16", "batch_size=4", "log.tensorboard=False"]
OVERRIDES = [f"--config.{field}" for field in TINY]


def python(program):
    return [sys.executable, "-c", program]


def test_seconds_until_ends_the_process_on_a_match(tmp_path):
    pid = tmp_path / "pid"
    program = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid()))"
    command = python(program + "; print('wait'); print('now', end=''); time.sleep(600)")
    assert 0 < start.seconds_until(rb"(?m)^now", command, tmp_path) < 60
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_seconds_until_reports_a_process_that_ends_early(tmp_path):
    with pytest.raises(UserError, match="ended: ValueError: no"):
        start.seconds_until(rb"never", python("print('first'); raise ValueError('no')"), tmp_path)


def test_seconds_until_sets_environment_and_folder(tmp_path):
    program = "import os; print(os.environ['JAX_COMPILATION_CACHE_DIR'], os.getcwd())"
    sign = rb"here " + str(tmp_path).encode()
    assert start.seconds_until(sign, python(program), tmp_path, {"JAX_COMPILATION_CACHE_DIR": "here"}, tmp_path) > 0


def test_start_alternates_cold_and_warm_with_a_cache_each_round(figures_of, monkeypatch, peer, capsys):
    asked = []

    def seconds_until(sign, command, folder, environment=None, cwd=None):
        asked.append((sign, command, Path((environment or {}).get("JAX_COMPILATION_CACHE_DIR", "none")).name))
        if cwd:
            tokens = np.fromfile(cwd / "data" / "text" / "train.bin", np.uint16)
            assert len(tokens) > 1000 and (cwd / "configurator.py").is_symlink()
        return float(len(asked))

    monkeypatch.setattr(start, "seconds_until", seconds_until)
    monkeypatch.setattr(start, "_finish", lambda command, folder: None)
    figures = figures_of("start", *OVERRIDES, *peer(), "--rounds=2")
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
    assert figures == {
        "import_flax_s": 4.5,
        "import_attnlab_s": 5.5,
        "start_cold_s": 6.5,
        "start_warm_s": 7.5,
        "start_nanogpt_s": 10.5,
        "first_character_cold_s": 8.5,
        "first_character_warm_s": 9.5,
    }
    out = capsys.readouterr().out
    assert "starts: round 2 of 2" in out and "from the command" in out


@pytest.mark.slow
def test_start_real_commands_reach_step_and_character(figures_of):
    figures = figures_of("start", *OVERRIDES, "--rounds=1")
    kinds = ("cold", "warm")
    expected = {f"{what}_{kind}_s" for what in ("start", "first_character") for kind in kinds}
    assert set(figures) == expected | {"import_flax_s", "import_attnlab_s"}
