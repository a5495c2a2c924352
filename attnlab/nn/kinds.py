"""The kinds of layers that mix tokens: one table, whose names are the words of a model's `mixer` and `pattern`."""

import dataclasses
import functools
from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp

from attnlab.nn.mixers import (
    GRU,
    CausalConv,
    GatedConv,
    GatedDeltaNet,
    GatedLinearAttention,
    LinearAttention,
    Mamba2,
    MixerState,
    Retention,
)
from attnlab.nn.mixers.interface import CausalMixer, RecurrentMixer
from attnlab.nn.multihead import KVCache, MultiHeadAttention
from attnlab.nn.resolved import resolved, rotary_of, score_mods
from attnlab.nn.rotations import Rotary
from attnlab.ops.masks import Causal, Mask, SlidingWindow, join


@runtime_checkable
class Kind(Protocol):
    """A kind of layer. `model` is a `GPT`.

    Attributes:
      reads: the options of a `GPT` that the layer depends on, by dotted name, "recurrence.heads", or the name of a
        group, "rotary"; also "mask", and "alibi" for these positions. `check_shape` rejects others that are set.
    """

    reads: frozenset[str]

    def module(self, model, **initializers) -> nn.Module:
        """The layer: called as `MultiHeadAttention` is, with `layer=` its number where its field `numbered` is True,
        and `first_values=` where the model has `value_residual`."""

    def empty_cache(self, model, batch: int, capacity: int) -> Any:
        """The state before the first token."""

    def weights(self, model) -> int:
        """Weights of matrix products."""

    def operations(self, model, length: int) -> float:
        """FLOPs a token of the forward pass besides `weights`, a mean over a sequence of `length` tokens."""

    def operations_at(self, model, length: int) -> float:
        """FLOPs of one token besides `weights`, the last of `length` visible tokens."""


_READ_BY_ATTENTION = (
    *("num_heads", "head_dim", "kv_heads", "attention_bias", "qkv_bias", "qk_norm", "qk_norm_joint", "soft_cap"),
    *("score_scale", "sinks", "output_gate", "value_residual", "impl", "mask", "rotary", "alibi"),
)


@dataclasses.dataclass(frozen=True)
class Attention:
    """Softmax attention to all previous tokens, or to the last `window`; with `local=None` to these if it is set."""

    local: bool | None = None
    forget: bool = False  # with a forget gate instead of rotary positions

    @property
    def reads(self) -> frozenset[str]:
        windowed = () if self.local is False else ("window", "local_base")
        return frozenset((*_READ_BY_ATTENTION, *windowed)) - ({"rotary", "local_base"} if self.forget else set())

    def module(self, model, **initializers) -> MultiHeadAttention:
        sizes = resolved(model)
        norm = {"norm": model.norm, "norm_epsilon": model.norm_epsilon}
        return MultiHeadAttention(
            model.num_heads,
            head_dim=sizes.head_dim,
            kv_heads=sizes.kv_heads,
            use_bias=sizes.attention_bias,
            qkv_bias=sizes.qkv_bias,
            mask=self.mask(model),
            score_mod=score_mods(model) or None,
            dropout_rate=model.dropout,
            rotary=self.rotary(model),
            qk_norm=model.qk_norm,
            qk_norm_joint=model.qk_norm_joint,
            scale=model.score_scale,
            sinks=model.sinks,
            value_residual=model.value_residual,
            forget_gate=self.forget,
            output_gate=model.output_gate,
            impl=model.impl,
            **({} if model.norm == "layer" else norm),  # ε of layer norms is Flax's, 1e-6
            **initializers,
        )

    def mask(self, model) -> Mask:
        return join(SlidingWindow(left=model.window - 1) if self.is_local(model) else Causal(), model.mask)

    def rotary(self, model) -> Rotary | None:
        if self.forget or model.positions not in ("auto", "rotary"):
            return None
        if self.is_local(model) and model.local_base is not None:
            return Rotary(model.local_base, rotary_of(model).fraction)
        return rotary_of(model)

    def empty_cache(self, model, batch, capacity) -> KVCache:
        sizes = resolved(model)
        forget_heads = model.num_heads if self.forget else None
        return KVCache.empty(batch, capacity, sizes.kv_heads, sizes.head_dim, model.dtype, forget_heads=forget_heads)

    def weights(self, model) -> int:
        sizes = resolved(model)
        outputs = (3 if model.output_gate else 2) * model.num_heads
        gates = model.width * model.num_heads if self.forget else 0
        return model.width * sizes.head_dim * (outputs + 2 * sizes.kv_heads) + gates

    def operations(self, model, length) -> float:
        """4·H·D for each visible key: the first queries have fewer."""
        keys = self._keys(model, length)
        return 4.0 * model.num_heads * resolved(model).head_dim * (keys - keys * (keys - 1) / (2 * length))

    def operations_at(self, model, length) -> float:
        return 4.0 * model.num_heads * resolved(model).head_dim * self._keys(model, length)

    def is_local(self, model) -> bool:
        """Whether a token attends to the last `window` alone."""
        return model.window is not None if self.local is None else self.local

    def _keys(self, model, length) -> int:
        return min(model.window, length) if self.is_local(model) else length


