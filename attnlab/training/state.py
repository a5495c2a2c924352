"""The training state, and the pure functions of a training or evaluation step."""

import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int

from attnlab.config import RunConfig
from attnlab.data.batches import Batch
from attnlab.nn import GPT, sharding, stack_layers
from attnlab.ops.cross_entropy import loss_of_logits
from attnlab.training.optimizer import averaged
from attnlab.types import Array


class TrainState(NamedTuple):
    """Everything that a run needs to resume, besides its config.

    Attributes:
      step: int32 scalar, updates done; determines the position in the data and, with the seed, the random keys.
      params: float32.
      average: average of the parameters over all updates, only with `config.optimizer.ema`.
    """

    step: Array
    params: dict
    opt_state: tuple
    average: dict | None = None

    @property
    def evaluated(self) -> dict:
        """The parameters to evaluate, to sample from and to load: the average, if there is one."""
        return self.params if self.average is None else self.average


def create(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    seed: int | Array,
    init: Callable | None = None,
    scan: bool = False,
    average: bool = False,
) -> TrainState:
    """The state before the first step, bit-identical for equal seeds; `scan` stacks layers, `average` adds the EMA."""

    params = (init or jax.jit(model.init))(jax.random.key(seed), np.zeros((1, 1), np.int32))["params"]
    return _begun(params, optimizer=optimizer, scan=scan, average=average)


@functools.partial(jax.jit, static_argnames=("optimizer", "scan", "average"))  # one program instead of 15
def _begun(params, optimizer, scan, average):
    params = stack_layers(params) if scan else params
    copy = jax.tree.map(jnp.copy, params) if average else None
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), copy)


def token_losses(model: nn.Module, params, batch: Batch, **options) -> Float[Array, "B T"]:
    """Cross-entropy in nats of each target of `targets_of`, `[B, R]`."""
    targets = targets_of(batch)
    if batch.segments is not None:
        options["segments"] = batch.segments[:, :-1]
    if isinstance(model, GPT) and "targets" in inspect.signature(model.__call__).parameters:
        options |= {"targets": targets} | _places_of(batch)
        return model.apply({"params": params}, batch.tokens[:, :-1], **options)
    logits = logits_of(model, params, batch, **options)
    return loss_of_logits(logits, targets)


def logits_of(model: nn.Module, params, batch: Batch, **options) -> Float[Array, "B R V"]:
    """Logits at the positions of the targets of `targets_of`."""
    if isinstance(model, GPT):
        return model.apply({"params": params}, batch.tokens[:, :-1], **_places_of(batch), **options)
    logits = model.apply({"params": sharding.gathered(params)}, batch.tokens[:, :-1], **options)
    return logits if batch.places is None else jnp.take_along_axis(logits, batch.places[..., None], axis=1)


def _places_of(batch) -> dict:
    """The argument `places` of a GPT; {} for a batch without places, as a subclass of GPT may lack the argument."""
    return {} if batch.places is None else {"places": batch.places}


def targets_of(batch: Batch) -> Int[Array, "B R"]:
    """The targets, `[B, R]`: the next tokens, or the answers of a task, with token 0 where no answer counts."""
    return batch.tokens[:, 1:] if batch.targets is None else jnp.maximum(_answers_of(batch), 0)


def _answers_of(batch):
    targets, places = batch.targets, batch.places
    return targets if places is None else jnp.take_along_axis(targets, places, axis=1)


def counted(batch: Batch) -> Float[Array, "B R"] | None:
    """1 for targets that count, else 0: next tokens in the same document, or answers of a task. None if all count."""
    if batch.targets is not None:
        return (_answers_of(batch) >= 0).astype(jnp.float32)
    if batch.segments is None:
        return None
    return (batch.segments[:, 1:] == batch.segments[:, :-1]).astype(jnp.float32)


def gradients(model, params, batch: Batch, step_key, accumulation: int = 1, axis_name: str | None = None):
    """(Mean loss in nats over the targets of the global batch that count, its gradient).

    The dropout key of an example is `fold_in(step_key, i)`, where i is its index in the global batch. `accumulation`
    microbatches are processed in sequence. Gradients are averaged over devices once, after the last microbatch, except
    over mesh axes that also split parameters or sequences.
    """
    run = functools.partial(_gradients, model, accumulation)
    if axis_name or accumulation == 1:
        return run((params, step_key), batch, axis_name)
    return sharding.over_examples(run, (params, step_key), batch)


def _gradients(model, accumulation: int, whole, batch: Batch, axes: str | tuple[str, ...] | None):
    """Like `gradients`, for this device's examples; the results are averaged over the mesh axes `axes`."""
    params, step_key = whole
    count = counted(batch)
    count = None if count is None else count.sum() / accumulation
    count = jax.lax.pmean(count, axes) if axes and count is not None else count
    count = None if count is None else jnp.where(count > 0, count, 1)

    def loss(params, part):
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(step_key, part.example)
        losses = token_losses(model, params, part, deterministic=False, dropout_key=keys)
        # Divide by the count of the whole batch, so that the mean does not depend on how the batch is split.
        return losses.mean() if count is None else (losses * counted(part)).sum() / count

    if accumulation == 1:
        value, gradient = jax.value_and_grad(loss)(params, batch)
    else:
        # A microbatch takes every accumulation-th example: the batch is sharded in contiguous blocks, so no example
        # moves to another device.
        parts = jax.tree.map(lambda x: x.reshape(-1, accumulation, *x.shape[1:]).swapaxes(0, 1), batch)

        def add(total, part):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, part)), None

        zero = jax.tree.map(jnp.zeros_like, (jnp.zeros((), jnp.float32), params))
        (value, gradient), _ = jax.lax.scan(add, zero, parts)
        value, gradient = jax.tree.map(lambda x: x / accumulation, (value, gradient))
    return jax.lax.pmean((value, gradient), axes) if axes else (value, gradient)


