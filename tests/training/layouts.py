"""A small experiment on one device, with `pmap` and on meshes: its gradient and losses."""

import jax
import numpy as np

from attnlab import config as configs
from attnlab.data.batches import TrainBatches
from attnlab.nn import stack_layers, unstack_layers
from attnlab.training import parallel, state
from attnlab.training.program import TrainProgram
from tests.parameters import parameters

TOKENS = np.random.default_rng(0).integers(0, 31, 5000)
BATCHES = TrainBatches(TOKENS, context=16, batch_size=16, seed=0)
LAYOUTS = {
    "one device": ("mesh", 1),
    "pmap": ("pmap", 4),
    "mesh": ("mesh", 4),
    "fsdp": ("mesh", 1, 4),
    "both": ("mesh", 2, 2),
    "tensor": ("mesh", 2, 1, 2),
    "fsdp and tensor": ("mesh", 1, 2, 2),
    "context": ("mesh", 1, 1, 1, 4),
    "fsdp and context": ("mesh", 1, 2, 1, 2),
}


def experiment(strategy, devices, fsdp=1, tensor=1, context=1, *, accumulation=1, steps=50, packing="stream", **model):
    """A small experiment on some devices."""
    fields = {"steps": steps, "batch_size": 16, "optimizer.accumulation": accumulation, "data.packing": packing}
    fields |= {f"model.{name}": value for name, value in {"num_layers": 1, "width": 32, "context": 16, **model}.items()}
    config = configs.RunConfig.of(fields | {"precision": "float32"})  # also in a separate process
    return TrainProgram(config, vocab_size=31, parallel=parallel.make(strategy, devices, fsdp, tensor, context))


def gradient(run, batches=BATCHES):
    """The gradient of the first step, by name, with unstacked layers."""

    def first(params, batch, axis_name=None):
        accumulation = run.config.optimizer.accumulation
        return state.gradients(run.model, params, batch, jax.random.key(7), accumulation, axis_name)[1]

    params = parameters(run.model, BATCHES[0].tokens[:, :-1])["params"]
    placed = run.parallel.create_state(lambda: stack_layers(params) if run.scan else params)
    compiled = run.parallel.compile_eval(first)
    return unstack_layers(jax.device_get(compiled(placed, run.parallel.place_batch(batches[0]))))


def losses(run):
    """The losses of all steps."""
    now, values = run.create_state(), []
    for number in range(run.config.steps):
        now, metrics = run.train_steps(now, [BATCHES[number]])
        values.append(metrics["loss"][0])
    return np.array(jax.device_get(values))


def distance(a, b):
    """‖a − b‖ / ‖b‖ over whole trees."""

    def squares(tree):
        return sum(float((np.float64(leaf) ** 2).sum()) for leaf in jax.tree.leaves(tree))

    return (squares(jax.tree.map(lambda x, y: np.float64(x) - y, a, b)) / squares(b)) ** 0.5
