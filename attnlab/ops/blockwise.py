"""Exact attention by tiles, in memory that grows with the length and not with its square.

For a block of queries the keys come tile by tile; a running maximum m, sum l and weighted sum of values a are kept
and rescaled whenever the maximum grows (Milakov & Gimelshein 2018; Rabe & Staats 2021):

    m' = max(m, max_j s_ij)    l' = e^(m−m') l + Σ_j e^(s_ij−m')    a' = e^(m−m') a + Σ_j e^(s_ij−m') v_j

and at the end o_i = a / l, lse_i = m + log l. Only o and lse are kept for the backward pass, which computes the scores
of each tile again (Dao et al. 2022, algorithm 4; with δ_i = o_i·do_i − dlse_i):

    p_ij = e^(s_ij − lse_i)    ds_ij = p_ij (do_i·v_j − δ_i)    dv_j = Σ_i p_ij do_i    dk_j = Σ_i ds_ij q_i    dq_i = …

Tiles in which nothing is visible are never computed, and where all is visible nothing is compared.

Scores stand as [keys, queries]: every product is then rows by columns as XLA's CPU backend likes it, sums and maxima
over keys run along the vector lanes, and what belongs to a query (m, l, lse, δ) is one row that broadcasts.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType
from jaxtyping import Float

from attnlab.ops import dropout
from attnlab.ops.masks import Mask
from attnlab.ops.schedule import FULL, NONE, PART, schedule, shared_kinds, visits
from attnlab.ops.tiles import Side, Tile, padded
from attnlab.types import Array


def reason_against(**arguments) -> str | None:
    """Why this backend could not run a call, None if it can."""
    operands = [arguments[name] for name in ("q", "k", "v")]
    if any(0 in x.shape for x in operands):
        return "an axis has length 0"
    if any(AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types for x in operands):
        return "its loops need mesh axes of AxisType.Auto, and these are Explicit"
    return None


def attend(
    q: Float[Array, "*B Tq H D"],
    k: Float[Array, "*B Tk Hk D"],
    v: Float[Array, "*B Tk Hk Dv"],
    *,
    mask: Mask | None = None,
    score_mods=(),
    bias: Float[Array, "..."] | None = None,
    scale: float | Float[Array, ""] | None = None,
    sinks: Float[Array, " H"] | None = None,
    dropout_rate: float = 0.0,
    dropout_keys=None,
    q_positions=None,
    kv_positions=None,
    block_sizes: tuple[int, int] | None = None,
) -> tuple[Float[Array, "*B Tq H Dv"], Float[Array, "*B Tq H"]]:
    """Output in q's type and lse in float32 (float64 for float64)."""
    *batch, q_length, num_heads, head_dim = q.shape
    kv_length = k.shape[-3]
    dtype = jnp.promote_types(q.dtype, jnp.float32)

    block_sizes, kinds = schedule(
        mask,
        q_length,
        kv_length,
        block_sizes,
        q_positions=q_positions,
        kv_positions=kv_positions,
        num_heads=num_heads,
        batch=tuple(batch),
    )
    ends = tuple(count * size for count, size in zip(kinds.shape, block_sizes))
    if bias is not None:
        rank = len(batch) + 3
        bias = jnp.reshape(bias, (1,) * (rank - bias.ndim) + bias.shape)
        bias = padded(padded(bias, 1 if bias.shape[-2] == 1 else ends[0], axis=-2), ends[1])
    scale = head_dim**-0.5 if scale is None else scale
    if q.dtype == dtype or (isinstance(scale, float) and math.frexp(scale)[0] == 0.5):
        # Where nothing is rounded that would not be anyway: a pass over each tile less.
        q, scale = (q * scale).astype(q.dtype), None
    terms = _Terms(
        scale=None if scale is None else jnp.asarray(scale, dtype),
        score_mods=tuple(mod.opened(dtype) for mod in score_mods),
        mask=None if mask is None else mask.for_tiles(*ends),
        dropout_words=dropout.key_words(dropout_keys) if dropout_rate else None,
        q_positions=q_positions,
        kv_positions=kv_positions,
    )
    leaves, treedef = jax.tree.flatten(terms)
    plan = _Plan(
        treedef,
        learned=tuple(
            at
            for at, leaf in enumerate(jax.tree.leaves((terms.scale, terms.score_mods)))
            if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
        ),
        lengths=(q_length, kv_length),
        block_sizes=block_sizes,
        kinds=tuple(kind for kind in (FULL, PART) if not isinstance(kinds, np.ndarray) or (kinds == kind).any()),
        dropout_rate=dropout_rate,
    )
    operands = _Operands(q, k, v, bias, sinks, jnp.asarray(kinds), tuple(map(jnp.asarray, leaves)))
    try:
        return _attention(plan, _equally_varying(operands))
    except TypeError as error:
        if "forward-mode" in str(error):
            raise ValueError(_FIRST_ORDER) from error
        raise


