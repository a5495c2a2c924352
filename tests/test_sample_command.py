"""The sampling command: prompts from files, JSONL, stop strings, scores, and one-line errors."""

import json
import math
import sys

import numpy as np
import pytest

import attnlab
from attnlab import sample, train
from attnlab.generation.drawing import Draw
from attnlab.generation.texts import complete
from tests.runs import SMALL

TEXT = "el perro persiguió al gato y lo atrapó. " * 100


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampling")
    (folder / "text.txt").write_text(TEXT + "\x1b\x07")
    options = [*SMALL, "--config.steps=4", f"--config.data.path={folder}/text.txt"]
    assert train.main(["train", *options, f"--workdir={folder}/run"]) == 0
    return folder / "run"


@pytest.fixture
def command(workdir, capsys):
    """Runs the command; returns what it printed."""

    def run(*options: str, code: int = 0) -> str:
        capsys.readouterr()
        named = [] if any(option.startswith("--workdir") for option in options) else [f"--workdir={workdir}"]
        assert sample.main(["sample", *named, *options]) == code
        out, err = capsys.readouterr()
        return err if code else out

    return run


def test_command_prints_the_prompt_and_a_continuation(command):
    first = command("--prompt=el perro", "--max_tokens=12")
    assert first.startswith("el perro") and len(first) == len("el perro") + 12 + 1
    assert command("--prompt=el perro", "--max_tokens=12") == first
    # Without a prompt, texts start from a newline, or from token 0 if, as here, the vocabulary has no newline.
    assert len(command("--max_tokens=12").rstrip("\n")) == 12


def test_control_characters_are_shown_on_a_terminal_and_kept_in_a_file(command, tmp_path, monkeypatch):
    (tmp_path / "prompts.txt").write_text("\x1bel \x07\n" * 2)
    options = [f"--prompts={tmp_path}/prompts.txt", "--max_tokens=12"]
    raw = command(*options)
    assert raw.count("\x1bel \x07") == 2
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert command(*options) == raw.replace("\x1b", r"\x1b").replace("\x07", r"\x07")


def test_prompts_from_a_file_become_lines_of_json(command, tmp_path, workdir):
    (tmp_path / "prompts.txt").write_text("el perro\ny lo\nal gato y lo atrapó. el \n")
    options = ["--max_tokens=12", "--num_samples=2", "--batch_size=4", "--seed=3"]
    command(f"--prompts={tmp_path}/prompts.txt", f"--out={tmp_path}/out.jsonl", *options)
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    prompts = ["el perro", "y lo", "al gato y lo atrapó. el "]
    assert [(record["prompt"], record["sample"]) for record in records] == [(p, n) for p in prompts for n in (0, 1)]
    run = attnlab.load(workdir)
    for record in records:
        assert set(record) == {"prompt", "sample", "text", "tokens", "logprobs", "stopped_by"}
        assert record["stopped_by"] == "max_tokens" and len(record["tokens"]) == len(record["logprobs"]) == 12
        assert run.tokenizer.decode(record["tokens"]) == record["text"]
    printed = command("--prompt=y lo", *options).split("-" * 80 + "\n")
    assert printed == [f"{record['prompt']}{record['text']}\n" for record in records[2:4]]
    assert "out.jsonl exists" in command("--prompt=x", f"--out={tmp_path}/out.jsonl", code=2)


def test_interrupted_file_ends_like_that_of_an_undisturbed_run(command, tmp_path, monkeypatch):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("el", "y lo", "al")))
    options = [f"--prompts={tmp_path}/prompts.jsonl", "--max_tokens=12", "--batch_size=1"]
    command(*options, f"--out={tmp_path}/whole.jsonl")

    def interrupted(*args, **kwargs):
        for count, done in enumerate(complete(*args, **kwargs)):
            if count == 2:
                raise KeyboardInterrupt
            yield done

    monkeypatch.setattr(sample, "complete", interrupted)
    command(*options, f"--out={tmp_path}/out.jsonl", code=130)
    monkeypatch.undo()
    command(*options, f"--out={tmp_path}/out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_stop_string_is_not_printed(command, workdir):
    options = ["--prompt=el perro", "--max_tokens=12"]
    free = command(*options)
    for stop in (free[14:17], free[12:13]):
        text = command(*options, f"--stop={stop}", "--stop=perro perro perro")
        assert text == free[: free.index(stop, 8)] + "\n"
    run = attnlab.load(workdir)
    draw = Draw(temperature=0.8, vocab_size=run.tokenizer.vocab_size)
    (done,) = complete(run, ["el perro"], 12, draw=draw, stop=[free[14:17]])
    assert done.stopped_by == "stop" and "el perro" + done.text == free[: free.index(free[14:17], 8)]
    assert len(done.tokens) == len(done.text) + 3


def test_score_prints_nats_and_bits(command, tmp_path, workdir):
    (tmp_path / "text.txt").write_text(TEXT[:100])
    (score,) = attnlab.score(attnlab.load(workdir), [TEXT[:100]])
    nats, _, _, _, bits, *_ = command(f"--score={tmp_path}/text.txt").split()
    assert abs(float(nats) - score.nats_per_token) < 1e-4 and abs(float(bits) - score.bits_per_byte) < 1e-4
    size = len(TEXT[:100].encode())
    np.testing.assert_allclose(score.bits_per_byte, score.nats_per_token * 100 / size / math.log(2))


@pytest.mark.parametrize(
    "options, message",
    [
        (["--min_p=2"], "--min_p=2.0"),
        (["--repetition_penalty=0"], "--repetition_penalty=0.0"),
        (["--temperature=-1"], "--temperature=-1.0"),
        (["--top_p=0"], "--top_p=0.0"),
        (["--max_tokens=2147483648"], "--max_tokens=2147483648: expected 1 or more, below 2^31"),
        (["--num_samples=x"], "--num_samples=x"),
        (["--step=99"], "no checkpoint '99'"),
        (["--workdir=/no/such/run"], "holds no run"),
        (["--workdir="], "--workdir= is empty"),
        (["--batch_size=0"], "--batch_size=0"),
        (["--prompt=a", "--prompts=b"], "--prompt cannot be combined with --prompts"),
        (["--score=b", "--prompt=a"], "--score cannot be combined with --prompt"),
        (["--score=/dev/zero"], "--score=/dev/zero cannot be read: not a regular file"),
        (["--prompts={prompts}"], "'日': "),
    ],
)
def test_mistake_prints_one_line(command, tmp_path, options, message):
    (tmp_path / "prompts.txt").write_text("el\n日\n")
    line = command(*(option.format(prompts=tmp_path / "prompts.txt") for option in options), code=2)
    assert message in line and line.startswith("error: ") and line.count("\n") == 1
