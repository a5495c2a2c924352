"""Eight mixers compared at the quickstart's size, on any text.

    attnlab compare --config=compare_eight_mixers --config.data.path=tinyshakespeare.txt --jobs=2
    attnlab train --config=compare_eight_mixers

Two learning rates to choose from, as the best of each in `compare_mixers` is one of them or close.
"""

from attnlab.config import default

NAMES = ("attention", "forget", "linear", "retention", "gla", "delta", "gated_delta", "mamba2")
VARIANTS = {name: {"model.mixer": name} for name in NAMES}
COMPARE = {"learning_rates": "5e-3,1.5e-2"}


def get_config():
    """The quickstart with fewer steps."""
    config = default()
    config.steps = 500
    config.eval.every = config.checkpoint.every = 250
    return config
