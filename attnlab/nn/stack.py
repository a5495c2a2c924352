"""The layers of a model: the layout of their parameters, and the one way to run them.

One by one, the parameters are `block_0`, `block_1`, …. Stacked, layers of like shapes are one `blocks`, with an axis of
layers in front. Where a pattern repeats layers of unlike shapes, each place in it has a stack, `blocks_0`, `blocks_1`,
…, and layers after its last whole repetition stay unstacked.
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
from attnlab.nn.kinds import pattern_of
from attnlab.nn.remat import remat_policy
from attnlab.ops import dropout

# ------------------------------------------------------------------------------------------------------------- layout


def stack_layers(tree):
    """Stack the layers `block_0`, `block_1`, … of a tree of parameters: leaves have an axis of layers in front.

    Stacked layers are compiled once and run in a loop: see `GPT`. Other parameters stay as they are, and so does a tree
    without layers. The tree may be an optimizer's state; leaves may be arrays or `jax.ShapeDtypeStruct`.

    >>> tree = stack_layers({"block_0": {"w": jnp.ones(3)}, "block_1": {"w": jnp.zeros(3)}, "norm": jnp.ones(3)})
    >>> jax.tree.map(jnp.shape, tree)
    {'blocks': {'w': (2, 3)}, 'norm': (3,)}

    Layers of two shapes that alternate are two stacks:

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
    """The shortest pattern whose repetition the layers' shapes are."""
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


def run(model, x, keys, caches, **options):
    """(The residual stream `[B, T, F]` after the layers of a `GPT` that is being applied, the extended caches or None).

    `keys` are dropout keys, one per example; `caches` one per layer; `options` arguments of every block.
    """
    params = model.variables.get("params", {})
    if not is_stacked(params):
        return _one_by_one(model, x, keys, caches, options)
    stacks, alone = _stacks(params), sum(bool(re.fullmatch(r"block_\d+", name)) for name in params)
    if (found := _turns(stacks) * len(stacks) + alone) != model.num_layers:
        raise ValueError(f"params have {found} stacked layers, expected num_layers = {model.num_layers}")
    others = any(model.variables[name] for name in model.variables if name != "params")
    if caches is None and not others and is_filter_empty(model.scope.mutable):
        return _in_a_loop(model, x, keys, options, params), None

    def unstacked(variables):
        return {"params": unstack_layers(variables["params"])}

    # Caches and other collections belong to single layers.
    return nn.map_variables(_one_by_one, "params", trans_in_fn=unstacked)(model, x, keys, caches, options)


def _one_by_one(model, x, keys, caches, options):
    """Run the layers as modules, whose parameters are `block_0`, `block_1`, …."""

    def apply(block, x, handed, key, cache):
        return block(x, **options, **handed, cache=cache, dropout_key=key)

    gathers = not model.is_initializing() and sharding.is_active(x)
    recomputes, policy = remat_policy(model.remat, gathers=gathers, loop=False)
    apply_whole = sharding.gathering(model, apply)
    if recomputes and caches is None:
        apply_whole = nn.remat(apply_whole, policy=policy)
    extended, handed = [], {}
    for layer in range(model.num_layers):
        cache = None if caches is None else caches[layer]
        block = model.block(layer)
        out = apply_whole(block, x, _given(block, layer, handed), _key_of(keys, layer), cache)
        x, *others = out if isinstance(out, tuple) else (out,)
        if caches is not None:
            extended.append(others.pop(0))
        handed = _handed(others, handed)
    return x, None if caches is None else tuple(extended)


def _in_a_loop(model, x, keys, options, params):
    """Run the layers as one loop over stacks: one pattern is compiled, whatever the depth."""
    stacks = _stacks(params)
    places, period = len(stacks), math.lcm(len(stacks), len(pattern_of(model)))
    stacked_layers = _turns(stacks) * places
    blocks = [model.block(layer).clone(parent=None, name=None) for layer in range(period)]
    recomputes, policy = remat_policy(model.remat, gathers=sharding.is_active(x), loop=True)

    def apply(block, x, params, layer, keys, handed):
        params = sharding.gathered(params, model.dtype)
        given = _given(block, layer, handed)
        return block.apply({"params": params}, x, **options, **given, dropout_key=_key_of(keys, layer))

    def run_one(n, x, params, layer, handed, *, in_loop):
        call = functools.partial(apply, blocks[n])
        # A loop is a barrier by itself.
        call = jax.checkpoint(call, policy=policy, prevent_cse=not in_loop) if recomputes else call
        out = call(x, params, layer, keys, handed)
        x, *others = out if isinstance(out, tuple) else (out,)
        return x, _handed(others, handed)

    def alone(x, layer, handed):
        own = params.get(f"block_{layer}")
        if layer < stacked_layers:
            own = jax.tree.map(lambda leaf: leaf[layer // places], stacks[layer % places])
        return run_one(layer % period, x, own, layer, handed, in_loop=False)

    def step(x, each):
        grouped, first = each
        for n in range(period):
            own = grouped[n % places]
            own = own if period == places else jax.tree.map(lambda leaf, n=n: leaf[n // places], own)
            x, _ = run_one(n, x, own, first + n, handed, in_loop=True)
        return x, None

    # With value residuals the first period gives its values to the others; an incomplete one is the last.
    hands = any(_has_value_residual(block) for block in blocks)
    start, handed = (min(period, model.num_layers) if hands else 0), {}
    for layer in range(start):
        x, handed = alone(x, layer, handed)
    steps = max(0, stacked_layers - start) // period
    end = start + steps * period

    def by_step(leaf):
        leaf = leaf[start // places : end // places]
        return leaf if period == places else leaf.reshape(steps, period // places, *leaf.shape[1:])

    if steps:
        x = jax.lax.scan(step, x, (jax.tree.map(by_step, stacks), jnp.arange(start, end, period)))[0]
    for layer in range(end, model.num_layers):
        x, _ = alone(x, layer, handed)
    return x


def _key_of(keys, layer):
    return None if keys is None else dropout.fold_in(keys, layer)


def _given(block, layer, handed: dict) -> dict:
    """The arguments of a block: the number of a layer that depends on it, and what earlier layers hand to it."""
    number = {"layer": layer} if getattr(block.attention, "numbered", False) else {}
    return number | (handed if _has_value_residual(block) else {})


def _has_value_residual(block) -> bool:
    return getattr(block.attention, "value_residual", False)


def _handed(others: list, handed: dict) -> dict:
    """Arguments from a block to the next: the values of the first layer."""
    return {"first_values": others[0], **handed} if others else handed
