"""Small models trained within a study, with the trainer's own optimizer and losses."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
import optax

from attnlab.config import default
from attnlab.data import corpora, tokenizers
from attnlab.data.batches import Batch, EvalBatches, TrainBatches
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
):
    """Parameters after `steps` updates of the trainer's optimizer: warm-up, cosine decay to 0, clipping.

    Args:
      loss: `loss(params, batch)`, a scalar.
      params: where to start.
      batches: `batches(step)`, the batch of a step.
      steps: updates.
      learning_rate: at its peak.
      weight_decay: of kernels and embeddings.
      watch: called `watch(step, params, gradient)` with those before each update.

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
    return params


class Text(NamedTuple):
    """A text as character tokens.

    Attributes:
      tokenizer: of its characters.
      train, validation: int32 `[length]`.
      language: "es" where Spanish words prevail, else "en".
    """

    tokenizer: tokenizers.Tokenizer
    train: np.ndarray
    validation: np.ndarray
    language: str

    def batches(self, context: int, batch_size: int, seed: int) -> Callable[[int], Batch]:
        """`batches(step)` of training windows."""
        return TrainBatches(self.train, context=context, batch_size=batch_size, seed=seed).__getitem__

    def held_out(self, context: int, batch_size: int, windows: int) -> Iterator[Batch]:
        """Windows of the validation text."""
        return iter(EvalBatches(self.validation, context=context, batch_size=batch_size, windows=windows))


def read(path: str) -> Text:
    """The text at `path`, or the Python language reference where it is empty.

    Raises:
      UserError: a file that cannot be read.
    """
    corpus = corpora.load("text", path=path) if path else corpora.load("python_docs")
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
