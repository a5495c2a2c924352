"""The variants of a comparison: their names, how each changes a config, and the widths that give them equal sizes."""

import functools
import inspect
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnlab import commands, experiments
from attnlab import config as configs
from attnlab.config import RunConfig
from attnlab.nn import GPT
from attnlab.nn.layer import LayerConfig
from attnlab.support.errors import ArgumentError, UserError
from attnlab.training import flops, precision

CLOSE = {"parameters": 0.02, "flops": 0.02, "state": 0.05}  # comparable sizes differ by at most this fraction
WIDEST = 2**20  # matching gives up beyond this width
SIZES = tuple(CLOSE)
# Fields that decide which tokens are trained on and scored, and fields that the comparison itself sets.
SHARED = ("steps", "batch_size", "model.context", "data.", "eval.")
CHOSEN = ("seed", "optimizer.learning_rate", "eval.part")


class Variant(NamedTuple):
    """One row of a comparison.

    Attributes:
      name: a single line.
      apply: function that takes the shared config and returns the variant's config.
      comparable: False if matching was requested, but the size is not within `CLOSE` of the first variant's size.
    """

    name: str
    apply: Callable[[RunConfig], RunConfig]
    comparable: bool = True

    def config(self, base: RunConfig) -> RunConfig:
        """Return the variant's config; raise UserError if it is invalid or changes `SHARED` or `CHOSEN` fields."""
        try:
            if not isinstance(config := self.apply(base), RunConfig):
                raise UserError(f"its function returned {config!r}: expected a RunConfig, such as config.changed(…)")
            config.check_effects()
        except UserError as error:
            raise UserError(f"variant {self.name!r}: {error}") from error
        except Exception as error:  # whatever a user's function raises
            raise UserError(f"variant {self.name!r}: {type(error).__name__}: {error}") from error
        before = base.fields
        changed = [field for field, value in config.fields.items() if field in before and value != before[field]]
        for field in sorted(changed, key="data.name".__eq__):  # last, because data.path sets it as well
            if field in CHOSEN:
                raise UserError(f"variant {self.name!r}: the comparison chooses config.{field}: remove it")
            if field.startswith(SHARED):
                why = "must be equal in all variants, because losses are compared after equally many tokens of one text"
                raise UserError(f"variant {self.name!r}: config.{field} {why}: set it for the whole comparison")
        return config


def of_values(variants: Mapping[str, Any]) -> list[Variant]:
    """Build variants from a dictionary of names and definitions: see `attnlab.comparing.compare`."""
    if not isinstance(variants, Mapping):
        raise ArgumentError("variants", variants, "expected a dictionary from names to definitions")
    _check_kinds([what.get("model.layers") if isinstance(what, Mapping) else what for what in variants.values()])
    if wrong := [name for name in variants if not isinstance(name, str) or not name.strip() or "\n" in name]:
        raise UserError(f"variant {wrong[0]!r}: expected a name of one line")
    named_variants = [Variant(name, _function(name, what)) for name, what in variants.items()]
    if len(named_variants) < 2:
        raise UserError('one variant: name another to compare it with, e.g. --variant "alibi: model.positions=alibi"')
    return named_variants


def _function(name: str, what) -> Callable[[RunConfig], RunConfig]:
    """Return the function that takes the shared config and returns a variant's config."""
    if inspect.isfunction(what) and len(inspect.signature(what).parameters) == 1:
        return what
    try:
        values = fields_of(what) if isinstance(what, str | Mapping) else {"model.layers": what}
    except UserError as error:
        raise UserError(f"variant {name!r}: {error}") from error
    return lambda config: config.changed(values)


def fields_of(what: str | Mapping[str, Any]) -> dict[str, Any]:
    """Parse "FIELD=VALUE FIELD=VALUE", or a dictionary of fields; strings are read as on a command line."""
    try:
        words = shlex.split(what) if isinstance(what, str) else ()
        pairs = (word.removeprefix("--").removeprefix("config.").split("=", 1) for word in words)
        values = dict(pairs if isinstance(what, str) else what)
    except ValueError as error:
        why = "expected FIELD=VALUE FIELD=VALUE" if "sequence" in str(error) else error
        raise UserError(f"{what.strip()}: {why}") from error
    for field in values:
        if why := configs.unknown(str(field)):
            raise UserError(why)
    is_text = {field: isinstance(value, str) and field in configs.declared() for field, value in values.items()}
    return {field: commands.value_of(field, x) if is_text[field] else x for field, x in values.items()}


