"""Runs that start from a GPT-2 or another run take its weights, shape and tokenizer, also when resumed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab
from attnlab import sample, train
from attnlab.data import tokenizers
from attnlab.interop.huggingface import from_hf, save_hf
from attnlab.nn import GPT
from tests.test_train import records, wait_for
from tests.texts import TEXT

pytest.importorskip("safetensors", reason="safetensors is not installed")

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A folder as from the Hugging Face hub: random weights, byte-level BPE, non-default options."""
    tokenizer = tokenizers.make("bpe", TEXT, vocab_size=300)
    model = GPT(tokenizer.vocab_size + 3, 2, 2, 16, 48, mlp_ratio=2.5, activation="relu", norm_epsilon=1e-4)
    params = model.init(jax.random.key(3), jnp.zeros((1, 1), jnp.int32))
    return save_hf(tmp_path_factory.mktemp("hub") / "gpt2", model, params, tokenizer)


def options(source, text, **changes):
    fields = {
        "init_from": source,
        "data.path": text,
        "steps": 4,
        "batch_size": 8,
        "optimizer.accumulation": 1,
        "optimizer.warmup_steps": 0,
        "eval.windows": 4,
        "sample.length": 4,
        "model.context": 32,
        "log.tensorboard": False,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    return [f"--config={REPOSITORY}/configs/gpt2_finetune.py", *(f"--config.{k}={v}" for k, v in fields.items())]


def finetune(source, text, workdir, **changes):
    return train.main(["train", *options(source, text, **changes), f"--workdir={workdir}"])


def load_after_null_step(source, text, workdir, **changes):
    """Load a run after one step with a negligible learning rate."""
    fields = {"steps": 1, "optimizer__learning_rate": 1e-30, "optimizer__weight_decay": 0.0}
    assert finetune(source, text, workdir, **fields, **changes) == 0
    return attnlab.load(workdir)


LAYOUTS = [
    {},
    pytest.param({"parallel__strategy": "pmap"}, marks=pytest.mark.slow),
    pytest.param({"parallel__mesh__fsdp": 2}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("parallel", LAYOUTS, ids=str)
def test_run_from_gpt2_takes_its_weights_shape_and_tokenizer(parallel, gpt2, text, tmp_path):
    model, params, tokenizer, config = load_after_null_step(gpt2, text, tmp_path / "run", **parallel)
    theirs, expected = from_hf(gpt2)
    assert model == theirs.clone(context=32, dropout=0.1)
    expected["params"]["positions"]["embedding"] = expected["params"]["positions"]["embedding"][:32]
    # The step changes a bias of 0 to about the learning rate, 1e-30; other parameters keep their bits.
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-29), params, expected)
    assert tokenizer.to_dict() == tokenizers.pretrained(gpt2).to_dict()
    assert (config.init_from, config.data.tokenizer, config.model.mlp_ratio) == (str(gpt2), "pretrained", 2.5)


def test_second_start_with_another_config_is_refused(gpt2, text, tmp_path, capsys):
    """Including fields that the source truncates or overrides."""
    assert finetune(gpt2, text, tmp_path / "run", steps=1) == 0
    assert f"starting from {gpt2}, sequences of 32 tokens" in capsys.readouterr().out
    assert finetune(gpt2, text, tmp_path / "run", steps=1) == 0
    for source, change, message in (
        (gpt2, {"model__context": 4096}, "config.model.context = 4096, there it was 32"),
        (gpt2, {"model__width": 32, "model__num_heads": 4}, "config.model.num_heads = 4, there it was 12"),
        ("", {}, "config.init_from is missing"),
    ):
        assert finetune(source, text, tmp_path / "run", steps=1, **change) == 2
        assert message in capsys.readouterr().err
    assert finetune(gpt2, text, gpt2) == 2
    assert "holds a Hugging Face model, not a run of attnlab: choose another folder" in capsys.readouterr().err


def test_run_resumes_with_another_remat_also_one_of_version_0_1(gpt2, text, tmp_path):
    """Which wrote a bool, also for what the experiment had said."""
    assert finetune(gpt2, text, tmp_path / "run", steps=1) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["said"]["model.remat"] = config["model"]["remat"] = False
    del config["model"]["scan"], config["said"]["model.scan"]
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    assert train.main(["train", f"--workdir={tmp_path / 'run'}"]) == 0
    assert finetune(gpt2, text, tmp_path / "run", steps=2, model__remat="block", model__scan=True) == 0


@pytest.mark.slow
def test_run_from_another_run_takes_its_weights(gpt2, text, tmp_path):
    """With rotary positions and characters as tokens; the context may grow."""
    shape = ["model.num_layers=1", "model.width=16", "model.num_heads=2", "model.context=16"]
    small = [
        "steps=2",
        "batch_size=8",
        "eval.windows=4",
        "sample.length=2",
        "log.tensorboard=False",
        f"data.path={text}",
    ]
    config = f"--config={REPOSITORY}/configs/quickstart.py"
    assert train.main(["", config, f"--workdir={tmp_path}/a", *(f"--config.{option}" for option in shape + small)]) == 0
    model, params, tokenizer, _ = load_after_null_step(tmp_path / "a", text, tmp_path / "b")
    before = attnlab.load(tmp_path / "a")
    jax.tree.map(np.testing.assert_array_equal, params, before.params)
    assert model == before.model.clone(context=32, dropout=0.1)
    assert tokenizer.characters == before.tokenizer.characters


def test_run_from_trained_weights_starts_at_their_loss(gpt2, text, tmp_path, capsys):
    """The first loss is near the source's last one, and samples use GPT-2's tokenizer."""
    assert finetune(gpt2, text, tmp_path / "a", steps=30, optimizer__learning_rate=1e-2) == 0
    assert finetune(tmp_path / "a", text, tmp_path / "b", steps=1) == 0
    first, second = (records(tmp_path / name) for name in "ab")
    assert second[0]["loss"] < first[-1]["loss"] + 0.1 < first[0]["loss"]
    capsys.readouterr()
    command = [f"--workdir={tmp_path}/a", "--prompt=En un lugar", "--max_tokens=5", "--temperature=0"]
    assert sample.main(["sample", *command]) == 0
    assert capsys.readouterr().out.startswith("En un lugar")


@pytest.mark.slow
def test_resume_after_source_is_deleted_is_bit_exact(gpt2, text, tmp_path):
    source = shutil.copytree(gpt2, tmp_path / "source")
    more = {"steps": 40, "optimizer__learning_rate": 1e-3, "sample__length": 1}

    def process(name):
        command = [
            sys.executable,
            "-m",
            "attnlab.train",
            *options(source, text, **more),
            f"--workdir={tmp_path}/{name}",
        ]
        environment = os.environ | {"XLA_FLAGS": "", "PYTHONUNBUFFERED": "1"}  # one device
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=REPOSITORY, env=environment, text=True, **pipe)

    whole = process("whole")
    out, _ = whole.communicate(timeout=120)
    assert whole.returncode == 0, out
    stopped = process("stopped")
    wait_for(stopped, "first step finished")
    stopped.send_signal(signal.SIGINT)
    stopped.communicate(timeout=120)
    assert stopped.returncode == 130
    shutil.rmtree(source)
    resumed = process("stopped")
    out, _ = resumed.communicate(timeout=120)
    assert resumed.returncode == 0 and "resumed from step" in out, out
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")
    assert finetune(source, text, tmp_path / "whole", **more) == 0  # finished: nothing to do


