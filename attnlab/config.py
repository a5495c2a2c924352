"""The configuration of a run: its fields, their defaults, and what they must satisfy.

An experiment, a file in `configs/`, changes some fields of `default()`; the command line changes some of those.
"""

import json
from pathlib import Path

from ml_collections import ConfigDict, config_dict

from attnlab.data import tokenizers
from attnlab.nn.block import NORM_AT
from attnlab.nn.fields import POSITIONS, check_shape
from attnlab.nn.layers import REMAT
from attnlab.nn.mlp import ACTIVATIONS, MLPS
from attnlab.nn.norms import NORMS
from attnlab.nn.rotations import SCALINGS
from attnlab.support import shipped
from attnlab.support.errors import UserError
from attnlab.support.names import nearest

# Valid values: the minimum of integers, the ends of ranges, the names of choices.
_MINIMA = {
    "steps": 1,
    "seed": 0,
    "batch_size": 1,
    "data.vocab_size": 2,
    "data.tokenizer_sample": 1,
    "model.num_layers": 1,
    "model.num_heads": 1,
    "model.kv_heads": 1,
    "model.head_dim": 1,
    "model.width": 1,
    "model.context": 1,
    "model.vocab_size": 1,
    "model.window": 1,
    "model.rotary.original_context": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.accumulation": 1,
    "eval.every": 1,
    "eval.windows": 1,
    "eval.patience": 0,
    "sample.every": 0,
    "sample.length": 0,
    "checkpoint.every": 1,
    "checkpoint.keep": 1,
    "checkpoint.history": 0,
    "log.every": 1,
    "parallel.timeout": 1,
}
_RANGES = {
    "model.dropout": (0, 0.999),
    "model.mlp_ratio": (0, 1e3),
    "model.soft_cap": (1e-3, 1e6),
    "model.logit_cap": (1e-3, 1e6),
    "model.logit_scale": (1e-6, 1e6),
    "model.embedding_scale": (1e-6, 1e6),
    "model.score_scale": (1e-9, 1e6),
    "model.local_base": (1e-3, 1e12),
    "model.rotary.base": (1e-3, 1e12),
    "model.rotary.fraction": (1e-6, 1),
    "model.rotary.factor": (1, 1e6),
    "model.rotary.slow_turns": (1e-6, 1e6),
    "model.rotary.fast_turns": (1e-6, 1e6),
    "model.rotary.attention_factor": (1e-6, 1e6),
    "model.norm_epsilon": (1e-30, 1),
    "optimizer.learning_rate": (1e-30, 1e30),
    "optimizer.final_fraction": (0, 1),
    "optimizer.b1": (0, 0.999999),
    "optimizer.b2": (0, 0.999999),
    "optimizer.b2_halflife": (0, 1e18),
    "optimizer.decay_fraction": (0, 1),
    "optimizer.muon_learning_rate": (1e-30, 1e30),
    "optimizer.muon_momentum": (0, 0.999999),
    "optimizer.ema": (0, 0.9999999),
    "optimizer.weight_decay": (0, 1e30),
    "optimizer.clip_norm": (1e-30, 1e30),
    "log.peak_tflops": (0, 1e6),
}
_CHOICES = {
    "precision": ("auto", "float32", "bfloat16"),
    "on_nonfinite": ("stop", "skip"),
    "data.tokenizer": (*tokenizers.KINDS, "pretrained"),
    "data.packing": ("stream", "documents"),
    "model.positions": POSITIONS,
    "model.activation": tuple(ACTIVATIONS),
    "model.mlp": MLPS,
    "model.norm": NORMS,
    "model.norm_at": NORM_AT,
    "model.rotary.scaling": SCALINGS,
    "model.remat": REMAT,
    "model.impl": (
        "auto",
        "blockwise",
        "dense",
        "pallas",
    ),  # other kernels support only some calls of a run: "auto" picks them
    "eval.part": ("all", "first", "second"),
    "optimizer.name": ("adamw", "muon", "lion", "sgd"),
    "optimizer.schedule": ("cosine", "linear", "constant"),
    "parallel.strategy": ("pmap", "mesh"),
}
# True, False, or None to choose.
_FLAGS = ("model.scan", "model.attention_bias", "model.qkv_bias")
_OPTIONAL_NUMBERS = (  # or None
    "model.soft_cap",
    "model.logit_cap",
    "model.score_scale",
    "model.local_base",
    "model.rotary.fast_turns",
    "model.rotary.attention_factor",
)
# A run may be resumed with other values of these: they change how it runs, not what it computes. A text may move: its
# content is compared by sha256, and so is that of a mixture, with its weights.
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


