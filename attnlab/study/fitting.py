"""Train small models within a study, with the trainer's optimizer and losses."""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from attnlab.config import Optimizer
from attnlab.data import corpora, tokenizers
from attnlab.data.batches import Batch, EvalBatches, TrainBatches
from attnlab.data.tasks.task_draws import key_of
from attnlab.ops.cross_entropy import loss_of_logits
from attnlab.study.report import Advance, ignore
from attnlab.support.errors import UserError
from attnlab.training import optimizer as optimizers


class Size(NamedTuple):
    """How much a study measures."""

    seeds: int  # models of each kind
    steps: int  # updates of each model


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
    """Train with `adamw` and return the parameters; `watch` gets (step, parameters before the update, gradient)."""
    optimizer = adamw(steps, learning_rate, weight_decay)
    update = jax.jit(functools.partial(_update, loss, optimizer))
    opt_state = optimizer.init(params)
    for step in range(steps):
        before, (params, opt_state, gradient) = params, update(params, opt_state, batches(step))
        if watch is not None:
            watch(step, before, gradient)
        advance()
    return params


def adamw(steps: int, learning_rate: float, weight_decay: float = 0.0) -> optax.GradientTransformation:
    """The trainer's optimizer: clipping, then AdamW with warm-up over a tenth of the steps and cosine decay to 0."""
    rates = {"learning_rate": float(learning_rate), "weight_decay": float(weight_decay), "b2": 0.99}
    return optimizers.make(Optimizer(**rates, warmup_steps=max(1, steps // 10)), steps)


def fit_seeds(
    loss: Callable,
    init: Callable,
    batches: Callable,
    optimizer: optax.GradientTransformation,
    *,
    seeds: Sequence[int],
    looks: Sequence[int],
    advance: Advance = ignore,
) -> Iterator[tuple[int, dict]]:
    """Train one model per seed, side by side, and yield all parameters at chosen steps.

    The seeds are split over devices (the study command makes each CPU core a device), and the seeds on one device run
    side by side by `vmap`. The steps run in a compiled loop, which also draws the batches.

    Args:
      loss: `loss(params, batch)`, a scalar.
      init: `init(key)`, the initial parameters.
      batches: `batches(step, seed)`, the batch of a step; both arguments are traced, see `attnlab.data.tasks`.
      optimizer: e.g. `adamw`.
      seeds: one model each; a multiple of the number of devices keeps all devices busy.
      looks: increasing numbers of updates after which to yield; the last ends the training, 0 is the initialization.
      advance: called as `advance(n)` after n more updates, counted over all seeds.

    Yields:
      `(step, params)`, NumPy arrays with a leading axis for the seeds.
    """
    state, run = _side_by_side(loss, init, batches, optimizer, seeds)
    done, piece = 0, max(1, looks[-1] // 100)  # pieces serve only progress reports
    for look in looks:
        while done < look:
            end = min(look, done + piece)
            state = jax.block_until_ready(run(state, done, end))
            advance((end - done) * len(seeds))
            done = end
        yield look, jax.device_get(state[0])


def _side_by_side(loss, init, batches, optimizer, seeds):
    """The parameters and optimizer states of all seeds, and `run(state, begin, end)`, which updates them."""

    def start(seed):
        params = init(jax.random.key(seed))
        return params, optimizer.init(params)

    def step(number, state, seed):
        return _update(loss, optimizer, *state, batches(number, seed))[:2]

    def loop(state, seeds, begin, end):
        side_by_side = jax.vmap(step, in_axes=(None, 0, 0))
        return jax.lax.fori_loop(begin, end, lambda number, state: side_by_side(number, state, seeds), state)

    devices = jax.local_devices()
    count = max(n for n in range(1, len(devices) + 1) if len(seeds) % n == 0)
    mesh = Mesh(np.array(devices[:count]), ("seeds",))
    split, same = PartitionSpec("seeds"), PartitionSpec()
    numbers = jnp.asarray(seeds, jnp.uint32)
    spread = functools.partial(jax.shard_map, mesh=mesh, out_specs=split, check_vma=False)
    state = jax.jit(spread(jax.vmap(start), in_specs=split))(numbers)
    run = jax.jit(spread(loop, in_specs=(split, split, same, same)), donate_argnums=0)
    return state, lambda state, begin, end: run(state, numbers, begin, end)


def next_token(model: nn.Module) -> dict[str, Callable]:
    """Return `loss` and `init` of a language model for `fit_seeds`; batches are tokens `[B, T + 1]`."""
    takes_targets = "targets" in inspect.signature(model.__call__).parameters

    def loss(variables, tokens):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if takes_targets:
            return model.apply(variables, inputs, targets=targets).mean()
        return loss_of_logits(model.apply(variables, inputs), targets).mean()

    return {"loss": loss, "init": lambda key: model.init(key, jnp.zeros((1, 2), jnp.int32))}


def _update(loss, optimizer, params, opt_state, batch):
    gradient = jax.grad(loss)(params, batch)
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, gradient


class StudyText(NamedTuple):
    """A text as character tokens."""

    tokenizer: tokenizers.Tokenizer
    train: np.ndarray  # int32 [length]
    validation: np.ndarray  # int32 [length]
    language: str  # "es" if the text looks Spanish, else "en"

    def batches(self, context: int, batch_size: int, seed: int) -> Callable[[int], Batch]:
        """Return a function that takes a step and returns its training batch."""
        return TrainBatches(self.train, context=context, batch_size=batch_size, seed=seed).__getitem__

    def windows(self, context: int, batch_size: int) -> Callable:
        """Return `batches` for `fit_seeds`: a call draws `[batch_size, context + 1]` tokens of the training text."""
        text = jnp.asarray(self.train, jnp.int32)

        def draw(step, seed):
            starts = jax.random.randint(key_of(step, seed), (batch_size, 1), 0, len(text) - context)
            return text[starts + jnp.arange(context + 1)]

        return draw

    def held_out(self, context: int, batch_size: int, windows: int) -> Iterator[Batch]:
        """Return an iterator over batches of windows of the validation text."""
        return iter(EvalBatches(self.validation, context=context, batch_size=batch_size, windows=windows))


def read(path: str, least: int = 1) -> StudyText:
    """Read a text file, or the Python language reference for ""; UserError for under `least` validation tokens."""
    corpus = corpora.read_text("text", path=path) if path else corpora.read_text("python_docs")
    tokenizer = tokenizers.make("char", corpus.text)
    train, validation = tokenizer.encode(corpus.train), tokenizer.encode(corpus.validation)
    if len(validation) < least:
        raise UserError(
            f"the validation text, the last tenth, is shorter than {least} tokens: give a longer text with --path"
        )
    spanish = corpus.text.count(" que ") > corpus.text.count(" the ")
    return StudyText(tokenizer, train, validation, "es" if spanish else "en")
