"""Checkpoints of Flax's attention load into attnlab's, and vice versa."""

import flax.linen as nn
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from attnlab.masks import Causal
from attnlab.nn import MultiHeadAttention

X = jax.random.normal(jax.random.key(0), (2, 6, 8))
OURS = MultiHeadAttention(num_heads=4, mask=Causal())
THEIRS = nn.MultiHeadAttention(num_heads=4)
MASK = nn.make_causal_mask(X[..., 0])


@pytest.mark.parametrize("saves", ["attnlab", "flax"])
def test_orbax_checkpoint_is_interchangeable_with_flax(saves, tmp_path):
    saved, loaded = (OURS, THEIRS) if saves == "attnlab" else (THEIRS, OURS)
    params = saved.init(jax.random.key(1), X)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", params)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "checkpoint", loaded.init(jax.random.key(2), X))
    jax.tree.map(np.testing.assert_array_equal, restored, params)
    np.testing.assert_allclose(OURS.apply(restored, X), THEIRS.apply(restored, X, mask=MASK), atol=2e-6)
