"""Attnlab's data in the user's cache folder: token stores, and results remembered between runs as JSON files.

A remembered result may be lost at any time: files that are missing, damaged or not writable are ignored.
"""

import contextlib
import hashlib
import json
import os
from pathlib import Path

from attnlab.support import files
from attnlab.support.paths import write_bytes


def folder() -> Path | None:
    """The folder `attnlab/tokens` in XDG_CACHE_HOME, or in ~/.cache; None without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "attnlab" / "tokens"
    except RuntimeError:
        return None


def digest(value) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def recall(kind: str, key) -> dict | None:
    """The JSON object remembered under a key, or None."""
    file = _file(kind, key)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        saved = files.read_json(file) if file else {}
        if saved["sha256"] == digest(saved["fact"]):
            return saved["fact"]
    return None


def remember(kind: str, key, fact: dict) -> None:
    """Remember a JSON object under a JSON key, which should contain the sizes and times of the files it depends on."""
    file = _file(kind, key)
    with contextlib.suppress(OSError):
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(file, json.dumps({"fact": fact, "sha256": digest(fact)}).encode(), sync=True)


def _file(kind: str, key) -> Path | None:
    home = folder()
    return home and home / kind / f"{digest(key)[:32]}.json"