def default() -> ConfigDict:
    """Every field with its default, the values of `configs/quickstart.py`.

    >>> config = default()
    >>> config.model.width
    128
    """
    config = ConfigDict()
    config.steps = 2000  # optimizer updates
    config.seed = 0  # of initialisation, data order and dropout
    config.batch_size = 12  # sequences per update, over all devices and accumulation steps
    config.on_nonfinite = "stop"  # at a loss or gradient that is not finite: stop, or skip the update
    # Of the computation: float32, bfloat16, or auto for the one that the hardware multiplies faster, which config.json
    # then names. Parameters are always float32.
    config.precision = "auto"
    # Start from these weights instead of random ones: the workdir of a run, or a folder with a Hugging Face model. Its
    # tokenizer and the shape of its model are used; how to train it (dropout, remat, scan, impl), and a context shorter
    # than its own, are set here.
    config.init_from = ""
    config.data = _data()
    config.model = _model()
    config.optimizer = _optimizer()
    config.parallel = _parallel()
    config.eval = ConfigDict()
    config.eval.every = 250  # steps
    config.eval.windows = 2048  # scored per evaluation, at most; a text with fewer is scored completely
    config.eval.part = "all"  # of the held-out text: all, first or second half
    config.eval.patience = 0  # evaluations without a lower validation loss that end the run; 0 for none
    config.sample = ConfigDict()
    config.sample.every = 1000  # steps; 0 for the end only
    config.sample.length = 400  # tokens; 0 for no samples
    config.checkpoint = ConfigDict()
    config.checkpoint.every = 250  # steps
    config.checkpoint.keep = 2  # newest ones, besides the best
    config.checkpoint.history = 0  # that stay, from step 0 to the last, evenly spaced by the logarithm of the step
    config.checkpoint.dir = ""  # WORKDIR/checkpoints when empty
    config.log = ConfigDict()
    config.log.every = 10  # steps between two records of training metrics
    config.log.tensorboard = True
    config.log.peak_tflops = 0.0  # of one device, for the mfu; 0 to measure it at the start
    return config


def _data() -> ConfigDict:
    data = ConfigDict()
    data.name = "python_docs"  # python_docs, quijote, text or tfds:NAME; text when a path is given
    data.path = ""  # a file or a glob: UTF-8 text, or *.jsonl, *.ndjson, *.parquet, *.array_record
    data.feature = ""  # the field, column or feature with the text, where a document has several
    data.mixture = ""  # corpora and weights instead of a name, e.g. "quijote=3, notes/*.txt=1, tfds:NAME=0.5"
    data.tokenizer = "char"  # char, byte, word, bpe or wordpiece; "pretrained" is that of init_from
    data.vocab_size = 1024  # of word, bpe and wordpiece, at most
    data.tokenizer_sample = 64  # MiB of the text, evenly spaced, on which word, bpe and wordpiece are trained
    data.validation_fraction = 0.1  # the last part of the text, held out
    data.packing = "stream"  # stream: the text as one; documents: each is encoded, and attended to, by itself
    data.store = ""  # folder of the tokens; attnlab/tokens in the user's cache folder when empty
    return data


