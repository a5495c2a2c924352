"""Checkpoints by Orbax: asynchronous, atomic, and verified by a manifest of sha256 digests."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from attnlab.nn.stack import is_stacked, stack_layers, unstack_layers
from attnlab.support.errors import UserError
from attnlab.training.phases import OnPhase, no_phase
from attnlab.training.state import TrainState

MANIFEST = "manifest.json"
LOCK = ".lock"  # held by the process that writes; left there, empty


def history_steps(steps: int, count: int) -> list[int]:
    """`count` steps of a run, evenly spaced by their logarithm: 0, 1, …, and always the last.

    Most of what a model learns happens early, and what comes before the first update is what chance alone gives. Where
    rounding would name a step twice, the next one is taken.

    Args:
      steps: of the run.
      count: 0 for none, 1 for the last alone.

    Raises:
      ValueError: a count below 0, or above steps + 1.

    >>> history_steps(2000, 8)
    [0, 1, 4, 14, 48, 166, 576, 2000]
    >>> history_steps(5, 6), history_steps(2000, 1), history_steps(2000, 0)
    ([0, 1, 2, 3, 4, 5], [2000], [])
    """
    if not 0 <= count <= steps + 1:
        raise ValueError(f"{count} checkpoints of {steps} steps: expected 0 … {steps + 1}, as step 0 counts")
    if count < 3:
        return [0, steps][-count:] if count else []
    history = [0, 1]
    while len(history) < count:
        reached, left = history[-1], count - len(history)
        history.append(max(reached + 1, round(reached * (steps / reached) ** (1 / left))))
    return history


class Checkpoints:
    """The checkpoints of a run: the newest `keep`, the best, and those that were saved to stay.

    A checkpoint is a folder named after its step. It is written under a temporary name and renamed when complete. The
    manifest is written last: the step, and the sha256 of every other file. Orbax alone would load a flipped bit
    silently. Object storage cannot rename a folder: there, a checkpoint without a manifest is incomplete.

    Args:
      directory: any `etils.epath` path; created by `prepare` or by the first save.
      keep: number of newest checkpoints to keep.

    Attributes:
      best: given the steps, returns the one to keep regardless of its age, or None; set by the trainer.

    >>> import tempfile
    >>> checkpoints = Checkpoints(tempfile.mkdtemp())
    >>> state = TrainState(np.int32(5), {"w": np.ones(3, np.float32)}, (np.zeros(3),))
    >>> checkpoints.save(state)
    >>> checkpoints.close()
    >>> checkpoints.steps(), checkpoints.damage(5), checkpoints.restore(5, state).params
    ([5], '', {'w': array([1., 1., 1.], dtype=float32)})
    """

    def __init__(self, directory: str | Path, keep: int = 1, on_phase: OnPhase = no_phase):
        self.directory = epath.Path(directory if "://" in str(directory) else Path(directory).expanduser().absolute())
        self.best: Callable[[list[int]], int | None] = lambda steps: None
        self._keep = keep
        self._on_phase = on_phase
        self._started: int | None = None  # the last step that was saved or restored here
        self._open_writer = None
        self._lock_file: int | None = None
        self._lock = threading.RLock()  # the thread that handles signals saves as well

    def prepare(self) -> None:
        """Creates the directory and locks it until `close`, or until the process ends.

        Object storage has no locks, and neither do some network file systems: there, nothing is locked.

        Raises:
          UserError: it cannot be created, or another process writes checkpoints there.
        """
        with self._explained():
            self.directory.mkdir(parents=True, exist_ok=True)
            if self._lock_file is None and "://" not in str(self.directory):
                self._lock_file = os.open(self.directory / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
                try:
                    fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    self._unlock()
                    raise UserError(
                        f"checkpoint.dir = {self.directory}: another process writes checkpoints there: wait for it, or "
                        "choose another"
                    ) from error
                except OSError:  # a file system without locks
                    pass

    def _unlock(self) -> None:
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def sweep(self) -> None:
        """Removes incomplete checkpoints of killed processes; for the writing process. Errors as for `prepare`."""
        with self._explained():
            for path in self.directory.iterdir():
                if ".orbax-checkpoint-tmp" in path.name or (path.name.isdecimal() and not self._committed(path)):
                    path.rmtree()

    @contextlib.contextmanager
    def _explained(self):
        try:
            yield
        except (OSError, ImportError) as error:
            why = getattr(error, "strerror", None) or error
            raise UserError(f"checkpoint.dir = {self.directory} cannot be written ({why}): choose another") from error

    def steps(self) -> list[int]:
        """Steps with a checkpoint, intact or damaged, in ascending order."""
        if not self.directory.exists():
            return []
        return sorted(
            int(path.name) for path in self.directory.iterdir() if path.name.isdecimal() and self._committed(path)
        )

    def _committed(self, path: epath.Path) -> bool:
        return "://" not in str(self.directory) or (path / MANIFEST).exists()

    def save(self, state: TrainState, *, permanent: bool = False, **metadata) -> None:
        """Starts writing `state` as the checkpoint of its step; the arrays may be reused once this returns.

        Args:
          state: with any shardings.
          permanent: keep it, regardless of its age; its manifest says so, whatever later starts of the run ask for.
          metadata: JSON values, returned by `metadata`.

        Raises:
          UserError: this checkpoint or the previous one cannot be written.
        """
        step = int(state.step)
        average = {} if state.average is None else {"average": ocp.args.StandardSave(state.average)}
        items = _Items(
            params=ocp.args.StandardSave(state.params),
            opt_state=ocp.args.StandardSave(state.opt_state),
            facts=ocp.args.JsonSave(metadata),
            **average,
        )
        with self._lock:
            if step == self._started:
                return
            self.wait()
            with self._writing():
                writer = self._writer
                self._handler.permanent = permanent  # of this save alone, as the previous one has ended
                writer.save(self.directory / str(step), args=items)
            self._started = step

    def wait(self) -> None:
        """Waits until the last save is on disk, then deletes checkpoints that need not be kept.

        Raises:
          UserError: it cannot be written.
        """
        with self._lock:
            if self._open_writer is None or self._started is None:
                return
            with self._writing():
                self._writer.wait_until_finished()
            if jax.process_index() == 0:
                steps = self.steps()
                best = self.best(steps)
                for step in steps[: -self._keep]:
                    if step != best and not self._is_permanent(
                        step
                    ):  # a kill leaves a damaged one, which is deleted next time
                        self._prune(self.directory / str(step))

    def _prune(self, folder: epath.Path) -> None:
        for path in _files(folder):
            with self._on_phase("pruning"):
                path.unlink()
        folder.rmtree()

    def _is_permanent(self, step: int) -> bool:
        try:
            return _read_manifest(self.directory / str(step)).get("permanent", False)
        except (OSError, ValueError, AttributeError):
            return False

    def damage(self, step: int) -> str:
        """The first fault in the files of a checkpoint, compared with its manifest; "" when it is intact."""
        folder = self.directory / str(step)
        try:
            manifest = _read_manifest(folder)
            if manifest["step"] != step:
                return f"it belongs to step {manifest['step']}"
            found = {str(path.relative_to(folder)): path for path in _files(folder)}  # names lead to no other folder
            for name, written in manifest["sha256"].items():
                if name not in found:
                    return f"{name} is missing"
                if os.path.islink(found[name]) or _is_endless(found[name]):
                    return f"{name} is not a regular file"
                if _file_sha256(found[name]) != written:
                    return f"{name} differs from what was written"
        except FileNotFoundError as error:
            return f"{Path(error.filename or folder).name} is missing"
        except OSError as error:
            return f"{Path(error.filename or folder).name}: {error.strerror}"
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{MANIFEST} is not a valid manifest"
        return ""

    def newest_intact(self) -> tuple[int | None, dict[int, str]]:
        """The newest intact step, None if there are no checkpoints; and the faults of newer, damaged ones by step.

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
                f"every checkpoint in {self.directory} is damaged ({step}: {why}): restore one, or start again in "
                "another --workdir"
            )
        return None, {}

    def digests(self, step: int) -> dict[str, str]:
        """sha256 of the parameters, of the optimizer state, and of the average if there is one, at a step."""
        names = ["params", "opt_state"] + ["average"] * self._has_average(step)
        items = self._restore(step, **{name: ocp.args.StandardRestore() for name in names})
        return {name: sha256(items[name]) for name in names}

    def set_aside(self, step: int) -> str:
        """Renames a checkpoint so that it is no longer found; returns its new name."""
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
          like: a state with the same shapes and types, and the shardings to restore to. Its layers may be stacked
            where they were saved one by one, or the reverse.

        Raises:
          UserError: the checkpoint cannot be read, or has different shapes.
        """
        names = ["params", "opt_state"] + ["average"] * (like.average is not None)
        saved = self._as_saved(step, like)
        items = self._restore(step, **{name: ocp.args.StandardRestore(getattr(saved, name)) for name in names})
        self._started = step  # so that it is not saved again
        restored = _as_wanted([items[name] for name in names], [getattr(like, name) for name in names])
        return TrainState(jax.device_put(np.int32(step), _sharding(like.step)), *restored)

    def restore_params(self, step: int, like):
        """The parameters to use of a step: their average where the run kept one, else those of the last update.

        `like` and errors as for `restore`.
        """
        name = "average" if self._has_average(step) else "params"
        params = self._restore(step, **{name: ocp.args.StandardRestore(self._as_saved(step, like))})[name]
        return _as_wanted(params, like)

    def _has_average(self, step: int) -> bool:
        return (self.directory / str(step) / "average").exists()

    def shapes(self, step: int) -> dict | None:
        """The tree of the parameters, of objects with a `shape`, without reading them; None where it is damaged."""
        _ignore_late_io()
        folder = self.directory / str(step) / "params"
        try:
            if any(map(_is_endless, _files(folder))):
                return None
            found = ocp.StandardCheckpointHandler().metadata(folder)
            return getattr(found, "tree", found)
        except (ValueError, OSError, KeyError, TypeError):  # which reading it will report
            return None

    def _as_saved(self, step: int, like):
        """`like` with its layers stacked or one by one, as they are on disk; unchanged where neither fits."""
        if (saved := self.shapes(step)) is None:
            return like
        saved = _paths(saved)
        params = like.params if isinstance(like, TrainState) else like
        for convert in (stack_layers, unstack_layers):
            if _paths(params) != saved and _has_layers(params) and _paths(convert(params)) == saved:
                return convert(like)
        return like

    def metadata(self, step: int) -> dict:
        """The metadata given to `save` (the item is named "facts" on disk); errors as for `restore`.

        Like `restore` and `restore_params`, to be called in every process: Orbax waits for all of them.
        """
        return self._restore(step, facts=ocp.args.JsonRestore())["facts"]

    def close(self) -> None:
        """Waits for pending writes, stops the threads, and releases the lock; errors as for `wait`."""
        writer, self._open_writer = self._open_writer, None
        try:
            if writer is not None:
                with self._writing():
                    writer.close()
        finally:
            self._unlock()

    def _abandon_writer(self) -> None:
        """Closes a writer that has failed, which would raise the same error again in the next `wait` or `close`."""
        writer, self._open_writer = self._open_writer, None
        if writer is not None:
            with contextlib.suppress(Exception):
                writer.close()

    @property
    def _writer(self) -> ocp.AsyncCheckpointer:
        if self._open_writer is None:
            _ignore_late_io()
            # Created in the background, a folder that fails leaves the threads that are to fill it waiting for it, for
            # twenty minutes; they are no daemons, so that the process could not end.
            options = ocp.AsyncOptions(create_directories_asynchronously=False)
            self._handler = WithManifest(composite_options=ocp.CompositeOptions(async_options=options))
            self._handler.on_phase = self._on_phase
            options.post_finalization_callback = self._handler.renamed
            self._open_writer = ocp.AsyncCheckpointer(self._handler, async_options=options)
        return self._open_writer

    def _restore(self, step, **items):
        _ignore_late_io()
        folder = self.directory / str(step)
        try:
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
                return reader.restore(folder, ocp.args.Composite(**items))
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise UserError(
                f"checkpoint {folder} cannot be read ({_why(error)}): move it away to resume from the previous one"
            ) from error

    @contextlib.contextmanager
    def _writing(self):
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            self._started = None
            self._abandon_writer()
            if jax.process_count() > 1 and isinstance(error, TimeoutError | jax.errors.JaxRuntimeError):
                raise  # another process has died
            steps = self.steps()
            newest = f"the newest one is {steps[-1]}" if steps else "there is none yet"
            raise UserError(
                f"a checkpoint cannot be written to {self.directory} ({_why(error)}); {newest}: make room there, and "
                "repeat the command"
            ) from error


class WithManifest(ocp.CompositeCheckpointHandler):
    """Adds the manifest after all other files are written, before the folder is renamed.

    Attributes:
      permanent: whether the checkpoint that is being written is never deleted.
      on_phase: surrounds writing, committing and renaming.
    """

    permanent = False
    on_phase = staticmethod(no_phase)
    _renaming = contextlib.nullcontext()

    async def async_save(self, *args, **kwargs):
        with self.on_phase("write"):
            return await super().async_save(*args, **kwargs)

    def finalize(self, directory):
        with self.on_phase("commit"):
            self._finalize(directory)
        self._renaming = self.on_phase("rename")
        self._renaming.__enter__()

    def renamed(self):
        """The folder has its final name."""
        renaming, self._renaming = self._renaming, contextlib.nullcontext()  # not begun where another process renames
        renaming.__exit__(None, None, None)

    def _finalize(self, directory):
        super().finalize(directory)
        # Orbax writes the time to its own _CHECKPOINT_METADATA later; that file holds no state.
        files = (path for path in _files(directory) if path.name != "_CHECKPOINT_METADATA")
        digests = {str(path.relative_to(directory)): _file_sha256(path) for path in files}
        step = int(directory.name.partition(".")[0])  # it has a suffix until it is complete
        manifest = {"step": step, "sha256": digests} | ({"permanent": True} if self.permanent else {})
        (directory / MANIFEST).write_text(json.dumps(manifest, indent=1))


@ocp.args.register_with_handler(WithManifest, for_save=True, for_restore=True)
class _Items(ocp.args.Composite):
    """The class of arguments that Orbax looks up for the handler."""


def _paths(tree) -> set[str]:
    """The paths of the leaves in nested dicts."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: not isinstance(node, dict))
    return {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves}


