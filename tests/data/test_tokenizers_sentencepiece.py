"""SentencePiece tokenizers, as published with Llama 2, Mistral, Gemma and Phi-3, and as transformers reads them."""

import functools
import itertools
import json
import unicodedata

import numpy as np
import pytest
import tokenizers as library
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from attnlab.data import characters, corpora, published, store, tokenizers
from attnlab.support.errors import UserError
from tests.data.sentencepiece_families import ADDED, BYTES, DECODER, FAMILIES, SPACES, VERSE, of_family, sentencepiece

ALL = pytest.mark.parametrize("family", FAMILIES)


def read(original, folder, **changes):
    """The tokenizer read from a folder with a tokenizer.json in which some parts are changed."""
    changes = {name: x if isinstance(x, dict) else json.loads(x.__getstate__()) for name, x in changes.items()}
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(original.to_str()) | changes))
    return published.pretrained(folder)


TEXTS = st.text(st.one_of(st.sampled_from(" \n\t<s>/anu¿é,."), st.characters(codec="utf-8")))


def kept(text, family):
    """Whether decoding restores a text: literal "▁" becomes a space, and special tokens take or leave spaces."""
    return "▁" not in text and not any(token in text for token in ADDED) and (FAMILIES[family][3] or text[:1] != " ")


@ALL
@given(text=TEXTS)
def test_tokens_and_text_match_the_library(family, text):
    tokenizer, library = sentencepiece(family), of_family(family)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.tolist() == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == library.decode(ids.tolist(), skip_special_tokens=False)
    if kept(text, family):
        assert tokenizer.decode(ids) == text == "".join(tokenizer.stream(iter(ids)))
        assert not len(ids) or (ids.min() > 2 and ids.max() < tokenizer.vocab_size)


def test_leading_space_is_lost_if_none_is_prepended():
    assert sentencepiece("mistral").decode(sentencepiece("mistral").encode("  una")) == " una"
    assert sentencepiece("llama2").decode(sentencepiece("llama2").encode("  una")) == "  una"


@ALL
@given(text=st.text(sorted(set(VERSE)), min_size=1), cut=st.integers(0, 100))
def test_decoded_continuation_keeps_its_spaces(family, text, cut):
    assume(kept(text, family))
    tokenizer = sentencepiece(family)
    ids = tokenizer.encode(text)
    cut = min(cut, len(ids))
    prompt, rest = tokenizer.decode(ids[:cut]), tokenizer.decode(ids[cut:], continues=cut > 0)
    assume(prompt or not cut)  # the space before the text was a token by itself
    assert prompt + rest == text


def test_streamed_byte_tokens_form_complete_characters():
    tokenizer = sentencepiece("llama2")
    ids = tokenizer.encode("a👩o")
    assert list(tokenizer.stream(iter(ids))) == ["a", "👩", "o"]
    assert list(tokenizer.stream(iter(ids[:-2]))) == ["a", "\ufffd"]
    with pytest.raises(UserError, match="lone surrogate"):
        tokenizer.encode("a\udcff")


def test_tokens_across_words_are_not_cut():
    vocabulary = {token: i for i, token in enumerate([*BYTES, "▁", "a", "b", "a▁"])}
    original = library.Tokenizer(models.BPE(vocabulary, [("a", "▁")], byte_fallback=True))
    original.normalizer, original.decoder = SPACES, decoders.Sequence(DECODER)
    tokenizer = tokenizers.from_dict({"kind": "sentencepiece", "tokenizer": json.loads(original.to_str())})
    assert list(characters.parts(["a b a b"], size=0, word_end=tokenizer._word_end)) == ["a b", " a b"]


def test_stream_of_a_store_equals_tokens_of_the_whole_text(tmp_path):
    text = VERSE.replace(".", ".</s> ") * 1500
    (tmp_path / "text.txt").write_text(text)
    stored = store.load(corpora.load("text", path=f"{tmp_path}/text.txt"), sentencepiece("llama2"), folder=tmp_path)
    cut = int(0.9 * len(text))
    for tokens, part in ((stored.train, text[:cut]), (stored.validation, text[cut:])):
        expected = of_family("llama2").encode(part, add_special_tokens=False).ids
        assert tokens.read(np.array([0]), len(tokens))[0].tolist() == expected


@ALL
def test_saved_tokenizer_loads_unchanged_and_reads_special_tokens(tmp_path, family):
    tokenizer = read(of_family(family), tmp_path)
    tokenizers.save(tokenizer, tmp_path / "saved.json")
    again = tokenizers.load(tmp_path / "saved.json")
    assert again.to_dict() == tokenizer.to_dict() and tokenizers.sha256(again) == tokenizers.sha256(tokenizer)
    assert again.decode(again.encode(VERSE)) == VERSE and isinstance(again, tokenizers.Tokenizer)
    ids = again.encode("<s>una</s>").tolist()
    assert (ids[0], ids[-1]) == (1, 2) and not {1, 2} & set(again.encode("una").tolist())  # no special token is added


def test_added_tokens_beyond_the_model_are_left_out(tmp_path):
    original = library.Tokenizer.from_str(of_family("gemma").to_str())
    size = original.get_vocab_size()
    original.add_special_tokens(["<image>"])
    assert read(original, tmp_path).vocab_size == size + 1
    tokenizer = published.pretrained(tmp_path, size)
    assert tokenizer.vocab_size == size and tokenizer.decode(tokenizer.encode("<image>")) == "<image>"


