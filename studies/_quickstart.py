"""The quickstart's model and optimizer, for the studies of its heads."""

import numpy as np
import optax

from attnlab.config import RunConfig
from attnlab.nn import GPT
from attnlab.study import fitting

CONFIG = RunConfig.of({"precision": "float32"})  # the same on every machine
LAYERS, HEADS, CONTEXT = CONFIG.model.num_layers, CONFIG.model.num_heads, CONFIG.model.context


def gpt(vocab_size: int) -> GPT:
    """Create the model for a vocabulary."""
    return GPT(CONFIG.over_tokens(vocab_size))


def adamw(steps: int) -> optax.GradientTransformation:
    """The studies' optimizer, with the quickstart's learning rate and weight decay."""
    return fitting.adamw(steps, CONFIG.optimizer.learning_rate, CONFIG.optimizer.weight_decay)


def evenly_spaced(tokens: np.ndarray, length: int, count: int) -> np.ndarray:
    """Windows int32 `[count, length]` of a text `[N]`, N ≥ length, the first at its start and the last at its end."""
    starts = np.linspace(0, len(tokens) - length, count).astype(int)
    return tokens[starts[:, None] + np.arange(length)].astype(np.int32)
