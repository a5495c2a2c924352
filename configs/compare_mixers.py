"""Mixers compared at the quickstart's size, with and without a convolution of neighbouring tokens.

    attnlab compare --config=compare_mixers
    attnlab compare --config=compare_mixers --config.data.path=FILE.txt --workdir=runs/mine
    attnlab train --config=compare_mixers

The model of `quickstart`, 500 steps a run. Feed-forward widths are chosen so that all have equally many parameters.

Predicted before these variants were trained: a short convolution explains more than half of the lead of Gated DeltaNet
and Mamba-2 over attention. So attention with a convolution closes more than half of each gap, and the other two lose
more than half of their leads without it. Two of these four predictions hold, one is open, and one fails: attention with
a convolution closes less than half of its gap to Mamba-2. Loss in nats per character, five seeds:
attention 1.491, with a convolution 1.375, mamba2 1.242, without 1.424, gated_delta 1.324, without 1.422, hybrid 1.323,
forget 1.505; 73 runs, 40 minutes with --jobs=2 on two cores of an Intel Xeon (family 6, model 167), 29 November 2026.
docs/guide/mixers.md has the table.
"""

from attnlab.config import default

VARIANTS = {
    "attention": {"model.layers": "attention"},
    "attention + conv": {"model.layers": "attention", "model.attention.conv": 4},
    "forget": {"model.layers": "forget"},
    "mamba2": {"model.layers": "mamba2"},
    "mamba2 - conv": {"model.layers": "mamba2", "model.mamba2.conv": 0},
    "gated_delta": {"model.layers": "gated_delta"},
    "gated_delta - conv": {"model.layers": "gated_delta", "model.gated_delta.conv": 0},
    "hybrid": {"model.layers": "gated_delta*3 attention"},
}
COMPARE = {"match": "parameters"}


def get_config():
    """The quickstart with fewer steps."""
    config = default()
    config.steps = 500
    config.eval.every = config.checkpoint.every = 100
    return config
