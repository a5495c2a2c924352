"""The matrices of a model, found by the classes of its modules: the parameters that multiply features.

A module says itself what its kernels are, in a table `matrices` of its class, `{path: Matrix}`; modules of Flax have
theirs here. Names decide nothing: tables of embeddings, depthwise kernels, norms and biases belong to modules without
matrices.
"""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp


class Matrix(NamedTuple):
    """The axes of a kernel that are a matrix, counted from the last; others, in front of them, are of many matrices.

    Attributes:
      inputs: of the features that are multiplied.
      outputs: of the features that result.
      fused: sizes of several matrices that lie side by side along the last axis; () for one.
    """

    inputs: tuple[int, ...] = (-2,)
    outputs: tuple[int, ...] = (-1,)
    fused: tuple[int, ...] = ()


def matrices_of(model: nn.Module, *inputs: Any) -> dict[str, Matrix]:
    """The matrices of a model by the paths of their parameters, without the layer that makes its logits.

    Args:
      model: any module of Flax. A module whose class has `matrices`, a method from its input's features to a table,
        says them; so are `nn.Dense`, `nn.DenseGeneral` and `nn.Conv` anywhere within it, but for the kernels above.
      inputs: of the model, arrays or `jax.ShapeDtypeStruct`; nothing is computed.

    >>> found = matrices_of(Mlp(), jnp.zeros((1, 8)))
    >>> found["up/kernel"]
    Matrix(inputs=(-2,), outputs=(-1,), fused=())
    """
    found = {}

    def interceptor(call, args, kwargs, context):
        result = call(*args, **kwargs)
        # A module is called after its own: its table is what counts for them too.
        if context.method_name in ("__call__", "forward"):
            for name, matrix in _table(context.module, args).items():
                found["/".join((*context.module.path, name))] = matrix
        return result

    with nn.intercept_methods(interceptor):
        run = functools.partial(model.init_with_output, jax.random.key(0))
        logits, variables = jax.eval_shape(run, *inputs)
    return {path: x for path, x in found.items() if not _makes_logits(path, variables["params"], logits)}


def matrix_at(found: dict[str, Matrix], path: Iterable) -> Matrix | None:
    """The matrix of a parameter at a path of `jax.tree_util`, whose layers may be stacked; None for no matrix."""
    path = jax.tree_util.keystr(tuple(path), simple=True, separator="/")
    return found.get(re.sub(r"(?<![^/])blocks(?:_(\d+))?(?=/)", lambda match: f"block_{match[1] or 0}", path))


def _table(module: nn.Module, args: tuple) -> dict[str, Matrix]:
    if (table := getattr(module, "matrices", None)) is not None:
        return table(jnp.shape(args[0])[-1] if args else None)
    return next((table(module) for kind, table in _FLAX.items() if isinstance(module, kind)), {})


def _of_general(module: nn.DenseGeneral) -> dict[str, Matrix]:
    outputs, inputs = (len(x) if isinstance(x, tuple | list) else 1 for x in (module.features, module.axis))
    axes = tuple(range(-inputs - outputs, 0))
    return {"kernel": Matrix(axes[:inputs], axes[inputs:])}


def _of_convolution(module: nn.Conv) -> dict[str, Matrix]:
    size = module.kernel_size
    axes = tuple(range(-2 - (1 if isinstance(size, int) else len(size)), -1))
    return {"kernel": Matrix(axes)} if module.feature_group_count == 1 else {}


_FLAX: dict[type[nn.Module], Callable[[Any], dict[str, Matrix]]] = {
    nn.Dense: lambda module: {"kernel": Matrix()},
    nn.DenseGeneral: _of_general,
    nn.Conv: _of_convolution,
}


def _makes_logits(path: str, params, logits) -> bool:
    """Whether a kernel is of a layer of the model itself, not of one of its layers, that ends in the logits' size."""
    name, *rest = path.split("/")
    return rest == ["kernel"] and params[name]["kernel"].shape[-1] == jax.tree.leaves(logits)[0].shape[-1]
