"""GPT-2 files of transformers, failed exports, tokenizers; invalid files raise one line."""

import copy
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers as huggingface

from attnlab.data import published, subwords, tokenizers
from attnlab.interop.huggingface import from_hf, save_hf
from attnlab.nn import MultiHeadAttention
from attnlab.support.errors import UserError
from tests.interop.huggingface_peers import assert_same, peer
from tests.interop.huggingface_peers import gpt2 as make_gpt2
from tests.parameters import parameters
from tests.texts import TEXT

safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")


def test_hf_other_weight_formats_load_equal(tmp_path):
    """GPT2Model's names, shards, masks of old files, and 16-bit types."""
    theirs = copy.deepcopy(peer("gpt2")[1])
    expected = from_hf(theirs)
    assert_same(from_hf(theirs.transformer), expected)
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="80KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert_same(from_hf(str(tmp_path / "shards")), expected)
    state = {name.removeprefix("transformer."): t.numpy() for name, t in theirs.state_dict().items()}
    state |= {f"h.{i}.attn.bias": np.ones((1, 1, 32, 32), np.float32) for i in range(2)}
    assert_same(from_hf(state, config=theirs.config.to_dict()), expected)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), expected[1])
    jax.tree.map(np.testing.assert_array_equal, from_hf(theirs.bfloat16())[1], rounded)


@pytest.fixture(scope="module")
def small():
    model = make_gpt2(vocab_size=11, num_layers=2, num_heads=2, width=8, context=6)
    return model, parameters(model, np.zeros((1, 1), np.int32))


def test_export_to_existing_folder_is_rejected(small, tmp_path):
    ours = save_hf(tmp_path / "ours", *small)
    assert_same(from_hf(ours / "model.safetensors"), from_hf(ours))
    with pytest.raises(UserError, match="ours already exists"):
        save_hf(ours, *small)


def test_export_without_biases_writes_zero_biases(small, tmp_path):
    model = small[0].replace(use_bias=False)
    params = parameters(model, np.zeros((1, 1), np.int32))
    other, its_params = from_hf(save_hf(tmp_path / "gpt2", model, params))
    tokens = np.array([[1, 2, 3]])
    calls = ((other, its_params), (model, params))
    np.testing.assert_array_equal(*jax.jit(lambda: [model.apply(params, tokens) for model, params in calls])())


def test_export_converts_parameters_to_float32(small, tmp_path):
    model, params = small
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    assert_same(from_hf(save_hf(tmp_path / "half", model, half)), (model, jax.tree.map(np.float32, half)))
    modes = {(tmp_path / "half" / name).stat().st_mode for name in ("model.safetensors", "config.json")}
    assert len(modes) == 1
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    with pytest.raises(UserError, match="parameter .* is float64"):
        save_hf(tmp_path / "wide", model, wide)


NAME = "transformer.h.1.attn.c_attn.weight"
# A change of the config, or of the tensors.
REFUSED = {
    "untied": ({"tie_word_embeddings": False}, "lacks .*lm_head.weight"),
    "vocabulary": ({"vocab_size": 2**40}, "vocab_size = 1099511627776"),
    "rate": ({"attn_pdrop": 2}, "attn_pdrop = 2"),
    "more layers": ({"n_layer": 9000}, r"lacks the tensor transformer\.h\.\d+.* \(and [\d,]+ more\)"),  # not traced
    "fewer layers": ({"n_layer": 1}, r"holds .*transformer.h.1.\S+ \(and 11 more\)"),
    "shape": ({"n_inner": 33}, r"transformer.h.0.mlp.c_fc.weight has shape \(8, 32\), .*\(8, 33\)"),
    "integers": (lambda state: {NAME: state[NAME].astype(np.int32)}, f"{NAME} is int32"),
    "other output": (lambda state: {"lm_head.weight": np.ones((11, 8), np.float32)}, "lm_head.weight differs"),
}


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_mismatched_file_raises_by_name(change, message, small, tmp_path):
    folder = save_hf(tmp_path / "gpt2", *small)
    if callable(change):
        state = safetensors_numpy.load_file(folder / "model.safetensors")
        safetensors_numpy.save_file(state | change(state), folder / "model.safetensors")
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=message) as error:
        from_hf(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)


def test_damaged_file_raises_one_line_with_the_library_message(small, tmp_path):
    file = save_hf(tmp_path / "gpt2", *small) / "model.safetensors"
    whole = file.read_bytes()
    deep = (5000).to_bytes(8, "little") + b"[" * 5000
    for content in (b"", whole[:100], whole[:-1], whole + b"more", (40 << 30).to_bytes(8, "little"), deep):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"complete safetensors file \(.*eader.*\): download it again") as error:
            from_hf(file)
        assert "\n" not in str(error.value)


def test_invalid_source_raises_one_line(small, tmp_path, own_errors):
    folder = save_hf(tmp_path / "gpt2", *small)
    for source, message in (
        (tmp_path / "nowhere", f"^{tmp_path}/nowhere: no such file"),
        (3, "a int: .*path"),
        ({}, "state dict .*number of heads"),
    ):
        with pytest.raises(UserError, match=message):
            from_hf(source)
    for index in (
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "."}}',
        '{"weight_map": {"a": "../b.safetensors"}}',
        '{"weight_map": {"a": "\\u0000.safetensors"}}',
        '{"weight_map": ' * 900 + "0" + "}" * 900,
    ):
        (folder / "model.safetensors.index.json").write_text(index)
        with pytest.raises(UserError, match="model.safetensors.index.json .*index"):
            from_hf(folder)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    for create in (lambda path: None, os.mkfifo):  # a pipe is not waited for
        create(folder / "model.safetensors")
        with pytest.raises(UserError, match="model.safetensors is missing"):
            from_hf(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match="config.json, which contains the number of heads, is missing"):
        from_hf(folder)


