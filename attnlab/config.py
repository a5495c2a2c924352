"""The configuration of a run: fields, defaults and their constraints.

An experiment, a file in `configs/`, changes some fields of `default()`; the command line changes others. `completed`
checks them and returns the frozen `RunConfig` that everything else reads.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict, config_dict

from attnlab.data import tokenizers
from attnlab.data.tasks import named
from attnlab.nn import custom, records
from attnlab.nn.config import KINDS, ModelConfig
from attnlab.nn.layer import LayerConfig
from attnlab.support.errors import UserError
from attnlab.support.names import nearest
from attnlab.support.options import (
    FieldError,
    Option,
    changed,
    check_effects,
    is_recorded,
    option,
    option_values,
    options,
    validate,
)

# Fields that may change when a run is resumed: they set how it computes or when it ends, not what it computes. A text
# may move, because its content (for a mixture, with its weights) is compared by sha256.
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
FORMAT = 2  # version of config.json
# Fields of `RunConfig` whose command-line names begin with "model.".
_OF_RUN = {"model.vocab_size": "vocab_size", "model.scan": "scan"}
_PATHS = ("init_from", "data.store", "checkpoint.dir")

# Values for `needs`: an option has no effect unless other options of its group have these values.
_TRAINED = {"tokenizer": tokenizers.TRAINED}
_MUON, _ADAM = {"name": ("muon",)}, {"name": ("adamw", "muon", "lion")}


@dataclasses.dataclass(frozen=True)
class Data:
    """`config.data`."""

    name: str = option(
        "python_docs, quijote, text or tfds:NAME; text when a path is set; or a task and its options, such as "
        "'task:recall pairs=8'",
        "python_docs",
    )
    path: str = option("a file or a glob: UTF-8 text, *.jsonl, *.ndjson or *.parquet", "")
    feature: str = option("the field, column or feature with the text, if a document has several", "")
    mixture: str = option("corpora and weights instead of a name, as in 'quijote=3, notes/*.txt=1, tfds:NAME=0.5'", "")
    tokenizer: str = option(
        "kind of tokens; pretrained is the tokenizer of init_from", "char", choices=(*tokenizers.KINDS, "pretrained")
    )
    vocab_size: int = option("largest vocabulary of word, bpe and wordpiece", 1024, low=2, needs=_TRAINED)
    tokenizer_sample: int = option(
        "MiB of the text, evenly spaced, that word, bpe and wordpiece are trained on", 64, low=1, needs=_TRAINED
    )
    validation_fraction: float = option("share of the text, at its end, that is held out", 0.1)
    packing: str = option(
        "stream: the text as one sequence; documents: each is encoded separately and attends only to itself",
        "stream",
        choices=("stream", "documents"),
    )
    store: str = option("folder of the tokens; attnlab/tokens in the user's cache folder when empty", "")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """`config.optimizer`."""

    name: str = option("the optimizer", "adamw", choices=("adamw", "muon", "lion", "sgd"))
    learning_rate: float = option(
        "peak learning rate; with muon, of parameters that are not layer matrices", 5e-3, low=1e-30, high=1e30
    )
    muon_learning_rate: float = option(
        "peak learning rate of layer matrices with muon", 0.02, low=1e-30, high=1e30, needs=_MUON
    )
    muon_momentum: float = option("momentum of muon", 0.95, low=0, high=0.999999, needs=_MUON)
    schedule: str = option("the learning rate after the warm-up", "cosine", choices=("cosine", "linear", "constant"))
    final_fraction: float = option("learning rate at the last step, over the peak", 0.0, low=0, high=1)
    decay_fraction: float = option(
        "share of all steps in the final linear decay of a constant schedule",
        0.2,
        low=0,
        high=1,
        needs={"schedule": ("constant",)},
    )
    warmup_steps: int = option("steps in which the learning rate rises; at most half of all steps", 100, low=0)
    b1: float = option("decay of the gradients' average; the momentum of sgd", 0.9, low=0, high=0.999999)
    b2: float = option(
        "decay of the squared gradients' average", 0.95, low=0, high=0.999999, needs=_ADAM | {"b2_halflife": (0,)}
    )
    b2_halflife: float = option(
        "half-life of that average in tokens, instead of b2, so that it does not depend on batch_size; 0 for b2",
        0.0,
        low=0,
        high=1e18,
        needs=_ADAM,
    )
    weight_decay: float = option("of kernels and embeddings; biases and norms have none", 0.1, low=0, high=1e30)
    clip_norm: float = option("largest norm of the whole gradient", 1.0, low=1e-30, high=1e30)
    accumulation: int = option("gradients averaged before an update; must divide batch_size", 1, low=1)
    ema: float = option(
        "decay, such as 0.999, of an average of the parameters that is evaluated and loaded; 0 for none",
        0.0,
        low=0,
        high=0.9999999,
    )


@dataclasses.dataclass(frozen=True)
class Mesh:
    """`config.parallel.mesh`."""

    data: int = option("devices that split the batch; -1 for all available devices", -1)
    fsdp: int = option("devices that split the batch, the parameters and the optimizer state", 1)
    context: int = option("devices that split sequences", 1)
    tensor: int = option("devices that split heads, hidden features and the vocabulary", 1)


@dataclasses.dataclass(frozen=True)
class ParallelFields:
    """`config.parallel`."""

    strategy: str = option("mesh (jit with named sharding) or pmap", "mesh", choices=("pmap", "mesh"))
    timeout: int = option("seconds without a step after which another process is considered dead", 300, low=1)
    steps_per_call: int | None = option(
        "most updates in one call of the devices, which lasts a second at most; None for 64 on GPUs if the model has "
        "at most 10 million parameters, else 1",
        None,
        low=1,
    )
    mesh: Mesh = Mesh()


@dataclasses.dataclass(frozen=True)
class Eval:
    """`config.eval`."""

    every: int = option("steps between evaluations", 250, low=1)
    windows: int = option("windows scored per evaluation, at most", 2048, low=1)
    part: str = option("part of the held-out text: all or a half", "all", choices=("all", "first", "second"))
    patience: int = option("evaluations without a lower validation loss that end the run; 0 for no limit", 0, low=0)


@dataclasses.dataclass(frozen=True)
class Sample:
    """`config.sample`."""

    every: int = option("steps between samples; 0 for the end only", 1000, low=0)
    length: int = option("tokens per sample; 0 for no samples", 400, low=0, high=1_000_000)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """`config.checkpoint`."""

    every: int = option("steps between checkpoints", 250, low=1)
    keep: int = option("newest checkpoints to keep, besides the best", 2, low=1)
    history: int = option("permanent checkpoints, log-spaced from step 0 to the last", 0, low=0, high=10_000)
    dir: str = option("folder of the checkpoints; WORKDIR/checkpoints when empty", "")


@dataclasses.dataclass(frozen=True)
class Log:
    """`config.log`."""

    every: int = option("steps between two records of training metrics", 10, low=1)
    tensorboard: bool = option("write TensorBoard events", True)
    profile: str = option(
        "first and last of the steps to trace with JAX's profiler into WORKDIR/profile, such as 100:110", ""
    )
    peak_tflops: float = option("peak of one device, for the MFU; 0 measures it at the start", 0.0, low=0, high=1e6)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The config of a run, complete and checked, with absolute paths.

    Fields have their command-line names, except that `config.model.vocab_size` and `config.model.scan` are `vocab_size`
    and `scan` here. `model` is in the config's precision, with 1 token if no vocabulary size is known yet.

    >>> config = RunConfig.of({"steps": 100, "model.layers": "gated_delta", "model.gated_delta.conv": 2})
    >>> config.steps, config.model.layers[0].conv, config.changed({"model.width": 64}).model.width
    (100, 2, 64)
    """

    steps: int = option("optimizer updates", 2000, low=1)
    seed: int = option("seed of initialization, data order and dropout", 0, low=0)
    batch_size: int = option("sequences per update, over all devices and accumulation steps", 12, low=1)
    on_nonfinite: str = option(
        "reaction to a loss or gradient that is not finite: stop, or skip the update", "stop", choices=("stop", "skip")
    )
    precision: str = option(
        "type of the computation; tf32 is float32 with products in TF32, on GPUs only; auto is bfloat16 or float32, "
        "whichever the hardware multiplies faster, and config.json records it",
        "auto",
        choices=("auto", "float32", "tf32", "bfloat16"),
    )
    init_from: str = option(
        "weights to start from: the workdir of a run, or a folder with a Hugging Face model; its tokenizer and shape "
        "are used, but dropout, remat, scan, impl and context of this config",
        "",
    )
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    parallel: ParallelFields = ParallelFields()
    eval: Eval = Eval()
    sample: Sample = Sample()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    model: ModelConfig = dataclasses.field(default_factory=lambda: ModelConfig(vocab_size=1))
    vocab_size: int | None = option("vocabulary size; None for the tokenizer's; a larger one pads it", None, low=1)
    scan: bool | None = option(
        "run the layers as one loop over stacked parameters, which compiles as fast as one layer; None for True from "
        "four layers on (33 on GPUs), and with fsdp",
        None,
    )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "RunConfig":
        """The default config with some fields changed; see `changed`."""
        return _default().changed(values)

    def __post_init__(self):
        validate(self)
        history, tflops = self.checkpoint.history, self.log.peak_tflops
        if history > self.steps + 1:
            expected = f"expected at most config.steps + 1 = {self.steps + 1}, as step 0 counts"
            raise FieldError("checkpoint.history", history, expected)
        if 0 < tflops < 1e-6:
            raise FieldError("log.peak_tflops", tflops, "expected 1e-6 or more, or 0 to measure it")
        sizes = {"vocab_size": self.vocab_size or 1, "padded_vocab_size": None}
        model = {"dtype": jnp.dtype("bfloat16" if self.precision == "bfloat16" else "float32")} | sizes
        if any(repr(getattr(self.model, name)) != repr(value) for name, value in model.items()):  # replaces jnp.float32
            object.__setattr__(self, "model", self.model.replace(**model))
        custom.add(self.model.layers)
        try:
            hash(self.model)  # equal configs share programs
        except TypeError as error:
            raise FieldError("model.layers", self.model.layers, f"expected hashable values: {error}") from None
        object.__setattr__(self, "data", _with_name(self.data))
        for name in _PATHS:  # valid in any working directory
            _make_absolute(self, name)
        _check_task(self.data, self.model.context)
        self.profiled()

    def changed(self, values: Mapping[str, Any]) -> "RunConfig":
        """The config with some fields changed; all changes are checked together.

        Args:
          values: new values by dotted name. "model.layers" takes names of kinds (a kind that the config already has
            keeps its options), layer configs, or a value for `attnlab.nn.register`. "model.attention.window" sets an
            option of all layers of a kind, and "model.layers[0].window" of one layer.

        Raises:
          UserError: an unknown name or an invalid value.
        """
        known = declared()
        for name in values:
            if name not in known and (why := unknown(name)):
                raise UserError(why)
        run_values = {_OF_RUN.get(name, name): value for name, value in values.items()}
        model = {name[6:]: run_values.pop(name) for name in [*run_values] if name.startswith("model.")}
        if "layers" in model:
            model["layers"] = custom.layers_of(model["layers"])
        try:
            if model:
                try:
                    run_values["model"] = self.model.changed(model)
                except FieldError as error:
                    raise error.within("model") from None
            config = changed(self, run_values)
        except FieldError as error:
            raise UserError(f"config.{error}") from None
        if config.data.name != (name := values.get("data.name", config.data.name)):
            other = "path" if config.data.path else "mixture"
            raise UserError(
                f"config.data.name = {name!r} has no effect with config.data.{other}: set that to '' as well"
            )
        return config

    @functools.cached_property
    def fields(self) -> dict[str, Any]:
        """All fields and their values by dotted name, as `changed` accepts them; masks and score mods only if set.

        Options of layers are named by the kind, "model.attention.window"; if the layers of a kind have different
        options, by the index of each layer, "model.layers[0].window".
        """
        layers, values = self.model.layers, _values(self) | {"model.layers": self.model.kinds}
        for place, layer in enumerate(layers):
            alone = all(_alike(other, layer) for other in layers if other.kind == layer.kind)
            where = f"model.{layer.kind if alone else f'layers[{place}]'}"
            default, others = type(layer)(), [x.name for x in dataclasses.fields(layer) if not is_recorded(x)]
            extras = {name: getattr(layer, name) for name in others}
            extras = {name: x for name, x in extras.items() if not records.same(getattr(default, name), x)}
            values |= {f"{where}.{name}": x for name, x in (extras | option_values(layer)).items()}
        return values

    def profiled(self) -> tuple[int, int] | None:
        """The first and the last step in `log.profile`, None if it is empty; FieldError for steps that do not exist."""
        if not self.log.profile:
            return None
        match = re.fullmatch(r"([0-9]{1,10}):([0-9]{1,10})", self.log.profile)
        first, last = map(int, match.groups()) if match else (0, 0)
        if not 1 <= first <= last <= self.steps:
            expected = f"expected FIRST:LAST, such as 100:110, of the steps 1 to config.steps = {self.steps}"
            raise FieldError("log.profile", self.log.profile, expected)
        return first, last

    def over_tokens(self, vocab_size: int) -> ModelConfig:
        """The model for a tokenizer's vocabulary, padded to the field `vocab_size`; UserError if the field is less."""
        if self.vocab_size is None or self.vocab_size == vocab_size:
            return self.model.replace(vocab_size=vocab_size)
        if self.vocab_size < vocab_size:
            raise UserError(
                f"config.model.vocab_size = {self.vocab_size} is less than the tokenizer's {vocab_size}: remove it, "
                "or with config.init_from choose the tokenizer that the model was trained with"
            )
        return self.model.replace(vocab_size=vocab_size, padded_vocab_size=self.vocab_size)

    def check_effects(self) -> None:
        """Raise UserError for a field that is set but has no effect because of other fields."""
        try:
            check_effects(options(RunConfig), option_values(self))
            for layer in self.model.layers:
                try:
                    check_effects(options(type(layer)), option_values(layer))
                except FieldError as error:
                    raise error.within(f"model.{layer.kind}") from None
        except FieldError as error:
            raise UserError(f"config.{error}") from None

    def difference(self, before: "RunConfig") -> str:
        """The first field, with both values, that prevents resuming a run whose config was `before`; "" for none."""
        was, now = before.fields, self.fields
        for field in dict.fromkeys([*was, *now]):
            if not field.startswith(FREE_TO_CHANGE) and not records.same(was.get(field), now.get(field)):
                return f"config.{field} = {now.get(field)!r}, but it was {was.get(field)!r}"
        return ""


