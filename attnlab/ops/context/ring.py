"""Keys that pass from device to device, each computing with the keys of one device at a time (Liu et al. 2023).

In turn s device i has the keys of device i − s, and `attnlab.ops.logsumexp.merged` joins the parts. For the gradients,
keys pass around once more, followed by their gradients: with the results of the whole softmax, each part's gradients
need nothing of the other parts (Dao et al. 2022, algorithm 4), so no turn keeps anything. Over n devices these are
4(n − 1) messages: k and v forward; backward both as one array, and their gradients as one array.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from attnlab.ops.call import AttentionCall, Result
from attnlab.ops.logsumexp import merged
from attnlab.ops.meshes import equally_varying
from attnlab.ops.nodes import combine, partition
from attnlab.types import Array


def attend(run: Callable, axis: str, devices: int, call: AttentionCall) -> Result:
    """(out, (max, log_sum)) of this device's queries; `run` computes with the keys of one device."""
    call = equally_varying(jax.tree.map(jnp.asarray, call))
    learned, rest = partition(call, jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jnp.inexact), call))

    def of_device(turn, learned, rest, given=None):
        call = combine(learned, rest)
        if turn:
            call = call.replace(sinks=None)  # counted once
        return run((lax.axis_index(axis) - turn) % devices, call, given)

    def forward(learned, rest):
        k, v, parts = learned.k, learned.v, None
        for turn in range(devices):
            # The next keys pass while this turn computes, but not before the last turn is done: otherwise XLA passes
            # all keys at once, and holds them.
            (k, v), parts = lax.optimization_barrier(((k, v), parts))
            following = _passed_on((k, v), axis, devices) if turn < devices - 1 else None
            part = of_device(turn, learned.replace(k=k, v=v), rest)
            parts = part if parts is None else merged([parts, part])
            k, v = following or (k, v)
        out, log_sums = parts
        return out.astype(learned.q.dtype), log_sums

    @jax.custom_vjp
    def ring(learned, rest):
        return forward(learned, rest)

    def ring_forward(learned, rest):
        results = checkpoint_name(forward(learned, rest), "attention")  # see GPT's remat
        return results, (learned, rest, results)

    def ring_backward(saved, cotangents):
        learned, rest, results = saved
        gradients = _gradients(of_device, axis, devices, learned, rest, results, cotangents)
        return gradients, jax.tree.map(lambda _: None, rest)

    ring.defvjp(ring_forward, ring_backward)
    return ring(learned, rest)


def _gradients(of_device, axis, devices, learned, rest, given, cotangents) -> AttentionCall:
    def of_turn(turn, keys):
        """The gradients of a turn, in float32 or float64, k and v as one."""
        k, v = _taken_apart(keys, learned.k, learned.v)
        _, pull_back = jax.vjp(lambda learned: of_device(turn, learned, rest, given), learned.replace(k=k, v=v))
        (found,) = pull_back(cotangents)
        found = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), found)
        return _as_one(found.k, found.v), found.replace(k=None, v=None)

    own = _as_one(learned.k, learned.v)
    keys, passing, totals = _passed_on(own, axis, devices), None, None
    for turn in (*range(1, devices), 0):  # this device's keys come last: until then their gradients need no memory
        # A turn waits for the gradients that pass: overlapped with it, they would be held three times instead of twice.
        keys, passing, totals = lax.optimization_barrier((keys, passing, totals))
        following = _passed_on(keys, axis, devices) if 0 < turn < devices - 1 else own
        of_keys, found = of_turn(turn, keys)
        passing = of_keys if passing is None else jax.tree.map(jnp.add, passing, of_keys)
        totals = found if totals is None else jax.tree.map(jnp.add, totals, found)
        passing = _passed_on(passing, axis, devices) if turn else passing
        keys = following
    dk, dv = _taken_apart(passing, learned.k, learned.v)
    return jax.tree.map(lambda total, x: total.astype(x.dtype), totals.replace(k=dk, v=dv), learned)


def _passed_on(tree, axis: str, devices: int):
    around = [(device, (device + 1) % devices) for device in range(devices)]
    return jax.tree.map(lambda x: lax.ppermute(x, axis, around), tree)


def _as_one(k: Array, v: Array):
    """One array instead of two, if their types are equal."""
    return jnp.concatenate([k, v], axis=-1) if k.dtype == v.dtype else (k, v)


def _taken_apart(joined, k: Array, v: Array) -> tuple[Array, Array]:
    return joined if isinstance(joined, tuple) else (joined[..., : k.shape[-1]], joined[..., k.shape[-1] :])
