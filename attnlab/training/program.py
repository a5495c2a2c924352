"""The program of a run: a model, its optimizer, its devices, and the compiled steps of training and evaluation."""

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
from attnlab.training import overrides, precision
from attnlab.training import parallel as parallel_lib
from attnlab.training import state as states
from attnlab.training.population import Population
from attnlab.training.state import TrainState

ONE = Population()
_PROGRAMS: contextvars.ContextVar[dict | None] = contextvars.ContextVar("programs", default=None)


@contextlib.contextmanager
def shared_programs(programs: dict | None = None) -> Iterator[None]:
    """Context or decorator in which runs with the same programs trace and compile them once.

    A nested context shares the outer context's programs; pass one dict `programs` to several contexts to share it.
    """
    shared = _PROGRAMS.get() if programs is None else programs
    token = _PROGRAMS.set({} if shared is None else shared)
    try:
        yield
    finally:
        _PROGRAMS.reset(token)


class TrainProgram:
    """Everything that a run computes with, from a `RunPlan`'s config. Nothing is compiled before it is needed.

    For `model` and `optimizer` see `attnlab.train.train`, for `extensions` see `optimizer.learning_rate`.

    Attributes:
      config: the argument.
      scan: whether the layers of the state are stacked.
      learning_rate: (peak, updates done) → rate; None for a user's optimizer.
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
        self._ahead, self._functions = {}, {}
        platform = self.parallel.mesh.devices.flat[0].platform
        if model is None:
            self.model = GPT(config.over_tokens(vocab_size))
        else:
            _check_model(model, vocab_size, config.data.packing)
            self.model = model.over_tokens(vocab_size) if isinstance(model, GPT) else model
        self._over_tokens = self.model if isinstance(self.model, GPT) else _OverTokens(self.model, vocab_size)
        # Only in programs without user code, whose gradients tests/test_gradients.py compares with float64.
        is_builtin = model is None and optimizer is None
        self._fuses_sums = is_builtin and all(map(_gains_by_fused_sums, self.model.config.used))
        # A user's optimizer may select parameters by layer, so layers are stacked only on request.
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
        self._first = self  # the instance whose compiled programs are used
        if (programs := _PROGRAMS.get()) is not None:
            user_code = map(_hashable, (model, optimizer))
            config = _without_arguments(config), overrides.version(config)
            key = *config, self.parallel, vocab_size, repr(extensions), *user_code
            self._first = programs.setdefault(key, self)

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, types and shardings of the state; nothing is allocated."""
        shapes = jax.eval_shape(self._create, jax.ShapeDtypeStruct((), jnp.int32))
        shardings = self.parallel.shardings(shapes)
        return jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, shardings)

    def check_backend(self) -> None:
        """Raise UserError if the backend in `config.model.impl` cannot run on the devices.

        The training steps check this when they are created; a run checks it before it writes a file.
        """
        if isinstance(self.model, GPT):
            _check_backend(self.model.config, self.parallel.mesh.devices.flat[0].platform)

    @property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract_state.params))

    @functools.cached_property
    def steps_per_call(self) -> int:
        """Maximum number of updates in one dispatch to the devices."""
        return states.steps_per_call(self.config, self.parallel.mesh.devices.flat[0].platform, self.parameters)

    def train_steps(
        self, state, batches: Sequence[Batch], per_run=None, max_steps: int = 1, population: Population = ONE
    ) -> tuple:
        """Take a step on each batch; return (state, metrics), where entry i of a metric `[max_steps]` is from batch i.

        The old state is donated. `max_steps` is the largest number of batches that the program takes. With several
        runs, state, batches and metrics have an axis of runs: see `Population`.
        """
        per_run = self.per_run([self.config]) if per_run is None else per_run

        def stacked(*arrays):
            stack = np.zeros((max_steps, *arrays[0].shape), arrays[0].dtype)
            stack[: len(arrays)] = arrays
            return stack

        placed = self.parallel.place_batch(jax.tree.map(stacked, *batches), 1 + len(population.axes))
        count = self.parallel.replicate(np.int32(len(batches)))
        self._wait_for("train")
        steps = self.steps(population)  # before the guard, as this may create constants, such as the slopes of ALiBi
        with self.parallel.transfer_guard():
            return steps(state, placed, per_run, count)

    def compile_ahead(self, population: Population = ONE) -> None:
        """Start compiling the training and evaluation steps in threads, into JAX's cache on disk.

        `train_steps` and `evaluate` wait for their program. Does nothing without that cache, or in a distributed run,
        where all processes must compile in the same order.
        """
        if not jax.config.jax_compilation_cache_dir or jax.process_count() > 1:
            return

        def into_cache(lower):
            with precision.products(self.config.precision):  # this context is local to a thread
                lower().compile()

        train = functools.partial(self.lower, population, self.steps_per_call)
        evaluation = functools.partial(self.lower_eval, population)
        pool = ThreadPoolExecutor(2, "attnlab-compile")
        self._ahead = {"train": pool.submit(into_cache, train), "eval": pool.submit(into_cache, evaluation)}
        pool.shutdown(wait=False)

    def _wait_for(self, name: str) -> None:
        if name in self._ahead:
            self._ahead.pop(name).exception()  # the call itself will raise it again

    def per_run(self, configs: Sequence[RunConfig]) -> tuple:
        """Seed and peak learning rates of each run, on the devices: as arguments, so that runs can share a program."""
        return self.parallel.replicate(Population(len(configs)).values(list(map(_per_run, configs))))

    def steps(self, population: Population = ONE) -> Callable:
        """The compiled training steps: (state, placed batches, `per_run`, number of batches) → (state, metrics)."""
        return self._first._compiled("train", population, self._compile_steps)

    def eval_step(self, population: Population = ONE) -> Callable:
        """The compiled `state.eval_step`: (params, placed batch) → sums over the global batch, float32 `[2 or 3]`."""
        return self._first._compiled("eval", population, self._compile_eval)

    def _compiled(self, what: str, population: Population, compile_: Callable) -> Callable:
        """The compiled function `what`: one for a single run, and another for several runs, whatever their number."""
        key = what, population.n == 1
        if key not in self._functions:
            self._functions[key] = compile_(population)
        return self._functions[key]

    def _compile_steps(self, population: Population) -> Callable:
        self.check_backend()
        config, model, optimizer_at = self.config, self._over_tokens, self._optimizer_at
        accumulation, ema = config.optimizer.accumulation, config.optimizer.ema

        def steps(state, batches, per_run, count, axis_name=None):
            def step(state, batch, per_run):
                seed, at = per_run
                optimizer = optimizer_at(at=at)
                return states.train_step(model, optimizer, seed, accumulation, state, batch, axis_name, ema=ema)

            return states.repeated(population.step(step), state, batches, per_run, count)

        is_one, parallel = population.n == 1, self.parallel
        shardings = parallel.shardings(self.abstract_state) if is_one else parallel.replicated
        return parallel.compile_train(steps, shardings, self._fuses_sums)

    def _compile_eval(self, population: Population) -> Callable:
        model = self._over_tokens

        def step(params, batch, axis_name=None):
            return jax.vmap(lambda params: states.eval_step(model, params, batch, axis_name))(params)

        step = functools.partial(states.eval_step, model) if population.n == 1 else step
        return self.parallel.compile_eval(step, self._fuses_sums)

    def create_state(self, params=None, seed: int | None = None) -> TrainState:
        """The state before the first step, on the devices, with `params` or with parameters drawn from `seed`."""
        if params is None:
            return self.parallel.create_state(self._create, jnp.int32(self.config.seed if seed is None else seed))
        like = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        params, step = jax.device_put((params, np.int32(0)), (like.params, like.step))
        opt_state = jax.jit(self.optimizer.init, out_shardings=like.opt_state)(params)
        average = jax.tree.map(jnp.copy, params) if self.config.optimizer.ema else None
        return TrainState(step, params, opt_state, average)

    def evaluate(
        self,
        params,
        batches: Batches,
        stop: Callable[[], bool] = lambda: False,
        population: Population = ONE,
    ) -> list[dict[str, float]] | None:
        """For each run, the mean "loss" in nats over the tokens of held-out text; for a task, over its answers, and
        their "accuracy". None if `stop()` returns True before the end."""
        self._wait_for("eval")
        sums, step = 0, self.eval_step(population)
        for batch in prefetched(batches):
            if stop():
                return None
            sums = sums + np.float64(jax.device_get(step(params, self.parallel.place_batch(batch))))
        return [_means(*run_sums) for run_sums in np.atleast_2d(sums)]

    def forget_init(self) -> None:
        """Free the program that draws parameters, which is large."""
        self._first._init.clear_cache()

    def trace(self) -> jax.stages.Traced:
        """The training step traced for shapes, without compiling it; `.jaxpr` lists its operations."""
        return self.steps().trace(*self._shapes(ONE, 1))

    def lower(self, population: Population = ONE, max_steps: int = 1) -> jax.stages.Lowered:
        """The training steps lowered from shapes; `.compile()` reports their memory."""
        return self.steps(population).lower(*self._shapes(population, max_steps))

    def lower_eval(self, population: Population = ONE) -> jax.stages.Lowered:
        """The evaluation of one batch, lowered from shapes."""
        size = self.config.batch_size // self.config.optimizer.accumulation
        params = population.states(self._abstract(population)).params
        return self.eval_step(population).lower(params, self._abstract_batch(batch_size=size))

    def _abstract(self, population: Population):
        """The shapes and shardings of a population's state."""
        if population.n == 1:
            return self.abstract_state
        alive = jax.ShapeDtypeStruct((), np.bool_)
        return population.shapes((self.abstract_state, alive), self.parallel.replicated)

    def _shapes(self, population: Population, max_steps: int) -> tuple:
        """Shapes of the arguments of `steps`."""
        per_run = population.shapes(_per_run(self.config), self.parallel.replicated)
        count = jax.ShapeDtypeStruct((), np.int32, sharding=self.parallel.replicated)
        batches = self._abstract_batch((max_steps, *population.axes))
        return self._abstract(population), batches, per_run, count

    def _abstract_batch(self, outer: tuple[int, ...] = (), batch_size: int | None = None) -> Batch:
        config = self.config
        context, task = config.model.context, named.parse(config.data.name)
        has = {"segments": config.data.packing == "documents", "answers": task.answers_of(context) if task else 0}
        return self.parallel.abstract_batch(batch_size or config.batch_size, context, **has, outer=outer)

    def _create(self, seed) -> TrainState:
        average = bool(self.config.optimizer.ema)
        return states.create(self.model, self.optimizer, seed, self._first._init, self.scan, average)


