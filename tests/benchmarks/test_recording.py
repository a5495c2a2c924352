"""Figures on file, one file for each machine."""

import json

import pytest
from absl import flags

from attnlab._benchmarks.harness import recording


@pytest.fixture
def record(tmp_path):
    """Records cases in a folder, as a benchmark with --record does; returns the file's content."""

    def add(benchmark: str, cases: dict) -> dict:
        values = flags.FlagValues()
        recording.define(values)
        values(["bench", f"--record={tmp_path}"])
        recording.check(values)
        recording.add(values, benchmark, cases)
        (file,) = tmp_path.iterdir()
        assert file.name == recording.file_name(recording.machine())
        return json.loads(file.read_text())

    return add


def test_record_replaces_its_cases_and_keeps_the_others(record):
    record("train", {"small": {"ms": 1.0, "mib": None}, "large": {"ms": 2.0}})
    record("products", {"small": {"ms": 3.0}})
    found = record("train", {"small": {"faster_ms": 1 / 3, "by": {"x": 2}}})
    assert found["machine"] == recording.machine()
    figures = {
        name: {case: each["figures"] for case, each in cases.items()} for name, cases in found["benchmarks"].items()
    }
    assert figures == {
        "train": {"small": {"faster_ms": 0.333333, "by": {"x": 2}}, "large": {"ms": 2.0}},
        "products": {"small": {"ms": 3.0}},
    }


def test_record_tells_date_versions_and_whether_the_machine_was_idle(record):
    case = record("train", {"small": {"ms": 1.0}})["benchmarks"]["train"]["small"]
    assert set(case) == {"date", "versions", "idle", "busy_cores_before", "stolen_cores", "figures"}
    assert case["versions"]["jax"] and case["date"].startswith("20")
    assert case["idle"] in (True, False, None) and (case["idle"] is None) == (case["stolen_cores"] is None)


def test_record_without_the_flag_writes_nothing():
    values = flags.FlagValues()
    recording.define(values)
    values(["bench"])
    recording.check(values)
    recording.add(values, "train", {"small": {}})


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "is not a record of benchmarks"),
        ("[]", "is not a record of benchmarks"),
        (json.dumps({"machine": recording.machine() | {"cores": 999}, "benchmarks": {}}), "its cores is 999, not"),
    ],
    ids=["damaged", "another file", "another machine"],
)
def test_record_in_a_file_of_something_else_leaves_it_alone(error_line, tmp_path, content, message):
    file = tmp_path / recording.file_name(recording.machine())
    file.write_text(content)
    assert message in error_line("products", f"--record={tmp_path}") and file.read_text() == content
