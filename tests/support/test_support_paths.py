"""Output folders are claimed by one command, and files are written whole or not at all."""

import fcntl
import math
import os

import numpy as np
import pytest

from attnlab.support import paths
from attnlab.support.errors import UserError


def claim(folder, marker=""):
    return paths.claim(folder, "--out", lambda names: "is not empty" if names else "", marker)


@pytest.mark.parametrize("marker", ["", "run.json"])
def test_claimed_folder_is_in_use_until_the_end(tmp_path, marker):
    folder = tmp_path / "new" / "folder"
    with claim(folder, marker):
        anywhere = paths.claim(folder, "--out", lambda names: "", marker)
        with pytest.raises(UserError, match="--out=.*folder: another command is running there"), anywhere:
            pass
    with paths.claim(folder, "--out", lambda names: "", marker):
        assert os.listdir(folder) == [marker] * bool(marker)


def test_folder_is_removed_after_an_error_only_if_it_is_new_and_empty(tmp_path):
    (tmp_path / "old").mkdir()
    for name in ("new", "old", "full"):
        with pytest.raises(ZeroDivisionError), claim(tmp_path / name):
            (tmp_path / "full" / "file").touch() if name == "full" else None
            raise ZeroDivisionError
    assert sorted(os.listdir(tmp_path)) == ["full", "old"]


def test_folder_that_cannot_be_claimed_raises_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for name, message in (
        ("file", "--out={} is a file"),
        ("file/in", "--out={} cannot be written (Not a directory)"),
        (".", "--out={} is not empty"),
        ("x" * 300, "--out={} cannot be written (File name too long)"),
        ("new", "--out={} cannot be written (Permission denied)"),
    ):
        if name == "new":
            monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
        with pytest.raises(UserError) as error, claim(tmp_path / name):
            pass
        assert str(error.value).startswith(message.format(tmp_path / name)) and "\n" not in str(error.value)


def test_folder_is_claimed_if_locks_are_unsupported(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with claim(tmp_path / "new"):
        assert (tmp_path / "new").is_dir()


def test_text_that_cannot_be_written_leaves_the_earlier_file(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    paths.write_text(path, "one")

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError) as error:
        paths.write_text(path, "two")
    assert error.value.filename == str(path) and path.read_text() == "one" and os.listdir(tmp_path) == ["a.txt"]


def test_csv_has_all_columns_and_empty_cells_for_missing_values(tmp_path):
    rows = [{"a": 1, "b": "x, y"}, {"a": math.nan, "c": np.float32("nan")}, {"b": None, "c": True}]
    paths.write_csv(tmp_path / "a.csv", rows)
    assert (tmp_path / "a.csv").read_bytes() == b'a,b,c\n1,"x, y",\n,,\n,,True\n'
