"""Generate text with a trained model.

    attnlab sample --workdir=runs/quickstart --prompt="The "
    attnlab sample --workdir=gpt2 --prompt="The "

The second folder holds a Hugging Face GPT-2: `config.json`, `model.safetensors`, and its tokenizer files.
`python -m attnlab.sample` is the same command.

The text is printed while it is generated, at any length. Beyond the model's context, models with learned or sinusoidal
positions keep the last half of the context and prefill it again; with rotary, alibi or no positions, the cache rolls.
"""

if __name__ == "__main__":
    from attnlab import hugepages

    hugepages.restart("attnlab.sample")

import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Float, Int

from attnlab import commands, compilation
from attnlab.errors import UserError
from attnlab.loading import load
from attnlab.nn import GPT, unstack_layers
from attnlab.types import Array


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    return commands.run(_define, functools.partial(_main, own_process=argv is None), __doc__, argv)


def generate(
    model: GPT,
    params,
    prompt: np.ndarray,
    max_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    num_samples: int = 1,
    vocab_size: int | None = None,
) -> Iterator[np.ndarray]:
    """Samples tokens one by one, with a `KVCache`.

    Args:
      model, params: a `GPT` and its variables, as in `model.apply(params, tokens)`.
      prompt: int `[length]`, at least one token; of a prompt longer than the context, only the end is used.
      max_tokens: number of tokens to generate.
      temperature: divides the logits; 0 takes the most likely token.
      top_k: sample from the k most likely tokens; 0 for all.
      top_p: sample from the fewest tokens whose probabilities sum to this (Holtzman et al. 2020); 1 for all.
      seed: token t of sample n depends only on (seed, n, t).
      num_samples: number of texts to generate side by side.
      vocab_size: sample from the first tokens only, for a model with a padded vocabulary; None for all.

    Yields:
      int32 `[num_samples]`, the next token of each text.

    >>> model = GPT(vocab_size=10, num_layers=1, num_heads=2, width=8, context=6)
    >>> params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    >>> len(list(generate(model, params, np.array([1, 2]), max_tokens=9)))  # beyond the context
    9
    """
    if jax.default_backend() == "cpu" and model.dtype == jnp.bfloat16:
        # A step takes as long as reading the parameters, which are float32 anyway.
        model = model.clone(dtype=jnp.float32)
    params = unstack_layers(params)
    rolls = model.positions not in ("learned", "sinusoidal")
    draw = Draw(temperature, top_k, top_p, vocab_size)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(num_samples))

    text = np.tile(np.asarray(prompt, np.int32), (num_samples, 1))[:, -model.context :]
    place, ahead, token = 0, 1, None
    while place < max_tokens:
        if token is None or (length >= model.context and not rolls):
            window = text if token is None else text[:, -max(1, model.context // 2) :]
            length = window.shape[1]
            token, caches = _prefill(model, draw, params, window, keys, place)
            drawn = np.asarray(token)[None]
        else:
            count = min(ahead, max_tokens - place, _AHEAD if rolls else model.context - length)
            start = time.perf_counter()
            token, caches, drawn = _decode_ahead(model, draw, params, token, caches, keys, place, count)
            drawn = np.asarray(drawn)[:count]
            length += count
            if time.perf_counter() - start < 0.05:  # longer loops would print the text in bursts
                ahead = min(8 * ahead, _AHEAD)
        place += len(drawn)
        text = np.concatenate([text, drawn.T], axis=1)[:, -model.context :]
        yield from drawn


_AHEAD = 64  # most tokens that one loop on the device generates before they are printed


class Draw(NamedTuple):
    """Sampling of the next token from its logits.

    Attributes:
      temperature, top_k, top_p, vocab_size: see `generate`.

    >>> Draw(temperature=0.0)(jnp.array([[0.0, 2.0, 1.0]]), jnp.array([0.5]))
    Array([1], dtype=int32)
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    vocab_size: int | None = None

    def __call__(self, logits: Float[Array, "N V"], uniform: Float[Array, " N"]) -> Int[Array, " N"]:
        """A token for each row of logits: the first at which the cumulative probability exceeds `uniform`."""
        logits = logits[:, : self.vocab_size]
        if self.temperature < 1e-6:  # the most likely token, to float32's last bit
            return logits.argmax(axis=-1).astype(jnp.int32)
        logits = (logits - logits.max(axis=-1, keepdims=True)) / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            logits = jnp.where(logits < jax.lax.top_k(logits, self.top_k)[0][:, -1:], -jnp.inf, logits)
        if self.top_p < 1:
            order = jnp.flip(jnp.argsort(logits, axis=-1), axis=-1)
            p = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1))
            # A token is kept if those before it do not reach top_p; the first always is, even where its p rounds to 1.
            kept = (jnp.cumsum(p, axis=-1) - p < self.top_p).at[:, 0].set(True)
            rows = jnp.arange(len(logits))[:, None]
            logits = jnp.where(jnp.zeros_like(kept).at[rows, order].set(kept), logits, -jnp.inf)
        p = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
        # Sums are rounded, so that a token with probability 0 could seem to add to them.
        sums = jnp.where(p > 0, jnp.cumsum(p, axis=-1), 0)
        return (sums > uniform[:, None] * sums.max(axis=-1, keepdims=True)).argmax(axis=-1).astype(jnp.int32)


def _uniform(keys, places):
    """Random numbers in [0, 1), `[P, N]`, each a function of its place and key only."""
    draw = jax.vmap(lambda place, key: jax.random.uniform(jax.random.fold_in(key, place)), (None, 0))
    return jax.vmap(draw, (0, None))(places, keys)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _prefill(model, draw, params, tokens, keys, place):
    """The token after `tokens` `[N, T]`, and the caches that hold those."""
    logits, caches = model.apply(params, tokens, caches=model.empty_caches(len(tokens)))
    return draw(logits[:, -1], _uniform(keys, jnp.asarray(place)[None])[0]), caches


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def _decode_ahead(model, draw, params, token, caches, keys, place, count):
    """Decode `count` more tokens: the last one, the caches before it, and all as the first rows of `[_AHEAD, N]`."""

    def step(i, carry):
        token, caches, drawn = carry
        logits, caches = model.apply(params, token[:, None], caches=caches)
        token = draw(logits[:, -1], uniform[i])
        return token, caches, drawn.at[i].set(token)

    # Before the loop, where random bits would take half of a small model's time.
    uniform = _uniform(keys, place + jnp.arange(_AHEAD))
    drawn = jnp.zeros((_AHEAD, len(token)), jnp.int32)
    return jax.lax.fori_loop(0, count, step, (token, caches, drawn))


def _define(values, argv):
    flags.DEFINE_string("workdir", None, "folder of the run, or of a GPT-2", flag_values=values)
    flags.DEFINE_string("prompt", None, "text to continue; a new line when absent", flag_values=values)
    flags.DEFINE_integer("max_tokens", 500, "number of tokens to generate", flag_values=values)
    flags.DEFINE_integer("num_samples", 1, "number of texts to generate", flag_values=values)
    flags.DEFINE_float("temperature", 0.8, "divides the logits; 0 takes the most likely token", flag_values=values)
    flags.DEFINE_integer("top_k", 0, "sample from the k most likely tokens; 0 for all", flag_values=values)
    flags.DEFINE_float("top_p", 1.0, "sample from the most likely tokens that sum to p; 1 for all", flag_values=values)
    flags.DEFINE_integer("seed", 0, "of the random draws: same seed, same text", flag_values=values)
    flags.DEFINE_string("step", "latest", "checkpoint: latest, best, or a step", flag_values=values)


def _main(values, own_process: bool) -> int:
    for name, good, expected in (
        ("max_tokens", values.max_tokens >= 1, "1 or more"),
        ("num_samples", values.num_samples >= 1, "1 or more"),
        ("temperature", 0 <= values.temperature <= 1e6, "a number, 0 or more (up to a million)"),
        ("top_k", values.top_k >= 0, "0 or more"),
        ("top_p", 0 < values.top_p <= 1, "a number above 0, up to 1"),
        ("seed", 0 <= values.seed < 2**32, "0 or more, below 2^32"),
    ):
        if not good:
            raise UserError(f"--{name}={values[name].value}: expected {expected}")
    if values.workdir is None:
        raise UserError("--workdir is missing: name the folder of a run, e.g. --workdir=runs/quickstart")
    if own_process:
        compilation.keep_programs()
    model, params, tokenizer, _ = load(Path(values.workdir), values.step)
    if tokenizer is None:
        raise UserError(f"{values.workdir} holds no tokenizer: put tokenizer.json there, or vocab.json and merges.txt")
    prompt = prompt_ids(tokenizer, values.prompt)

    start = time.perf_counter()
    drawn = generate(
        model,
        params,
        prompt,
        values.max_tokens,
        temperature=values.temperature,
        top_k=values.top_k,
        top_p=values.top_p,
        seed=values.seed,
        num_samples=values.num_samples,
        vocab_size=tokenizer.vocab_size,
    )
    # The first text is printed while it is generated, the others, generated beside it, after it.
    others = []
    write = functools.partial(print, end="", flush=True)
    write(values.prompt or "")
    for piece in tokenizer.stream(_first(drawn, others)):
        write(piece)
    print()
    for tokens in np.array(others).T if values.num_samples > 1 else ():
        print("-" * 80)
        print((values.prompt or "") + tokenizer.decode(tokens))
    seconds = time.perf_counter() - start
    if sys.stderr.isatty():
        print(f"{values.max_tokens * values.num_samples / seconds:.0f} tokens per second", file=sys.stderr)
    return 0


def prompt_ids(tokenizer, prompt: str | None) -> np.ndarray:
    """Token ids of a prompt, int `[length]`; without a prompt, those of a new line, or else the first token.

    Raises:
      UserError: the tokenizer does not know a character.
    """
    if prompt:
        return tokenizer.encode(prompt)
    try:
        return tokenizer.encode("\n")
    except UserError:
        return np.zeros(1, np.int32)


def _first(drawn, others):
    for tokens in drawn:
        others.append(tokens[1:])
        yield int(tokens[0])


if __name__ == "__main__":
    sys.exit(main())
