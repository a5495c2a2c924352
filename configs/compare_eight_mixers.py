"""Eight mixers compared at the quickstart's size, on any text.

    attnlab compare --config=compare_eight_mixers --config.data.path=tinyshakespeare.txt --jobs=2
    attnlab train --config=compare_eight_mixers

Two learning rates to choose from, as the best of each in `compare_mixers` is one of them. On tinyshakespeare: 56 runs,
40 minutes on two cores of an AMD EPYC (family 25, model 17) with other work beside; loss in nats a character, mean of
five seeds ± 95 % interval: attention 1.978 ± 0.004, forget 1.980 ± 0.005, linear 2.303 ± 0.013, retention 2.041 ±
0.010, gla 2.006 ± 0.016, delta 2.029 ± 0.015, gated_delta 1.856 ± 0.003, mamba2 1.798 ± 0.012. docs/guide/mixers.md
has the table.
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
