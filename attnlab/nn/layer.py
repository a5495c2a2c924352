"""The protocol of a layer, on which blocks, stacks, `attnlab.see`, checks and user-defined layers rely."""

import dataclasses
import inspect
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from attnlab.nn.checks import MaskLike, check_lengths, check_segments
from attnlab.ops.checks import known_keywords
from attnlab.ops.masks import Mask
from attnlab.support.options import FieldError, documented, options, validate
from attnlab.types import Array


class Context(NamedTuple):
    """The arguments of a layer besides its inputs and its cache. All except the layer's number may be None.

    Attributes:
      mask: and-ed with the layer's own mask. With a cache, the mask's keys are the cache's S slots.
      segments: `[B, T]`, each token's document number, where a sequence holds several documents one after another: a
        token attends only to its own document, and positions restart with each document. Not allowed with a cache.
      lengths: `[B]`, the number of tokens in each sequence. Later tokens are padding: no token attends to padding, and
        no cache stores it.
      positions: `[T]` or `[B, T]`, positions in the sequence; None for 0, 1, 2, …. Not allowed with a cache.
      dropout_key: one key, or one per example `[B]`; None for no dropout.
      layer: the layer's number in its model, from 0.
      first_values: `[B, T, Hk, D]`, the values of the first layer, for value residuals; None in that layer.

    >>> layer, call = DifferentialAttention(num_heads=2), Context(layer=3)  # as the fourth layer of a model
    >>> layer.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)), call, method="forward")[0].out.shape
    (2, 5, 8)
    """

    mask: Mask | None = None
    segments: Int[Array, "B T"] | None = None
    lengths: Int[Array, " B"] | None = None
    positions: Int[Array, "..."] | None = None
    dropout_key: Array | None = None
    layer: Int[Array, ""] | int = 0
    first_values: Float[Array, "B T Hk D"] | None = None


class LayerOut(NamedTuple):
    """The results of a layer.

    Attributes:
      out: `[B, T, Fo]`; in a block, Fo is the width of the inputs.
      cache: the extended cache; None in a call without one.
      values: `[B, T, Hk, D]`, the layer's values, if it has a value residual; otherwise None.

    >>> LayerOut(jnp.ones((2, 5, 8)))._replace(cache=MixerState()).cache.length is None
    True
    """

    out: Float[Array, "B T Fo"]
    cache: Any = None
    values: Float[Array, "B T Hk D"] | None = None


