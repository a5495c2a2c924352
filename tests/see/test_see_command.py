"""The command `attnlab see`: its page of a run and of a GPT-2, what it prints, and what it refuses."""

import json
import os
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from attnlab import load, train
from attnlab.__main__ import main
from attnlab.data import corpora, tokenizers
from attnlab.interop.huggingface import save_hf
from attnlab.nn import GPT
from attnlab.see import Page
from attnlab.see.__main__ import SEQUENCES, _label
from attnlab.training.checkpoints import MANIFEST, history_steps
from tests.parameters import parameters
from tests.see.models import capture
from tests.see.pages import data_of, records_of

TEXT = "el perro persiguió al gato y lo atrapó. "
STEPS, HISTORY = 6, 2
TINY = ["model.num_layers=1", "model.num_heads=2", "model.width=16", "model.context=16", "batch_size=4"]
TINY += ["eval.windows=4", "log.tensorboard=False", "sample.length=0"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The workdir of a small run."""
    return trained(tmp_path_factory.mktemp("history"))


def trained(folder, *others):
    (folder / "text.txt").write_text("\n" + TEXT * 150)  # documents end with a newline
    options = [*TINY, f"data.path={folder}/text.txt", f"steps={STEPS}", f"checkpoint.history={HISTORY}"]
    options = [f"--config.{option}" for option in (*options, "checkpoint.every=4", *others)]
    assert train.main(["train", "--config=quickstart", f"--workdir={folder}/run", *options]) == 0
    return folder / "run"


def copied(run, folder, text, **data):
    """A copy of the run with another text and other data options, as if it had been trained on this text."""
    workdir = Path(shutil.copytree(run, folder / "run"))
    config = json.loads((workdir / "config.json").read_text())
    config["data"] |= {"path": str(text)} | data
    if text.exists():
        config["corpus"]["sha256"] = corpora.load("text", path=str(text)).sha256
    (workdir / "config.json").write_text(json.dumps(config))
    return workdir


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A folder as Hugging Face writes it, with a tokenizer of 300 subwords."""
    tokenizer = tokenizers.make("bpe", TEXT * 9, vocab_size=300)
    sizes = {"vocab_size": tokenizer.vocab_size, "num_layers": 2, "num_heads": 2, "width": 16, "context": 12}
    model = GPT.of(**sizes, positions="learned", use_bias=True, attention={"qk_norm": False})
    params = parameters(model, np.zeros((1, 1), np.int32))
    return save_hf(tmp_path_factory.mktemp("gpt2") / "gpt2", model, params, tokenizer)


def see(capsys, workdir, *options):
    """Exit code, standard output and standard error of the command."""
    capsys.readouterr()
    code = main(["attnlab", "see", f"--workdir={workdir}", *options])
    return code, *capsys.readouterr()


def refused(capsys, workdir, *options) -> str:
    """The one-line error with which the command ends."""
    code, _, err = see(capsys, workdir, *options)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    return err


def page_in(path) -> Page:
    return Page(path.read_text(encoding="utf-8"), b"", path)


def weights_of(path, prompt=0) -> np.ndarray:
    """The weights `[S, N, T, T]` that a page shows, within 0.004."""
    page = page_in(path)
    data = data_of(page)
    length, heads = len(data["prompts"][prompt]["queries"]), sum(layer["heads"] for layer in data["layers"])
    triangle = np.tri(length, dtype=bool)
    statistics = 2 * 4 * heads * length  # float32 sums and entropies of the rows come first
    shown = records_of(page, prompt)[:, statistics:].reshape(len(data["steps"]), heads, -1)
    weights = np.zeros((*shown.shape[:2], length, length))
    weights[..., triangle] = (shown / 255) ** 2
    return weights


def test_page_of_a_run_shows_prompts_at_each_checkpoint_and_scores(run, capsys, tmp_path):
    prompts = ["el gato", "el perro y el ga"]
    options = ["--checkpoints=all", f"--out={tmp_path}/page.html", *(f"--prompt={prompt}" for prompt in prompts)]
    code, out, err = see(capsys, run, *options)
    assert code == 0 and not err
    data = data_of(page_in(tmp_path / "page.html"))
    steps = data["steps"]
    assert set(history_steps(STEPS, HISTORY)) <= set(steps) and steps[0] == 0 and steps[-1] == STEPS
    assert ["".join(prompt["queries"]).replace("·", " ") for prompt in data["prompts"]] == prompts
    assert out.count("\nstep ") + 1 == len(steps)
    for at, step in ((0, 0), (-1, STEPS)):
        model, params, tokenizer, _ = load(run, step=step)
        tokens = np.stack([np.resize(tokenizer.encode(prompt), 16) for prompt in prompts])  # the rest has no effect
        for number, pattern in enumerate(capture(model, params, tokens).stack("pattern")[0]):
            shown = weights_of(tmp_path / "page.html", number)[at]
            np.testing.assert_allclose(shown, pattern[:, : shown.shape[1], : shown.shape[1]], atol=0.004)
    assert set(data["tables"]) == {"entropy", "previous", "current", "sink", "duplicate", "induction", "effect"}
    assert all(np.shape(table) == (len(steps), 1, 2) for table in data["tables"].values())
    for line in ("previous ", "induction ", "effect "):
        assert f"\n{line}" in out
    # The loss of the last checkpoint on evenly spaced windows.
    model, params, tokenizer, config = load(run)
    text = (run.parent / "text.txt").read_text()
    ids = tokenizer.encode(text[int(len(text) * (1 - config.data.validation_fraction)) :])
    windows = ids[np.linspace(0, len(ids) - 17, SEQUENCES).round().astype(int)[:, None] + np.arange(17)]
    loss = np.mean(jax.jit(model.apply)(params, windows[:, :-1], targets=windows[:, 1:]))
    assert "(untrained)" in out and f"loss {loss:.4f} on {SEQUENCES} windows of validation text" in out


def test_page_without_prompt_shows_a_window_of_the_validation_text(run, capsys):
    options = ["--noeffects", "--length=8"]
    code, out, _ = see(capsys, run, *options)
    assert code == 0 and "loss" not in out and "effect" not in out
    data = data_of(page_in(run / "see.html"))
    assert data["steps"] == [STEPS] and "effect" not in data["tables"]
    assert "".join(data["prompts"][0]["queries"]).replace("·", " ") in TEXT * 2
    assert f"<title>run, step {STEPS}</title>" in (run / "see.html").read_text()
    # Its own page is replaced.
    assert see(capsys, run, *options, "--checkpoints=0,best")[0] == 0
    data = data_of(page_in(run / "see.html"))
    assert len(data["prompts"][0]["queries"]) == 8 and data["steps"] == [0, STEPS]


def test_page_of_a_gpt2_has_one_checkpoint_and_scores_of_each_layer(gpt2, capsys, tmp_path):
    out = tmp_path / "gpt2.html"
    assert see(capsys, gpt2, "--prompt=el perro", "--noeffects", f"--out={out}")[0] == 0
    data = data_of(page_in(out))
    assert data["steps"] == [None] and {"induction", "previous"} <= set(data["tables"])
    assert all(np.shape(table) == (1, 2, 2) for table in data["tables"].values())
    assert ["".join(prompt["queries"]) for prompt in data["prompts"]] == ["el·perro"]


@pytest.mark.slow
def test_page_of_a_hybrid_shows_patterns_as_shares(capsys, tmp_path):
    kind = "delta_product"
    workdir = trained(tmp_path, "model.num_layers=3", f"model.layers={kind} gru attention")
    code, printed, err = see(capsys, workdir)
    assert code == 0, err
    assert printed.splitlines()[:2] == [
        "layers of gru have no pattern: the page omits them",
        f"the pattern of {kind} is each token's share of what a state reads, by absolute values",
    ]
    shown = weights_of(workdir / "see.html")[0]
    np.testing.assert_allclose(shown.reshape(-1, shown.shape[-1]).sum(axis=-1), 1, atol=0.06)  # over 15 bytes
    assert shown.size == 2 * 2 * shown.shape[-1] ** 2


@pytest.mark.slow
def test_run_of_documents_is_shown_within_single_documents(run, capsys, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": letter * 8}) for letter in "atr" * 300))
    workdir = copied(run, tmp_path, text, packing="documents")
    code, _, err = see(capsys, workdir, "--length=4", "--noeffects")
    assert code == 0, err
    shown = data_of(page_in(workdir / "see.html"))["prompts"][0]["queries"]
    assert len(shown) == 4 and len(set(shown)) == 1
    assert "no document of the validation text has 17 tokens: lower --length" in refused(capsys, workdir)


def test_tokens_of_bytes_are_shown_as_text_or_by_their_number():
    labels = [_label(tokenizers.make("byte", ""), token) for token in (*b"el", 0xC3)]
    assert labels == ["e", "l", "\udcc3"]


def test_store_and_text_that_is_not_a_file_are_left_alone(run, capsys, tmp_path):
    """The folder may come from someone else."""
    store = tmp_path / "tokens"
    workdir = copied(run, tmp_path, tmp_path / "text.txt", store=str(store))
    os.mkfifo(tmp_path / "text.txt")  # reading it would block for ever
    capsys.readouterr()
    assert main(["attnlab", "see", f"--workdir={workdir}"]) == 2
    assert f"lacks its training text, {tmp_path}/text.txt: name it with --text=FILE" in capsys.readouterr().err
    assert main(["attnlab", "see", f"--workdir={workdir}", "--prompt=el gato"]) == 0
    out, err = capsys.readouterr()
    assert "first 7 tokens of each prompt" in out
    assert err.startswith("skipped the validation text (") and err.count("\n") == 1 and not store.exists()


def test_run_without_history_or_text_says_what_is_missing(run, capsys, tmp_path):
    workdir = copied(run, tmp_path, tmp_path / "gone.txt")
    for step in (workdir / "checkpoints").glob("[0-9]*"):
        if step.name != str(STEPS):
            shutil.rmtree(step)
    assert "--config.checkpoint.history=20" in refused(capsys, workdir, "--checkpoints=all")
    assert "or give --prompt" in refused(capsys, workdir)


@pytest.mark.slow
def test_damaged_checkpoint_is_skipped_in_all_and_refused_by_name(run, capsys, tmp_path):
    workdir = copied(run, tmp_path, run.parent / "text.txt")
    (workdir / "checkpoints" / "0" / MANIFEST).unlink()
    options = ["--noeffects", "--length=8"]
    code, out, err = see(capsys, workdir, "--checkpoints=all", *options)
    assert code == 0 and err.startswith("skipped step 0: checkpoint 0 in ") and err.count("\n") == 1
    steps = data_of(page_in(workdir / "see.html"))["steps"]
    assert 0 not in steps and steps[-1] == STEPS and f"step {STEPS} " in out
    assert "step 0: checkpoint 0 in " in refused(capsys, workdir, f"--checkpoints=0,{STEPS}", *options)


@pytest.mark.parametrize(
    "options, expected",
    [
        (["--checkpoints=5"], "no checkpoint '5'"),
        (["--prompt=el 日本"], "'日本': "),
        (["--prompt=" + TEXT], "has 40 tokens"),
        (["--prompt=e"], "has 1 token:"),
        (["--length=17"], "--length=17"),
        (["--out=nowhere/page.html"], "--out=nowhere/page.html: "),
        (["see.html"], "'see.html' is not expected here"),
        (["--out={folder}/notes.html"], "is not an attnlab page"),
    ],
)
def test_bad_option_prints_one_line(options, expected, run, capsys, tmp_path):
    (tmp_path / "notes.html").write_text("my notes")
    out = [] if any("out" in option for option in options) else [f"--out={tmp_path}/page.html"]
    assert expected in refused(capsys, run, *out, *(option.format(folder=tmp_path) for option in options))
    assert not (tmp_path / "page.html").exists() and (tmp_path / "notes.html").read_text() == "my notes"


def test_folder_without_a_run_prints_one_line(gpt2, capsys, tmp_path):
    assert "holds no run" in refused(capsys, tmp_path / "nowhere")
    assert "holds no run" in refused(capsys, tmp_path)
    capsys.readouterr()
    assert main(["attnlab", "see"]) == 2 and "--workdir is missing" in capsys.readouterr().err
    assert 'give --prompt="…"' in refused(capsys, gpt2)
    assert "has no checkpoints" in refused(capsys, gpt2, "--checkpoints=all", "--prompt=el gato")
    folder = shutil.copytree(gpt2, tmp_path / "gpt2")
    (folder / "tokenizer.json").unlink()
    assert "has no tokenizer" in refused(capsys, folder, "--prompt=el gato")


def test_run_with_a_custom_model_is_refused_by_name(run, capsys, tmp_path):
    config = json.loads((run / "config.json").read_text()) | {"user_defined": {"model": "Bigram", "optimizer": False}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(run / "tokenizer.json", tmp_path)
    assert "holds a run with model = Bigram" in refused(capsys, tmp_path)
