"""Invalid flags of every benchmark: one line, before anything runs."""

import pytest

# A command, and a part of the error message.
INVALID = [
    line.format(file=__file__).split(" | ")
    for line in """
attention --lengths=a | --lengths=a
attention --lengths=0 | --lengths=0
attention --rounds=0 | --rounds=0
attention --dtype=float16 | --dtype=float16: value should be one of
attention --masks=casual | --masks: 'casual' is unknown (did you mean causal?)
attention --peers=torch | --peers: 'torch' is unknown
attention --peers= | --peers is empty
attention --json=/nowhere/x.json | --json=/nowhere/x.json: there is no folder /nowhere
attention --plot={file} | {file} exists
attention --round=3 | Unknown command line flag 'round'. Did you mean: rounds ?
data --sizes=medium | --sizes: 'medium' is unknown
data --batches=0 | --batches=0
decode --sizes=medium | --sizes: 'medium' is unknown
decode --tokens=0 | --tokens=0
decode --num_samples=0 | --num_samples=0
decode --peer_path=/nowhere | --peer_path=/nowhere has no model.py
gpu --lengths=a | --lengths=a
gpu --head_dims=64,0 | --head_dims=64,0
gpu --masks=casual | --masks: 'casual' is unknown (did you mean causal?)
gpu --rounds=0 | --rounds=0
gpu --batch=0 | --batch=0
gpu --peak_tflops=-1 | --peak_tflops=-1.0
gpu --peer_path=/nowhere | --peer_path=/nowhere has no model.py
gpu --peer_python=/nowhere | /nowhere cannot be started (No such file or directory)
gpu --json={file} | {file} exists
saving --rounds=2 | --config is missing
start --rounds=0 | --rounds=0
start --peer_path=/nowhere | --peer_path=/nowhere has no model.py
start --config.batch_size=0 | config.batch_size = 0
start --config=nowhere.py | --config=nowhere.py: no such experiment or file
start --json=/nowhere/x.json | --json=/nowhere/x.json: there is no folder /nowhere
train --sizes=smal | --sizes: 'smal' is unknown (did you mean small?)
train --sizes= | --sizes is empty
train --precisions=float16 | --precisions: 'float16' is unknown (did you mean bfloat16?)
train --rounds=0 | --rounds=0
train --seconds=0 | --seconds=0
train --peer_path=/nowhere | --peer_path=/nowhere has no model.py
train --json={file} | {file} exists
train --profile=/nowhere/trace | there is no folder /nowhere
""".strip().splitlines()
]


@pytest.mark.parametrize("command, message", INVALID)
def test_invalid_flag_is_one_line(error_line, monkeypatch, command, message):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPU's benchmark sets both variables
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert message in error_line(*command.split(" "))


def test_peer_python_without_torch_is_one_line(error_line, peer):
    checkout, python = peer(has_torch=False)
    message = "has no torch"
    assert message in error_line("train", checkout, python)
    assert "--peer_python=/no/python cannot be started" in error_line("train", checkout, "--peer_python=/no/python")
