"""Attention calls that use one feature each, drawn from a seed, and the calls that faulty code would compute."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import ml_dtypes
import numpy as np

from attnlab import masks, score_mods
from attnlab.ops.call import AttentionCall
from attnlab.testing import reference


class Shape(NamedTuple):
    """The sizes of a call; more than one example and head by default, so that swapped axes are detected.

    >>> Shape(q_length=5).heads
    3
    """

    batch: int = 2
    q_length: int = 13
    kv_length: int = 13
    heads: int = 3
    kv_heads: int = 3
    features: int = 4


# Lengths that no tile divides: few keys with many heads, and more keys than two tiles of 128.
SHAPES = (Shape(heads=8, kv_heads=8), Shape(2, 261, 261, 2, 2, 8))
RATE = 0.25  # of dropout
WITHOUT = "a call without the feature"


@dataclass(frozen=True)
class Feature:
    """A feature of attention.

    Attributes:
      name: e.g. "causal".
      fields: takes a random generator and a shape; returns the arguments of a call that use the feature.
      shape: takes a usual shape; returns the shape that the feature needs.
      instead: returns a dict from description to call: what code without the feature (`WITHOUT`) or with a common
        fault would compute.
      transform: how the function is run: "jit", "eager", "vmap", "remat", or "sharded" over batch and heads.
      dtype: type of all floating arrays.
    """

    name: str
    fields: Callable[[np.random.Generator, Shape], dict] = lambda rng, shape: {}
    shape: Callable[[Shape], Shape] = lambda shape: shape
    instead: Callable[[AttentionCall], dict[str, AttentionCall]] = lambda call: {}
    transform: str = "jit"
    dtype: type = np.float32


class Case(NamedTuple):
    """A call, and the weights of its outputs in the sum that is differentiated.

    >>> case = draw(FEATURES["causal"], seed=0)
    >>> case.call.q.shape == case.d_out.shape
    True
    """

    feature: Feature
    seed: int
    shape: Shape
    call: AttentionCall  # of NumPy arrays
    d_out: np.ndarray
    d_lse: np.ndarray


def draw(feature: Feature, seed: int, shape: Shape = SHAPES[0]) -> Case:
    """Draw a feature's case. Numbers are multiples of 1/8, which are exact in bfloat16 and short in printed code.

    >>> draw(FEATURES["causal"], seed=0).call.q.shape
    (2, 13, 8, 4)
    """
    shape, rng = feature.shape(shape), np.random.default_rng(seed)
    batch, q_length, kv_length, heads, kv_heads, features = shape

    def normal(*sizes):
        return eighths(rng, *sizes).astype(feature.dtype)

    call = AttentionCall(
        q=normal(batch, q_length, heads, features),
        k=normal(batch, kv_length, kv_heads, features),
        v=normal(batch, kv_length, kv_heads, features),
    ).replace(**feature.fields(np.random.default_rng([seed, 1]), shape))  # the same window sizes for all shapes
    # Libraries differ on fully masked rows, so no gradient comes from them.
    rows = reference.visible_rows(call)
    d_out = np.where(rows[..., None], normal(batch, q_length, heads, call.v.shape[-1]), feature.dtype(0))
    d_lse = eighths(rng, batch, q_length, heads) * np.float32(feature.name.endswith("lse"))
    return Case(feature, seed, shape, call, d_out, d_lse)


def calls(
    features: str | Iterable[str] = "all", shapes: Iterable[Shape] = SHAPES, dtypes: Iterable[type] | None = None
):
    """A hypothesis strategy for calls that use one feature each (pip install hypothesis).

    Args:
      features: names in `FEATURES`, or "all".
      shapes: sizes of the calls.
      dtypes: types of the floating arrays; None for the type that each feature names.

    Returns:
      a strategy for `AttentionCall`s of NumPy arrays.

    >>> strategy = calls(["causal"])
    >>> isinstance(strategy.example(), AttentionCall)  # doctest: +SKIP
    True
    """
    from hypothesis import strategies

    chosen = features_named(features)
    if dtypes is not None:
        chosen = [replace(feature, dtype=dtype) for feature in chosen for dtype in dtypes]
    return strategies.builds(
        lambda feature, seed, shape: draw(feature, seed, shape).call,
        strategies.sampled_from(chosen),
        strategies.integers(0, 2**16),
        strategies.sampled_from(list(shapes)),
    )


def eighths(rng, *sizes) -> np.ndarray:
    """Normal random numbers rounded to multiples of 1/8, float32."""
    return (np.round(rng.normal(size=sizes) * 8) / 8).astype(np.float32)


# The features


def _causal(rng, shape):
    return {"mask": masks.Causal()}


def _window(right: int):
    def fields(rng, shape):
        left = int(rng.integers(0, 3) * 2)  # 0, 2 or 4, so that few programs are compiled
        left += 3 * shape.kv_length // 5 if shape.kv_length > 128 else 0  # wider than a kernel's tile
        return {"mask": masks.SlidingWindow(min(left, shape.kv_length), right)}

    return fields


def _other_windows(call: AttentionCall) -> dict[str, AttentionCall]:
    left, right = call.mask.left, call.mask.right
    others = {"a window one key larger": call.replace(mask=masks.SlidingWindow(left + 1, right))}
    if left:
        others["a window one key smaller"] = call.replace(mask=masks.SlidingWindow(left - 1, right))
    if right:
        others["a causal window"] = call.replace(mask=masks.SlidingWindow(left, 0))
    return _as_causal(call) | others


def _padding(rng, shape):
    return {"mask": masks.Padding(rng.integers(1, shape.kv_length + 1, shape.batch).astype(np.int32))}


def _segments(rng, shape):
    ids = np.sort(rng.integers(0, 3, (shape.batch, shape.q_length)), axis=-1).astype(np.int32)
    return {"mask": masks.Segments(ids)}


def _prefix(rng, shape):
    return {"mask": masks.PrefixLM(rng.integers(0, shape.kv_length, shape.batch).astype(np.int32))}


def _blocks(rng, shape):
    sides = (-(-shape.q_length // 4), -(-shape.kv_length // 4))
    blocks = rng.random((shape.batch, shape.heads, *sides)) < 0.5
    blocks[..., 0] = True  # no fully masked rows, which are a separate feature
    return {"mask": masks.BlockSparse(blocks, 4)}


def _arbitrary(rng, shape):
    mask = rng.random((shape.batch, shape.heads, shape.q_length, shape.kv_length)) < 0.5
    mask[..., 0] = True
    return {"mask": masks.Dense(mask)}


def _masked_rows(rng, shape):
    mask = _arbitrary(rng, shape)["mask"].array
    mask[:, :, rng.integers(0, shape.q_length)] = False
    return {"mask": masks.Dense(mask)}


def _bias(rng, shape):
    return {"bias": eighths(rng, shape.batch, shape.heads, shape.q_length, shape.kv_length)}


def _shifted(rng, shape):
    bias = np.zeros((shape.batch, shape.heads, shape.q_length, shape.kv_length), np.float32)
    bias[:, :, ::2] = -1e9
    return {"bias": bias}


def _alibi(rng, shape):
    return {"score_mods": (score_mods.ALiBi((2.0 ** -np.arange(1, shape.heads + 1)).astype(np.float32)),)}


def _forget(rng, shape):
    gates = -abs(eighths(rng, shape.batch, shape.q_length, shape.heads))
    sums = score_mods.Forget(np.cumsum(gates, axis=1, dtype=np.float32))
    return {"score_mods": (sums,), "mask": masks.Causal()}


def _cap(rng, shape):
    return {"score_mods": (score_mods.SoftCap(1.5),)}


def _sinks(rng, shape):
    return {"sinks": eighths(rng, shape.heads) + 1}


def _late_queries(rng, shape):
    start = shape.kv_length - shape.q_length
    positions = {"q_positions": np.arange(start, shape.kv_length), "kv_positions": np.arange(shape.kv_length)}
    return {"mask": masks.Causal()} | {name: x.astype(np.int32) for name, x in positions.items()}


def _positions(rng, shape):
    """Packed documents, with positions from 0 in each: a query attends to all keys at its position or earlier."""
    at = np.arange(shape.q_length, dtype=np.int32)
    at = np.stack([np.where(at < n, at, at - n) for n in rng.integers(1, shape.q_length + 1, shape.batch)])
    return {"mask": masks.Causal(), "q_positions": at, "kv_positions": at}


def _nan(rng, shape):
    """NaN in padding keys and values."""
    fields, sizes = _padding(rng, shape), (shape.batch, shape.kv_length, shape.kv_heads, shape.features)
    hidden = (np.arange(shape.kv_length) >= fields["mask"].lengths[:, None])[..., None, None]
    return fields | {name: np.where(hidden, np.float32(np.nan), eighths(rng, *sizes)) for name in "kv"}


def _large(rng, shape):
    return {"q": 64 * eighths(rng, shape.batch, shape.q_length, shape.heads, shape.features)}


def _dropout(rng, shape):
    """Equal weights, and one-hot values, so that outputs show each weight."""
    zeros = np.zeros((shape.batch, shape.q_length, shape.heads, shape.features), np.float32)
    length = shape.kv_length
    one_hot = np.broadcast_to(np.eye(length, dtype=np.float32)[:, None], (shape.batch, length, shape.kv_heads, length))
    key = np.array([rng.integers(2**31), rng.integers(2**31)], np.uint32)  # a raw key of two words
    return {"q": zeros, "v": one_hot.copy(), "dropout_rate": RATE, "dropout_keys": key}


def _without(**fields) -> Callable[[AttentionCall], dict[str, AttentionCall]]:
    return lambda call: {WITHOUT: call.replace(**fields)}


_NO_MASK, _NO_MODS = _without(mask=None), _without(score_mods=())


def _as_causal(call: AttentionCall) -> dict[str, AttentionCall]:
    return _NO_MASK(call) | {"causal attention": call.replace(mask=masks.Causal())}


def _tiled(call: AttentionCall) -> dict[str, AttentionCall]:
    """Query head h uses key head h % Hk instead of h // (H / Hk)."""
    tiled = {name: np.tile(getattr(call, name), (1, call.num_heads // call.k.shape[-2], 1)) for name in "kv"}
    return {"key heads tiled, not repeated": call.replace(**tiled)}


def _unscaled(call: AttentionCall) -> dict[str, AttentionCall]:
    return {"scores without 1/√D": call.replace(scale=1.0)}


def _top_left(call: AttentionCall) -> dict[str, AttentionCall]:
    q_length, kv_length = call.lengths
    return _NO_MASK(call) | {
        "queries counted from 0": call.replace(q_positions=np.arange(q_length), kv_positions=np.arange(kv_length))
    }


def _counted(call: AttentionCall) -> dict[str, AttentionCall]:
    return _NO_MASK(call) | {"positions counted from 0": call.replace(q_positions=None, kv_positions=None)}


def _cross(shape: Shape) -> Shape:
    return shape._replace(q_length=max(1, shape.kv_length // 2))


def _grouped(shape: Shape) -> Shape:
    return shape._replace(heads=2 * shape.kv_heads)


FEATURES = {
    feature.name: feature
    for feature in (
        Feature("plain", instead=_unscaled),
        Feature("scale", lambda rng, shape: {"scale": 0.25 + shape.features / 64}, instead=_without(scale=None)),
        Feature("causal", _causal, instead=_NO_MASK),
        Feature("window", _window(0), instead=_other_windows),
        Feature("two-sided window", _window(1), instead=_other_windows),
        Feature("padding", _padding, instead=_NO_MASK),
        Feature("segments", _segments, instead=_as_causal),
        Feature("prefix", _prefix, instead=_as_causal),
        Feature("blocks", _blocks, instead=_NO_MASK),
        Feature("mask", _arbitrary, instead=_NO_MASK),
        Feature("masked rows", _masked_rows, instead=_NO_MASK),
        Feature("bias", _bias, instead=_without(bias=None)),
        Feature(
            "shared bias", lambda rng, shape: {"bias": _bias(rng, shape)["bias"][0, 0]}, instead=_without(bias=None)
        ),
        Feature("ALiBi", _alibi, instead=_NO_MODS),
        Feature("forget gate", _forget, instead=_NO_MODS),
        Feature("soft cap", _cap, instead=_NO_MODS),
        Feature("causal soft cap", lambda *x: _cap(*x) | _causal(*x), instead=_NO_MODS),
        Feature("sinks", _sinks, instead=_without(sinks=None)),
        Feature("grouped heads", shape=_grouped, instead=_tiled),
        Feature("causal grouped heads", _causal, _grouped, lambda call: _NO_MASK(call) | _tiled(call)),
        Feature("cross lengths", shape=_cross),
        Feature("late queries", _late_queries, _cross, _top_left),
        Feature("positions", _positions, instead=_counted),
        Feature("dropout", _dropout, lambda shape: shape._replace(q_length=64, kv_length=64)),
        Feature("NaN behind the mask", _nan, instead=_NO_MASK),
        Feature("large scores", _large),
        Feature("lse"),
        Feature("causal lse", _causal, instead=_NO_MASK),
        Feature("shifted rows", _shifted, instead=_without(bias=None)),
        Feature("bfloat16", dtype=ml_dtypes.bfloat16),
        Feature("causal bfloat16", _causal, instead=_NO_MASK, dtype=ml_dtypes.bfloat16),
        Feature("without jit", transform="eager"),
        Feature("vmap", transform="vmap"),
        Feature("remat", transform="remat"),
        Feature("sharded", _causal, lambda x: x._replace(batch=2, heads=2, kv_heads=2), _NO_MASK, "sharded"),
    )
}


def features_named(names: str | Iterable[str], known: Mapping = FEATURES) -> list:
    """Look up features by name; "all" for all.

    Raises:
      ValueError: an unknown name.
    """
    names = list(known) if names == "all" else [names] if isinstance(names, str) else list(names)
    for name in names:
        if name not in known:
            raise ValueError(f"feature {name!r} is unknown: use one of {', '.join(known)}")
    return [known[name] for name in names]