def _model() -> ConfigDict:
    model = ConfigDict()
    model.num_layers = 4
    model.num_heads = 4
    model.kv_heads = config_dict.placeholder(int)  # heads of keys and values; None for num_heads
    model.width = 128
    model.head_dim = config_dict.placeholder(int)  # features of a head; None for width / num_heads
    model.context = 64  # tokens per sequence
    model.vocab_size = config_dict.placeholder(int)  # None for the tokenizer's; a larger one pads it
    model.dropout = 0.0
    model.positions = "rotary"  # learned, sinusoidal, rotary, alibi or none
    model.rotary = _rotary()
    model.window = config_dict.placeholder(int)  # positions to attend to; None for all previous ones
    model.pattern = ""  # "local" or "global" for each layer, repeated, e.g. "local local global"; empty for one kind
    model.local_base = config_dict.placeholder(float)  # rotary base of local layers; None for that of all
    model.soft_cap = config_dict.placeholder(float)  # limit of attention logits; None for none
    model.score_scale = config_dict.placeholder(float)  # of attention logits; None for 1/√head_dim
    model.sinks = False  # a learned extra logit for each head
    model.qk_norm = True  # keeps large learning rates stable (Henry et al. 2020)
    model.qk_norm_joint = False  # over the features of all heads together
    model.use_bias = False  # of linear layers and of layer norms
    model.attention_bias = config_dict.placeholder(bool)  # of attention's layers; None for use_bias
    model.qkv_bias = config_dict.placeholder(bool)  # of queries, keys and values; None for attention_bias
    model.mlp_ratio = 4.0  # width of the feed-forward layer over the model's; 0 for attention alone
    model.mlp = "plain"  # plain or gated
    model.activation = "gelu_tanh"  # of the feed-forward layer: gelu_tanh, gelu, relu, relu_squared or silu
    model.norm = "layer"  # layer, rms or rms_plus_one
    model.norm_at = "before"  # attention and feed-forward layers, after them, or both
    model.norm_epsilon = 1e-5
    model.value_residual = False  # mix the values of each layer with those of the first
    model.zero_outputs = False  # the layers that project onto the residual stream start at 0
    model.bigrams = False  # a table of logits for each last token, of vocab_size² parameters
    model.tie_embeddings = True  # the output layer is the embedding
    model.embedding_scale = 1.0  # factor of the embeddings
    model.logit_scale = 1.0  # factor of the logits
    model.logit_cap = config_dict.placeholder(float)  # limit of the logits; None for none
    # What of a block is stored for the gradient, the rest being computed again: none (nothing is computed again, in a
    # loop no product is), dots (its matrix products are stored), attention (its input and what attention returns) or
    # block (its input alone: a third more operations and the least memory). On CPUs it needs the loop: without it XLA
    # computes all blocks again before it needs the first.
    model.remat = "none"
    # The layers as one loop over stacked parameters, compiled in the time of one; None for True from four layers on,
    # and with fsdp.
    model.scan = config_dict.placeholder(bool)
    model.impl = "auto"  # backend of the attention operator
    return model


def _rotary() -> ConfigDict:
    rotary = ConfigDict()
    rotary.base = 10_000.0
    rotary.fraction = 1.0  # share of a head's features that are rotated
    # For sequences longer than those of the training: none, linear, llama3 or yarn, see attnlab.nn.Rotary.
    rotary.scaling = "none"
    rotary.factor = 1.0  # by which pairs of features are slowed
    rotary.original_context = 0  # of the training, in tokens, for llama3 and yarn
    rotary.slow_turns = 1.0  # within that, below which pairs are slowed completely
    rotary.fast_turns = config_dict.placeholder(float)  # above which they are not; None for 4 (llama3) or 32 (yarn)
    rotary.attention_factor = config_dict.placeholder(float)  # of yarn; None for 0.1·ln(factor) + 1
    rotary.truncate = True  # yarn's bounds to whole pairs
    return rotary