def _alike(one: LayerConfig, other: LayerConfig) -> bool:
    """Whether two layers of a kind have equal fields; functions are equal if they compute the same."""
    values = ((getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one))
    return all(a is b or a == b or records.same(a, b, by_version=True) for a, b in values)


@functools.cache
def _default() -> RunConfig:
    return RunConfig()


def _with_name(data: Data) -> Data:
    """The data with `name` set from `path` or `mixture`."""
    if data.path and data.mixture:
        raise UserError("config.data.path and config.data.mixture are both set: name the path in the mixture")
    name = "text" if data.path else "mixture" if data.mixture else data.name
    return data if data.name == name or named.parse(data.name) else dataclasses.replace(data, name=name)


def _make_absolute(config: RunConfig, name: str) -> None:
    """Make a path absolute in a config under construction; the folder of checkpoints may also be a URL."""
    group, _, field = name.rpartition(".")
    path = getattr(getattr(config, group) if group else config, field)
    if path and not (field == "dir" and "://" in path):
        path = str(Path(path).expanduser().absolute())
        value = dataclasses.replace(getattr(config, group), **{field: path}) if group else path
        object.__setattr__(config, group or field, value)


def _check_task(data: Data, context: int) -> None:
    """Raise an error for an unknown task, a task that the context cannot hold, or text options with a task."""
    if (task := named.parse(data.name)) is None:
        return
    if context < task.shortest_context:
        raise FieldError("model.context", context, f"{data.name!r} needs {task.shortest_context} or more")
    for field, value in vars(data).items():
        if field not in ("name", "store") and value != getattr(Data, field):
            raise FieldError(f"data.{field}", value, f"it applies to texts only: remove it for {data.name!r}")


