"""The schedule for any number of steps and extensions, weight decay, and clipping."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.config import default
from attnlab.nn import GPT
from attnlab.training import optimizer as optimizers


@pytest.mark.parametrize("steps", [1, 2, 3, 50, 199, 200, 2000])
def test_schedule_warms_up_and_decays_for_any_steps(steps):
    config = default().optimizer
    config.final_fraction = 0.1
    rates = np.asarray(jax.jit(optimizers.learning_rate(config, steps))(jnp.arange(steps + 1)))
    peak = rates.argmax()
    assert (rates > 0).all() and rates.max() <= config.learning_rate * (1 + 1e-6)
    np.testing.assert_allclose(rates.max(), config.learning_rate, rtol=1e-6)
    np.testing.assert_allclose(rates[steps], config.learning_rate / 10, rtol=1e-5)
    assert peak == min(config.warmup_steps, steps // 2)
    assert (np.diff(rates[: peak + 1]) > 0).all() and (np.diff(rates[peak:]) < 0).all()


def test_schedule_of_extended_run_switches_at_each_extension():
    config, counts = default().optimizer, jnp.arange(90)
    extensions = [{"at_step": 20, "from_steps": 40, "to_steps": 60}, {"at_step": 60, "from_steps": 60, "to_steps": 80}]
    rate = jax.jit(optimizers.learning_rate(config, 80, extensions))(counts)
    parts = {steps: jax.jit(optimizers.learning_rate(config, steps))(counts) for steps in (40, 60, 80)}
    np.testing.assert_array_equal(rate, np.r_[parts[40][:20], parts[60][20:60], parts[80][60:]])


def test_weight_decay_applies_to_kernels_and_embeddings_only():
    model = GPT(vocab_size=7, num_layers=1, num_heads=2, width=8, context=4, qk_norm=True)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    config = default().optimizer
    config.weight_decay = 0.5
    optimizer = optimizers.make(config, 100)
    zero = jax.tree.map(jnp.zeros_like, params)
    ones = jax.tree.map(jnp.ones_like, params)
    updates, _ = jax.jit(optimizer.update)(zero, optimizer.init(params), ones)
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    moved = {jax.tree_util.keystr(path): bool((x != 0).all()) for path, x in leaves}
    assert all(decays == ("kernel" in path or "embedding" in path) for path, decays in moved.items())
    assert {True, False} == set(moved.values())


def test_gradient_is_clipped_by_its_global_norm():
    config = default().optimizer
    optimizer = optimizers.make(config, 100)
    params = {"a": {"kernel": jnp.zeros(3)}, "b": {"kernel": jnp.zeros(4)}}
    small = jax.tree.map(lambda x: x + 1.0, params)
    large = jax.tree.map(lambda x: x + 1e6, params)
    first, second = (optimizer.update(g, optimizer.init(params), params)[1] for g in (small, large))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), first, second)
