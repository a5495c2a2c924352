"""An experiment: a model, its optimizer, its devices, and the compiled steps of training and evaluation."""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from attnlab.config import Optimizer, RunConfig
from attnlab.data.batches import Batch, Batches, prefetched
from attnlab.data.tasks import named
from attnlab.nn import GPT, ModelConfig
from attnlab.nn.layer import Layer, LayerConfig
from attnlab.nn.matrices import matrices_of
from attnlab.nn.mixers.gru import GRUConfig
from attnlab.nn.multihead import AttentionConfig, LocalConfig, MultiHeadAttention, as_tuple
from attnlab.ops.attention import Explanation, explain
from attnlab.ops.score_mods import Forget
from attnlab.support.errors import UserError
from attnlab.training import optimizer as optimizers
from attnlab.training import parallel as parallel_lib
from attnlab.training import passed, precision
from attnlab.training import state as states
from attnlab.training.state import TrainState

_PROGRAMS: contextvars.ContextVar[dict | None] = contextvars.ContextVar("programs", default=None)


@contextlib.contextmanager
def shared_programs(programs: dict | None = None) -> Iterator[None]:
    """Context, or decorator, in which experiments with the same programs trace and compile them once.

    Within another such context it is that one's; `programs` holds them, for several contexts.
    """
    found = _PROGRAMS.get() if programs is None else programs
    token = _PROGRAMS.set({} if found is None else found)
    try:
        yield
    finally:
        _PROGRAMS.reset(token)


