"""Parity of longer sequences than in training: Grazzi et al. 2025 (arXiv 2411.12537), table 3.

    attnlab compare --config=replicate_state_tracking
    attnlab train --config=replicate_state_tracking --config.data.name=task:parity --config.model.context=40

A state that only decays or forgets cannot track a parity; one whose update may have negative eigenvalues can. Eleven
minutes with `--jobs=2` on two cores of an AMD EPYC (family 25, model 17). Accuracy at 160 bits after training on 3 to
40, mean of three seeds ± 95 % interval: attention 0.499 ± 0.003, delta 0.501 ± 0.003, delta to 2 0.965 ± 0.065. Both
differences are reproduced.
"""

from attnlab.config import default

VARIANTS = {
    "attention": {"model.layers": "attention"},
    "delta": {"model.layers": "delta"},
    "delta to 2": {"model.layers": "delta", "model.delta.negative_eigenvalues": True},
}
PUBLISHED = {
    "parity": {
        "source": "Grazzi et al. 2025 (arXiv 2411.12537), table 3, parity, as accuracies: (1 + scaled accuracy) / 2",
        "results": {"attention": 0.511, "delta": 0.5085, "delta to 2": 1.0},
        "margin": 0.016,  # two standard errors of a difference between accuracies near 1/2 of 8,192 sequences each
        "length": 4,
        "differs": (
            "an answer at each digit, not only at the last; sequences of one length (theirs: 40 to 256 digits); "
            "rotary positions; means over seeds (theirs: the best of 3)."
        ),
        "protocol": {
            "steps": 20_000,
            "batch_size": 256,
            "model.width": 128,
            "optimizer.weight_decay": 0.0,
            "precision": "bfloat16",
        },
    }
}
COMPARE = {"learning_rates": "1e-3,3e-3", "seeds": "3"}


def get_config():
    """The published model at half its width."""
    config = default()
    config.model.num_layers, config.model.width = 2, 64
    config.steps, config.batch_size, config.precision = 1000, 64, "float32"
    config.optimizer.learning_rate = 3e-3
    config.eval.every = config.checkpoint.every = 250
    config.eval.windows = 512
    return config
