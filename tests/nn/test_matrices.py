"""Matrices of a user's model; mixers/test_parameters.py tests those of attnlab's own layers."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from attnlab.nn.matrices import Matrix, matrices_of


class Model(nn.Module):
    """Flax layers, and a parameter that the model's `matrices` method describes."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(9, 4, name="embed")(tokens)
        x = nn.Conv(4, (3,), feature_group_count=4, name="depthwise")(nn.Conv(4, (3,), name="convolution")(x))
        x = nn.DenseGeneral((2, 2), name="heads")(x).reshape(x.shape) @ self.param("own", nn.ones, (4, 4))
        return nn.Dense(9, name="logits")(nn.LayerNorm()(x))

    def matrices(self, features):
        return {"own": Matrix(fused=(features,))}


def test_matrices_of_user_model_exclude_embeddings_depthwise_and_logits():
    matrices = matrices_of(Model(), np.zeros((1, 5), np.int32))
    assert matrices == {
        "convolution/kernel": Matrix((-3, -2)),
        "heads/kernel": Matrix((-3,), (-2, -1)),
        "own": Matrix(fused=(5,)),
    }
    assert matrices_of(nn.LayerNorm(), jnp.ones((1, 4))) == {}
