"""Masks and score mods as pytrees, and as fields of Flax modules."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.masks import Causal, Dense, MaskFn, Padding, SlidingWindow
from attnlab.nn import MultiHeadAttention
from attnlab.score_mods import ALiBi, RelativeBias, ScoreFn, SoftCap
from tests.parameters import parameters

NODES = (
    Padding(jnp.array([1, 2])) & Causal() | ~Dense(np.ones((3, 3), bool)),
    SlidingWindow(3) & MaskFn(max, np.ones(2), np.ones(3)),
    (ALiBi(np.ones(2)), SoftCap(jnp.array(2.0)), SoftCap(2.0), ScoreFn(max, np.ones(2))),
)
X = np.random.default_rng(0).standard_normal((1, 4, 8)).astype(np.float32)


@pytest.mark.parametrize("node", NODES, ids=["masks", "function", "mods"])
@pytest.mark.parametrize(
    "replacement",
    [0, True, None, max, jax.ShapeDtypeStruct((2,), jnp.int32)],
    ids=["int", "bool", "none", "function", "shape"],
)
def test_tree_map_to_any_value_keeps_the_structure(node, replacement):
    mapped = jax.tree.map(lambda leaf: replacement, node)
    restored = jax.tree.map(lambda leaf, value: leaf, node, mapped, is_leaf=lambda x: x is None)
    assert jax.tree.structure(restored) == jax.tree.structure(node)
    assert jax.tree.leaves(mapped, is_leaf=lambda x: x is None) == [replacement] * len(jax.tree.leaves(node))
    assert mapped == jax.tree.map(lambda leaf: replacement, node)


def test_tree_of_in_axes_maps_a_mask():
    mask = Padding(jnp.array([1, 3])) & Dense(np.ones((3, 3), bool))
    in_axes = jax.tree.map(lambda leaf: 0 if leaf.ndim == 1 else None, mask)
    drawn = np.asarray(jax.jit(jax.vmap(lambda mask: mask.dense(3, 3), in_axes=(in_axes,)))(mask))
    assert drawn.sum(axis=(1, 2)).tolist() == [3, 9]


def test_jit_traces_equal_structures_once():
    traced = []

    @jax.jit
    def ends(mod):
        traced.append(mod)
        return mod.slopes[-1]

    assert [float(ends(ALiBi(jnp.array([1.0, last])))) for last in (2, 3)] == [2, 3]
    assert len(traced) == 1


@pytest.mark.parametrize(
    "make", [lambda: jnp.arange(2.0), lambda: np.arange(2.0), lambda: jax.random.key(1)], ids=["jax", "numpy", "key"]
)
def test_nodes_compare_and_hash_by_value(make):
    node, equal = ScoreFn(max, make()), ScoreFn(max, make())
    assert node == equal and hash(node) == hash(equal)
    for other in (ScoreFn(min, make()), ScoreFn(max, make(), make()), ScoreFn(max, jnp.ones(2)), SoftCap(2.0)):
        assert node != other


def test_traced_nodes_compare_by_identity():
    def compare(mod):
        return [mod == mod, mod == ALiBi(mod.slopes), mod == ALiBi(mod.slopes + 1), mod == ALiBi(jnp.ones(2))]

    assert jnp.array(jax.jit(compare)(ALiBi(jnp.ones(2)))).tolist() == [True, True, False, False]


def test_modules_with_arrays_in_a_field_compare_by_value():
    def module(*slopes):
        return MultiHeadAttention(num_heads=2, score_mod=ALiBi(jnp.array(slopes)))

    assert module(1.0, 2.0) == module(1.0, 2.0) and hash(module(1.0, 2.0)) == hash(module(1.0, 2.0))
    assert module(1.0, 2.0) != module(1.0, 3.0)


def test_nn_jit_honours_arrays_in_a_field():
    params = parameters(MultiHeadAttention(num_heads=2), X)
    tables = np.zeros((2, 3), np.float32), np.arange(6, dtype=np.float32).reshape(2, 3)
    for field in ({"mask": np.tri(4, dtype=bool)}, *({"score_mod": RelativeBias(jnp.asarray(x))} for x in tables)):
        fields = {"num_heads": 2} | field
        plain = jax.jit(MultiHeadAttention(**fields).apply)(params, X)
        np.testing.assert_allclose(nn.jit(MultiHeadAttention)(**fields).apply(params, X), plain, atol=1e-6)


def test_nn_jit_with_traced_arrays_in_a_field_raises_one_line():
    def init(slopes):
        return nn.jit(MultiHeadAttention)(num_heads=2, score_mod=ALiBi(slopes)).init(jax.random.key(0), X)

    with pytest.raises(TypeError, match=r"ALiBi holds a traced array.*nn\.jit"):
        jax.jit(init)(np.ones(2, np.float32))
