"""Relatives of softmax attention in a GPT, looked into and edited."""

import jax
import numpy as np
import pytest

from attnlab import see
from attnlab.nn import GPT
from tests.nn.relatives import MODULES, X
from tests.parameters import parameters

SIZES = {"vocab_size": 11, "num_layers": 2, "num_heads": 2, "width": 16, "context": 12}
TOKENS = np.arange(20).reshape(2, 10) % 11


@pytest.mark.parametrize("kind", ["differential", pytest.param("latent", marks=pytest.mark.slow)])
def test_see_verifies_the_pattern_and_contributions_sum_to_the_logits(kind):
    model = GPT.of(**SIZES | {"num_layers": 1}, layers=kind)
    params = parameters(model, TOKENS)
    assert [site.verified for site in see.sites(model, params, TOKENS)] == [True]
    parts = see.contributions(model, params, TOKENS, targets=TOKENS)
    np.testing.assert_allclose(parts.total, parts.logits, rtol=1e-5, atol=1e-5 * np.abs(parts.logits).max())


@pytest.mark.parametrize(
    "kind, numbers",  # for one token of a layer of width 16 and two heads, and the length
    [("differential", 2 * 8 + 16), ("latent", 4 * 8 + 4), ("stick_breaking", 2 * 16)],
)
def test_cache_has_the_bytes_of_its_paper(kind, numbers):
    caches = jax.eval_shape(lambda: GPT.of(**SIZES, layers=kind).init_caches(1))
    assert sum(leaf.size for leaf in jax.tree.leaves(caches[0])) == 12 * numbers + 1


def test_edited_step_of_latent_attention_is_not_absorbed():
    """The absorbed order of products has no values of heads, which an edit would change."""
    module, edit = MODULES["latent"], {"edit_v": {"tapped": lambda v: 0 * v}}
    run = jax.jit(lambda params: module.apply(params | edit, X[:, :1], cache=module.init_cache(2, 8, 10))[0])
    np.testing.assert_allclose(run(parameters(module, X)), 0, atol=5e-6)
