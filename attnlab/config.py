"""The configuration of a run: fields, defaults and their constraints.

An experiment, a file in `configs/`, changes some fields of `default()`; the command line changes others.
"""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Mapping
from operator import getitem
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict, config_dict

from attnlab.data import tokenizers
from attnlab.data.tasks import named
from attnlab.nn.config import KINDS, ModelConfig, words_of
from attnlab.support import shipped
from attnlab.support.errors import UserError
from attnlab.support.names import nearest
from attnlab.support.options import FieldError, Option, check_effects, check_values, option, option_values, options

# Fields that may change between two starts: they change how a run computes, not its results. A text may move, as its
# content (of a mixture, with its weights) is compared by sha256.
FREE_TO_CHANGE = (
    "parallel.",
    "checkpoint.",
    "log.",
    "data.path",
    "data.mixture",
    "data.store",
    "eval.patience",
    "model.remat",
    "model.scan",
)


FORMAT = 1  # of config.json
_RENAMED = {"mixer": "layers", "pattern": "layers", "attention_bias": "attention.use_bias"}
_RENAMED |= {"score_scale": "attention.scale", "local_base": "local.rotary.base"}

# Values of other options of a group without which an option has no effect.
_TRAINED = {"tokenizer": tokenizers.TRAINED}
_MUON, _ADAM = {"name": ("muon",)}, {"name": ("adamw", "muon", "lion")}


@dataclasses.dataclass
class Data:
    """`config.data`."""

    name: str = option(
        "python_docs, quijote, text or tfds:NAME; text when a path is set; or a task and its options, such as "
        "'task:recall pairs=8'",
        "python_docs",
    )
    path: str = option("a file or a glob: UTF-8 text, *.jsonl, *.ndjson or *.parquet", "")
    feature: str = option("the field, column or feature with the text, where a document has several", "")
    mixture: str = option("corpora and weights in place of a name, as in 'quijote=3, notes/*.txt=1, tfds:NAME=0.5'", "")
    tokenizer: str = option(
        "kind of tokens; pretrained is the tokenizer of init_from", "char", choices=(*tokenizers.KINDS, "pretrained")
    )
    vocab_size: int = option("tokens of word, bpe and wordpiece, at most", 1024, low=2, needs=_TRAINED)
    tokenizer_sample: int = option(
        "MiB of the text, evenly spaced, that word, bpe and wordpiece are trained on", 64, low=1, needs=_TRAINED
    )
    validation_fraction: float = option("the last part of the text, held out", 0.1)
    packing: str = option(
        "stream: the text as one; documents: each is encoded, and attended to, by itself",
        "stream",
        choices=("stream", "documents"),
    )
    store: str = option("folder of the tokens; attnlab/tokens in the user's cache folder when empty", "")


@dataclasses.dataclass
class Model:
    """`config.model` besides the fields of a `ModelConfig`, and besides the options of each kind under its name."""

    layers: str = option(
        "kinds of one period of layers, as in 'gated_delta*3 attention'; one word for all layers", "attention"
    )
    vocab_size: int | None = option("tokens of the model; None for the tokenizer's, a larger one pads it", None, low=1)
    scan: bool | None = option(
        "the layers as one loop over stacked parameters, compiled in the time of one; None for True from four layers "
        "on, and with fsdp",
        None,
    )


@dataclasses.dataclass
class Optimizer:
    """`config.optimizer`."""

    name: str = option("the optimizer", "adamw", choices=("adamw", "muon", "lion", "sgd"))
    learning_rate: float = option(
        "at its peak; with muon, of parameters that are not layer matrices", 5e-3, low=1e-30, high=1e30
    )
    muon_learning_rate: float = option(
        "of layer matrices with muon, at its peak", 0.02, low=1e-30, high=1e30, needs=_MUON
    )
    muon_momentum: float = option("momentum of muon", 0.95, low=0, high=0.999999, needs=_MUON)
    schedule: str = option("the learning rate after the warm-up", "cosine", choices=("cosine", "linear", "constant"))
    final_fraction: float = option("learning rate at the last step, over the peak", 0.0, low=0, high=1)
    decay_fraction: float = option(
        "share of all steps in the linear end of a constant schedule",
        0.2,
        low=0,
        high=1,
        needs={"schedule": ("constant",)},
    )
    warmup_steps: int = option("steps in which the learning rate rises, at most half of all", 100, low=0)
    b1: float = option("decay of the gradients' average; the momentum of sgd", 0.9, low=0, high=0.999999)
    b2: float = option(
        "decay of the squared gradients' average", 0.95, low=0, high=0.999999, needs=_ADAM | {"b2_halflife": (0,)}
    )
    b2_halflife: float = option(
        "in tokens, in place of b2, so that the average does not depend on batch_size; 0 for b2",
        0.0,
        low=0,
        high=1e18,
        needs=_ADAM,
    )
    weight_decay: float = option("of kernels and embeddings, not of biases and norms", 0.1, low=0, high=1e30)
    clip_norm: float = option("limit of the norm of the whole gradient", 1.0, low=1e-30, high=1e30)
    accumulation: int = option("gradients averaged before an update; divides batch_size", 1, low=1)
    ema: float = option(
        "decay of an average of the parameters, to evaluate and to load, such as 0.999; 0 for none",
        0.0,
        low=0,
        high=0.9999999,
    )


