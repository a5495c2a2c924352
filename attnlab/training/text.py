"""The text or task of a run: tokenizer, training batches and validation batches."""

import functools
import hashlib
import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import jax

from attnlab.config import Data, RunConfig
from attnlab.data import cache, corpora, store, tokenizers
from attnlab.data.batches import EvalBatches, TrainBatches
from attnlab.data.tasks import named
from attnlab.data.tasks.task_batches import HeldOutBatches, TaskBatches
from attnlab.support import status
from attnlab.support.errors import UserError
from attnlab.support.extras import require
from attnlab.training.workdir import Workdir, read_tokenizer


class Text(NamedTuple):
    """A corpus or a task as batches of tokens.

    Attributes:
      corpus: name, sha256 and number of characters (0 for a task), for `config.json`.
      train, validation: this process' share of the batches.
      summary: a description for the terminal: the size, or the chance level of a task.
      bits: factors from nats per token to bits per character and per byte of UTF-8, on the validation text; for a
        mixture, each part counts by its number of scored windows; {} for a task.
    """

    corpus: dict
    tokenizer: tokenizers.Tokenizer
    train: TrainBatches | TaskBatches
    validation: EvalBatches | HeldOutBatches
    summary: str
    bits: dict[str, float]

    def bits_of(self, loss: float | None) -> dict[str, float | None]:
        """A loss in bits per character and per byte; {} for a task."""
        return {name: None if loss is None else loss * factor for name, factor in self.bits.items()}

    def of_seed(self, seed: int) -> "Text":
        """The text with training batches for another seed."""
        return self._replace(train=self.train.of_seed(seed))


def load(
    config: RunConfig,
    workdir: Workdir,
    tokenizer: tokenizers.Tokenizer | None = None,
    share: tuple[int, int] = (0, 1),
    say: Callable[[str], None] = status.silent,
) -> Text:
    """Load the text of a run as batches, with the tokenizer of the workdir's previous run if there is one.

    `share` is `Parallel.batch_share`; `say` is called with a line for each stage as it begins.
    """
    if task := named.parse(config.data.name):
        return _of_task(task, config, share)
    data, previous_run, quiet = config.data, workdir.previous_run, jax.process_index() > 0
    say(f"reading {data.path or data.mixture or data.name}")
    corpus = _corpus(data, quiet)
    if previous_run and previous_run["corpus"]["sha256"] != corpus.sha256:
        raise UserError(
            f"{workdir} was trained on a different text (sha256 {previous_run['corpus']['sha256'][:12]}…, now "
            f"{corpus.sha256[:12]}…): restore the original text, or choose a new --workdir"
        )
    if previous_run:
        tokenizer = read_tokenizer(workdir.path, previous_run)
    elif tokenizer is None:
        tokenizer = _tokenizer(corpus, data, say)
    say("preparing its tokens")
    load_store = functools.partial(store.load, packing=data.packing, folder=data.store, quiet=quiet)
    stores = [load_store(part, tokenizer) for part in corpus.parts]
    train, validation = [one.train for one in stores], [one.validation for one in stores]
    options = {"context": config.model.context, "weights": list(corpus.weights)}
    options |= {"process_index": share[0], "process_count": share[1]}
    sizes = {"batch_size": config.batch_size, "seed": config.seed}
    train_batches = TrainBatches(train, documents=_starts(train, data), **sizes, **options)
    sizes = {"batch_size": config.batch_size // config.optimizer.accumulation}
    sizes |= {"windows": config.eval.windows, "part": config.eval.part}
    eval_batches = EvalBatches(validation, documents=_starts(validation, data), **sizes, **options)
    lengths = sum(map(len, train)), sum(map(len, validation))
    return Text(
        {"name": corpus.name, "sha256": corpus.sha256, "characters": corpus.characters},
        tokenizer,
        train_batches,
        eval_batches,
        f"{lengths[0]:,} training tokens, {lengths[1]:,} validation tokens",
        {
            f"bits_per_{unit}": _bits_per_nat(validation, eval_batches.windows_of_texts, f"{unit}s")
            for unit in ("character", "byte")
        },
    )


def sha256(data: Data) -> str:
    """The digest of a text or task, as `config.json` has it."""
    task = named.parse(data.name)
    return _sha256_of(task) if task else _corpus(data, quiet=True).sha256


def _corpus(data: Data, quiet: bool):
    fields = {name: getattr(data, name) for name in ("name", "path", "feature", "validation_fraction", "mixture")}
    return corpora.load(**fields, quiet=quiet)


def _sha256_of(task: named.Task) -> str:
    return hashlib.sha256(repr(task).encode()).hexdigest()


def _of_task(task: named.Task, config: RunConfig, share: tuple[int, int]) -> Text:
    options = {"context": config.model.context, "process_index": share[0], "process_count": share[1]}
    train = TaskBatches(task, batch_size=config.batch_size, seed=config.seed, **options)
    size = config.batch_size // config.optimizer.accumulation
    held_out = HeldOutBatches(task, batch_size=size, windows=config.eval.windows, part=config.eval.part, **options)
    corpus = {"name": config.data.name, "sha256": _sha256_of(task), "characters": 0}
    tokenizer = tokenizers.CharTokenizer(task.alphabet)
    return Text(corpus, tokenizer, train, held_out, f"fresh sequences, chance {task.chance:.3g}", {})


def _tokenizer(corpus, data: Data, say: Callable[[str], None]) -> tokenizers.Tokenizer:
    """The tokenizer of a new run; a trained tokenizer is cached."""
    kind, characters = data.tokenizer, corpus.alphabet
    if kind in ("char", "byte"):
        return tokenizers.make(kind, "", data.vocab_size, characters)
    library = require("tokenizers", "data", f"data.tokenizer = {kind!r}")
    key = [corpus.sha256, kind, data.vocab_size, data.tokenizer_sample, library.__version__]
    if known := cache.recall("tokenizers", key):
        return tokenizers.from_dict(known)
    sample = corpus.sample(data.tokenizer_sample << 20)
    say(f"training a tokenizer of {data.vocab_size:,} tokens on {len(sample) / 1e6:,.1f} million characters")
    tokenizer = tokenizers.make(kind, sample, data.vocab_size, characters)
    cache.remember("tokenizers", key, tokenizer.to_dict())
    return tokenizer


def _starts(texts: list[store.Tokens], data: Data) -> list | None:
    return [text.documents for text in texts] if data.packing == "documents" else None


def _bits_per_nat(texts: list[store.Tokens], windows: list[int], unit: str) -> float:
    """Tokens per character or byte, divided by ln 2, over all texts weighted by their scored windows."""
    units = sum(count * Fraction(getattr(text, unit), len(text)) for text, count in zip(texts, windows))
    return float(sum(windows) / units) / math.log(2)
