"""The folder of a run: its files, its lock, and the run that an earlier start left there."""

import contextlib
import dataclasses
import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from attnlab import config as configs
from attnlab.config import RunConfig
from attnlab.data import tokenizers
from attnlab.nn import custom, records
from attnlab.support import files
from attnlab.support.errors import UserError
from attnlab.support.paths import claim, write_bytes, write_text


class Workdir:
    """The folder of a run: `config.json`, `tokenizer.json`, `metrics.jsonl`, `checkpoints/` and `tensorboard/`.

    It must lie on a POSIX file system. Opening it writes nothing.

    Attributes:
      previous_run: the content of `config.json`; None if no run has begun there.
      config: the previous run's config, from `config.json` and `config.npz`.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.previous_run, self.config = _previous_run(self.path) or (None, None)

    def __fspath__(self) -> str:
        return str(self.path)

    __str__ = __fspath__

    @property
    def steps(self) -> int | None:
        """`config.steps` of the previous run; None without a previous run."""
        return self.config and self.config.steps

    @property
    def metrics(self) -> Path:
        """`metrics.jsonl`."""
        return self.path / "metrics.jsonl"

    def checkpoint_dir(self, config: RunConfig) -> str | Path:
        """`config.checkpoint.dir`, or `checkpoints/` in the folder."""
        return config.checkpoint.dir or self.path / "checkpoints"

    def check_config(self, config: RunConfig, *, may_extend: bool) -> None:
        """Raise UserError unless a config continues the previous run, possibly with more steps if `may_extend`."""
        if self.config is None:
            return
        steps = self.steps
        if config.steps < steps:
            raise UserError(
                f"{self} holds a run of {steps} steps, and config.steps = {config.steps} is fewer: a run can be "
                f"extended, not shortened; give {steps} or more, or choose a new --workdir"
            )
        was = dataclasses.replace(self.config, steps=config.steps) if may_extend else self.config
        if difference := config.difference(was):
            raise UserError(
                f"{self} holds a run with another config ({difference}): choose a new --workdir, or repeat its command"
            )

    def extensions(self, config: RunConfig, start: int) -> list[dict]:
        """Extensions of a run that resumes from `start`: `{"at_step", "from_steps", "to_steps"}`, oldest first."""
        if self.previous_run is None or not start:
            return []
        steps, recorded = self.steps, self.previous_run.get("extensions", [])
        if config.steps == steps:
            return recorded
        # If newer checkpoints are damaged, a run may resume before its last extensions: replace these.
        undone = [extension for extension in recorded if extension["at_step"] >= start]
        extension = {"at_step": start, "from_steps": steps, "to_steps": config.steps}
        if undone:
            extension["from_steps"] = undone[0]["from_steps"]
        return [*recorded[: len(recorded) - len(undone)], extension]

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Context in which only this process trains in the folder; creates the folder if it is missing."""
        # Lock the tokenizer's file, which is never replaced; NFS locks neither folders nor files open for reading.
        with claim(self.path, "--workdir", _foreign, marker="tokenizer.json"):
            if self.previous_run is None and (self.path / "config.json").exists():
                raise UserError(f"--workdir={self}: another process has begun a run there: choose another folder")
            yield

    def create(self, config_json: str, config: RunConfig, tokenizer: tokenizers.Tokenizer) -> None:
        """Write the files of a new run to a claimed folder; `config.json` is last, because it makes the folder a run.

        The code of custom layers, masks and score mods is copied to `source/`; arrays go to `config.npz`.
        """
        tokenizers.save(tokenizer, self.path / "tokenizer.json")
        for source in (source for source in custom.sources(config.model.layers).values() if source.text):
            (self.path / "source").mkdir(exist_ok=True)
            write_text(self.path / "source" / source.path.name, source.text)
        if arrays := records.arrays_of(config.model.layers):
            np.savez(content := io.BytesIO(), **arrays)
            write_bytes(self.path / "config.npz", content.getvalue())
        write_text(self.path / "config.json", config_json)

    def write_config(self, config_json: str) -> None:
        """Replace `config.json` atomically, if it differs: `checkpoint.dir` and the like may change between starts."""
        path = self.path / "config.json"
        if path.read_text(encoding="utf-8") != config_json:
            write_text(path, config_json)