@dataclasses.dataclass
class Mesh:
    """`config.parallel.mesh`."""

    data: int = option("devices that split the batch; -1 for all available devices", -1)
    fsdp: int = option("devices that split the batch, the parameters and the optimizer state", 1)
    context: int = option("devices that split sequences", 1)
    tensor: int = option("devices that split heads, hidden features and the vocabulary", 1)


@dataclasses.dataclass
class ParallelFields:
    """`config.parallel`."""

    strategy: str = option("mesh (jit with named sharding) or pmap", "mesh", choices=("pmap", "mesh"))
    timeout: int = option("seconds without a step after which another process is considered dead", 300, low=1)
    mesh: Mesh = dataclasses.field(default_factory=Mesh)


@dataclasses.dataclass
class Eval:
    """`config.eval`."""

    every: int = option("steps between evaluations", 250, low=1)
    windows: int = option("windows scored per evaluation, at most", 2048, low=1)
    part: str = option("of the held-out text: all, first or second half", "all", choices=("all", "first", "second"))
    patience: int = option("evaluations without a lower validation loss that end the run; 0 for no limit", 0, low=0)


@dataclasses.dataclass
class Sample:
    """`config.sample`."""

    every: int = option("steps between samples; 0 for the end only", 1000, low=0)
    length: int = option("tokens of a sample; 0 for no samples", 400, low=0, high=1_000_000)


@dataclasses.dataclass
class Checkpoint:
    """`config.checkpoint`."""

    every: int = option("steps between checkpoints", 250, low=1)
    keep: int = option("newest checkpoints to keep, besides the best", 2, low=1)
    history: int = option("permanent checkpoints, log-spaced from step 0 to the last", 0, low=0, high=10_000)
    dir: str = option("folder of the checkpoints; WORKDIR/checkpoints when empty", "")


@dataclasses.dataclass
class Log:
    """`config.log`."""

    every: int = option("steps between two records of training metrics", 10, low=1)
    tensorboard: bool = option("write TensorBoard events", True)
    profile: str = option(
        "first and last of the steps to trace with JAX's profiler into WORKDIR/profile, such as 100:110", ""
    )
    peak_tflops: float = option("peak of one device, for the mfu; 0 measures it at the start", 0.0, low=0, high=1e6)


@dataclasses.dataclass
class RunFields:
    """The config of a run, but for `model`."""

    steps: int = option("optimizer updates", 2000, low=1)
    seed: int = option("seed of initialization, data order and dropout", 0, low=0)
    batch_size: int = option("sequences per update, over all devices and accumulation steps", 12, low=1)
    on_nonfinite: str = option(
        "reaction to a loss or gradient that is not finite: stop, or skip the update", "stop", choices=("stop", "skip")
    )
    precision: str = option(
        "type of the computation; auto is the type that the hardware multiplies faster, and config.json records it",
        "auto",
        choices=("auto", "float32", "bfloat16"),
    )
    init_from: str = option(
        "weights to start from: the workdir of a run, or a folder with a Hugging Face model, whose tokenizer and shape "
        "are used; dropout, remat, scan, impl and context are set here",
        "",
    )
    data: Data = dataclasses.field(default_factory=Data)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    parallel: ParallelFields = dataclasses.field(default_factory=ParallelFields)
    eval: Eval = dataclasses.field(default_factory=Eval)
    sample: Sample = dataclasses.field(default_factory=Sample)
    checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)
    log: Log = dataclasses.field(default_factory=Log)


def declared() -> dict[str, Option]:
    """The options of a config by dotted name, custom kinds of layers included."""
    shared = options(ModelConfig) | options(Model)
    kinds = {f"{kind}.{name}": each for kind, config in KINDS.items() for name, each in options(config).items()}
    return options(RunFields) | {f"model.{name}": each for name, each in (shared | kinds).items()}


