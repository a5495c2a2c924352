"""`attnlab study all`: every study in its own process, one report, and what remains if some fail or all are killed."""

import re
import signal
import subprocess
import sys
import time

import pytest

from attnlab.study import __main__ as study
from tests.texts import STUDY


def run(*argv):
    return study.main(["study", "all", *map(str, argv)])


@pytest.fixture
def files(tmp_path):
    """User-defined studies: one that holds, one that does not, one that fails, one that kills its process."""
    contents = {
        "holds": STUDY,
        "fails": STUDY.replace("(seed + 2) ** 2", "1 // seed"),
        "refuted": STUDY.replace("** 2", "* 1").replace("Squares", "Multiples"),
        "dies": STUDY.replace("    advance(2)", "    import os\n    os.kill(os.getpid(), 9)"),
    }
    (tmp_path / "mine").mkdir()
    for name, content in contents.items():
        (tmp_path / "mine" / f"{name}.py").write_text(content, encoding="utf-8")
    return {name: str(tmp_path / "mine" / f"{name}.py") for name in contents}


@pytest.mark.slow
def test_failing_studies_do_not_end_all_and_a_second_run_keeps_results(tmp_path, files, capfd):
    out = tmp_path / "all"
    command = ["--only", ",".join(files.values()), "--out", out, "--fast"]
    assert run(*command) == 1
    printed = capfd.readouterr()
    assert "fails          failed: " in printed.out and "ZeroDivisionError" in printed.out
    assert "dies           failed: killed by signal 9" in printed.out
    assert "refuted        does not hold" in printed.out and "holds          holds" in printed.out
    assert printed.err == f"error: fails, dies failed: see {out / 'logs'}\n"
    report = (out / "report.html").read_text(encoding="utf-8")
    assert "1 of 2 claims hold; 2 failed to run" in report and "all are &lt;larger&gt;" in report
    assert "jax 0." in report and "For whole numbers" in report
    assert report.count("<img") == report.count('src="data:image/png;base64,') == 2
    folders = {path.name for path in out.iterdir() if path.is_dir() and any(path.iterdir())}
    assert folders == {"holds", "logs", "refuted"}

    times = {name: (out / name / "result.json").stat().st_mtime_ns for name in ("holds", "refuted")}
    (tmp_path / "mine" / "fails.py").write_text(STUDY, encoding="utf-8")
    (tmp_path / "mine" / "dies.py").write_text(STUDY, encoding="utf-8")
    assert run(*command) == 0
    assert "2 of 4 studies have already run" in capfd.readouterr().out
    assert times == {name: (out / name / "result.json").stat().st_mtime_ns for name in times}
    assert "3 of 4 claims hold" in (out / "report.html").read_text(encoding="utf-8")

    assert run(*command[:-1]) == 2  # without --fast
    assert "run with --fast" in capfd.readouterr().err


@pytest.mark.slow
def test_killed_study_all_resumes(tmp_path, files):
    (tmp_path / "mine" / "fails.py").write_text(STUDY.replace("    advance(2)", "    time.sleep(600)"))
    out = tmp_path / "all"
    command = [sys.executable, "-m", "attnlab.study", "all", f"--out={out}"]
    child = subprocess.Popen([*command, f"--only={files['holds']},{files['fails']}"], stdout=subprocess.DEVNULL)
    while not ((out / "logs" / "fails.txt").exists() and (out / "holds" / "result.json").exists()):
        assert child.poll() is None
        time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    assert child.wait(120) == 130
    assert not subprocess.run(["pgrep", "-f", files["fails"]], capture_output=True).stdout
    (tmp_path / "mine" / "fails.py").write_text(STUDY)
    again = subprocess.run([*command, f"--only={files['holds']},{files['fails']}"], capture_output=True, text=True)
    assert again.returncode == 0 and "1 of 2 studies have already run" in again.stdout


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--only=mine.py,sub/mine.py"], "--only names mine twice"),
        (["--jobs=0"], "jobs"),
        (["--out=taken"], "--out=taken holds other files and no report.html"),
    ],
    ids=["twice", "jobs", "foreign"],
)
def test_invalid_flag_of_study_all_prints_one_line(tmp_path, monkeypatch, mistake, flags, message):
    monkeypatch.chdir(tmp_path)
    for name, content in {"taken/letter.txt": "mine", "mine.py": STUDY, "sub/mine.py": STUDY}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert re.search(message, mistake(study.main, "all", *flags))
    assert (tmp_path / "taken" / "letter.txt").read_text() == "mine" and not (tmp_path / "runs").exists()
