"""Checkpoints through Orbax: asynchronous, atomic, and verified by a manifest of sha256 digests."""

import contextlib
import functools
import hashlib
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from attnlab.nn.stack import is_stacked, stack_layers, unstack_layers
from attnlab.support.errors import UserError
from attnlab.support.files import parsed
from attnlab.support.paths import named
from attnlab.training.state import TrainState

MANIFEST = "manifest.json"
# The phases of a run; tests kill it in each. "commit" and "rename" (just before a checkpoint gets its final name) run
# in Orbax's thread while the loop continues; all others run in the loop's thread.
PHASES = ("compile", "step", "evaluation", "sampling", "save", "write", "commit", "rename", "pruning")
OnPhase = Callable[[str], contextlib.AbstractContextManager]
TEMPORARY = ".orbax-checkpoint-tmp"  # suffix of an incomplete checkpoint


def history_steps(steps: int, count: int) -> list[int]:
    """`count` distinct steps, log-spaced from 0 (the untrained model) to the last; a single step is the last."""
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
    """The checkpoints of a run: the newest `keep`, the best, and the permanent checkpoints.

    A checkpoint is a folder named after its step. It is written under a temporary name and renamed when complete. Its
    last file is a manifest with the step and the sha256 of each file that holds state: without it, Orbax would silently
    load flipped bits. `directory` may also be a URL that etils.epath supports; there, Orbax marks complete checkpoints.

    Attributes:
      best: maps the steps of all checkpoints to the step to keep regardless of age, or None; set by `open_run`.
    """

    def __init__(self, directory: str | Path, keep: int = 1, on_phase: OnPhase = contextlib.nullcontext):
        is_url = "://" in str(directory)
        try:
            self.directory = epath.Path(directory if is_url else Path(directory).expanduser().absolute())
            self.directory.exists()  # fails if the package for this kind of storage is missing
        except (KeyError, ImportError) as error:
            why = f"checkpoint.dir = {directory} cannot be reached ({_why(error)})"
            raise UserError(f"{why}: choose another") from error
        self.best: Callable[[list[int]], int | None] = lambda steps: None
        self._keep = keep
        self._on_phase = on_phase
        self._started: int | None = None  # the last step that was saved or restored here
        self._open_writer = None

    def prepare(self) -> None:
        """Create the directory, and remove incomplete checkpoints of killed processes; call in one process only."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for path in self.directory.iterdir():
                is_step = path.name.isdecimal() and path.is_dir()
                if TEMPORARY in path.name or (is_step and not ocp.utils.is_checkpoint_finalized(path)):
                    path.rmtree()
        except OSError as error:
            raise UserError(
                f"checkpoint.dir = {self.directory} cannot be written ({_why(error)}): choose another"
            ) from error

    def steps(self) -> list[int]:
        """Steps with a checkpoint, intact or damaged, in ascending order."""
        if not self.directory.exists():
            return []
        paths = (path for path in self.directory.iterdir() if path.name.isdecimal())
        return sorted(int(path.name) for path in paths if ocp.utils.is_checkpoint_finalized(path))

    def save(self, state: TrainState, *, permanent: bool = False, **metadata) -> None:
        """Start writing `state`, and `metadata` as JSON; once this returns, the arrays may be overwritten."""
        step = int(state.step)
        trees = {"params": state.params, "opt_state": state.opt_state, "average": state.average}
        arrays = {name: ocp.args.StandardSave(tree) for name, tree in trees.items() if tree is not None}
        items = ocp.args.Composite(**arrays, facts=ocp.args.JsonSave(metadata))
        if step == self._started:
            return
        self.wait()
        with self._writing(), self._on_phase("write"):
            self._commit = functools.partial(self._add_manifest, step, permanent)  # the previous save has ended
            self._writer.save(self.directory / str(step), args=items)
        self._started = step

    def _add_manifest(self, step: int, permanent: bool) -> None:
        """Add the manifest when all other files are written, before the folder is renamed."""
        with self._on_phase("commit"):
            final, temporary = str(step), f"{step}{TEMPORARY}"  # object storage has no rename: it uses `final`
            names = (path.name for path in self.directory.iterdir())
            folder = self.directory / next(name for name in names if name == final or name.startswith(temporary))
            # Orbax will still add a timestamp to _CHECKPOINT_METADATA, which holds no state.
            files = (path for path in _files(folder) if path.name != "_CHECKPOINT_METADATA")
            digests = {str(path.relative_to(folder)): _file_sha256(path) for path in files}
            manifest = {"step": step, "sha256": digests} | ({"permanent": True} if permanent else {})
            with named(folder / MANIFEST):
                (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
        with self._on_phase("rename"):
            pass  # Orbax renames the folder next

    def wait(self) -> None:
        """Wait until the last save is on disk, then delete old checkpoints."""
        if self._open_writer is None or self._started is None:
            return
        with self._writing():
            self._writer.wait_until_finished()
        if jax.process_index() == 0:  # not by Orbax's CheckpointManager, which cannot add the manifest
            steps = self.steps()
            best = self.best(steps)
            for step in steps[: -self._keep]:
                folder = self.directory / str(step)
                if step != best and not self._is_permanent(step):
                    with self._on_phase("pruning"):  # a kill leaves part of it; the next process prunes it
                        folder.rmtree()

    def _is_permanent(self, step: int) -> bool:
        try:
            return _read_manifest(self.directory / str(step)).get("permanent", False)
        except (OSError, ValueError, AttributeError):
            return False

    def damage(self, step: int) -> str:
        """The first difference between the files of a checkpoint and its manifest; "" if it is intact."""
        folder = self.directory / str(step)
        try:
            manifest = _read_manifest(folder)
            if manifest["step"] != step:
                return f"it belongs to step {manifest['step']}"
            paths = {str(path.relative_to(folder)): path for path in _files(folder)}  # no name can leave the folder
            for name, written in manifest["sha256"].items():
                if name not in paths:
                    return f"{name} is missing"
                if _file_sha256(paths[name]) != written:
                    return f"{name} differs from what was written"
        except FileNotFoundError as error:
            return f"{Path(error.filename or folder).name} is missing"
        except OSError as error:
            return f"{Path(error.filename or folder).name}: {error.strerror}"
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{MANIFEST} is not a valid manifest"
        return ""

    def newest_intact(self) -> tuple[int | None, dict[int, str]]:
        """(Newest intact step or None, faults of newer checkpoints by step); UserError if every one is damaged."""
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

    def set_aside(self, step: int) -> str:
        """Rename a checkpoint to STEP.damaged (replacing that folder), so that it is not found; return the new name."""
        aside = self.directory / f"{step}.damaged"
        if aside.exists():
            aside.rmtree()
        (self.directory / str(step)).rename(aside)
        return aside.name

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state at a step, with the shardings and the layout of layers (stacked or not) of `like`."""
        names = ["params", "opt_state"] + ["average"] * (like.average is not None)
        items = self._restore_like(step, {name: getattr(like, name) for name in names})
        self._started = step  # so that it is not saved again
        return TrainState(jax.device_put(np.int32(step), getattr(like.step, "sharding", None)), **items)

    def restore_params(self, step: int, like):
        """The average of the parameters if the checkpoint has one, else the parameters, placed like `like`."""
        name = "average" if (self.directory / str(step) / "average").exists() else "params"
        return self._restore_like(step, {name: like})[name]

    def _restore_like(self, step: int, like: dict) -> dict:
        """Items of a checkpoint in the form of `like`, whether or not their layers are stacked on disk."""
        folder, wanted = self.directory / str(step) / "params", like.get("params", like.get("average"))
        try:
            metadata = ocp.StandardCheckpointHandler().metadata(folder)
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise self._unreadable(step, error) from error
        stacked = is_stacked(getattr(metadata, "tree", metadata))
        if stacked == is_stacked(wanted):
            return self._restore(step, **{name: ocp.args.StandardRestore(tree) for name, tree in like.items()})
        to_saved, to_wanted = (stack_layers, unstack_layers) if stacked else (unstack_layers, stack_layers)
        saved = self._restore(step, **{name: ocp.args.StandardRestore(to_saved(tree)) for name, tree in like.items()})
        shardings = jax.tree.map(lambda x: getattr(x, "sharding", None), like)
        return jax.jit(to_wanted, out_shardings=shardings)(saved)

    def metadata(self, step: int) -> dict:
        """The metadata passed to `save`; every process must call this, because Orbax waits for all processes."""
        return self._restore(step, facts=ocp.args.JsonRestore())["facts"]

    def close(self) -> None:
        """Wait for pending writes, and stop the threads."""
        with self._writing():
            self._close_writer()

    def _close_writer(self) -> None:
        writer, self._open_writer = self._open_writer, None
        if writer is not None:
            writer.close()

    @property
    def _writer(self) -> ocp.AsyncCheckpointer:
        if self._open_writer is None:
            _ignore_late_io()
            # If a folder could not be created in the background, Orbax's threads would wait twenty minutes for it. They
            # are not daemons, so the process could not end.
            options = ocp.AsyncOptions(create_directories_asynchronously=False)
            options.post_finalization_callback = lambda: self._commit()
            handler = ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(async_options=options))
            self._open_writer = ocp.AsyncCheckpointer(handler, async_options=options)
        return self._open_writer

    def _restore(self, step: int, **items) -> dict:
        _ignore_late_io()
        folder = self.directory / str(step)
        try:
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
                restored = reader.restore(folder, ocp.args.Composite(**items))
                return {name: restored[name] for name in items}
        except (ValueError, OSError, KeyError, TypeError) as error:
            raise self._unreadable(step, error) from error

    def _unreadable(self, step: int, error: Exception) -> UserError:
        folder = self.directory / str(step)
        return UserError(
            f"checkpoint {folder} cannot be read ({_why(error)}): move it away to resume from the previous one"
        )

    @contextlib.contextmanager
    def _writing(self):
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            self._started = None
            with contextlib.suppress(Exception):  # it may raise the same error again
                self._close_writer()
            if jax.process_count() > 1 and isinstance(error, TimeoutError | jax.errors.JaxRuntimeError):
                raise  # another process is lost
            steps = self.steps()
            newest = f"the newest one is {steps[-1]}" if steps else "there is none yet"
            raise UserError(
                f"a checkpoint cannot be written to {self.directory} ({_why(error)}); {newest}: make room there, and "
                "repeat the command"
            ) from error


def sha256(params) -> str:
    """sha256 of the parameters' bytes, ordered by path."""
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


def _read_manifest(folder: epath.Path) -> dict:
    return parsed((folder / MANIFEST).read_text())


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
    """From now on, print nothing about reads and writes that fail after the first failure.

    Orbax accesses all arrays concurrently and raises the first failure; each later one would print a traceback.
    """
    report = sys.unraisablehook

    def report_others(unraisable):
        if str(unraisable.exc_value) != "Event loop is closed":
            report(unraisable)

    sys.unraisablehook = report_others
    logging.getLogger("asyncio").addFilter(lambda record: "never retrieved" not in record.getMessage())
    warnings.filterwarnings("ignore", "coroutine 'Store._get_array_metadatas' was never awaited", RuntimeWarning)
