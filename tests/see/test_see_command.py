"""The command `attnlab see`: its page of a run and of a GPT-2, what it prints, and what it refuses."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import load, train
from attnlab.__main__ import main
from attnlab.data import tokenizers
from attnlab.interop.huggingface import save_hf
from attnlab.nn import GPT
from attnlab.see import Page, capture
from attnlab.see.__main__ import SEQUENCES
from attnlab.training.checkpoints import history_steps
from tests.see.pages import data_of, records_of

TEXT = "el perro persiguió al gato y lo atrapó. "
STEPS, HISTORY = 6, 4
TINY = ["model.num_layers=2", "model.num_heads=2", "model.width=16", "model.context=16", "batch_size=4"]
TINY += ["eval.windows=4", "log.tensorboard=False"]


def trained(folder, *options):
    """The workdir of a small run."""
    (folder / "text.txt").write_text(TEXT * 150)
    options = [f"--config.{option}" for option in (*TINY, f"data.path={folder}/text.txt", *options)]
    assert train.main(["train", "--config=quickstart", f"--workdir={folder}/run", *options]) == 0
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("history")
    return trained(folder, f"steps={STEPS}", f"checkpoint.history={HISTORY}", "checkpoint.every=4")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A folder as Hugging Face writes it, with a tokenizer of 300 subwords."""
    tokenizer = tokenizers.make("bpe", TEXT * 9, vocab_size=300)
    sizes = {"vocab_size": tokenizer.vocab_size, "num_layers": 2, "num_heads": 2, "width": 16, "context": 12}
    model = GPT(**sizes, positions="learned", qk_norm=False)
    params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return save_hf(tmp_path_factory.mktemp("gpt2") / "gpt2", model, params, tokenizer)


def see(capsys, workdir, *options):
    """Exit code, standard output and standard error of the command."""
    capsys.readouterr()
    code = main(["attnlab", "see", f"--workdir={workdir}", *options])
    return code, *capsys.readouterr()


def refused(capsys, workdir, *options) -> str:
    """The line with which the command ends in an error."""
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


def test_page_of_a_run_shows_each_prompt_at_each_checkpoint(run, capsys, tmp_path):
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
        for number, prompt in enumerate(prompts):
            patterns = capture(model, params, tokenizer.encode(prompt)[None]).stack("pattern")[:, 0]
            shown = weights_of(tmp_path / "page.html", number)[at]
            np.testing.assert_allclose(shown, patterns.reshape(shown.shape), atol=0.004)


def test_tables_of_a_run_hold_scores_and_effects_at_each_checkpoint(run, capsys, tmp_path):
    code, out, _ = see(capsys, run, f"--checkpoints=0,{STEPS}", f"--out={tmp_path}/page.html")
    assert code == 0
    tables = data_of(page_in(tmp_path / "page.html"))["tables"]
    assert set(tables) == {"entropy", "previous", "current", "sink", "duplicate", "induction", "effect"}
    assert all(np.shape(table) == (2, 2, 2) for table in tables.values())
    for line in ("previous ", "induction ", "effect "):
        assert f"\n{line}" in out
    assert "(untrained)" in out and f"loss {loss_of(run):.4f} on {SEQUENCES} windows of validation text" in out


def loss_of(run) -> float:
    """The loss of the last checkpoint on evenly spaced windows of the validation text."""
    model, params, tokenizer, config = load(run)
    text = (run.parent / "text.txt").read_text()
    ids = tokenizer.encode(text[int(len(text) * (1 - config.data.validation_fraction)) :])
    starts = np.linspace(0, len(ids) - 17, SEQUENCES).round().astype(int)
    windows = ids[starts[:, None] + np.arange(17)]
    return float(model.apply(params, windows[:, :-1], targets=windows[:, 1:]).mean())


def test_page_without_prompt_shows_a_window_of_the_validation_text(run, capsys):
    code, out, _ = see(capsys, run, "--noeffects")
    assert code == 0 and "loss" not in out and "effect" not in out
    data = data_of(page_in(run / "see.html"))
    assert data["steps"] == [STEPS] and "effect" not in data["tables"]
    assert "".join(data["prompts"][0]["queries"]).replace("·", " ") in TEXT * 2
    assert f"<title>run, step {STEPS}</title>" in (run / "see.html").read_text()
    assert see(capsys, run, "--noeffects", "--length=8", "--checkpoints=best")[0] == 0  # its own page is replaced
    assert len(data_of(page_in(run / "see.html"))["prompts"][0]["queries"]) == 8


