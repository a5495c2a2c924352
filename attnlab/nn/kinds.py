"""The kinds of layers that mix tokens: one table, whose names are the words of a model's `mixer` and `pattern`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from attnlab.nn import own
from attnlab.nn.differential import DifferentialAttention
from attnlab.nn.groups import group
from attnlab.nn.latent_attention import LatentAttention
from attnlab.nn.mixers.causal_conv import CausalConv
from attnlab.nn.mixers.gated_conv import GatedConv
from attnlab.nn.mixers.gated_delta_net import GatedDeltaNet
from attnlab.nn.mixers.gated_delta_product import GatedDeltaProduct
from attnlab.nn.mixers.gated_linear_attention import GatedLinearAttention
from attnlab.nn.mixers.gru import GRU
from attnlab.nn.mixers.hgrn2 import HGRN2
from attnlab.nn.mixers.interface import CausalMixer, RecurrentMixer
from attnlab.nn.mixers.kimi_delta_attention import KimiDeltaAttention
from attnlab.nn.mixers.linear_attention import LinearAttention
from attnlab.nn.mixers.mamba2 import Mamba2
from attnlab.nn.mixers.retention import Retention
from attnlab.nn.mixers.rwkv7 import RWKV7
from attnlab.nn.multihead import MultiHeadAttention
from attnlab.nn.resolved import as_tuple, score_mods
from attnlab.nn.rotations import Rotary
from attnlab.nn.stick_breaking import StickBreakingAttention
from attnlab.ops.masks import Causal, Mask, SlidingWindow, join
from attnlab.ops.score_mods import ScoreMod


class Kind:
    """A kind of layer, `Attention` or `Mixer`, which have the same methods; `layer` is the class of its module."""

    @property
    def operator(self) -> str | None:
        """The function of `attnlab` that mixes the tokens, "attention"; None for a layer that has none."""
        return self.layer.operator

    def init_cache(self, model, batch: int, capacity: int) -> Any:
        """The state before the first token."""
        return self.module(model, dtype=model.dtype).init_cache(batch, model.width, capacity)


@dataclasses.dataclass(frozen=True)
class Attention(Kind):
    """Attention to all previous tokens, or to the last `window`; with `local=None` to these if it is set.

    `model` is a `GPT` in all methods.
    """

    local: bool | None = None
    forget: bool = False  # with a forget gate instead of rotary positions
    score_mod: ScoreMod | None = None  # besides the model's
    and_mask: Mask | None = None  # which keys are masked besides
    layer: type[MultiHeadAttention] | type[LatentAttention] = MultiHeadAttention

    @property
    def reads(self) -> frozenset[str]:
        """The options of a `GPT` that the layer depends on, by dotted name, "recurrence.heads", or the name of a group,
        "rotary"; also "mask", and "alibi" for these positions. `check_shape` rejects others that are set."""
        windowed = () if self.local is False else ("window", "local_base")
        unread = {"rotary", "local_base"} if self.forget or "rotary" not in self.layer.reads else set()
        return frozenset((*self.layer.reads, *windowed)) - unread

    def module(self, model, **initializers) -> nn.Module:
        """The layer, an `attnlab.nn.Layer`."""
        fields = {"forget_gate": True} if self.forget else {}
        fields |= {} if self.score_mod is None else {"score_mod": self.score_mods(model)}
        return self.layer.of_model(model, mask=self.mask(model), rotary=self.rotary(model), **fields, **initializers)

    def mask(self, model) -> Mask:
        mask = join(SlidingWindow(left=model.window - 1) if self.is_local(model) else Causal(), model.mask)
        return join(mask, self.and_mask)

    def score_mods(self, model) -> tuple[ScoreMod, ...]:
        return (*score_mods(model), *as_tuple(self.score_mod))

    def rotary(self, model) -> Rotary | None:
        if "rotary" not in self.reads or model.positions not in ("auto", "rotary"):
            return None
        if self.is_local(model) and model.local_base is not None:
            return Rotary(model.local_base, group(model, "rotary").fraction)
        return group(model, "rotary")

    def check(self, model, name: str) -> None:
        """Raise ValueError, beginning with a field, for sizes that do not fit the model's; `name` is the kind's."""
        _check_sizes(functools.partial(self.layer.of_model(model).init_cache, 1, model.width, 1), model, name)

    def operands(self, model, batch: int, length: int):
        """Shapes of q, k and v of the operator."""
        return self.module(model, dtype=model.dtype).operands(batch, length, model.width)

    def is_local(self, model) -> bool:
        """Whether a token attends to the last `window` alone."""
        return model.window is not None if self.local is None else self.local


@dataclasses.dataclass(frozen=True)
class Mixer(Kind):
    """A layer of `attnlab.nn.mixers`, whose state does not grow; `fields` are defaults besides the module's."""

    layer: type[CausalMixer]
    fields: tuple[tuple[str, Any], ...] = ()

    @property
    def reads(self) -> frozenset[str]:
        heads = ("num_heads",) if issubclass(self.layer, RecurrentMixer) else ()
        return frozenset((*(f"recurrence.{name}" for name in self.layer.reads), *heads))

    def module(self, model, **initializers) -> CausalMixer:
        return self.layer.of_model(model, **dict(self.fields), **initializers)

    def check(self, model, name: str) -> None:
        _check_sizes(functools.partial(self.module(model).init_cache, 1, model.width), model, name)


