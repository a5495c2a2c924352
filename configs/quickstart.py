"""A small GPT on real text, on a laptop, in minutes.

    python -m attnlab.train --config=configs/quickstart.py
    python -m attnlab.train --config=configs/quickstart.py --workdir=runs/mine --config.data.path=FILE.txt

2,000 steps of 12 × 64 tokens; 0.8 million parameters. Two CPU cores take about two minutes. Validation loss at the
end, in nats per character, each text's last tenth held out: 1.25 on the Python language reference (Python 3.11),
1.72 on the 1.1 MB of Shakespeare that the field uses (nanoGPT publishes 1.88 for the same budget), 1.54 on the Quijote.
"""

from attnlab.config import default


def get_config():
    """The defaults."""
    return default()
