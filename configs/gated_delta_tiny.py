"""The quickstart with Gated DeltaNet in place of attention: a state of constant size instead of a cache.

    attnlab train --config=gated_delta_tiny
    attnlab train --config=gated_delta_tiny --config.data.path=FILE.txt

2,000 steps of 12 × 64 tokens, as in the quickstart; validation loss on the Python docs 1.209 nats per character (the
quickstart 1.254).
"""

from attnlab.config import default


def get_config():
    """Yang et al. 2025 (arXiv 2412.06464), at 0.9 million parameters."""
    config = default()
    config.model.layers = "gated_delta"
    return config
