"""Laws of every layer that mixes tokens: causal, in pieces as in one pass, packed documents as alone."""

import pytest

from attnlab.masks import Causal, SlidingWindow
from attnlab.nn import KVCache, MultiHeadAttention
from attnlab.score_mods import ALiBi, SoftCap, alibi_slopes
from attnlab.testing import check_mixer
from tests.nn import relatives
from tests.nn.mixers import cases

HEADS = {
    "plain": {},
    "grouped": {"kv_heads": 2},
    "rotary": {"rotary": 100.0},
    "normed": {"qk_norm": True, "head_dim": 16},  # of two features the norm keeps little but their rounding
    "window": {"mask": SlidingWindow(2)},
    "sinks": {"sinks": True, "score_mod": ALiBi(alibi_slopes(4))},
    "tiles": {"kv_heads": 2, "rotary": 100.0, "impl": "blockwise"},
    "gates": {"kv_heads": 2, "score_mod": SoftCap(9.0), "forget_gate": True, "output_gate": True},
}
ATTENTION = {name: MultiHeadAttention(4, **({"mask": Causal()} | fields)) for name, fields in HEADS.items()}
LAYERS = ATTENTION | relatives.MODULES | cases.ALL
RELATIVES = tuple({type(module) for module in relatives.MODULES.values()})
FAST = ("rotary", "gates", "differential", "latent", "stick_breaking", *cases.FAST)


def faults(layer):
    def empty_cache(batch):
        if type(layer) is MultiHeadAttention:
            forget = {"forget_heads": 4} if layer.forget_gate else {}
            return KVCache.empty(batch, 24, layer.kv_heads or 4, layer.head_dim or 2, **forget)
        return layer.empty_cache(batch, 8, 24) if isinstance(layer, RELATIVES) else layer.empty_cache(batch, 8)

    return check_mixer(layer, empty_cache, features=8)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n not in FAST else ()) for n in LAYERS])
def test_layer_obeys_the_laws_of_mixing(name):
    assert faults(LAYERS[name]) == []
