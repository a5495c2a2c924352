"""Every family of transformers' models: bits that come back, from model objects and from saved folders.

Logits and greedy texts are compared in test_huggingface_goldens.py.
"""

import functools

import jax
import numpy as np
import pytest

from attnlab.interop.huggingface import from_hf, save_hf, to_hf
from tests.interop.huggingface_peers import NAMES, WRITTEN, logits, peer, tokens


@functools.cache
def ours(name):
    return from_hf(peer(name)[1])


def assert_same(one, other):
    assert one[0] == other[0]
    jax.tree.map(np.testing.assert_array_equal, one[1], other[1])


@pytest.mark.parametrize("name", WRITTEN)
def test_saved_family_loads_in_transformers(name, tmp_path):
    torch, theirs = peer(name)
    auto = pytest.importorskip("transformers").AutoModelForCausalLM
    saved = save_hf(tmp_path / "ours", *ours(name), model_type=theirs.config.model_type)
    read, report = auto.from_pretrained(saved, output_loading_info=True, attn_implementation="eager")
    assert type(read) is type(theirs) and not any(report.values()), report
    state = to_hf(*ours(name), model_type=theirs.config.model_type)
    assert state.keys() == theirs.state_dict().keys()
    assert all(torch.equal(state[key], tensor) for key, tensor in theirs.state_dict().items())
    with torch.no_grad():
        np.testing.assert_array_equal(read(torch.from_numpy(tokens(name))).logits.numpy(), logits(name))
    assert_same(from_hf(saved), ours(name))


@pytest.mark.parametrize("name", NAMES)
def test_folder_that_transformers_saved_is_the_model_object(name, tmp_path):
    peer(name)[1].save_pretrained(tmp_path / "theirs")
    assert_same(from_hf(tmp_path / "theirs"), ours(name))
