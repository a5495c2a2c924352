"""The layers of a model: the layout of their parameters, and `fold`, which runs them in either layout.

Unstacked, the parameters are `block_0`, `block_1`, …. Stacked, layers of equal shapes are one `blocks`, with a leading
axis of layers. If layers of different shapes repeat in a pattern, each place in the pattern has its stack, `blocks_0`,
`blocks_1`, …, and layers after the last whole repetition stay unstacked.
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.core.scope import is_filter_empty
from jax.sharding import NamedSharding, PartitionSpec

from attnlab.nn import sharding
from attnlab.nn.layer import Context, LayerOut
from attnlab.nn.remat import remat_policy
from attnlab.ops import dropout

# ------------------------------------------------------------------------------------------------------------- layout


def stack_layers(tree):
    """Stack the layers `block_0`, `block_1`, … of a tree of parameters: leaves get a leading axis of layers.

    Stacked layers are compiled once and run in a loop: see `GPT`. Other parameters are unchanged, and so is a tree
    without layers. The tree may be an optimizer's state; leaves may be arrays or `jax.ShapeDtypeStruct`.

    >>> tree = stack_layers({"block_0": {"w": jnp.ones(3)}, "block_1": {"w": jnp.zeros(3)}, "norm": jnp.ones(3)})
    >>> jax.tree.map(jnp.shape, tree)
    {'blocks': {'w': (2, 3)}, 'norm': (3,)}

    Layers that alternate between two shapes become two stacks:

    >>> layers = {f"block_{n}": {"w": jnp.ones(2 + n % 2)} for n in range(5)}
    >>> jax.tree.map(jnp.shape, stack_layers(layers))
    {'block_4': {'w': (2,)}, 'blocks_0': {'w': (2, 2)}, 'blocks_1': {'w': (2, 3)}}
    """

    def convert(node):
        if not _has_layers(node):
            return node
        names = sorted((name for name in node if re.fullmatch(r"block_\d+", name)), key=lambda name: int(name[6:]))
        if names != [f"block_{n}" for n in range(len(names))]:
            raise ValueError(f"layers are named {', '.join(names)}: expected block_0, block_1, … without a gap")
        period = _period([_shapes(node[name]) for name in names])
        stacked = names[: len(names) // period * period]
        others = {name: value for name, value in node.items() if name not in stacked}
        places = [stacked[place::period] for place in range(period)]
        stacks = (jax.tree.map(lambda *x: _stack(x), *(node[name] for name in place)) for place in places)
        return others | dict(zip(_stack_names(period), stacks))

    return jax.tree.map(convert, tree, is_leaf=_has_layers)


def unstack_layers(tree):
    """The inverse of `stack_layers`.

    >>> tree = unstack_layers({"blocks": {"w": jnp.ones((2, 3))}, "norm": jnp.ones(3)})
    >>> jax.tree.map(jnp.shape, tree)
    {'block_0': {'w': (3,)}, 'block_1': {'w': (3,)}, 'norm': (3,)}
    """

    def convert(node):
        if not is_stacked(node):
            return node
        stacks, others = _stacks(node), {name: node[name] for name in node if not re.fullmatch(STACK, name)}
        layers = {
            f"block_{turn * len(stacks) + place}": jax.tree.map(functools.partial(_slice, n=turn), stack)
            for turn in range(_turns(stacks))
            for place, stack in enumerate(stacks)
        }
        return others | layers

    return jax.tree.map(convert, tree, is_leaf=is_stacked)


def is_stacked(params) -> bool:
    """Whether a node of a tree holds stacked layers."""
    return isinstance(params, Mapping) and any(name in params for name in ("blocks", "blocks_0"))


STACK = r"blocks(_\d+)?"


def _stack_names(period: int) -> list[str]:
    return ["blocks"] if period == 1 else [f"blocks_{place}" for place in range(period)]


def _stacks(params) -> list:
    """The stacks of a node, by place in the pattern."""
    return [params[name] for name in _stack_names(sum(bool(re.fullmatch(STACK, name)) for name in params))]


def _turns(stacks) -> int:
    return jax.tree.leaves(stacks)[0].shape[0]


def _has_layers(node) -> bool:
    return isinstance(node, Mapping) and "block_0" in node and not is_stacked(node)


def _shapes(tree):
    """The shapes and types of the leaves, as a tree that compares by value."""
    return jax.tree.map(lambda leaf: str((jnp.shape(leaf), getattr(leaf, "dtype", None))), tree)


def _period(shapes: Sequence) -> int:
    """The length of the shortest pattern that the layers' shapes repeat."""
    return next(n for n in range(1, len(shapes) + 1) if all(shapes[i] == shapes[i % n] for i in range(len(shapes))))


def _stack(leaves):
    first = leaves[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        return _reshaped(first, (len(leaves), *first.shape), lambda spec: (None, *spec))
    return (np if isinstance(first, np.ndarray) else jnp).stack(leaves)


def _slice(x, n: int):
    return _reshaped(x, x.shape[1:], lambda spec: spec[1:]) if isinstance(x, jax.ShapeDtypeStruct) else x[n]


def _reshaped(x: jax.ShapeDtypeStruct, shape, split) -> jax.ShapeDtypeStruct:
    at = x.sharding
    at = NamedSharding(at.mesh, PartitionSpec(*split(at.spec))) if isinstance(at, NamedSharding) else at
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=at)


