"""The variants of a comparison: names, the options of `attnlab train` that make them, and widths that match in size."""

import re
import runpy
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnlab import commands
from attnlab import config as configs
from attnlab.config import RunConfig
from attnlab.nn import GPT, custom
from attnlab.nn.config import KINDS
from attnlab.nn.layer import LayerConfig
from attnlab.support.errors import UserError
from attnlab.support.options import option_values, options
from attnlab.sweeping import grid
from attnlab.training import flops, precision

CLOSE = 0.05  # beyond which two sizes are not comparable
WIDEST = 2**20  # features of a width that is tried
SIZES = ("parameters", "flops", "state")
SHARED = ("steps", "batch_size", "model.context")  # with data.* and eval.*: which tokens are trained on and scored


class Variant(NamedTuple):
    """One row of a comparison."""

    name: str
    options: tuple[str, ...] = ()  # of `attnlab train`: --config.FIELD=VALUE
    comparable: bool = True  # False if sizes are matched, and its size differs by more than 5 % from the first's


def of_values(variants: Mapping[str, Any]) -> list[Variant]:
    """Variants of names, and what makes each: see `attnlab.comparing.compare`."""
    layers = [what.get("model.layers") if isinstance(what, Mapping) else what for what in variants.values()]
    _check_kinds(layers)
    if wrong := [name for name in variants if not isinstance(name, str) or not name.strip() or "\n" in name]:
        raise UserError(f"variant {wrong[0]!r}: expected a name of one line")
    found = [Variant(name, options_of(name, what)) for name, what in variants.items()]
    for variant in found:
        fields = [option.removeprefix("--config.").partition("=")[0] for option in variant.options]
        if same := [field for field in fields if field in SHARED or field.startswith(("data.", "eval."))]:
            why = "all variants have it in common, because losses are compared after as many tokens of one text"
            raise UserError(f"variant {variant.name!r}: config.{same[0]}: {why}: set it for the whole comparison")
    if len(found) < 2:
        raise UserError('one variant: name another to compare it with, e.g. --variant "alibi: model.positions=alibi"')
    return found


def _check_kinds(layers: Sequence) -> None:
    """Raise UserError for two classes of layers that would be one kind."""
    kinds = {}
    for layer in layers:
        config = type(layer) if isinstance(layer, LayerConfig) else layer
        if isinstance(config, type):
            kind = config.kind if issubclass(config, LayerConfig) else config.__name__
            if kinds.setdefault(kind, config) is not config:
                raise UserError(f"two classes of layers are named {kind}: rename one")