def default() -> ConfigDict:
    """Every field with its default, the values of `configs/quickstart.py`.

    >>> default().model.width
    128
    """
    config = ConfigDict()
    for name, each in declared().items():
        *groups, field = name.split(".")
        group = config
        for part in groups:
            group = group[part] if part in group else group.__setitem__(part, ConfigDict()) or group[part]
        kind = next(type_ for type_ in (*each.types, None) if type_ is not type(None))
        group[field] = config_dict.placeholder(kind) if each.default is None else each.default
    return config


def model_config(config: ConfigDict, vocab_size: int | None = None) -> ModelConfig:
    """The model of a run's config; of so many tokens, which `config.model.vocab_size` may pad.

    Raises:
      UserError: values that do not fit together, or a smaller `config.model.vocab_size`.
    """
    values = _plain(config.model)
    size, _ = values.pop("vocab_size"), values.pop("scan")
    if size is not None and vocab_size is not None and size < vocab_size:
        raise UserError(
            f"config.model.vocab_size = {size} is less than the tokenizer's {vocab_size}: leave it out, or with "
            "config.init_from choose the tokenizer that the model was trained with"
        )
    rows, tokens = size or vocab_size or 1, vocab_size or size or 1
    dtype = jnp.dtype("float32" if config.precision == "auto" else config.precision)
    padded = {} if rows == tokens else {"padded_vocab_size": rows}
    try:
        return ModelConfig.of(**values, vocab_size=tokens, dtype=dtype, **padded)
    except FieldError as error:
        raise UserError(f"config.{error.within('model')}") from error


def model_fields(model: ModelConfig) -> dict:
    """The fields of `config.model` that describe a model, by dotted name; the inverse of `model_config`."""
    runs = [(kind, len(list(words))) for kind, words in itertools.groupby(layer.kind for layer in model.layers)]
    fields = option_values(model) | {"vocab_size": model.vocab_rows}
    fields["layers"] = " ".join(kind if count == 1 else f"{kind}*{count}" for kind, count in runs)
    for layer in model.layers:
        fields |= {f"{layer.kind}.{name}": value for name, value in option_values(layer).items()}
    return fields


def set_fields(group: ConfigDict, values: Mapping[str, Any]) -> None:
    """Set fields by dotted name."""
    for name, value in values.items():
        *groups, field = name.split(".")
        functools.reduce(getitem, groups, group)[field] = value


def experiments() -> dict[str, Path]:
    """The files of the experiments in `configs/` by name, also in a wheel."""
    return shipped.files("configs")


def variants() -> list[str]:
    """The experiments as `--config` takes them: one whose `get_config` has an argument with each of its values."""
    found = {name: shipped.strings(file, "VARIANTS") for name, file in experiments().items()}
    return [f"{name}:{value}" if value else name for name, values in found.items() for value in values or [""]]


def find(experiment: str) -> str:
    """The path of an experiment, named by its name or path, with its variant.

    A path has a slash or ends in ".py": a file or folder of the current folder never takes the place of a name.
    """
    name, colon, variant = experiment.partition(":")
    named = experiments()
    if name in named:
        return f"{named[name]}{colon}{variant}"
    if ("/" in name or name.endswith(".py")) and Path(name).is_file():
        return experiment
    here = [str(file) for file in Path(name).parent.glob("*.py")] if "/" in name else []
    close = nearest(name, [*named, *here]) or nearest(Path(name).stem, named)
    raise UserError(f"--config={name}: no such experiment or file{close}: there are {', '.join(variants())}")


def completed(config: ConfigDict) -> ConfigDict:
    """A checked copy of `config` with absolute paths, and `data.name` set from `data.path` or `data.mixture`."""
    _check_fields(config)
    config = from_dict(_plain(config))
    _check_task(config)
    if config.data.path and config.data.mixture:
        raise UserError("config.data.path and config.data.mixture are both set: name the path in the mixture")
    if config.data.path or config.data.mixture:
        config.data.name = "text" if config.data.path else "mixture"
    for group, field in ((config, "init_from"), (config.data, "store"), (config.checkpoint, "dir")):
        if group[field] and not (field == "dir" and "://" in group[field]):
            group[field] = str(Path(group[field]).expanduser().absolute())  # found from any working directory
    check(config)
    return config


def check_new(config: ConfigDict) -> None:
    """Raise UserError for a field that a new run's config sets, although others take its effect."""
    try:
        check_effects(declared(), fields(config))
    except FieldError as error:
        raise UserError(f"config.{error}") from error


