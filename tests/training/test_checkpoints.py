"""Checkpoints restore bit for bit, faults in their files are detected, and failed saves end cleanly."""

import contextlib
import errno
import json
import os
import shutil
import sys
import threading
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.nn import stack_layers, unstack_layers
from attnlab.support.errors import UserError
from attnlab.training import parallel
from attnlab.training.checkpoints import Checkpoints, history_steps, sha256
from attnlab.training.state import TrainState


def state_of(step, params):
    """A train state with these NumPy parameters, on a device."""
    return jax.device_put(TrainState(np.int32(step), params, (jax.tree.map(np.square, params), np.int32(step))))


def state_at(step):
    return state_of(step, {"kernel": normal(step), "scale": np.full(2, step, np.float32)})


def normal(seed):
    return np.random.default_rng(seed).standard_normal((4, 3), np.float32)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture
def checkpoints(tmp_path):
    """Checkpoints in a new nested folder, of which the newest two are kept."""
    with contextlib.closing(Checkpoints(tmp_path / "new" / "checkpoints", keep=2)) as store:
        yield store


def test_save_then_restore_is_bit_exact(checkpoints):
    checkpoints.prepare()
    checkpoints.save(state_at(7))
    checkpoints.close()
    with contextlib.closing(Checkpoints(str(checkpoints.directory))) as again:
        equal(again.restore(7, state_at(0)), state_at(7))
        equal(again.restore_params(7, state_at(0).params), state_at(7).params)


def test_pruning_keeps_newest_and_best(checkpoints):
    checkpoints.best = lambda steps: 1 if 1 in steps else None
    for step in range(6):
        checkpoints.save(state_at(step))
    checkpoints.wait()
    assert checkpoints.steps() == [1, 4, 5]


def test_permanent_checkpoints_outlive_pruning_by_later_processes(tmp_path):
    for first in (0, 4):
        checkpoints = Checkpoints(tmp_path / "checkpoints")
        for step in range(first, first + 4):
            checkpoints.save(state_at(step), permanent=step in (0, 2))
        checkpoints.wait()
        checkpoints.close()
    assert checkpoints.steps() == [0, 2, 7]
    assert not any(checkpoints.damage(step) for step in (0, 2, 7))
    equal(checkpoints.restore(2, state_at(0)), state_at(2))


@pytest.mark.parametrize("steps", [1, 2, 40])
def test_history_has_the_requested_steps_from_first_to_last(steps):
    for count in range(2, steps + 2):
        history = history_steps(steps, count)
        assert len(set(history)) == len(history) == count and history == sorted(history)
        assert history[0] == 0 and history[-1] == steps
    assert history_steps(steps, 0) == [] and history_steps(steps, 1) == [steps]


def test_history_is_spaced_logarithmically():
    log_steps = np.log(history_steps(10**6, 20)[6:])  # before that, rounded to integers
    assert np.ptp(np.diff(log_steps)) < 0.1


def test_save_allows_immediate_donation_of_the_state(checkpoints):
    """The save is asynchronous: later writes to the buffers must not reach the disk."""
    count = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    now = jax.device_put({"w": np.zeros((1000, 1000), np.float32)})
    for _ in range(10):
        now = count(now)
    checkpoints.save(TrainState(jax.device_put(np.int32(10)), now, (now,)))
    for _ in range(50):
        now = count(now)
    checkpoints.wait()
    like = TrainState(jax.device_put(np.int32(0)), now, (now,))
    assert (np.asarray(checkpoints.restore(10, like).params["w"]) == 10).all()


def test_restore_on_fewer_devices_is_bit_exact(checkpoints):
    checkpoints.save(parallel.make("mesh").create_state(lambda: state_at(7)))
    checkpoints.wait()
    few = parallel.make("mesh", 2)
    restored = checkpoints.restore(7, few.create_state(lambda: state_at(0)))
    equal(restored, state_at(7))
    assert {leaf.sharding for leaf in jax.tree.leaves(restored)} == {few.replicated}


@pytest.mark.parametrize("convert, back", [(stack_layers, unstack_layers), (unstack_layers, stack_layers)])
def test_layers_saved_stacked_restore_unstacked_and_vice_versa(checkpoints, convert, back):
    layers = {f"block_{n}": {"kernel": normal(n)} for n in range(11)} | {"norm": np.ones(3, np.float32)}
    saved, wanted = (jax.jit(to)(state_of(7, layers)._asdict()) for to in (back, convert))
    saved, wanted = TrainState(**saved), TrainState(**wanted)
    checkpoints.save(saved)
    checkpoints.wait()
    like = parallel.make("mesh", 1, 4).create_state(lambda: jax.tree.map(jnp.zeros_like, wanted))
    restored = checkpoints.restore(7, like)
    equal(restored, wanted)
    assert [x.sharding for x in jax.tree.leaves(restored)] == [x.sharding for x in jax.tree.leaves(like)]
    equal(checkpoints.restore_params(7, wanted.params), wanted.params)


def test_user_parameters_named_like_layers_restore_unchanged(checkpoints):
    params = {"blocks": {"block_0": normal(0), "gain": np.float32(1)}, "block_0": {"w": np.zeros(3, np.float32)}}
    state = state_of(7, params)
    checkpoints.save(state)
    checkpoints.wait()
    equal(checkpoints.restore(7, state).params, params)


@pytest.fixture
def saved(checkpoints):
    """Checkpoints of steps 3 and 7."""
    for step in (3, 7):
        checkpoints.save(state_at(step), log={"bytes": step})
    checkpoints.wait()
    return checkpoints