class _Terms(NamedTuple):
    """What turns products into scores, tile by tile; those with gradients first."""

    scale: Array | None
    score_mods: tuple
    mask: Mask | None
    dropout_words: Array | None
    q_positions: Array | None
    kv_positions: Array | None


class _Operands(NamedTuple):
    """The arrays of a pass; those of the backward pass last."""

    q: Array
    k: Array
    v: Array
    bias: Array | None
    sinks: Array | None
    kinds: Array  # [nQ, nK], NONE, PART or FULL
    leaves: tuple  # of _Terms
    out: Array | None = None
    lse: Array | None = None
    d_out: Array | None = None
    d_lse: Array | None = None


class _Plan(NamedTuple):
    """What is known before the program runs.

    `vmap` puts one axis in front of all operands but `kinds`, and the `shared` leaves and bias that it does not map.
    """

    treedef: jax.tree_util.PyTreeDef  # of _Terms
    learned: tuple[int, ...]  # the leaves that have gradients
    lengths: tuple[int, int]
    block_sizes: tuple[int, int]
    kinds: tuple[int, ...]  # that occur
    dropout_rate: float
    is_mapped: bool = False
    shared: tuple[bool, ...] = ()  # for each leaf, and last for the bias


# The passes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan: _Plan, operands: _Operands):
    return _forward(plan, operands)


def _attention_forward(plan, operands):
    out, lse = _forward(plan, operands)
    return (out, lse), operands._replace(out=out, lse=lse)


def _attention_backward(plan, operands, cotangents):
    d_out, d_lse = cotangents
    dq, dk, dv, d_bias, d_sinks, d_learned = _backward(plan, operands._replace(d_out=d_out, d_lse=d_lse))
    d_leaves = [None] * len(operands.leaves)
    for at, d_leaf in zip(plan.learned, d_learned):
        d_leaves[at] = d_leaf
    return (_Operands(dq, dk, dv, d_bias, d_sinks, None, tuple(d_leaves)),)


_attention.defvjp(_attention_forward, _attention_backward)


def _explicitly_batched(core):
    """`core(plan, operands)`, whose batch under `vmap` is an axis of its arrays and not of its control flow.

    A mapped loop runs until the last of the mapped is done, and a mapped `cond` computes both sides: nothing would be
    skipped. And derivatives beyond the first order are refused.
    """

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def run(plan, operands):
        @custom_vmap
        def one(operands):
            return core(plan, operands)

        @one.def_vmap
        def many(axis_size, is_batched, operands):
            (is_batched,) = is_batched if isinstance(is_batched, list) else (is_batched,)
            results = run(*_mapped(plan, operands, is_batched, axis_size))
            if plan.is_mapped:
                results = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), results)
            return results, jax.tree.map(lambda _: True, results)

        return one(operands)

    @run.defjvp
    def refuse(plan, primals, tangents):
        raise ValueError(_FIRST_ORDER)

    return run


