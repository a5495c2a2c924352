"""The config of a model: the configs of its layers, and the options that they share, checked once at construction."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from attnlab.nn.differential import DifferentialConfig
from attnlab.nn.latent_attention import LatentConfig
from attnlab.nn.layer import LayerConfig
from attnlab.nn.mixers.causal_conv import CausalConvConfig
from attnlab.nn.mixers.gated_conv import GatedConvConfig
from attnlab.nn.mixers.gated_delta_net import DeltaConfig, GatedDeltaConfig
from attnlab.nn.mixers.gated_delta_product import DeltaProductConfig
from attnlab.nn.mixers.gated_linear_attention import GatedLinearConfig
from attnlab.nn.mixers.gru import GRUConfig
from attnlab.nn.mixers.hgrn2 import HGRN2Config
from attnlab.nn.mixers.kimi_delta_attention import KimiDeltaConfig
from attnlab.nn.mixers.linear_attention import LinearConfig
from attnlab.nn.mixers.mamba2 import Mamba2Config
from attnlab.nn.mixers.retention import RetentionConfig
from attnlab.nn.mixers.rwkv7 import RWKV7Config
from attnlab.nn.mlp import ACTIVATIONS, MLPS
from attnlab.nn.multihead import AttentionConfig, ForgetConfig, LocalConfig, SoftmaxConfig
from attnlab.nn.norms import NORM_AT, NORM_EPSILON, NORMS
from attnlab.nn.remat import REMAT
from attnlab.nn.rotations import Rotary
from attnlab.nn.stick_breaking import StickBreakingConfig
from attnlab.support.names import nearest
from attnlab.support.options import FieldError, changed, documented, option, option_values, options, validate
from attnlab.types import DType

_ATTENTION = (AttentionConfig, LocalConfig, ForgetConfig, DifferentialConfig, LatentConfig)
_RECURRENT = (LinearConfig, RetentionConfig, GatedLinearConfig, Mamba2Config, DeltaConfig, GatedDeltaConfig)
_DELTA = (KimiDeltaConfig, DeltaProductConfig, RWKV7Config, HGRN2Config, GRUConfig)
_ALL = (*_ATTENTION, StickBreakingConfig, *_RECURRENT, *_DELTA, CausalConvConfig, GatedConvConfig)
KINDS: dict[str, type[LayerConfig]] = {each.kind: each for each in _ALL}  # user-defined kinds are added
POSITIONS = ("auto", "learned", "sinusoidal", "rotary", "alibi", "none")
_CAP = {"low": 1e-3, "high": 1e6}  # bounds of logit_cap
_LAYER = r"layers\[(\d+)\]"  # the name of one layer of the period


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The config of a `GPT`: sizes, options, and one period of layers, which repeats until there are `num_layers`.

    >>> config = ModelConfig.of(layers="gated_delta*3 attention", num_layers=8, attention={"window": 64})
    >>> [layer.kind for layer in config.layers], config.layer(7).window
    (['gated_delta', 'gated_delta', 'gated_delta', 'attention'], 64)

    Attributes:
      layers: the configs of one period; layer n has `layers[n % len(layers)]`.
      dtype: type of the computation.
      padded_vocab_size: rows of the token tables; rows from vocab_size on are padding. None for vocab_size rows.
    """

    vocab_size: int = option("vocabulary size, V", 256, low=1)
    num_layers: int = option("number of blocks, L", 4, low=1, high=10_000)
    num_heads: int = option("heads per layer, H, unless the layer's own options say otherwise", 4, low=1)
    width: int = option("features of the residual stream, F", 128, low=1)
    context: int = option("longest training sequence in tokens; also the number of learned positions", 64, low=1)
    dropout: float = option(
        "probability of dropping an embedding, an attention weight or an element of a layer's output",
        0.0,
        low=0,
        high=0.999,
    )
    positions: str = option(
        "how positions are encoded; auto is rotary for attention layers, none for others", "auto", choices=POSITIONS
    )
    use_bias: bool = option("biases in linear layers and norms", False)
    norm: str = option("kind of norm; the gain of rms_plus_one is 1 + scale", "layer", choices=NORMS)
    norm_at: str = option(
        "where the norms of attention and feed-forward layers are; hybrid is after in attention blocks, before in all "
        "other blocks",
        "before",
        choices=(*NORM_AT, "hybrid"),
    )
    norm_epsilon: float = option("ε of the norms; of qk_norm too unless norm is layer", NORM_EPSILON, low=1e-30, high=1)
    mlp: str = option("kind of feed-forward layer", "plain", choices=MLPS)
    mlp_ratio: float = option(
        "feed-forward width divided by the model's width; 0 for no feed-forward layers", 4.0, low=0, high=1e3
    )
    activation: str = option("activation of the feed-forward layer", "gelu_tanh", choices=ACTIVATIONS)
    tie_embeddings: bool = option("the output layer shares the embedding's weights", True)
    embedding_scale: float = option("factor applied to the embeddings", 1.0, low=1e-6, high=1e6)
    logit_scale: float = option("factor applied to the logits", 1.0, low=1e-6, high=1e6)
    logit_cap: float | None = option("limit on the logits, after logit_scale; None for no limit", None, **_CAP)
    zero_outputs: bool = option("initialize projections onto the residual stream to 0", False)
    remat: str = option(
        "which activations of a block are stored for the gradient; the others are recomputed. none recomputes nothing "
        "(in a loop: no matrix product), dots stores matrix products, attention stores the block's input and the "
        "operator's output, block stores only the input: a third more operations, the least memory",
        "none",
        choices=REMAT,
    )
    layers: tuple[LayerConfig, ...] = (AttentionConfig(),)
    dtype: DType = jnp.float32
    padded_vocab_size: int | None = None

    @classmethod
    def of(cls, layers: str | LayerConfig | Sequence[LayerConfig] = "attention", **values) -> "ModelConfig":
        """Make a config from values by name.

        Args:
          layers: one period of layers, by kind, as in "gated_delta*3 attention", or by config.
          values: fields by name, and options of layers by kind, e.g. `attention={"window": 64}`; see `changed`.

        Raises:
          FieldError: a value is invalid or has no effect.
        """
        return cls().changed({"layers": layers} | values)

    def changed(self, values: Mapping[str, Any]) -> "ModelConfig":
        """The config with some fields changed; all changes are checked together.

        Args:
          values: fields by name; "layers" takes configs, or kinds (a kind that the config already has keeps its
            options); "attention.window" sets an option in all layers of a kind, "layers[0].window" in one layer of the
            period; "attention" takes a mapping of options, or a config to replace all layers of the kind.

        Raises:
          FieldError: a value is invalid or has no effect.

        >>> config = ModelConfig.of("attention*2").changed({"layers[0].window": 16, "width": 64})
        >>> [layer.window for layer in config.layers], config.width
        ([16, None], 64)
        """
        model_fields, changes = {}, {}
        layers = _layers(values["layers"], self.layers) if "layers" in values else self.layers
        for name, value in values.items():
            first, _, rest = name.partition(".")
            if first not in KINDS and not re.fullmatch(_LAYER, first):
                model_fields[name] = value
            elif isinstance(value, LayerConfig):
                layers = _with(layers, first, value)
            elif rest or isinstance(value, Mapping):
                changes[first] = {**changes.get(first, {}), **({rest: value} if rest else value)}
            else:
                raise FieldError(name, value, "expected a mapping of options, or the config of a layer")
        for name, change in changes.items():
            layers = _with(layers, name, change)
        return changed(self, model_fields | {"layers": layers})

    def __post_init__(self):
        validate(self)
        if not self.layers or not all(isinstance(layer, LayerConfig) for layer in self.layers):
            raise FieldError("layers", self.layers, "expected one LayerConfig or more, e.g. AttentionConfig()")
        _check_model(self)
        for layer in self.used:
            layer.check(self)

    def replace(self, **fields) -> "ModelConfig":
        """The config with some fields replaced."""
        return dataclasses.replace(self, **fields)

    def layer(self, number: int) -> LayerConfig:
        """The config of a layer, by its number."""
        return self.layers[number % len(self.layers)]

    @functools.cached_property
    def used(self) -> tuple[LayerConfig, ...]:
        """The distinct configs of the model's layers."""
        distinct = []
        for layer in self.layers[: self.num_layers]:
            distinct += [layer] * (layer not in distinct)
        return tuple(distinct)

    @property
    def kinds(self) -> str:
        """The kinds of one period of layers, as in "gated_delta*3 attention"."""
        return _kinds(self.layers)

    @property
    def position_encoding(self) -> str:
        """`positions`, with "auto" resolved: "rotary" if any layer supports rotary positions, otherwise "none"."""
        if self.positions != "auto":
            return self.positions
        return "rotary" if any(layer.rotary is not None for layer in self.used) else "none"

    @property
    def hidden(self) -> int:
        """The width of the feed-forward layers; 0 for none."""
        return round(self.mlp_ratio * self.width)

    @property
    def vocab_rows(self) -> int:
        """Rows of the token tables: `padded_vocab_size`, or `vocab_size` without padding."""
        return self.padded_vocab_size or self.vocab_size

    @property
    def kernel_init(self) -> nn.initializers.Initializer:
        """The initializer of matrices."""
        return nn.initializers.normal(0.02)

    @property
    def out_kernel_init(self) -> nn.initializers.Initializer:
        """The initializer of matrices that project onto the residual stream."""
        if self.zero_outputs:
            return nn.initializers.zeros
        return nn.initializers.normal(0.02 / (2 * self.num_layers) ** 0.5)

    def norm_of(self, number: int) -> str:
        """Where the norms of layer `number` are; "hybrid" becomes "after" for attention, "before" for other mixers."""
        if self.norm_at != "hybrid":
            return self.norm_at
        return "after" if isinstance(self.layer(number), SoftmaxConfig) else "before"


