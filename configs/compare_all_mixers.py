"""All mixers compared at the quickstart's size, on any text.

    attnlab compare --config=compare_all_mixers --config.data.path=tinyshakespeare.txt --jobs=2
    attnlab train --config=compare_all_mixers

500 steps and three seeds each, at the best of three learning rates, or of more if the best is the lowest or highest.
Feed-forward widths are chosen so that all variants have equally many parameters. 126 runs or more, an hour on two
cores, but never run to the end. The table in docs/guide/mixers.md used --learning_rates=5e-3 --match=none.
"""

from attnlab.config import default
from attnlab.nn.config import KINDS

VARIANTS = {kind: {"model.layers": kind} for kind in KINDS if kind != "local"}
VARIANTS |= {
    "attention + conv": {"model.layers": "attention", "model.attention.conv": 4},
    "mamba2 - conv": {"model.layers": "mamba2", "model.mamba2.conv": 0},
    "gated_delta - conv": {"model.layers": "gated_delta", "model.gated_delta.conv": 0},
}
COMPARE = {"learning_rates": "1.7e-3,5e-3,1.5e-2", "seeds": "3", "match": "parameters"}


def get_config():
    """The quickstart with fewer steps."""
    config = default()
    config.steps = 500
    config.eval.every = config.checkpoint.every = 250
    return config
