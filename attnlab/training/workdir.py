"""The folder of a run: its files, its lock, and the run that an earlier start left there."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ml_collections import ConfigDict

from attnlab import config as configs
from attnlab.data import tokenizers
from attnlab.nn import own
from attnlab.support import files
from attnlab.support.errors import UserError
from attnlab.support.paths import lock, write_text


class Workdir:
    """The folder of a run: `config.json`, `tokenizer.json`, `metrics.jsonl`, `checkpoints/` and `tensorboard/`.

    It must lie on a POSIX file system. Opening it writes nothing.

    Attributes:
      previous_run: the content of `config.json`; None when no run has begun there.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.previous_run = _previous_run(self.path)
        self._lock = None

    def __fspath__(self) -> str:
        return str(self.path)

    __str__ = __fspath__

    @property
    def steps(self) -> int | None:
        """The steps of the previous run's config; None without one."""
        return self.previous_run and configs.from_dict(self.previous_run).steps

    @property
    def metrics(self) -> Path:
        """`metrics.jsonl`."""
        return self.path / "metrics.jsonl"

    def checkpoint_dir(self, config: ConfigDict) -> str | Path:
        """`config.checkpoint.dir`, or `checkpoints/` in the folder."""
        return config.checkpoint.dir or self.path / "checkpoints"

    def check_config(self, config: ConfigDict, *, may_extend: bool) -> None:
        """Raise UserError unless a config continues the previous run, with more steps if it `may_extend`."""
        saved = self.previous_run
        if saved is None:
            return
        steps = self.steps
        if config.steps < steps:
            raise UserError(
                f"{self} holds a run of {steps} steps, and config.steps = {config.steps} is fewer: a run can be "
                f"extended, not shortened; give {steps} or more, or choose a new --workdir"
            )
        if difference := configs.difference(saved | {"steps": config.steps} if may_extend else saved, config):
            raise configs.another(self.path, difference)

    def extensions(self, config: ConfigDict, start: int) -> list[dict]:
        """Extensions of a run that resumes from `start`: `{"at_step", "from_steps", "to_steps"}`, oldest first."""
        if self.previous_run is None or not start:
            return []
        steps, recorded = self.steps, self.previous_run.get("extensions", [])
        if config.steps == steps:
            return recorded
        # Extended again from a step before the last extension, where newer checkpoints are damaged: replace that one.
        undone = [extension for extension in recorded if extension["at_step"] >= start]
        extension = {"at_step": start, "from_steps": steps, "to_steps": config.steps}
        if undone:
            extension["from_steps"] = undone[0]["from_steps"]
        return [*recorded[: len(recorded) - len(undone)], extension]

    def lock(self) -> None:
        """Lock the folder until `close`, or until the process ends in whatever way."""
        self._lock = _lock(self.path, self.path)

    def create(self, config_json: str, tokenizer: tokenizers.Tokenizer) -> None:
        """Create and lock the folder of a new run: complete under another name, then renamed."""
        folder = self.path.resolve()  # a link to an empty folder cannot be replaced, but that folder can
        unfinished = folder.with_name(f".{folder.name}.unfinished")
        held = None
        try:
            unfinished.mkdir(parents=True, exist_ok=True)
            (unfinished / "tokenizer.json").touch()
            held = _lock(unfinished, self.path)
            tokenizers.save(tokenizer, unfinished / "tokenizer.json")
            (unfinished / "config.json").write_text(config_json, encoding="utf-8")
            unfinished.rename(folder)  # replaces an empty folder
        except OSError as error:
            if held is not None:
                os.close(held)
            if error.errno == errno.ENOENT:  # another process has renamed it
                raise _in_use(self.path) from error
            if held is not None:
                shutil.rmtree(unfinished, ignore_errors=True)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another process has created the folder
                raise _in_use(self.path) from error
            raise UserError(f"--workdir={self} cannot be written ({error.strerror}): choose another folder") from error
        self._lock = held

    def write_config(self, config_json: str) -> None:
        """Replace `config.json` atomically, if it differs: `checkpoint.dir` and the like may change between starts."""
        path = self.path / "config.json"
        if path.read_text(encoding="utf-8") != config_json:
            write_text(path, config_json)

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def read_config(workdir: Path) -> dict:
    """The content of `config.json` in a workdir; UserError if it is missing or damaged."""
    path = workdir / "config.json"
    try:
        saved = files.read_json(path)
        is_run = "model_type" not in saved or "corpus" in saved
        if is_run:
            _check_metadata(saved)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{workdir} holds no run (no config.json): train one with --workdir={workdir}") from error
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error
    if not is_run:
        raise UserError(f"{workdir} holds a Hugging Face model, not a run of attnlab: choose another folder")
    own.admit(saved.get("code", {}), workdir)
    try:
        configs.check_saved(configs.from_dict(saved))
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error
    return saved


