"""Training of small models within a study, with the trainer's optimizer and losses."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
import optax

from attnlab.config import default
from attnlab.data import corpora, tokenizers
from attnlab.data.batches import Batch, EvalBatches, TrainBatches
from attnlab.study.progress import Advance, ignore
from attnlab.training import optimizer as optimizers
from attnlab.training import state as states


def fit(
    loss: Callable,
    params,
    batches: Callable,
    steps: int,
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    watch: Callable | None = None,
    advance: Advance = ignore,
):
    """Train with the trainer's optimizer (warm-up, cosine decay to 0, clipping) and return the parameters.

    Args:
      loss: `loss(params, batch)`, a scalar.
      params: initial parameters.
      batches: `batches(step)` returns the batch of a step.
      steps: number of updates.
      learning_rate: peak learning rate.
      weight_decay: of kernels and embeddings.
      watch: called as `watch(step, params, gradient)` with the values before each update.
      advance: called after each update, to report progress.

    >>> def loss(params, batch):
    ...     return (params["kernel"] - batch) ** 2
    >>> fitted = fit(loss, {"kernel": jnp.zeros(())}, lambda step: 3.0, 200, learning_rate=0.1)
    >>> round(float(fitted["kernel"]), 2)
    3.0
    """
    config = default().optimizer
    config.update(learning_rate=learning_rate, weight_decay=weight_decay, warmup_steps=max(1, steps // 10), b2=0.99)
    optimizer = optimizers.make(config, steps)

    @jax.jit
    def update(params, opt_state, batch):
        gradient = jax.grad(loss)(params, batch)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, gradient

    opt_state = optimizer.init(params)
    for step in range(steps):
        before = params
        params, opt_state, gradient = update(before, opt_state, batches(step))
        if watch is not None:
            watch(step, before, gradient)
        advance()
    return params


class Text(NamedTuple):
    """A text as character tokens.

    Attributes:
      tokenizer: a character tokenizer.
      train, validation: int32 `[length]`.
      language: "es" if the text looks Spanish, else "en".
    """

    tokenizer: tokenizers.Tokenizer
    train: np.ndarray
    validation: np.ndarray
    language: str

    def batches(self, context: int, batch_size: int, seed: int) -> Callable[[int], Batch]:
        """The function that returns the training batch of a step."""
        return TrainBatches(self.train, context=context, batch_size=batch_size, seed=seed).__getitem__

    def held_out(self, context: int, batch_size: int, windows: int) -> Iterator[Batch]:
        """Batches of windows of the validation text."""
        return iter(EvalBatches(self.validation, context=context, batch_size=batch_size, windows=windows))


def read(path: str) -> Text:
    """Read the text at `path`, or the Python language reference if `path` is empty.

    Raises:
      UserError: a file that cannot be read.
    """
    corpus = corpora.read_text("text", path=path) if path else corpora.read_text("python_docs")
    tokenizer = tokenizers.make("char", corpus.text)
    spanish = corpus.text.count(" que ") > corpus.text.count(" the ")
    return Text(
        tokenizer, tokenizer.encode(corpus.train), tokenizer.encode(corpus.validation), "es" if spanish else "en"
    )


def text_loss(model) -> Callable:
    """`loss(params, batch)` of a language model: nats per token."""
    return lambda params, batch: states.token_losses(model, params, batch).mean()


def score(model, params, batches: Iterator[Batch]) -> float:
    """Mean loss over held-out batches, in nats per token."""
    step = jax.jit(lambda params, batch: states.eval_step(model, params, batch))
    sums = sum(np.asarray(step(params, batch), np.float64) for batch in batches)
    return float(sums[0] / sums[1])