def declared() -> dict[str, Option]:
    """The options of a config by dotted name, including custom kinds of layers."""
    by_name, layers = dict(options(RunConfig)), "kinds of the layers in one period, as in 'gated_delta*3 attention'"
    by_name |= {name: by_name.pop(field) for name, field in _OF_RUN.items()}
    by_name["model.layers"] = Option(f"{layers}; one word for all layers", (str,), "attention", None, None, ())
    kinds = {f"model.{kind}.{name}": each for kind, config in KINDS.items() for name, each in options(config).items()}
    return by_name | kinds


def default() -> ConfigDict:
    """A config to modify: every field with its default, which is also its value in `configs/quickstart.py`.

    >>> default().model.width
    128
    """
    values = {}
    for name, each in declared().items():
        kind = next(type_ for type_ in (*each.types, None) if type_ is not type(None))
        values[name] = config_dict.placeholder(kind) if each.default is None else each.default
    return ConfigDict(_nested(values))


def completed(config: ConfigDict | RunConfig) -> RunConfig:
    """The checked config from a modified `default()`.

    Raises:
      UserError: an unknown or missing field, values that do not fit together.
    """
    if isinstance(config, RunConfig):
        return config
    if not isinstance(config, ConfigDict):
        raise UserError(f"config = {config!r}: expected a RunConfig, such as RunConfig.of({{…}}), or a ConfigDict")
    values, known = _flat(json.loads(config.to_json_best_effort())), declared()
    kinds = tuple(f"model.{kind}." for kind in KINDS)  # a kind may be newer than the config
    for field in known:
        if field not in values and not field.startswith(kinds):
            raise UserError(f"config.{field} is missing: start from attnlab.config.default()")
    return RunConfig.of({x: value for x, value in values.items() if x not in known or value != known[x].default})


