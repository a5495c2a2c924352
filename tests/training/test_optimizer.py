"""Schedules for any number of steps and extensions, optimizers by name, weight decay, clipping and averaging."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.config import Optimizer
from attnlab.nn import GPT, stack_layers, unstack_layers
from attnlab.nn.matrices import matrices_of
from attnlab.support.errors import UserError
from attnlab.training import optimizer as optimizers
from tests.parameters import parameters

NAMES = ("adamw", "muon", "lion", "sgd")


def rates(*runs):
    """The learning rates at 0 … steps of each (config, steps), computed by one program."""
    schedules = [(optimizers.learning_rate(config, steps), steps) for config, steps in runs]
    return map(np.asarray, jax.jit(lambda: [rate(jnp.arange(steps + 1)) for rate, steps in schedules])())


def reference_rates(config, steps):
    """The learning rates at 0 … steps, in NumPy's float64."""
    at, last = np.arange(steps + 1), config.final_fraction
    warmup = min(config.warmup_steps, steps // 2)
    left = steps - warmup
    if config.schedule == "constant":
        left = min(round(config.decay_fraction * steps), left)
    done = np.clip((at - (steps - left)) / max(left, 1), 0, left > 0)
    done = (1 - np.cos(np.pi * done)) / 2 if config.schedule == "cosine" else done
    rise = np.minimum((at + 1) / (warmup + 1), 1)
    return config.learning_rate * rise * (1 - (1 - last) * done)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedule_equals_its_formula_at_every_step(schedule):
    """Covers the first step to the last, even without warm-up or decay, and runs shorter than both."""
    rng, runs = np.random.default_rng(0), []
    for steps in (1, 2, 3, 4, 50, 201, 2000):
        for warmup in {0, 1, int(rng.integers(2, 50)), 100}:
            for share in (0.0, 1.0, rng.random()) if schedule == "constant" else (0.2,):
                fields = {"warmup_steps": warmup, "decay_fraction": share}
                last = rng.choice([0.0, 0.1, 1.0])
                runs.append((Optimizer(schedule=schedule, final_fraction=last, **fields), steps))
    for (config, steps), actual in zip(runs, rates(*runs), strict=True):
        expected = reference_rates(config, steps)
        # Float32 roundings of count / steps, for counts up to 2000, and of the rate.
        atol = 1e-6 * config.learning_rate
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=atol, err_msg=f"{config, steps}")


def test_schedule_of_extended_run_switches_at_each_extension():
    extensions = [{"at_step": 20, "from_steps": 40, "to_steps": 60}, {"at_step": 60, "from_steps": 60, "to_steps": 80}]

    configs = [Optimizer(schedule=schedule) for schedule in ("cosine", "linear", "constant")]
    runs = ((80, extensions), (40,), (60,), (80,))
    schedules = [optimizers.learning_rate(config, *run) for config in configs for run in runs]
    values = jax.jit(lambda counts: [rate(counts) for rate in schedules])(np.arange(90))
    for rate, rate_40, rate_60, rate_80 in np.reshape(values, (3, 4, 90)):
        # The same operations, which XLA may fuse differently: a few float32 roundings of the peak apart.
        expected = np.r_[rate_40[:20], rate_60[20:60], rate_80[60:]]
        np.testing.assert_allclose(rate, expected, rtol=0, atol=4 * 2**-23 * Optimizer().learning_rate)


MODEL = GPT.of(vocab_size=7, num_layers=2, num_heads=2, width=8, context=4, layers="attention mamba2")
TOKENS = np.zeros((1, 4), np.int32)


@functools.cache
def params_and_gradients():
    trees = [parameters(MODEL, TOKENS, seed=seed)["params"] for seed in range(3)]
    params, *gradients = jax.tree.map(np.float64, trees)
    return params, gradients


OF_ALL = {"weight_decay": 0.5, "muon_learning_rate": 0.1}


