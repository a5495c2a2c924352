"""Invalid flags of every benchmark: one line, before anything runs."""

import pytest

# A command, and a part of the error message.
INVALID = [
    line.format(file=__file__).split(" | ")
    for line in """
attention --lengths=a | --lengths=a: expected integers of 1 or more
attention --lengths=0 | --lengths=0: expected integers of 1 or more
attention --rounds=0 | --rounds=0: expected 1 or more
attention --masks=casual | --masks: 'casual' is unknown (did you mean causal?): use causal, window, documents
attention --peers=torch | --peers: 'torch' is unknown
attention --peers= | --peers is empty: use attnlab
attention --json=/nowhere/x.json | --json=/nowhere/x.json: there is no folder /nowhere: create it, or give another file
attention --plot={file} | exists: give a new file
attention --round=3 | Unknown command line flag 'round'. Did you mean: rounds ?
data --sizes=medium | --sizes: 'medium' is unknown: use small, large
data --batches=0 | --batches=0: expected 1 or more
decode --sizes=medium | --sizes: 'medium' is unknown: use small, large
decode --tokens=0 | --tokens=0: expected 1 or more
decode --num_samples=0 | --num_samples=0: expected 1 or more
decode --peer_path=/nowhere | --peer_path=/nowhere has no model.py: give a checkout of nanoGPT
gpu --lengths=a | --lengths=a: expected integers of 1 or more
gpu --head_dims=64,0 | --head_dims=64,0: expected integers of 1 or more
gpu --masks=casual | --masks: 'casual' is unknown (did you mean causal?): use causal, window, documents
gpu --rounds=0 | --rounds=0: expected 1 or more
gpu --batch=0 | --batch=0: expected 1 or more
gpu --peak_tflops=-1 | --peak_tflops=-1.0: expected more than 0
gpu --peer_path=/nowhere | --peer_path=/nowhere has no model.py: give a checkout of nanoGPT
gpu --peer_python=/nowhere | /nowhere cannot be started (No such file or directory): give a Python
gpu --json={file} | exists: give a new file
saving --rounds=2 | --config is missing
start --rounds=0 | --rounds=0: expected 1 or more
start --peer_path=/nowhere | --peer_path=/nowhere has no model.py: give a checkout of nanoGPT
start --config.batch_size=0 | config.batch_size = 0: expected 1 or more
start --config=nowhere.py | --config=nowhere.py: no such experiment or file
start --json=/nowhere/x.json | --json=/nowhere/x.json: there is no folder /nowhere: create it, or give another file
train --sizes=smal | --sizes: 'smal' is unknown (did you mean small?): use small, large
train --sizes= | --sizes is empty: use small, large
train --precisions=float16 | --precisions: 'float16' is unknown (did you mean bfloat16?)
train --rounds=0 | --rounds=0: expected 1 or more
train --seconds=0 | --seconds=0: expected 1 or more
train --peer_path=/nowhere | --peer_path=/nowhere has no model.py: give a checkout of nanoGPT
train --json={file} | exists: give a new file
train --profile=/nowhere/trace | there is no folder /nowhere: create it, or give another folder
""".strip().splitlines()
]


@pytest.mark.parametrize("command, message", INVALID)
def test_invalid_flag_is_one_line(error_line, monkeypatch, command, message):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPU's benchmark sets both variables
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert message in error_line(*command.split(" "))


def test_peer_python_without_torch_is_one_line(error_line, peer):
    checkout, python = peer(has_torch=False)
    message = "has no torch: give a Python with torch installed"
    assert message in error_line("train", checkout, python)
    message = "error: --peer_python=/no/python cannot be started: No such file or directory\n"
    assert error_line("train", checkout, "--peer_python=/no/python") == message
