"""Checkpoints: Orbax, asynchronous and atomic, each with a manifest of what it holds, behind one small class."""

import contextlib
import functools
import hashlib
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from attnlab.errors import UserError
from attnlab.training.state import TrainState

MANIFEST = "manifest.json"


class Checkpoints:
    """The checkpoints of a run: the newest `keep`, and the best.

    A checkpoint is a folder named by its step. It gets that name when all of it is written, the manifest last of all:
    the step, and the sha256 of every other file in it. Orbax alone loads a flipped bit without a word.
    Object storage renames no folder: there, one without a manifest is none yet.

    Args:
      directory: where they lie, any `etils.epath` path; made on the first save.
      keep: how many of the newest stay.

    Attributes:
      best: which of some steps, if any, stays however old it is; whoever trains says how to know.

    >>> import tempfile
    >>> checkpoints = Checkpoints(tempfile.mkdtemp())
    >>> state = TrainState(np.int32(5), {"w": np.ones(3, np.float32)}, (np.zeros(3),))
    >>> checkpoints.save(state)
    >>> checkpoints.close()
    >>> checkpoints.steps(), checkpoints.damage(5), checkpoints.restore(5, state).params
    ([5], '', {'w': array([1., 1., 1.], dtype=float32)})
    """

    def __init__(self, directory: str | Path, keep: int = 1):
        self.directory = epath.Path(directory if "://" in str(directory) else Path(directory).expanduser().absolute())
        self.best: Callable[[list[int]], int | None] = lambda steps: None
        self._keep = keep
        self._started: int | None = None  # the last step that was saved or restored here
        self._open_writer = None
        self._lock = threading.RLock()  # a signal's thread saves as well

    def prepare(self) -> None:
        """Makes the directory.

        Raises:
          UserError: it cannot be made.
        """
        with self._told():
            self.directory.mkdir(parents=True, exist_ok=True)

    def sweep(self) -> None:
        """Removes what a killed process had not finished; for the one process that writes, errors as for `prepare`."""
        with self._told():
            for path in self.directory.iterdir():
                if ".orbax-checkpoint-tmp" in path.name or (path.name.isdecimal() and not self._committed(path)):
                    path.rmtree()

    @contextlib.contextmanager
    def _told(self):
        try:
            yield
        except (OSError, ImportError) as error:
            why = getattr(error, "strerror", None) or error
            raise UserError(f"checkpoint.dir = {self.directory} cannot be written ({why}): choose another") from error

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in order, damaged ones among them."""
        if not self.directory.exists():
            return []
        return sorted(
            int(path.name) for path in self.directory.iterdir() if path.name.isdecimal() and self._committed(path)
        )

    def _committed(self, path: epath.Path) -> bool:
        return "://" not in str(self.directory) or (path / MANIFEST).exists()

    def save(self, state: TrainState, **facts) -> None:
        """Starts to write `state` as the checkpoint of its step; the arrays may be reused once this returns.

        Args:
          state: of any shardings.
          facts: what JSON can hold, to be read by `facts`.

        Raises:
          UserError: this one or the one before it cannot be written.
        """
        step = int(state.step)
        items = _Items(
            params=ocp.args.StandardSave(state.params),
            opt_state=ocp.args.StandardSave(state.opt_state),
            facts=ocp.args.JsonSave(facts),
        )
        with self._lock:
            if step == self._started:
                return
            self.wait()
            with self._written():
                self._writer.save(self.directory / str(step), args=items)
            self._started = step

    def wait(self) -> None:
        """Returns when all that was saved is on disk, and what need not stay is not.

        Raises:
          UserError: it cannot be written.
        """
        with self._lock:
            if self._open_writer is None or self._started is None:
                return
            with self._written():
                self._writer.wait_until_finished()
            if jax.process_index() == 0:
                steps = self.steps()
                best = self.best(steps)
                for step in steps[: -self._keep]:
                    if step != best:  # what a kill leaves of one is damaged, and goes next time
                        (self.directory / str(step)).rmtree()

    def damage(self, step: int) -> str:
        """What is wrong with the files of a checkpoint, "" when they are those that were written."""
        folder = self.directory / str(step)
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            if manifest["step"] != step:
                return f"it is that of step {manifest['step']}"
            for name, written in manifest["sha256"].items():
                if _file_sha256(folder / name) != written:
                    return f"{name} is not what was written"
        except FileNotFoundError as error:
            return f"{Path(error.filename or folder).name} is missing"
        except OSError as error:
            return f"{Path(error.filename or folder).name}: {error.strerror}"
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"its {MANIFEST} is no manifest"
        return ""

    def newest_whole(self) -> tuple[int, dict[int, str]]:
        """The newest step that is not damaged, 0 if there is no checkpoint at all; and what is wrong with newer ones.

        Raises:
          UserError: there are checkpoints, and all are damaged.
        """
        damaged = {}
        for step in reversed(self.steps()):
            if not (why := self.damage(step)):
                return step, damaged
            damaged[step] = why
        if damaged:
            step, why = next(iter(damaged.items()))
            raise UserError(
                f"every checkpoint in {self.directory} is damaged (of {step} {why}): bring one back, or start anew in "
                "another --workdir"
            )
        return 0, {}

    def digests(self, step: int) -> dict[str, str]:
        """sha256 of the parameters' and of the optimizer state's bytes at a step."""
        items = self._restore(step, params=ocp.args.StandardRestore(), opt_state=ocp.args.StandardRestore())
        return {name: sha256(items[name]) for name in ("params", "opt_state")}

    def set_aside(self, step: int) -> str:
        """Renames a checkpoint so that it is none any longer; returns its new name."""
        names = (f"{step}.damaged", *(f"{step}.damaged-{n}" for n in range(2, 1000)))
        name = next(name for name in names if not (self.directory / name).exists())
        (self.directory / str(step)).rename(self.directory / name)
        if step == self._started:
            self._started = None
        return name

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
        self._started = step  # as good as saved
        return TrainState(jax.device_put(np.int32(step), _sharding(like.step)), items["params"], items["opt_state"])

    def restore_params(self, step: int, like):
        """The parameters at a step, without the optimizer's state; `like` and errors as for `restore`."""
        return self._restore(step, params=ocp.args.StandardRestore(like))["params"]

    def facts(self, step: int) -> dict:
        """What was given to `save` beside the state; errors as for `restore`."""
        return self._restore(step, facts=ocp.args.JsonRestore())["facts"]

    def close(self) -> None:
        """Waits for what is being written, and frees the threads."""
        if self._open_writer is not None:
            writer, self._open_writer = self._open_writer, None
            writer.close()

    @property
    def _writer(self) -> ocp.AsyncCheckpointer:
        if self._open_writer is None:
            _ignore_late_io()
            self._open_writer = ocp.AsyncCheckpointer(WithManifest())
        return self._open_writer

    def _restore(self, step, **items):
        _ignore_late_io()
        folder = self.directory / str(step)
        try:
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
                return reader.restore(folder, ocp.args.Composite(**items))
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise UserError(
                f"checkpoint {folder} cannot be read ({_why(error)}): move it away to go on from the one before it"
            ) from error

    @contextlib.contextmanager
    def _written(self):
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            self._started = None
            if jax.process_count() > 1 and isinstance(error, TimeoutError | jax.errors.JaxRuntimeError):
                raise  # another process is gone
            steps = self.steps()
            where = f"the newest one is {steps[-1]}" if steps else "none was written before"
            raise UserError(
                f"a checkpoint cannot be written into {self.directory} ({_why(error)}); {where}: make room there, and "
                "repeat the command"
            ) from error