_FIRST_ORDER = (
    "impl = 'blockwise' has first derivatives in reverse mode only: for forward mode or second order use impl='dense'"
)


def _mapped(plan, operands, is_batched, size):
    """Plan and operands with one more mapped axis, made one with that which there may be."""
    had = operands.q.shape[int(is_batched.q)] if plan.is_mapped else 1
    was_shared = plan.shared or (not plan.is_mapped,) * (len(operands.leaves) + 1)

    def merge(x, batched, was_shared, may_stay=False):
        if may_stay and was_shared and not batched:
            return x
        x = x if batched else x[None]
        x = x[:, None] if was_shared else x
        return jnp.broadcast_to(x, (size, had, *x.shape[2:])).reshape(size * had, *x.shape[2:])

    def merged(name):
        spread = functools.partial(merge, was_shared=not plan.is_mapped)
        return jax.tree.map(spread, getattr(operands, name), getattr(is_batched, name))

    batched = (*is_batched.leaves, is_batched.bias is True)
    *leaves, bias = (
        None if x is None else merge(x, is_so, was, may_stay=True)
        for x, is_so, was in zip((*operands.leaves, operands.bias), batched, was_shared)
    )
    kinds = operands.kinds
    if is_batched.kinds:
        kinds = shared_kinds(kinds > NONE, kinds == FULL)
    others = {name: merged(name) for name in ("q", "k", "v", "sinks", "out", "lse", "d_out", "d_lse")}
    shared = tuple(was and not is_so for was, is_so in zip(was_shared, batched))
    operands = _Operands(bias=bias, kinds=kinds, leaves=tuple(leaves), **others)
    return plan._replace(is_mapped=True, shared=shared), operands


@_explicitly_batched
@functools.partial(jax.jit, static_argnums=0)
def _forward(plan: _Plan, operands: _Operands):
    """(out, lse)."""
    q, k, v, bias, leaves = operands.q, operands.k, operands.v, operands.bias, operands.leaves
    dtype, num_heads = jnp.promote_types(q.dtype, jnp.float32), q.shape[-2]
    (q_size, kv_size), q_length = plan.block_sizes, plan.lengths[0]
    q_blocks, k_blocks, v_blocks = _blocked(q, q_size), _blocked(k, kv_size), _blocked(v, kv_size)
    rows = visits(operands.kinds)

    def query_block(i):
        q_i = _at(q_blocks, i)

        def tile(kind, j, running):
            largest, total, weighted = running
            k_j, v_j = (_per_query_head(_at(blocks, j), num_heads) for blocks in (k_blocks, v_blocks))
            dots = _product("kd,qd->kq", k_j, q_i, dtype)
            s, seen = _scores(plan, kind, i, j, dots, _bias_tile(plan, bias, i, j), leaves)
            if kind == PART:
                s = lax.optimization_barrier(s)  # or XLA would draw the mask again for each use
                v_j = jnp.where(seen[..., None], v_j, 0)
            new_largest = jnp.maximum(largest, s.max(axis=-2))
            # A row that has seen nothing yet has largest score −inf: exp(−inf − 0) is 0, exp(−inf + inf) is not.
            shift = jnp.where(jnp.isneginf(new_largest), 0, new_largest)
            p = jnp.exp(s - shift[..., None, :])
            shrink = jnp.exp(largest - shift)
            total = total * shrink + p.sum(axis=-2)
            if plan.dropout_rate:
                p = jnp.where(_stays(plan, i, j, s.shape, leaves), p, 0)
            weighted = weighted * shrink[..., None, :] + _product("kd,kq->dq", v_j, p.astype(v.dtype), dtype)
            return new_largest, total, weighted

        leading = q_i.shape[:-2]
        running = (
            jnp.full((*leading, q_size), -jnp.inf, dtype),
            jnp.zeros((*leading, q_size), dtype),
            jnp.zeros((*leading, v.shape[-1], q_size), dtype),
        )
        largest, total, weighted = _visit(plan, rows, i, tile, _varying_like(q, running))
        if operands.sinks is not None:
            sinks = _sinks(plan, operands, dtype)[..., None]
            largest, before = jnp.maximum(largest, sinks), largest
            shift = jnp.where(jnp.isneginf(largest), 0, largest)
            total = total * jnp.exp(before - shift) + jnp.exp(sinks - shift)
            weighted = weighted * jnp.exp(before - shift)[..., None, :]
        sees = total > 0
        total = jnp.where(sees, total, 1)
        out = weighted / (total * (1 - plan.dropout_rate))[..., None, :]
        lse = jnp.where(sees, largest + jnp.log(total), -jnp.inf)
        return out.astype(q.dtype), lse[..., None, :]

    out, lse = lax.map(query_block, jnp.arange(operands.kinds.shape[0]))
    return _joined_turned(out, q_length), _joined_turned(lse, q_length)[..., 0]