class Layer(nn.Module):
    """A module that mixes tokens, or a block around one. Subclasses define `forward` and, for decoding, `init_cache`.

    A cache is a tuple or a dataclass with `length`, int `[B]`; axis 1 of arrays that grow has the capacity's size.

    >>> class Mean(Layer):  # of a token and the one before it
    ...     def forward(self, x, context, cache=None):
    ...         return LayerOut((x + jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]) / 2)
    >>> Mean().apply({}, jnp.arange(3.0)[None, :, None])[0, :, 0]
    Array([0. , 0.5, 1.5], dtype=float32)
    """

    operator: ClassVar[str | None] = None  # name of the `attnlab` function that mixes the tokens
    takes: ClassVar[tuple[str, ...] | None] = None  # base-class options that the layer supports; None for all
    value_residual = False  # whether the layer returns its values and uses the first layer's
    dropout_rate = 0.0

    def __init_subclass__(cls, **keywords):
        super().__init_subclass__(**keywords)
        declared = {name: each for name, each in options(cls).items() if name in inspect.get_annotations(cls)}
        cls.__doc__ = cls.__doc__ and documented(cls.__doc__, declared)

    @property
    def drops(self) -> bool:
        """Whether the layer has dropout."""
        return bool(self.dropout_rate)

    def forward(self, x: Float[Array, "B T F"], context: Context, cache: Any = None) -> LayerOut:
        """Compute the layer's outputs and, with a cache, the extended cache."""
        raise TypeError(f"{type(self).__name__} defines no forward(x, context, cache): write it in the subclass")

    def init_cache(self, batch: int, features: int, capacity: int = 0) -> Any:
        """The cache before the first token, for inputs of width `features` and, if it grows, `capacity` positions."""
        raise TypeError(f"{type(self).__name__} defines no init_cache(batch, features, capacity): it cannot decode")

    @known_keywords
    def __call__(
        self,
        x: Float[Array, "B T F"],
        *,
        mask: MaskLike | None = None,
        deterministic: bool = True,
        cache: Any = None,
        segments: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
        dropout_key: Array | None = None,
    ) -> Float[Array, "B T Fo"] | tuple[Float[Array, "B T Fo"], Any]:
        """Mix the tokens of each sequence.

        Args:
          x: `[B, T, F]`.
          mask, segments, lengths: see `Context`; a bool array counts as `masks.Dense`.
          deterministic: False for dropout.
          cache: cache of the previous tokens; before the first token, the result of `init_cache`.
          dropout_key: one key, or one per example `[B]`; the `dropout` rng when None.

        Returns:
          `[B, T, Fo]`, where Fo is x's width in a block; with a cache, also the extended cache.

        Raises:
          ValueError: inputs, a cache, segments or lengths have a wrong shape, segments come with a cache, or the layer
            does not support the mask.
          flax.errors.InvalidRngError: dropout is on, but there is neither `dropout_key` nor a `dropout` rng.
        """
        return self._checked_call(x, Context(mask, segments, lengths, None, dropout_key), deterministic, cache)

    def _checked_call(self, x, context: Context, deterministic: bool, cache, **others):
        """Check the arguments, call `forward`, and unpack its `LayerOut`."""
        if jnp.ndim(x) != 3:
            raise ValueError(
                f"the inputs of {type(self).__name__} have shape {jnp.shape(x)}, expected [batch, length, features]"
            )
        if cache is not None and context.positions is not None:
            raise ValueError("a cache counts positions itself: remove positions, or set cache.length")
        check_segments(context.segments, x, cache=cache, positions=context.positions, **others)
        check_lengths(context.lengths, x, **others)
        if cache is not None:
            self.check_cache(cache, x.shape[0], x.shape[-1])
        key = context.dropout_key
        if deterministic or not self.drops:
            key = None
        elif key is None:
            key = self.make_rng("dropout")
        result = self.forward(x, context._replace(dropout_key=key), cache, **others)
        return result.out if cache is None else (result.out, result.cache)

    def check_options(self) -> None:
        """Raise FieldError for a base class's option that is set although the layer does not take it."""
        for field in dataclasses.fields(self):
            is_taken = "option" not in field.metadata or field in option_fields(type(self))
            if not is_taken and getattr(self, field.name) != field.default:
                expected = f"{type(self).__name__} has no such option: remove it"
                raise FieldError(field.name, getattr(self, field.name), expected)

    def check_cache(self, cache, batch: int, features: int, name: str = "cache") -> None:
        """Raise ValueError unless a cache has the type and the shapes that `init_cache` returns for some capacity."""
        leaves = jax.tree.leaves(cache)
        capacity = jnp.shape(leaves[0])[1] if leaves and jnp.ndim(leaves[0]) > 1 else 0
        expected = jax.eval_shape(lambda: self.init_cache(batch, features, capacity))
        remedy = f"make it with init_cache(batch={batch}, …)"
        if type(cache) is not type(expected):
            raise ValueError(f"{name} is a {type(cache).__name__}, expected a {type(expected).__name__}: {remedy}")
        actual, wanted = (jax.tree_util.tree_leaves_with_path(tree) for tree in (cache, expected))
        if [path for path, _ in actual] != [path for path, _ in wanted]:
            raise ValueError(f"{name} has {_paths(actual)}, expected {_paths(wanted)}: {remedy}")
        for (path, leaf), (_, like) in zip(actual, wanted):
            field = f"{name}{jax.tree_util.keystr(path)}"
            if jnp.shape(leaf) != like.shape:
                raise ValueError(f"{field} has shape {jnp.shape(leaf)}, expected {like.shape}: {remedy}")
            kind = "integer" if jnp.issubdtype(like.dtype, jnp.integer) else "floating"
            dtype = getattr(leaf, "dtype", jnp.result_type(leaf))  # NumPy has float64 even if JAX does not
            if not jnp.issubdtype(dtype, getattr(jnp, kind)):
                raise ValueError(f"{field} has type {dtype}, expected {kind}: {remedy}")


