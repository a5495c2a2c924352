"""An experiment: a model, its optimizer, its devices, and the compiled steps of training and evaluation."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from attnlab.config import RunConfig
from attnlab.data.batches import Batch, Batches, prefetched
from attnlab.data.tasks import named
from attnlab.nn import GPT
from attnlab.nn.config import ModelConfig
from attnlab.nn.layer import Layer
from attnlab.nn.matrices import matrices_of
from attnlab.nn.multihead import MultiHeadAttention, as_tuple
from attnlab.ops.attention import Explanation, explain
from attnlab.ops.masks import Mask
from attnlab.ops.score_mods import Forget, ScoreMod
from attnlab.support.errors import UserError
from attnlab.training import optimizer as optimizers
from attnlab.training import parallel as parallel_lib
from attnlab.training import state as states
from attnlab.training.state import TrainState


class Experiment:
    """Everything that a run computes with, by a `RunPlan`'s config. Nothing is compiled before it is called.

    `model`, `mask`, `score_mod` and `optimizer` are as in `attnlab.train.train`; `extensions` as in
    `optimizer.learning_rate`.

    Attributes:
      config: the argument.
      scan: whether the layers of the state are stacked.
      learning_rate: the schedule, by updates done; None for a user's optimizer.
    """

    def __init__(
        self,
        config: RunConfig,
        vocab_size: int,
        *,
        model: nn.Module | None = None,
        mask: Mask | None = None,
        score_mod: ScoreMod | tuple[ScoreMod, ...] | None = None,
        optimizer: optax.GradientTransformation | None = None,
        parallel: parallel_lib.Parallel | None = None,
        extensions: Sequence[dict] = (),
    ):
        self.parallel = parallel or parallel_lib.from_config(config)
        self.config = config
        platform = self.parallel.mesh.devices.flat[0].platform
        if model is None:
            self.model = GPT(with_parts(config.over_tokens(vocab_size), mask, score_mod))
            _check_backend(self.model, platform)
        else:
            _check_model(model, vocab_size, config.data.packing)
            self.model = model.over_tokens(vocab_size) if isinstance(model, GPT) else model
        self._over_tokens = self.model if isinstance(self.model, GPT) else _OverTokens(self.model, vocab_size)
        # A user's optimizer may select parameters by layer.
        self.scan = model is None and (states.scans(config, platform) if optimizer is None else bool(config.scan))
        self._init = jax.jit(self.model.init)
        self.learning_rate = None
        skip = config.on_nonfinite == "skip"
        if optimizer is None:
            is_muon = config.optimizer.name == "muon"
            self.learning_rate = jax.jit(optimizers.learning_rate(config.optimizer, config.steps, extensions))
            self._optimizer_at = functools.partial(
                optimizers.make,
                config.optimizer,
                config.steps,
                tokens_per_update=config.batch_size * config.model.context,
                extensions=extensions,
                skip_nonfinite=skip,
                matrices=matrices_of(self.model, np.zeros((1, 1), np.int32)) if is_muon else None,
            )
            self.optimizer = self._optimizer_at()
        else:
            self.optimizer = optimizers.skipping_nonfinite(optimizer) if skip else optimizer
            self._optimizer_at = lambda at: self.optimizer

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, types and shardings of the state; nothing is allocated."""
        shapes = jax.eval_shape(self._create, jax.ShapeDtypeStruct((), jnp.int32))
        shardings = self.parallel.shardings(shapes)
        return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, shardings)

    @property
    def parameters(self) -> int:
        """How many parameters the model has."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract_state.params))

    @functools.cached_property
    def train_step(self) -> Callable[[TrainState, Batch], tuple[TrainState, dict]]:
        """The compiled `state.train_step`: (state, placed batch) → (next state, metrics). It consumes the state."""
        compiled, fixed = self._compiled_step, jax.device_put(self._fixed, self.parallel.replicated)
        return lambda state, batch: compiled(state, batch, fixed)

    @functools.cached_property
    def _compiled_step(self) -> Callable:
        """The training step of (state, placed batch, `_fixed`)."""
        config, model, optimizer_at = self.config, self._over_tokens, self._optimizer_at
        accumulation, ema = config.optimizer.accumulation, config.optimizer.ema

        def step(state, batch, fixed, axis_name=None):
            seed, at = fixed
            return states.train_step(model, optimizer_at(at=at), seed, accumulation, state, batch, axis_name, ema=ema)

        return self.parallel.compile_train(step, self.abstract_state)

    @property
    def _fixed(self) -> tuple:
        """Seed and learning rates: arguments of the program, which runs that differ in them share."""
        return np.int32(self.config.seed), jax.tree.map(np.float32, optimizers.peaks(self.config.optimizer))

    @functools.cached_property
    def eval_step(self) -> Callable:
        """The compiled `state.eval_step`: (params, placed batch) → sums over the global batch, float32 `[2 or 3]`."""
        return self.parallel.compile_eval(functools.partial(states.eval_step, self._over_tokens))

    def create_state(self, params=None) -> TrainState:
        """The state before the first step, on the devices, with random parameters unless `params` are passed."""
        if params is None:
            state = self.parallel.create_state(self._create, jnp.int32(self.config.seed))
            self._init.clear_cache()  # its program is large, and not needed again
            return state
        like = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        step = jax.device_put(jnp.zeros((), jnp.int32), like.step)
        opt_state = jax.jit(self.optimizer.init, out_shardings=like.opt_state)(params)
        average = jax.tree.map(jnp.copy, params) if self.config.optimizer.ema else None
        return TrainState(step, params, opt_state, average)

    def evaluate(self, params, batches: Batches, stop: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        """Mean "loss" over held-out text in nats per token, or over the answers of a task, with the "accuracy".

        None when `stop()` returns True before its end.
        """
        sums = 0
        for batch in prefetched(batches):
            if stop():
                return None
            sums = sums + np.float64(jax.device_get(self.eval_step(params, self.parallel.place_batch(batch))))
        loss, count, *right = sums
        return {"loss": float(loss / count)} | ({"accuracy": float(right[0] / count)} if right else {})

    def trace(self) -> jax.stages.Traced:
        """The training step traced for shapes: `.jaxpr` lists what it computes, and nothing is compiled."""
        return self._compiled_step.trace(*self._shapes)

    def lower(self) -> jax.stages.Lowered:
        """The training step lowered from shapes: `.compile()` tells its memory, and nothing runs."""
        return self._compiled_step.lower(*self._shapes)

    @property
    def _shapes(self) -> tuple:
        """The arguments of `_compiled_step`."""
        at = self.parallel.replicated
        fixed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), self._fixed)
        return self.abstract_state, self._abstract_batch(), fixed

    def lower_eval(self) -> jax.stages.Lowered:
        """The evaluation of one batch, lowered from shapes."""
        return self.eval_step.lower(self.abstract_state.params, self._abstract_batch())

    def _abstract_batch(self) -> Batch:
        config = self.config
        context, task = config.model.context, named.parse(config.data.name)
        has = {"segments": config.data.packing == "documents", "answers": task.answers_of(context) if task else 0}
        return self.parallel.abstract_batch(config.batch_size, context, **has)

    def _create(self, seed) -> TrainState:
        average = bool(self.config.optimizer.ema)
        return states.create(self.model, self.optimizer, seed, self._init, self.scan, average)


class _OverTokens(nn.Module):
    """A user's model, whose logits may be padded, over the tokens of the tokenizer."""

    model: nn.Module
    vocab_size: int

    def apply(self, *args, **options):
        return self.model.apply(*args, **options)[..., : self.vocab_size]