def two_updates(params, gradients):
    """Two updates of the same parameters by every optimizer, as `{name: [first, second]}`."""
    return jax.device_get(_two_updates(params, gradients))


@jax.jit
def _two_updates(params, gradients):
    updates = {}
    for name in NAMES:
        optimizer = optimizers.make(Optimizer(name=name, **OF_ALL), 100, matrices=matrices_of(MODEL, TOKENS))
        state, updates[name] = optimizer.init(params), []
        for gradient in gradients:
            update, state = optimizer.update(gradient, state, params)
            updates[name].append(update)
    return updates


def flat(tree):
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def test_weight_decay_applies_to_kernels_and_embeddings_only(float64):
    params, gradients = params_and_gradients()
    ones, zeros = jax.tree.map(np.ones_like, params), jax.tree.map(np.zeros_like, gradients)
    for name, (first, _) in two_updates(ones, zeros).items():
        moved = {path: bool((x != 0).all()) for path, x in flat(first).items()}
        assert all(decays == ("kernel" in path or "embedding" in path) for path, decays in moved.items()), name
        assert {True, False} == set(moved.values()), name


def test_stacked_layers_get_the_same_updates(float64):
    params, gradients = params_and_gradients()
    trees = jax.jit(lambda trees: list(map(stack_layers, trees)))([params, *gradients])
    stacked = two_updates(trees[0], trees[1:])
    assert "blocks_1" in stacked["muon"][0]
    for name, expected in two_updates(params, gradients).items():
        # Rounding in another order; the five iterations of Muon amplify it by at most 3.4445 each, 500 in all.
        atol = 500 * 1.2e-16 * OF_ALL["muon_learning_rate"]
        for stacked_update, update in zip(stacked[name], expected):
            for path, leaf in flat(unstack_layers(stacked_update)).items():
                np.testing.assert_allclose(leaf, flat(update)[path], atol=atol, err_msg=name + path)


def clipped(gradients):
    """The gradients clipped to `clip_norm`, and their norms before clipping."""
    norms = [np.sqrt(sum((x**2).sum() for x in jax.tree.leaves(gradient))) for gradient in gradients]
    shares = [max(1, norm / Optimizer().clip_norm) for norm in norms]
    return [jax.tree.map(lambda x, n=n: x / n, gradient) for gradient, n in zip(gradients, shares)], norms


@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_updates_follow_each_optimizers_paper_after_clipping(float64, scale):
    """Gradients are longer than `clip_norm` in one case, and shorter in the other."""
    params, gradients = params_and_gradients()
    gradients = jax.tree.map(lambda x: scale * x, gradients)
    updates, config = two_updates(params, gradients), Optimizer(**OF_ALL)
    gradients, norms = clipped(gradients)
    assert all((norm > config.clip_norm) == (scale == 1) for norm in norms)
    first, second = (gradient["block_1"]["mlp"]["up"]["kernel"] for gradient in gradients)
    b1, b2 = config.b1, config.b2
    directions = {
        "adamw": [
            first / (np.abs(first) + 1e-8),
            (b1 * first + second) / (1 + b1) / (np.sqrt((b2 * first**2 + second**2) / (1 + b2)) + 1e-8),
        ],
        "lion": [np.sign(first), np.sign(b1 * (1 - b2) * first + (1 - b1) * second)],
        "sgd": [first, b1 * first + second],
    }
    decay = config.weight_decay * params["block_1"]["mlp"]["up"]["kernel"]
    for name, expected in directions.items():
        for n, direction in enumerate(expected, 1):
            update = updates[name][n - 1]["block_1"]["mlp"]["up"]["kernel"]
            rate = config.learning_rate * n / 51  # in the nth of 50 warm-up updates
            np.testing.assert_allclose(update, -rate * (direction + decay), rtol=1e-5, err_msg=name)  # float32 rates


