"""attnlab's own model, step, batches and sampler, as the training command puts them together, for a race.

    python -m attnlab.bench.contender

A request a line on stdin and an answer a line on stdout, both JSON; see `attnlab.bench.workers`.
"""

if __name__ == "__main__":
    from attnlab import hugepages

    hugepages.restart("attnlab.bench.contender")  # as the training command does

import functools
import json
import sys
import time

import jax
import numpy as np

from attnlab import config as configs
from attnlab.bench import profiling
from attnlab.data.batches import TrainBatches, prefetched
from attnlab.sample import generate
from attnlab.training import optimizer as optimizers
from attnlab.training import parallel as parallel_lib
from attnlab.training import state as states


class Contender:
    """What `attnlab.train` trains, without its files."""

    def __init__(self, tokens, vocab_size, batch_size, precision="float32", strategy="mesh", **sizes):
        config = configs.default()
        config.batch_size, config.precision = batch_size, precision
        config.model.update(sizes | {"dropout": 0.0, "use_bias": False, "positions": "learned", "qk_norm": False})
        config.optimizer.update({"learning_rate": 1e-3, "b2": 0.99, "weight_decay": 0.1})
        self.parallel = parallel_lib.make(strategy)
        self.model = states.make_model(config, vocab_size)
        optimizer = optimizers.make(config.optimizer, steps=1_000_000)
        self.state = self.parallel.create_state(functools.partial(states.create, self.model, optimizer, 0))
        step = functools.partial(states.train_step, self.model, optimizer, 0, 1)
        self.step = self.parallel.compile_train(step, self.state)
        batches = TrainBatches(np.load(tokens), context=config.model.context, batch_size=batch_size, seed=0)
        self.batches = prefetched(batches)

    def train(self, steps):
        """Each loss is read while the next step runs; `waited` for batches."""
        start, waited, before = time.perf_counter(), 0.0, None
        for _ in range(steps):
            asked = time.perf_counter()
            batch = next(self.batches)
            if before is None or before.is_ready():  # else the device was at work meanwhile
                waited += time.perf_counter() - asked
            self.state, metrics = self.step(self.state, self.parallel.place_batch(batch))
            if before is not None:
                float(before)
            before = metrics["loss"]
        loss = float(before)
        return {"seconds": time.perf_counter() - start, "waited": waited, "loss": loss}

    def batches_alone(self, count):
        """Nothing consumes them."""
        for _ in range(32):  # more than are read ahead
            next(self.batches)
        start = time.perf_counter()
        for _ in range(count):
            next(self.batches)
        return {"seconds": time.perf_counter() - start}

    def profile(self, steps, folder):
        """The most expensive ops of a few steps, whose trace goes into a folder."""
        batch = self.parallel.place_batch(next(self.batches))
        compiled = self.step.lower(self.state, batch).compile().as_text()
        with profiling.trace(folder):
            self.train(steps)
        return {"ops": profiling.most_expensive(folder, compiled, steps)}

    def decode(self, tokens, samples):
        """`first`: seconds to the first token."""
        start, first = time.perf_counter(), None
        prompt = np.zeros(1, np.int32)
        options = {"temperature": 0.8, "top_k": 200, "num_samples": samples}
        for _ in generate(self.model, {"params": self.state.params}, prompt, tokens, **options):
            first = first or time.perf_counter() - start
        return {"seconds": time.perf_counter() - start, "first": first}

    @property
    def parameters(self):
        return sum(leaf.size for leaf in jax.tree.leaves(self.state.params))


def main():
    """Answers until its input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed is no answer
    contender = None
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("do")
        if what == "start":
            contender = Contender(**request)
            answer = {"parameters": contender.parameters}
        else:
            answer = getattr(contender, what)(**request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
