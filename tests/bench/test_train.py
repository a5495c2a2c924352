"""The race of training: in turns, against whoever answers, and with traces of our own steps. No test asserts a time."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from attnlab.bench import profiling, workers
from attnlab.bench.__main__ import main
from attnlab.errors import UserError


def test_the_race_prints_a_table_and_keeps_flat_figures(tiny, peer, tmp_path, capsys):
    options = [tiny, *peer(), "--precisions=bfloat16", "--rounds=2", "--seconds=1", f"--json={tmp_path}/figures.json"]
    assert main(["bench", "train", *options]) == 0
    out = capsys.readouterr().out
    assert "× nanoGPT" in out and "tiny, nanoGPT compiled" in out
    figures = json.loads((tmp_path / "figures.json").read_text())
    contenders = ("attnlab_bfloat16", "nanoGPT", "nanoGPT_compiled")
    kinds = ("step_ms", "tokens_per_second", "peak_mib")
    names = {f"{kind}_tiny_{contender}" for kind in kinds for contender in contenders}
    assert set(figures) == names | {"ratio_tiny_bfloat16"}
    assert figures["step_ms_tiny_nanoGPT"] == 2000 and figures["tokens_per_second_tiny_nanoGPT"] == 4 * 8 / 2
    assert figures["ratio_tiny_bfloat16"] > 0


def test_ours_alone_has_no_ratio(monkeypatch, tiny, tmp_path):
    answers = {"seconds": 3.0}
    monkeypatch.setattr(workers.Worker, "__init__", lambda self, command, log: None)
    monkeypatch.setattr(workers.Worker, "ask", lambda self, what, **request: answers)
    monkeypatch.setattr(workers.Worker, "peak_mib", None)
    monkeypatch.setattr(workers.Worker, "close", lambda self: None)
    figures = tmp_path / "figures.json"
    assert main(["bench", "train", tiny, "--precisions=float32", f"--json={figures}"]) == 0
    kept = json.loads(figures.read_text())
    assert not [name for name in kept if name.startswith("ratio")] and kept["peak_mib_tiny_attnlab_float32"] is None


def test_what_a_peer_said_last_is_told(tiny, peer, capsys):
    options = [tiny, *peer(dies_of="train"), "--precisions=float32", "--nocompiled"]
    assert main(["bench", "train", *options]) == 2
    err = capsys.readouterr().err
    assert "nanogpt.py" in err and err.endswith("ended: RuntimeError: no more\n") and err.count("\n") == 1


def test_a_worker_that_cannot_be_started_is_told(tmp_path):
    with pytest.raises(UserError, match="/no/python cannot be started"):
        workers.Worker(["/no/python"], tmp_path / "log")


def test_a_worker_that_is_gone_before_it_is_asked_is_told(tmp_path):
    worker = workers.Worker([sys.executable, "-c", "raise SystemExit('not today')"], tmp_path / "log")
    worker.process.wait()
    with pytest.raises(UserError, match="ended: not today"):
        worker.ask("start")
    worker.close()


def test_workers_take_turns(tmp_path):
    program = "import json\nwhile True: print(json.dumps(eval(input().replace('null', 'None'))), flush=True)"
    started = [workers.Worker([sys.executable, "-c", program], tmp_path / name) for name in "ab"]
    answers = workers.alternate(dict(zip("ab", started)), "echo", 2, steps=3)
    assert answers == dict.fromkeys("ab", [{"do": "echo", "steps": 3}] * 2)
    assert started[0].peak_mib is None or started[0].peak_mib > 1
    for worker in started:
        worker.close()
        assert worker.process.returncode is not None


def test_the_most_expensive_op_is_named_and_explained(tmp_path):
    @jax.jit
    def program(x):
        for _ in range(3):
            x = jnp.sin(x @ x)
        return x

    x = jnp.ones((300, 300))
    compiled = program.lower(x).compile().as_text()
    jax.block_until_ready(program(x))
    with profiling.trace(str(tmp_path)):
        for _ in range(4):
            jax.block_until_ready(program(x))
            jax.block_until_ready(x + 1)  # another program
    ops = profiling.most_expensive(str(tmp_path), compiled, steps=4, count=2)
    assert len(ops) == 2 and ops[0].milliseconds >= ops[1].milliseconds > 0
    for op in ops:
        assert op.calls == 1 and f"%{op.name} = " in compiled
        assert op.what.startswith("f32[300,300] ")


def test_an_op_without_a_name_of_origin_has_a_shape_and_a_kind():
    compiled = "HloModule m, x\n  ROOT %tuple.1 = (s32[], /*index=1*/f32[4,2]{1,0}) tuple(%a, %b)\n"
    assert (
        profiling.describe("tuple.1", compiled) == "(s32[], f32[4,2]) tuple"
        and profiling.describe("gone", compiled) == ""
    )


@pytest.mark.slow
def test_traces_are_written_and_their_ops_told(tiny, tmp_path, capsys):
    folder = tmp_path / "trace"
    assert main(["bench", "train", tiny, "--precisions=float32", f"--profile={folder}"]) == 0
    assert "tiny, attnlab float32: the most expensive ops" in capsys.readouterr().out
    assert list(folder.rglob("*.xplane.pb"))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--sizes=smal"], "--sizes: 'smal' is unknown (did you mean small?): use small, large"),
        (["--sizes="], "--sizes is empty: use small, large"),
        (["--precisions=float16"], "--precisions: 'float16' is unknown (did you mean bfloat16?)"),
        (["--rounds=0"], "--rounds=0: expected 1 or more"),
        (["--seconds=0"], "--seconds=0: expected 1 or more"),
        (["--peer_path=/nowhere"], "--peer_path=/nowhere holds no model.py: name a checkout of nanoGPT"),
        ([f"--json={__file__}"], "is there already: name a new file"),
        (["--profile=/nowhere/trace"], "--profile=/nowhere/trace lies in no folder: name a new folder"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, message):
    assert main(["bench", "train", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_python_without_torch_is_one_line(capsys, peer):
    checkout, python = peer(has_torch=False)
    assert main(["bench", "train", checkout, python]) == 2
    assert "has no torch: name a Python where it is installed" in capsys.readouterr().err
    assert main(["bench", "train", checkout, "--peer_python=/no/python"]) == 2
    assert capsys.readouterr().err == "error: --peer_python=/no/python cannot be started (No such file or directory)\n"
