"""The command that checks a function against the specification."""

import json
import sys

import pytest

from attnlab import conform
from attnlab.support import paths
from attnlab.support.errors import UserError
from attnlab.testing import worker
from tests.ops.cases import slow

MODULE = """
import os, time, attnlab
from attnlab.testing import as_attnlab

def right(**call):
    print("a function may print")
    return attnlab.attention(**call)

def crashes(q, k, v, mask=None, bias=None):
    if mask is not None:
        os.abort()
    if bias is not None:
        raise SystemExit  # with 0
    return attnlab.attention(q, k, v)

def hangs(q, k, v, mask=None):
    while mask is not None:
        time.sleep(1)
    return attnlab.attention(q, k, v)

def adapt(call):
    return as_attnlab(call.replace(mask=None, bias=None))

def adapts_to_a_list(call):
    return [call.q]

def recurrence(q, k, v, g=None):
    return attnlab.linear_recurrence(q, k, v, g)

"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "quits.py").write_text("raise SystemExit(0)")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words):
    return conform.main(["attnlab conform", *words])


def test_right_function_exits_with_0_and_writes_json_and_page(here, capsys):
    assert run("mine:right", "--features=causal,masked rows", "--cases=2", "--nogradients", "--out=found") == 0
    report = json.loads((here / "found" / "conformance.json").read_text())
    assert [(row["feature"], row["outcome"]) for row in report["rows"]] == [
        ("causal", "right"),
        ("masked rows", "right"),
    ]
    assert report["meanings"]["a fully masked row returns"] == "0"
    page = (here / "found" / "conformance.html").read_text()
    assert "mine:right" in page and "masked rows" in page and "<script>" in page
    assert "causal       right" in capsys.readouterr().out


def test_folder_with_other_files_or_in_use_is_refused(here, capsys):
    (here / "found").mkdir()
    (here / "found" / "conformance.json").touch()  # left by an earlier check
    with paths.claim(here / "found", "--out", lambda names: ""):
        assert run("mine:right", "--features=causal", "--cases=1", "--out=found") == 2
    assert "--out=found: another command is running there" in capsys.readouterr().err
    (here / "found" / "mine.txt").touch()
    assert run("mine:right", "--features=causal", "--cases=1", "--out=found") == 2
    assert "--out=found holds mine.txt, which an earlier check did not write" in capsys.readouterr().err


def test_ignored_mask_exits_with_1_and_shows_the_call(here, capsys):
    options = ["--adapter=mine:adapt", "--features=window,bias", "--cases=2", "--nogradients", "--out=found"]
    assert run("attnlab:attention", *options) == 1
    out = capsys.readouterr().out
    assert "ignored" in out and "call = AttentionCall(" in out and "masks.SlidingWindow(left=" in out
    assert json.loads((here / "found" / "conformance.json").read_text())["rows"][1]["outcome"] == "ignored"


def test_crashing_function_is_reported_and_checks_continue(here, capsys):
    assert run("mine:crashes", "--features=causal,bias,plain", "--cases=2", "--nogradients") == 1
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[:3]]
    assert lines == [["causal", "wrong"], ["bias", "wrong"], ["plain", "right"]]


@pytest.mark.slow
def test_hanging_function_is_reported_and_checks_continue(here, capsys):
    assert run("mine:hangs", "--features=causal,plain", "--cases=2", "--nogradients", "--timeout=15") == 1
    causal, plain, last = capsys.readouterr().out.splitlines()
    assert causal.endswith("it did not return within 15 s (--timeout)") and plain.split()[1] == "right"
    assert last == "2 features: 1 right, 1 wrong; 1 fault"


def test_recurrence_is_checked_by_its_features(here, capsys):
    sizes = ["--lengths=1,9", "--head_dims=16", "--dtype=bfloat16"]
    assert run("mine.py:recurrence", "--recurrence", "--features=decay,beta", "--cases=4", "--nogradients", *sizes) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[:2]] == [
        ["decay", "right"],
        ["beta", "refused"],
    ]


def test_missing_platform_gives_no_verdict(here, capsys, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "nosuch")
    assert run("mine:right", "--features=plain") == 2
    assert capsys.readouterr().err.startswith("error: JAX finds no device: Unable to initialize backend 'nosuch'")


@pytest.mark.parametrize(
    "words, message",
    [
        (["quits:f"], "quits:f: it ended its process with exit code 0"),
        slow(["mine:recurrence", "--features=causal"], "mine:recurrence refused all features, so nothing was compared"),
        (["mine:right", "--features=decay"], "features of a linear recurrence need --recurrence"),
        (["mine:right", "--dtype=bfloat16"], "--dtype needs --recurrence: add that, or remove --dtype"),
        (["mine:right", "--recurrence", "--lengths=4,x"], "--lengths=4,x: expected positive numbers, such as 64,128"),
        (["mine:right", "--out=mine.py/sub"], "--out=mine.py/sub cannot be written (Not a directory)"),
        (["mine:right", "causal"], "(mine:right, causal): expected one, and options as --name=value"),
        (["mine:right", "--features=flash"], "--features: 'flash' is unknown: use some of plain"),
    ],
)
def test_user_mistake_prints_one_line(here, words, message, capsys):
    assert run(*words) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "function, adapter, message",
    [
        ("mine:right", "mine:adapts_to_a_list", "the adapter returned a list, expected"),
        ("nowhere:f", None, "nowhere cannot be imported"),
        ("mine", None, "mine: expected the function as module:name"),
        ("mine:absent", None, "mine has no absent: expected the function as module:name"),
    ],
)
def test_worker_names_what_is_wrong_with_a_function(here, monkeypatch, function, adapter, message):
    monkeypatch.syspath_prepend(here)
    monkeypatch.setattr(worker, "_say", lambda **_: None)
    monkeypatch.setitem(sys.modules, "mine", None)
    monkeypatch.delitem(sys.modules, "mine")  # imported anew, and forgotten afterwards
    request = {"function": function, "adapter": adapter, "features": ["plain"], "gradients": False, "cases": 1}
    with pytest.raises(UserError, match=message):
        worker.main(request | {"recurrence": False})
