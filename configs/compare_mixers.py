"""Five mixers compared at the quickstart's size: which one learns a text fastest, and what does it keep to decode?

    attnlab compare --config=compare_mixers
    attnlab compare --config=compare_mixers --config.data.path=FILE.txt --workdir=runs/mine
    attnlab train --config=compare_mixers

The model of `quickstart`, 500 steps a run; 45 runs.
"""

from attnlab.config import default

VARIANTS = {
    "attention": {"model.mixer": "attention"},
    "forget": {"model.mixer": "forget"},
    "mamba2": {"model.mixer": "mamba2"},
    "gated_delta": {"model.mixer": "gated_delta"},
    "hybrid": {"model.pattern": "gated_delta gated_delta gated_delta attention"},
}


def get_config():
    """The quickstart with fewer steps."""
    config = default()
    config.steps = 500
    config.eval.every = config.checkpoint.every = 100
    return config