def words(config: RunConfig, base: RunConfig) -> list[str]:
    """The command-line words that change `base` into `config`, as far as words can express it."""
    before, known = base.fields, declared()

    def differs(name, value):
        match = re.fullmatch(r"model\.layers\[(\d+)\]\.(.*)", name)
        usual = f"model.{config.model.layers[int(match[1])].kind}.{match[2]}" if match else name
        return not records.same(before[name] if name in before else getattr(known.get(usual), "default", None), value)

    return [f"--config.{name}={value}" for name, value in config.fields.items() if differs(name, value)]


def to_json(config: RunConfig, **metadata) -> str:
    """The content of `config.json`: its format, the fields of `config` with a record of each layer, and metadata."""
    return json.dumps(to_tree(config) | metadata, indent=2) + "\n"


def to_tree(config: RunConfig) -> dict[str, Any]:
    """The format and the fields of a config as JSON values; arrays appear by name, see `attnlab.nn.records`."""
    layers = list(map(records.of_layer, config.model.layers))
    return {"format": FORMAT} | _nested(_values(config) | {"model.layers": layers})


def _values(config: RunConfig) -> dict[str, Any]:
    """The options of a config, except those that belong to layers, by their command-line names."""
    names = {field: name for name, field in _OF_RUN.items()}
    return {names.get(name, name): x for name, x in option_values(config).items() if name not in _OF_RUN}


