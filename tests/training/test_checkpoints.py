"""Checkpoints come back bit for bit, the newest and the best stay, and params can be read alone."""

import contextlib
import errno
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.errors import UserError
from attnlab.training import parallel
from attnlab.training.checkpoints import Checkpoints, WithManifest, sha256
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
    checkpoints.best = lambda steps: 1 if 1 in steps else None
    for step in range(6):
        checkpoints.save(state_at(step))
    checkpoints.wait()
    assert checkpoints.steps() == [1, 4, 5]
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
    checkpoints.save(parallel.make("mesh").create_state(lambda: state_at(7)))
    checkpoints.wait()
    few = parallel.make("mesh", devices)
    restored = checkpoints.restore(7, few.create_state(lambda: state_at(0)))
    equal(restored, state_at(7))
    assert {leaf.sharding for leaf in jax.tree.leaves(restored)} == {few.replicated}
    checkpoints.close()


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of steps 3 and 7."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    for step in (3, 7):
        checkpoints.save(state_at(step), log={"bytes": step})
    checkpoints.wait()
    yield checkpoints
    checkpoints.close()


def files(checkpoints, step):
    """All but what Orbax writes at the end, beside them: the time, and that it has come to it."""
    folder = Path(checkpoints.directory) / str(step)
    late = (folder / "_CHECKPOINT_METADATA", folder / "commit_success.txt")
    return sorted(path for path in folder.rglob("*") if path.is_file() and path not in late)


def test_every_flipped_bit_is_found(saved):
    """Orbax alone loads most of them without a word."""
    draw = np.random.default_rng(0)
    assert saved.damage(7) == "" and len(files(saved, 7)) > 10
    for path in files(saved, 7):
        whole = path.read_bytes()
        if not whole:
            continue
        for _ in range(3):
            flipped = bytearray(whole)
            flipped[draw.integers(len(whole))] ^= 1 << draw.integers(8)
            path.write_bytes(flipped)
            assert saved.damage(7) or (path.name == "manifest.json" and json.loads(flipped) == json.loads(whole))
        path.write_bytes(whole)
    assert saved.damage(7) == ""


def test_every_file_that_is_missing_or_cut_is_found(saved):
    for path in files(saved, 7):
        whole = path.read_bytes()
        path.unlink()
        assert "is missing" in saved.damage(7)
        path.write_bytes(whole[: len(whole) // 2])
        assert saved.damage(7) or not whole
        path.write_bytes(whole)


def test_a_checkpoint_under_another_name_is_found(saved):
    (Path(saved.directory) / "7").rename(Path(saved.directory) / "9")
    assert saved.damage(9) == "it is that of step 7"
    assert saved.newest_whole() == (3, {9: "it is that of step 7"})


def test_damaged_ones_are_set_aside_and_never_lost(saved):
    (Path(saved.directory) / "7" / "manifest.json").unlink()
    assert saved.newest_whole() == (3, {7: "manifest.json is missing"})
    assert saved.set_aside(7) == "7.damaged" and saved.steps() == [3]
    saved.save(state_at(7))
    saved.wait()
    (Path(saved.directory) / "7" / "manifest.json").write_text("[]")
    assert saved.newest_whole() == (3, {7: "its manifest.json is no manifest"})
    assert saved.set_aside(7) == "7.damaged-2"
    assert {path.name for path in saved.directory.iterdir()} == {"3", "7.damaged", "7.damaged-2"}


def test_where_all_are_damaged_nothing_is_touched(saved):
    for step in (3, 7):
        (Path(saved.directory) / str(step) / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"every checkpoint in .* is damaged \(of 7 manifest.json is missing\)"):
        saved.newest_whole()
    assert saved.steps() == [3, 7]


def test_what_was_not_finished_is_no_checkpoint_and_is_removed(saved):
    left = Path(saved.directory) / "9.orbax-checkpoint-tmp"
    left.mkdir()
    (left / "part").write_text("of it")
    assert saved.steps() == [3, 7]
    saved.sweep()
    assert not left.exists() and saved.newest_whole() == (7, {})


def test_facts_come_back(saved):
    assert saved.facts(7) == {"log": {"bytes": 7}} and saved.facts(3) == {"log": {"bytes": 3}}


def test_a_step_that_was_restored_is_not_written_again(saved):
    """A kill during that write would lose it."""
    with contextlib.closing(Checkpoints(str(saved.directory), keep=2)) as later:
        before = {path: path.stat().st_mtime_ns for path in files(saved, 7)}
        later.save(later.restore(7, state_at(0)), log=None)
        later.wait()
        assert {path: path.stat().st_mtime_ns for path in files(later, 7)} == before


def test_a_step_is_saved_once(saved):
    before = (Path(saved.directory) / "7" / "manifest.json").stat().st_mtime_ns
    saved.save(state_at(7))
    saved.wait()
    assert (Path(saved.directory) / "7" / "manifest.json").stat().st_mtime_ns == before


def test_a_disk_that_is_full_is_one_line_and_leaves_the_rest(saved, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(WithManifest, "finalize", full)
    saved.save(state_at(9))
    with pytest.raises(UserError, match=r"be written into .*No space left on device\); the newest one is 7"):
        saved.wait()
    assert saved.newest_whole() == (7, {})


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
