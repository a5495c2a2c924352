"""The configuration of a run: its fields, their defaults, and what they must satisfy.

A file in `configs/` changes what it needs of `default()`; the command line changes what it needs of that.
"""

import difflib
import json
from pathlib import Path

from ml_collections import ConfigDict, config_dict

from attnlab.data import tokenizers
from attnlab.errors import UserError
from attnlab.nn.gpt import ACTIVATIONS, POSITIONS

# What every value must satisfy by itself: the least of whole numbers, the ends of ranges, the names of choices.
_WHOLE_NUMBERS = {
    "steps": 1,
    "seed": 0,
    "batch_size": 1,
    "data.vocab_size": 2,
    "model.num_layers": 1,
    "model.num_heads": 1,
    "model.kv_heads": 1,
    "model.width": 1,
    "model.context": 1,
    "model.vocab_size": 1,
    "model.window": 1,
    "optimizer.warmup_steps": 0,
    "optimizer.accumulation": 1,
    "eval.every": 1,
    "eval.windows": 1,
    "sample.every": 0,
    "sample.length": 1,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
    "log.every": 1,
    "parallel.timeout": 1,
}
_RANGES = {
    "model.dropout": (0, 0.999),
    "model.mlp_ratio": (1e-3, 1e3),
    "model.norm_epsilon": (1e-30, 1),
    "optimizer.learning_rate": (1e-30, 1e30),
    "optimizer.final_fraction": (0, 1),
    "optimizer.b1": (0, 0.999999),
    "optimizer.b2": (0, 0.999999),
    "optimizer.weight_decay": (0, 1e30),
    "optimizer.clip_norm": (1e-30, 1e30),
    "log.peak_tflops": (0, 1e6),
}
_CHOICES = {
    "precision": ("float32", "bfloat16"),
    "on_nonfinite": ("stop", "skip"),
    "data.tokenizer": (*tokenizers.KINDS, "pretrained"),
    "model.positions": POSITIONS,
    "model.activation": tuple(ACTIVATIONS),
    "model.impl": ("auto", "blockwise", "dense"),  # kernels honour some calls of a run only, so "auto" picks them
    "parallel.strategy": ("pmap", "mesh"),
}
# A run may go on with other values of these: they change how it runs, not what it computes. A text may move: what it
# says is compared by its sha256.
FREE_TO_CHANGE = ("parallel.", "checkpoint.", "log.", "data.path")


