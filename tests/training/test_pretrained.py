"""Runs that start from a GPT-2, a Llama or another run take its weights, shape and tokenizer, even when resumed."""

import contextlib
import functools
import io
import json
import shutil

import jax
import numpy as np
import pytest

import attnlab
from attnlab import export, sample, train
from attnlab.data import published, tokenizers
from attnlab.generation.texts import complete
from attnlab.interop.huggingface import from_hf, save_hf
from attnlab.nn import GPT
from tests.data.sentencepiece_families import VERSE, sentencepiece
from tests.parameters import parameters
from tests.runs import CrashError, crash_at, finetune, finetuning, records
from tests.texts import TEXT

pytest.importorskip("safetensors", reason="safetensors is not installed")

END_OF_TEXT = [7, 11]  # tokens without a usual name


def of_gpt2(**fields):
    """A GPT that has the form of a Hugging Face GPT-2."""
    return GPT.of(num_layers=1, positions="learned", use_bias=True, attention={"qk_norm": False}, **fields)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A folder like those of the hub: random weights, byte-level BPE, non-default options, an end of text."""
    saved = tokenizers.make("bpe", TEXT, vocab_size=300).to_dict()
    tokenizer = tokenizers.from_dict(saved | {"end_of_text": END_OF_TEXT})
    options = {"mlp_ratio": 2.5, "activation": "relu", "norm_epsilon": 1e-4}
    model = of_gpt2(vocab_size=tokenizer.vocab_size + 3, num_heads=2, width=16, context=48, **options)
    params = parameters(model, np.zeros((1, 1), np.int32))
    return save_hf(tmp_path_factory.mktemp("hub") / "gpt2", model, params, tokenizer)


NULL = {"steps": 1, "optimizer__learning_rate": 1e-30, "optimizer__weight_decay": 0.0}  # changes no bit


@pytest.fixture(scope="module")
def started(gpt2, text, tmp_path_factory):
    """The folder of a run that started from the GPT-2 and took a step without effect, and its output."""
    workdir, out = tmp_path_factory.mktemp("runs") / "started", io.StringIO()
    with contextlib.redirect_stdout(out):
        assert finetune(gpt2, text, workdir, **NULL) == 0
    return workdir, out.getvalue()


def check_start(workdir, gpt2):
    model, params, tokenizer, config = attnlab.load(workdir)
    theirs, expected = from_hf(gpt2)
    assert theirs.config.vocab_size == tokenizer.vocab_size + 3  # three rows of padding
    assert model == theirs.over_tokens(tokenizer.vocab_size).replace(context=32, dropout=0.1)
    expected["params"]["positions"]["embedding"] = expected["params"]["positions"]["embedding"][:32]
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert tokenizer.to_dict() == published.pretrained(gpt2).to_dict()
    assert (config.init_from, config.data.tokenizer, config.model.mlp_ratio) == (str(gpt2), "pretrained", 2.5)


def test_run_from_gpt2_takes_its_weights_shape_and_tokenizer(gpt2, started):
    check_start(started[0], gpt2)


def test_exported_run_has_its_weights_and_tokenizer(started, tmp_path, capsys):
    """The tokens that end a text come from the folder that the run started from."""
    workdir, folder = started[0], tmp_path / "exported"
    assert export.main(["export", f"--workdir={workdir}", f"--to={folder}"]) == 0
    names = "config.json, model.safetensors, tokenizer.json, tokenizer_config.json"
    assert capsys.readouterr().out.startswith(f"{folder}: {names} (")
    run, again = attnlab.load(workdir), attnlab.load(folder)
    tables = run.params["params"]["embed"]
    tables["embedding"] = tables["embedding"][: run.tokenizer.vocab_size]  # without padding rows
    jax.tree.map(np.testing.assert_array_equal, run.params, again.params)
    assert again.model == run.model.replace(dropout=again.model.config.dropout, padded_vocab_size=None)
    assert run.tokenizer.end_of_text == again.tokenizer.end_of_text == tuple(END_OF_TEXT)
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == END_OF_TEXT
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == run.tokenizer.decode([7])


@pytest.mark.parametrize(
    "options, message",
    [
        ([], "--workdir is missing"),
        (["--workdir={run}"], "--to is missing"),
        (["--workdir={run}", "--to={run}"], "already exists: choose a new folder"),
        (["--workdir={run}", "--to={new}", "--dtype=int8"], "int8"),
        (["--workdir={run}", "--to={new}", "--model_type=llama"], "llama supports only"),
        (["--workdir={new}", "--to={new}"], "no run"),
    ],
)
def test_impossible_export_prints_one_line(options, message, started, tmp_path, mistake):
    options = [option.format(run=started[0], new=tmp_path / "new") for option in options]
    assert message in mistake(export.main, *options) and not (tmp_path / "new").exists()


@pytest.mark.slow
def test_run_from_gpt2_on_a_mesh_takes_its_weights_shape_and_tokenizer(gpt2, text, tmp_path):
    assert finetune(gpt2, text, tmp_path / "run", **NULL, parallel__mesh__data=-1, parallel__mesh__fsdp=2) == 0
    check_start(tmp_path / "run", gpt2)


def test_second_start_with_another_config_is_refused(gpt2, text, started, capsys):
    """This includes fields that the source truncates or overrides."""
    workdir, out = started
    assert f"starting from {gpt2}, sequences of 32 tokens" in out
    assert finetune(gpt2, text, workdir, **NULL) == 0
    for source, change, message in (
        (gpt2, {"model__context": 4096}, "config.model.context = 4096, but it was 32"),
        (gpt2, {"model__num_heads": 8}, "config.model.num_heads = 8 has no effect with config.init_from"),
        ("", {}, "config.init_from is missing"),
    ):
        assert finetune(source, text, workdir, **NULL, **change) == 2
        assert message in capsys.readouterr().err
    # Values equal to the run's change nothing, even if the experiment set others.
    assert train.main(["train", f"--workdir={workdir}", "--config.model.num_layers=1"]) == 0
    assert finetune(gpt2, text, workdir, **NULL, model__num_heads=2, data__tokenizer="pretrained") == 0
    assert finetune(gpt2, text, gpt2) == 2
    assert "holds a Hugging Face model" in capsys.readouterr().err


def test_run_of_older_version_with_said_fields_is_read(started, tmp_path, capsys):
    """Runs before 0.2 saved the fields set on the command line as `said`."""
    workdir = shutil.copytree(started[0], tmp_path / "run")
    config = json.loads((workdir / "config.json").read_text())
    config["said"] = {"model.width": 768, "model.num_layers": 12, "data.tokenizer": "pretrained"}
    (workdir / "config.json").write_text(json.dumps(config))
    assert train.main(["train", f"--workdir={workdir}"]) == 0
    assert "is finished (1 steps): nothing to do" in capsys.readouterr().out


@pytest.mark.slow
def test_resume_after_source_is_deleted_is_bit_exact(gpt2, text, tmp_path):
    source = shutil.copytree(gpt2, tmp_path / "source")
    more = {"optimizer__learning_rate": 1e-3, "checkpoint__every": 2}
    assert finetune(source, text, tmp_path / "whole", **more) == 0
    with pytest.raises(CrashError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "main", functools.partial(train.main, on_step=crash_at(3)))
        finetune(source, text, tmp_path / "run", **more)
    shutil.rmtree(source)
    for name in ("run", "whole"):  # the second is finished: nothing to do
        assert finetune(source, text, tmp_path / name, **more) == 0
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_source_without_tokenizer_requires_naming_one(gpt2, text, tmp_path, capsys):
    source = shutil.copytree(gpt2, tmp_path / "source")
    (source / "tokenizer.json").unlink()
    assert finetune(source, text, tmp_path / "a") == 2
    assert f"config.init_from = {source} has no tokenizer: put tokenizer.json there" in capsys.readouterr().err
    assert finetune(source, text, tmp_path / "a", steps=1, data__tokenizer="byte") == 0
    assert attnlab.load(tmp_path / "a").tokenizer.kind == "byte" and attnlab.load(source).tokenizer is None
    assert sample.main(["sample", f"--workdir={source}"]) == 2
    assert "holds no tokenizer: put tokenizer.json there" in capsys.readouterr().err
    assert finetune(source, text, tmp_path / "a", steps=1, data__tokenizer="char") == 2  # differs from the run
    assert "config.data.tokenizer = 'char', but it was 'byte'" in capsys.readouterr().err


def test_impossible_start_prints_one_line_and_creates_no_workdir(gpt2, text, tmp_path, mistake):
    broken = shutil.copytree(gpt2, tmp_path / "broken")
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:-9])
    model = of_gpt2(vocab_size=7, num_heads=1, width=4, context=4)
    small = save_hf(tmp_path / "small", model, parameters(model, np.ones((1, 1), np.int32)))
    shutil.copy(gpt2 / "tokenizer.json", small)
    for source, change, message in (
        ("", {}, "config.init_from is missing, but config.data.tokenizer = 'pretrained'"),
        (tmp_path / "nowhere", {}, "nowhere holds neither a run"),
        (broken, {}, "broken/model.safetensors is not a complete safetensors file"),
        (small, {}, "300 tokens and a model of 7"),
        (gpt2, {"model__num_layers": 7}, "config.model.num_layers = 7 has no effect with config.init_from"),
        (gpt2, {"data__tokenizer": "byte"}, "config.data.tokenizer = 'byte' has no effect with config.init_from"),
        (gpt2, {"model__context": 64}, "config.model.context = 64, but the model in "),
    ):
        assert message in mistake(train.main, *finetuning(source, text, **change), f"--workdir={tmp_path}/run")
        assert not (tmp_path / "run").exists()


def test_sample_from_gpt2_folder_uses_its_tokenizer_for_unicode(gpt2, capsys):
    model, params, tokenizer, config = attnlab.load(gpt2)
    assert model == from_hf(gpt2)[0].over_tokens(tokenizer.vocab_size)
    assert config.model.vocab_size == model.config.vocab_rows
    assert config.model.width == 16 and json.loads((gpt2 / "config.json").read_text())["n_embd"] == 16
    command = [f"--workdir={gpt2}", "--prompt=日本 🐈", "--max_tokens=8", "--num_samples=2"]
    assert sample.main(["sample", *command]) == 0
    options = {"temperature": 0.8, "vocab_size": tokenizer.vocab_size, "num_samples": 2}
    drawn = list(sample.generate(model, params, tokenizer.encode("日本 🐈"), 8, **options))
    texts = ["日本 🐈" + "".join(tokenizer.stream(int(token[n]) for token in drawn)) for n in (0, 1)]
    assert capsys.readouterr().out == f"{texts[0]}\n{'-' * 80}\n{texts[1]}\n"
    assert sample.main(["sample", *command, "--step=7"]) == 2
    assert "a Hugging Face model, which has no checkpoint '7'" in capsys.readouterr().err


# --- a Llama with a SentencePiece tokenizer

PROMPT = "¿Qué es"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder like those of the hub: random weights, and a SentencePiece tokenizer."""
    tokenizer = sentencepiece("llama2")
    model = GPT.of(
        vocab_size=tokenizer.vocab_size + 3, num_layers=1, num_heads=2, width=16, context=48, norm="rms", mlp="gated",
        activation="silu", tie_embeddings=False, attention={"qk_norm": False},
    )  # fmt: skip
    params = parameters(model, np.zeros((1, 1), np.int32))
    return save_hf(tmp_path_factory.mktemp("hub") / "llama", model, params, tokenizer)


