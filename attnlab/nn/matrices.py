"""The matrices of a model, that is, the parameters that multiply features, found by the classes of its modules.

A module's method `matrices` returns a table of its kernels, `{path: Matrix}`; the tables of Flax's modules are here.
Parameter names decide nothing. Embedding tables, depthwise kernels, norms and biases are in no table.
"""

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp


class Matrix(NamedTuple):
    """The axes of a kernel that form a matrix, counted from the last axis; axes before them enumerate matrices.

    Attributes:
      inputs: axes of the features that are multiplied.
      outputs: axes of the resulting features.
      fused: sizes of several matrices that lie side by side along the last axis; () for one.
    """

    inputs: tuple[int, ...] = (-2,)
    outputs: tuple[int, ...] = (-1,)
    fused: tuple[int, ...] = ()


def matrices_of(model: nn.Module, *inputs: Any) -> dict[str, Matrix]:
    """The matrices of a model by parameter path, except for the layer that computes the logits.

    Args:
      model: any Flax module. Its submodules declare matrices by a method `matrices(features)`, where `features` is the
        input's width. Kernels of `nn.Dense`, `nn.DenseGeneral` and ungrouped `nn.Conv` count without it.
      inputs: the model's inputs, arrays or `jax.ShapeDtypeStruct`; nothing is computed.

    >>> matrices = matrices_of(Mlp(), jnp.zeros((1, 8)))
    >>> matrices["up/kernel"]
    Matrix(inputs=(-2,), outputs=(-1,), fused=())
    """
    matrices = {}

    def interceptor(call, args, kwargs, context):
        result = call(*args, **kwargs)
        # A module's call ends after its submodules' calls, so its table overrides theirs.
        if context.method_name in ("__call__", "forward"):
            for name, matrix in _table(context.module, args).items():
                matrices["/".join((*context.module.path, name))] = matrix
        return result

    with nn.intercept_methods(interceptor):
        run = functools.partial(model.init_with_output, jax.random.key(0))
        logits, variables = jax.eval_shape(run, *inputs)
    return {path: x for path, x in matrices.items() if not _makes_logits(path, variables["params"], logits)}


def matrix_at(matrices: dict[str, Matrix], path: Iterable) -> Matrix | None:
    """The matrix at a parameter's `jax.tree_util` path, in stacked or unstacked layers; None if it is no matrix."""
    path = jax.tree_util.keystr(tuple(path), simple=True, separator="/")
    return matrices.get(re.sub(r"(?<![^/])blocks(?:_(\d+))?(?=/)", lambda match: f"block_{match[1] or 0}", path))


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
    """Whether a kernel belongs to a direct submodule of the model, and has as many outputs as there are logits."""
    name, *rest = path.split("/")
    return rest == ["kernel"] and params[name]["kernel"].shape[-1] == jax.tree.leaves(logits)[0].shape[-1]
