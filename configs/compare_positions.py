"""Five kinds of positions in a small GPT compared: which has the lowest loss, within the context and beyond it?

    attnlab compare --config=compare_positions
    attnlab compare --config=compare_positions --config.data.path=FILE.txt --workdir=runs/mine
    attnlab train --config=compare_positions

The model of `quickstart`, 600 steps a run; 45 runs, about twenty minutes on two CPU cores.
"""

from attnlab.config import default

VARIANTS = {
    "rotary": {"model.positions": "rotary"},
    "alibi": {"model.positions": "alibi"},
    "learned": {"model.positions": "learned"},
    "sinusoidal": {"model.positions": "sinusoidal"},
    "none": {"model.positions": "none"},
}


def get_config():
    """The quickstart with fewer steps."""
    config = default()
    config.steps = 600
    config.eval.every = config.checkpoint.every = 100
    return config
