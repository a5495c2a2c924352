"""Plan a run: compile its training and evaluation steps for a topology, and check that they fit its memory."""

import contextlib
import dataclasses
import math
from collections.abc import Callable

import jax
from ml_collections import ConfigDict

from attnlab.config import ParallelFields, RunConfig, completed
from attnlab.nn import GPT
from attnlab.ops.context import context_parallel
from attnlab.planning import programs
from attnlab.planning.programs import Program
from attnlab.planning.topologies import Topology
from attnlab.support.errors import UserError
from attnlab.training import flops, precision, run
from attnlab.training import parallel as parallel_lib
from attnlab.training.program import TrainProgram, backend_of

_GIB = 2**30
_CHARACTERS = 128  # the vocabulary assumed for a text whose characters have not been counted


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run as compiled for a topology."""

    name: str
    config: RunConfig  # as compiled: `pmap` is planned as a mesh
    topology: Topology
    mesh: dict[str, int]
    vocab_size: int
    parameters: int
    training: Program
    evaluation: Program
    flops: float  # per training step and device, without recomputation
    attention: dict[str, str]  # the backend of each layer in training, or its kind if it has no attention
    attention_rejected: dict[str, str]  # the reason for rejecting each other backend
    optimizer_bytes: int  # the part of the training state that evaluation does not use, on a device
    notes: tuple[str, ...]

    @property
    def devices(self) -> int:
        """Number of devices in the mesh."""
        return math.prod(self.mesh.values())

    @property
    def fits(self) -> bool | None:
        """Whether training fits, and also evaluation beside the optimizer's state; None if unknown."""
        if self.training.refusal or self.evaluation.refusal:
            return False
        if self.topology.usable_gib is None:
            return None
        return max(self.training.peak, self.evaluation.peak + self.optimizer_bytes) <= self.topology.usable_gib * _GIB

    @property
    def floor(self) -> tuple[float, float] | None:
        """Lower bounds on a training step's time in ms, from its FLOPs and from the bytes moved; None if unknown."""
        if self.topology.tflops is None or self.training.refusal:
            return None
        return self.flops / self.topology.tflops / 1e9, self.training.moved / self.topology.bandwidth / 1e9

    def as_dict(self) -> dict:
        """Return a dict for JSON; sizes are in GiB per device."""
        return {
            "config": self.name,
            "topology": self.topology.name,
            "devices": self.devices,
            "mesh": self.mesh,
            "vocab_size": self.vocab_size,
            "parameters": self.parameters,
            "device_gib": self.topology.usable_gib,
            "fits": self.fits,
            "training": _sizes(self.training),
            "evaluation": _sizes(self.evaluation),
            "launches": self.training.launches,
            "moved_bytes": self.training.moved,
            "flops": self.flops,
            "floor_ms": self.floor,
            "collectives": self.training.collectives,
            "unknown_loops": self.training.unknown_loops,
            "custom_calls": self.training.custom_calls,
            "kernels": self.training.kernels,
            "attention": self.attention,
            "attention_rejected": self.attention_rejected,
            "notes": list(self.notes),
        }


def _sizes(step: Program) -> dict:
    sizes = {"arguments_gib": step.arguments, "temporaries_gib": step.temporaries, "peak_gib": step.peak}
    sizes = {name: None if size is None else size / _GIB for name, size in sizes.items()}
    return sizes | {"compile_seconds": round(step.compile_seconds, 2)}


def plan(config: ConfigDict | RunConfig, topology: Topology, vocab_size: int | None = None, name: str = "") -> Plan:
    """Compile a run for a topology; nothing runs, and no text is read."""
    config, notes = _as_mesh(completed(config), topology)
    config, vocab_size, assumed = vocabulary(config, vocab_size, topology.devices[0])
    notes += assumed
    parallel = parallel_lib.from_config(config, devices=topology.devices)
    program = TrainProgram(config, vocab_size, parallel=parallel)
    with precision.products(config.precision):
        training = _compiled("training", program.lower, parallel, topology)
        evaluation = _compiled("evaluation", program.lower_eval, parallel, topology)
    attention, rejected = attention_of(program.model, topology, config.batch_size, parallel.mesh)
    state, loops, length = program.abstract_state, training.unknown_loops, config.model.context
    refusals = {"training": training.refusal, "evaluation": evaluation.refusal}
    notes += [f"the compiler refuses the {step} step: {why}" for step, why in refusals.items() if why]
    notes += [f"{loops} loops of unknown length: their content is counted once"] if loops else []
    return Plan(
        name=name,
        config=program.config,
        topology=topology,
        mesh=dict(parallel.mesh.shape),
        vocab_size=program.model.config.vocab_size,
        parameters=program.parameters,
        training=training,
        evaluation=evaluation,
        flops=_flops_per_token(program.model, length) * config.batch_size * length / parallel.mesh.size,
        attention=attention,
        attention_rejected=rejected,
        optimizer_bytes=_shard_bytes((state.opt_state, state.average)),
        notes=tuple(notes),
    )