ModelConfig.__doc__ = documented(ModelConfig.__doc__, options(ModelConfig))


def words_of(layers: str) -> list[str]:
    """Expand "gated_delta*3 attention" to a list with the kind of each layer; FieldError for an invalid word."""
    words = []
    for word in layers.split():
        kind, _, times = word.partition("*")
        if kind not in KINDS:
            raise FieldError("layers", layers, f"no kind {kind!r}{nearest(kind, KINDS)}: expected {', '.join(KINDS)}")
        if times and not re.fullmatch("[1-9][0-9]{0,3}", times):
            raise FieldError("layers", layers, f"{word!r}: expected KIND*N, such as {kind}*3")
        words += [kind] * int(times or 1)
    if not words:
        raise FieldError("layers", layers, "expected kinds of layers, such as 'gated_delta*3 attention'")
    return words


def _kinds(layers: Sequence[LayerConfig]) -> str:
    runs = [(kind, len(list(run))) for kind, run in itertools.groupby(layer.kind for layer in layers)]
    return " ".join(kind if count == 1 else f"{kind}*{count}" for kind, count in runs)


def _layers(layers: str | LayerConfig | Sequence[LayerConfig], now: Sequence[LayerConfig]) -> tuple[LayerConfig, ...]:
    """Convert `layers` to configs; a kind that `now` contains keeps its options."""
    if not isinstance(layers, str):
        return (layers,) if isinstance(layers, LayerConfig) else tuple(layers)
    if (words := words_of(layers)) == [layer.kind for layer in now]:
        return tuple(now)
    by_kind = {}
    for layer in now:
        if layer.kind in words and by_kind.setdefault(layer.kind, layer) != layer:
            expected = f"the layers of kind {layer.kind} have different options: expected configs of layers"
            raise FieldError("layers", layers, expected)
    return tuple(by_kind.get(word) or KINDS[word]() for word in words)


