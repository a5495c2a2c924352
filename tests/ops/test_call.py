"""The record of a call: a pytree whose numbers and tile sizes are static."""

import dataclasses

import jax
import numpy as np
import pytest

from attnlab.masks import Padding
from attnlab.ops.call import AttentionCall

Q, K = np.ones((2, 5, 4, 8), np.float32), np.ones((2, 7, 2, 8), np.float32)
CALL = AttentionCall(Q, K, K, mask=Padding(np.array([3, 7])), scale=0.5, dropout_rate=0.1, block_sizes=(4, 8))


def test_arrays_are_leaves_and_numbers_and_tile_sizes_are_static():
    leaves, treedef = jax.tree.flatten(CALL)
    assert [leaf.shape for leaf in leaves] == [Q.shape, K.shape, K.shape, (2,)]
    again = jax.tree.unflatten(treedef, leaves)
    assert again == CALL and again.block_sizes == (4, 8) and again.scale == 0.5
    traced = jax.eval_shape(lambda call: call.replace(scale=call.q.sum()), CALL)
    assert (traced.dropout_rate, traced.block_sizes, traced.scale.shape) == (0.1, (4, 8), ())


def test_replaced_fields_keep_the_structure_and_the_rest():
    rebuilt = jax.tree.map(lambda x: x, CALL)
    for call in (CALL, rebuilt):
        changed = call.replace(q=2 * Q, v=None)
        assert changed.v is None and (changed.q == 2).all() and call.v is not None
        assert jax.tree.structure(changed.replace(v=K)) == jax.tree.structure(call)
    with pytest.raises(dataclasses.FrozenInstanceError):
        CALL.q = K


def test_call_reports_its_sizes():
    assert (CALL.batch, CALL.lengths, CALL.num_heads) == ((2,), (5, 7), 4)