class Experiment:
    """Everything that a run computes with, by a `RunPlan`'s config. Nothing is compiled before it is called.

    `model` and `optimizer` are as in `attnlab.train.train`; `extensions` as in `optimizer.learning_rate`.

    Attributes:
      config: the argument.
      scan: whether the layers of the state are stacked.
      learning_rate: (its peak, updates done) → the rate; None for a user's optimizer.
    """

    def __init__(
        self,
        config: RunConfig,
        vocab_size: int,
        *,
        model: nn.Module | None = None,
        optimizer: optax.GradientTransformation | None = None,
        parallel: parallel_lib.Parallel | None = None,
        extensions: Sequence[dict] = (),
    ):
        self.parallel = parallel or parallel_lib.from_config(config)
        self.config = config
        self._ahead = {}
        platform = self.parallel.mesh.devices.flat[0].platform
        if model is None:
            self.model = GPT(config.over_tokens(vocab_size))
        else:
            _check_model(model, vocab_size, config.data.packing)
            self.model = model.over_tokens(vocab_size) if isinstance(model, GPT) else model
        self._over_tokens = self.model if isinstance(self.model, GPT) else _OverTokens(self.model, vocab_size)
        # Only in programs without user code, whose gradients tests/test_gradients.py has compared with float64.
        is_builtin = model is None and optimizer is None
        self._fuses_sums = is_builtin and all(map(_gains_by_fused_sums, self.model.config.used))
        # A user's optimizer may select parameters by layer.
        self.scan = model is None and (states.scans(config, platform) if optimizer is None else bool(config.scan))
        self._init = jax.jit(self.model.init)
        self.learning_rate = None
        skip = config.on_nonfinite == "skip"
        if optimizer is None:
            is_muon = config.optimizer.name == "muon"
            rate = functools.partial(optimizers.learning_rate, config.optimizer, config.steps, extensions)
            self.learning_rate = jax.jit(lambda peak, count: rate(peak)(count))
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
        self._first = self  # whose programs these are
        if (programs := _PROGRAMS.get()) is not None:
            own = map(_hashable, (model, optimizer))
            config = _without_arguments(config), passed.version(config)
            key = *config, self.parallel, vocab_size, repr(extensions), *own
            self._first = programs.setdefault(key, self)

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, types and shardings of the state; nothing is allocated."""
        shapes = jax.eval_shape(self._create, jax.ShapeDtypeStruct((), jnp.int32))
        shardings = self.parallel.shardings(shapes)
        return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, shardings)

    def check_backend(self) -> None:
        """Raise UserError where the backend that `config.model.impl` names cannot run on the devices.

        The training steps do it when they are made; a run does it before it writes a file.
        """
        if isinstance(self.model, GPT):
            _check_backend(self.model.config, self.parallel.mesh.devices.flat[0].platform)

    @property
    def parameters(self) -> int:
        """How many parameters the model has."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract_state.params))

    @functools.cached_property
    def steps_per_call(self) -> int:
        """The most updates of one call of the devices."""
        return states.steps_per_call(self.config, self.parallel.mesh.devices.flat[0].platform, self.parameters)

    def train_steps(self, state, batches: Sequence[Batch], fixed=None, room: int = 1) -> tuple:
        """(The state after a step on each of some batches, metrics float32 `[room]`, set for each); consumes the state.

        With an axis of runs in front of the state, batches and `fixed`, several runs are trained together: see
        `state.together`. `room` is the number of batches that the program has room for.
        """
        fixed = self.fixed(self.config) if fixed is None else fixed
        runs = np.ndim(fixed[0])

        def stacked(*of_steps):
            stack = np.zeros((room, *of_steps[0].shape), of_steps[0].dtype)
            stack[: len(of_steps)] = of_steps
            return stack

        placed = self.parallel.place_batch(jax.tree.map(stacked, *batches), 1 + runs)
        count = self.parallel.replicate(np.int32(len(batches)))
        self._wait_for("train")
        compiled = self._first._steps_together if runs else self._first._steps
        with self.parallel.transfer_guard():
            return compiled(state, placed, fixed, count)

    def compile_ahead(self, runs: int | None = None) -> None:
        """Begin to compile the steps of training and evaluation in threads, into JAX's cache on disk.

        `train_steps` and `evaluate` wait for theirs. Without that cache, and over several processes, which must
        compile in one order, nothing begins.
        """
        if not jax.config.jax_compilation_cache_dir or jax.process_count() > 1:
            return

        def into_cache(lower):
            with precision.products(self.config.precision):  # a context of one thread
                lower().compile()

        train = functools.partial(self.lower, runs, self.steps_per_call)
        evaluation = functools.partial(self.lower_eval, runs)
        pool = ThreadPoolExecutor(2, "attnlab-compile")
        self._ahead = {"train": pool.submit(into_cache, train), "eval": pool.submit(into_cache, evaluation)}
        pool.shutdown(wait=False)

    def _wait_for(self, name: str) -> None:
        if name in self._ahead:
            self._ahead.pop(name).exception()  # the call itself raises it

    def fixed(self, *configs: RunConfig) -> tuple:
        """Seed and learning rates, on the devices: arguments of the program, which runs that differ in them share.

        Of several configs, each with an axis of runs.
        """
        of_runs = [_fixed(config) for config in configs]
        values = jax.tree.map(lambda *x: np.stack(x), *of_runs) if len(of_runs) > 1 else of_runs[0]
        return self.parallel.replicate(values)

    @functools.cached_property
    def _steps(self) -> Callable:
        """The training steps of (state, placed batches, `fixed`, their number)."""
        shardings = self.parallel.shardings(self.abstract_state)
        return self.parallel.compile_train(self._training(lambda step: step), shardings, self._fuses_sums)

    @functools.cached_property
    def _steps_together(self) -> Callable:
        """The same of several runs."""
        steps, replicated = self._training(states.together), self.parallel.replicated
        return self.parallel.compile_train(steps, replicated, self._fuses_sums)

    def _training(self, of_runs: Callable) -> Callable:
        self.check_backend()
        config, model, optimizer_at = self.config, self._over_tokens, self._optimizer_at
        accumulation, ema = config.optimizer.accumulation, config.optimizer.ema

        def steps(state, batches, fixed, count, axis_name=None):
            def step(state, batch, fixed):
                seed, at = fixed
                optimizer = optimizer_at(at=at)
                return states.train_step(model, optimizer, seed, accumulation, state, batch, axis_name, ema=ema)

            return states.repeated(of_runs(step), state, batches, fixed, count)

        return steps

    @property
    def eval_step(self) -> Callable:
        """The compiled `state.eval_step`: (params, placed batch) → sums over the global batch, float32 `[2 or 3]`."""
        return self._first._eval_step

    @functools.cached_property
    def _eval_step(self) -> Callable:
        step = functools.partial(states.eval_step, self._over_tokens)
        return self.parallel.compile_eval(step, self._fuses_sums)

    @functools.cached_property
    def _eval_together(self) -> Callable:
        """The same of several runs on one batch: `[runs, 2 or 3]`."""

        def step(params, batch, axis_name=None):
            return jax.vmap(lambda params: states.eval_step(self._over_tokens, params, batch, axis_name))(params)

        return self.parallel.compile_eval(step, self._fuses_sums)

    def create_state(self, params=None, seed: int | None = None) -> TrainState:
        """The state before the first step, on the devices, with `params`, or drawn from a `seed`."""
        if params is None:
            return self.parallel.create_state(self._create, jnp.int32(self.config.seed if seed is None else seed))
        like = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        params, step = jax.device_put((params, np.int32(0)), (like.params, like.step))
        opt_state = jax.jit(self.optimizer.init, out_shardings=like.opt_state)(params)
        average = jax.tree.map(jnp.copy, params) if self.config.optimizer.ema else None
        return TrainState(step, params, opt_state, average)

    def evaluate(
        self, params, batches: Batches, stop: Callable[[], bool] = lambda: False, together: bool = False
    ) -> list[dict[str, float]] | None:
        """Mean "loss" over held-out text in nats per token, or over the answers of a task, with the "accuracy".

        Of each run whose parameters are along the first axis, if they are several `together`; None when `stop()`
        returns True before its end.
        """
        self._wait_for("eval")
        sums, step = 0, self._first._eval_together if together else self.eval_step
        for batch in prefetched(batches):
            if stop():
                return None
            sums = sums + np.float64(jax.device_get(step(params, self.parallel.place_batch(batch))))
        return [_means(*of_run) for of_run in np.atleast_2d(sums)]

    def forget_init(self) -> None:
        """Free the program that draws parameters, which is large."""
        self._first._init.clear_cache()

    def trace(self) -> jax.stages.Traced:
        """The training step traced for shapes: `.jaxpr` lists what it computes, and nothing is compiled."""
        return self._first._steps.trace(*self._shapes())

    def lower(self, runs: int | None = None, room: int = 1) -> jax.stages.Lowered:
        """The training steps lowered from shapes, perhaps of `runs` together: `.compile()` tells their memory."""
        first = self._first
        return (first._steps if runs is None else first._steps_together).lower(*self._shapes(runs, room))

    def _shapes(self, runs: int | None = None, room: int = 1) -> tuple:
        """The arguments of `_steps`, or `_steps_together`."""
        outer = () if runs is None else (runs,)

        def replicated(x):
            return jax.ShapeDtypeStruct((*outer, *x.shape), x.dtype, sharding=self.parallel.replicated)

        state, fixed = self.abstract_state, jax.tree.map(replicated, _fixed(self.config))
        if runs is not None:
            state = jax.tree.map(replicated, state), replicated(np.bool_())
        count = jax.ShapeDtypeStruct((), np.int32, sharding=self.parallel.replicated)
        return state, self._abstract_batch((room, *outer)), fixed, count

    def lower_eval(self, runs: int | None = None) -> jax.stages.Lowered:
        """The evaluation of one batch, lowered from shapes, perhaps of `runs` together."""
        state, step = self._shapes(runs)[0], self.eval_step if runs is None else self._first._eval_together
        size = self.config.batch_size // self.config.optimizer.accumulation
        return step.lower((state if runs is None else state[0]).params, self._abstract_batch(batch_size=size))

    def _abstract_batch(self, outer: tuple[int, ...] = (), batch_size: int | None = None) -> Batch:
        config = self.config
        context, task = config.model.context, named.parse(config.data.name)
        has = {"segments": config.data.packing == "documents", "answers": task.answers_of(context) if task else 0}
        return self.parallel.abstract_batch(batch_size or config.batch_size, context, **has, outer=outer)

    def _create(self, seed) -> TrainState:
        average = bool(self.config.optimizer.ema)
        return states.create(self.model, self.optimizer, seed, self._first._init, self.scan, average)


