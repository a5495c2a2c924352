"""The relatives of softmax attention that the tests of their modules share: each in NumPy float64, from its paper.

Functions take the layer's parameters by path, "query/kernel", and one sequence `[T, F]`.
"""

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.masks import Causal
from attnlab.nn import DifferentialAttention, LatentAttention, MultiHeadAttention, Rotary, StickBreakingAttention
from attnlab.score_mods import SoftCap
from tests.ops.test_stick_breaking import broken
from tests.parameters import parameters

X = np.random.default_rng(0).standard_normal((2, 9, 8)).astype(np.float32)


class ExclusiveAttention(MultiHeadAttention):
    """Attention whose outputs have no part along the token's own value."""

    def after(self, z, v, x, context):
        v = jnp.repeat(v, z.shape[-2] // v.shape[-2], axis=-2)
        unit = v * jax.lax.rsqrt(jnp.maximum((v**2).sum(-1, keepdims=True), 1e-12))  # 0 for a value of 0
        return super().after(z - (z * unit).sum(-1, keepdims=True) * unit, v, x, context)


GATES = {"score_mod": SoftCap(9.0), "forget_gate": True, "output_gate": True}
MODULES = {
    "gates": MultiHeadAttention(4, kv_heads=2, mask=Causal(), rotary=Rotary(), **GATES),
    "differential": DifferentialAttention(4, kv_heads=2, mask=Causal(), rotary=Rotary()),
    "latent": LatentAttention(2, 20, 3, 2, 5, mask=Causal(), rotary=Rotary()),  # expands a cache from 5 tokens on
    "latent_queries": LatentAttention(2, 2, 3, 2, 5, q_rank=3, use_bias=True, mask=Causal(), rotary=Rotary()),
    "stick_breaking": StickBreakingAttention(4, kv_heads=2, mask=Causal()),
    "exclusive": ExclusiveAttention(4, kv_heads=2, mask=Causal()),
}


def by_path(variables) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(variables["params"])
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.float64(leaf) for path, leaf in leaves}


def compiled(name):
    return parameters(MODULES[name], X), jax.jit(MODULES[name].apply)


def dense(x, p, name):
    return np.einsum("tf,f...->t...", x, p[f"{name}/kernel"]) + p.get(f"{name}/bias", 0)


def rms(x, scale=1.0, epsilon=1e-6):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * scale


def rotated(x):
    """Pairs (i, i + n/2) as complex numbers, `[T, H, n]`."""
    half = x.shape[-1] // 2
    frequencies = np.float64(np.float32(10_000.0 ** (-np.arange(half) / half)))  # rounded, as everywhere in attnlab
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.arange(len(x))[:, None] * frequencies)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def softmax(scores):
    """Causal weights `[T, T]` of one head."""
    scores = np.where(np.tri(len(scores), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def gates(x, p):
    """Lin et al. 2025, equations 1 and 2, of capped logits, and the output gate of Qiu et al. 2025."""
    q, k, v, gate = (dense(x, p, name) for name in ("query", "key", "value", "gate"))
    q, k, log_gates, z = rotated(q), rotated(k), -np.logaddexp(0, -dense(x, p, "forget")), np.zeros_like(q)
    for h in range(q.shape[1]):
        forgotten = [[log_gates[j + 1 : i + 1, h].sum() for j in range(len(x))] for i in range(len(x))]
        logits = 9 * np.tanh(q[:, h] @ k[:, h // 2].T / np.sqrt(q.shape[-1]) / 9)
        z[:, h] = softmax(logits + forgotten) @ v[:, h // 2]
    return np.einsum("thd,hdf->tf", z / (1 + np.exp(-gate)), p["out/kernel"]) + p["out/bias"]


def exclusive(x, p):
    """Outputs of each head less their part along the token's own value."""
    q, k, v = (dense(x, p, name) for name in ("query", "key", "value"))
    v = v.repeat(2, axis=1)
    z = np.stack([softmax(q[:, h] @ k[:, h // 2].T / np.sqrt(q.shape[-1])) @ v[:, h] for h in range(4)], axis=1)
    z -= (z * v).sum(-1, keepdims=True) / (v * v).sum(-1, keepdims=True) * v
    return np.einsum("thd,hdf->tf", z, p["out/kernel"]) + p["out/bias"]


def differential(x, p, layer=0):
    """Ye et al. 2024, equations 1 to 3, with heads h and H/2 + h of queries as the two maps of head h."""
    q, k, v = (dense(x, p, name) for name in ("query", "key", "value"))
    q, k = rotated(q), rotated(k)
    heads, group, start = q.shape[1] // 2, q.shape[1] // k.shape[1], 0.8 - 0.6 * np.exp(-0.3 * layer)
    share = np.exp(p["lambda_q1"] @ p["lambda_k1"]) - np.exp(p["lambda_q2"] @ p["lambda_k2"]) + start
    maps = [softmax(q[:, h] @ k[:, h // group].T / np.sqrt(q.shape[-1])) for h in range(2 * heads)]
    out = [(maps[h] - share * maps[heads + h]) @ v[:, h // group] for h in range(heads)]
    z = rms(np.stack(out, axis=1), p["norm/scale"], 1e-5) * (1 - start)
    return np.einsum("thd,hdf->tf", z, p["out/kernel"]) + p["out/bias"]


def latent(x, p):
    """DeepSeek-AI 2024, equations 9 to 19."""
    of_query = rms(dense(x, p, "query_down"), p["query_norm/scale"]) if "query_down/kernel" in p else x
    q, c = dense(of_query, p, "query"), rms(dense(x, p, "latent"), p["latent_norm/scale"])
    k, v = dense(c, p, "key"), dense(c, p, "value")
    plain, scale = k.shape[-1], q.shape[-1] ** -0.5
    q = np.concatenate([q[..., :plain], rotated(q[..., plain:])], axis=-1)
    shared = rotated(dense(x, p, "rotary")[:, None])[:, 0]
    out = []
    for h in range(q.shape[1]):
        out.append(softmax(scale * q[:, h] @ np.concatenate([k[:, h], shared], axis=-1).T) @ v[:, h])
    return np.einsum("thd,hdf->tf", np.stack(out, axis=1), p["out/kernel"]) + p.get("out/bias", 0)


def stick_breaking(x, p):
    """Tan et al. 2024, equation 4, stick by stick."""
    q, k, v = (dense(x, p, name)[None] for name in ("query", "key", "value"))
    (z,), _ = broken(q, k, v, np.ones((1, len(x), len(x)), bool))
    return np.einsum("thd,hdf->tf", z, p["out/kernel"]) + p["out/bias"]


PAPERS = {"gates": gates, "differential": differential, "latent": latent, "latent_queries": latent}
PAPERS |= {"stick_breaking": stick_breaking, "exclusive": exclusive}