@_explicitly_batched
@functools.partial(jax.jit, static_argnums=0)
def _backward(plan: _Plan, operands: _Operands):
    """Gradients of q, k, v, bias, sinks and the learned leaves."""
    q, k, v, bias, leaves = operands.q, operands.k, operands.v, operands.bias, operands.leaves
    dtype, num_heads = jnp.promote_types(q.dtype, jnp.float32), q.shape[-2]
    (q_size, kv_size), (q_length, kv_length) = plan.block_sizes, plan.lengths
    # Nothing flows into a row that sees nothing, nor into those that only fill the last block: e^(s − inf) is 0.
    sees = ~jnp.isneginf(operands.lse)
    # δ; a product with ones, since XLA's CPU backend takes ten times as long to sum along the last axis.
    products, ones = operands.out.astype(dtype) * operands.d_out.astype(dtype), jnp.ones(v.shape[-1], dtype)
    delta = jnp.matmul(products, ones, precision=lax.Precision.HIGHEST) - operands.d_lse
    delta, lse = jnp.where(sees, delta, 0), jnp.where(sees, operands.lse, jnp.inf)
    delta, lse = delta[..., None], lse[..., None]
    q_blocks, d_out_blocks, delta_blocks = (_blocked(x, q_size) for x in (q, operands.d_out.astype(v.dtype), delta))
    lse_blocks = _blocked(lse, q_size, fill=jnp.inf)
    k_blocks, v_blocks = (_blocked(x, kv_size) for x in (k, v))
    rows = visits(operands.kinds.T)
    # Each of what `vmap` maps has gradients of its own, though it may share the value.
    spread = functools.partial(_spread, q.shape[0]) if plan.is_mapped else lambda x, shared: x
    shared = plan.shared or (False,) * (len(leaves) + 1)
    leaves = tuple(spread(leaf, shared[at]) if at in plan.learned else leaf for at, leaf in enumerate(leaves))
    learned = [leaves[at] for at in plan.learned]
    still_shared = (is_so and at not in plan.learned for at, is_so in enumerate(shared[:-1]))
    plan = plan._replace(shared=(*still_shared, False))

    def key_block(j, totals):
        k_j, v_j = (_per_query_head(_at(blocks, j), num_heads) for blocks in (k_blocks, v_blocks))

        def tile(kind, i, running):
            dk_j, dv_j, dq_turned, d_bias, d_learned = running

            def scores(dots, bias_tile, learned):
                given = list(leaves)
                for at, leaf in zip(plan.learned, learned):
                    given[at] = leaf
                return _scores(plan, kind, i, j, dots, bias_tile, tuple(given))

            bias_tile = None if bias is None else spread(_bias_tile(plan, bias, i, j), shared[-1])
            q_i, d_out_i = _at(q_blocks, i), _at(d_out_blocks, i)
            lse_i, delta_i = (_at(blocks, i).swapaxes(-1, -2) for blocks in (lse_blocks, delta_blocks))
            dots = _product("kd,qd->kq", k_j, q_i, dtype)
            s, pull_back, seen = jax.vjp(scores, dots, bias_tile, learned, has_aux=True)
            p = jnp.exp(s - lse_i)
            kept, dp = p, _product("kd,qd->kq", v_j, d_out_i, dtype)
            if plan.dropout_rate:
                stays = _stays(plan, i, j, s.shape, leaves)
                kept, dp = (jnp.where(stays, x / (1 - plan.dropout_rate), 0) for x in (p, dp))
            d_dots, d_bias_tile, d_leaves = pull_back(p * (dp - delta_i))
            d_dots = d_dots.astype(q.dtype)
            seen_k_j = jnp.where(seen[..., None], k_j, 0) if kind == PART else k_j
            dv_j = dv_j + _product("kq,qd->kd", kept.astype(v.dtype), d_out_i, dtype)
            dk_j = dk_j + _product("kq,qd->kd", d_dots, q_i, dtype)
            dq_i = dq_turned[i] + _product("kd,kq->dq", seen_k_j, d_dots, dtype)
            dq_turned = lax.dynamic_update_index_in_dim(dq_turned, dq_i, i, axis=0)
            if d_bias is not None:
                d_bias = _add_bias_tile(plan, d_bias, d_bias_tile, i, j)
            d_learned = [total + d_leaf for total, d_leaf in zip(d_learned, d_leaves)]
            return dk_j, dv_j, dq_turned, d_bias, d_learned

        dk, dv, *totals = totals
        zeros = _varying_like(q, tuple(jnp.zeros(x.shape, dtype) for x in (k_j, v_j)))
        dk_j, dv_j, *totals = _visit(plan, rows, j, tile, (*zeros, *totals))
        dk, dv = (_put(whole, j, _per_key_head(x, k.shape[-2])) for whole, x in ((dk, dk_j), (dv, dv_j)))
        return dk, dv, *totals

    d_bias = None if bias is None else jnp.zeros_like(spread(bias, shared[-1]), dtype)
    d_learned = [jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in learned]
    turned = (operands.kinds.shape[0], *q.shape[:-3], num_heads, q.shape[-1], q_size)
    totals = (jnp.zeros_like(k_blocks), jnp.zeros_like(v_blocks), jnp.zeros(turned, dtype), d_bias, d_learned)
    dk, dv, dq, d_bias, d_learned = lax.fori_loop(0, operands.kinds.shape[1], key_block, _varying_like(q, totals))
    d_sinks = None
    if operands.sinks is not None:
        d_sink = -(jnp.exp(_sinks(plan, operands, dtype)[..., None, :, None] - lse) * delta)[..., 0]
        d_sinks = d_sink.sum(axis=tuple(range(int(plan.is_mapped), d_sink.ndim - 1))).astype(operands.sinks.dtype)
    return (
        _joined_turned(dq, q_length).astype(q.dtype),
        _joined(dk, kv_length),
        _joined(dv, kv_length),
        None if bias is None else d_bias.astype(bias.dtype),
        d_sinks,
        tuple(total.astype(leaf.dtype) for total, leaf in zip(d_learned, learned)),
    )