def renamed(field: str) -> str:
    """The present name of a field of an earlier version; "" for others."""
    group, _, name = field.partition(".")
    if group != "model" or field in declared():
        return ""
    if name in _RENAMED:
        return f"model.{_RENAMED[name]}"
    group, _, option = name.rpartition(".")
    if group == "recurrence":
        return f"model.KIND.{option}, the option of a kind of layer, such as model.gated_delta.{option}"
    is_attention = group in ("", "rotary") and name in options(KINDS["attention"])
    return f"model.attention.{name}" if is_attention else ""


def unknown(field: str) -> str:
    """Why a name is no field, with its present name, or one that is like it; "" for a field."""
    if now := renamed(field):
        return f"config.{field} is now config.{now}"
    if field in (known := declared()):
        return ""
    return f"config.{field} is not a field{nearest(field, known) or '; see attnlab train --help'}"


def _check_fields(config: ConfigDict) -> None:
    known, present = declared(), fields(config)
    for field in present:
        if why := unknown(field):
            raise UserError(why)
    kinds = tuple(f"model.{kind}." for kind in KINDS)  # of which some may be newer than the config
    for field in known:
        if field not in present and not field.startswith(kinds):
            raise UserError(f"config.{field} is missing: start from attnlab.config.default()")


def check(config: ConfigDict) -> None:
    """Raise UserError for an unknown field, and for an invalid value."""
    _check_fields(config)
    try:
        check_values(declared(), fields(config))
    except FieldError as error:
        raise UserError(f"config.{error}") from error
    if config.checkpoint.history > config.steps + 1:
        raise UserError(
            f"config.checkpoint.history = {config.checkpoint.history}: expected at most config.steps + 1 = "
            f"{config.steps + 1}, as step 0 counts"
        )
    if 0 < config.log.peak_tflops < 1e-6:
        raise UserError(f"config.log.peak_tflops = {config.log.peak_tflops}: expected 1e-6 or more, or 0 to measure it")
    profiled(config)
    model_config(config)


def profiled(config: ConfigDict) -> tuple[int, int] | None:
    """The first and the last step that `config.log.profile` names, or None; UserError for others than the run has."""
    if not config.log.profile:
        return None
    found = re.fullmatch(r"([0-9]{1,10}):([0-9]{1,10})", config.log.profile)
    first, last = map(int, found.groups()) if found else (0, 0)
    if not 1 <= first <= last <= config.steps:
        raise UserError(
            f"config.log.profile = {config.log.profile!r}: expected FIRST:LAST, such as 100:110, of the steps 1 to "
            f"config.steps = {config.steps}"
        )
    return first, last


def _check_task(config: ConfigDict) -> None:
    """Raise UserError for an unknown task, one that the context cannot hold, and options of texts beside one."""
    data, context = config.data, config.model.context
    if (task := named.parse(data.name)) is None:
        return
    if context < task.shortest_context:
        raise UserError(f"config.model.context = {context}: {data.name!r} needs {task.shortest_context} or more")
    for field, value in data.items():
        if field not in ("name", "store") and value != getattr(Data, field):
            raise UserError(f"config.data.{field} = {value!r} is of texts, and {data.name!r} has none: leave it out")


def difference(saved: dict, config: ConfigDict) -> str:
    """The first field that prevents resuming a saved run with `config`, and both values; "" when there is none."""
    before, now = fields(from_dict(saved)), fields(config)
    for field in dict.fromkeys([*before, *now]):
        if not field.startswith(FREE_TO_CHANGE) and before.get(field) != now.get(field):
            return f"config.{field} = {now.get(field)!r}, there it was {before.get(field)!r}"
    return ""


def to_json(config: ConfigDict, **metadata) -> str:
    """The content of `config.json`: its format, the fields of `config` but for kinds that no layer is of, metadata."""
    plain, words = _plain(config), words_of(config.model.layers)
    plain["model"] = {name: x for name, x in plain["model"].items() if name not in KINDS or name in words}
    return json.dumps({"format": FORMAT} | plain | metadata, indent=2) + "\n"


def from_dict(saved: dict) -> ConfigDict:
    """The config in the content of `config.json`; missing fields have their defaults."""
    config = default()
    saved = {name: value for name, value in saved.items() if name in config}
    config.update(ConfigDict(saved))
    return config


def fields(config: ConfigDict) -> dict:
    """All fields and their values, by dotted name: 'steps', 'model.width', …"""
    return _flat(_plain(config))


def _plain(config: ConfigDict) -> dict:
    return json.loads(config.to_json_best_effort())


def _flat(tree, prefix="") -> dict:
    flat = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