def default() -> ConfigDict:
    """Every field with its default; the values are those of `configs/quickstart.py`.

    >>> config = default()
    >>> config.model.width
    128
    """
    config = ConfigDict()
    config.steps = 2000  # optimizer updates
    config.seed = 0  # of initialisation, data order and dropout
    config.batch_size = 12  # sequences an update, over all devices and accumulation steps
    config.on_nonfinite = "stop"  # what to do at a loss or gradient that is not finite: stop, or skip that update
    config.precision = "float32"  # of the computation: float32 or bfloat16; parameters are float32 always
    # What to start from instead of random weights: the workdir of a run, or a folder with a GPT-2 of Hugging Face. Its
    # tokenizer and the shape of its model count then; how to train it (dropout, remat, impl) is said here, and a
    # context that is shorter than its own.
    config.init_from = ""

    config.data = ConfigDict()
    config.data.name = "python_docs"  # python_docs, quijote, text or tfds:NAME; text when a path is given
    config.data.path = ""  # a file or a glob of UTF-8 text
    config.data.feature = ""  # of a TFDS set, where it has several texts
    config.data.tokenizer = "char"  # char, byte, word, bpe or wordpiece; "pretrained" is that of init_from
    config.data.vocab_size = 1024  # of word, bpe and wordpiece, at most
    config.data.validation_fraction = 0.1  # the last part of the text, held out

    config.model = ConfigDict()
    config.model.num_layers = 4
    config.model.num_heads = 4
    config.model.kv_heads = config_dict.placeholder(int)  # heads of keys and values; None for num_heads
    config.model.width = 128
    config.model.context = 64  # tokens a sequence
    config.model.vocab_size = config_dict.placeholder(int)  # None for the tokenizer's; more pads it
    config.model.dropout = 0.0
    config.model.positions = "rotary"  # learned, sinusoidal, rotary, alibi or none
    config.model.window = config_dict.placeholder(int)  # attend to so many positions; None for all before
    config.model.qk_norm = True  # keeps large learning rates stable (Henry et al. 2020)
    config.model.use_bias = False
    config.model.mlp_ratio = 4.0  # width of the feed-forward layer over the model's
    config.model.activation = "gelu_tanh"  # of the feed-forward layer: gelu_tanh, gelu, relu or silu
    config.model.norm_epsilon = 1e-5
    # Keep each block's input alone for the gradient: a third more time and less memory, on GPUs and TPUs. On CPUs XLA
    # computes all blocks again before it needs the first.
    config.model.remat = False
    config.model.impl = "auto"  # backend of the attention operator

    config.optimizer = ConfigDict()
    config.optimizer.learning_rate = 5e-3  # at its peak
    config.optimizer.final_fraction = 0.0  # learning rate at the last step, over the peak
    config.optimizer.warmup_steps = 100  # at most half of steps
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.95
    config.optimizer.weight_decay = 0.1  # of kernels and embeddings, not of biases and norms
    config.optimizer.clip_norm = 1.0  # of the whole gradient
    config.optimizer.accumulation = 1  # gradients averaged before an update; divides batch_size

    config.parallel = ConfigDict()
    config.parallel.strategy = "mesh"  # mesh (jit with named sharding) or pmap
    # Devices on each axis: both split the batch, fsdp the parameters and the optimizer's state as well.
    config.parallel.mesh = ConfigDict({"data": -1, "fsdp": 1})  # −1 for all there are
    config.parallel.timeout = 300  # seconds without a step after which another process is taken for gone

    config.eval = ConfigDict()
    config.eval.every = 250  # steps
    config.eval.windows = 2048  # scored a pass, at most; a text with fewer is scored whole

    config.sample = ConfigDict()
    config.sample.every = 1000  # steps; 0 for the end alone
    config.sample.length = 400  # tokens

    config.checkpoint = ConfigDict()
    config.checkpoint.every = 250  # steps
    config.checkpoint.keep = 2  # newest ones, besides the best
    config.checkpoint.dir = ""  # WORKDIR/checkpoints when empty

    config.log = ConfigDict()
    config.log.every = 10  # steps between two lines of train metrics
    config.log.tensorboard = True
    config.log.peak_tflops = 0.0  # of one device, for the mfu; 0 to measure it at the start
    return config


def completed(config: ConfigDict) -> ConfigDict:
    """A checked copy of `config`: a text that `data.path` names has become the corpus, `checkpoint.dir` is absolute.

    Raises:
      UserError: an unknown field, a missing one, or a value that no run could use; nothing is loaded or written.
    """
    _check_fields(config)
    config = from_dict(_plain(config))
    if config.data.path:
        config.data.name = "text"
    if config.init_from:
        config.init_from = str(Path(config.init_from).expanduser().absolute())
    folder = config.checkpoint.dir
    if folder and "://" not in folder:
        config.checkpoint.dir = str(Path(folder).expanduser().absolute())  # for whoever loads it from elsewhere
    check(config)
    return config


def _check_fields(config: ConfigDict) -> None:
    """Raises UserError where fields or their types are not those of `default()`."""
    expected, given = fields(default()), fields(config)
    for field, value in given.items():
        if field not in expected:
            raise UserError(f"config.{field} is no field{nearest(field, expected) or '; see attnlab/config.py'}")
        like = expected[field]
        kinds = (int, type(None)) if like is None else (int, float) if isinstance(like, float) else type(like)
        if not isinstance(value, kinds) or (isinstance(value, bool) and not isinstance(like, bool)):
            raise UserError(f"config.{field} = {value!r}: expected a value like {like!r}")
    for field in expected:
        if field not in given:
            raise UserError(f"config.{field} is missing: start from attnlab.config.default()")


