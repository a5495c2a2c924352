"""Adapter to the kernels of jax-linear-attention, which run on NVIDIA's Hopper GPUs.

On CPUs the library's portable form runs instead, for tests. Compared with the specification (`check_recurrence`,
bfloat16, 64 features), that form is correct except for the gradient of decays: where a token keeps e^−20 of the state,
its error is 700 times the bound, from cancellation in differences of running sums. So this gradient is refused. The
kernels have not been checked on a GPU, so "auto" never chooses them.
"""

import jax
import jax.numpy as jnp

from attnlab.ops.platforms import is_hopper
from attnlab.ops.recurrence.call import RecurrenceCall
from attnlab.support.extras import reason_against_version

VERSION = "0.1.0"
# The lowest log of a decay: e^−60 is negligible in bfloat16, while −∞ would become NaN in the library's sums.
LOWEST = -60.0
_KINDS = {  # by the case and whether decays differ by feature
    ("no erasure", False): "simple_gla",
    ("no erasure", True): "gla",
    ("symmetric", False): "gated_deltanet",
    ("symmetric", True): "kda",
}


def reason_against(call: RecurrenceCall) -> str | None:
    """The reason why this backend cannot run a call, or None."""
    *_, queries, features = call.terms.q.shape
    sizes = features, call.terms.v.shape[-1]
    reasons = {
        "it needs a Hopper GPU, e.g. an H100": call.platform == "tpu"
        or (call.platform == "gpu" and is_hopper(call.terms.v) is False),
        f"it has no {jnp.dtype(call.operand)}, only bfloat16": call.operand != jnp.bfloat16,
        f"keys of {sizes[0]} and values of {sizes[1]} features: it supports 64 or 128 for both": sizes
        not in ((64, 64), (128, 128)),
        f"{queries} queries read a state: it supports one": queries != 1,
        "context_parallel cannot split it": call.split is not None,
        "it computes on one device, and the mesh has several": jax.sharding.get_abstract_mesh().size > 1,
    }
    missing = reason_against_version("jax-linear-attention", VERSION, "jla")
    return missing or next((reason for reason, holds in reasons.items() if holds), None)


def untried(call: RecurrenceCall) -> str | None:
    """The reason why "auto" leaves a call to other backends."""
    return "no recorded GPU run has checked it: it runs only if named"


def run(call: RecurrenceCall, state):
    """Return (outputs `[..., T, H, 1, V]`, the last state `[..., H, K, V]`), from the state before the first token."""
    from jla import ops

    terms, operand, batch = call.terms, call.operand, call.terms.v.shape[:-3]
    q, k, v = (_flat(x, batch).astype(operand) for x in (terms.q[..., 0, :], terms.k, terms.v))
    g, by_feature = terms.g, terms.g is not None and terms.g.shape[-1] > 1
    if g is not None:
        g = _without_gradient(_flat(jnp.maximum(g, LOWEST), batch))
    if terms.case == "general":
        e, r = (_flat(x, batch) for x in terms.erase)
        g = jnp.zeros_like(e) if g is None else jnp.broadcast_to(g, e.shape)
        # In the library, S becomes diag(exp w) S + b (aᵀ S) + k vᵀ.
        kind, gates = "rwkv7", {"w": g, "a": r * jnp.exp(g), "b": -e}
    else:
        kind = _KINDS[terms.case, by_feature]
        g = jnp.zeros(v.shape[:-1]) if g is None else g if by_feature else g[..., 0]
        gates = {"g": g} | ({"beta": _flat(terms.beta, batch)[..., 0]} if terms.beta is not None else {})
    ids = None if terms.starts is None else jnp.cumsum(_flat(terms.starts, batch), axis=-1, dtype=jnp.int32)
    out, last = ops.linear_attention(
        kind,
        *(q, k, v),
        **gates,
        scale=1.0,
        initial_state=_flat(state, batch),
        segment_ids=ids,
        output_final_state=True,
        impl="mosaic_gpu" if call.platform == "gpu" else "chunked",
    )
    wide = (x.astype(state.dtype) for x in (out[..., None, :], last))
    return tuple(x.reshape(*batch, *x.shape[1:]) for x in wide)


@jax.custom_vjp
def _without_gradient(g):
    return g


def _refuse(_, d_g):
    raise ValueError(
        "impl = 'jla' has no gradient of g, as it is lost under strong decay: use impl='auto', or stop_gradient(g)"
    )


_without_gradient.defvjp(lambda g: (g, None), _refuse)


def _flat(x, batch):
    """Merge the batch axes into one."""
    return x.reshape(-1, *x.shape[len(batch) :])