def _check_kinds(layers: Sequence) -> None:
    """Raise UserError if two layer classes would have the same kind."""
    kinds = {}
    for layer in layers:
        config = type(layer) if isinstance(layer, LayerConfig) else layer
        if isinstance(config, type):
            kind = config.kind if issubclass(config, LayerConfig) else config.__name__
            if kinds.setdefault(kind, config) is not config:
                raise UserError(f"two layer classes are named {kind}: rename one")


def parse(texts: Sequence[str], file: str | None) -> dict[str, Any]:
    """Read the definitions of variants from texts "NAME: FIELD=VALUE …" and from the dictionary VARIANTS of a file."""
    definitions = [_parsed(text) for text in texts]
    in_file = experiments.dictionary(file, "VARIANTS") if file else {}
    if file and not in_file:
        raise UserError(
            f"{file} has no dictionary VARIANTS from names to fields and values: write one, or name variants "
            'with --variant "NAME: FIELD=VALUE"'
        )
    definitions += in_file.items()
    names = [name for name, _ in definitions]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"--variant={twice[0]!r} is given twice: choose another name")
    return dict(definitions)


def _parsed(text: str) -> tuple[str, str]:
    name, colon, fields = text.partition(":")
    if not colon or not name.strip():
        example = 'expected "NAME: FIELD=VALUE FIELD=VALUE", e.g. "alibi: model.positions=alibi"'
        raise UserError(f'--variant="{text}": {example}')
    return name.strip(), fields


def size(config: RunConfig, vocab_size: int, of: str, length: int | None = None) -> float:
    """Size of a config's model: parameters, training FLOPs per token, or decoding-state bytes for `length` tokens."""
    config = config.changed({"precision": precision.resolved(config.precision)})
    model = GPT(config.over_tokens(vocab_size))
    if of == "flops":
        return flops.per_token(model, config.model.context)
    if of == "state":
        return float(state_bytes(model, length))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
    return float(sum(leaf.size for leaf in jax.tree.leaves(shapes)))


def state_bytes(model: GPT, length: int | None = None) -> int:
    """Bytes of decoding state for one text of `length` tokens; None for the model's context."""
    empty = jax.eval_shape(lambda: model.init_caches(1, length))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(empty))


def matched(
    variants: Sequence[Variant], base: RunConfig, vocab_size: int, of: str, length: int | None = None
) -> list[Variant]:
    """Give all variants the first variant's size by changing feed-forward widths, or for "state" model widths.

    A model's width changes in steps that keep the width of a head whole, and with rotary positions even. `length` is
    the number of tokens at which "state" is matched; None for the context. UserError if no width is large enough.
    """
    wanted = size(variants[0].config(base), vocab_size, of, length)
    return [variants[0], *(_matched(variant, base, vocab_size, of, wanted, length) for variant in variants[1:])]


def _matched(variant: Variant, base: RunConfig, vocab_size: int, of: str, wanted: float, length) -> Variant:
    model = variant.config(base).model
    is_whole = of == "state"
    step = model.num_heads * (2 if model.position_encoding == "rotary" else 1) if is_whole else 1
    current, low, high = (model.width, step, 2 * step) if is_whole else (model.hidden, 0, 2)

    def changes(width: int) -> dict:
        return {"model.width": width} if is_whole else {"model.mlp_ratio": width / model.width}

    def size_at(width: int) -> float:
        return size(variant.config(base).changed(changes(width)), vocab_size, of, length)

    while (largest := size_at(high)) < wanted:
        if high > WIDEST:
            raise UserError(
                f"variant {variant.name!r}: {of} = {largest:,.0f} at width {high:,}, but the first variant has "
                f"{wanted:,.0f}: no width makes it as large; change its heads, or match another size"
            )
        low, high = high, 2 * high
    while high - low > step:
        middle = (low + high) // (2 * step) * step
        low, high = (middle, high) if size_at(middle) < wanted else (low, middle)
    # The variant's original width comes first, so that it wins if the size does not depend on the width.
    width = min((current, low, high), key=lambda width: abs(size_at(width) - wanted))
    close = abs(size_at(width) / wanted - 1) <= CLOSE[of]
    return variant._replace(apply=functools.partial(_changed, variant.apply, changes(width)), comparable=close)


def _changed(apply: Callable[[RunConfig], RunConfig], changes: dict, config: RunConfig) -> RunConfig:
    return apply(config).changed(changes)
