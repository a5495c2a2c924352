"""Attention on NVIDIA's Hopper GPUs, in Pallas' Mosaic GPU, with masks and score mods compiled into the kernels.

The formulas are in `attnlab.ops.blockwise`: a running max and sum in the forward pass, and a backward pass that
recomputes the scores of each tile, once for dq and once for dk and dv. `schedule` lists the 128 × 128 tiles that have a
visible pair; `programs` turns masks and score mods into functions of a tile; `kernels` has the three loops over tiles,
with a line for each term of the formulas; `passes` has the derivative and `vmap` rules.
"""

import contextlib
import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from attnlab.ops import hidden_keys
from attnlab.ops.call import AttentionCall, Result
from attnlab.ops.meshes import is_checked_manual, over_shards
from attnlab.ops.mosaic import programs
from attnlab.ops.mosaic.programs import TILE
from attnlab.ops.platforms import is_hopper
from attnlab.ops.schedule import EMPTY, FULL, PARTIAL, block_masks, visit_order
from attnlab.ops.tiles import WHOLE, padded

PLATFORM = "gpu"
_interpreter = []  # the parameters of each `interpreted` context, innermost last


@contextlib.contextmanager
def interpreted(detect_races: bool = False) -> Iterator[None]:
    """Context in which `impl="mosaic"` runs on CPUs, in JAX's interpreter of GPU kernels: slow, for numerical tests.

    Barriers block JAX's threads, so set NPROC=16 in the environment if there are fewer than 16 processors.
    """
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    _interpreter.append(InterpretGPUParams(detect_races=detect_races))
    try:
        yield
    finally:
        _interpreter.pop()


def is_interpreted() -> bool:
    return bool(_interpreter)


def untried(call: AttentionCall) -> str | None:
    """The reason why "auto" leaves a call to other backends, or None.

    None on Hopper GPUs, where a recorded run passed the checks: docs/benchmarks/nvidia-h100-80gb-hbm3.json.
    """
    is_known = is_interpreted() or is_hopper(call.q, call.k, call.v)
    return None if is_known else "whether the GPU is a Hopper is unknown: it runs only if named"


def reason_against(call: AttentionCall) -> str | None:
    """The reason why this backend cannot run a call, or None."""
    q, k, v = call.q, call.k, call.v
    reasons = {
        f"it needs JAX 0.11 or newer, and this is {jax.__version__}": jax.__version_info__ < (0, 11),
        "it needs a Hopper GPU, e.g. an H100": is_hopper(q, k, v) is False and not is_interpreted(),
        f"it has no {q.dtype}, only bfloat16": q.dtype != jnp.bfloat16,
        "q, k and v must have one type": not q.dtype == k.dtype == v.dtype,
        f"heads of {q.shape[-1]} and {v.shape[-1]} features: it supports 64 and 128": (q.shape[-1], v.shape[-1])
        not in ((64, 64), (128, 128)),
        "it has no bias": call.bias is not None,
        "it has no dropout": bool(call.dropout_rate),
        "it needs a static scale": isinstance(call.scale, jax.Array),
        "it chooses its own tile sizes": call.block_sizes is not None,
        "it cannot compute one shard of a call": call.shard != WHOLE,
        "within shard_map it needs check_vma=False": is_checked_manual(q, k, v),
        "it needs static sizes of all axes": not all(isinstance(n, int) for n in (*q.shape, *k.shape)),
        "an axis has length 0": 0 in (*q.shape, *k.shape),
    }
    return next((reason for reason, holds in reasons.items() if holds), None) or _reason_against_programs(call)


def _reason_against_programs(call: AttentionCall) -> str | None:
    for make, what in ((programs.mask_program, "mask"), (programs.mod_program, "score mods")):
        try:
            make(call)
        except programs.RefusedError as reason:
            return f"the {what} cannot run in a kernel: {reason}"
    return None


def attend(call: AttentionCall) -> Result:
    """Return (out, (max, log_sum))."""
    return _attend(call, _interpreter[-1] if _interpreter else None)


@functools.partial(jax.jit, static_argnums=1)
def _attend(call: AttentionCall, interpret) -> Result:
    from attnlab.ops.mosaic import passes  # Pallas is a large package, useless except on GPUs
    from attnlab.ops.mosaic.kernels import KernelPlan

    (mask, mask_arrays), (mod, mod_arrays) = programs.mask_program(call), programs.mod_program(call)
    # A mod's learned operand along keys has a gradient per query head, so each query head gets its copy of the keys.
    is_apart = mod is not None and any(x.is_learned and x.along == "keys" for x in mod.operands)
    lists = _lists(call, call.num_heads if is_apart else call.k.shape[-2])
    group = call.num_heads // call.k.shape[-2]
    k, v = hidden_keys.zeroed(call)
    q, k, v = (padded(x, -(-x.shape[-3] // TILE) * TILE, axis=-3) for x in (call.q, k, v))
    scale = q.shape[-1] ** -0.5 if call.scale is None else float(call.scale)
    plan = KernelPlan(mask, mod, scale, 1 if is_apart else group, call.sinks is not None, interpret)
    sinks = jnp.zeros(call.num_heads) if call.sinks is None else call.sinks
    sinks = sinks.astype(jnp.float32).reshape(*(1,) * len(call.batch), -1)
    fixed, learned = [*mask_arrays, *mod_arrays], [mod_arrays[n] for n in plan.learned]

    def run(q, k, v, others):
        batch = q.shape[:-3]
        if is_apart:
            k, v = (jnp.repeat(x, group, axis=-2) for x in (k, v))

        def flat(x):
            lead = x.shape[: len(batch)]
            return jnp.reshape(x, (math.prod(lead), *x.shape[len(batch) :]))

        results = passes.attention(plan, *jax.tree.map(flat, (q, k, v, *others)))
        return jax.tree.map(lambda x: x.reshape(*batch, *x.shape[1:]), results)

    out, log_sums = over_shards(run, q, k, v, (sinks, learned, fixed, lists))
    length = call.lengths[0]
    return out[..., :length, :, :], tuple(x[..., :length, :] for x in log_sums)


def _lists(call: AttentionCall, kv_heads: int) -> tuple:
    """Return, for blocks of queries and then for blocks of keys, (tiles to visit, `[*batch or 1s, heads or 1, n, m]`;
    how many are FULL and how many are not EMPTY, `[..., n, 2]`)."""
    kinds = block_masks(call.mask, call.lengths, (TILE, TILE), **call.coordinates)
    kinds = kinds.reshape(*(1,) * (len(call.batch) + 3 - kinds.ndim), *kinds.shape) if call.batch else kinds[0]
    key_kinds = kinds.swapaxes(-1, -2)
    if key_kinds.shape[-3] > kv_heads:  # visit every tile that any query head of a key head visits
        key_kinds = key_kinds.reshape(*key_kinds.shape[:-3], kv_heads, -1, *key_kinds.shape[-2:])
        is_empty, is_full = (key_kinds == EMPTY).all(-3), (key_kinds == FULL).all(-3)
        key_kinds = jnp.where(is_empty, EMPTY, jnp.where(is_full, FULL, PARTIAL))
    return tuple(
        (jnp.asarray(columns, jnp.int32), jnp.stack([full, visited], -1).astype(jnp.int32))
        for columns, full, visited in map(visit_order, (kinds, key_kinds))
    )