def _has_layers(params) -> bool:
    return isinstance(params, dict) and ("block_0" in params or is_stacked(params))


def _as_wanted(restored, like):
    """Restored arrays with their layers stacked, or one by one, as `like` has them, and its shardings."""
    if jax.tree.structure(restored) == jax.tree.structure(like):
        return restored
    convert = stack_layers if jax.tree.structure(stack_layers(restored)) == jax.tree.structure(like) else unstack_layers
    return jax.jit(convert, out_shardings=jax.tree.map(_sharding, like))(restored)


def sha256(params) -> str:
    """sha256 of the parameters' bytes, ordered by path.

    >>> sha256({"b": np.zeros(2), "a": np.ones(2)}) == sha256({"a": np.ones(2), "b": np.zeros(2)})
    True
    """
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    digest = hashlib.sha256()
    for path in sorted(leaves):
        leaf = leaves[path]
        replicated = isinstance(leaf, jax.Array) and leaf.is_fully_replicated
        digest.update(np.ascontiguousarray(leaf.addressable_data(0) if replicated else leaf).tobytes())
    return digest.hexdigest()


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in sorted(folder.iterdir()):
        yield from _files(path) if path.is_dir() else [path]


def _is_endless(path: epath.Path) -> bool:
    """Whether a path is a pipe or a device, of which epath knows nothing."""
    return os.path.exists(path) and not os.path.isfile(path)


def _read_manifest(folder: epath.Path) -> dict:
    path = folder / MANIFEST  # perhaps on a bucket, which attnlab.files cannot read
    if _is_endless(path):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    try:
        return json.loads(path.read_text())
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error


def _file_sha256(path: epath.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _why(error: BaseException) -> str:
    """The first line of a storage library's message, without the internal state that follows a bracket."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip().splitlines() or [repr(error)])[0].partition("[")[0][:160].strip()


@functools.cache
def _ignore_late_io() -> None:
    """Silences reads and writes that fail after the first failure was reported, from now on.

    Orbax reads and writes all arrays of a checkpoint concurrently and raises the first failure. The others find their
    event loop closed, and each would print a traceback of its own, possibly after our error message.
    """
    report = sys.unraisablehook

    def report_others(unraisable):
        if str(unraisable.exc_value) != "Event loop is closed":
            report(unraisable)

    sys.unraisablehook = report_others
    logging.getLogger("asyncio").addFilter(lambda record: "never retrieved" not in record.getMessage())


def _sharding(array):
    return getattr(array, "sharding", None)