@pytest.mark.slow
def test_restart_before_first_checkpoint_needs_the_same_weights(gpt2, text, tmp_path, capsys):
    source = shutil.copytree(gpt2, tmp_path / "source")
    assert finetune(source, text, tmp_path / "run") == 0
    expected = records(tmp_path / "run")
    for name in ("metrics.jsonl", "checkpoints"):  # as if killed before its first checkpoint
        (shutil.rmtree if name == "checkpoints" else Path.unlink)(tmp_path / "run" / name)
    model, params = from_hf(source)
    shutil.rmtree(source)
    save_hf(source, model, jax.tree.map(lambda x: x + 1, params), tokenizers.pretrained(gpt2))
    assert finetune(source, text, tmp_path / "run") == 2
    assert "is not what" in capsys.readouterr().err
    shutil.rmtree(source)
    shutil.copytree(gpt2, source)
    assert finetune(source, text, tmp_path / "run") == 0
    assert records(tmp_path / "run") == expected


def test_source_without_tokenizer_requires_naming_one(gpt2, text, tmp_path, capsys):
    source = shutil.copytree(gpt2, tmp_path / "source")
    (source / "tokenizer.json").unlink()
    assert finetune(source, text, tmp_path / "run") == 2
    assert f"config.init_from = {source} has no tokenizer: put tokenizer.json there" in capsys.readouterr().err
    assert finetune(source, text, tmp_path / "run", data__tokenizer="byte") == 0
    assert attnlab.load(tmp_path / "run").tokenizer.kind == "byte"
    assert attnlab.load(source).tokenizer is None
    assert sample.main(["sample", f"--workdir={source}"]) == 2
    assert "holds no tokenizer: put tokenizer.json there" in capsys.readouterr().err
    assert finetune(source, text, tmp_path / "run", data__tokenizer="char") == 2  # differs from the run
    assert "config.data.tokenizer = 'char', there it was 'byte'" in capsys.readouterr().err


def test_invalid_source_is_one_line_and_creates_no_workdir(gpt2, text, tmp_path, capsys):
    broken = shutil.copytree(gpt2, tmp_path / "broken")
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:-9])
    small = save_hf(
        tmp_path / "small", GPT(7, 1, 1, 4, 4), GPT(7, 1, 1, 4, 4).init(jax.random.key(0), jnp.ones((1, 1), int))
    )
    shutil.copy(gpt2 / "tokenizer.json", small)
    for source, message in (
        ("", "error: config.init_from is missing, but config.data.tokenizer = 'pretrained' needs it"),
        (tmp_path / "nowhere", "nowhere holds neither a run nor a Hugging Face model: name a workdir"),
        (tmp_path, f"config.init_from = {tmp_path} holds neither a run nor"),
        (broken, "it ends within the tensor transformer.wte.weight"),
        (small, "has a tokenizer of 300 tokens and a model of 7: provide the model's own tokenizer"),
    ):
        assert finetune(source, text, tmp_path / "run") == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1, err
        assert not (tmp_path / "run").exists()


def test_sample_from_gpt2_folder_uses_its_tokenizer(gpt2, capsys):
    model, params, tokenizer, config = attnlab.load(gpt2)
    assert config.model.width == 16 and json.loads((gpt2 / "config.json").read_text())["n_embd"] == 16
    command = [f"--workdir={gpt2}", "--prompt=un hidalgo", "--max_tokens=20", "--temperature=0"]
    assert sample.main(["sample", *command]) == 0
    prompt = tokenizer.encode("un hidalgo")
    drawn = sample.generate(model, params, prompt, 20, temperature=0.0, vocab_size=tokenizer.vocab_size)
    expected = "".join(tokenizer.stream(int(token[0]) for token in drawn))
    assert capsys.readouterr().out == f"un hidalgo{expected}\n"
    assert sample.main(["sample", *command, "--step=7"]) == 2
    assert "is a Hugging Face model, which has no checkpoint '7': leave it out" in capsys.readouterr().err
