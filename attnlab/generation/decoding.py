"""Decode texts in parallel, token by token, each as if it were alone.

Prompts of different lengths are prefilled together, padded on the right; the caches do not keep the padding. The newest
token of a text is never in the caches: each step feeds it and draws the next one.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.data.tokenizers import Tokenizer
from attnlab.generation import drawing
from attnlab.generation.drawing import Draw
from attnlab.generation.loop import AHEAD, State, decode_ahead, rolls
from attnlab.generation.stop_strings import StopStrings
from attnlab.nn import GPT, unstack_layers


class Step(NamedTuple):
    """The next token of each text.

    Attributes:
      tokens: int32 `[rows]`; −1 for a text that has ended.
      logprobs: float32 `[rows]`, log-probabilities of these tokens under the model, at temperature 1 and over the
        whole vocabulary; 0 for a text that has ended.
    """

    tokens: np.ndarray
    logprobs: np.ndarray


def generate(
    model: GPT,
    params,
    prompt: np.ndarray | Sequence[np.ndarray],
    max_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    num_samples: int = 1,
    vocab_size: int | None = None,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    end: Sequence[int] = (),
    stop: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
) -> Iterator[np.ndarray]:
    """Sample tokens one by one, using the layers' caches.

    Args:
      model, params: a `GPT` and its variables, as in `model.apply(params, tokens)`.
      prompt: int `[length]`, at least one token, or a list of such prompts of any lengths, which are continued in
        parallel, each as if it were alone. If a prompt is longer than the context, only its end is read, even by
        recurrent layers, whose state later remembers all generated tokens.
      max_tokens: number of tokens to generate for each text.
      temperature, top_k, top_p, min_p, repetition_penalty, vocab_size: see `Draw`; vocab_size is for a model that has
        more tokens than its tokenizer.
      seed: token t of sample n depends only on the prompt and (seed, n, t). So equal prompts get equal samples; for
        different samples, raise num_samples.
      num_samples: number of texts to generate for each prompt; each prompt is read once.
      end: tokens that end a text, e.g. the token "<|endoftext|>".
      stop: strings that end a text, across token boundaries.
      tokenizer: decodes the tokens, for `stop`.

    Yields:
      int32 `[rows]`, the next token of each text: row p · num_samples + n for sample n of prompt p; −1 for a text that
      has ended. Iteration stops when all texts have ended.

    Raises:
      ValueError: an empty prompt, a prompt that is not a list of token ids, or `stop` without a tokenizer.
      UserError: a stop string that no tokens can form.

    >>> model = GPT.of(vocab_size=10, num_layers=1, num_heads=2, width=8, context=6)
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    >>> len(list(generate(model, params, np.array([1, 2]), max_tokens=9)))  # beyond the context
    9
    """
    if stop and tokenizer is None:
        raise ValueError("stop strings need a tokenizer: pass tokenizer=, or the tokens that end a text as end=")
    draw = Draw(temperature, top_k, top_p, vocab_size, min_p, repetition_penalty)
    ends = StopStrings(stop, tokenizer).after if stop else None
    options = {"seed": seed, "num_samples": num_samples, "end": end, "stop": ends}
    for step in decode(model, params, _prompts(prompt), max_tokens, draw=draw, **options):
        yield step.tokens


def _prompts(prompt) -> list[np.ndarray]:
    """One prompt or several as a list of int32 `[length]`."""
    single = not len(prompt) or np.ndim(prompt[0]) == 0
    prompts = [np.asarray(ids) for ids in ([prompt] if single else prompt)]
    for at, ids in enumerate(prompts):
        if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(
                f"prompt {at} has shape {ids.shape} and type {ids.dtype}, expected integers [length], one token or more"
            )
    return [ids.astype(np.int32) for ids in prompts]


def decode(
    model: GPT,
    params,
    prompts: Sequence[np.ndarray],
    max_tokens: int,
    *,
    draw: Draw = Draw(),  # noqa: B008
    seed: int = 0,
    num_samples: int = 1,
    end: Sequence[int] = (),
    stop: Callable[[list[int], int], int | None] | None = None,
) -> Iterator[Step]:
    """Continue prompts token by token; other arguments as for `generate`.

    Args:
      prompts: int `[length]` each, of any lengths.
      draw: draws a token from its logits.
      stop: takes the tokens drawn for a text, and how many there were in the previous call; returns the number of
        tokens after which the text ends, or None; see `StopStrings.after`.

    Yields:
      A `Step`, with sample n of prompt p in row p · num_samples + n, until all texts have ended.

    >>> model = GPT.of(vocab_size=10, num_layers=1, num_heads=2, width=8, context=6)
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    >>> steps = list(decode(model, params, [np.array([1, 2]), np.array([3])], max_tokens=9))
    >>> len(steps), steps[0].tokens.shape, bool((steps[0].logprobs < 0).all())
    (9, (2,), True)
    """
    if jax.default_backend() == "cpu" and model.dtype == jnp.bfloat16:
        model = model.replace(dtype=jnp.float32)  # bfloat16 saves no time: a step reads the float32 parameters
    params = unstack_layers(params)
    texts = [np.asarray(prompt).tolist() for prompt in prompts for _ in range(num_samples)]
    state = _start(model, draw, params, prompts, texts, max_tokens, drawing.keys(seed, num_samples))
    sizes = np.array([len(text) for text in texts])
    fed = np.minimum(sizes, model.config.context) - 1
    active, drawn, ahead = np.full(len(texts), max_tokens > 0), 0, 1
    while active.any():
        if not rolls(model) and (due := active & (fed >= model.config.context)).any():
            state, fed[due] = _read_again(model, params, state, texts, due)
        begin = time.perf_counter()
        state, tokens, logprobs, counts = decode_ahead(model, draw, tuple(end), params, state, ahead, max_tokens)
        tokens, logprobs, counts, active = (np.array(x) for x in (tokens, logprobs, counts, state.active))
        if time.perf_counter() - begin < 0.05:  # longer loops would print in bursts
            ahead = min(8 * ahead, AHEAD)
        fed += counts
        known, drawn = drawn, drawn + int(counts.max())
        for row in np.flatnonzero(counts):
            texts[row] += tokens[row, : counts[row]].tolist()
            if stop and (last := stop(texts[row][sizes[row] :], known)) is not None:
                counts[row], active[row] = last - known, False
        state = state._replace(active=active)
        for place in range(counts.max()):
            valid = place < counts
            yield Step(np.where(valid, tokens[:, place], -1), np.where(valid, logprobs[:, place], 0))


def _start(model, draw, params, prompts, texts, max_tokens, keys) -> State:
    """Prefill each prompt once, for all its samples."""
    windows = [np.asarray(prompt, np.int32)[-model.config.context : -1] for prompt in prompts]
    copies = len(texts) // len(prompts)
    # The time of attention grows with the capacity of the caches.
    capacity = min(model.config.context, _power_of_two(max(map(len, windows)) + max_tokens))
    caches = _prefill(model, params, *_padded(windows, capacity), copies, capacity)
    seen = None
    if draw.repetition_penalty != 1:
        seen = np.zeros((len(texts), model.config.vocab_size), bool)
        for row, text in zip(seen, texts):
            row[text] = True
    return State(
        np.array([text[-1] for text in texts], np.int32),
        caches,
        jnp.tile(keys, len(prompts)),
        np.zeros(len(texts), np.int32),
        np.ones(len(texts), bool),
        seen,
    )


def _padded(windows, longest) -> tuple[np.ndarray, np.ndarray]:
    """Token ids `[N, T]` padded with zeros, and lengths; T is a power of two or `longest`: few shapes are compiled."""
    lengths = np.array([len(window) for window in windows], np.int32)
    tokens = np.zeros((len(windows), min(longest, _power_of_two(int(lengths.max())))), np.int32)
    for row, window in zip(tokens, windows):
        row[: len(window)] = window
    return tokens, lengths


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


def _read_again(model, params, state: State, texts, due) -> tuple[State, int]:
    """Prefill the last half of the context of the `due` texts; return the new state and the number of tokens fed."""
    (rows,) = np.nonzero(due)
    # A power of two, so that few shapes are compiled.
    rows = np.resize(rows, min(len(due), _power_of_two(len(rows))))
    half = max(1, model.config.context // 2)
    windows = [np.array(texts[row][-half:-1], np.int32) for row in rows]
    # The caches of texts this long have the context as their capacity.
    caches = _refill(model, params, state.caches, rows, *_padded(windows, half))
    return state._replace(caches=caches), half - 1


@functools.partial(jax.jit, static_argnames=("model", "copies", "capacity"))
def _prefill(model, params, tokens, lengths, copies, capacity):
    """Caches for the first `lengths` tokens in each row of `tokens` `[N, T]`, each row repeated `copies` times."""
    _, caches = model.apply(params, tokens, caches=model.init_caches(len(tokens), capacity), lengths=lengths)
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, copies, axis=0), caches)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="caches")
def _refill(model, params, caches, rows, tokens, lengths):
    """The caches with some rows prefilled again."""
    fresh = _prefill(model, params, tokens, lengths, 1, model.config.context)
    return jax.tree.map(lambda old, new: old.at[rows].set(new), caches, fresh)
