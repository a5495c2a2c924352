"""Checkpoints: Orbax, asynchronous and atomic, behind one small class."""

import functools
import hashlib
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers

from attnlab.errors import UserError
from attnlab.training.state import TrainState


class Checkpoints:
    """The checkpoints of a run: the newest `keep`, and the one with the lowest validation loss.

    Args:
      directory: where they lie, any `etils.epath` path; made on the first save.
      keep: how many of the newest stay.

    >>> import tempfile
    >>> checkpoints = Checkpoints(tempfile.mkdtemp())
    >>> state = TrainState(np.int32(5), {"w": np.ones(3, np.float32)}, (np.zeros(3),))
    >>> checkpoints.save(state, validation_loss=1.5)
    >>> checkpoints.close()
    >>> checkpoints.steps(), checkpoints.restore(5, state).params
    ([5], {'w': array([1., 1., 1.], dtype=float32)})
    """

    def __init__(self, directory: str | Path, keep: int = 1):
        self.directory = epath.Path(directory if "://" in str(directory) else Path(directory).expanduser().absolute())
        policies = [
            checkpoint_managers.LatestN(keep),
            checkpoint_managers.BestN(get_metric_fn=_loss, reverse=True, n=1, keep_checkpoints_without_metrics=False),
        ]
        self._options = ocp.CheckpointManagerOptions(
            best_fn=_loss, best_mode="min", preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies)
        )
        self._open_manager = None

    def prepare(self) -> None:
        """Makes the directory, so that one that cannot be written is known before the first step.

        Raises:
          UserError: it cannot be made.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except (OSError, ImportError) as error:
            why = getattr(error, "strerror", None) or error
            raise UserError(f"checkpoint.dir = {self.directory} cannot be written ({why}): choose another") from error

    def steps(self) -> list[int]:
        """The steps that have a whole checkpoint, in order."""
        if not self.directory.exists():
            return []
        self._manager.reload()  # another process may have written since
        return sorted(self._manager.all_steps())

    def best_step(self) -> int | None:
        """The step with the lowest validation loss, of those that have one."""
        scored = {step: metrics["loss"] for step in self.steps() if (metrics := self._manager.metrics(step))}
        return min(scored, key=scored.get) if scored else None

    def save(self, state: TrainState, validation_loss: float | None = None) -> None:
        """Starts to write `state` as the checkpoint of its step; the arrays may be reused once this returns."""
        items = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params), opt_state=ocp.args.StandardSave(state.opt_state)
        )
        metrics = None if validation_loss is None else {"loss": validation_loss}
        self._manager.save(int(state.step), args=items, metrics=metrics, force=True)

    def wait(self) -> None:
        """Returns when all that was saved is on disk."""
        if self._open_manager is not None:
            self._open_manager.wait_until_finished()

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state at a step.

        Args:
          step: one of `steps()`.
          like: a state of the same shapes and types, whose shardings the new one takes.

        Raises:
          UserError: the checkpoint cannot be read, or has other shapes.
        """
        items = self._restore(
            step, params=ocp.args.StandardRestore(like.params), opt_state=ocp.args.StandardRestore(like.opt_state)
        )
        return TrainState(jax.device_put(np.int32(step), _sharding(like.step)), items["params"], items["opt_state"])

    def restore_params(self, step: int, like):
        """The parameters at a step, without the optimizer's state; `like` and errors as for `restore`."""
        return self._restore(step, params=ocp.args.StandardRestore(like))["params"]

    def close(self) -> None:
        """Waits for what is being written, and frees the threads."""
        if self._open_manager is not None:
            self._open_manager.close()
            self._open_manager = None

    @property
    def _manager(self) -> ocp.CheckpointManager:
        if self._open_manager is None:
            self._open_manager = ocp.CheckpointManager(self.directory, options=self._options)
        return self._open_manager

    def _restore(self, step, **items):
        _ignore_late_reads()
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except (ValueError, OSError, KeyError, TypeError) as error:
            self.close()
            # Storage libraries append pages of their own state, from the first bracket on.
            why = (str(error).strip().splitlines() or [repr(error)])[0].partition("[")[0][:160].strip()
            raise UserError(
                f"checkpoint {self.directory / str(step)} cannot be read ({why}): move it away to go on from the one "
                "before it"
            ) from error


def sha256(params) -> str:
    """The sha256 of the parameters' bytes, in the order of their paths.

    >>> sha256({"b": np.zeros(2), "a": np.ones(2)}) == sha256({"a": np.ones(2), "b": np.zeros(2)})
    True
    """
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    digest = hashlib.sha256()
    for path in sorted(leaves):
        digest.update(np.ascontiguousarray(leaves[path]).tobytes())
    return digest.hexdigest()


@functools.cache
def _ignore_late_reads() -> None:
    """Keeps quiet, from now on, about reads that end after another read's failure has closed their event loop.

    Orbax reads all arrays of a checkpoint at once and reports the first failure; the others would each print a
    traceback of their own, some after the message that says what is wrong.
    """
    report = sys.unraisablehook

    def report_others(unraisable):
        if str(unraisable.exc_value) != "Event loop is closed":
            report(unraisable)

    sys.unraisablehook = report_others


def _loss(metrics) -> float:
    return metrics["loss"]


def _sharding(array):
    return array.sharding if isinstance(array, jax.Array) else None