def _optimizer() -> ConfigDict:
    optimizer = ConfigDict()
    optimizer.name = "adamw"  # adamw, muon, lion or sgd
    optimizer.learning_rate = 5e-3  # at its peak; with muon, of what is no matrix of a layer
    optimizer.muon_learning_rate = 0.02  # of those matrices, at its peak
    optimizer.muon_momentum = 0.95
    optimizer.schedule = "cosine"  # after the warm-up: cosine, linear or constant
    optimizer.final_fraction = 0.0  # learning rate at the last step, over the peak
    optimizer.decay_fraction = 0.2  # of all steps: the linear end of a constant schedule
    optimizer.warmup_steps = 100  # at most half of steps
    optimizer.b1 = 0.9  # the momentum of sgd
    optimizer.b2 = 0.95
    optimizer.b2_halflife = 0.0  # in tokens, instead of b2: what it averages then does not depend on batch_size
    optimizer.weight_decay = 0.1  # of kernels and embeddings, not of biases and norms
    optimizer.clip_norm = 1.0  # of the whole gradient
    optimizer.accumulation = 1  # gradients averaged before an update; divides batch_size
    optimizer.ema = 0.0  # decay of an average of the parameters, to evaluate and to load, e.g. 0.999; 0 for none
    return optimizer


def _parallel() -> ConfigDict:
    parallel = ConfigDict()
    parallel.strategy = "mesh"  # mesh (jit with named sharding) or pmap
    # Devices on each axis: data and fsdp split the batch, fsdp the parameters and the optimizer state as well; context
    # splits sequences; tensor heads, hidden features and the vocabulary. −1 for all available devices.
    parallel.mesh = ConfigDict({"data": -1, "fsdp": 1, "context": 1, "tensor": 1})
    parallel.timeout = 300  # seconds without a step after which another process is considered dead
    return parallel


def experiments() -> dict[str, Path]:
    """The files of the experiments by name: those in `configs/`, which the wheel holds as well."""
    return shipped.files("configs")


def find(experiment: str) -> str:
    """The path of an experiment that is given by name or by path, with its variant.

    A path has a slash or ends in ".py": a file or folder of the current folder never takes the place of a name.

    Raises:
      UserError: there is none.

    >>> Path(find("sancho:tiny")).name
    'sancho.py:tiny'
    """
    name, colon, variant = experiment.partition(":")
    named = experiments()
    if name in named:
        return f"{named[name]}{colon}{variant}"
    try:
        if ("/" in name or name.endswith(".py")) and Path(name).is_file():
            return experiment
    except OSError as error:  # an invalid file name
        raise UserError(f"--config={name}: {error.strerror}") from error
    here = [str(file) for file in Path(name).parent.glob("*.py")] if "/" in name else []
    close = nearest(name, [*named, *here]) or nearest(Path(name).stem, named)
    raise UserError(f"--config={name}: no such experiment or file{close}: there are {', '.join(named)}")


def completed(config: ConfigDict) -> ConfigDict:
    """A checked copy of `config`, with `data.name` set where `data.path` or `data.mixture` is, and absolute paths.

    Raises:
      UserError: an unknown field, a missing one, or an invalid value; nothing is loaded or written.
    """
    _check_fields(config)
    config = from_dict(_plain(config))
    if config.data.path and config.data.mixture:
        raise UserError("config.data.path and config.data.mixture are both set: name the path in the mixture")
    if config.data.path or config.data.mixture:
        config.data.name = "text" if config.data.path else "mixture"
    if config.init_from:
        config.init_from = str(Path(config.init_from).expanduser().absolute())
    if config.data.store:
        config.data.store = str(Path(config.data.store).expanduser().absolute())
    folder = config.checkpoint.dir
    if folder and "://" not in folder:
        config.checkpoint.dir = str(Path(folder).expanduser().absolute())  # found from any working directory
    check(config)
    return config


