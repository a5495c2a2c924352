"""Random calls of the operator, drawn from a seed: shapes, masks, score mods and all other arguments."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab
from attnlab.masks import BlockSparse, Causal, Dense, Mask, MaskFn, Padding, PrefixLM, Segments, SlidingWindow
from attnlab.score_mods import ALiBi, RelativeBias, ScoreFn, SoftCap
from attnlab.testing.subject import with_gradients


def slow(*values):
    """A parametrized case that runs with the slow tests."""
    return pytest.param(*values, marks=pytest.mark.slow)


def draw_mask(rng, batch, heads, q_length, kv_length, depth=2, size=3, dense=True):
    """A random expression of `&`, `|`, `~` over masks of all types, with NumPy arrays.

    `size` is the block size and the largest right window; without `dense`, no mask is an array of all pairs.
    """
    if depth and rng.random() < 0.5:
        a, b = (draw_mask(rng, batch, heads, q_length, kv_length, depth - 1, size, dense) for _ in range(2))
        return [lambda: a & b, lambda: a | b, lambda: ~a][rng.integers(3)]()
    lead = batch if rng.random() < 0.5 else ()
    by_head = rng.choice([1, heads])

    def integers(low, high, *shape):
        return np.asarray(rng.integers(low, high, shape), np.int32)

    dense_masks = [
        lambda: Dense(rng.random((*batch, by_head, q_length, kv_length)) < 0.6),
        lambda: Dense(rng.random((q_length, kv_length)) < 0.6),
    ]
    masks = [
        Causal,
        lambda: SlidingWindow(int(rng.integers(0, kv_length + 1)), int(rng.integers(0, size + 1))),
        lambda: PrefixLM(integers(0, kv_length + 1, *lead) if rng.random() < 0.5 else int(rng.integers(0, kv_length))),
        lambda: Padding(integers(0, kv_length + 1, *lead) if rng.random() < 0.5 else int(rng.integers(0, kv_length))),
        lambda: Segments(*(np.sort(integers(0, 3, *lead, length), axis=-1) for length in (q_length, kv_length))),
        lambda: Segments(integers(0, 3, *lead, q_length), integers(0, 3, *lead, kv_length)),
        lambda: BlockSparse(rng.random((*batch, by_head, -(-q_length // size), -(-kv_length // size))) < 0.4, size),
        *(dense_masks if dense else []),
        lambda: MaskFn(lambda b, h, i, j: (i - j + h + b) % 3 != 0),
        lambda: MaskFn(lambda b, h, i, j, by: (i - j) % by[h] == 0, integers(1, 4, heads)),
    ]
    return masks[rng.integers(len(masks))]()


MODS = {
    "alibi": ALiBi,
    "relative": RelativeBias,
    "cap": SoftCap,
    "fn": lambda x: ScoreFn(lambda s, b, h, i, j, x: s * jnp.cos(i - j) + x[j] + h - b, x),
    "closure": lambda x: ScoreFn(lambda s, b, h, i, j: s + x[h] / (1 + (i - j) ** 2)),
}


@dataclass(frozen=True)
class Case:
    """One call of the operator; `str` names its arguments.

    Attributes:
      seed: the seed that `draw` made the case from.
      mask: the mask of the call.
      score_mods: names in `MODS`, in the order of application.
      arrays: float64 arrays by name, each with a gradient: q, k, v, and, if the call has them, bias, sinks, scale and
        the arrays of the score mods.
      positions: q_positions and kv_positions if the call has them.
      dropout_rate: 0 for none.
      block_sizes: tile sizes for the backends that compute by tiles.
    """

    seed: int
    mask: Mask | None
    score_mods: tuple[str, ...]
    arrays: dict[str, np.ndarray]
    positions: dict[str, np.ndarray]
    dropout_rate: float
    block_sizes: tuple[int, int]

    def __str__(self):
        names = [name for name in ("bias", "sinks", "scale") if name in self.arrays]
        names += [*self.score_mods, *(["positions"] if self.positions else [])]
        names += ["dropout"] if self.dropout_rate else []
        return "-".join([str(self.seed), _mask_name(self.mask), *names])

    def run(self, arrays, impl):
        """(out, lse)."""
        terms = {name: x for name, x in arrays.items() if name not in self.score_mods} | self.positions
        if self.dropout_rate:
            terms |= {"dropout_rate": self.dropout_rate, "dropout_key": jax.random.key(self.seed)}
        if impl == "blockwise":
            terms["block_sizes"] = self.block_sizes
        mask, mods = jax.tree.map(jnp.asarray, self.mask), tuple(MODS[name](arrays[name]) for name in self.score_mods)
        return attnlab.attention(mask=mask, score_mod=mods, impl=impl, return_lse=True, **terms)


def _mask_name(mask) -> str:
    if mask is None:
        return "no mask"
    parts = [_mask_name(getattr(mask, name)) for name in ("a", "b") if hasattr(mask, name)]
    return type(mask).__name__ + (f"({','.join(parts)})" if parts else "")


def draw(seed: int, multiple: int = 1) -> Case:
    """The case of `seed`, with its lengths rounded up to multiples of `multiple`."""

    def length():
        return -(-int(rng.integers(1, 41)) // multiple) * multiple

    rng = np.random.default_rng(seed)
    batch = [(), (2,), (1,), (2, 3)][rng.integers(4)]
    q_length = length()
    kv_length = q_length if rng.random() < 0.5 else length()
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
    names = [name for name in MODS if rng.random() < 0.25]
    rng.shuffle(names)
    sizes = {"alibi": heads, "relative": (heads, 5), "cap": (), "fn": kv_length, "closure": heads}
    arrays |= {name: np.abs(rng.normal(size=sizes[name])) + 1 for name in names}

    positions = {}
    if q_length != kv_length or rng.random() < 0.2:
        for name, length in (("q_positions", q_length), ("kv_positions", kv_length)):
            lead = batch if rng.random() < 0.5 else ()
            positions[name] = rng.integers(0, kv_length, (*lead, length)).astype(np.int32)
    dropout_rate = 0.3 if rng.random() < 0.3 else 0.0
    mask = draw_mask(rng, batch, heads, q_length, kv_length) if rng.random() < 0.85 else None
    block_sizes = (int(rng.integers(1, q_length + 4)), int(rng.integers(1, kv_length + 4)))
    return Case(seed, mask, tuple(names), arrays, positions, dropout_rate, block_sizes)


def results(arrays, run, impl, dtype, compiled=jax.jit):
    """out, lse and the gradient of every array from a call in `dtype`, as float64 NumPy arrays."""
    arrays = {name: np.asarray(x, dtype) for name, x in arrays.items()}

    def outputs(arrays):
        return dict(zip(("out", "lse"), run(arrays, impl)))

    def weigh(values):
        mixes = np.random.default_rng(1)
        # Each element has its own weight; a fully masked row has lse −inf and gradient 0.
        weights = {name: np.asarray(mixes.normal(size=x.shape), x.dtype) for name, x in values.items()}
        return weights | {"lse": jnp.where(jnp.isfinite(values["lse"]), weights["lse"], 0)}

    values = compiled(lambda arrays: with_gradients(outputs, arrays, weigh))(arrays)
    return {name: np.asarray(x, np.float64) for name, x in values.items()}


def assert_near(actual, expected):
    """Each side rounds about a hundred sums; 1e-11 is 5e4 units in the last place of the largest element."""
    for name, x in expected.items():
        largest = np.abs(x).max(initial=0, where=np.isfinite(x))
        np.testing.assert_allclose(actual[name], x, rtol=1e-11, atol=1e-11 * largest, err_msg=name)
