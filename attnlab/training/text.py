"""The text of a run: its corpus, tokenizer, and training and validation batches."""

import math
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from attnlab.data import corpora, tokenizers
from attnlab.data.batches import EvalBatches, TrainBatches
from attnlab.errors import UserError
from attnlab.training.workdir import Workdir, read_tokenizer


class Text(NamedTuple):
    """A corpus as batches of tokens.

    Attributes:
      corpus: the text and its sha256.
      tokenizer: the run's tokenizer.
      train: this process' share of the training batches.
      validation: this process' share of the validation batches.
      train_tokens, validation_tokens: number of tokens in each split.
      bits_per_nat: factor from nats per token to bits per character, on the validation text.
    """

    corpus: corpora.Corpus
    tokenizer: tokenizers.Tokenizer
    train: TrainBatches
    validation: EvalBatches
    train_tokens: int
    validation_tokens: int
    bits_per_nat: float

    @property
    def facts(self) -> dict:
        """Metadata for `config.json`."""
        corpus = self.corpus
        return {
            "corpus": {"name": corpus.name, "sha256": corpus.sha256, "characters": len(corpus.text)},
            "vocab_size": self.tokenizer.vocab_size,
        }


def load(config: ConfigDict, workdir: Workdir, tokenizer: tokenizers.Tokenizer | None = None) -> Text:
    """Load the text of a run and split it into batches.

    Args:
      config: the run's config.
      workdir: the run's folder; an existing run keeps its tokenizer.
      tokenizer: for a new run, the tokenizer of the model that it starts from; None to train one on the text.

    Raises:
      UserError: an unusable text or tokenizer, or a text other than the one that the run started with.
    """
    data, context, previous_run = config.data, config.model.context, workdir.previous_run
    corpus = corpora.load(data.name, path=data.path, feature=data.feature, validation_fraction=data.validation_fraction)
    if previous_run and previous_run["corpus"]["sha256"] != corpus.sha256:
        raise UserError(
            f"{workdir} was trained on a different text (sha256 {previous_run['corpus']['sha256'][:12]}…, now "
            f"{corpus.sha256[:12]}…): restore the original text, or choose a new --workdir"
        )
    if previous_run:
        tokenizer = read_tokenizer(workdir.path, previous_run)
    elif tokenizer is None:
        tokenizer = tokenizers.make(data.tokenizer, corpus.text, data.vocab_size)
    train, validation = tokenizer.encode(corpus.train), tokenizer.encode(corpus.validation)
    share = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    eval_batch_size = config.batch_size // config.optimizer.accumulation
    return Text(
        corpus,
        tokenizer,
        TrainBatches(train, context=context, batch_size=config.batch_size, seed=config.seed, **share),
        EvalBatches(validation, context=context, batch_size=eval_batch_size, windows=config.eval.windows, **share),
        len(train),
        len(validation),
        len(validation) / len(corpus.validation) / math.log(2),
    )
