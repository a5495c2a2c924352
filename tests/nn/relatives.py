"""Relatives of softmax attention that several tests share, and their formulas from the papers in NumPy float64.

Functions take the layer's parameters by path, "query/kernel", and one sequence `[T, F]`.
"""

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.masks import Causal
from attnlab.nn import DifferentialAttention, LatentAttention, MultiHeadAttention, Rotary, StickBreakingAttention
from attnlab.score_mods import SoftCap
from tests.nn.mixers.papers import convolved, out, projected, rms, rotated, sigmoid
from tests.ops.references import broken

X = np.random.default_rng(0).standard_normal((2, 9, 8)).astype(np.float32)


class ExclusiveAttention(MultiHeadAttention):
    """Attention whose outputs have no component along the token's own value."""

    def after(self, z, v, x, context):
        v = jnp.repeat(v, z.shape[-2] // v.shape[-2], axis=-2)
        unit = v * jax.lax.rsqrt(jnp.maximum((v**2).sum(-1, keepdims=True), 1e-12))  # 0 for a value of 0
        return super().after(z - (z * unit).sum(-1, keepdims=True) * unit, v, x, context)


GATES = {"score_mod": SoftCap(9.0), "forget_gate": True, "output_gate": True}
MODULES = {
    "gates": MultiHeadAttention(4, kv_heads=2, mask=Causal(), rotary=Rotary(), **GATES),
    "convolved": MultiHeadAttention(4, kv_heads=2, mask=Causal(), rotary=Rotary(), conv=3),
    "differential": DifferentialAttention(4, kv_heads=2, mask=Causal(), rotary=Rotary()),
    "latent": LatentAttention(2, 20, 3, 2, 5, mask=Causal(), rotary=Rotary()),  # expands a cache from 5 tokens on
    "latent_queries": LatentAttention(2, 2, 3, 2, 5, q_rank=3, use_bias=True, mask=Causal(), rotary=Rotary()),
    "stick_breaking": StickBreakingAttention(4, kv_heads=2, mask=Causal(), conv=2),
    "exclusive": ExclusiveAttention(4, kv_heads=2, mask=Causal()),
}


def by_path(variables) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(variables["params"])
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.float64(leaf) for path, leaf in leaves}


def softmax(scores):
    """Causal weights `[T, T]` of one head."""
    scores = np.where(np.tri(len(scores), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def gates(x, p):
    """Forget gates (Lin et al. 2025, section 3) with capped logits, and output gates (Qiu et al. 2025, section 2.2)."""
    q, k, v, gate = (projected(x, p, name) for name in ("query", "key", "value", "gate"))
    q, k, log_gates, z = rotated(q), rotated(k), -np.logaddexp(0, -projected(x, p, "forget")), np.zeros_like(q)
    for h in range(q.shape[1]):
        forgotten = [[log_gates[j + 1 : i + 1, h].sum() for j in range(len(x))] for i in range(len(x))]
        logits = 9 * np.tanh(q[:, h] @ k[:, h // 2].T / np.sqrt(q.shape[-1]) / 9)
        z[:, h] = softmax(logits + forgotten) @ v[:, h // 2]
    return out(z * sigmoid(gate), p)


def grouped(x, p):
    """Attention with short convolutions of queries, keys and values (So et al. 2021, figure 4)."""
    q, k, v = convolved(x, p)
    q, k, v = rotated(q), rotated(k).repeat(2, axis=1), v.repeat(2, axis=1)
    return out(np.stack([softmax(q[:, h] @ k[:, h].T / np.sqrt(q.shape[-1])) @ v[:, h] for h in range(4)], axis=1), p)


def exclusive(x, p):
    """Each head's outputs without their component along the token's own value."""
    q, k, v = (projected(x, p, name) for name in ("query", "key", "value"))
    v = v.repeat(2, axis=1)
    z = np.stack([softmax(q[:, h] @ k[:, h // 2].T / np.sqrt(q.shape[-1])) @ v[:, h] for h in range(4)], axis=1)
    z -= (z * v).sum(-1, keepdims=True) / (v * v).sum(-1, keepdims=True) * v
    return out(z, p)


def differential(x, p, layer=0):
    """Ye et al. 2024, equations 1 to 3; query heads h and H/2 + h compute the two maps of head h."""
    q, k, v = (projected(x, p, name) for name in ("query", "key", "value"))
    q, k = rotated(q), rotated(k)
    heads, group, start = q.shape[1] // 2, q.shape[1] // k.shape[1], 0.8 - 0.6 * np.exp(-0.3 * layer)
    share = np.exp(p["lambda_q1"] @ p["lambda_k1"]) - np.exp(p["lambda_q2"] @ p["lambda_k2"]) + start
    maps = [softmax(q[:, h] @ k[:, h // group].T / np.sqrt(q.shape[-1])) for h in range(2 * heads)]
    z = np.stack([(maps[h] - share * maps[heads + h]) @ v[:, h // group] for h in range(heads)], axis=1)
    return out(rms(z, p["norm/scale"]) * (1 - start), p)


def latent(x, p):
    """DeepSeek-AI 2024, equations 9 to 19."""
    query_input = rms(projected(x, p, "query_down"), p["query_norm/scale"], 1e-6) if "query_down/kernel" in p else x
    q, c = projected(query_input, p, "query"), rms(projected(x, p, "latent"), p["latent_norm/scale"], 1e-6)
    k, v = projected(c, p, "key"), projected(c, p, "value")
    plain, scale = k.shape[-1], q.shape[-1] ** -0.5
    q = np.concatenate([q[..., :plain], rotated(q[..., plain:])], axis=-1)
    shared = rotated(projected(x, p, "rotary")[:, None])[:, 0]
    z = np.zeros_like(v)
    for h in range(q.shape[1]):
        z[:, h] = softmax(scale * q[:, h] @ np.concatenate([k[:, h], shared], axis=-1).T) @ v[:, h]
    return out(z, p)


def stick_breaking(x, p):
    """Tan et al. 2024, equation 4, stick by stick."""
    q, k, v = (y[None] for y in convolved(x, p))
    (z,), _ = broken(q, k, v, np.ones((1, len(x), len(x)), bool))
    return out(z, p)


PAPERS = {"gates": gates, "convolved": grouped, "differential": differential, "latent": latent}
PAPERS |= {"latent_queries": latent, "stick_breaking": stick_breaking, "exclusive": exclusive}