def from_json(saved: Mapping[str, Any], arrays: Mapping[str, np.ndarray] | None = None) -> RunConfig:
    """The config from the contents of `config.json` (format 1 or 2) and `config.npz`; missing fields get defaults."""
    groups = {name.partition(".")[0] for name in declared()}
    values = _flat({name: value for name, value in saved.items() if name in groups})
    if not isinstance(layers := values.get("model.layers", ""), str):
        values["model.layers"] = tuple(records.layer_of(layer, arrays or {}) for layer in layers)
    return RunConfig.of(values)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested groups from values by dotted name."""
    groups = {}
    for name, value in values.items():
        *path, field = name.split(".")
        functools.reduce(lambda group, part: group.setdefault(part, {}), path, groups)[field] = value
    return groups


def _flat(tree, prefix="") -> dict:
    flat = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def unknown(field: str) -> str:
    """The error for a name that is not a field, with the name of a similar field; "" if it is a field."""
    known = declared()
    if field in known or re.match(rf"model\.({'|'.join(KINDS)}|layers\[\d+\])(\.|$)", field):
        return ""
    top_level = [name for name in known if "." not in name]
    close = nearest(field, known) or nearest(field.rpartition(".")[2], top_level) or ": attnlab train --help lists them"
    return f"config.{field} is not a field{close}"