def test_saved_folder_has_the_end_of_text_of_its_tokenizer(llama):
    tokenizer = attnlab.load(llama).tokenizer
    assert (tokenizer.kind, tokenizer.end_of_text) == ("sentencepiece", (2,))
    assert json.loads((llama / "config.json").read_text())["eos_token_id"] == 2  # "</s>"


def test_sample_prints_the_spaces_after_the_prompt(llama, capsys):
    model, params, tokenizer, _ = attnlab.load(llama)
    drawn = sample.generate(
        model, params, tokenizer.encode(PROMPT), 20, temperature=0.0, vocab_size=tokenizer.vocab_size
    )
    tokens = [int(token[0]) for token in drawn]
    expected = tokenizer.decode([*tokenizer.encode(PROMPT), *tokens])
    assert tokenizer.decode(tokens, continues=True).startswith(expected.removeprefix(PROMPT))
    arguments = [f"--workdir={llama}", "--max_tokens=20", "--temperature=0", "--noend_of_text"]
    assert sample.main(["sample", *arguments, f"--prompt={PROMPT}"]) == 0
    assert capsys.readouterr().out == expected + "\n"


@pytest.mark.parametrize("stop", [(), (" ",)])
def test_completions_continue_their_prompts(llama, stop):
    run = attnlab.load(llama)
    decode, encode = run.tokenizer.decode, run.tokenizer.encode
    for done in complete(run, [PROMPT, "una", "una vida <s>"], 20, stop=stop, num_samples=2):
        whole = decode([*encode(done.prompt), *done.tokens])
        whole = whole.removeprefix(decode(encode(done.prompt)))
        assert done.text == (whole.split(" ")[0] if stop else whole)
        assert done.stopped_by == ("stop" if stop and " " in whole else "max_tokens")


def test_run_from_a_llama_keeps_its_tokenizer(llama, tmp_path):
    (tmp_path / "text.txt").write_text(VERSE * 30)
    assert finetune(llama, tmp_path / "text.txt", tmp_path / "run", steps=1) == 0
    run = attnlab.load(tmp_path / "run")
    assert run.tokenizer.to_dict() == published.pretrained(llama).to_dict()
    assert run.config.data.tokenizer == "pretrained"
    again = attnlab.load(save_hf(tmp_path / "tuned", run.model, run.params, run.tokenizer))
    assert again.tokenizer.to_dict() == run.tokenizer.to_dict()
    assert again.model.config.vocab_size == run.model.config.vocab_size
