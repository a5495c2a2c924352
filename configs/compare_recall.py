"""Recall and loss of softmax attention, of Gated DeltaNet with small and large states, and of a hybrid of both.

    attnlab compare --config=compare_recall
    attnlab train --config=compare_recall --config.model.conv.kernel_size=2 \\
        --config.data.name="task:recall pairs=16 fewest=4 symbols=127"

A variant's name ends with the number of features of a key. The hybrid has three layers of Gated DeltaNet for one of
attention (Wang et al. 2025, arXiv 2507.06457). Models of two blocks begin with a convolution, and each layer of Gated
DeltaNet has one, because without it no mixer finds the previous token. The optimizer is Muon: AdamW left most runs at
chance for 500 steps and more. Measured when Muon left convolutions and Gated DeltaNet's gates to AdamW: 60 runs, 18
minutes with `--jobs=2` on two busy cores of an AMD EPYC (family 25, model 17); three seeds, recall ± 95 % interval:
attention 64 1.000 ± 0.000, gated_delta 16 0.764 ± 0.277, gated_delta 64 0.996 ± 0.005, four gated_delta 8 0.095 ±
0.246, hybrid 8 1.000 ± 0.000, and with `attnlab train` attention 32 1.000 for each seed.
"""

from attnlab.config import default

ATTENTION = {"model.layers": "conv attention", "model.conv.kernel_size": 2}
GATED = {"model.layers": "conv gated_delta", "model.conv.kernel_size": 2, "model.gated_delta.conv": 2}
SMALLER = {"model.num_layers": 4, "model.gated_delta.conv": 2}
SMALLER |= {"model.gated_delta.key_dim": 8, "model.gated_delta.value_dim": 8}
VARIANTS = {
    "attention 32": {**ATTENTION, "model.attention.head_dim": 32},
    "attention 64": {**ATTENTION, "model.attention.head_dim": 64},
    "gated_delta 16": {**GATED, "model.gated_delta.key_dim": 16, "model.gated_delta.value_dim": 16},
    "gated_delta 64": {**GATED, "model.gated_delta.key_dim": 64, "model.gated_delta.value_dim": 64},
    "four gated_delta 8": {"model.layers": "gated_delta", **SMALLER},
    "hybrid 8": {"model.layers": "gated_delta*3 attention", **SMALLER},
}
COMPARE = {"learning_rates": "3e-3,1e-2", "seeds": "3", "tasks": "text,task:recall pairs=16 fewest=4 symbols=127"}


def get_config():
    """One head, neither positions nor feed-forward layers: what a mixer recalls is what its state holds."""
    config = default()
    config.model.num_layers, config.model.width, config.model.num_heads, config.model.context = 2, 64, 1, 48
    config.model.mlp_ratio, config.model.positions, config.model.embedding_scale = 0, "none", 10.0
    config.model.layers = "conv attention"
    config.steps, config.batch_size, config.precision = 500, 64, "float32"
    config.optimizer.name, config.optimizer.learning_rate, config.optimizer.weight_decay = "muon", 1e-2, 0.0
    config.eval.every = config.checkpoint.every = 250
    config.eval.windows = 512
    return config
