"""A Llama of transformers, trained here and saved again, writes the same text in both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab
from attnlab import sample
from attnlab.data import tokenizers
from attnlab.interop.huggingface import from_hf, make_model, save_hf
from tests.interop.huggingface_peers import greedy, kept
from tests.texts import TEXT
from tests.training import test_pretrained


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder like those of the hub: a Llama 3 with random weights in bfloat16, and a tokenizer."""
    tokenizer = tokenizers.make("bpe", TEXT, vocab_size=300)
    model = make_model(kept("llama")[1]).replace(vocab_size=tokenizer.vocab_size + 3, context=64, tie_embeddings=False)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return save_hf(tmp_path_factory.mktemp("hub") / "llama", model, params, tokenizer, dtype=jnp.bfloat16)


def finetune(source, text, workdir, **changes):
    fields = {"precision": "float32", "optimizer__learning_rate": 1e-2, "model__dropout": 0.0}
    return test_pretrained.finetune(source, text, workdir, **fields | changes)


@pytest.mark.slow
def test_finetuned_llama_writes_the_same_text_in_transformers(llama, text, tmp_path, capsys):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    assert finetune(llama, text, tmp_path / "run", steps=20) == 0, capsys.readouterr().err
    model, params, tokenizer, config = attnlab.load(tmp_path / "run")
    assert model == from_hf(llama)[0].over_tokens(tokenizer.vocab_size).replace(context=32)
    assert (config.model.layers[0].rotary.scaling, config.model.tie_embeddings) == ("llama3", False)
    before = from_hf(llama)[1]["params"]["output"]["embedding"]
    assert np.abs(params["params"]["output"]["embedding"] - before).max() > 1e-3
    folder = save_hf(tmp_path / "tuned", model, params, tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt = tokenizer.encode("En un lugar")
    encoded = transformers.AutoTokenizer.from_pretrained(folder).encode("En un lugar")
    assert type(theirs).__name__ == "LlamaForCausalLM" and encoded == prompt.tolist()
    drawn = sample.generate(model, params, prompt, 24, temperature=0.0)
    np.testing.assert_array_equal(np.concatenate(list(drawn)), greedy(torch, theirs, prompt[None], 24))
    command = [f"--workdir={folder}", "--prompt=En un lugar", "--max_tokens=20", "--temperature=0"]
    capsys.readouterr()
    assert sample.main(["sample", *command]) == 0
    assert capsys.readouterr().out.startswith("En un lugar de la")
