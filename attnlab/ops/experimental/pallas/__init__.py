"""Attention on TPUs by Pallas kernels: every mask and score mod, with gradients of their arrays.

This is the algorithm of `attnlab.ops.blockwise`, with one grid step for each tile that is not EMPTY. Three kernels
compute out and lse, dq, and dk and dv; a fourth the gradient of a bias. Files: `splitting` (masks and score mods as
programs of a kernel), `drawing` (tiles of masks that gather), `kernels` (the computation of a tile), `calls` (blocks
and grids), `operands` (types), `transforms` (derivatives, `vmap`).

The kernels have been compiled for TPUs and emulated on CPUs. They have never run on a TPU.
"""

import functools
import math
import numbers
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import ManualAxisType

from attnlab.ops import dropout
from attnlab.ops.call import AttentionCall, Result
from attnlab.ops.experimental.pallas.drawn_tiles import Drawn, draw
from attnlab.ops.experimental.pallas.kernel_types import LOG2E, Others, Plan, Terms
from attnlab.ops.experimental.pallas.splitting import Scores, Split, UnsupportedError, split
from attnlab.ops.mask_algebra import And
from attnlab.ops.masks import Causal, Mask, Padding, PrefixLM, Segments, SlidingWindow
from attnlab.ops.meshes import (
    Splits,
    is_checked_manual,
    is_partitioned,
    like_queries,
    on_auto_axes,
    over_shards,
    splits_of,
)
from attnlab.ops.platforms import device_kind_of
from attnlab.ops.schedule import EMPTY, FULL, PARTIAL, TPU_KERNEL, every_tile, schedule, tile_kinds, visits
from attnlab.ops.tiles import Tiling, whole
from attnlab.types import Array

PLATFORM = "tpu"
_LANES = 128  # of a vector register; on TPUs the sides of tiles are multiples
NEEDS = "it needs a tpu, or jax.experimental.pallas.tpu.force_tpu_interpret_mode() to be emulated elsewhere"
_MAX_VISITS = 2**16  # words of a table; two of them are half of the scalar memory, 1 MiB on all generations
_ROWS = 512  # of a mask, evaluated at a time
_MAX_DRAWN = 2**30  # bytes of pairs that a mask or score mod may need beforehand


