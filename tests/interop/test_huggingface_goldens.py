"""Every family of transformers' models on Pythons without torch, by answers of transformers that are kept."""

import functools
import json

import jax
import numpy as np
import pytest

from attnlab import sample
from attnlab.interop.huggingface import from_hf, save_hf
from attnlab.interop.huggingface.weights import unload_state
from tests.interop.huggingface_peers import NAMES, PEERS, SCORED, WRITTEN, answers, goldens, tokens, weights


@functools.cache
def ours(name):
    """The state dict of a kept model, its family, and our model and parameters."""
    kept = goldens(name)
    state, config = weights(json.loads(str(kept["shapes"]))), json.loads(str(kept["config"]))
    return state, config["model_type"], *from_hf(state, config)


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_those_that_are_kept(name):
    _, _, model, params = ours(name)
    # As where transformers itself is asked: float32 gives about 1e-5.
    logits = np.asarray(jax.jit(model.apply)(params, tokens(name)))[:, SCORED]
    np.testing.assert_allclose(logits, goldens(name)["logits"], atol=1e-4)


# All families have the same loop: the others, whose logits are tested above, are slow.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("llama", "gemma3_text") else pytest.mark.slow) for name in PEERS]
)
def test_greedy_text_equals_that_which_is_kept(name):
    _, _, model, params = ours(name)
    drawn = np.concatenate(list(sample.generate(model, params, tokens(name)[0, :5], 200, temperature=0.0)))
    np.testing.assert_array_equal(drawn, goldens(name)["greedy"])
    assert len(set(drawn.tolist())) > 1  # not one token again and again


@pytest.mark.parametrize("name", WRITTEN)
def test_round_trip_is_bit_exact(name, tmp_path):
    state, family, model, params = ours(name)
    back = unload_state(model, params["params"], family)
    if model.tie_embeddings:
        embedding = next(x for key, x in state.items() if "embed" in key or "wte" in key)
        np.testing.assert_array_equal(back.pop("lm_head.weight"), embedding)
    assert back.keys() == state.keys()
    jax.tree.map(np.testing.assert_array_equal, back, state)
    again, its_params = from_hf(save_hf(tmp_path / name, model, params, model_type=family))
    assert again == model
    jax.tree.map(np.testing.assert_array_equal, its_params, params)


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_kept_answers_are_those_of_transformers(name):
    pytest.importorskip("transformers", reason="transformers is not installed")
    kept, now = goldens(name), answers(name)
    assert kept["shapes"] == now["shapes"]
    np.testing.assert_array_equal(kept["greedy"], now["greedy"])
    # Rounding differs between processors: float32, logits of size 1 to 10.
    np.testing.assert_allclose(kept["logits"], now["logits"], atol=1e-4)