# What a tile is made of


def _scores(plan, kind, i, j, dots, bias_tile, leaves):
    """The scores `[..., H, keys, queries]` of query block i and key block j; −inf where they are not visible.

    And which keys any of the queries sees, `[..., H or 1, keys]`: the others must be inert, even NaN, but 0·NaN is NaN.
    """

    def scores(dots, bias_tile, leaves):
        terms = jax.tree.unflatten(plan.treedef, leaves)
        tile = _tile(plan, i, j, dots.shape, terms.q_positions, terms.kv_positions)
        s, seen = dots, None
        if kind == PART:
            visible = _inside(plan, i, j)
            if terms.mask is not None:
                visible = visible & terms.mask.visible(tile)
            visible = jnp.reshape(visible, (1,) * (s.ndim - jnp.ndim(visible)) + jnp.shape(visible))
            seen = jnp.broadcast_to(visible, (*visible.shape[:-2], *s.shape[-2:])).any(axis=-1)
            if terms.scale is not None or terms.score_mods:
                s = jnp.where(visible, s, 0)  # what they make of an unseen NaN would spoil their own gradients
        if terms.scale is not None:
            s = s * terms.scale
        if bias_tile is not None:
            s = s + bias_tile.astype(s.dtype)
        for mod in terms.score_mods:
            s = jnp.broadcast_to(mod.apply(s, tile), s.shape).astype(s.dtype)
        if kind == PART:
            s = jnp.where(visible, s, -jnp.inf)
        return s, seen

    if not plan.is_mapped:
        return scores(dots, bias_tile, leaves)
    *axes, bias_axis = (None if shared else 0 for shared in plan.shared)
    return jax.vmap(scores, in_axes=(0, bias_axis, tuple(axes)))(dots, bias_tile, leaves)


