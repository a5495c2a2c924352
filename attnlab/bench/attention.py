"""Attention, forward and forward with backward, against JAX's own function.

python -m attnlab.bench attention [--lengths=256,1024] [--rounds=9]
"""

import functools

import jax
import jax.numpy as jnp
from absl import flags

import attnlab
from attnlab.bench import timing
from attnlab.errors import UserError
from attnlab.masks import Causal


def define(values, argv) -> None:
    """The flags."""
    flags.DEFINE_list("lengths", ["64", "256", "1024"], "sequence lengths to race over", flag_values=values)
    flags.DEFINE_integer("rounds", 9, "counted calls of each contender", flag_values=values)
    flags.DEFINE_integer("batch", 4, "sequences", flag_values=values)
    flags.DEFINE_integer("heads", 8, "heads", flag_values=values)
    flags.DEFINE_integer("head_dim", 64, "features a head", flag_values=values)


def main(values) -> int:
    """Races and prints the table."""
    try:
        lengths = [int(length) for length in values.lengths]
    except ValueError as error:
        raise UserError(f"--lengths={','.join(values.lengths)}: expected whole numbers, e.g. 256,1024") from error
    for name in ("rounds", "batch", "heads", "head_dim"):
        if values[name].value < 1:
            raise UserError(f"--{name}={values[name].value}: expected 1 or more")
    if min(lengths, default=0) < 1:
        raise UserError(f"--lengths={','.join(values.lengths)}: expected lengths of 1 or more")
    rows = {}
    for length in lengths:
        shape = (values.batch, length, values.heads, values.head_dim)
        q, k, v = jax.random.normal(jax.random.key(0), (3, *shape))
        for what, prepare in (("forward", _forward), ("forward + backward", _backward)):
            contenders = {name: prepare(attend, q, k, v) for name, attend in _contenders().items()}
            rows[f"T = {length:,}, {what}"] = timing.alternate(contenders, values.rounds)
    title = f"causal attention, float32, B = {values.batch}, H = {values.heads}, D = {values.head_dim}"
    timing.report(f"{title}, {jax.devices()[0].device_kind}", rows, "jax.nn")
    return 0


def _contenders():
    ours = {
        f"attnlab {name}": functools.partial(attnlab.attention, mask=Causal(), impl=name)
        for name in attnlab.implementations()
    }
    return ours | {"jax.nn": functools.partial(jax.nn.dot_product_attention, is_causal=True)}


def _forward(attend, q, k, v):
    return functools.partial(jax.jit(attend), q, k, v)


def _backward(attend, q, k, v):
    gradient = jax.jit(jax.grad(lambda q, k, v: jnp.sum(attend(q, k, v) ** 2), argnums=(0, 1, 2)))
    return functools.partial(gradient, q, k, v)
