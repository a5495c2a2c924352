"""Plan a run: compile its training, evaluation and decode steps for a topology, and compare them with its memory."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from attnlab.generation import loop
from attnlab.generation.drawing import Draw
from attnlab.nn import GPT, unstack_layers
from attnlab.nn.kinds import kind_of, kinds_of
from attnlab.ops.context import context_parallel
from attnlab.planning import programs
from attnlab.planning.programs import Program
from attnlab.planning.topologies import Topology
from attnlab.support.errors import UserError
from attnlab.training import flops, run
from attnlab.training import parallel as parallel_lib
from attnlab.training.experiment import Experiment, backend_of

_GIB = 2**30
_CHARACTERS = 128  # the vocabulary that is assumed for a text whose characters nobody has counted


@dataclasses.dataclass(frozen=True)
class Plan:
    """A run as compiled for a topology."""

    name: str
    config: ConfigDict  # as compiled: `pmap` is planned as a mesh
    topology: Topology
    mesh: dict[str, int]
    vocab_size: int
    parameters: int
    scan: bool  # whether the layers are one loop
    training: Program
    evaluation: Program
    decoding: Program  # continues one text on one device, with a full cache
    attention: dict[str, str]  # the backend of each layer in training, or the kind of layers without attention
    attention_rejected: dict[str, str]  # the reason against each other backend
    flops_per_step: float
    state_bytes: int  # parameters and optimizer state on one device
    optimizer_bytes: int
    notes: tuple[str, ...]

    @property
    def devices(self) -> int:
        """How many devices the mesh has."""
        return math.prod(self.mesh.values())

    @property
    def device_bytes(self) -> int | None:
        """Memory that a program may use on one device; None where it is not known."""
        return _limit(self.topology, self.training)

    @property
    def fits(self) -> bool | None:
        """Whether training and evaluation fit, the latter beside the optimizer's state; None where nothing tells."""
        verdicts = (
            _fits(self.topology, self.training),
            _fits(self.topology, self.evaluation, beside=self.optimizer_bytes),
        )
        return False if False in verdicts else None if None in verdicts else True

    @property
    def least_seconds_flops(self) -> float | None:
        """Bound from below on an update's time: its operations at the peak of all devices for bfloat16."""
        peak = self.topology.chip.peak_flops
        return None if peak is None else self.flops_per_step / (self.devices * peak)

    @property
    def least_seconds_memory(self) -> float | None:
        """Bound from below on an update's time: its state, read and written once, at the bandwidth of the memory."""
        bandwidth = self.topology.chip.bandwidth
        return None if bandwidth is None else 2 * self.state_bytes / bandwidth

    def as_dict(self) -> dict:
        """A flat dict for JSON; sizes in GiB of one device, bounds and compile times in seconds."""
        config = self.config
        return {
            "config": self.name,
            "topology": self.topology.name,
            "device_kind": self.topology.chip.kind,
            "devices": self.devices,
            "mesh": self.mesh,
            "parameters": self.parameters,
            "vocab_size": self.vocab_size,
            "batch_size": config.batch_size,
            "accumulation": config.optimizer.accumulation,
            "context": config.model.context,
            "precision": config.precision,
            "remat": config.model.remat,
            "scan": self.scan,
            "device_gib": _gib(self.device_bytes),
            "fits": self.fits,
            **_sizes("", self.training),
            "code_gib": _gib(self.training.code),
            "peak_from": self.training.peak_from,
            "flops_per_step": self.flops_per_step,
            "least_seconds_flops": self.least_seconds_flops,
            "least_seconds_memory": self.least_seconds_memory,
            "collectives": self.training.collectives,
            "unknown_loops": self.training.unknown_loops,
            "custom_calls": self.training.custom_calls,
            "kernels": self.training.kernels,
            "attention": self.attention,
            "attention_rejected": self.attention_rejected,
            **_sizes("eval_", self.evaluation),
            **_sizes("decode_", self.decoding),
            "notes": list(self.notes),
        }


class Suggestion(NamedTuple):
    """Changes with which a run fits, and the peak of its training step then."""

    overrides: dict  # {"model.remat": "block"} is --config.model.remat=block
    peak_gib: float


def plan(config: ConfigDict, topology: Topology, vocab_size: int | None = None, name: str = "") -> Plan:
    """Compile a run for a topology; nothing runs, and no text is read."""
    config, notes = _as_mesh(config, topology)
    config, vocab_size, note = vocabulary(config, vocab_size, topology.devices[0])
    experiment = _experiment(config, topology, vocab_size)
    training = _compiled(experiment, topology, "training")
    evaluation = _compiled(experiment, topology, "evaluation")
    decoding = _compiled(experiment, topology, "decode")
    state = experiment.abstract_state
    attention, rejected = attention_of(experiment.model, topology, config.batch_size, experiment.parallel.mesh)
    tokens = config.batch_size * config.model.context
    steps = (training, evaluation, decoding)
    return Plan(
        name=name,
        config=experiment.config,
        topology=topology,
        mesh=dict(experiment.parallel.mesh.shape),
        vocab_size=experiment.model.vocab_size,
        parameters=experiment.parameters,
        scan=experiment.scan,
        training=training,
        evaluation=evaluation,
        decoding=decoding,
        attention=attention,
        attention_rejected=rejected,
        flops_per_step=flops.per_token(experiment.model, config.model.context) * tokens,
        state_bytes=_shard_bytes(state),
        optimizer_bytes=_optimizer_bytes(experiment),
        notes=(*notes, *note, *_remarks(topology, steps, set(attention.values()))),
    )