def check(config: ConfigDict) -> None:
    """Raises UserError for a value that no run could use."""
    values = fields(config)
    for field, least in _WHOLE_NUMBERS.items():
        if values[field] is not None and not least <= values[field] < 2**31:
            raise UserError(f"config.{field} = {values[field]}: expected {least} or more, below 2^31")
    for field, (low, high) in _RANGES.items():
        if not low <= values[field] <= high:
            raise UserError(f"config.{field} = {values[field]}: expected a number from {low:g} to {high:g}")
    for field, choices in _CHOICES.items():
        if values[field] not in choices:
            close = nearest(values[field], choices)
            raise UserError(f"config.{field} = {values[field]!r}: expected one of {', '.join(choices)}{close}")
    if 0 < config.log.peak_tflops < 1e-6:
        raise UserError(f"config.log.peak_tflops = {config.log.peak_tflops}: expected 1e-6 or more, or 0 to measure it")
    model = config.model
    if model.width % model.num_heads:
        raise UserError(
            f"config.model.width = {model.width} is not divisible by config.model.num_heads = {model.num_heads}: "
            f"use a multiple, e.g. {max(1, round(model.width / model.num_heads)) * model.num_heads}"
        )
    if round(model.mlp_ratio * model.width) < 1:
        raise UserError(
            f"config.model.mlp_ratio = {model.mlp_ratio} of config.model.width = {model.width} leaves none: use more"
        )
    kv_heads = model.kv_heads or model.num_heads
    if model.num_heads % kv_heads:
        raise UserError(f"config.model.num_heads = {model.num_heads} is not a multiple of kv_heads = {kv_heads}")
    if model.positions == "rotary" and (model.width // model.num_heads) % 2:
        raise UserError(
            f"config.model.positions = 'rotary' turns pairs of features, but a head has "
            f"{model.width // model.num_heads}: choose width / num_heads even"
        )
    if model.positions == "sinusoidal" and model.width % 2:
        raise UserError(f"config.model.width = {model.width} must be even for sinusoidal positions")


def difference(saved: dict, config: ConfigDict) -> str:
    """The first field in which a run differs from the one that was saved, or "" when it may go on."""
    before, now = fields(from_dict(saved)), fields(config)
    for field in dict.fromkeys([*before, *now]):
        if not field.startswith(FREE_TO_CHANGE) and before.get(field) != now.get(field):
            return f"config.{field} = {now.get(field)!r}, there it was {before.get(field)!r}"
    return ""


def another(workdir: Path, difference: str) -> UserError:
    """The error that a workdir holds a run with another config."""
    return UserError(
        f"{workdir} holds a run with another config ({difference}): choose a new --workdir, or repeat its command"
    )


def to_json(config: ConfigDict, **facts) -> str:
    """What `config.json` holds: the fields of `config`, and `facts` about the run (its corpus, …) beside them."""
    return json.dumps(_plain(config) | facts, indent=2) + "\n"


def from_dict(saved: dict) -> ConfigDict:
    """The config in what `config.json` holds; fields that it lacks have their defaults."""
    config = default()
    config.update(ConfigDict({name: value for name, value in saved.items() if name in config}))
    return config


def nearest(name: str, names) -> str:
    """' (did you mean X?)' when one of `names` is close, else ''.

    >>> nearest("widht", ["width", "seed"])
    ' (did you mean width?)'
    """
    close = difflib.get_close_matches(str(name), list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def fields(config: ConfigDict) -> dict:
    """All fields and their values, by dotted name: 'steps', 'model.width', …

    >>> fields(default())["model.width"]
    128
    """
    return _flat(_plain(config))


def _plain(config: ConfigDict) -> dict:
    return json.loads(config.to_json_best_effort())


def _flat(tree, prefix="") -> dict:
    flat = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
