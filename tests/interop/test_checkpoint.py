"""Checkpoints of Flax's attention load into attnlab's, and vice versa."""

import flax.linen as nn
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from attnlab.masks import Causal
from attnlab.nn import MultiHeadAttention
from tests.parameters import parameters

X = np.random.default_rng(0).standard_normal((2, 6, 8)).astype(np.float32)
OURS = MultiHeadAttention(num_heads=4, mask=Causal())
THEIRS = nn.MultiHeadAttention(num_heads=4)
MASK = np.tri(6, dtype=bool)[None, None]


@pytest.mark.parametrize("saves", ["attnlab", "flax"])
def test_orbax_checkpoint_is_interchangeable_with_flax(saves, tmp_path):
    saved, loaded = (OURS, THEIRS) if saves == "attnlab" else (THEIRS, OURS)
    params = parameters(saved, X)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", params)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "checkpoint", parameters(loaded, X, seed=1))
    jax.tree.map(np.testing.assert_array_equal, restored, params)
    ours, theirs = jax.jit(lambda params: (OURS.apply(params, X), THEIRS.apply(params, X, mask=MASK)))(restored)
    np.testing.assert_allclose(ours, theirs, atol=2e-6)
