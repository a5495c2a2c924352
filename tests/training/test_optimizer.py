"""Schedules for any number of steps and extensions, optimizers by name, weight decay, clipping, and the average."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.config import default
from attnlab.errors import UserError
from attnlab.nn import GPT, stack_layers, unstack_layers
from attnlab.training import optimizer as optimizers

NAMES = ("adamw", "muon", "lion", "sgd")


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("steps", [1, 2, 3, 50, 199, 200, 2000])
def test_schedule_warms_up_and_decays_for_any_steps(steps, schedule):
    config = default().optimizer
    config.final_fraction, config.schedule = 0.1, schedule
    rates = np.asarray(jax.jit(optimizers.learning_rate(config, steps))(jnp.arange(steps + 1)))
    peak = rates.argmax()
    assert (rates > 0).all() and rates.max() <= config.learning_rate * (1 + 1e-6)
    np.testing.assert_allclose(rates.max(), config.learning_rate, rtol=1e-6)
    np.testing.assert_allclose(rates[steps], config.learning_rate / 10, rtol=1e-5)
    assert peak == min(config.warmup_steps, steps // 2)
    assert (np.diff(rates[: peak + 1]) > 0).all() and (np.diff(rates[peak:]) < 0).all()


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 201, 2000])
@pytest.mark.parametrize("fraction", [0.0, 0.2, 1.0])
def test_constant_schedule_ends_in_a_line_over_its_last_fraction(steps, fraction):
    config = default().optimizer
    config.final_fraction, config.schedule, config.decay_fraction = 0.1, "constant", fraction
    rates = np.asarray(jax.jit(optimizers.learning_rate(config, steps))(jnp.arange(steps + 1)))
    warmup = min(config.warmup_steps, steps // 2)
    end = max(warmup, steps - round(fraction * steps))
    peak = config.learning_rate
    np.testing.assert_allclose(rates[: warmup + 1], np.linspace(peak / (warmup + 1), peak, warmup + 1), rtol=1e-5)
    np.testing.assert_allclose(rates[warmup:end], peak, rtol=1e-6)
    if end < steps:
        np.testing.assert_allclose(rates[end:], np.linspace(peak, peak / 10, steps - end + 1), rtol=1e-5)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedule_of_extended_run_switches_at_each_extension(schedule):
    config, counts = default().optimizer, jnp.arange(90)
    config.schedule = schedule
    extensions = [{"at_step": 20, "from_steps": 40, "to_steps": 60}, {"at_step": 60, "from_steps": 60, "to_steps": 80}]
    rate = jax.jit(optimizers.learning_rate(config, 80, extensions))(counts)
    parts = {steps: jax.jit(optimizers.learning_rate(config, steps))(counts) for steps in (40, 60, 80)}
    np.testing.assert_array_equal(rate, np.r_[parts[40][:20], parts[60][20:60], parts[80][60:]])


@functools.cache
def model_params():
    model = GPT(vocab_size=7, num_layers=2, num_heads=2, width=8, context=4, qk_norm=True)
    return jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]


@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_applies_to_kernels_and_embeddings_only(name):
    params, config = model_params(), default().optimizer
    config.weight_decay, config.name = 0.5, name
    optimizer = optimizers.make(config, 100)
    zero = jax.tree.map(jnp.zeros_like, params)
    ones = jax.tree.map(jnp.ones_like, params)
    updates, _ = jax.jit(optimizer.update)(zero, optimizer.init(params), ones)
    leaves = jax.tree_util.tree_leaves_with_path(updates)
    moved = {jax.tree_util.keystr(path): bool((x != 0).all()) for path, x in leaves}
    assert all(decays == ("kernel" in path or "embedding" in path) for path, decays in moved.items())
    assert {True, False} == set(moved.values())


@pytest.mark.parametrize("name", NAMES)
def test_stacked_layers_get_the_same_updates(name):
    config = default().optimizer
    config.name = name
    optimizer = optimizers.make(config, 100)

    @jax.jit
    def two_updates(params):
        def gradient(seed):
            keys = jax.random.split(jax.random.key(seed), 2)
            one = jax.tree.map(lambda x: jax.random.normal(keys[0], x.shape), unstack_layers(params))
            return stack_layers(one) if "blocks" in params else one

        _, state = optimizer.update(gradient(0), optimizer.init(params), params)
        return optimizer.update(gradient(1), state, params)[0]

    found, expected = two_updates(stack_layers(model_params())), two_updates(model_params())
    # Rounding in another order; the five iterations of Muon amplify it by at most 3.4445 each, 500 in all.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=500 * 6e-8 * config.muon_learning_rate),
        unstack_layers(found),
        expected,
    )


def orthogonalized(matrix):
    """Five quintic Newton–Schulz iterations (Jordan et al. 2024)."""
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def test_muon_moves_each_projection_by_its_orthogonalized_gradient(float64):
    """The matrices of all heads together: [width, heads · head_dim] of queries, [heads · head_dim, width] of `out`."""
    params = jax.tree.map(lambda x: x.astype(jnp.float64), model_params())
    rng, config = np.random.default_rng(0), default().optimizer
    config.name, config.weight_decay, config.muon_learning_rate = "muon", 0.5, 0.1
    gradient = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)
    optimizer = optimizers.make(config, 100)
    updates, _ = jax.jit(optimizer.update)(gradient, optimizer.init(params), params)
    rate = 0.1 / 51  # at the first of 50 updates of the warm-up
    for layer, kernel, shape in (
        ("attention", "query", (8, 8)),
        ("attention", "value", (8, 8)),
        ("attention", "out", (8, 8)),
        ("mlp", "up", (8, 32)),
        ("mlp", "down", (32, 8)),
    ):
        g, w, found = (np.asarray(tree["block_1"][layer][kernel]["kernel"]) for tree in (gradient, params, updates))
        moved = max(1, shape[1] / shape[0]) ** 0.5 * orthogonalized(g.reshape(shape)) + 0.5 * w.reshape(shape)
        # Optax adds 1e-8 to the norm, which is between 1 and 100.
        np.testing.assert_allclose(found.reshape(shape), -rate * moved, rtol=1e-5, atol=1e-9)


def test_muon_leaves_embeddings_norms_and_biases_to_adamw():
    params, updates = model_params(), {}
    for name in ("muon", "adamw"):
        config = default().optimizer
        config.name = name
        optimizer = optimizers.make(config, 100)
        updates[name], _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), updates["muon"], updates["adamw"])
    kernels = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "kernel", same)
    assert jax.tree.all(jax.tree.map(lambda equal, kernel: equal != kernel, same, kernels))


def test_muon_without_a_matrix_it_knows_is_one_line():
    config = default().optimizer
    config.name = "muon"
    with pytest.raises(UserError, match="'muon': no parameter of the model has the name of a matrix of a GPT"):
        optimizers.make(config, 100).init({"Dense_0": {"kernel": jnp.zeros((2, 3))}})


def test_half_life_in_tokens_halves_a_gradients_weight_whatever_the_batch():
    config = default().optimizer
    assert optimizers.decay_rate(config, 768) == config.b2
    config.b2_halflife = 30_720.0
    for tokens in (768, 1536, 30_720):
        np.testing.assert_allclose(optimizers.decay_rate(config, tokens) ** (30_720 / tokens), 0.5, rtol=1e-12)
    with pytest.raises(ValueError, match=r"b2_halflife = 30720.0 tokens needs tokens_per_update"):
        optimizers.make(config, 100)


@pytest.mark.parametrize("decay", [0.5, 0.99, 0.99999])
def test_average_weighs_the_parameters_of_every_update(decay):
    values = np.random.default_rng(0).normal(size=30).astype(np.float32)
    average = jnp.float32(123.0)  # from before the first update: without weight
    for n, value in enumerate(values, 1):
        average = optimizers.averaged(average, jnp.float32(value), jnp.int32(n), decay)
    weights = decay ** np.arange(29, -1, -1.0)
    np.testing.assert_allclose(average, weights @ values / weights.sum(), rtol=1e-5, atol=1e-5)


def test_gradient_is_clipped_by_its_global_norm():
    config = default().optimizer
    optimizer = optimizers.make(config, 100)
    params = {"a": {"kernel": jnp.zeros(3)}, "b": {"kernel": jnp.zeros(4)}}
    small = jax.tree.map(lambda x: x + 1.0, params)
    large = jax.tree.map(lambda x: x + 1e6, params)
    first, second = (optimizer.update(g, optimizer.init(params), params)[1] for g in (small, large))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), first, second)
