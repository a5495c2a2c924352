"""What tests of the races share: a size that takes no time, and somebody who plays nanoGPT."""

import sys

import pytest

from attnlab.bench import workers

TINY = {"num_layers": 1, "num_heads": 2, "width": 8, "context": 8, "batch_size": 4}
PEER = """#!{python}
import json, sys

if sys.argv[1] == "-c":  # asked for torch
    sys.exit(not {has_torch})
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == {dies_of!r}:
        raise RuntimeError("no more")
    seconds = 2.0 * request.get("steps", 1) / (2 if request.get("compiled") else 1)
    print(json.dumps({{"seconds": seconds, "parameters": 1, "loss": 1.0}}), flush=True)
"""


@pytest.fixture
def tiny(monkeypatch):
    """The flag of a size that takes no time."""
    monkeypatch.setitem(workers.SIZES, "tiny", TINY)
    return "--sizes=tiny"


@pytest.fixture
def peer(tmp_path):
    """Makes the flags of a stand-in for nanoGPT, that answers but does nothing."""

    def flags(has_torch: bool = True, dies_of: str = "") -> list[str]:
        checkout, python = tmp_path / "nanoGPT", tmp_path / "python"
        checkout.mkdir()
        (checkout / "model.py").touch()
        python.write_text(PEER.format(python=sys.executable, has_torch=has_torch, dies_of=dies_of))
        python.chmod(0o755)
        return [f"--peer_path={checkout}", f"--peer_python={python}"]

    return flags
