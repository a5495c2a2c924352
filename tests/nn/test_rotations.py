"""Rotary positions on a fraction of the features, and scaled to longer contexts."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlab.nn import Rotary, rotary

X = np.random.default_rng(0).standard_normal((2, 7, 3, 16)).astype(np.float32)
LONG = {"factor": 8.0, "original_context": 1000}
turned = jax.jit(rotary, static_argnums=2)


def test_rotary_fraction_leaves_last_features_unrotated():
    half = np.asarray(turned(X, np.arange(7), Rotary(base=100.0, fraction=0.5)))
    np.testing.assert_array_equal(half[..., 8:], X[..., 8:])
    np.testing.assert_array_equal(half[..., :8], turned(X[..., :8], np.arange(7), 100.0))


def test_rotary_linear_equals_slower_positions():
    slowed = turned(X, np.arange(7), Rotary(scaling="linear", factor=4.0))
    # float32 angles up to 7 are exact to 4e-7.
    np.testing.assert_allclose(np.asarray(slowed)[:, ::4], turned(X[:, ::4], np.arange(2), 10_000.0), atol=2e-6)


def turns(frequencies):
    return 1000 * frequencies / (2 * np.pi)


@given(base=st.floats(10, 1e6), head_dim=st.integers(2, 64).map(lambda n: 2 * n))
@pytest.mark.parametrize("scaling", ["llama3", "yarn"])
def test_rotary_scaling_slows_only_slow_pairs(scaling, base, head_dim):
    plain = Rotary(base).frequencies(head_dim)
    options = Rotary(base, scaling=scaling, **LONG)
    ratio = options.frequencies(head_dim) / plain
    assert (np.diff(ratio) <= 1e-6).all()  # slower pairs, which come later, are slowed more
    # YaRN's bounds are rounded outwards to whole pairs, so pairs well inside are certain.
    one_pair = base ** (2 / head_dim)
    fast = options.fast_turns or (4 if scaling == "llama3" else 32)
    np.testing.assert_allclose(ratio[turns(plain) > fast * one_pair], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns(plain) < 1 / one_pair], 1 / 8, rtol=1e-6)


def test_rotary_llama3_interpolates_linearly_in_turns():
    plain, slowed = (Rotary(500.0, scaling=kind, **LONG).frequencies(64) for kind in ("none", "llama3"))
    between = (turns(plain) > 1) & (turns(plain) < 4)
    share = (turns(plain[between]) - 1) / 3
    assert between.sum() > 3
    np.testing.assert_allclose(slowed[between], plain[between] * (share + (1 - share) / 8), rtol=1e-5)


def test_rotary_yarn_interpolates_linearly_in_pairs():
    options = Rotary(500.0, scaling="yarn", truncate=False, **LONG)
    ratio = options.frequencies(64) / Rotary(500.0).frequencies(64)
    between = ratio[(ratio < 1 - 1e-6) & (ratio > 1 / 8 + 1e-6)]
    np.testing.assert_allclose(np.diff(between, 2), 0, atol=1e-6)
    np.testing.assert_allclose(options.amplitude, 0.1 * np.log(8) + 1)
    rotated = turned(X, np.zeros(7, int), options)
    np.testing.assert_allclose(rotated, X * options.amplitude, rtol=1e-6)
    np.testing.assert_allclose(turned(X, np.zeros(7, int), dataclasses.replace(options, attention_factor=1.0)), X)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"scaling": "ntk"}, "^scaling = 'ntk'"),
        ({"base": 0.0}, "base = 0.0"),
        ({"fraction": 0.05}, "fraction = 0.05: rotates 0 of the 16 features"),
        ({"fraction": 0.2}, "fraction = 0.2: rotates 3 of the 16 features"),
        ({"factor": 0.5}, "factor = 0.5"),
        ({"scaling": "yarn"}, "original_context = 0: 'yarn'"),
        ({"scaling": "linear"}, "scaling = 'linear': it has no effect with factor = 1"),
        ({"scaling": "llama3", "original_context": 9}, "scaling = 'llama3': it has no effect with factor = 1"),
        ({"scaling": "llama3", "slow_turns": 4.0, "original_context": 9}, "slow_turns = 4.0: .*fast_turns = 4"),
    ],
)
def test_rotary_invalid_option_raises_one_line(options, message):
    with pytest.raises(ValueError, match=message) as raised:
        rotary(X, np.arange(7), Rotary(**options))
    assert "\n" not in str(raised.value)
