"""The tokens that end a text, of tokenizers in the format of Hugging Face's libraries."""

import json
from pathlib import Path

import tokenizers as huggingface

from attnlab.support import files
from attnlab.support.errors import UserError

NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<|return|>")
# Only with SentencePiece: elsewhere they are words of many texts.
SENTENCEPIECE_NAMES = (*NAMES, "</s>", "<eos>", "<end_of_turn>")


def of_folder(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """The tokens below `vocab_size` in `eos_token_id` of a folder's `generation_config.json` or `config.json`."""
    for file in (folder / "generation_config.json", folder / "config.json"):
        try:
            content = files.read_json(file) if file.exists() else {}
        except (OSError, ValueError) as error:
            raise UserError(f"{file} cannot be read ({error}): restore it") from error
        ids = content.get("eos_token_id") if isinstance(content, dict) else None
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            return tuple(i for i in ids if isinstance(i, int) and 0 <= i < vocab_size)
    return ()


def as_saved(tokenizer, vocabulary: huggingface.Tokenizer, names: tuple[str, ...]) -> dict:
    """A tokenizer's `to_dict`, with the tokens that end a text where they are not simply the tokens of `names`."""
    saved = {"kind": tokenizer.kind, "tokenizer": json.loads(vocabulary.to_str())}
    if tokenizer.end_of_text != ids_of(vocabulary, names):
        saved["end_of_text"] = list(tokenizer.end_of_text)
    return saved


def ids_of(tokenizer: huggingface.Tokenizer, names: tuple[str, ...]) -> tuple[int, ...]:
    """The tokens of a vocabulary that have one of some names, in increasing order."""
    return tuple(sorted(i for name in names if (i := tokenizer.token_to_id(name)) is not None))
