"""Mixers compared on abilities that a loss on text does not show: recall, state tracking, length.

    attnlab compare --config=compare_tasks --tasks=recall,parity,copy,induction
    attnlab compare --config=compare_tasks --tasks="task:recall pairs=8 symbols=16" --workdir=runs/mine
    attnlab train --config=compare_tasks --config.data.name=task:parity --config.model.context=40

Two layers, fresh sequences at every step.
"""

from attnlab.config import default

VARIANTS = {
    "attention": {"model.layers": "attention"},
    "linear": {"model.layers": "linear"},
    "delta": {"model.layers": "delta"},
    "delta to 2": {"model.layers": "delta", "model.delta.negative_eigenvalues": True},
    "gated_delta": {"model.layers": "gated_delta"},
}
COMPARE = {"learning_rates": "1e-3,3e-3", "seeds": "3", "tasks": "recall,parity"}


def get_config():
    """A small model, and enough steps for the tasks of `attnlab compare --tasks`."""
    config = default()
    config.model.num_layers, config.model.width = 2, 64
    config.steps, config.batch_size, config.precision = 1000, 64, "float32"
    config.optimizer.learning_rate = 3e-3
    config.eval.every = config.checkpoint.every = 250
    config.eval.windows = 512
    return config