def parse(texts: Sequence[str], file: str | None) -> dict[str, Any]:
    """The values that make variants, from texts "NAME: FIELD=VALUE …", and from the dictionary VARIANTS of a file."""
    found = [_parsed(text) for text in texts]
    in_file = fields_of_file(file, "VARIANTS") if file else {}
    if file and not in_file:
        raise UserError(
            f"{file} has no dictionary VARIANTS of names, and their fields and values: write one, or name variants "
            'with --variant "NAME: FIELD=VALUE"'
        )
    for name, what in in_file.items():
        if not isinstance(what.get("model.layers", "") if isinstance(what, Mapping) else what, str):
            raise UserError(
                f"{file}: variant {name!r} is a value of Python, and the command takes fields: name the file of the "
                "layer by --import, and write model.layers=NAME, or call attnlab.comparing.compare"
            )
    found += in_file.items()
    names = [name for name, _ in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--variant={twice[0]!r} is there twice: choose another name")
    return dict(found)


def _parsed(text: str) -> tuple[str, str]:
    name, colon, fields = text.partition(":")
    if not colon or not name.strip():
        example = 'expected "NAME: FIELD=VALUE FIELD=VALUE", e.g. "alibi: model.positions=alibi"'
        raise UserError(f'--variant="{text}": {example}')
    return name.strip(), fields


def options_of(name: str, what) -> tuple[str, ...]:
    """The options of `attnlab train` that make a variant; errors begin with its name."""
    fields = what
    if isinstance(what, str):
        try:
            fields = dict(word.removeprefix("--").removeprefix("config.").split("=", 1) for word in shlex.split(what))
        except ValueError as error:
            why = "expected FIELD=VALUE FIELD=VALUE" if "sequence" in str(error) else error
            raise UserError(f"variant {name!r}: {what.strip()}: {why}") from error
    elif not isinstance(what, Mapping):
        fields = {"model.layers": what}
    found = []
    for field, value in fields.items():
        if why := configs.unknown(field):
            raise UserError(f"variant {name!r}: {why}")
        if field in ("seed", "optimizer.learning_rate", "eval.part"):
            raise UserError(f"variant {name!r}: config.{field} is chosen by the comparison: leave it to it")
        if field == "model.layers" and not isinstance(value, str):
            found += _layers(name, value)
        else:
            found.append(f"--config.{field}={value}")
    return tuple(found)


def _layers(name: str, value) -> list[str]:
    """The options of a config of layers, a class, a mask, a score mod, or a function of scores."""
    if isinstance(value, LayerConfig):
        if KINDS.get(value.kind) is not type(value):
            custom.register(type(value))
        declared, values = options(type(value)), option_values(value)
        configs.check_recordable([value])
        own = {field: x for field, x in values.items() if x != declared[field].default}
        kind = value.kind
        return [
            f"--config.model.layers={kind}",
            *(f"--config.model.{kind}.{field}={x}" for field, x in own.items()),
        ]
    word = re.sub(r"\W", "_", f"_{name}" if name[:1].isdigit() else name)
    kind = None if isinstance(value, type) else f"own_{word}"  # no name of a kind of attnlab
    return [f"--config.model.layers={custom.register(value, kind)}"]


def fields_of_file(file: str, name: str) -> Mapping:
    """A dictionary of names, and what makes each, in a Python file or an experiment; {} where it has none."""
    try:
        found = runpy.run_path(configs.find(file)).get(name, {})
    except UserError:
        raise
    except Exception as error:  # whatever a user's file raises
        raise UserError(f"{file}: {type(error).__name__}: {commands.one_line(error)}") from error
    if not isinstance(found, Mapping):
        raise UserError(f"{file}: {name} is not a dictionary of names to fields and values")
    return found


def config_of(options: Sequence[str], name: str = "") -> RunConfig:
    """The completed config of some options of `attnlab train`; errors name the variant."""
    try:
        return grid.config_of(options)
    except UserError as error:
        raise UserError(f"variant {name!r}: {error}" if name else str(error)) from error


def size(config: RunConfig, vocab_size: int, of: str, length: int | None = None) -> float:
    """The parameters of a config's model, its FLOPs of training per token, or the bytes it keeps of `length` tokens."""
    config = config.changed({"precision": precision.resolved(config.precision)})
    model = GPT(config.over_tokens(vocab_size))
    if of == "flops":
        return flops.per_token(model, config.model.context)
    if of == "state":
        return float(state_bytes(model, length))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    return float(sum(leaf.size for leaf in jax.tree.leaves(shapes)))


def state_bytes(model: GPT, length: int | None = None) -> int:
    """Bytes that decoding keeps of one text of `length` tokens; None for the model's context."""
    empty = jax.eval_shape(lambda: model.init_caches(1, length))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(empty))


def matched(
    variants: Sequence[Variant], options: Sequence[str], vocab_size: int, of: str, length: int | None = None
) -> list[Variant]:
    """Variants whose widths make them as large as the first variant, in steps that keep heads whole.

    `length` is the number of tokens at which "state" is matched; None for the context. UserError where no width makes a
    variant as large.
    """
    wanted = size(config_of([*options, *variants[0].options], variants[0].name), vocab_size, of, length)
    return [variants[0], *(_matched(variant, options, vocab_size, of, wanted, length) for variant in variants[1:])]


def _matched(variant: Variant, options, vocab_size: int, of: str, wanted: float, length) -> Variant:
    config = config_of([*options, *variant.options], variant.name)
    step = config.model.num_heads * (2 if config.model.position_encoding == "rotary" else 1)
    width, low, high = config.model.width, step, 2 * step

    def size_at(width: int) -> float:
        return size(config.changed({"model.width": width}), vocab_size, of, length)

    while (largest := size_at(high)) < wanted:
        if high > WIDEST:
            raise UserError(
                f"--match={of}: {variant.name!r} has {largest:,.0f} at width {high:,}, the first one {wanted:,.0f}: no "
                "width makes it as large; change its heads, or choose another --match"
            )
        low, high = high, 2 * high
    while high - low > step:
        middle = (low + high) // (2 * step) * step
        low, high = (middle, high) if size_at(middle) < wanted else (low, middle)
    # Its own width comes first, for a size that does not depend on it.
    width = min((width, low, high), key=lambda width: abs(size_at(width) - wanted))
    close = abs(size_at(width) / wanted - 1) <= CLOSE
    return variant._replace(options=(*variant.options, f"--config.model.width={width}"), comparable=close)