def _inside(plan, i, j):
    """Which pairs of a tile, `[keys, queries]`, are none that only fill the last one up."""
    (q_size, kv_size), (q_length, kv_length) = plan.block_sizes, plan.lengths
    inside = jnp.ones((1, 1), bool)
    if q_length % q_size:
        inside = inside & (i * q_size + jnp.arange(q_size) < q_length)
    if kv_length % kv_size:
        inside = inside & (j * kv_size + jnp.arange(kv_size) < kv_length)[:, None]
    return inside


def _stays(plan, i, j, shape, leaves):
    """Which weights of a tile dropout keeps."""

    def stays(leaves):
        words = jax.tree.unflatten(plan.treedef, leaves).dropout_words
        tile = _tile(plan, i, j, shape[int(plan.is_mapped) :])
        return dropout.keep(words, plan.dropout_rate, tile.head, tile.q_index, tile.kv_index)

    if not plan.is_mapped:
        return stays(leaves)
    return jax.vmap(stays, in_axes=(tuple(None if shared else 0 for shared in plan.shared[:-1]),), axis_size=shape[0])(
        leaves
    )


def _tile(plan, i, j, shape, q_positions=None, kv_positions=None) -> Tile:
    """The coordinates of query block i and key block j, for scores `[*batch, H, keys, queries]`."""

    def side(block, size, length, positions, axis):
        start = jnp.asarray(block * size, jnp.int32)
        # What only fills the last tile up stands where the last row does: a mod must not meet a place unheard of.
        index = jnp.minimum(start + jnp.arange(size, dtype=jnp.int32), length - 1)
        side = Side(index, index, axis, start)
        return side if positions is None else side._replace(position=side.take(positions))

    *batch, num_heads, _, _ = shape
    return Tile(
        example=jnp.arange(math.prod(batch), dtype=jnp.int32).reshape(*batch, 1, 1, 1),
        head=jnp.arange(num_heads, dtype=jnp.int32)[:, None, None],
        queries=side(i, plan.block_sizes[0], plan.lengths[0], q_positions, -1),
        keys=side(j, plan.block_sizes[1], plan.lengths[1], kv_positions, -2),
    )


def _bias_tile(plan, bias, i, j):
    """`[..., keys, queries or 1]` of a bias `[..., Tq or 1, Tk]`."""
    if bias is None:
        return None
    sizes, starts = _bias_place(plan, bias, i, j)
    return lax.dynamic_slice(bias, starts, sizes).swapaxes(-1, -2)


def _add_bias_tile(plan, d_bias, d_tile, i, j):
    sizes, starts = _bias_place(plan, d_bias, i, j)
    d_tile = lax.dynamic_slice(d_bias, starts, sizes) + d_tile.swapaxes(-1, -2).astype(d_bias.dtype)
    return lax.dynamic_update_slice(d_bias, d_tile, starts)


