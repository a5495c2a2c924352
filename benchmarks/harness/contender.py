"""attnlab's own model, training step and batches, set up like the training command's.

    python -m attnlab.bench --worker harness.contender

A worker process: see `serving.py`, beside this file, for the protocol.
"""

import time

import numpy as np

from attnlab import compilation
from attnlab import config as configs
from attnlab.data.batches import EvalBatches, TrainBatches, prefetched
from attnlab.training import run
from attnlab.training.program import TrainProgram

from . import matrix_products, serving


def experiment(vocab_size, batch_size=None, precision="float32", strategy="mesh", recipe=None, **sizes) -> TrainProgram:
    """The program that `Contender` trains, from its arguments; compiles nothing."""
    if recipe:
        return TrainProgram(run.resolve(configs.from_json(recipe)).config, vocab_size)
    config = configs.default()
    config.batch_size, config.precision = batch_size, precision
    config.model.update(sizes | {"dropout": 0.0, "use_bias": False, "positions": "learned"})
    config.model.attention.qk_norm = False
    config.optimizer.update({"learning_rate": 1e-3, "b2": 0.99, "weight_decay": 0.1})
    config.steps, config.parallel.strategy = 1_000_000, strategy
    return TrainProgram(run.resolve(config).config, vocab_size)


class Contender:
    """A training run of attnlab without its files.

    Args:
      tokens: path of a `.npy` file with the training text, `[length]`.
      vocab_size: vocabulary size of the tokenizer.
      batch_size: sequences per step; None for the recipe's number.
      precision: "float32" or "bfloat16".
      strategy: `config.parallel.strategy`.
      recipe: a whole config as a dictionary, in place of all arguments but `tokens` and `vocab_size`; None for
        nanoGPT's model and optimizer.
      **sizes: fields of `config.model`.
    """

    def __init__(self, tokens, vocab_size, batch_size=None, precision="float32", strategy="mesh", recipe=None, **sizes):
        options = {"batch_size": batch_size, "precision": precision, "strategy": strategy, "recipe": recipe}
        self.experiment = experiment(vocab_size, **options, **sizes)
        config = self.experiment.config
        self.state = self.experiment.create_state()
        batches = TrainBatches(
            np.load(tokens), context=config.model.context, batch_size=config.batch_size, seed=config.seed
        )
        self.batches = prefetched(batches)
        self._timer = None

    def train(self, steps):
        """Take some steps, reading each loss while the next step runs; returns the `seconds` and the last `loss`."""
        start, previous_loss = time.perf_counter(), None
        for _ in range(steps):
            self.state, metrics = self.experiment.train_steps(self.state, [next(self.batches)])
            if previous_loss is not None:
                float(previous_loss)
            previous_loss = metrics["loss"][0]
        loss = float(previous_loss)
        return {"seconds": time.perf_counter() - start, "loss": loss}

    def evaluate(self, tokens):
        """The mean loss in nats per token on adjacent windows of a text in a `.npy` file, and the parameter count.

        Evaluates the averaged parameters if the recipe averages them.
        """
        tokens, context = np.load(tokens), self.experiment.config.model.context
        batches = EvalBatches(tokens, context=context, batch_size=64, windows=len(tokens))
        (scores,) = self.experiment.evaluate(self.state.evaluated, batches)
        return {"loss": scores["loss"], "parameters": self.experiment.parameters}

    def floor(self):
        """The `seconds` of all matrix products of a step, each timed alone."""
        if self._timer is None:
            self._counts = matrix_products.of_program(self.experiment.trace().jaxpr)
            self._timer = matrix_products.Timer(list(self._counts))
        alone = self._timer.time()["seconds"]
        return {"seconds": sum(count * seconds for count, seconds in zip(self._counts.values(), alone))}


def work() -> None:
    """Answer requests."""
    compilation.release_memory()
    serving.serve(Contender)