def files(checkpoints, step):
    """The files of a checkpoint, except the two that Orbax writes after the manifest."""
    folder = Path(checkpoints.directory) / str(step)
    late = (folder / "_CHECKPOINT_METADATA", folder / "commit_success.txt")
    return sorted(path for path in folder.rglob("*") if path.is_file() and path not in late)


def test_damage_finds_every_flipped_bit(saved):
    """Orbax alone would load most damaged files without an error."""
    draw = np.random.default_rng(0)
    assert saved.damage(7) == "" and len(files(saved, 7)) > 10
    for path in files(saved, 7):
        intact = path.read_bytes()
        if not intact:
            continue
        for _ in range(3):
            flipped = bytearray(intact)
            flipped[draw.integers(len(intact))] ^= 1 << draw.integers(8)
            path.write_bytes(flipped)
            assert saved.damage(7) or (path.name == "manifest.json" and json.loads(flipped) == json.loads(intact))
        path.write_bytes(intact)
    assert saved.damage(7) == ""


def test_damage_finds_missing_and_truncated_files(saved):
    for path in files(saved, 7):
        intact = path.read_bytes()
        path.unlink()
        assert "is missing" in saved.damage(7)
        path.write_bytes(intact[: len(intact) // 2])
        assert saved.damage(7) or not intact
        path.write_bytes(intact)


def test_set_aside_keeps_damaged_checkpoints(saved):
    for _ in range(2):  # the second replaces the first
        (Path(saved.directory) / "7" / "manifest.json").write_text("[]")
        assert saved.newest_intact() == (3, {7: "manifest.json is not a valid manifest"})
        assert saved.set_aside(7) == "7.damaged" and saved.steps() == [3]
        shutil.copytree(Path(saved.directory) / "3", Path(saved.directory) / "7")
    assert saved.newest_intact() == (3, {7: "it belongs to step 3"})


def test_newest_intact_with_all_damaged_is_an_error(saved):
    for step in (3, 7):
        (Path(saved.directory) / str(step) / "manifest.json").unlink()
    before = {path: path.read_bytes() for path in Path(saved.directory).rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"every checkpoint .*7: manifest.json is missing"):
        saved.newest_intact()
    assert before == {path: path.read_bytes() for path in Path(saved.directory).rglob("*") if path.is_file()}


def test_prepare_removes_incomplete_checkpoints_and_keeps_the_others(saved):
    left = Path(saved.directory) / "9.orbax-checkpoint-tmp"
    left.mkdir()
    (left / "part").write_text("of it")
    assert saved.steps() == [3, 7]
    assert [saved.metadata(step) for step in (3, 7)] == [{"log": {"bytes": 3}}, {"log": {"bytes": 7}}]
    saved.prepare()
    assert not left.exists() and saved.newest_intact() == (7, {})


def test_save_after_restore_of_the_same_step_writes_nothing(saved):
    """A kill during that write would lose the checkpoint."""
    with contextlib.closing(Checkpoints(str(saved.directory), keep=2)) as later:
        before = {path: path.stat().st_mtime_ns for path in files(saved, 7)}
        later.save(later.restore(7, state_at(0)), log=None)
        later.wait()
        assert {path: path.stat().st_mtime_ns for path in files(later, 7)} == before


def test_save_on_a_full_disk_keeps_older_checkpoints(saved, monkeypatch):
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(Checkpoints, "_add_manifest", full)
    saved.save(state_at(9))
    with pytest.raises(UserError, match=r"No space left on device\); .* 7"):
        saved.wait()
    assert saved.newest_intact() == (7, {})
    saved.close()  # does not raise the error again


@pytest.mark.parametrize("folder", ["9", "opt_state"])
def test_save_that_cannot_create_a_folder_leaves_no_threads(saved, monkeypatch, folder):
    """This happens when no inodes are free: Orbax's threads would wait for the folder and keep the process alive."""
    mkdir = os.mkdir

    def full(path, *args, **kwargs):
        if Path(path).name == f"{folder}.orbax-checkpoint-tmp":
            raise OSError(errno.ENOSPC, "No space left on device")
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", full)
    before = set(threading.enumerate())
    with pytest.raises(UserError, match=r"No space left on device\); .* 7"):
        saved.save(state_at(9))
    saved.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=20)
        assert not thread.is_alive(), thread
    assert saved.newest_intact() == (7, {})


def test_restore_with_another_shape_is_an_error(saved):
    other = jax.device_put(jax.tree.map(lambda x: np.zeros((*x.shape, 2), x.dtype), state_at(0)))
    with pytest.raises(UserError, match=r"checkpoint .*7 cannot be read"):
        saved.restore(7, other._replace(step=state_at(0).step))


def test_sha256_depends_on_every_bit_and_the_order_of_paths():
    params = state_at(1).params
    flipped = params | {"scale": np.array([1, 1 + 2**-22], np.float32)}
    renamed = {"z" + name: leaf for name, leaf in params.items()}
    assert sha256(params) == sha256(dict(reversed(params.items()))) == sha256(jax.device_get(params))
    assert sha256(params) != sha256(flipped)
    assert sha256(params) == sha256(renamed)  # the same bytes in the same order


def test_storage_without_its_package_raises_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for url in ("gs://bucket/kept", "nowhere://bucket/kept"):
        with pytest.raises(UserError, match=f"checkpoint.dir = {url} cannot be reached") as error:
            Checkpoints(url)
        assert "\n" not in str(error.value)