def check_saved(config: ConfigDict) -> None:
    """Raises UserError for a value, of the config of an existing run, that a new run could not have."""
    _check_fields(config)
    check(config)


def _check_fields(config: ConfigDict) -> None:
    """Raises UserError where the fields or their types differ from `default()`."""
    expected, given = fields(default()), fields(config)
    for field, value in given.items():
        if field not in expected:
            raise UserError(f"config.{field} is not a field{nearest(field, expected) or '; see attnlab/config.py'}")
        like = expected[field]
        if field in _FLAGS and (value is None or isinstance(value, bool)):
            continue
        optional = (int, float, type(None)) if field in _OPTIONAL_NUMBERS else (int, type(None))
        types = optional if like is None else (int, float) if isinstance(like, float) else type(like)
        if not isinstance(value, types) or (isinstance(value, bool) and not isinstance(like, bool)):
            raise UserError(f"config.{field} = {value!r}: expected a value like {like!r}")
    for field in expected:
        if field not in given:
            raise UserError(f"config.{field} is missing: start from attnlab.config.default()")


def check(config: ConfigDict) -> None:
    """Raises UserError for an invalid value."""
    values = fields(config)
    for field, least in _MINIMA.items():
        if values[field] is not None and not least <= values[field] < 2**31:
            raise UserError(f"config.{field} = {values[field]}: expected {least} or more, below 2^31")
    for field, (low, high) in _RANGES.items():
        if values[field] is not None and not low <= values[field] <= high:
            raise UserError(f"config.{field} = {values[field]}: expected a number from {low:g} to {high:g}")
    for field, choices in _CHOICES.items():
        if values[field] not in choices:
            close = nearest(values[field], choices)
            raise UserError(f"config.{field} = {values[field]!r}: expected one of {', '.join(choices)}{close}")
    if config.checkpoint.history > config.steps + 1:
        raise UserError(
            f"config.checkpoint.history = {config.checkpoint.history}: expected at most config.steps + 1 = "
            f"{config.steps + 1}, as step 0 counts"
        )
    if 0 < config.log.peak_tflops < 1e-6:
        raise UserError(f"config.log.peak_tflops = {config.log.peak_tflops}: expected 1e-6 or more, or 0 to measure it")
    try:
        check_shape(config.model)
    except ValueError as error:
        raise UserError(f"config.model.{error}") from error


def difference(saved: dict, config: ConfigDict) -> str:
    """The first field that prevents resuming a saved run with `config`, and both values; "" when there is none."""
    before, now = fields(from_dict(saved)), fields(config)
    for field in dict.fromkeys([*before, *now]):
        if not field.startswith(FREE_TO_CHANGE) and before.get(field) != now.get(field):
            return f"config.{field} = {now.get(field)!r}, there it was {before.get(field)!r}"
    return ""


def another(workdir: Path, difference: str) -> UserError:
    """The error for a workdir that holds a run with another config."""
    return UserError(
        f"{workdir} holds a run with another config ({difference}): choose a new --workdir, or repeat its command"
    )


def to_json(config: ConfigDict, **metadata) -> str:
    """The content of `config.json`: the fields of `config` and, beside them, metadata of the run (its corpus, …)."""
    return json.dumps(_plain(config) | metadata, indent=2) + "\n"


def from_dict(saved: dict) -> ConfigDict:
    """The config in the content of `config.json`; missing fields have their defaults."""
    config = default()
    saved = {name: value for name, value in saved.items() if name in config}
    if "remat" in saved.get("model", {}):
        saved["model"] = saved["model"] | {"remat": remat_name(saved["model"]["remat"])}
    config.update(ConfigDict(saved))
    return config


def remat_name(value: str | bool) -> str:
    """The name of `config.model.remat`, which was a bool once.

    >>> remat_name(True), remat_name("dots")
    ('block', 'dots')
    """
    return ("block" if value else "none") if isinstance(value, bool) else value


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
