"""Read prompts from files, and write files of texts."""

import hashlib
import json
import os
import sys
from pathlib import Path

from attnlab.support import files
from attnlab.support.errors import UserError
from attnlab.support.paths import lock, named, new_file


def read_prompts(path: str) -> list[str]:
    """Read prompts from a file, or stdin for "-": field "prompt" of each line of *.jsonl, else each non-blank line."""
    try:
        text = sys.stdin.read().removeprefix("\ufeff") if path == "-" else files.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UserError(f"--prompts={path} cannot be read: {reason}") from error
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not numbered:
        raise UserError(f"--prompts={path} has no prompts: write one per line")
    if not path.endswith(".jsonl"):
        return [line for _, line in numbered]
    return [_prompt(path, number, line) for number, line in numbered]


def _prompt(path: str, number: int, line: str) -> str:
    try:
        prompt = files.parsed(line)["prompt"]
        if isinstance(prompt, str):
            return prompt
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f'{path}, line {number}: expected {{"prompt": "a text", …}}, found {line[:60]!r}')


class Records:
    """A new JSONL file that appears when it is complete.

    Until then its lines are in a file beside it, whose name depends on `settings`. With the same settings, writing
    resumes after the last complete `group` of lines; with other settings it starts anew.
    """

    def __init__(self, path: str | Path, settings: dict, group: int = 1):
        self.path = new_file("--out", path)
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
        self._part = self.path.with_name(f".{self.path.name}.{digest}.part")
        self._file = self._part.open("a+b", buffering=0)
        if not lock(self._file.fileno()) or self.path.exists():  # another command is writing it, or just did
            self._file.close()
            raise UserError(f"--out={path}: another command is writing it: wait for it, or choose another file")
        self._file.seek(0)
        whole = [line for line in self._file.readall().splitlines(keepends=True) if line.endswith(b"\n")]
        self.count = len(whole) // group * group
        self._file.truncate(sum(map(len, whole[: self.count])))

    def write(self, *records: dict) -> None:
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        content = text.encode("utf-8", errors="replace")
        with named(self._part):
            while content:  # if the disk is nearly full, only a part is written
                content = content[self._file.write(content) :]
        self.count += len(records)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self._file.close()
        if kind is None:
            try:
                os.link(self._part, self.path)  # unlike a rename, never overwrites
            except FileExistsError as error:
                raise UserError(f"{self.path} already exists: the texts are in {self._part}") from error
            self._part.unlink()
