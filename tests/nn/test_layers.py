"""The laws of `attnlab.testing.check_layer` hold for every layer that mixes tokens."""

import pytest

from attnlab.masks import Causal, SlidingWindow
from attnlab.nn import MultiHeadAttention
from attnlab.score_mods import ALiBi, alibi_slopes
from attnlab.testing import check_layer
from attnlab.testing.layer import LENGTH
from tests.nn import relatives
from tests.nn.mixers import cases

HEADS = {
    "plain": {},
    "rotary": {"rotary": 100.0},
    "normed": {"qk_norm": True, "head_dim": 16},  # with two features the norm leaves little but rounding
    "window": {"mask": SlidingWindow(2)},  # with a cache that overflows
    "sinks": {"sinks": True, "score_mod": ALiBi(alibi_slopes(4))},
}
ATTENTION = {name: MultiHeadAttention(4, **({"mask": Causal()} | fields)) for name, fields in HEADS.items()}


LAYERS = ATTENTION | relatives.MODULES | cases.ALL
FAST = ("window", "gates", "convolved", "exclusive", "latent", "gated_delta", "mamba2")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n not in FAST else ()) for n in LAYERS])
def test_layer_obeys_the_laws_of_mixing(name):
    assert check_layer(LAYERS[name], features=8, capacity=LENGTH // (2 if name == "window" else 1)) == []
