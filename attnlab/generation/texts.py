"""Text completion: decoding with a tokenizer."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from attnlab.data.tokenizers import Tokenizer
from attnlab.generation.decoding import Step, decode
from attnlab.generation.drawing import Draw
from attnlab.generation.stop_strings import StopStrings, cut
from attnlab.support.errors import UserError


class Completion(NamedTuple):
    """A prompt and the text that continues it.

    Attributes:
      prompt: the prompt.
      sample: number of this text among the samples of the prompt.
      text: the generated text, without a stop string or end of text.
      tokens: all drawn tokens, including a stop string and the end of text.
      logprobs: their log-probabilities under the model, see `decoding.Step`.
      stopped_by: "max_tokens", "stop" (a stop string) or "end_of_text".
    """

    prompt: str
    sample: int
    text: str
    tokens: list[int]
    logprobs: list[float]
    stopped_by: str


def complete(
    run,
    prompts: Sequence[str],
    max_tokens: int,
    *,
    draw: Draw = Draw(),  # noqa: B008
    stop: Sequence[str] = (),
    end: Sequence[int] = (),
    num_samples: int = 1,
    batch_size: int = 8,
    seed: int = 0,
) -> Iterator[Completion]:
    """Continue prompts; each text is independent of the others and of the batch size.

    Args:
      run: a model, its parameters and its tokenizer, from `attnlab.load`.
      prompts: any number of texts of any lengths; an empty text stands for a new line.
      draw, max_tokens, stop, end, num_samples, seed: see `decoding.generate`; tokens beyond the tokenizer's
        vocabulary are never drawn.
      batch_size: texts generated in parallel, but at least all samples of a prompt.

    Yields:
      A `Completion` for each sample of each prompt, in order.

    Raises:
      UserError: a prompt that the tokenizer cannot encode, or a stop string that no tokens can form.

    >>> from attnlab.data.tokenizers import ByteTokenizer
    >>> from attnlab.loading import Run
    >>> from attnlab.nn import GPT
    >>> model = GPT.of(vocab_size=256, num_layers=1, num_heads=2, width=8, context=6)
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    >>> run = Run(model, params, ByteTokenizer(), None)  # or attnlab.load("runs/quickstart")
    >>> [len(done.tokens) for done in complete(run, ["one", "another"], max_tokens=5)]
    [5, 5]
    """
    tokenizer = run.tokenizer
    stops = StopStrings(stop, tokenizer)
    draw = draw._replace(vocab_size=draw.vocab_size or tokenizer.vocab_size)
    ids = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    at_once = max(1, batch_size // num_samples)
    options = {"draw": draw, "seed": seed, "num_samples": num_samples, "end": end}
    for first in range(0, len(prompts), at_once):
        batch = ids[first : first + at_once]
        steps = decode(run.model, run.params, batch, max_tokens, stop=stops.after if stop else None, **options)
        drawn = [Drawn() for _ in range(len(batch) * num_samples)]
        for _ in recorded(steps, drawn):
            pass
        for row, text in enumerate(drawn):
            prompt, sample = divmod(row, num_samples)
            yield text.completion(tokenizer, prompts[first + prompt], sample, stop, end)


class Drawn:
    """The tokens drawn so far for a text, and their log-probabilities."""

    def __init__(self):
        self.tokens, self.logprobs = [], []

    def completion(self, tokenizer, prompt: str, sample: int, stop: Sequence[str], end: Sequence[int]) -> Completion:
        """The finished text; arguments as for `complete`."""
        ended = self.tokens[-1:] and self.tokens[-1] in end
        text, string = cut(tokenizer.decode(self.tokens[:-1] if ended else self.tokens, continues=True), stop)
        stopped_by = "stop" if string else "end_of_text" if ended else "max_tokens"
        return Completion(prompt, sample, text, self.tokens, self.logprobs, stopped_by)


def recorded(steps: Iterable[Step], drawn: Sequence[Drawn]) -> Iterator[Step]:
    """Yield the steps, and append their tokens to the texts `drawn`, one per row."""
    for step in steps:
        for row, token, logprob in zip(drawn, step.tokens.tolist(), step.logprobs.tolist()):
            if token >= 0:
                row.tokens.append(token)
                row.logprobs.append(logprob)
        yield step


def prompt_ids(tokenizer: Tokenizer, prompt: str | None) -> np.ndarray:
    """Token ids of a prompt, int `[length]`; without a prompt, a new line or, if that has no token, token 0.

    Raises:
      UserError: the tokenizer does not know a character.
    """
    if prompt:
        return tokenizer.encode(prompt)
    try:
        return tokenizer.encode("\n")
    except UserError:
        return np.zeros(1, np.int32)
