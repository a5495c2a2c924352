"""A text, and SentencePiece tokenizers for it like those published with Llama 2, Mistral and Gemma."""

import functools
import json

import tokenizers as library
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from attnlab.data import tokenizers

VERSE = "¿Qué es la vida? Un frenesí.\n¿Qué es la vida? Una ilusión,\nuna sombra, una ficción,\n" * 3
ADDED = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACES = normalizers.Replace(" ", "▁")
DECODER = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
STRIP = decoders.Strip(" ", 1, 0)


def bpe():
    """A BPE tokenizer; its vocabulary is "<unk>", "<s>", "</s>", the bytes, and then pieces of words."""
    trained, words = library.Tokenizer(models.BPE()), VERSE.replace("\n", " \n ").split(" ")
    trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False)
    trained.train_from_iterator(["▁" + word for word in words], trainer)
    model = json.loads(trained.to_str())["model"]
    vocabulary = [*ADDED, *BYTES, *sorted(model["vocab"], key=model["vocab"].get)]
    ids = {token: i for i, token in enumerate(vocabulary)}
    merges = [tuple(pair) for pair in model["merges"]]
    return models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


# (normalizer, pre-tokenizer, decoder) of tokenizer.json, and whether decoding keeps all leading spaces of a text.
FAMILIES = {
    "llama2": (normalizers.Sequence([normalizers.Prepend("▁"), SPACES]), None, [*DECODER, STRIP], True),
    "mistral": (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False), [*DECODER, STRIP], False),
    "gemma": (SPACES, pre_tokenizers.Split(" ", "merged_with_previous"), DECODER, True),
}


@functools.cache
def of_family(family):
    """The tokenizer as an object of the library."""
    normalizer, splits, decoder, _ = FAMILIES[family]
    tokenizer = library.Tokenizer(bpe())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splits
    tokenizer.decoder = decoders.Sequence(decoder)
    tokenizer.add_special_tokens([library.AddedToken(token, normalized=False) for token in ADDED])
    return tokenizer


@functools.cache
def sentencepiece(family):
    return tokenizers.from_dict({"kind": "sentencepiece", "tokenizer": json.loads(of_family(family).to_str())})
