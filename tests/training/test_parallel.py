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
LAYOUTS = {"one device": ("mesh", 1), "pmap": ("pmap", 4), "mesh": ("mesh", 4)}


class Experiment:
    """A small run on some devices, step by step."""

    def __init__(self, strategy, devices, *, dropout=0.0, accumulation=1, steps=50):
        config = configs.default()
        config.model.update(num_layers=2, width=32, context=16, dropout=dropout)
        self.steps = steps
        self.parallel = parallel.make(strategy, devices)
        self.batches = TrainBatches(TOKENS, context=16, batch_size=16, seed=0)
        self.model = state.make_model(config, vocab_size=31)
        self.optimizer = optimizers.make(config.optimizer, steps)
        self.accumulation = accumulation

    def gradient(self):
        """That of the first step."""

        def first(params, batch, axis_name=None):
            return state.gradients(self.model, params, batch, jax.random.key(7), self.accumulation, axis_name)[1]

        start = self.parallel.place_state(state.create(self.model, self.optimizer, seed=0))
        compiled = self.parallel.compile_eval(first)
        return jax.device_get(compiled(start.params, self.parallel.place_batch(self.batches[0])))

    def losses(self):
        """Of all steps."""
        step = functools.partial(state.train_step, self.model, self.optimizer, 0, self.accumulation)
        step, losses = self.parallel.compile_train(step), []
        now = self.parallel.place_state(state.create(self.model, self.optimizer, seed=0))
        for number in range(self.steps):
            now, metrics = step(now, self.parallel.place_batch(self.batches[number]))
            losses.append(metrics["loss"])
        return np.array(jax.device_get(losses))


def distance(a, b):
    """‖a − b‖ / ‖b‖ over whole trees."""

    def squares(tree):
        return sum(float((np.float64(leaf) ** 2).sum()) for leaf in jax.tree.leaves(tree))

    return (squares(jax.tree.map(lambda x, y: np.float64(x) - y, a, b)) / squares(b)) ** 0.5


@pytest.mark.parametrize("options", [{}, {"dropout": 0.2}, {"dropout": 0.2, "accumulation": 4}], ids=str)
def test_the_first_gradient_is_the_same_on_one_and_on_four_devices(options):
    reference = Experiment("mesh", 1, **options | {"accumulation": 1}).gradient()
    for layout in LAYOUTS.values():
        assert distance(Experiment(*layout, **options).gradient(), reference) < 1e-6


@pytest.mark.parametrize("options", [{}, {"dropout": 0.2}], ids=str)
def test_losses_stay_together_for_fifty_steps(options):
    one, pmap, mesh = (Experiment(*layout, **options).losses() for layout in LAYOUTS.values())
    np.testing.assert_allclose(pmap, one, rtol=1e-5)
    np.testing.assert_allclose(mesh, one, rtol=1e-5)
    assert one[-1] < one[0]


def test_dropout_changes_the_run():
    assert distance(Experiment("mesh", 1, dropout=0.2).gradient(), Experiment("mesh", 1).gradient()) > 0.1


def test_the_same_run_twice_has_the_same_bits():
    first, second = (Experiment("mesh", 4, dropout=0.2, steps=5).losses() for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_evaluation_sums_over_all_devices():
    for strategy, devices in LAYOUTS.values():
        on = parallel.make(strategy, devices)
        compiled = on.compile_eval(
            lambda params, batch, axis_name=None: (
                jax.lax.psum(batch.weight.sum(), axis_name) if axis_name else batch.weight.sum()
            )
        )
        batch = TrainBatches(TOKENS, context=16, batch_size=8, seed=0)[0]
        assert float(compiled(on.place_state({"w": jnp.ones(2)}), on.place_batch(batch))) == 8


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