def test_model_that_cannot_be_saved_raises_one_line(small, tmp_path, own_errors):
    (tmp_path / "file").touch()
    model, lacking = small[0], jax.tree.map(np.asarray, small[1])
    del lacking["params"]["block_0"]["attention"]["key"]["bias"]
    for folder, *arguments, message in (
        ("file/under", *small, "under cannot be written"),
        ("other", MultiHeadAttention(2), small[1], "a MultiHeadAttention"),
        ("other", model, lacking, "the parameters lack block_0/attention/key/bias"),
        ("other", model, small[1]["params"], "expected variables"),
    ):
        with pytest.raises(UserError, match=message):
            save_hf(tmp_path / folder, *arguments)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A folder like those of the hub, with random weights and a GPT-2 tokenizer trained on a text."""
    folder = tmp_path_factory.mktemp("hub") / "gpt2"
    tokenizer = tokenizers.make("bpe", TEXT, vocab_size=300)
    model = make_gpt2(vocab_size=tokenizer.vocab_size + 3, num_layers=2, num_heads=2, width=16, context=48)
    params = parameters(model, np.zeros((1, 1), np.int32))
    return save_hf(folder, model, params, tokenizer)


@pytest.mark.parametrize("kind", tokenizers.KINDS)
def test_exported_tokenizer_has_the_same_tokens_in_transformers(kind, small, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    texts = ("El hidalgo, 1605:\n\n  vivía", "##vivía# ##")
    tokenizer = tokenizers.make(kind, " ".join(texts) + TEXT, 300)
    folder = save_hf(tmp_path / "gpt2", *small, tokenizer)
    theirs, again = transformers.AutoTokenizer.from_pretrained(folder), published.pretrained(folder)
    for text in texts:
        ids = tokenizer.encode(text).tolist()
        assert ids == again.encode(text).tolist() == theirs.encode(text)
        assert tokenizer.decode(ids) == again.decode(ids) == theirs.decode(ids)


def test_exported_folder_gives_transformers_the_end_of_text(small, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    saved = tokenizers.make("bpe", TEXT, 300).to_dict()
    folder = save_hf(tmp_path / "gpt2", *small, tokenizers.from_dict(saved | {"end_of_text": [7, 11]}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == 7
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert model.generation_config.eos_token_id == [7, 11]


def test_end_of_text_comes_from_the_folder_or_a_usual_name(gpt2, tmp_path):
    shutil.copytree(gpt2, tmp_path, dirs_exist_ok=True)
    assert published.pretrained(tmp_path).end_of_text == ()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert published.pretrained(tmp_path).end_of_text == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9, 5000]}))
    assert published.pretrained(tmp_path).end_of_text == (8, 9)  # 5000 is no token of this vocabulary
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="generation_config.json cannot be read"):
        published.pretrained(tmp_path)
    saved = tokenizers.make("bpe", TEXT, 300).to_dict()
    library = huggingface.Tokenizer.from_str(json.dumps(saved["tokenizer"]))
    library.add_special_tokens(["<|endoftext|>"])
    assert subwords.TrainedTokenizer("bpe", library).end_of_text == (library.get_vocab_size() - 1,)


def test_vocab_and_merges_load_like_transformers(gpt2, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = json.loads((gpt2 / "tokenizer.json").read_text())["model"]
    vocabulary = model["vocab"] | {"<|endoftext|>": len(model["vocab"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]) + "\n"
    )
    theirs, ours = transformers.GPT2Tokenizer.from_pretrained(tmp_path), published.pretrained(tmp_path)
    for text in (TEXT, "fin<|endoftext|>En un lugar"):
        assert ours.encode(text).tolist() == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text


def test_tokenizer_settings_do_not_change_text(gpt2, tmp_path):
    """Dropout of merges, truncation, padding and special tokens do not apply to encoding a text."""
    saved = json.loads((gpt2 / "tokenizer.json").read_text())
    expected = published.pretrained(gpt2).encode(TEXT).tolist()
    saved["model"]["dropout"] = 0.5
    saved["decoder"] = None
    saved["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    tokenizer = published.pretrained(tmp_path)
    assert tokenizer.encode(TEXT).tolist() == expected
    tokenizers.save(tokenizer, tmp_path / "again.json")
    assert tokenizers.load(tmp_path / "again.json").encode(TEXT).tolist() == expected


def test_incomplete_vocabulary_names_characters(gpt2, tmp_path):
    assert published.pretrained(tmp_path) is None
    vocabulary = {"a": 0, "b": 1, "Ġ": 2, "ab": 3}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    with pytest.raises(UserError, match="merges.txt, .* is missing"):
        published.pretrained(tmp_path)
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    tokenizer = published.pretrained(tmp_path)
    assert tokenizer.encode("ab a").tolist() == [3, 2, 0]
    with pytest.raises(UserError, match="'xñ': .*vocabulary"):
        tokenizer.encode("ax abñ")


@pytest.mark.parametrize("kind", ["nonsense", "no splits", "hole", "foreign"])
def test_unsupported_tokenizer_raises_one_line(kind, gpt2, tmp_path):
    saved = json.loads((gpt2 / "tokenizer.json").read_text()) if kind != "nonsense" else {}
    if kind == "no splits":
        saved["pre_tokenizer"] = {"type": "Whitespace"}
    elif kind in ("hole", "foreign"):
        vocabulary = saved["model"]["vocab"]
        vocabulary["日"] = len(vocabulary) + (kind == "hole")
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    with pytest.raises(UserError, match="tokenizer.json .*byte-level BPE") as error:
        published.pretrained(tmp_path)
    assert "\n" not in str(error.value)
