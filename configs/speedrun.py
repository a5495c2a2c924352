"""Recipes for a low loss in few tokens, and in little time, at the quickstart's size.

    attnlab train --config=speedrun:fast
    attnlab bench loss --peer_path=nanoGPT --peer_python=PYTHON --path=tinyshakespeare.txt

Validation loss on Tiny Shakespeare, in nats a character: budget 1.566, fast 1.862; nanoGPT's recipe ends at 1.905.
"""

from attnlab.config import default
from attnlab.support.names import nearest

VARIANTS = ("budget", "fast")


def get_config(variant="budget"):
    """`budget`: the lowest loss after 2,000 steps of 12 × 64 tokens; `fast`: nanoGPT's loss at that point, sooner."""
    if variant not in VARIANTS:
        raise ValueError(f"speedrun:{variant} is unknown{nearest(variant, VARIANTS)}: use one of {', '.join(VARIANTS)}")
    config = default()
    config.optimizer.name = "muon"
    if variant == "fast":
        config.steps = 200
        config.batch_size = 24  # Muon's own work does not grow with the batch
        config.optimizer.update(muon_learning_rate=0.03, warmup_steps=20)
    return config
