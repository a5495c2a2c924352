"""Each word of `mixer` and `pattern` is a kind of layer."""

import jax
import numpy as np
import pytest

from attnlab.nn import GPT
from attnlab.nn.kinds import KINDS, MIXERS, kind_of
from attnlab.support.options import options

MODEL = GPT(40, 3, 2, 16, 12, positions="rotary")
TOKENS = np.arange(24).reshape(2, 12)
PARAMS = jax.eval_shape(MODEL.init, jax.random.key(0), TOKENS)


def program(**fields):
    return jax.jit(MODEL.clone(**fields).apply).lower(PARAMS, TOKENS).as_text()


@pytest.mark.parametrize("window", [{}, pytest.param({"window": 3}, marks=pytest.mark.slow)], ids=repr)
def test_auto_and_attention_make_the_programs_of_rotary_and_of_no_pattern(window):
    expected = program(**window)
    assert program(**window, positions="auto") == program(**window, pattern="attention") == expected
    assert program(**window, pattern="local" if window else "global") == expected


def test_attention_in_a_pattern_is_local_where_the_window_is_set():
    hybrid = program(window=3, pattern="attention global")
    assert hybrid == program(window=3, pattern="local global") != program(window=3)


def test_every_kind_reads_options_that_there_are():
    names = {"mask", "alibi", "rotary", "recurrence", "latent", "score_mod"} | set(options(GPT))
    for name, kind in KINDS.items():
        assert kind.reads <= names, name


def test_mixer_is_the_kind_of_all_layers_without_a_pattern():
    assert set(KINDS) == {*MIXERS, "local", "global"} and options(GPT)["mixer"].choices == MIXERS
    for mixer in MIXERS:
        assert [kind_of(MODEL.clone(mixer=mixer), layer) for layer in range(3)] == [mixer] * 3
    assert [kind_of(MODEL.clone(pattern="global attention"), n) for n in range(3)] == ["global", "attention", "global"]
