"""sancho-mini: a character GPT that writes like Cervantes.

    attnlab train --config=sancho
    attnlab train --config=sancho:tiny

downloads the Quijote from Project Gutenberg. Without a network, name a text:

    attnlab train --config=sancho:tiny --config.data.path=quijote.txt

Validation loss in nats per character on the last tenth of the 2.1 million, and time on two CPU cores:

    tiny    4 × 128, context 64,  2,000 steps of 12 sequences   1.54   two minutes
    small   4 × 192, context 128, 4,000 steps of 16 sequences   1.25   a quarter of an hour
    full    6 × 384, context 256, 5,000 steps of 64 sequences   not measured; meant for a GPU
"""

from attnlab.config import default
from attnlab.support.names import nearest

VARIANTS = ("full", "small", "tiny")


def get_config(variant="full"):
    """`full`: 6 layers, 6 heads, width 384, context 256. `small` and `tiny` are for machines without a GPU."""
    if variant not in VARIANTS:
        raise ValueError(f"sancho:{variant} is unknown{nearest(variant, VARIANTS)}: use one of {', '.join(VARIANTS)}")
    config = default()
    config.data.name = "quijote"
    if variant == "full":
        config.steps = 5000
        config.batch_size = 64
        config.model.update(num_layers=6, num_heads=6, width=384, context=256, dropout=0.2)
        config.optimizer.update(learning_rate=2e-3, warmup_steps=200)
        config.eval.every = 500
        config.checkpoint.every = 500
    elif variant == "small":
        config.steps = 4000
        config.batch_size = 16
        config.model.update(num_layers=4, num_heads=4, width=192, context=128)
        config.optimizer.learning_rate = 4e-3
    return config
