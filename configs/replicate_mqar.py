"""Associative recall of four mixers, as in github.com/rkstgr/linear-attention, level 1.

    attnlab compare --config=replicate_mqar
    attnlab train --config=replicate_mqar --config.data.name="task:recall pairs=4 symbols=511 queries=spread"

Four pairs, and each key once more among noise: the easiest sequences of Arora et al. 2023 (arXiv 2312.04927).

Twelve runs, 25 minutes with `--jobs=2` on two cores of an AMD EPYC (family 25, model 17), other work running. Accuracy,
mean of three seeds ± 95 % interval: attention 0.899 ± 0.005, delta 0.019 ± 0.032, gated_delta 0.004 ± 0.002, linear
0.038 ± 0.009: the models are not trained far enough.
"""

from attnlab.config import default

TASK = "task:recall pairs=4 symbols=511 queries=spread filler=noise"
GATED = {"model.gated_delta.negative_eigenvalues": True, "model.gated_delta.gate": False}
VARIANTS = {
    "attention": {"model.layers": "attention", "model.attention.qk_norm": False},
    "delta": {"model.layers": "delta", "model.delta.negative_eigenvalues": True},
    "gated_delta": {"model.layers": "gated_delta", **GATED},
    "linear": {"model.layers": "conv linear", "model.num_layers": 4},
}
PUBLISHED = {
    TASK: {
        "source": "README of github.com/rkstgr/linear-attention, commit 0838a33, table of level 1",
        "results": {"attention": 0.993, "delta": 0.983, "gated_delta": 0.976, "linear": 0.971},
        "margin": 0.006,  # two standard errors of a difference between accuracies near 0.98 of 4,000 answers each
        "differs": (
            "a vocabulary of 1,023 instead of 8,192; fresh sequences (theirs: 100,000, and training ends at accuracy "
            "0.99); GPT-2's initial values; no decay; linear attention is normalised, with elu + 1 instead of SiLU, "
            "and its convolutions are layers."
        ),
        "protocol": {"steps": 50_000, "seeds": 1},
    }
}
COMPARE = {"learning_rates": "1e-3", "seeds": "3", "tasks": TASK}


def get_config():
    """The published model: two layers of width 64, four heads, RMS norms, SwiGLU, a separate output layer."""
    config = default()
    config.model.num_layers, config.model.width, config.model.num_heads, config.model.context = 2, 64, 4, 64
    config.model.update(norm="rms", mlp="gated", activation="silu", tie_embeddings=False)
    config.steps, config.batch_size, config.precision = 1000, 64, "float32"
    config.optimizer.learning_rate, config.optimizer.schedule, config.optimizer.warmup_steps = 1e-3, "constant", 0
    config.optimizer.decay_fraction, config.optimizer.weight_decay = 0.0, 0.0
    config.eval.every = config.checkpoint.every = 500
    config.eval.windows = 1024
    return config