def _without_arguments(config: RunConfig) -> RunConfig:
    """The config with defaults for all fields that no program depends on."""
    groups = {name: type(getattr(config, name))() for name in ("checkpoint", "eval", "log", "sample")}
    peaks = {name: getattr(Optimizer, name) for name in optimizers.Peaks._fields}
    optimizer = dataclasses.replace(config.optimizer, **peaks)
    return dataclasses.replace(config, seed=0, init_from="", optimizer=optimizer, **groups)


def _hashable(value):
    """A value, or its identity where it has no hash, as a mask of arrays; the experiment keeps it alive."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _gains_by_fused_sums(layer: LayerConfig) -> bool:
    """Whether a layer trains over 3 % faster with fused sums; jaxlib 0.10.2 computes some of them wrongly.

    Without them a step of the quickstart takes 1.05 to 1.12 of its time with attention, 1.03 to 1.18 with `gru`; with
    recurrences and stick-breaking attention 0.89 to 1.03 (two cores of an Intel Xeon, float32 and bfloat16).
    """
    if type(layer) is GRUConfig:
        return True
    return type(layer) in (AttentionConfig, LocalConfig) and layer.mask is None and layer.score_mod is None


def _fixed(config: RunConfig) -> tuple:
    return np.int32(config.seed), jax.tree.map(np.float32, optimizers.peaks(config.optimizer))


def _means(loss: float, count: float, right: float | None = None) -> dict[str, float]:
    return {"loss": float(loss / count)} | ({} if right is None else {"accuracy": float(right / count)})


class _OverTokens(nn.Module):
    """A user's model, whose logits may be padded, over the tokens of the tokenizer."""

    model: nn.Module
    vocab_size: int

    def apply(self, *args, **options):
        return self.model.apply(*args, **options)[..., : self.vocab_size]


@functools.lru_cache(64)
def _check_backend(config: ModelConfig, platform: str) -> None:
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
