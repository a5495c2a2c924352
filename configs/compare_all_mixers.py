"""All mixers compared at the quickstart's size, on any text.

    attnlab compare --config=compare_all_mixers --config.data.path=tinyshakespeare.txt --jobs=2
    attnlab train --config=compare_all_mixers

500 steps and three seeds of each, all at one learning rate, 0.005: for eight of them, the better of 0.005 and
0.015. On tinyshakespeare: 54 runs, 68 minutes on two cores of an AMD EPYC (family 25, model 17) with other work
beside; loss in nats a character, mean ± 95 % interval: gru 1.791 ± 0.006, mamba2 1.793 ± 0.021, gated_delta 1.857 ±
0.008, attention 1.979 ± 0.007, linear 2.301 ± 0.008. docs/guide/mixers.md has the table.
"""

from attnlab.config import default
from attnlab.nn.config import KINDS

VARIANTS = {kind: {"model.layers": kind} for kind in KINDS if kind != "local"}
COMPARE = {"learning_rates": "5e-3", "seeds": "3"}


def get_config():
    """The quickstart with fewer steps."""
    config = default()
    config.steps = 500
    config.eval.every = config.checkpoint.every = 250
    return config