@dataclasses.dataclass(frozen=True)
class Mixer:
    """A layer of `attnlab.nn.mixers`, whose state does not grow; `fields` are defaults besides the module's."""

    layer: type[CausalMixer]
    fields: tuple[tuple[str, Any], ...] = ()

    @property
    def reads(self) -> frozenset[str]:
        heads = ("num_heads",) if issubclass(self.layer, RecurrentMixer) else ()
        return frozenset((*(f"recurrence.{name}" for name in self.layer.reads), *heads))

    def module(self, model, **initializers) -> CausalMixer:
        return self.layer.of_model(model, **dict(self.fields), **initializers)

    def empty_cache(self, model, batch, capacity) -> MixerState:
        return self.module(model, dtype=model.dtype).empty_cache(batch, model.width)

    def check(self, model, name: str) -> None:
        """Raise ValueError, beginning with a field, for sizes that do not fit the model's."""
        try:
            jax.eval_shape(functools.partial(self.module(model).empty_cache, 1, model.width))
        except ValueError as error:
            field = "pattern" if model.pattern else "mixer"
            raise ValueError(f"{field} = {getattr(model, field)!r}, and of {name} {error}") from error

    def weights(self, model) -> int:
        shape = jax.ShapeDtypeStruct((1, 1, model.width), jnp.float32)
        params = jax.eval_shape(self.module(model).init, jax.random.key(0), shape)
        leaves = jax.tree_util.tree_leaves_with_path(params)
        return sum(leaf.size for path, leaf in leaves if path[-1].key == "kernel")

    def operations(self, model, length) -> float:
        """The same for each token: what a state takes to be written and read."""
        return self.operations_at(model, length)

    def operations_at(self, model, length) -> float:
        cache = jax.eval_shape(functools.partial(self.module(model).empty_cache, 1, model.width))
        return float(self.layer.state_operations * sum(leaf.size for leaf in jax.tree.leaves(cache.state)))


KINDS: dict[str, Kind] = {
    "attention": Attention(local=None),
    "local": Attention(local=True),
    "global": Attention(local=False),
    "forget": Attention(local=None, forget=True),
    "linear": Mixer(LinearAttention),
    "retention": Mixer(Retention),
    "gla": Mixer(GatedLinearAttention),
    "mamba2": Mixer(Mamba2),
    "delta": Mixer(GatedDeltaNet, (("decay", False), ("gate", False))),
    "gated_delta": Mixer(GatedDeltaNet),
    "gru": Mixer(GRU),
    "conv": Mixer(CausalConv),
    "gated_conv": Mixer(GatedConv),
}
MIXERS = tuple(kind for kind in KINDS if kind not in ("local", "global"))  # the values of `mixer`


def pattern_of(model) -> tuple[str, ...]:
    """The kinds of one period of a model's layers."""
    return tuple(model.pattern.split()) or (model.mixer,)


def kind_of(model, layer: int) -> str:
    pattern = pattern_of(model)
    return pattern[layer % len(pattern)]


def kinds_of(model) -> dict[str, Kind]:
    """The different kinds of a model's layers, by name."""
    return {name: KINDS[name] for name in pattern_of(model)[: model.num_layers]}


def norm_at_of(model, layer: int) -> str:
    """Where the norms of a layer are, where "hybrid" is after attention, and before other mixers."""
    if model.norm_at != "hybrid":
        return model.norm_at
    return "after" if isinstance(KINDS[kind_of(model, layer)], Attention) else "before"


def positions_of(model) -> str:
    """A model's positions, where "auto" is rotary if a layer reads them, otherwise none."""
    if model.positions != "auto":
        return model.positions
    return "rotary" if any("rotary" in kind.reads for kind in kinds_of(model).values()) else "none"