def _without_arguments(config: RunConfig) -> RunConfig:
    """The config with defaults in the fields that are arguments of programs, or on which no program depends."""
    groups = {name: type(getattr(config, name))() for name in ("checkpoint", "eval", "log", "sample")}
    peaks = {name: getattr(Optimizer, name) for name in optimizers.Peaks._fields}
    optimizer = dataclasses.replace(config.optimizer, **peaks)
    return dataclasses.replace(config, seed=0, init_from="", optimizer=optimizer, **groups)


def _hashable(value):
    """A model or optimizer, or its `id` if it has no hash; the program keeps the object alive."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _gains_by_fused_sums(layer: LayerConfig) -> bool:
    """Whether a layer trains over 3 % faster with fused sums, which others avoid because of a bug in jaxlib 0.10.2.

    Without fused sums, a step of the quickstart takes 1.05 to 1.12 times as long with attention and 1.03 to 1.18 with
    `gru`, but 0.89 to 1.03 with recurrences and stick-breaking attention (two Intel Xeon cores, float32 and bfloat16).
    """
    if type(layer) is GRUConfig:
        return True
    return type(layer) in (AttentionConfig, LocalConfig) and layer.mask is None and layer.score_mod is None


def _per_run(config: RunConfig) -> tuple:
    return np.int32(config.seed), jax.tree.map(np.float32, optimizers.peaks(config.optimizer))


def _means(loss: float, count: float, right: float | None = None) -> dict[str, float]:
    return {"loss": float(loss / count)} | ({} if right is None else {"accuracy": float(right / count)})


class _OverTokens(nn.Module):
    """A user's model, whose logits may be padded: they are cut to the tokens of the tokenizer."""

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
    """The backend of an attention layer on a platform for q, k and v; `options` are other arguments of `explain`."""
    mods = as_tuple(layer.score_mod)
    if isinstance(layer, MultiHeadAttention):
        mods = (*mods, Forget(jnp.zeros(q.shape[:-1]))) if layer.forget_gate else mods
        options |= {"sinks": jnp.zeros(layer.num_heads)} if layer.sinks else {}
    return explain(q, k, v, layer.mask, score_mod=mods, impl=layer.impl, platform=platform, **options)


def _check_model(model: nn.Module, vocab_size: int, packing: str) -> None:
    tokens = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    if packing == "documents" and "segments" not in inspect.signature(model.__call__).parameters:
        raise UserError(
            f"config.data.packing = 'documents', but {type(model).__name__} takes no segments=: add it to __call__ "
            "(int [B, T], the index of each token's document), or use packing=stream"
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
        raise UserError(f"{type(model).__name__} has the collections {', '.join(variables)}: expected params only")
    if logits.ndim != 3 or logits.shape[:2] != (1, 2) or logits.shape[2] < vocab_size:
        raise UserError(
            f"{type(model).__name__} returns {list(logits.shape)} for tokens [1, 2]: expected logits [1, 2, V], V at "
            f"least the tokenizer's {vocab_size}"
        )
