"""Log-probabilities of texts."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from attnlab.nn import GPT

__all__ = ["Score", "score"]


class Score(NamedTuple):
    """The score of a text under a model.

    Attributes:
      nats: −log p, summed over the predicted tokens, which are all but the first.
      tokens: number of predicted tokens.
      nats_per_token: the cross-entropy, nats / tokens; NaN without predicted tokens.
      bits_per_byte: comparable between tokenizers: nats_per_token · (tokens of the text) / (its UTF-8 bytes) / ln 2,
        as in the training metrics.
      logprobs: float32 `[tokens]`, log p of each predicted token.
    """

    nats: float
    tokens: int
    nats_per_token: float
    bits_per_byte: float
    logprobs: np.ndarray


def score(run, texts: Sequence[str], *, batch_size: int = 8) -> list[Score]:
    """Score texts by the probability of each token after the tokens before it.

    The first token is not predicted, as in the loss of `transformers`. In a text longer than the model's context C, the
    tokens after the first C + 1 are predicted from more than C/2 and at most C tokens before them: a window of C tokens
    begins every ⌊C/2⌋ tokens, and scores the tokens that no earlier window has scored.

    Args:
      run: a model, its parameters and its tokenizer, from `attnlab.load`.
      texts: any number of texts of any lengths.
      batch_size: windows computed in parallel.

    Returns:
      A `Score` for each text.

    Raises:
      UserError: text that the tokenizer cannot encode.
      ValueError: a single string, or a run without tokenizer.

    >>> from attnlab.data.tokenizers import ByteTokenizer
    >>> from attnlab.loading import Run
    >>> model = nn.GPT.of(vocab_size=256, num_layers=1, num_heads=2, width=8, context=6)
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    >>> one, = score(Run(model, params, ByteTokenizer(), None), ["twelve bytes"])  # or load("runs/quickstart")
    >>> one.tokens, one.logprobs.shape, bool(7 < one.bits_per_byte < 9)
    (11, (11,), True)
    """
    if isinstance(texts, str):
        raise ValueError("texts is a string: pass a list of texts")
    if run.tokenizer is None:
        raise ValueError("the run has no tokenizer: score token ids with attnlab.generation.scoring.logprobs")
    ids = [run.tokenizer.encode(text) for text in texts]
    rows = logprobs(run.model, run.params, ids, batch_size=batch_size)
    return [_score(text, len(tokens), row) for text, tokens, row in zip(texts, ids, rows)]


def _score(text: str, length: int, logprobs: np.ndarray) -> Score:
    nats, tokens = -float(logprobs.sum(dtype=np.float64)), len(logprobs)
    mean = nats / tokens if tokens else math.nan
    bits_per_byte = mean * length / len(text.encode()) / math.log(2) if tokens else math.nan
    return Score(nats, tokens, mean, bits_per_byte, logprobs)


def logprobs(model: GPT, params, texts: Sequence[np.ndarray], *, batch_size: int = 8) -> list[np.ndarray]:
    """Log-probabilities, float32 `[length − 1]`, of the tokens of each text, int `[length]`; see `score`."""
    log_p = [np.zeros(max(0, len(text) - 1), np.float32) for text in texts]
    windows = [(at, start) for at, row in enumerate(log_p) for start in _starts(len(row), model.config.context)]
    # Batch windows of similar lengths, because shorter windows are padded.
    windows.sort(key=lambda window: -min(model.config.context, len(log_p[window[0]]) - window[1]))
    for first in range(0, len(windows), batch_size):
        batch = windows[first : first + batch_size]
        length = min(model.config.context, max(len(log_p[at]) - start for at, start in batch))
        tokens = np.zeros((batch_size, min(model.config.context, 1 << (length - 1).bit_length()) + 1), np.int32)
        for row, (at, start) in zip(tokens, batch):
            window = texts[at][start : start + len(row)]
            row[: len(window)] = window
        losses = np.asarray(_losses(model, params, tokens[:, :-1], tokens[:, 1:]))
        for row, (at, start) in zip(losses, batch):
            done = model.config.context - _stride(model.config.context) if start else 0  # scored by earlier windows
            target = log_p[at][start + done : start + len(row)]
            target[:] = -row[done : done + len(target)]
    return log_p


def _starts(count: int, context: int) -> range:
    """Starts of windows over `count` predictions; the first scores `context` of them, each later window a stride."""
    stride = _stride(context)
    return range(0, max(1, count - context + stride), stride) if count else range(0)


def _stride(context: int) -> int:
    return max(1, context // 2)


@functools.partial(jax.jit, static_argnames="model")
def _losses(model, params, tokens, targets):
    return model.apply(params, tokens, targets=targets)
