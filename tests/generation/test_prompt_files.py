"""Prompts from files, and JSONL files of texts, which appear only when complete."""

import io
import json
import os
import re

import pytest

from attnlab.generation.prompt_files import Records, read_prompts
from attnlab.support.errors import UserError


def test_prompts_are_the_lines_or_fields_of_a_file(tmp_path, monkeypatch):
    (tmp_path / "prompts.txt").write_text("\ufeffone\r\n\n two \u2028x\n")
    assert read_prompts(str(tmp_path / "prompts.txt")) == ["one", " two \u2028x"]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one\\ntwo", "id": 3}\n{"prompt": ""}\n')
    assert read_prompts(str(tmp_path / "prompts.jsonl")) == ["one\ntwo", ""]
    monkeypatch.setattr("sys.stdin", io.StringIO("\ufeffa\nb"))
    assert read_prompts("-") == ["a", "b"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("nowhere.txt", None, "nowhere.txt cannot be read"),
        ("a.txt", b"\xff\xfe", "a.txt cannot be read: it is not UTF-8"),
        ("a.txt", b"\n \n", "has no prompts"),
        ("a.jsonl", b'{"prompt": "x"}\nplain\n', "a.jsonl, line 2: .*'plain'"),
        ("a.jsonl", b'{"text": "x"}', 'a.jsonl, line 1: .*{"text": "x"}'),
        ("a.jsonl", b'["x"]', r'a.jsonl, line 1: .*\["x"\]'),
        ("a.jsonl", b'{"prompt": 3}', 'a.jsonl, line 1: .*{"prompt": 3}'),
    ],
)
def test_malformed_file_raises_one_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        read_prompts(str(tmp_path / name))
    assert re.search(message, str(error.value)) and "\n" not in str(error.value)


def test_interrupted_records_resume_after_the_last_whole_group(tmp_path):
    path = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt), Records(path, {"seed": 0}, group=2) as records:
        records.write({"n": 0}, {"n": 1})
        records.write({"n": 2})
        raise KeyboardInterrupt
    assert not path.exists()
    (part,) = tmp_path.iterdir()
    part.write_bytes(part.read_bytes() + b'{"n": 3')  # as a kill leaves it
    with Records(path, {"seed": 0}, group=2) as records:
        assert records.count == 2
        records.write({"n": 2}, {"n": 3})
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [0, 1, 2, 3]
    assert list(tmp_path.iterdir()) == [path]


def test_file_that_another_command_writes_is_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    with Records(path, {"seed": 0}) as records:
        records.write({"n": 0})
        with pytest.raises(UserError, match="out.jsonl: another command is writing it"):
            Records(path, {"seed": 0})
        records.write({"n": 1})
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [0, 1]


def test_full_disk_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(OSError) as error, Records(tmp_path / "out.jsonl", {}) as records:
        with open("/dev/full", "ab") as full:
            os.dup2(full.fileno(), records._file.fileno())
        records.write({"n": 0})
    assert error.value.filename.endswith(".part")


def test_other_settings_start_from_the_beginning(tmp_path):
    path = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt), Records(path, {"seed": 0}) as records:
        records.write({"n": 0})
        raise KeyboardInterrupt
    with Records(path, {"seed": 1}) as records:
        assert records.count == 0
    assert path.read_text() == ""


def test_existing_file_is_never_overwritten(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("mine")
    with pytest.raises(UserError, match="out.jsonl exists"):
        Records(path, {})
    with pytest.raises(UserError, match="the folder .*/no is missing or not writable: "):
        Records(tmp_path / "no" / "out.jsonl", {})
    path.unlink()
    with pytest.raises(UserError, match="out.jsonl already exists"), Records(path, {}) as records:
        records.write({"n": 0})
        path.write_text("mine")
    assert path.read_text() == "mine"
