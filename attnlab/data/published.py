"""Read and write tokenizers in the format of Hugging Face's libraries, which published models use."""

import json
from pathlib import Path

import tokenizers as huggingface
from tokenizers import Regex, decoders, models, pre_tokenizers

from attnlab.data import tokenizers
from attnlab.data.sentencepiece import SentencePieceTokenizer
from attnlab.data.subwords import BYTE_LEVEL, CONTINUES, GPT2_BYTES, WORDS, TrainedTokenizer, is_same, untrained
from attnlab.support import files
from attnlab.support.errors import UserError


def pretrained(folder: Path, vocab_size: int | None = None) -> tokenizers.Tokenizer | None:
    """Load a tokenizer in the format of Hugging Face's libraries.

    Args:
      folder: contains `tokenizer.json`, or GPT-2's `vocab.json` and `merges.txt`.
      vocab_size: the model's vocabulary size. Added tokens beyond it are removed, such as the image token in Gemma
        3's text models.

    Returns:
      A tokenizer with its added tokens, of kind "bpe" (byte-level, as for GPT-2, Llama 3 and Qwen), "sentencepiece" (as
      for Llama 2, Mistral, Gemma and Phi-3) or a kind that `as_published` wrote; None if there are no such files. If
      the tokenizer normalizes text, as Qwen's does to NFC, `decode` returns the normalized text.

    Raises:
      UserError: files that cannot be read, or a tokenizer of another kind.
    """
    combined, vocabulary, merges = (folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))
    file = combined if combined.exists() else vocabulary
    if not file.exists():
        return None
    if not combined.exists() and not merges.exists():
        raise UserError(f"{merges}, which belongs to {vocabulary}, is missing: put it there")
    try:
        if not combined.exists():
            for part in (vocabulary, merges):
                files.opened(part).close()  # fails for a pipe, on which the library would wait
            return _gpt2(vocabulary, merges)
        text = files.read_text(combined)
        tokenizer = huggingface.Tokenizer.from_str(text)
        if vocab_size is not None and tokenizer.get_vocab_size() > vocab_size:
            content = json.loads(text)
            content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < vocab_size]
            tokenizer = huggingface.Tokenizer.from_str(json.dumps(content))
        return _as_published(tokenizer, _ends_of(folder, tokenizer.get_vocab_size()))
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{error.filename or file} cannot be read: {error.strerror}") from error
    except Exception as error:  # Hugging Face's library raises no narrower type
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"{file} is neither a byte-level BPE like GPT-2's nor from SentencePiece like Llama 2's ({why}): put the "
            "model's own files there"
        ) from error


def _ends_of(folder: Path, vocab_size: int) -> tuple[int, ...]:
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


_CHARACTERS = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
# How the library joins tokens into text.
_DECODERS = {
    "char": decoders.Fuse(),
    "byte": decoders.ByteLevel(),
    "word": decoders.Fuse(),
    "bpe": decoders.ByteLevel(),
    "wordpiece": decoders.Sequence([decoders.Replace(CONTINUES, ""), decoders.Fuse()]),
}


def as_published(tokenizer: tokenizers.Tokenizer) -> dict:
    """Return the content of a Hugging Face `tokenizer.json` with the same tokens as `tokenizer`, of any kind."""
    if isinstance(tokenizer, tokenizers.CharTokenizer):
        vocabulary = {character: i for i, character in enumerate(tokenizer.characters)}
        library = untrained(models.WordLevel(vocabulary, unk_token=""), _CHARACTERS)
    elif isinstance(tokenizer, tokenizers.ByteTokenizer):
        vocabulary = dict(GPT2_BYTES)
        library = untrained(models.BPE(vocabulary, []), _BYTES)
    else:
        library = huggingface.Tokenizer.from_str(json.dumps(tokenizer.to_dict()["tokenizer"]))
    library.decoder = library.decoder or _DECODERS[tokenizer.kind]
    return json.loads(library.to_str())


def _gpt2(vocabulary: Path, merges: Path) -> TrainedTokenizer:
    tokenizer = untrained(models.BPE.from_file(str(vocabulary), str(merges)), BYTE_LEVEL)
    tokenizer.decoder = decoders.ByteLevel()
    if tokenizer.token_to_id("<|endoftext|>") is not None:
        tokenizer.add_special_tokens(["<|endoftext|>"])
    return TrainedTokenizer("bpe", tokenizer, _ends_of(vocabulary.parent, tokenizer.get_vocab_size()))


def _as_published(tokenizer: huggingface.Tokenizer, end_of_text: tuple[int, ...]) -> tokenizers.Tokenizer:
    """Return the tokenizer of a `tokenizer.json`; raise ValueError for an unsupported kind."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if hasattr(tokenizer.model, "dropout"):
        tokenizer.model.dropout = None  # deterministic tokens
    content = json.loads(tokenizer.to_str())
    if content["model"]["type"] == "WordLevel" and is_same(content["pre_tokenizer"], _CHARACTERS):
        return tokenizers.CharTokenizer("".join(sorted(vocabulary := content["model"]["vocab"], key=vocabulary.get)))
    for kind, model in (("word", "WordLevel"), ("wordpiece", "WordPiece")):
        if content["model"]["type"] == model and is_same(content["pre_tokenizer"], WORDS):
            return TrainedTokenizer(kind, tokenizer)
    kinds = [(content[part] or {}).get("type") for part in ("model", "decoder", "normalizer")]
    is_byte_level = '"ByteLevel"' in json.dumps([content["decoder"], content["pre_tokenizer"]])
    if kinds[0] == "BPE" and not is_byte_level:
        return SentencePieceTokenizer(tokenizer, end_of_text)
    if kinds[:2] not in (["BPE", "ByteLevel"], ["BPE", None]) or kinds[2] not in (None, "NFC"):
        raise ValueError(f"its model, decoder and normalizer are {kinds}, not BPE, ByteLevel and none or NFC")
    _check_splits(content["pre_tokenizer"])
    return TrainedTokenizer("bpe", tokenizer, end_of_text)


def _check_splits(pre_tokenizer: dict | None) -> None:
    """Raise ValueError if the pre-tokenizer drops or adds characters."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    keeps = all(
        step.get("behavior", "Isolated") in ("Isolated", "MergedWithPrevious", "MergedWithNext") for step in steps
    )
    kinds = [step.get("type") for step in steps]
    if kinds[-1:] != ["ByteLevel"] or not set(kinds) <= {"Split", "Digits", "ByteLevel"} or not keeps:
        raise ValueError(f"its pre-tokenizer is {kinds}, not ByteLevel")
    if len(steps) > 1 and any(step.get("add_prefix_space") for step in steps):
        raise ValueError("its pre-tokenizer puts a space before every word (add_prefix_space)")