def reason_against(call: AttentionCall) -> str | None:
    """The reason why this backend cannot run a call, or None."""
    q, k, v, block_sizes = call.q, call.k, call.v, call.block_sizes
    sizes, is_checked = (*q.shape, *k.shape, *v.shape), is_checked_manual(q, k, v)
    reasons = {
        f"it has no {q.dtype}, only float32 and bfloat16": q.dtype not in (jnp.float32, jnp.bfloat16),
        "q, k and v must have one type": not q.dtype == k.dtype == v.dtype,
        "it needs sizes that are numbers": not all(isinstance(size, int) for size in sizes),
        "an axis has length 0": 0 in sizes,
        "within shard_map over some axes of a mesh it needs check_vma=False": is_checked and is_partitioned(q),
        "emulated within shard_map it needs check_vma=False": is_checked and is_interpreted(),
        "it needs 32-bit types, without jax_enable_x64": jax.config.jax_enable_x64 and not is_interpreted(),
        f"its {_at_least_tiles(q, k, block_sizes):,} tiles are more than scalar memory lists, {2 * _MAX_VISITS:,}": (
            _at_least_tiles(q, k, block_sizes) > 2 * _MAX_VISITS
        ),
        f"tiles of {block_sizes} are not multiples of {_LANES}": block_sizes is not None
        and not is_interpreted()
        and any(size % _LANES for size in block_sizes),
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    if why:
        return why
    try:
        drawn = _drawn_bytes(call)
    except UnsupportedError as error:
        return str(error)
    if drawn > _MAX_DRAWN:
        return f"its mask and score mods gather for each pair, which takes {drawn / 2**30:.1f} GiB, more than 1 GiB"
    return None


def _at_least_tiles(q, k, block_sizes) -> int:
    """The number of tiles of a call, at the largest sizes to choose from."""
    sizes = block_sizes or TPU_KERNEL.sizes[-1:] * 2
    return math.prod(-(-x.shape[-3] // size) for x, size in zip((q, k), sizes) if isinstance(x.shape[-3], int))


def _drawn_bytes(call: AttentionCall) -> int:
    """Bytes of the pairs that are gathered beforehand, found without computing or sharding anything."""
    found = []

    def trace(call):
        terms = _split_terms(_scores(call), call.mask, call, None)
        found.append(sum(x.drawn_bytes for x in terms if x is not None))
        return 0

    def shape_of(x):
        return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True))

    jax.eval_shape(trace, jax.tree.map(shape_of, call))
    return found[0]


def _scores(call: AttentionCall) -> Scores:
    return Scores(call.batch, call.num_heads, call.lengths, call.q_positions, call.kv_positions, call.shard)


def is_interpreted() -> bool:
    """Whether TPU kernels are emulated: within `jax.experimental.pallas.tpu.force_tpu_interpret_mode`."""
    from jax.experimental import pallas as pl

    def copy(x, out):
        out[...] = x[...]

    out = jax.ShapeDtypeStruct((8,), jnp.int32, manual_axis_type=ManualAxisType())
    call = jax.make_jaxpr(pl.pallas_call(copy, out_shape=out))(jax.ShapeDtypeStruct((8,), jnp.int32)).eqns[-1]
    return bool(call.params["interpret"])


def attend(call: AttentionCall, given: Result | None = None) -> Result:
    """(out in q's type, (max, log_sum) in float32); or `given`, such results over more keys, see `blockwise`."""
    return _attend(call, given, splits_of(call.q, call.k))


@on_auto_axes(like_queries)
def _attend(call: AttentionCall, given: Result | None, splits: Splits) -> Result:
    from attnlab.ops.experimental.pallas import transforms  # Pallas is a large package, useless except on TPUs

    q, k, v, mask, scores = call.q, call.k, call.v, call.mask, _scores(call)
    scale, learned_scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale, None
    if q.dtype != jnp.float32 and not isinstance(scale, numbers.Number):
        scale, learned_scale = 1.0, scale  # as one of the terms
    block_sizes, by_query, by_key = _tiles(scores, mask, call.block_sizes, k.shape[-2])
    found = tuple(kind for kind in (FULL, PARTIAL) if any(_may_have(kind, kinds) for kinds in (by_query, by_key)))
    compared = mask if PARTIAL in found else None
    terms = Terms(*_split_terms(scores, compared, call, learned_scale))
    drawn = _drawn(compared, scores, terms.visible, by_query, block_sizes)
    terms = terms if drawn is None else terms._replace(visible=drawn.split)
    programs = Terms(*(None if x is None else x.program for x in terms))
    # Products become logits, in units of log 2 unless score mods need natural logits. Float32 queries take the factor,
    # which costs nothing; others would be rounded once more.
    scale = scale * (1.0 if programs.logits else LOG2E)
    factor = 1.0 if q.dtype == jnp.float32 else float(scale)
    rotates_rows = not re.search("v[234]", device_kind_of(q, k, v))
    plan = Plan(scores.lengths, block_sizes, found, call.dropout_rate, programs, factor, rotates_rows)
    others = Others(
        sinks=None if call.sinks is None else call.sinks.astype(jnp.float32).reshape(*(1,) * len(call.batch), -1),
        terms=Terms(*(() if x is None else x.arrays() for x in terms)),
        by_query=visits(by_query),
        by_key=visits(by_key),
        of_pairs=every_tile(by_query) if plan.learned("pair") else None,
        drawn=None if drawn is None else drawn.at,
    )
    q = (q * scale).astype(q.dtype) if q.dtype == jnp.float32 else q
    k, v = _inert(scores, mask, k, v)
    return over_shards(functools.partial(transforms.attention, plan, given=given), q, k, v, others, splits)


def _tiles(scores: Scores, mask: Mask | None, block_sizes, kv_heads: int) -> tuple[tuple[int, int], Array, Array]:
    """Tile sizes, and the kinds of tiles `[*batch or 1s, H or 1, nQ, nK]` and `[*batch or 1s, Hk or 1, nK, nQ]`."""
    batch, num_heads, lengths, *sides = scores
    where = {"num_heads": num_heads, "batch": batch, **dict(zip(("q_positions", "kv_positions", "shard"), sides))}
    block_sizes, _ = schedule(mask, *lengths, block_sizes, **where, costs=TPU_KERNEL)
    kinds = tile_kinds(mask, lengths, block_sizes, **where)
    of_examples = (1,) * len(batch) if math.prod(kinds.shape[:-3]) == 1 else kinds.shape[:-3]
    kinds = _within_scalar_memory(kinds.reshape(*of_examples, *kinds.shape[-3:]))
    return block_sizes, kinds, _of_kv_heads(kinds, kv_heads).swapaxes(-1, -2)


def _drawn(mask: Mask | None, scores: Scores, visible: Split | None, kinds, block_sizes) -> Drawn | None:
    """The tiles of a mask that is known while tracing and takes pairs, if they fit; None for other masks."""
    takes_pairs = visible is not None and any(x.varies == "pair" for x in visible.program.inputs)
    if not takes_pairs or not isinstance(kinds, np.ndarray) or kinds.size > _MAX_VISITS:
        return None
    return draw(mask, scores, kinds, block_sizes, _MAX_DRAWN)


def _within_scalar_memory(kinds):
    """The kinds of tiles, merged over heads, then examples, where the tables of visits would be too large."""
    for axes in ((-3,), tuple(range(kinds.ndim - 2))):
        if kinds.size > _MAX_VISITS:
            kinds = _common(kinds, axes)
    return kinds


def _common(kinds, axes: tuple[int, ...]):
    """The kinds of tiles over some axes: EMPTY or FULL where all are."""
    xp = np if isinstance(kinds, np.ndarray) else jnp
    common = xp.where((kinds > EMPTY).any(axis=axes, keepdims=True), PARTIAL, EMPTY)
    return xp.where((kinds == FULL).all(axis=axes, keepdims=True), FULL, common).astype(np.int32)


def _of_kv_heads(kinds, kv_heads: int):
    """The kinds of tiles `[..., H or 1, nQ, nK]`, merged over the query heads of each group."""
    *leading, heads, rows, columns = kinds.shape
    if heads in (1, kv_heads):
        return kinds
    grouped = kinds.reshape(*leading, kv_heads, heads // kv_heads, rows, columns)
    return _common(grouped, (-3,))[..., 0, :, :]


def _may_have(kind: int, kinds) -> bool:
    return not isinstance(kinds, np.ndarray) or bool((kinds == kind).any())


def _inert(scores: Scores, mask: Mask | None, k, v):
    """k and v, 0 for keys that are masked for all queries: they may be NaN, and 0·NaN is NaN."""
    if mask is None:
        return k, v
    batch, num_heads, (q_length, kv_length), *positions, shard = scores
    if _bounds_are_exact(mask, scores):
        where = {"q_positions": positions[0], "kv_positions": positions[1], "num_heads": num_heads, "batch": batch}
        is_visible, _ = mask.tiles(q_length, kv_length, (q_length, 1), **where)
    else:
        covers = whole(q_length, kv_length, num_heads, *positions, batch, shard=shard)
        is_visible, _ = Mask.bounds(
            mask, Tiling(covers, (min(q_length, _ROWS), 1))
        )  # by its pairs, some rows at a time
        is_visible = is_visible.any(axis=-2, keepdims=True)
        is_visible = is_visible.reshape((1,) * (4 - is_visible.ndim) + is_visible.shape)
    if isinstance(is_visible, np.ndarray) and is_visible.all():
        return k, v
    if is_visible.shape[-3] > 1:
        of_groups = (*is_visible.shape[:-3], k.shape[-2], -1, kv_length)
        is_visible = is_visible.reshape(of_groups).any(axis=-2, keepdims=True)
    is_visible = jnp.swapaxes(is_visible[..., 0, :], -1, -2)[..., None]
    return tuple(jnp.where(is_visible, x, 0) for x in (k, v))


def _bounds_are_exact(mask: Mask, scores: Scores) -> bool:
    """Whether the bounds of a mask for one key and all queries tell if it is visible to any query.

    They do for a mask that allows each key to the query of its index, except keys that `Padding` masks for all queries.
    """
    _, _, (q_length, kv_length), *sides, shard = scores
    if isinstance(mask, And):
        return _bounds_are_exact(mask.a, scores) and _bounds_are_exact(mask.b, scores)
    if isinstance(mask, Segments) and mask.kv_ids is not None:
        return False
    is_square = q_length == kv_length and all(x is None for x in (*sides, *shard))
    return is_square and isinstance(mask, Causal | SlidingWindow | PrefixLM | Segments | Padding)


def _split_terms(scores: Scores, mask: Mask | None, call: AttentionCall, scale) -> list[Split | None]:
    """In the order of `Terms`."""
    score_mods, bias = call.score_mods, call.bias

    def logits(tile, raw):
        if scale is not None:
            raw = raw * jnp.asarray(scale, raw.dtype)
        if bias is not None:
            raw = raw + tile.of_pairs(bias).astype(raw.dtype)
        for mod in score_mods:
            raw = mod.apply(raw, tile)
        return raw.astype(jnp.float32)

    def keeps(tile):
        indices = (tile.head, tile.q_index[0], tile.kv_index[0])  # without their head axis
        return dropout.keep(call.dropout_keys, call.dropout_rate, *indices)

    return [
        split(logits, scores, of_raw=True) if score_mods or bias is not None or scale is not None else None,
        None if mask is None else split(mask.visible, scores),
        split(keeps, scores) if call.dropout_rate else None,
    ]