KINDS: dict[str, Kind] = {
    "attention": Attention(local=None),
    "local": Attention(local=True),
    "global": Attention(local=False),
    "forget": Attention(local=None, forget=True),
    "differential": Attention(layer=DifferentialAttention),
    "latent": Attention(layer=LatentAttention),
    "stick_breaking": Attention(layer=StickBreakingAttention),
    "linear": Mixer(LinearAttention),
    "retention": Mixer(Retention),
    "gla": Mixer(GatedLinearAttention),
    "mamba2": Mixer(Mamba2),
    "delta": Mixer(GatedDeltaNet, (("decay", False), ("gate", False))),
    "gated_delta": Mixer(GatedDeltaNet),
    "kda": Mixer(KimiDeltaAttention),
    "delta_product": Mixer(GatedDeltaProduct),
    "rwkv7": Mixer(RWKV7, (("value_residual", True),)),
    "hgrn2": Mixer(HGRN2),
    "gru": Mixer(GRU),
    "conv": Mixer(CausalConv),
    "gated_conv": Mixer(GatedConv),
}


def _check_sizes(init_cache: Callable, model, name: str) -> None:
    try:
        jax.eval_shape(init_cache)
    except ValueError as error:
        field = "pattern" if model.pattern else "mixer"
        raise ValueError(f"{field} = {getattr(model, field)!r}, and of {name} {error}") from error


MIXERS = tuple(kind for kind in KINDS if kind not in ("local", "global"))  # the values of `mixer`


def named(name: str) -> Kind:
    """The kind of a name: of the table, or of a user's part. ValueError for a part that is not registered."""
    if name in KINDS:
        return KINDS[name]
    if (part := own.part_of(name)) is None:
        raise ValueError(f"mixer = {name!r} names code, which has not been run: attnlab.nn.register({name!r}) runs it")
    return _of_part(part)


def _of_part(part: own.Part) -> Kind:
    if isinstance(part.value, ScoreMod):
        return Attention(score_mod=part.value)
    if isinstance(part.value, Mask):
        return Attention(and_mask=part.value)
    return Mixer(part.value) if issubclass(part.value, CausalMixer) else Attention(layer=part.value)


def pattern_of(model) -> tuple[str, ...]:
    """The kinds of one period of a model's layers."""
    return tuple(model.pattern.split()) or (model.mixer,)


def kind_of(model, layer: int) -> str:
    pattern = pattern_of(model)
    return pattern[layer % len(pattern)]


def kinds_of(model) -> dict[str, Kind]:
    """The different kinds of a model's layers, by name."""
    return {name: named(name) for name in pattern_of(model)[: model.num_layers]}


def norm_at_of(model, layer: int) -> str:
    """Where the norms of a layer are, where "hybrid" is after attention, and before other mixers."""
    if model.norm_at != "hybrid":
        return model.norm_at
    return "after" if isinstance(named(kind_of(model, layer)), Attention) else "before"


def positions_of(model) -> str:
    """A model's positions, where "auto" is rotary if a layer reads them, otherwise none."""
    if model.positions != "auto":
        return model.positions
    return "rotary" if any("rotary" in kind.reads for kind in kinds_of(model).values()) else "none"
