"""Attention and gated convolutions on associative recall: Arora et al. 2023 (arXiv 2312.04927), figure 2.

    attnlab compare --config=replicate_zoology
    attnlab train --config=replicate_zoology --config.data.name="task:recall pairs=4 symbols=511 queries=spread"

Sequences of 64 tokens with 4 pairs, models of width 64 without feed-forward layers: two layers of attention with one
head and learned positions, or four layers of gated convolutions over the whole sequence.

Six runs, about 15 minutes with `--jobs=2` on two cores of an AMD EPYC (family 25, model 17) with other work running.
Accuracy, mean of three seeds ± 95 % interval: attention 0.833 ± 0.598, gated_conv 0.258 ± 0.005: underpowered.
"""

from attnlab.config import default

TASK = "task:recall pairs=4 symbols=511 queries=spread"
VARIANTS = {
    "attention": {"model.positions": "learned", "model.num_heads": 1, "model.attention.qk_norm": False},
    "gated_conv": {"model.layers": "gated_conv", "model.num_layers": 4, "model.gated_conv.kernel_size": 64},
}
PUBLISHED = {
    TASK: {
        "source": "figure 2, sequences of 64, width 64, read off; code at commit de4e258 of HazyResearch/zoology",
        "results": {"attention": 1.0, "gated_conv": 0.7},
        "margin": 0.02,  # for reading off a figure
        "differs": (
            "a vocabulary of 1,023 instead of 8,192; fresh sequences; explicit filters of 64 tokens in all layers "
            "(theirs alternate between 3 tokens and implicit filters); no dropout; means over seeds."
        ),
        "protocol": {"steps": 12_500, "batch_size": 512, "learning_rates": 4},
    }
}
COMPARE = {"learning_rates": "3e-3", "seeds": "3", "tasks": TASK}


def get_config():
    """The published model and sequences, with a smaller vocabulary."""
    config = default()
    config.model.num_layers, config.model.width, config.model.context = 2, 64, 64
    config.model.mlp_ratio, config.model.use_bias = 0, True
    config.steps, config.batch_size, config.precision = 1000, 128, "float32"
    config.optimizer.learning_rate, config.optimizer.weight_decay = 3e-3, 0.1
    config.eval.every = config.checkpoint.every = 500
    config.eval.windows = 1024
    return config
