"""A small GPT on real text, on a laptop, in minutes.

    attnlab train --config=quickstart
    attnlab train --config=quickstart --workdir=runs/mine --config.data.path=FILE.txt

2,000 steps of 12 × 64 tokens; 0.8 million parameters. One to two minutes on two CPU cores. Final loss in nats
per character on the last tenth of each text, held out: 1.25 on the Python language reference (Python 3.11), 1.72 on
the 1.1 MB of tinyshakespeare (nanoGPT publishes 1.88 for the same budget), 1.54 on the Quijote.
"""

from attnlab.config import default


def get_config():
    """The defaults."""
    return default()