class WithManifest(ocp.CompositeCheckpointHandler):
    """Adds the manifest when all else is written, and before the folder gets its name."""

    def finalize(self, directory):
        super().finalize(directory)
        # Orbax still puts the time into its own _CHECKPOINT_METADATA, which holds nothing of the run.
        files = (path for path in _files(directory) if path.name != "_CHECKPOINT_METADATA")
        digests = {str(path.relative_to(directory)): _file_sha256(path) for path in files}
        step = int(directory.name.partition(".")[0])  # it has a longer name until it is whole
        (directory / MANIFEST).write_text(json.dumps({"step": step, "sha256": digests}, indent=1))


@ocp.args.register_with_handler(WithManifest, for_save=True, for_restore=True)
class _Items(ocp.args.Composite):
    """What Orbax wants to find for a handler: the class of its arguments."""


def sha256(params) -> str:
    """The sha256 of the parameters' bytes, in the order of their paths.

    >>> sha256({"b": np.zeros(2), "a": np.ones(2)}) == sha256({"a": np.ones(2), "b": np.zeros(2)})
    True
    """
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    digest = hashlib.sha256()
    for path in sorted(leaves):
        leaf = leaves[path]
        whole = leaf.addressable_data(0) if isinstance(leaf, jax.Array) and leaf.is_fully_replicated else leaf
        digest.update(np.ascontiguousarray(whole).tobytes())
    return digest.hexdigest()


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in sorted(folder.iterdir()):
        yield from _files(path) if path.is_dir() else [path]


def _file_sha256(path: epath.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _why(error: BaseException) -> str:
    """The first line of a storage library's message; they append pages of their own state, from a bracket on."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip().splitlines() or [repr(error)])[0].partition("[")[0][:160].strip()


@functools.cache
def _ignore_late_io() -> None:
    """Keeps quiet, from now on, about reads and writes that fail after another's failure has been reported.

    Orbax reads and writes all arrays of a checkpoint at once and raises the first failure; the others, whose event loop
    is closed by then, would each print a traceback of their own, some after the message that says what is wrong.
    """
    report = sys.unraisablehook

    def report_others(unraisable):
        if str(unraisable.exc_value) != "Event loop is closed":
            report(unraisable)

    sys.unraisablehook = report_others
    logging.getLogger("asyncio").addFilter(lambda record: "never retrieved" not in record.getMessage())


def _sharding(array):
    return array.sharding if isinstance(array, jax.Array) else None
