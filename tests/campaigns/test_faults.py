"""A sample of each fault campaign with real processes, its flags, and a disk that fills while saving."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attnlab import commands
from tests.campaigns import faults

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def mounts(tmp_path_factory):
    """Skips a test if file systems cannot be mounted."""
    folder = tmp_path_factory.mktemp("mount")
    if shutil.which("mount") is None or subprocess.run(["mount", "-t", "tmpfs", "none", folder]).returncode:
        pytest.skip("a small file system cannot be mounted here: be root, outside a sandbox")
    subprocess.run(["umount", folder], check=True)


SAMPLE = {"kills": 3, "stops": 1, "corruptions": 4, "full_disks": 1}


@pytest.mark.parametrize(
    "campaign, count",
    [
        pytest.param(name, count, marks=pytest.mark.slow if name in ("kills", "full_disks") else pytest.mark.campaign)
        for name, count in SAMPLE.items()
    ],
)
def test_sample_of_a_campaign_finds_nothing_wrong(tmp_path, campaign, count, request):
    if campaign == "full_disks":
        request.getfixturevalue("mounts")
    figures = tmp_path / "faults.json"
    command = [sys.executable, "-m", "tests.campaigns.faults", f"--{campaign}={count}", f"--json={figures}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(figures.read_text())[campaign]
    assert result["wrong"] == []
    if campaign == "kills":
        # A short phase may be over when the signal arrives, which then counts for the next one.
        assert sum(result["phases"].values()) == count and len([n for n in result["phases"].values() if n]) > 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "nothing to do: give --kills, --stops, --together, --corruptions or --full_disks"),
        (["--kills=-1"], "--kills=-1: expected 0 or more"),
        (["--json=README.md", "--kills=1"], "--json=README.md exists: give a new file"),
    ],
)
def test_invalid_flag_prints_one_line(capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(REPOSITORY)
    assert commands.run(faults.define, faults.main, faults.__doc__, ["faults", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


SAVE_WITHOUT_SPACE = """
import sys
import numpy as np
from attnlab.support.errors import UserError
from attnlab.training.checkpoints import Checkpoints
from attnlab.training.state import TrainState

checkpoints = Checkpoints(sys.argv[1], keep=99)
try:
    for step in range(1, 99):
        checkpoints.save(TrainState(np.int32(step), {"w": np.zeros(9999, np.float32)}, (np.zeros(9),)))
        checkpoints.wait()
except UserError as error:
    print(error)
checkpoints.close()
print(checkpoints.steps()[:2], {checkpoints.damage(step) for step in checkpoints.steps()})
"""


def test_process_without_disk_space_ends_and_keeps_checkpoints(tmp_path, mounts):
    """With this `nr_inodes` a folder of the third checkpoint cannot be created, on which the process used to hang."""
    with faults._small_file_system(tmp_path / "disk", "nr_inodes=62"):
        command = [sys.executable, "-c", SAVE_WITHOUT_SPACE, str(tmp_path / "disk" / "kept")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    error, checkpoints = done.stdout.splitlines()
    assert done.returncode == 0 and "a checkpoint cannot be written to" in error
    assert checkpoints == "[1, 2] {''}"