def suggest(config: ConfigDict, topology: Topology, planned: Plan) -> Iterator[Suggestion]:
    """Changes with which a run that does not fit would, the cheapest first; each is compiled."""
    if planned.fits is not False:
        return
    config, _ = _as_mesh(config, topology)
    config, vocab_size, _ = vocabulary(config, planned.vocab_size, topology.devices[0])
    for ladder in _changes(config, planned):
        for overrides in ladder:
            peak = _peak_with(config, overrides, topology, vocab_size)
            if peak is not None:
                yield Suggestion(overrides, peak / _GIB)
                break  # a larger change of the same kind costs more


def _changes(config: ConfigDict, planned: Plan) -> list[list[dict]]:
    """Changes to try; of each list, until one fits."""
    remat = [{"model.remat": "block"}] if config.model.remat != "block" else []
    splits = planned.mesh[parallel_lib.DATA] * planned.mesh[parallel_lib.FSDP]
    share = config.batch_size // splits  # examples of a device
    factors = [config.optimizer.accumulation * 2**n for n in range(1, 1 + share.bit_length())]
    accumulation = [{"optimizer.accumulation": factor} for factor in factors if share % factor == 0]
    fsdp = [{"parallel.mesh.fsdp": splits}] if planned.mesh[parallel_lib.FSDP] < splits else []
    if config.parallel.mesh.data != -1:
        fsdp = [{"parallel.mesh.data": 1, **change} for change in fsdp]
    half = [{"batch_size": config.batch_size // 2}] if config.batch_size > 1 else []
    both = [{**one, **two} for one in remat for two in accumulation]
    return [remat, accumulation, fsdp, half, both]


def _peak_with(config: ConfigDict, overrides: dict, topology: Topology, vocab_size: int) -> int | None:
    """Peak of the training step with other values of some fields; None if the run would not fit or not be valid."""
    changed = config.copy_and_resolve_references()
    changed.update_from_flattened_dict(overrides)
    try:
        experiment = _experiment(changed, topology, vocab_size)
        training = _compiled(experiment, topology, "training")
        if not _fits(topology, training):
            return None
        evaluation = _compiled(experiment, topology, "evaluation")
    except UserError:
        return None
    beside = _optimizer_bytes(experiment)
    return training.peak if _fits(topology, evaluation, beside) else None


def vocabulary(
    config: ConfigDict, vocab_size: int | None = None, device: jax.Device | None = None
) -> tuple[ConfigDict, int, list[str]]:
    """The config of the run on a device, the size of its vocabulary, and notes."""
    plan = run.resolve(config, device=device)
    config, tokenizer = ConfigDict(plan.config), plan.tokenizer
    if vocab_size or tokenizer is not None:
        return config, vocab_size or tokenizer.vocab_size, []
    kind, most, rows = config.data.tokenizer, config.data.vocab_size, config.model.vocab_size
    if kind == "byte" or rows:
        return config, min({"byte": 256, "char": _CHARACTERS}.get(kind, most), rows or 256), []
    if kind == "char":
        note = f"the vocabulary is assumed to have {_CHARACTERS} characters; it depends on the text: --vocab_size=N"
        return config, _CHARACTERS, [note]
    return config, most, [f"the vocabulary is assumed to have all {most} tokens of config.data.vocab_size"]


def attention_of(
    model: GPT, topology: Topology, batch: int, mesh: jax.sharding.Mesh | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """The attention backend of each layer in training on a topology, and the reasons against the others.

    A layer without attention has its kind in place of a backend.
    """
    backends, answers = {name: name for name in kinds_of(model)}, {}

    kinds = {name: kind for name, kind in kinds_of(model).items() if kind.operator == "attention"}
    operands = {name: kind.operands(model, batch, model.context) for name, kind in kinds.items()}

    def ask(operands, keys):
        options = {"dropout_rate": model.dropout, "dropout_key": keys} if model.dropout else {}
        options |= {"sinks": jnp.zeros(model.num_heads)} if model.sinks else {}
        for name, kind in kinds.items():
            answers[name] = backend_of(model, kind, *operands[name], topology.platform, **options)

    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    with contextlib.ExitStack() as splits:
        if mesh is not None and mesh.shape[parallel_lib.CONTEXT] > 1:
            splits.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
            splits.enter_context(context_parallel(parallel_lib.CONTEXT))
        jax.eval_shape(ask, operands, keys)
    backends |= {name: f"{answer.backend} {answer.split}".strip() for name, answer in answers.items()}
    rejected = {name: why for answer in answers.values() for name, why in answer.rejected.items()}
    chosen = {answer.backend for answer in answers.values()}
    return (
        {f"block_{layer}": backends[kind_of(model, layer)] for layer in range(model.num_layers)},
        {name: why for name, why in rejected.items() if name not in chosen},
    )


def _as_mesh(config: ConfigDict, topology: Topology) -> tuple[ConfigDict, list[str]]:
    """The config with the strategy that can be compiled for devices that are not here, and a note if it is another."""
    if config.parallel.strategy == "mesh" or topology.name == "here":
        return config, []
    config = config.copy_and_resolve_references()
    config.parallel.strategy = "mesh"
    config.parallel.mesh.update(data=-1, fsdp=1, context=1, tensor=1)
    return config, ["pmap runs only on devices that are here: planned with config.parallel.strategy=mesh"]


def _experiment(config: ConfigDict, topology: Topology, vocab_size: int) -> Experiment:
    parallel = parallel_lib.from_config(config, devices=topology.devices)
    return Experiment(config, vocab_size, parallel=parallel)


def _optimizer_bytes(experiment: Experiment) -> int:
    """Bytes of the state on a device, without the parameters that are evaluated."""
    state = experiment.abstract_state
    return _shard_bytes((state.opt_state, state.average))


def _compiled(experiment: Experiment, topology: Topology, step: str) -> Program:
    """Lower and compile one of the steps "training", "evaluation" and "decode"."""
    lower = {
        "training": experiment.lower,
        "evaluation": experiment.lower_eval,
        "decode": lambda: lower_decode(experiment),
    }[step]
    mesh = experiment.parallel.mesh
    if step == "decode":
        mesh = _first_device(experiment).mesh
    if experiment.parallel.strategy == "mesh":
        context = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)  # Pallas asks it which TPU to compile for
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


def lower_decode(experiment: Experiment) -> jax.stages.Lowered:
    """The decode step of `attnlab sample` lowered for the first device: one text, with a cache for the context."""
    model = experiment.model
    replicated = _first_device(experiment).replicated
    platform = replicated.mesh.devices.flat[0].platform
    if platform == "cpu" and model.dtype == jnp.bfloat16:
        model = model.clone(dtype=jnp.float32)  # as `generate` does

    def placed(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), tree)

    state = jax.eval_shape(lambda: loop.empty(model, rows=1))
    draw = Draw(temperature=0.8, vocab_size=model.vocab_size)
    params = {"params": unstack_layers(experiment.abstract_state.params)}
    return loop.decode_ahead.lower(model, draw, (), placed(params), placed(state), loop.AHEAD, loop.AHEAD)


def _first_device(experiment: Experiment) -> parallel_lib.Parallel:
    return parallel_lib.make("mesh", devices=[experiment.parallel.mesh.devices.flat[0]])


def _remarks(topology: Topology, steps: tuple[Program, ...], backends: set[str]) -> Iterator[str]:
    training, _, decoding = steps
    for name, step in zip(("training", "evaluation", "decode"), steps):
        if step.refusal:
            yield f"the {name} step is refused: {step.refusal}"
        elif step.peak_from == "compiler":
            yield f"* the {name} step's peak is the compiler's own, above the sum of the columns"
    if training.unknown_loops:
        loops = training.unknown_loops
        yield f"{loops} loop{'s' * (loops > 1)} of unknown length: what is inside is counted once"
    for backend, kernel in (("splash", "splash"), ("cudnn", "fmha")):
        if backend in backends and training.fits and not any(kernel in name for name in training.kernels):
            yield f"{backend} was chosen for attention, but the compiled step has none of its kernels"
    if _fits(topology, decoding) is False:
        yield "the decode step does not fit on one device: the run cannot sample"
    limit = _limit(topology, training)
    if topology.platform == "gpu" and topology.name != "here":
        yield "without a GPU XLA cannot time its kernels, and chooses others than there: temporaries may differ"
        if limit and training.peak and 0.75 * limit < training.peak <= limit:
            yield "JAX takes 75% of a GPU's memory: set XLA_PYTHON_CLIENT_MEM_FRACTION=.95"


def _limit(topology: Topology, program: Program) -> int | None:
    """Bytes that a program may use on one device."""
    usable = topology.chip.usable_gib
    return program.limit or (None if usable is None else round(usable * _GIB))


def _fits(topology: Topology, program: Program, beside: int = 0) -> bool | None:
    """Whether a program fits, with as many bytes of other arrays; None where the memory is not known."""
    if not program.fits:
        return False
    limit = _limit(topology, program)
    return None if limit is None else program.peak + beside <= limit


def _shard_bytes(tree) -> int:
    """Bytes of one device's shards of abstract arrays."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _sizes(prefix: str, program: Program) -> dict:
    return {
        f"{prefix}arguments_gib": _gib(program.arguments),
        f"{prefix}temporaries_gib": _gib(program.temporaries),
        f"{prefix}peak_gib": _gib(program.peak),
        f"{prefix}compile_seconds": round(program.compile_seconds, 2),
    }


def _gib(size: int | None) -> float | None:
    return None if size is None else size / _GIB
