"""Parameters of a module without compiling its `init`: shapes from `jax.eval_shape`, values from NumPy."""

import jax
import numpy as np


def parameters(module, *args, seed=0, **options):
    """The variables of `module.init(key, *args, **options)`, drawn by NumPy.

    Matrices have variance 1 / fan-in and embeddings 1; biases and other vectors are small, and scales are near 1.
    Unlike initial values, each of them has an effect.
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
            # [heads, head_dim, features] for the output of attention, otherwise [features, …].
            inputs = leaf.shape[:-1] if path[-2:][0] == jax.tree_util.DictKey("out") else leaf.shape[:1]
            values = values / np.sqrt(np.prod(inputs))
        return values.astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)