def _check_backend(model: GPT, platform: str) -> None:
    """Raise UserError where the backend that `config.model.impl` names cannot run on the devices."""

    config = model.config
    for layer in config.used:
        if layer.module.operator != "attention":
            continue
        module = layer.make(config)

        def ask(q, k, v, module=module):
            backend_of(module, platform, q, k, v)

        try:
            jax.eval_shape(ask, *module.operands(1, config.context, config.width))
        except ValueError as error:
            raise UserError(f"config.model.{layer.kind}.{str(error).splitlines()[0]}") from error


def backend_of(layer: Layer, platform: str, q, k, v, **options) -> Explanation:
    """The backend of a layer of attention on a platform, for q, k and v; `options` are other arguments."""
    mods = as_tuple(layer.score_mod)
    if isinstance(layer, MultiHeadAttention):
        mods = (*mods, Forget(jnp.zeros(q.shape[:-1]))) if layer.forget_gate else mods
        options |= {"sinks": jnp.zeros(layer.num_heads)} if layer.sinks else {}
    return explain(q, k, v, layer.mask, score_mod=mods, impl=layer.impl, platform=platform, **options)


def with_parts(config: ModelConfig, mask: Mask | None, score_mod) -> ModelConfig:
    """The config with a mask and score mods in all layers; UserError for a layer that has none."""
    for name, value in (("mask", mask), ("score_mod", score_mod)):
        if value is None:
            continue
        if others := [layer.kind for layer in config.used if name not in {f.name for f in dataclasses.fields(layer)}]:
            raise UserError(f"{name}= is for attention, and layers of {others[0]} have none: leave it out")
        config = config.replace(layers=tuple(dataclasses.replace(layer, **{name: value}) for layer in config.layers))
    return config


def _check_model(model: nn.Module, vocab_size: int, packing: str) -> None:
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    if packing == "documents" and "segments" not in inspect.signature(model.__call__).parameters:
        raise UserError(
            f"config.data.packing = 'documents', but {type(model).__name__} takes no segments=: give its __call__ this "
            "argument, int [B, T], the number of each token's document, or use packing=stream"
        )
    try:
        variables = jax.eval_shape(model.init, jax.random.key(0), tokens)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
        apply = functools.partial(model.apply, deterministic=False)
        logits = jax.eval_shape(apply, variables, tokens, dropout_key=keys)
    except TypeError as error:
        raise UserError(
            f"{type(model).__name__} cannot be called as (tokens, deterministic=…, dropout_key=…): {error}"
        ) from error
    if set(variables) != {"params"}:
        raise UserError(
            f"{type(model).__name__} has the collections {', '.join(variables)}: a model may have params alone"
        )
    if logits.ndim != 3 or logits.shape[:2] != (1, 2) or logits.shape[2] < vocab_size:
        raise UserError(
            f"{type(model).__name__} returns {list(logits.shape)} for tokens [1, 2]: expected logits [1, 2, V], V at "
            f"least the tokenizer's {vocab_size}"
        )