def vocabulary(
    config: RunConfig, vocab_size: int | None = None, device: jax.Device | None = None
) -> tuple[RunConfig, int, list[str]]:
    """Return the run's config on a device, its vocabulary size, and notes."""
    plan = run.resolve(config, device=device)
    config, tokenizer = plan.config, plan.tokenizer
    if vocab_size or tokenizer is not None:
        return config, vocab_size or tokenizer.vocab_size, []
    kind, rows = config.data.tokenizer, config.vocab_size
    size = {"byte": 256, "char": _CHARACTERS}.get(kind, config.data.vocab_size)
    if kind == "byte" or rows:
        return config, min(size, rows or size), []
    return config, size, [f"assumed {size} tokens in the vocabulary, which depends on the text: set --vocab_size=N"]


def attention_of(
    model: GPT, topology: Topology, batch: int, mesh: jax.sharding.Mesh | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """Return each layer's attention backend in training on a topology, and the reasons for rejecting the others.

    A layer without attention has its kind instead of a backend.
    """
    config, answers = model.config, {}
    used = config.used
    modules = {n: layer.make(config) for n, layer in enumerate(used) if layer.module.operator == "attention"}
    operands = {n: module.operands(batch, config.context, config.width) for n, module in modules.items()}

    def ask(operands, keys):
        for n, module in modules.items():
            dropped = {"dropout_rate": module.dropout_rate, "dropout_key": keys} if module.dropout_rate else {}
            answers[n] = backend_of(module, topology.platform, *operands[n], **dropped)

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    with contextlib.ExitStack() as splits:
        if mesh is not None and mesh.shape[parallel_lib.CONTEXT] > 1:
            splits.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
            splits.enter_context(context_parallel(parallel_lib.CONTEXT))
        jax.eval_shape(ask, operands, keys)
    backends = {n: f"{answer.backend} {answer.split}".strip() for n, answer in answers.items()}
    layers = [config.layer(number) for number in range(config.num_layers)]
    rejected = {name: why for answer in answers.values() for name, why in answer.rejected.items()}
    for answer in answers.values():
        rejected.pop(answer.backend, None)
    return {f"block_{n}": backends.get(used.index(x), x.kind) for n, x in enumerate(layers)}, rejected


def _as_mesh(config: RunConfig, topology: Topology) -> tuple[RunConfig, list[str]]:
    """Replace a strategy that cannot be compiled for devices that are not attached, and note the change."""
    if config.parallel.strategy == "mesh" or topology.name == "here":
        return config, []
    config = dataclasses.replace(config, parallel=ParallelFields("mesh", config.parallel.timeout))
    return config, ["pmap needs attached devices: planned with config.parallel.strategy=mesh"]


def _compiled(step: str, lower: Callable, parallel: parallel_lib.Parallel, topology: Topology) -> Program:
    """Compile the step that `lower()` lowers."""
    if parallel.strategy == "mesh":
        context = jax.sharding.use_abstract_mesh(parallel.mesh.abstract_mesh)  # splash asks it which TPU to compile for
    else:
        context = contextlib.nullcontext()
    try:
        with context:
            lowered = lower()
        return programs.compile(lowered)
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
        raise UserError(f"the {step} step does not compile for {topology.name}: {reason}") from error


def _flops_per_token(model: GPT, length: int) -> float:
    """Training FLOPs per token, equal for all backends; counted with "auto", because others may not run here."""
    layers = (dataclasses.replace(x, impl="auto") if hasattr(x, "impl") else x for x in model.config.layers)
    return flops.per_token(model.replace(layers=tuple(layers)), length)


def _shard_bytes(tree) -> int:
    """Bytes of one device's shards of abstract arrays."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
