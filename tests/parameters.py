"""Parameters of a module without compiling its `init`: shapes from `jax.eval_shape`, values from NumPy."""

import jax
import numpy as np


def parameters(module, *args, seed=0, **options):
    """The variables that `module.init(key, *args, **options)` has, drawn by NumPy.

    Matrices have the variance 1 / fan-in, embeddings 1; biases and other vectors are small, and scales near 1: unlike
    initial values, none of them is without effect.
    """
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), *args, **options))
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        values = rng.standard_normal(leaf.shape)
        if name == "scale":
            values = 1 + 0.1 * values
        elif leaf.ndim < 2 or name == "bias":
            values = 0.1 * values
        elif name == "kernel":
            # [heads, head_dim, features] of an attention's output, else [features, …].
            inputs = leaf.shape[:-1] if path[-2:][0] == jax.tree_util.DictKey("out") else leaf.shape[:1]
            values = values / np.sqrt(np.prod(inputs))
        return values.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)
