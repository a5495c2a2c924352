"""attnlab's own model, training step, batches and sampler, set up as the training command does.

    python -m attnlab.bench --worker harness.contender

A worker process: see `serving.py`, beside this file, for the protocol.
"""

import collections
import tempfile
import time

import numpy as np

from attnlab import compilation
from attnlab import config as configs
from attnlab.data.batches import EvalBatches, TrainBatches, prefetched
from attnlab.sample import generate
from attnlab.training import run
from attnlab.training.experiment import Experiment

from . import matrix_products, profiling, serving


def experiment(vocab_size, batch_size=None, precision="float32", strategy="mesh", recipe=None, **sizes) -> Experiment:
    """What `Contender` trains, by its arguments; nothing is compiled."""
    if recipe:
        return Experiment(run.resolve(configs.from_dict(recipe)).config, vocab_size)
    config = configs.default()
    config.batch_size, config.precision = batch_size, precision
    config.model.update(sizes | {"dropout": 0.0, "use_bias": False, "positions": "learned", "qk_norm": False})
    config.optimizer.update({"learning_rate": 1e-3, "b2": 0.99, "weight_decay": 0.1})
    config.steps, config.parallel.strategy = 1_000_000, strategy
    return Experiment(run.resolve(config).config, vocab_size)


class Contender:
    """A training run of attnlab without its files.

    Args:
      tokens: path of a `.npy` file with the training text, `[length]`.
      vocab_size: of the tokenizer.
      batch_size: sequences a step; None for the recipe's.
      precision: "float32" or "bfloat16".
      strategy: `config.parallel.strategy`.
      recipe: a whole config as a dictionary, in place of all of these but `tokens` and `vocab_size`; None for
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
        """Take some steps; each loss is read while the next step runs.

        Returns:
          `seconds` in all; `waited`, those in which the device was idle because no batch was ready; the last `loss`.
        """
        start, waited, previous_loss = time.perf_counter(), 0.0, None
        for _ in range(steps):
            asked = time.perf_counter()
            batch = next(self.batches)
            if previous_loss is None or previous_loss.is_ready():  # else the device was busy meanwhile
                waited += time.perf_counter() - asked
            self.state, metrics = self.experiment.train_step(self.state, self.experiment.parallel.place_batch(batch))
            if previous_loss is not None:
                float(previous_loss)
            previous_loss = metrics["loss"]
        loss = float(previous_loss)
        return {"seconds": time.perf_counter() - start, "waited": waited, "loss": loss}

    def evaluate(self, tokens):
        """The mean loss on adjacent windows of the text in a `.npy` file, in nats a token; and the parameters.

        Of the averaged parameters if the recipe has an average.
        """
        tokens, context = np.load(tokens), self.experiment.config.model.context
        batches = EvalBatches(tokens, context=context, batch_size=64, windows=len(tokens))
        loss = self.experiment.evaluate(self.state.evaluated, batches)["loss"]
        return {"loss": loss, "parameters": self.experiment.parameters}

    def batches_alone(self, count):
        """Draw batches without training on them."""
        for _ in range(32):  # more than are prefetched
            next(self.batches)
        start = time.perf_counter()
        for _ in range(count):
            next(self.batches)
        return {"seconds": time.perf_counter() - start}

    def profile(self, steps, folder):
        """Trace some steps into a folder; returns the most expensive ops."""
        return {"ops": self._traced(steps, folder)[0][:10]}

    def _traced(self, steps, folder):
        """(All ops of traced steps, the compiled text)."""
        compiled = self.experiment.lower().compile().as_text()
        with profiling.trace(folder):
            self.train(steps)
        return profiling.most_expensive(folder, compiled, steps, count=None), compiled

    def floor(self):
        """The `seconds` of all matrix products of a step, each alone."""
        return {"seconds": sum(self._alone().values())}

    def _alone(self):
        """The seconds of a step's products alone, by `Product.sizes`."""
        if self._timer is None:
            self._counts = matrix_products.of_program(self.experiment.trace().jaxpr)
            self._timer = matrix_products.Timer(list(self._counts))
        alone = collections.Counter()
        for (product, count), seconds in zip(self._counts.items(), self._timer.time()["seconds"]):
            alone[product.sizes] += count * seconds
        return alone

    def products(self, steps):
        """For each size of products of a step: [`sizes`, seconds alone, seconds in traced steps], slowest first."""
        alone, inside = self._alone(), collections.Counter()
        with tempfile.TemporaryDirectory(prefix="attnlab-trace-") as folder:
            ops, compiled = self._traced(steps, folder)
        sizes = matrix_products.of_compiled(compiled)
        for op in ops:
            if op.name in sizes:
                inside[sizes[op.name]] += op.milliseconds / 1e3
        return {"products": [[name, alone[name], seconds] for name, seconds in inside.most_common() if name in alone]}

    def decode(self, tokens, samples):
        """Sample; returns `seconds` in all, and `first`: seconds to the first token."""
        start, first = time.perf_counter(), None
        prompt = np.zeros(1, np.int32)
        options = {"temperature": 0.8, "top_k": 200, "num_samples": samples}
        for _ in generate(self.experiment.model, {"params": self.state.params}, prompt, tokens, **options):
            first = first or time.perf_counter() - start
        return {"seconds": time.perf_counter() - start, "first": first}


def work() -> None:
    """Answer requests."""
    compilation.release_memory()
    serving.serve(Contender)
