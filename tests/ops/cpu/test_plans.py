"""Calls computed in parts on CPUs, and whether XLA still needs the parts."""

import functools
import re
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab
from attnlab.masks import BlockSparse, Causal, Padding, Segments
from attnlab.ops.cpu import plans
from attnlab.ops.schedule import CPU
from attnlab.score_mods import ScoreFn, SoftCap
from tests.ops import cases
from tests.programs import optimized

attend = functools.partial(attnlab.attention, impl="blockwise")

LONG = {"q": (2, 520, 4, 8), "k": (2, 520, 2, 8), "v": (2, 520, 2, 6)}  # the last tiles are ragged
SHORT = {"q": (4, 200, 8, 8), "k": (4, 200, 8, 8), "v": (4, 200, 8, 6)}


def call_in_parts(arrays, impl, block_sizes=(512, 256)):
    """A call with every term that depends on example or head, except terms whose gradient is shared by heads."""
    rng, (batch, length, num_heads, _) = np.random.default_rng(1), arrays["q"].shape
    by_head = BlockSparse(rng.random((batch, num_heads, length // 40, length // 40)) < 0.7, size=40)
    segments = Segments(np.sort(rng.integers(0, 3, (batch, length)), axis=-1))
    examples = np.arange(batch)
    positions = np.arange(length) + 7 * examples[:, None]
    mods = (SoftCap(5.0), ScoreFn(lambda s, b, h, i, j: s - 0.01 * (h + 2 * b) * (i - j)))
    terms = {"mask": (Causal() & segments & by_head) | Padding(2 + 3 * examples), "score_mod": mods}
    terms |= {"dropout_rate": 0.2, "dropout_key": jax.random.key(3)}
    terms |= {"q_positions": positions, "kv_positions": positions, "return_lse": True}
    sizes = block_sizes if impl == "blockwise" else None
    return attnlab.attention(**arrays, **terms, impl=impl, block_sizes=sizes)


def arrays_of(shapes):
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return arrays | {"sinks": rng.normal(size=shapes["q"][2]), "scale": np.array(0.4)}


CALLS = {
    "head by head": (LONG, (512, 256), 4),
    "some heads at a time": (LONG, (128, 128), 4),
    "some examples at a time": (SHORT, (64, 64), 2),
}


@pytest.mark.parametrize("name", [name if name == "head by head" else cases.slow(name) for name in CALLS])
def test_calls_in_parts_match_dense(float64, name):
    shapes, block_sizes, parts = CALLS[name]
    call = functools.partial(call_in_parts, block_sizes=block_sizes)
    assert f"length={parts}" in str(jax.make_jaxpr(lambda arrays: call(arrays, "blockwise"))(arrays_of(shapes)))
    actual, expected = (cases.results(arrays_of(shapes), call, impl, jnp.float64) for impl in ("blockwise", "dense"))
    cases.assert_near(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("shapes, block_sizes, parts", CALLS.values(), ids=CALLS)
def test_calls_in_parts_have_the_same_bits_under_vmap(shapes, block_sizes, parts):
    arrays = jax.tree.map(np.float32, arrays_of(shapes))

    def run(arrays):
        return call_in_parts(arrays, "blockwise", block_sizes)[0]

    mapped = np.asarray(jax.jit(jax.vmap(run))(jax.tree.map(lambda x: np.stack([x, 2 * x]), arrays)))
    alone = jax.jit(run)
    np.testing.assert_array_equal(mapped[0], alone(arrays))
    np.testing.assert_array_equal(mapped[1], alone(jax.tree.map(lambda x: 2 * x, arrays)))


def test_vmap_of_short_calls_batches_as_many_as_caches_hold():
    q, k, v = np.random.default_rng(0).standard_normal((3, 3, 256, 7, 8), np.float32)

    def grad(q, k, v):
        return jax.grad(lambda q: attend(q, k, v, Causal()).sum())(q)

    run, alone = jax.jit(jax.vmap(grad, in_axes=(0, None, 0))), jax.jit(grad)
    assert "length=1" in str(jax.make_jaxpr(run)(q, k[0], v))  # one step of two examples, then the third
    gradients = np.asarray(run(q, k[0], v))
    for example in range(3):
        # Sums of at most 256 terms, in parts of other sizes.
        np.testing.assert_allclose(gradients[example], alone(q[example], k[0], v[example]), atol=256 * 2.0**-24)


@pytest.mark.slow
def test_long_bfloat16_sequences_sum_scale_gradient_over_heads():
    q, k, v = (arrays_of(LONG)[name].astype(jnp.bfloat16) for name in "qkv")

    @functools.partial(jax.jit, static_argnums=1)
    def slope(scale, block_sizes):  # only bfloat16 queries leave the scale to the tiles
        return jax.grad(lambda scale: attend(q, k, v, scale=scale, block_sizes=block_sizes).sum())(scale)

    # Both round weights and their gradients to 8 bits, a relative error of 2⁻⁹ each.
    np.testing.assert_allclose(slope(0.4, (512, 512)), slope(0.4, (64, 64)), rtol=2**-6)


def test_long_bfloat16_sequences_are_moved_as_integers():
    arrays = {name: x.astype(jnp.bfloat16) for name, x in arrays_of(LONG).items()}
    program = str(
        jax.make_jaxpr(jax.grad(lambda arrays: call_in_parts(arrays, "blockwise")[0].astype(float).sum()))(arrays)
    )
    assert re.search(r":u16\[[\d,]+\] = dynamic_slice", program)
    assert re.search(r":u16\[[\d,]+\] = dynamic_update_slice", program)
    assert not re.search(r":bf16\[[\d,]+\] = dynamic_(update_)?slice", program)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 256, 8, 64), (2, 2048, 8, 64)], ids=["written out", "head by head"])
def test_xla_still_is_no_faster_for_whole_calls_than_for_parts(shape, monkeypatch):
    """Compiled programs do not show whether parts help, so this compares processor times. Their medians over
    alternating calls vary by a tenth between runs, so if whole calls took a third less, XLA would have improved."""
    x = np.random.default_rng(0).standard_normal(shape, np.float32)

    def compiled():
        gradient = jax.grad(lambda q, k, v: (attend(q, k, v, Causal()) ** 2).sum(), argnums=(0, 1, 2))
        return optimized(gradient).lower(x, x, x).compile()

    def seconds(run):
        before = time.process_time()
        jax.block_until_ready(run(x, x, x))
        return time.process_time() - before

    in_parts = compiled()
    monkeypatch.setattr(plans, "choose", lambda call, scheduled: (*scheduled(costs=CPU), None, None))
    at_once = compiled()
    assert at_once.as_text() != in_parts.as_text()
    ratios = [seconds(at_once) / seconds(in_parts) for _ in range(10)]
    assert statistics.median(ratios[1:]) > 2 / 3, "ops/cpu/plans.py and parts.py are not needed any more"