def _with(layers: Sequence[LayerConfig], name: str, change: Mapping[str, Any] | LayerConfig) -> tuple[LayerConfig, ...]:
    """Apply a change (options by dotted name, or a config) to all layers of kind `name`, or to one, "layers[0]"."""
    index = re.fullmatch(_LAYER, name)
    chosen = [n for n, layer in enumerate(layers) if (n == int(index[1]) if index else layer.kind == name)]
    if index and not chosen:
        raise FieldError(name, change, f"expected layers[0] to layers[{len(layers) - 1}]")
    try:
        if not chosen:
            _check_default(_replaced(KINDS[name](), change), _kinds(layers))
        new = {n: _replaced(layers[n], change) for n in chosen}
    except FieldError as error:
        raise error.within(name) from None
    return tuple(new.get(n, layer) for n, layer in enumerate(layers))


def _replaced(layer: LayerConfig, change: Mapping[str, Any] | LayerConfig) -> LayerConfig:
    return change if isinstance(change, LayerConfig) else changed(layer, change)


def _check_default(layer: LayerConfig, layers: str) -> None:
    """Raise FieldError for an option that is set although no layer is of its kind."""
    default, names = type(layer)(), [field.name for field in dataclasses.fields(layer)]
    for name in [*option_values(layer), *(name for name in names if name not in options(type(layer)))]:
        value, usual = (functools.reduce(getattr, name.split("."), each) for each in (layer, default))
        if value != usual:
            raise FieldError(name, value, f"expected {usual!r}, as layers = {layers!r} has no {layer.kind}")


