"""attnlab's own model, step, batches and sampler, as the training command puts them together, for a race.

    python -m attnlab.bench.contender

A request a line on stdin and an answer a line on stdout, both JSON; see `attnlab.bench.workers`.
"""

if __name__ == "__main__":
    from attnlab import hugepages

    hugepages.restart()  # as the training command does

import functools
import json
import resource
import sys
import time

import jax
import numpy as np

from attnlab import config as configs
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
        steps = 1_000_000
        self.parallel = parallel_lib.make(strategy)
        self.model = states.make_model(config, vocab_size)
        optimizer = optimizers.make(config.optimizer, steps)
        self.state = self.parallel.create_state(functools.partial(states.create, self.model, optimizer, 0))
        step = functools.partial(states.train_step, self.model, optimizer, 0, 1)
        self.step = self.parallel.compile_train(step, self.state)
        batches = TrainBatches(np.load(tokens), context=config.model.context, batch_size=batch_size, seed=0)
        self.batches = prefetched(batches, 0, steps)

    def train(self, steps):
        start = time.perf_counter()
        for _ in range(steps):
            self.state, metrics = self.step(self.state, self.parallel.place_batch(next(self.batches)))
            loss = float(metrics["loss"])  # each step, as nanoGPT's recipe for CPUs logs it
        return {"seconds": time.perf_counter() - start, "loss": loss}

    def decode(self, tokens, samples):
        start = time.perf_counter()
        prompt = np.zeros(1, np.int32)
        options = {"temperature": 0.8, "top_k": 200, "num_samples": samples}
        for _ in generate(self.model, {"params": self.state.params}, prompt, tokens, **options):
            pass
        return {"seconds": time.perf_counter() - start}

    @property
    def parameters(self):
        return sum(leaf.size for leaf in jax.tree.leaves(self.state.params))


def main():
    """Answers until its input ends."""
    contender = None
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("do")
        if what == "start":
            contender = Contender(**request)
            answer = {"parameters": contender.parameters}
        elif what == "memory":
            answer = {"mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
        else:
            answer = getattr(contender, what)(**request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