@pytest.mark.parametrize(
    "change, why",
    [
        ({"normalizer": normalizers.Lowercase()}, 'it may change texts: .*"Lowercase"'),
        ({"pre_tokenizer": pre_tokenizers.Split(" ", "removed")}, "it may change texts"),
        ({"decoder": decoders.WordPiece()}, "it may change texts"),
        ({"model": {"type": "Nonsense"}}, "neither a byte-level BPE"),
        ({"model": {"type": "BPE", "vocab": {"▁": 0, "a": 2}, "merges": [], "byte_fallback": True}}, "it drops"),
    ],
)
def test_other_tokenizers_are_refused_in_one_line(tmp_path, change, why):
    with pytest.raises(UserError, match=why) as error:
        read(of_family("llama2"), tmp_path, **change)
    assert "tokenizer.json is neither a byte-level BPE like GPT-2's nor from SentencePiece" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("family", [*FAMILIES, "LlamaTokenizer"])
def test_transformers_reads_the_same_tokens_and_text(tmp_path, family):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if family == "LlamaTokenizer":  # as transformers now builds it, without a tokenizer.json
        model = json.loads(of_family("llama2").to_str())["model"]
        theirs = transformers.LlamaTokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])
        theirs.save_pretrained(tmp_path)
        tokenizer = published.pretrained(tmp_path)
    else:
        tokenizer = read(of_family(family), tmp_path)
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in (VERSE, "una", "Una\n\n  sombra ", "<s>una vida</s>", "un 🙂 日本\t"):
        ids = theirs.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text).tolist() == ids
        assert tokenizer.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@functools.cache
def byte_level():
    """A tokenizer like Llama 3's and Qwen's."""
    split = pre_tokenizers.Split(library.Regex(LLAMA3), "isolated")
    splits = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer = bpe_of_bytes(splits, ignore_merges=True)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|eot_id|>"])
    return tokenizer


def bpe_of_bytes(splits, **options):
    tokenizer = library.Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer, tokenizer.decoder = splits, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([VERSE + "Fin.\n\n" * 9], trainer)
    return tokenizer


@functools.cache
def of_kind(kind):
    """The kind, and a tokenizer of the library; tokens of "spaces behind" and "superwords" span words."""
    if kind in FAMILIES:
        return "sentencepiece", of_family(kind)
    if kind in tokenizers.TRAINED:
        saved = tokenizers.make(kind, VERSE + "<x>é. ", 330).to_dict()["tokenizer"]
        return kind, library.Tokenizer.from_str(json.dumps(saved))
    split, whole = pre_tokenizers.Split(" ", "merged_with_previous"), pre_tokenizers.ByteLevel(False, use_regex=False)
    splits = {"roberta": pre_tokenizers.ByteLevel(True), "spaces behind": pre_tokenizers.Sequence([split, whole])}
    return "bpe", byte_level() if kind == "llama3" else bpe_of_bytes(splits.get(kind, whole))


FLAGS = ("lstrip", "rstrip", "normalized", "single_word")
WORDS = ["<x>", "vida", "a", "é", "e\u0301", "\u212a", "K", " a", "a ", "a vida", "\n", "▁a", "n\n", ".", " "]
TOKENS = st.builds(
    lambda content, flags: library.AddedToken(content, **dict(zip(FLAGS, flags))),
    st.sampled_from(WORDS),
    st.tuples(*[st.booleans()] * 4),
)
ENDS = ["", " ", " ", "  ", "\n"]
HOSTILE = st.lists(st.sampled_from([word + end for word in [*WORDS, "una", "", ","] for end in ENDS]))


@pytest.mark.parametrize("kind", [*FAMILIES, *tokenizers.TRAINED, "llama3", "roberta", "spaces behind", "superwords"])
@given(added=st.lists(TOKENS, max_size=3), text=HOSTILE.map("".join), cuts=st.lists(st.integers(0, 60)))
def test_tokens_of_parts_match_the_whole_text(kind, added, text, cuts):
    # The library fails if one token strips the white space that another begins with.
    assume(not any(one.rstrip for one in added) or not any(one.content[0].isspace() for one in added))
    kind, original = of_kind(kind)
    original = library.Tokenizer.from_str(original.to_str())
    original.add_tokens(added)
    tokenizer = tokenizers.from_dict({"kind": kind, "tokenizer": json.loads(original.to_str())})
    if kind == "wordpiece":
        text = "".join(c for c in text if c in VERSE + "<x>é. ")
    pieces = [text[start:stop] for start, stop in itertools.pairwise([0, *sorted(cuts), len(text) + 60])]
    parts = list(characters.parts(pieces, size=0, word_end=tokenizer._word_end))
    assert "".join(parts) == text
    ids = [tokenizer.encode(part, continues=at > 0).tolist() for at, part in enumerate(parts)]
    assert list(itertools.chain(*ids)) == tokenizer._tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("pattern", ["Fin.\n\nUna vida, ", "Fin.\nFin.\n", "12345\n 6 '' 's ", "vivi\u0301a "])
def test_words_and_composed_characters_are_not_cut(tmp_path, pattern):
    """Llama 3 and Qwen take a full stop and the newlines after it as one word, and compose characters (NFC)."""
    tokenizer = read(byte_level(), tmp_path)
    text = pattern * (120_000 // len(pattern))
    assert tokenizer.kind == "bpe"
    assert tokenizer.encode(text).tolist() == byte_level().encode(text, add_special_tokens=False).ids


@given(text=TEXTS)
def test_llama3_tokens_decode_to_the_normalized_text(tmp_path_factory, text):
    tokenizer = read(byte_level(), tmp_path_factory.mktemp("llama3"))
    assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)