def orthogonalized(matrix):
    """Five quintic Newton–Schulz iterations (Jordan et al. 2024)."""
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def test_muon_updates_each_projection_by_its_orthogonalized_gradient(float64):
    """All heads form one matrix: [width, heads · head_dim] for queries, [heads · head_dim, width] for `out`."""
    params, gradients = params_and_gradients()
    (first, second), norms = clipped(gradients)
    assert min(norms) > Optimizer().clip_norm
    b = Optimizer().muon_momentum
    # Nesterov's momentum, each sum divided by its total weight (Dozat 2016).
    ahead = jax.tree.map(lambda x, y: b * (b * x + y) / (1 - b**3) + y / (1 - b**2), first, second)
    for n, (direction, updates) in enumerate(zip((first, ahead), two_updates(params, gradients)["muon"]), 1):
        rate = 0.1 * n / 51  # in the nth of 50 warm-up updates
        for layer, kernel, shape in (
            ("attention", "query", (8, 8)),
            ("attention", "value", (8, 8)),
            ("attention", "out", (8, 8)),
            ("mlp", "up", (8, 32)),
            ("mlp", "down", (32, 8)),
        ):
            g, w, update = (
                np.asarray(tree["block_0"][layer][kernel]["kernel"]).reshape(shape)
                for tree in (direction, params, updates)
            )
            moved = max(1, shape[1] / shape[0]) ** 0.5 * orthogonalized(g) + 0.5 * w
            # Optax adds 1e-8 to the norm of the clipped gradient, which is between 0.1 and 1.
            np.testing.assert_allclose(update, -rate * moved, rtol=1e-5, atol=1e-9)
        g, w, update = (tree["block_1"]["attention"]["in"]["kernel"] for tree in (direction, params, updates))
        # Gate and values of 16 features, a key and a query of 4, and time steps of two heads: one matrix each.
        for part in np.split(np.arange(42), [16, 32, 36, 40]):
            moved = max(1, len(part) / 8) ** 0.5 * orthogonalized(g[:, part]) + 0.5 * w[:, part]
            np.testing.assert_allclose(update[:, part], -rate * moved, rtol=1e-5, atol=1e-9)


def test_muon_leaves_parameters_that_are_no_matrices_to_adamw(float64):
    updates = two_updates(*params_and_gradients())
    for muon, adamw in zip(updates["muon"], updates["adamw"]):
        for path, update in flat(muon).items():
            is_left = "kernel" not in path or "conv" in path
            assert np.allclose(update, flat(adamw)[path], rtol=1e-12, atol=0) == is_left, path


@pytest.mark.parametrize("matrices", [None, {}])
def test_muon_without_matrices_raises_one_line(matrices):
    with pytest.raises(UserError, match="'muon' needs the model's matrices, but no"):
        optimizers.make(Optimizer(name="muon"), 100, matrices=matrices)


def test_half_life_in_tokens_is_independent_of_batch_size():
    assert optimizers.decay_rate(Optimizer(), 768) == Optimizer().b2
    config = Optimizer(b2_halflife=30_720.0)
    for tokens in (768, 1536, 30_720):
        np.testing.assert_allclose(optimizers.decay_rate(config, tokens) ** (30_720 / tokens), 0.5, rtol=1e-12)
    with pytest.raises(ValueError, match=r"b2_halflife = 30720.0 tokens .*tokens_per_update"):
        optimizers.make(config, 100)


def test_average_weighs_the_parameters_of_every_update():
    decays, values = (0.5, 0.99, 0.99999), np.random.default_rng(0).normal(size=30).astype(np.float32)

    @jax.jit
    def averages(values):
        def update(average, now):
            return [optimizers.averaged(x, *now, decay) for x, decay in zip(average, decays)], None

        before = [jnp.float32(123.0)] * 3  # has no weight
        return jax.lax.scan(update, before, (values, jnp.arange(1, 31)))[0]

    for decay, average in zip(decays, averages(values)):
        weights = decay ** np.arange(29, -1, -1.0)
        np.testing.assert_allclose(average, weights @ values / weights.sum(), rtol=1e-5, atol=1e-5)