def _check_metadata(saved: dict) -> None:
    """Raise one of several errors unless what `config.json` holds besides its fields is as a run writes it."""

    def check(name: str, kind: type, is_valid: Callable) -> None:
        if name in saved and not (isinstance(saved[name], kind) and is_valid(saved[name])):
            raise TypeError(f"{name} = {saved[name]!r}")

    saved["corpus"]
    check("corpus", dict, lambda corpus: isinstance(corpus["sha256"], str))
    check("code", dict, lambda code: all(own.WORD.fullmatch(k) and isinstance(v, str) for k, v in code.items()))
    check("user_defined", dict, _is_user_defined)
    check("extensions", list, lambda extensions: all(map(_is_extension, extensions)))


def _is_user_defined(found: dict) -> bool:
    types = isinstance(found["model"], str | None) and isinstance(found["optimizer"], bool)
    return types and isinstance(found.get("fields", {}), dict)


def _is_extension(found: dict) -> bool:
    numbers = (found[name] for name in ("at_step", "from_steps", "to_steps"))
    return all(isinstance(number, int) and 0 < number < 2**31 for number in numbers)


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is damaged ({error}): restore it, or train in a new workdir")


def read_tokenizer(workdir: Path, saved: dict) -> tokenizers.Tokenizer:
    """The tokenizer in a workdir; UserError if it is missing, damaged, or not the tokenizer of `saved`."""
    path = workdir / "tokenizer.json"
    tokenizer = tokenizers.load(path)
    key, found = "tokenizer_sha256", hashlib.sha256(files.read(path)).hexdigest()
    if not saved.get(key):  # runs of older versions have none
        key, found = "vocab_size", tokenizer.vocab_size
    if key in saved and found != saved[key]:
        raise UserError(
            f"{path} is another run's ({key} {found}, expected {saved[key]}): restore this run's tokenizer.json"
        )
    return tokenizer


def _previous_run(workdir: Path) -> dict | None:
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"--workdir={workdir} is a file: name a folder")
    if workdir.is_symlink() and not workdir.exists():
        raise UserError(f"--workdir={workdir} is a link to nowhere: make the folder that it names, or remove it")
    if (workdir / "config.json").exists():
        return read_config(workdir)
    if workdir.exists() and any(workdir.iterdir()):
        raise UserError(f"--workdir={workdir} holds other files and no run: choose a new folder")
    return None


def _lock(folder: Path, workdir: Path) -> int:
    """Lock a folder that is, or will be renamed to, `workdir`; returns the open file that holds the lock."""
    path = folder / "tokenizer.json"  # never rewritten; NFS locks neither folders nor files that are open for reading
    held = os.open(path, os.O_RDWR)
    if not lock(held) or not path.exists() or not os.path.samestat(os.fstat(held), path.stat()):
        os.close(held)  # locked by another, or renamed after it was opened
        raise _in_use(workdir)
    return held


def _in_use(workdir: Path) -> UserError:
    return UserError(f"--workdir={workdir}: another process trains there: wait for it, or choose another")
