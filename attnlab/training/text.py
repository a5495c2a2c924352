"""The text of a run: its corpus, tokenizer, and training and validation batches."""

import math
from fractions import Fraction
from typing import NamedTuple

import jax
import tokenizers as huggingface
from ml_collections import ConfigDict

from attnlab.data import cache, corpora, store, tokenizers
from attnlab.data.batches import EvalBatches, TrainBatches
from attnlab.support.errors import UserError
from attnlab.training.workdir import Workdir, read_tokenizer


class Text(NamedTuple):
    """A corpus as batches of tokens.

    Attributes:
      corpus: where the text is, and its sha256.
      tokenizer: the run's tokenizer.
      train: this process' share of the training batches.
      validation: this process' share of the validation batches.
      train_tokens, validation_tokens: number of tokens in each split.
      bits_per_nat: factor from nats per token to bits per character, on the validation text; of a mixture, on its
        parts as often as their windows are scored.
      bits_per_byte: the same for bits per byte of UTF-8.
    """

    corpus: corpora.Corpus | corpora.Mixture
    tokenizer: tokenizers.Tokenizer
    train: TrainBatches
    validation: EvalBatches
    train_tokens: int
    validation_tokens: int
    bits_per_nat: float
    bits_per_byte: float

    @property
    def facts(self) -> dict:
        """Metadata for `config.json`."""
        corpus = self.corpus
        return {
            "corpus": {"name": corpus.name, "sha256": corpus.sha256, "characters": corpus.characters},
            "vocab_size": self.tokenizer.vocab_size,
        }


def load(
    config: ConfigDict,
    workdir: Workdir,
    tokenizer: tokenizers.Tokenizer | None = None,
    share: tuple[int, int] = (0, 1),
) -> Text:
    """Load the text of a run and split it into batches.

    Args:
      config: the run's config.
      workdir: the run's folder; an existing run keeps its tokenizer.
      tokenizer: for a new run, the tokenizer of the model that it starts from; None to train one on the text.
      share: which share of each global batch this process reads, and how many there are: `Parallel.batch_share`.

    Raises:
      UserError: an unusable text or tokenizer, or a text other than the one that the run started with.
    """
    data, previous_run, quiet = config.data, workdir.previous_run, jax.process_index() > 0
    corpus = corpora.load(
        data.name,
        path=data.path,
        feature=data.feature,
        validation_fraction=data.validation_fraction,
        mixture=data.mixture,
        quiet=quiet,
    )
    if previous_run and previous_run["corpus"]["sha256"] != corpus.sha256:
        raise UserError(
            f"{workdir} was trained on a different text (sha256 {previous_run['corpus']['sha256'][:12]}…, now "
            f"{corpus.sha256[:12]}…): restore the original text, or choose a new --workdir"
        )
    if previous_run:
        tokenizer = read_tokenizer(workdir.path, previous_run)
    elif tokenizer is None:
        tokenizer = _tokenizer(corpus, data)
    stores = [
        store.load(part, tokenizer, packing=data.packing, folder=data.store, quiet=quiet) for part in corpus.parts
    ]
    train, validation = [one.train for one in stores], [one.validation for one in stores]
    options = {"context": config.model.context, "weights": list(corpus.weights)}
    options |= dict(zip(("process_index", "process_count"), share))
    sizes = {"batch_size": config.batch_size, "seed": config.seed}
    train_batches = TrainBatches(train, documents=_starts(train, data), **sizes, **options)
    sizes = {"batch_size": config.batch_size // config.optimizer.accumulation, "windows": config.eval.windows}
    sizes |= {"part": config.eval.part}
    eval_batches = EvalBatches(validation, documents=_starts(validation, data), **sizes, **options)
    return Text(
        corpus,
        tokenizer,
        train_batches,
        eval_batches,
        sum(map(len, train)),
        sum(map(len, validation)),
        _bits_per_nat(validation, eval_batches.windows_of_texts, "characters"),
        _bits_per_nat(validation, eval_batches.windows_of_texts, "bytes"),
    )


def _tokenizer(corpus, data: ConfigDict) -> tokenizers.Tokenizer:
    """The tokenizer of a new run; one that has to be trained is remembered."""
    kind, characters = data.tokenizer, corpus.alphabet
    if kind in ("char", "byte"):
        return tokenizers.make(kind, "", data.vocab_size, characters)
    key = [corpus.sha256, kind, data.vocab_size, data.tokenizer_sample, huggingface.__version__]
    if known := cache.recall("tokenizers", key):
        return tokenizers.from_dict(known)
    made = tokenizers.make(kind, corpus.sample(data.tokenizer_sample << 20), data.vocab_size, characters)
    cache.remember("tokenizers", key, made.to_dict())
    return made


def _starts(texts: list[store.Tokens], data: ConfigDict) -> list | None:
    return [text.documents for text in texts] if data.packing == "documents" else None


def _bits_per_nat(texts: list[store.Tokens], windows: list[int], unit: str) -> float:
    """Tokens per unit of the scored windows, over ln 2."""
    units = sum(count * Fraction(getattr(text, unit), len(text)) for text, count in zip(texts, windows))
    return float(sum(windows) / units) / math.log(2)