# ---------------------------------------------------------------------------------------------------------------- run


def fold(model, x, context: Context, keys, caches):
    """Run the layers of a bound `GPT`, and return (the residual stream `[B, T, F]`, the extended caches or None).

    All layers share `context`; `keys` are dropout keys, one per example, or None; `caches`, one per layer, or None.
    """
    params = model.variables.get("params", {})
    if not is_stacked(params):
        return _one_by_one(model, x, context, keys, caches)
    stacks, alone = _stacks(params), sum(bool(re.fullmatch(r"block_\d+", name)) for name in params)
    if (num_layers := _turns(stacks) * len(stacks) + alone) != model.config.num_layers:
        raise ValueError(f"params have {num_layers} stacked layers, expected num_layers = {model.config.num_layers}")
    others = any(model.variables[name] for name in model.variables if name != "params")
    if caches is None and not others and is_filter_empty(model.scope.mutable):
        return _in_a_loop(model, x, context, keys, params), None

    def unstacked(variables):
        return {"params": unstack_layers(variables["params"])}

    # Caches and collections other than params are per layer, so the layers run one by one.
    return nn.map_variables(_one_by_one, "params", trans_in_fn=unstacked)(model, x, context, keys, caches)


def _one_by_one(model, x, context, keys, caches):
    """Run the layers as modules, with the parameters `block_0`, `block_1`, …."""
    gathers = not model.is_initializing() and sharding.is_active(x)
    recomputes, policy = remat_policy(model.config.remat, gathers=gathers, loop=False)
    forward = sharding.gathering(model, lambda block, *args: block.forward(*args))
    if recomputes and caches is None:
        forward = nn.remat(forward, policy=policy)
    extended = []
    for layer in range(model.config.num_layers):
        cache = None if caches is None else caches[layer]
        result = forward(model.block(layer), x, _at(context, layer, keys), cache)
        x, context = result.out, _with_values(context, result)
        extended.append(result.cache)
    return x, None if caches is None else tuple(extended)


def _in_a_loop(model, x, context, keys, params):
    """Run the layers as one loop over stacks, which compiles only one pattern, whatever the depth."""
    stacks = _stacks(params)
    places, period = len(stacks), math.lcm(len(stacks), len(model.config.layers))
    stacked_layers = _turns(stacks) * places
    blocks = [model.block(layer).clone(parent=None, name=None) for layer in range(period)]
    recomputes, policy = remat_policy(model.config.remat, gathers=sharding.is_active(x), loop=True)

    def forward(block, params, x, context, layer, keys):
        params = sharding.gathered(params, model.dtype)
        return block.apply({"params": params}, x, _at(context, layer, keys), method="forward")

    def run_one(n, params, x, context, layer, *, in_loop) -> LayerOut:
        call = functools.partial(forward, blocks[n])
        # Within a loop, XLA does not eliminate these common subexpressions anyway.
        call = jax.checkpoint(call, policy=policy, prevent_cse=not in_loop) if recomputes else call
        return call(params, x, context, layer, keys)

    def alone(x, context, layer):
        weights = params.get(f"block_{layer}")
        if layer < stacked_layers:
            weights = jax.tree.map(lambda leaf: leaf[layer // places], stacks[layer % places])
        result = run_one(layer % period, weights, x, context, layer, in_loop=False)
        return result.out, _with_values(context, result)

    def step(x, each):
        grouped, first = each
        for n in range(period):
            weights = grouped[n % places]
            weights = weights if period == places else jax.tree.map(lambda leaf, n=n: leaf[n // places], weights)
            x = run_one(n, weights, x, context, first + n, in_loop=True).out
        return x, None

    # With value residuals, the first period runs before the loop, which needs its values; an incomplete one runs last.
    start = min(period, model.config.num_layers) if any(block.value_residual for block in blocks) else 0
    for layer in range(start):
        x, context = alone(x, context, layer)
    steps = max(0, stacked_layers - start) // period
    end = start + steps * period

    def by_step(leaf):
        leaf = leaf[start // places : end // places]
        return leaf if period == places else leaf.reshape(steps, period // places, *leaf.shape[1:])

    if steps:
        x = jax.lax.scan(step, x, (jax.tree.map(by_step, stacks), jnp.arange(start, end, period)))[0]
    for layer in range(end, model.config.num_layers):
        x, context = alone(x, context, layer)
    return x


def _at(context: Context, layer, keys) -> Context:
    """The context of a layer, with its number and its dropout keys."""
    return context._replace(layer=layer, dropout_key=None if keys is None else dropout.fold_in(keys, layer))


def _with_values(context: Context, result: LayerOut) -> Context:
    """The context of the layers after this one; the first layer that returns values sets `first_values`."""
    return context._replace(first_values=result.values) if context.first_values is None else context