def _bias_place(plan, bias, i, j):
    q_size, kv_size = plan.block_sizes
    of_all_queries = bias.shape[-2] == 1
    sizes = (*bias.shape[:-2], 1 if of_all_queries else q_size, kv_size)
    return sizes, (*(0,) * (bias.ndim - 2), 0 if of_all_queries else i * q_size, j * kv_size)


def _sinks(plan, operands, dtype):
    """`[..., H]`."""
    sinks = operands.sinks.astype(dtype)
    between = operands.q.ndim - 3 - int(plan.is_mapped)
    return sinks.reshape(*sinks.shape[:-1], *(1,) * between, sinks.shape[-1])


def _per_query_head(x, num_heads):
    """`[..., Hk, n, m]` to `[..., H, n, m]`: head h of q reads head h // (H / Hk) (Ainslie et al. 2023)."""
    group = num_heads // x.shape[-3]
    return x if group == 1 else jnp.repeat(x, group, axis=-3)


def _per_key_head(x, kv_heads):
    """The transpose of `_per_query_head`: sums over each group."""
    *batch, num_heads, n, m = x.shape
    return x if num_heads == kv_heads else x.reshape(*batch, kv_heads, num_heads // kv_heads, n, m).sum(axis=-3)


# Blocks


def _visit(plan, rows, row, tile, running):
    """`running` after tile(kind, column, running) for each column of the row that has anything to see."""
    columns, full, some = (x[row] for x in rows)
    for kind, start, stop in ((FULL, 0, full), (PART, full, some)):
        if kind in plan.kinds:
            running = lax.fori_loop(start, stop, lambda t, running, kind=kind: tile(kind, columns[t], running), running)
    return running


def _blocked(x, size, fill=0):
    """`[..., T, H, D]` as `[..., n, size, H, D]`, the last block filled up."""
    *batch, length, heads, width = x.shape
    x = jnp.pad(x, [(0, 0)] * len(batch) + [(0, -length % size), (0, 0), (0, 0)], constant_values=fill)
    return x.reshape(*batch, -1, size, heads, width)


def _at(blocked, i):
    """Block i as `[..., H, size, D]`, a copy of its own, which products may then read in any order."""
    block = lax.dynamic_index_in_dim(blocked, i, axis=blocked.ndim - 4, keepdims=False)
    return lax.optimization_barrier(block.swapaxes(-2, -3))


def _put(blocked, i, block):
    """`blocked` with `[..., H, size, D]` in the place of block i."""
    block = block.swapaxes(-2, -3).astype(blocked.dtype)
    return lax.dynamic_update_index_in_dim(blocked, block, i, axis=blocked.ndim - 4)


def _joined(x, length):
    """The inverse of `_blocked`."""
    return x.reshape(*x.shape[:-4], -1, *x.shape[-2:])[..., :length, :, :]


def _joined_turned(x, length):
    """`[n, ..., H, D, size]` as `[..., T, H, D]`; sums over keys come out so, and are turned once and not by tile."""
    return _joined(jnp.moveaxis(x, (0, -1), (-4, -3)), length)


def _product(subscripts, a, b, dtype):
    a_axes, b_axes, axes = subscripts.replace("->", ",").split(",")
    return jnp.einsum(f"...{a_axes},...{b_axes}->...{axes}", a, b, preferred_element_type=dtype)


# Under `vmap` and `shard_map`


def _spread(size, x, shared):
    return jnp.broadcast_to(x, (size, *x.shape)) if shared else x


def _varying_like(x, tree):
    """`tree` marked, within `shard_map`, as varying over the axes that `x` varies over."""
    return jax.tree.map(lambda leaf: _varying(leaf, _axes(x)), tree)


def _equally_varying(tree):
    axes = frozenset().union(*(_axes(leaf) for leaf in jax.tree.leaves(tree)))
    return jax.tree.map(lambda leaf: _varying(leaf, axes), tree)


def _varying(x, axes):
    missing = tuple(axes - _axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def _axes(x):
    """The mesh axes over which `x` varies within `shard_map`."""
    return jax.typeof(x).manual_axis_type.varying
