"""Five mixers compared at the quickstart's size: which one learns a text fastest, and what does it keep to decode?

    attnlab compare --config=compare_mixers
    attnlab compare --config=compare_mixers --config.data.path=FILE.txt --workdir=runs/mine
    attnlab train --config=compare_mixers

The model of `quickstart`, 500 steps a run; 45 runs, 40 minutes on two cores of an AMD EPYC (family 25, model 17). Loss
in nats a character, mean of five seeds ± 95 % interval, and to 4 × the training length: attention 1.490 ± 0.011 and
1.748, forget 1.496 ± 0.017 and 1.477, mamba2 1.258 ± 0.006 and 1.245, gated_delta 1.319 ± 0.008 and 1.304, hybrid
1.320 ± 0.007 and 1.322. docs/guide/mixers.md has the table.
"""

from attnlab.config import default

VARIANTS = {
    "attention": {"model.layers": "attention"},
    "forget": {"model.layers": "forget"},
    "mamba2": {"model.layers": "mamba2"},
    "gated_delta": {"model.layers": "gated_delta"},
    "hybrid": {"model.layers": "gated_delta*3 attention"},
}


def get_config():
    """The quickstart with fewer steps."""
    config = default()
    config.steps = 500
    config.eval.every = config.checkpoint.every = 100
    return config