def _paths(leaves) -> str:
    return ", ".join(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves)


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """A kind of layer and its options in a model. Subclasses become frozen dataclasses without a decorator.

    The options are the config's fields, and the fields that the layer's module declares by `option`, with the module's
    defaults unless the config sets others. A `ClassVar` is not an option. Each config is defined in its layer's file.

    >>> class Identity(Layer):
    ...     def forward(self, x, context, cache=None):
    ...         return LayerOut(x)
    >>> class IdentityConfig(LayerConfig, of=Identity, kind="identity"):
    ...     pass
    >>> IdentityConfig()
    IdentityConfig()

    Attributes:
      kind: the layer's name in `layers`; on a command line, `--config.model.KIND.OPTION` sets an option.
      module: the class of the layer.
    """

    kind: ClassVar[str] = ""
    module: ClassVar[type[Layer]] = Layer
    heads = rotary = None  # for kinds without these options
    value_residual = False

    def __init_subclass__(cls, of: type[Layer] | None = None, kind: str = ""):
        cls.kind = kind or cls.kind
        hints = dict(inspect.get_annotations(cls))
        for field in (*dataclasses.fields(cls), *option_fields(of or cls.module)):
            default = vars(cls).get(field.name)  # this config's default for a base's or the module's option
            if field.name in hints and "option" in field.metadata and isinstance(default, bool | int | float | str):
                setattr(cls, field.name, dataclasses.field(default=default, metadata=field.metadata))
        if of is not None:
            known, declared = {field.name for field in dataclasses.fields(cls)}, option_fields(of)
            missing = {field.name for field in option_fields(cls.module)} - {field.name for field in declared}
            added = {field.name: field for field in declared if field.name not in known | hints.keys()}
            for name, field in added.items():
                setattr(cls, name, dataclasses.field(default=field.default, metadata=field.metadata))
            # A base's option that the module lacks is annotated as a class variable, so that it is no field.
            removed = dict.fromkeys(missing & known - hints.keys(), ClassVar[Any])
            cls.module, cls.__annotations__ = of, {name: field.type for name, field in added.items()} | removed | hints
        dataclasses.dataclass(frozen=True)(cls)

    def __post_init__(self):
        validate(self)

    def make(self, model) -> Layer:
        """Make the layer for a `ModelConfig`, without a parent."""
        chosen = {field.name: getattr(self, field.name) for field in option_fields(self.module)}
        return self.module(**chosen | self.shared(model), parent=None)

    def shared(self, model) -> dict[str, Any]:
        """The module's fields that come from the model: dtype, heads and initializers, if the module has them."""
        values = {
            "dtype": model.dtype,
            "num_heads": self.heads or model.num_heads,
            "kernel_init": model.kernel_init,
            "out_kernel_init": model.out_kernel_init,
        }
        known = {field.name for field in dataclasses.fields(self.module)}
        return {name: value for name, value in values.items() if name in known}

    def check(self, model) -> None:
        """Raise FieldError for options that conflict with one another or with the model's options."""
        try:
            with jax.enable_x64(True):  # a float64 model may be described even if x64 is off
                jax.eval_shape(lambda: self.make(model).init_cache(1, model.width, 1))
        except FieldError as error:
            if error.field == "num_heads" and self.heads is None:  # the option belongs to the model
                raise
            name = "heads" if error.field == "num_heads" else error.field
            raise FieldError(f"{self.kind}.{name}", error.value, error.expected) from None


def option_fields(module: type[Layer]) -> list[dataclasses.Field]:
    """The options of a layer: the option fields that it declares, and its base classes' option fields that it takes."""
    hints, takes = inspect.get_annotations(module), module.takes
    fields = (field for field in dataclasses.fields(module) if "option" in field.metadata)
    return [field for field in fields if takes is None or field.name in takes or field.name in hints]
