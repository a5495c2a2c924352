"""Checkpoints come back bit for bit, the newest and the best stay, and params can be read alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.errors import UserError
from attnlab.training import parallel
from attnlab.training.checkpoints import Checkpoints, sha256
from attnlab.training.state import TrainState


def state_at(step):
    params = {"kernel": jax.random.normal(jax.random.key(step), (4, 3)), "scale": jnp.full((2,), step, jnp.float32)}
    return TrainState(jnp.asarray(step, jnp.int32), params, (jax.tree.map(jnp.square, params), jnp.asarray(step)))


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_state_comes_back_bit_for_bit(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(state_at(7))
    checkpoints.close()
    again = Checkpoints(tmp_path / "checkpoints")
    equal(again.restore(7, state_at(0)), state_at(7))
    equal(again.restore_params(7, state_at(0).params), state_at(7).params)
    again.close()


def test_the_newest_and_the_best_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step, loss in enumerate([5.0, 1.0, None, 3.0, 2.0, 4.0]):
        checkpoints.save(state_at(step), loss)
    checkpoints.wait()
    assert checkpoints.steps() == [1, 4, 5] and checkpoints.best_step() == 1
    checkpoints.close()


def test_a_saved_state_may_be_donated_at_once(tmp_path):
    """The save is asynchronous: what the next steps do with the buffers must not reach the disk."""
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    count = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    now = {"w": jnp.zeros((1000, 1000))}
    for _ in range(10):
        now = count(now)
    checkpoints.save(TrainState(jnp.asarray(10, jnp.int32), now, (now,)))
    for _ in range(50):
        now = count(now)
    checkpoints.wait()
    like = TrainState(jnp.asarray(0, jnp.int32), now, (now,))
    assert (checkpoints.restore(10, like).params["w"] == 10).all()
    checkpoints.close()


@pytest.mark.parametrize("devices", [1, 2])
def test_a_state_of_four_devices_comes_back_on_fewer(tmp_path, devices):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(parallel.make("mesh").place_state(state_at(7)))
    checkpoints.wait()
    few = parallel.make("mesh", devices)
    restored = checkpoints.restore(7, few.place_state(state_at(0)))
    equal(restored, state_at(7))
    assert {leaf.sharding for leaf in jax.tree.leaves(restored)} == {few.replicated}
    checkpoints.close()


def test_a_folder_that_is_not_there_holds_no_steps_and_is_not_made(tmp_path):
    assert Checkpoints(tmp_path / "none").steps() == [] and not (tmp_path / "none").exists()


def test_a_checkpoint_of_another_shape_is_one_line(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(state_at(7))
    checkpoints.wait()
    other = jax.tree.map(lambda x: jnp.zeros((*x.shape, 2)), state_at(0))
    with pytest.raises(UserError, match=r"checkpoint .*7 cannot be read"):
        checkpoints.restore(7, other._replace(step=state_at(0).step))
    checkpoints.close()


def test_the_digest_of_parameters_depends_on_every_bit_and_on_names():
    params = state_at(1).params
    flipped = params | {"scale": params["scale"].at[1].add(2**-22)}
    renamed = {"z" + name: leaf for name, leaf in params.items()}
    assert sha256(params) == sha256(dict(reversed(params.items()))) == sha256(jax.device_get(params))
    assert sha256(params) != sha256(flipped)
    assert sha256(params) == sha256(renamed)  # the same bytes in the same order
