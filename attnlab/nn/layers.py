"""A model's layers: their parameters one by one or stacked, and what of them is stored for the gradient."""

import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from attnlab.nn import sharding

STACKED = "blocks"

# What of a block is stored for the gradient: everything; its input; that and its matrix products; its input and what
# the attention operator returns.
REMAT = ("none", "block", "dots", "attention")


def stack_layers(tree):
    """`block_0`, `block_1`, … of a tree of parameters as one `blocks`, whose leaves have an axis of layers in front.

    Layers that are one array are compiled once and run in a loop: see `GPT`. Other parameters stay as they are, and so
    does a tree without layers. An optimizer's state may be given, too; leaves may be arrays or `jax.ShapeDtypeStruct`.

    >>> tree = stack_layers({"block_0": {"w": jnp.ones(3)}, "block_1": {"w": jnp.zeros(3)}, "norm": jnp.ones(3)})
    >>> jax.tree.map(jnp.shape, tree)
    {'blocks': {'w': (2, 3)}, 'norm': (3,)}
    """

    def convert(node):
        if not _has_layers(node):
            return node
        layers = sorted((name for name in node if re.fullmatch(r"block_\d+", name)), key=lambda name: int(name[6:]))
        others = {name: value for name, value in node.items() if name not in layers}
        return {**others, STACKED: jax.tree.map(lambda *x: _stack(x), *(node[name] for name in layers))}

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
        others = {name: value for name, value in node.items() if name != STACKED}
        layers = {f"block_{n}": jax.tree.map(lambda x, n=n: _slice(x, n), node[STACKED]) for n in range(depth(node))}
        return others | layers

    return jax.tree.map(convert, tree, is_leaf=is_stacked)


def is_stacked(params) -> bool:
    """Whether parameters hold stacked layers.

    >>> is_stacked({"blocks": {"w": jnp.ones((2, 3))}})
    True
    """
    return isinstance(params, Mapping) and STACKED in params


def depth(params) -> int:
    """The number of layers in stacked parameters."""
    return jax.tree.leaves(params[STACKED])[0].shape[0]


def remat_policy(remat: str, *, gathers: bool, loop: bool):
    """(whether `jax.checkpoint` is needed, its policy: what of a block is stored for the gradient).

    Without a loop, XLA may recompute the elementwise functions between products by itself. Across the iterations of a
    loop it cannot, so "none" is treated as "dots" there.

    Args:
      remat: one of `REMAT`.
      gathers: whether the block gathers its parameters, which are then gathered again for the gradient.
      loop: whether the layers are a loop.
    """
    remat = "dots" if loop and remat == "none" else remat

    def saves(primitive, *_, **params):
        if sharding.is_gather(primitive):
            return False
        if remat == "dots":
            return _is_product(primitive, params) or _is_attention(primitive, params)
        return remat == "none" or (remat == "attention" and _is_attention(primitive, params))

    return remat != "none" or gathers, saves


def _is_product(primitive, params) -> bool:
    """A product with weights: those of scores with values have batch axes."""
    if primitive.name == "dot_general":
        return params["dimension_numbers"][1] == ((), ())
    return primitive.name == "matrix_product"


def _is_attention(primitive, params) -> bool:
    """Residuals of the attention operator: arrays named "attention", and the outputs of cuDNN's primitives."""
    return (primitive.name == "name" and params["name"] == "attention") or primitive.name.startswith(
        "dot_product_attention_fwd"
    )


def _has_layers(node) -> bool:
    return isinstance(node, Mapping) and "block_0" in node


def _stack(leaves):
    first = leaves[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        at = first.sharding
        at = NamedSharding(at.mesh, PartitionSpec(None, *at.spec)) if isinstance(at, NamedSharding) else at
        return jax.ShapeDtypeStruct((len(leaves), *first.shape), first.dtype, sharding=at)
    return (np if isinstance(first, np.ndarray) else jnp).stack(leaves)


def _slice(x, n: int):
    if isinstance(x, jax.ShapeDtypeStruct):
        at = x.sharding
        at = NamedSharding(at.mesh, PartitionSpec(*at.spec[1:])) if isinstance(at, NamedSharding) else at
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=at)
    return x[n]