def read_config(workdir: Path) -> dict:
    """The content of `config.json` in a workdir; UserError if it is missing or damaged."""
    return read_run(workdir)[0]


def read_run(workdir: Path) -> tuple[dict, RunConfig]:
    """The content of `config.json` in a workdir, and its config; UserError if it is missing or damaged."""
    path = workdir / "config.json"
    try:
        saved = files.read_json(path)
        if is_run := "model_type" not in saved or "corpus" in saved:
            _check_format(saved, path)
            _check_metadata(saved)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{workdir} holds no run (no config.json): train one with --workdir={workdir}") from error
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error
    if not is_run:
        raise UserError(f"{workdir} holds a Hugging Face model, not a run of attnlab: choose another folder")
    custom.check_imported(saved.get("code", {}), workdir)
    try:
        return saved, configs.from_json(saved, _arrays(workdir / "config.npz"))
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error


def _arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a config, by sha256; {} without the file."""
    try:
        with np.load(path) as arrays:
            return dict(arrays)
    except FileNotFoundError:
        return {}
    except Exception as error:  # from zipfile, NumPy or the disk
        raise UserError(f"{path} is damaged ({error}): restore it, or train in a new workdir") from error


def _check_format(saved: dict, path: Path) -> None:
    if (saved_format := saved.get("format", 0)) not in (1, configs.FORMAT) and "steps" in saved:
        raise UserError(
            f"{path} has format {saved_format}, and this version of attnlab reads 1 and {configs.FORMAT}: use the "
            "version that wrote it, or train again in a new --workdir"
        )


def _check_metadata(saved: dict) -> None:
    """Raise ValueError, or the error of a failed look-up, unless the metadata has the form that a run writes."""
    extensions, passed = saved.get("extensions", []), saved.get("user_defined", {"model": None, "optimizer": False})
    is_valid = (
        isinstance(saved["corpus"]["sha256"], str)
        and all("file" in source for source in saved.get("code", {}).values())
        and all({"trace", "libraries", "numbers"} <= code.keys() for code in saved.get("versions", {}).values())
        and all(isinstance(each[name], int) for each in extensions for name in ("at_step", "from_steps", "to_steps"))
        and {"model", "optimizer"} <= passed.keys()
    )
    if not is_valid:
        raise ValueError("its metadata has another form")


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is damaged ({error}): restore it, or train in a new workdir")


def read_tokenizer(workdir: Path, saved: dict) -> tokenizers.Tokenizer:
    """The tokenizer in a workdir; UserError if it is missing, damaged, or not the tokenizer of `saved`."""
    path = workdir / "tokenizer.json"
    tokenizer = tokenizers.load(path)
    actual, expected = hashlib.sha256(files.read(path)).hexdigest(), saved.get("tokenizer_sha256")
    if actual != expected:
        raise UserError(
            f"{path} belongs to another run (sha256 {actual}, expected {expected}): restore this run's file"
        )
    return tokenizer


def _previous_run(workdir: Path) -> tuple[dict, RunConfig] | None:
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"--workdir={workdir} is a file: name a folder")
    if (workdir / "config.json").exists():
        return read_run(workdir)
    if workdir.exists() and (why := _foreign(os.listdir(workdir))):
        raise UserError(f"--workdir={workdir} {why}: choose a new folder")
    return None


def _foreign(names: list[str]) -> str:
    """Why a folder with files of these names cannot hold a run; "" if it can."""
    begun = ("tokenizer.json", ".config.json.")  # files of a run that was killed while it began
    begun += ("source", "config.npz", ".config.npz.") if "tokenizer.json" in names else ()
    is_ours = "config.json" in names or all(name.startswith(begun) for name in names)
    return "" if is_ours else "holds other files and no run"
