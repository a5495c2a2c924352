"""A bound from below on the memory of a run, by arithmetic: nothing is traced, whose time grows with the sizes."""

import functools
import math

import jax
from ml_collections import ConfigDict

from attnlab.nn import GPT
from attnlab.nn.kinds import kinds_of
from attnlab.nn.resolved import resolved
from attnlab.support import memory
from attnlab.training.parallel import FSDP, TENSOR, Parallel


def check(config: ConfigDict, parallel: Parallel) -> None:
    """Raise UserError where a config's parameters and one batch exceed the memory of the devices that hold them."""
    model, mesh = GPT.from_config(config, config.model.vocab_size or 1), parallel.mesh  # the text is not read yet
    batch = config.batch_size * (4 * model.context + sequence_bytes(model) / config.optimizer.accumulation)  # int32
    needed = 4 * least_parameters(model) / (mesh.shape[FSDP] * mesh.shape[TENSOR]) + batch / mesh.devices.size
    remedy = "lower config.batch_size, raise config.optimizer.accumulation, or choose a smaller model"
    memory.check(needed, list(mesh.local_devices), "the run", remedy)


def least_parameters(model: GPT) -> int:
    """Parameters of the embedding and of the feed-forward layers, which every GPT has.

    >>> least_parameters(GPT(vocab_size=10, num_layers=1, num_heads=1, width=8, context=3))
    616
    """
    positions = model.context if model.positions == "learned" else 0
    return model.width * (model.vocab_size + positions + 2 * model.num_layers * resolved(model).hidden)


def sequence_bytes(model: GPT) -> int:
    """Bytes of a sequence in training: each layer's input, which its gradient needs, and the state of one layer."""
    inputs = model.num_layers * model.context * model.width * 2  # bfloat16
    return inputs + max(state_bytes(model, kind) for kind in kinds_of(model))


def state_bytes(model: GPT, kind: str) -> int:
    """Bytes of what a kind of layer keeps of one sequence: keys and values, or a recurrent state."""
    cache = functools.partial(kinds_of(model)[kind].empty_cache, model, 1, model.context)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(cache)))