def train_step(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    seed: int | Array,
    accumulation: int,
    state: TrainState,
    batch: Batch,
    axis_name: str | None = None,
    *,
    ema: float = 0.0,
) -> tuple[TrainState, dict]:
    """Return (the next state, scalar metrics), as a pure function; `ema` is the decay of `optimizer.averaged`.

    The metrics are `loss` (nats) and `grad_norm` (before clipping) of the old parameters, `param_norm` of the new
    parameters, all float32, and, if the optimizer skips non-finite steps, `skipped`: how many so far, int32.
    """
    step_key = jax.random.fold_in(jax.random.key(seed), state.step)
    loss, gradient = gradients(model, state.params, batch, step_key, accumulation, axis_name)
    skips = optax.tree.get(state.opt_state, "total_notfinite") is not None
    if skips:  # the optimizer checks only gradients
        gradient = jax.tree.map(lambda g: jnp.where(jnp.isfinite(loss), g, jnp.nan), gradient)
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(gradient), "param_norm": optax.tree.norm(params)}
    if skips:
        metrics["skipped"] = optax.tree.get(opt_state, "total_notfinite")
    average = averaged(state.average, params, state.step + 1, ema) if ema else None
    return TrainState(state.step + 1, params, opt_state, average), metrics


def repeated(step: Callable, state, batches: Batch, per_run, count) -> tuple:
    """Take `count` ≤ K steps `(state, batch, per_run) → (state, metrics)`; return (state, metrics `[K]`, the rest 0).

    Batches have a leading axis of K steps. `count` is traced, so that one program takes any number of steps.
    """
    first = jax.tree.map(lambda x: x[0], batches)
    if len(batches.tokens) == 1:
        state, metrics = step(state, first, per_run)
        return state, jax.tree.map(lambda x: x[None], metrics)
    shapes = jax.eval_shape(step, state, first, per_run)[1]
    metrics = jax.tree.map(lambda x: jnp.zeros((len(batches.tokens), *x.shape), x.dtype), shapes)

    def take(number, carry):
        state, metrics = carry
        state, step_metrics = step(state, jax.tree.map(lambda x: x[number], batches), per_run)
        return state, jax.tree.map(lambda old, new: old.at[number].set(new), metrics, step_metrics)

    return jax.lax.fori_loop(0, count, take, (state, metrics))


def eval_step(model: nn.Module, params, batch: Batch, axis_name: str | None = None) -> Float[Array, " N"]:
    """Weighted sums over a batch: losses in nats, number of targets and, for a task, number of right answers."""
    if batch.targets is not None:
        sums = _answers(model, params, batch)
    elif batch.segments is None:
        losses = token_losses(model, params, batch)
        sums = jnp.stack([(losses * batch.weight[:, None]).sum(), batch.weight.sum() * losses.shape[1]])
    else:
        losses = token_losses(model, params, batch)
        counts = counted(batch) * batch.weight[:, None]
        sums = jnp.stack([(losses * counts).sum(), counts.sum()])
    return jax.lax.psum(sums, axis_name) if axis_name else sums


def _answers(model, params, batch):
    logits = logits_of(model, params, batch)
    counts, targets = counted(batch) * batch.weight[:, None], targets_of(batch)
    losses = loss_of_logits(logits, targets)
    right = logits.argmax(-1) == targets
    return jnp.stack([(x * counts).sum() for x in (losses, jnp.ones_like(losses), right)])


# Fields of `config.model` that determine how a model is computed and trained, not what it computes.
HOW = ("dropout", "remat", "scan", "impl")
# If `config.model.scan` is None, models with this many layers or more use a loop. On two x86 cores, at the width of the
# quickstart, a step with a loop takes 0.79 times as long for 4 layers and 0.59 times as long for 12; it also compiles
# faster. On GPUs a loop copies the values that it stores for the gradient into and out of stacks: on an H100, 16
# sequences of GPT-2 124M take 43.0 ms with a loop and 36.8 without. There a loop only saves time in compiling.
SCAN_FROM, SCAN_FROM_ON_GPUS = 4, 33


def scans(config: RunConfig, platform: str) -> bool:
    """Whether a run's layers are one loop over stacked parameters."""
    if config.scan is not None:
        return config.scan
    # With fsdp but without a loop, XLA merges the gathers of all layers and holds all gathered parameters at once.
    most = SCAN_FROM_ON_GPUS if platform == "gpu" else SCAN_FROM
    return config.model.num_layers >= most or config.parallel.mesh.fsdp > 1


# On an H100 the quickstart (0.8 million parameters) trains 2.9 times as fast with 64 steps per call as with one. A step
# of a larger model takes longer than the host needs to prepare the next one.
STEPS_ON_GPUS, SMALL = 64, 10_000_000


def steps_per_call(config: RunConfig, platform: str, parameters: int) -> int:
    """Maximum number of updates in one dispatch to the devices, for a model with this number of `parameters`."""
    if config.parallel.steps_per_call is not None:
        return config.parallel.steps_per_call
    return STEPS_ON_GPUS if platform == "gpu" and parameters <= SMALL else 1