def _check_model(model: ModelConfig) -> None:
    """Raise FieldError for fields that do not fit together or have no effect."""
    kinds = ", ".join(layer.kind for layer in model.used)
    encoding, rotating = model.position_encoding, [layer for layer in model.used if layer.rotary is not None]
    biased = [layer for layer in model.used if any(field.name == "score_mod" for field in dataclasses.fields(layer))]
    if (encoding == "rotary" and not rotating) or (encoding == "alibi" and not biased):
        raise FieldError("positions", encoding, f"layers of {kinds} do not use them: expected auto or none")
    for layer in rotating:
        if encoding == "rotary":
            break
        if changed := [name for name, value in vars(layer.rotary).items() if value != getattr(Rotary(), name)]:
            value, expected = getattr(layer.rotary, changed[0]), f"it has no effect with positions = {encoding!r}"
            raise FieldError(f"{layer.kind}.rotary.{changed[0]}", value, expected)
    if encoding == "sinusoidal" and model.width % 2:
        raise FieldError("width", model.width, "expected an even width for sinusoidal positions")
    if model.mlp_ratio and model.hidden < 1:
        expected = f"expected 1/{model.width} or more, as width = {model.width}, or 0 for no feed-forward layers"
        raise FieldError("mlp_ratio", model.mlp_ratio, expected)
    for name in () if model.mlp_ratio else ("mlp", "activation"):
        if (value := getattr(model, name)) != options(ModelConfig)[name].default:
            raise FieldError(name, value, "it has no effect with mlp_ratio = 0, without feed-forward layers")
    if model.padded_vocab_size is not None and model.padded_vocab_size < model.vocab_size:
        expected = f"expected vocab_size = {model.vocab_size} or more"
        raise FieldError("padded_vocab_size", model.padded_vocab_size, expected)
    residual = [layer.kind for layer in model.used if layer.value_residual]
    if residual and len(residual) < len(model.used):
        raise FieldError(f"{residual[0]}.value_residual", True, f"expected in all layers ({kinds}) or in none")
