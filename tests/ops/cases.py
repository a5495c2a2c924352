"""Random calls of the operator, drawn from a seed: shapes, masks, score mods and all the rest."""

import jax
import jax.numpy as jnp
import numpy as np

import attnlab
from attnlab.masks import BlockSparse, Causal, Dense, MaskFn, Padding, PrefixLM, Segments, SlidingWindow
from attnlab.score_mods import ALiBi, RelativeBias, ScoreFn, SoftCap


def draw_mask(rng, batch, heads, q_length, kv_length, depth=2):
    """A random expression of `&`, `|`, `~` over masks of every kind."""
    if depth and rng.random() < 0.5:
        a, b = (draw_mask(rng, batch, heads, q_length, kv_length, depth - 1) for _ in range(2))
        return [lambda: a & b, lambda: a | b, lambda: ~a][rng.integers(3)]()
    lead = batch if rng.random() < 0.5 else ()
    by_head = rng.choice([1, heads])

    def integers(low, high, *shape):
        return jnp.asarray(rng.integers(low, high, shape), jnp.int32)

    return [
        Causal,
        lambda: SlidingWindow(int(rng.integers(0, kv_length + 1)), int(rng.integers(0, 4))),
        lambda: PrefixLM(integers(0, kv_length + 1, *lead) if rng.random() < 0.5 else int(rng.integers(0, kv_length))),
        lambda: Padding(integers(0, kv_length + 1, *lead) if rng.random() < 0.5 else int(rng.integers(0, kv_length))),
        lambda: Segments(
            jnp.sort(integers(0, 3, *lead, q_length), axis=-1), jnp.sort(integers(0, 3, *lead, kv_length), axis=-1)
        ),
        lambda: Segments(integers(0, 3, *lead, q_length), integers(0, 3, *lead, kv_length)),
        lambda: BlockSparse(
            jnp.asarray(rng.random((*batch, by_head, -(-q_length // 3), -(-kv_length // 3))) < 0.4), size=3
        ),
        lambda: Dense(jnp.asarray(rng.random((*batch, by_head, q_length, kv_length)) < 0.6)),
        lambda: Dense(jnp.asarray(rng.random((q_length, kv_length)) < 0.6)),
        lambda: MaskFn(lambda b, h, i, j: (i - j + h + b) % 3 != 0),
        lambda: MaskFn(lambda b, h, i, j, by: (i - j) % by[h] == 0, integers(1, 4, heads)),
    ][rng.integers(11)]()


def draw(seed: int):
    """(arrays, run): float64 arrays by name, all with gradients, and run(arrays, **how) -> (out, lse)."""
    rng = np.random.default_rng(seed)
    batch = [(), (2,), (1,), (2, 3)][rng.integers(4)]
    q_length = int(rng.integers(1, 41))
    kv_length = q_length if rng.random() < 0.5 else int(rng.integers(1, 41))
    kv_heads, group = int(rng.integers(1, 3)), int(rng.integers(1, 3))
    heads, head_dim, value_dim = kv_heads * group, int(rng.integers(1, 10)), int(rng.integers(1, 10))
    arrays = {
        "q": rng.normal(size=(*batch, q_length, heads, head_dim)),
        "k": rng.normal(size=(*batch, kv_length, kv_heads, head_dim)),
        "v": rng.normal(size=(*batch, kv_length, kv_heads, value_dim)),
    }
    if rng.random() < 0.4:
        lead = [(), (*batch, heads), (*(1,) * len(batch), heads), (*batch, 1)][rng.integers(4)]
        arrays["bias"] = rng.normal(size=(*lead, [1, q_length][rng.integers(2)], kv_length))
    if rng.random() < 0.4:
        arrays["sinks"] = rng.normal(size=heads)
    if rng.random() < 0.3:
        arrays["scale"] = np.array(rng.normal())
    kinds = [kind for kind in ("alibi", "relative", "cap", "fn", "closure") if rng.random() < 0.25]
    rng.shuffle(kinds)
    sizes = {"alibi": heads, "relative": (heads, 5), "cap": (), "fn": kv_length, "closure": heads}
    arrays |= {kind: np.abs(rng.normal(size=sizes[kind])) + 1 for kind in kinds}

    given = {}
    if q_length != kv_length or rng.random() < 0.2:
        for name, length in (("q_positions", q_length), ("kv_positions", kv_length)):
            lead = batch if rng.random() < 0.5 else ()
            given[name] = jnp.asarray(rng.integers(0, kv_length, (*lead, length)), jnp.int32)
    if rng.random() < 0.3:
        given |= {"dropout_rate": 0.3, "dropout_key": jax.random.key(seed)}
    mask = draw_mask(rng, batch, heads, q_length, kv_length) if rng.random() < 0.85 else None
    block_sizes = (int(rng.integers(1, q_length + 4)), int(rng.integers(1, kv_length + 4)))

    def run(arrays, impl):
        mods = {
            "alibi": ALiBi,
            "relative": RelativeBias,
            "cap": SoftCap,
            "fn": lambda x: ScoreFn(lambda s, b, h, i, j, x: s * jnp.cos(i - j) + x[j] + h - b, x),
            "closure": lambda x: ScoreFn(lambda s, b, h, i, j: s + x[h] / (1 + (i - j) ** 2)),
        }
        return attnlab.attention(
            arrays["q"],
            arrays["k"],
            arrays["v"],
            mask,
            tuple(mods[kind](arrays[kind]) for kind in kinds),
            arrays.get("bias"),
            arrays.get("scale"),
            arrays.get("sinks"),
            impl=impl,
            block_sizes=block_sizes if impl == "blockwise" else None,
            return_lse=True,
            **given,
        )

    return arrays, run


def results(arrays, run, impl, dtype):
    """out, lse and the gradient of every array, as float64 NumPy arrays, of a call in `dtype`."""
    arrays = {name: jnp.asarray(x, dtype) for name, x in arrays.items()}
    mixes = np.random.default_rng(1)

    def total(arrays):
        out, lse = run(arrays, impl)
        # Each output enters with a weight of its own; a row that sees nothing has lse −inf and gradient 0.
        mix_out, mix_lse = (jnp.asarray(mixes.normal(size=x.shape), x.dtype) for x in (out, lse))
        finite = jnp.isfinite(lse)
        return (out * mix_out).sum() + jnp.where(finite, lse * mix_lse, 0).sum(), (out, lse)

    gradients, (out, lse) = jax.jit(jax.grad(total, has_aux=True))(arrays)
    return {name: np.asarray(x, np.float64) for name, x in {"out": out, "lse": lse, **gradients}.items()}
