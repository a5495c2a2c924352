"""Random compositions of masks, score mods and sinks through Mosaic's kernels, in JAX's interpreter, against dense."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.ops import mosaic
from attnlab.score_mods import ALiBi, Forget, ScoreFn, SoftCap
from tests.ops.cases import draw_mask
from tests.ops.mosaic_calls import Shape, assert_near, drawn, needs_jax_011, results, specified, with_nan

pytestmark = [pytest.mark.campaign, needs_jax_011]

LENGTHS = [(256, 256), (256, 256), (200, 200), (130, 256), (256, 100)]


def draw_mods(rng, shape: Shape):
    """(Differentiable arrays by name, a function from these to score mods)."""
    sums = {length: np.cumsum(-0.1 * rng.random((length, shape.heads)), axis=0) for length in shape[1:3]}
    known = {
        "slopes": (0.1 * rng.random(shape.heads), ALiBi),
        "cap": (1 + rng.random(()), SoftCap),
        "sums": (sums[shape.keys], lambda x: Forget(sums[shape.queries].astype(np.float32), x)),
        "by_head": (rng.normal(size=shape.heads), lambda x: ScoreFn(lambda s, b, h, i, j, x: s * x[h] - x[0], x)),
        "number": (rng.normal(size=()), lambda x: ScoreFn(lambda s, b, h, i, j, x: jnp.where(i % 2 > 0, s, x), x)),
    }
    names = [name for name in known if rng.random() < 0.3]
    rng.shuffle(names)
    arrays, makers = ({name: known[name][at] for name in names} for at in (0, 1))
    return arrays, lambda arrays: tuple(make(arrays[name]) for name, make in makers.items())


@pytest.mark.parametrize("seed", range(150))
def test_random_composition_matches_the_specification(seed):
    rng = np.random.default_rng(seed)
    heads, features = int(rng.integers(1, 3)), int(rng.choice([64, 64, 128]))
    queries, keys = LENGTHS[rng.integers(len(LENGTHS))]
    shape = Shape(3 - heads, queries, keys, heads, int(rng.integers(1, heads + 1)), features)
    arrays, mods = draw_mods(rng, shape)
    arrays |= {"sinks": rng.normal(size=heads)} if rng.random() < 0.4 else {}
    terms = {}
    if rng.random() < 0.9:  # kernels take blocks of 64 and no dense masks
        terms["mask"] = draw_mask(rng, (shape.batch,), heads, queries, keys, size=64, dense=False)
    if queries != keys or rng.random() < 0.2:
        terms["q_positions"] = rng.integers(0, keys, queries).astype(np.int32)
        terms["kv_positions"] = np.arange(keys, dtype=np.int32)
    terms |= {"scale": float(rng.normal() / 8)} if rng.random() < 0.3 else {}

    def build_terms(**arrays):
        return terms | {"score_mod": mods(arrays) or None, "sinks": arrays.get("sinks")}

    (q, k, v, arrays), weights = drawn(shape, arrays)
    if "mask" in terms:
        k, v = (with_nan(shape, x, **terms) for x in (k, v))
    arguments = (q, k, v, arrays), weights
    with mosaic.interpreted():
        actual = jax.jit(functools.partial(results, "mosaic", build_terms))(*arguments)
    # Rows with few keys and sums that cancel have larger errors than the cases of the fast tests.
    assert_near(actual, specified(functools.partial(results, "dense", build_terms), *arguments), bound=2**-5)
