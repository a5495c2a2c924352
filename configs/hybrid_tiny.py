"""The quickstart as a hybrid: three layers of Gated DeltaNet, then one of attention.

    attnlab train --config=hybrid_tiny
    attnlab train --config=hybrid_tiny --config.data.path=FILE.txt

2,000 steps of 12 × 64 tokens, as in the quickstart; validation loss on the Python docs 1.200 nats per character (the
quickstart 1.254, Gated DeltaNet alone 1.209).
"""

from attnlab.config import default


def get_config():
    """The ratio of Qwen3-Next and Kimi Linear, at 0.9 million parameters."""
    config = default()
    config.model.layers = "gated_delta*3 attention"
    return config
