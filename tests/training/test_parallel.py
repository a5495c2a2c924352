"""One device, `pmap` over four and a mesh of four compute the same run, to rounding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import config as configs
from attnlab.data.batches import TrainBatches
from attnlab.errors import UserError
from attnlab.training import optimizer as optimizers
from attnlab.training import parallel, state

TOKENS = np.random.default_rng(0).integers(0, 31, 5000)
LAYOUTS = {
    "one device": ("mesh", 1),
    "pmap": ("pmap", 4),
    "mesh": ("mesh", 4),
    "fsdp": ("mesh", 1, 4),
    "both": ("mesh", 2, 2),
}


class Experiment:
    """A small run on some devices, step by step."""

    def __init__(self, strategy, devices, fsdp=1, *, dropout=0.0, accumulation=1, steps=50):
        config = configs.default()
        config.model.update(num_layers=2, width=32, context=16, dropout=dropout)
        self.steps = steps
        self.parallel = parallel.make(strategy, devices, fsdp)
        self.batches = TrainBatches(TOKENS, context=16, batch_size=16, seed=0)
        self.model = state.make_model(config, vocab_size=31)
        self.optimizer = optimizers.make(config.optimizer, steps)
        self.accumulation = accumulation

    def start(self):
        """The state before the first step, where it lies."""
        return self.parallel.create_state(functools.partial(state.create, self.model, self.optimizer, 0))

    def gradient(self):
        """That of the first step."""

        def first(params, batch, axis_name=None):
            return state.gradients(self.model, params, batch, jax.random.key(7), self.accumulation, axis_name)[1]

        start = self.start()
        compiled = self.parallel.compile_eval(first)
        return jax.device_get(compiled(start.params, self.parallel.place_batch(self.batches[0])))

    def losses(self):
        """Of all steps."""
        step = functools.partial(state.train_step, self.model, self.optimizer, 0, self.accumulation)
        now = self.start()
        step, losses = self.parallel.compile_train(step, now), []
        for number in range(self.steps):
            now, metrics = step(now, self.parallel.place_batch(self.batches[number]))
            losses.append(metrics["loss"])
        return np.array(jax.device_get(losses))


def distance(a, b):
    """‖a − b‖ / ‖b‖ over whole trees."""

    def squares(tree):
        return sum(float((np.float64(leaf) ** 2).sum()) for leaf in jax.tree.leaves(tree))

    return (squares(jax.tree.map(lambda x, y: np.float64(x) - y, a, b)) / squares(b)) ** 0.5


SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize("options", [SLOW({}), SLOW({"dropout": 0.2}), {"dropout": 0.2, "accumulation": 4}], ids=str)
def test_the_first_gradient_is_the_same_on_one_and_on_four_devices(options):
    reference = Experiment("mesh", 1, **options | {"accumulation": 1}).gradient()
    for layout in LAYOUTS.values():
        assert distance(Experiment(*layout, **options).gradient(), reference) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"dropout": 0.2}], ids=str)
def test_losses_stay_together_for_fifty_steps(options):
    one, *others = (Experiment(*layout, **options).losses() for layout in LAYOUTS.values())
    for other in others:
        np.testing.assert_allclose(other, one, rtol=1e-5)
    assert one[-1] < one[0]


def test_fsdp_splits_parameters_and_moments_by_rules_that_miss_no_kernel():
    now = Experiment("mesh", 1, 4).start()
    for path, leaf in jax.tree_util.tree_leaves_with_path(now):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        share = leaf.addressable_shards[0].data.size / leaf.size
        assert share == (0.25 if name.endswith(("kernel", "embedding")) else 1), name


def test_per_device_memory_falls_with_fsdp():
    """By XLA's own account: what a step takes in, the state and a share of the batch, and what it needs besides."""

    def memory(*layout):
        experiment = Experiment(*layout)
        now, batch = experiment.start(), experiment.parallel.place_batch(experiment.batches[0])
        step = functools.partial(state.train_step, experiment.model, experiment.optimizer, 0, 1)
        compiled = experiment.parallel.compile_train(step, now).lower(now, batch).compile()
        return compiled.memory_analysis().argument_size_in_bytes

    replicated, split = memory("mesh", 4, 1), memory("mesh", 1, 4)
    assert split < 0.3 * replicated


@pytest.mark.parametrize("strategy, fsdp", [("mesh", 3), ("mesh", 0), ("mesh", 8), ("pmap", 2)])
def test_an_fsdp_axis_that_cannot_be_is_refused(strategy, fsdp):
    with pytest.raises(UserError, match=f"config.parallel.mesh.fsdp = {fsdp}, but there are 4 devices: use a number"):
        parallel.make(strategy, -1, fsdp)


def test_a_width_that_fsdp_does_not_divide_is_refused():
    parallel.check_width(32, 4)
    with pytest.raises(UserError, match=r"model.width = 30 is not divisible by config.parallel.mesh.fsdp = 4"):
        parallel.check_width(30, 4)


def test_dropout_changes_the_run():
    assert distance(Experiment("mesh", 1, dropout=0.2).gradient(), Experiment("mesh", 1).gradient()) > 0.1


def test_the_same_run_twice_has_the_same_bits():
    first, second = (Experiment("mesh", 4, dropout=0.2, steps=5).losses() for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_evaluation_sums_over_all_devices():
    for layout in LAYOUTS.values():
        on = parallel.make(*layout)
        compiled = on.compile_eval(
            lambda params, batch, axis_name=None: (
                jax.lax.psum(batch.weight.sum(), axis_name) if axis_name else batch.weight.sum()
            )
        )
        batch = TrainBatches(TOKENS, context=16, batch_size=8, seed=0)[0]
        assert float(compiled(on.create_state(lambda: {"w": jnp.ones(2)}), on.place_batch(batch))) == 8


@pytest.mark.parametrize("strategy, devices", [("mesh", 5), ("mesh", 0), ("mesh", -2), ("pmap", 2)])
def test_devices_that_are_not_there_are_refused(strategy, devices):
    with pytest.raises(UserError, match=f"config.parallel.mesh.data = {devices}, but there are 4 devices: use −1"):
        parallel.make(strategy, devices)


def test_a_batch_that_does_not_fall_evenly_names_the_nearest_that_do():
    parallel.check_batch(24, devices=4, accumulation=2)
    with pytest.raises(UserError, match="batch_size = 30 is not divisible by devices × accumulation = 4 × 2 = 8"):
        parallel.check_batch(30, devices=4, accumulation=2)
    with pytest.raises(UserError, match="use 24 or 32"):
        parallel.check_batch(30, devices=4, accumulation=2)
