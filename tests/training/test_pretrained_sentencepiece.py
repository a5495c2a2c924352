"""A Llama with a tokenizer of SentencePiece loads, samples, scores, and starts runs that keep its tokenizer."""

import json

import numpy as np
import pytest

import attnlab
from attnlab import sample
from attnlab.data import published
from attnlab.generation.texts import complete
from attnlab.interop.huggingface import save_hf
from attnlab.nn import GPT
from tests.data.sentencepiece_families import VERSE, sentencepiece
from tests.parameters import parameters
from tests.training.test_pretrained import finetune

PROMPT = "¿Qué es"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder like those of the hub: random weights, and a tokenizer of SentencePiece."""
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