def test_page_of_a_gpt2_has_one_checkpoint_and_effects_on_its_prompts(gpt2, capsys, tmp_path):
    out = tmp_path / "gpt2.html"
    code, printed, _ = see(capsys, gpt2, "--prompt=el perro", "--prompt=al gato y lo", f"--out={out}")
    assert code == 0 and "tokens of each prompt" in printed
    data = data_of(page_in(out))
    assert data["steps"] == [None] and {"effect", "induction", "previous"} <= set(data["tables"])
    assert ["".join(prompt["queries"]) for prompt in data["prompts"]] == ["el·perro", "al·gato·y·lo"]
    model, params, tokenizer, _ = load(gpt2)
    patterns = capture(model, params, tokenizer.encode("el perro")[None]).stack("pattern")
    shown = weights_of(out)[0]
    np.testing.assert_allclose(shown, patterns.reshape(shown.shape), atol=0.004)


def test_run_of_documents_is_shown_within_single_documents(capsys, tmp_path):
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": letter * 8}) for letter in "abc" * 300))
    options = [f"data.path={tmp_path}/text.jsonl", "data.packing=documents", "data.tokenizer=byte", "steps=1"]
    workdir = trained(tmp_path, *options)
    assert see(capsys, workdir, "--length=4")[0] == 0
    shown = data_of(page_in(workdir / "see.html"))["prompts"][0]["queries"]
    assert len(shown) == 4 and len(set(shown)) == 1
    assert "no document of the validation text has 17 tokens: lower --length" in refused(capsys, workdir)


def test_run_with_one_checkpoint_and_without_its_text_says_what_is_missing(capsys, tmp_path):
    workdir = trained(tmp_path, "steps=2")
    assert "--config.checkpoint.history=20" in refused(capsys, workdir, "--checkpoints=all")
    (tmp_path / "text.txt").unlink()
    assert "or give --prompt" in refused(capsys, workdir)
    code, out, err = see(capsys, workdir, "--prompt=el gato")
    assert code == 0 and "first 7 tokens of each prompt" in out
    assert err.startswith("without validation text (") and err.count("\n") == 1


@pytest.mark.parametrize(
    "options, expected",
    [
        (["--checkpoints=5"], "no checkpoint '5': choose latest, best, all, or some of 0, 1"),
        (["--checkpoints=0,newest"], "no checkpoint 'newest'"),
        (["--prompt=el 日本"], "'日本': characters not in the tokenizer's vocabulary"),
        (["--prompt=" + TEXT], "has 40 tokens: expected 2 or more, up to the model's context of 16"),
        (["--prompt=el perro", "--length=4"], "expected 2 or more, up to --length=4"),
        (["--prompt=e"], "has 1 token:"),
        (["--length=17"], "--length=17: expected 2 or more, up to the model's context of 16"),
        (["--max_bytes=10"], "--max_bytes"),
        (["--out=nowhere/page.html"], "expected a file in a folder that exists"),
        (["see.html"], "'see.html' is not expected here"),
    ],
)
def test_bad_option_of_a_run_is_one_line(options, expected, run, capsys, tmp_path):
    out = [] if any("out" in option for option in options) else [f"--out={tmp_path}/page.html"]
    assert expected in refused(capsys, run, *options, *out)
    assert not (tmp_path / "page.html").exists()


def test_file_of_the_user_is_never_overwritten(run, capsys, tmp_path):
    (tmp_path / "notes.html").write_text("my notes")
    assert "is no page of attnlab" in refused(capsys, run, f"--out={tmp_path}/notes.html")
    assert (tmp_path / "notes.html").read_text() == "my notes"
    (tmp_path / "picture.html").write_bytes(bytes(range(256)))
    assert "is no page of attnlab" in refused(capsys, run, f"--out={tmp_path}/picture.html")


def test_folder_without_a_run_is_one_line(gpt2, capsys, tmp_path):
    assert "holds no run" in refused(capsys, tmp_path / "nowhere")
    assert "holds no run" in refused(capsys, tmp_path)
    assert "--workdir is missing" in refused_without_workdir(capsys)
    assert 'give --prompt="…"' in refused(capsys, gpt2)
    assert "has no checkpoints" in refused(capsys, gpt2, "--checkpoints=all", "--prompt=el gato")
    (gpt2 / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    try:
        assert "holds no tokenizer" in refused(capsys, gpt2, "--prompt=el gato")
    finally:
        (tmp_path / "tokenizer.json").rename(gpt2 / "tokenizer.json")


def refused_without_workdir(capsys) -> str:
    capsys.readouterr()
    assert main(["attnlab", "see"]) == 2
    return capsys.readouterr().err


def test_run_of_a_model_of_the_users_own_is_refused_by_name(run, capsys, tmp_path):
    config = json.loads((run / "config.json").read_text()) | {"user_defined": {"model": "Bigram"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "a run of a Bigram, and the command shows GPTs alone" in refused(capsys, tmp_path)
