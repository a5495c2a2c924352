"""The encoder–decoder: causality, padding and free-running decoding."""

import functools

import jax
import numpy as np
import pytest

from attnlab._studies.alignment import pairs
from attnlab.nn import AdditiveAttention, MultiHeadAttention, Seq2Seq, alignment
from tests.parameters import parameters

LAYERS = pytest.mark.parametrize(
    "layer", [AdditiveAttention(), pytest.param(MultiHeadAttention(num_heads=2), marks=pytest.mark.slow)]
)
BATCH = pairs("reverse", 0, batch_size=6, lengths=[2, 5], vocab_size=12)
GIVEN = (BATCH.source, BATCH.lengths, BATCH.inputs)


@functools.cache
def made(layer):
    """Model, variables and compiled `apply`, shared between tests."""
    model = Seq2Seq(vocab_size=12, width=8, attention=layer)
    return model, parameters(model, *GIVEN), jax.jit(model.apply)


@LAYERS
def test_seq2seq_output_ignores_later_inputs(layer):
    _, params, apply = made(layer)
    changed = BATCH.inputs.copy()
    changed[:, 3:] = 7
    before, after = (np.asarray(apply(params, *GIVEN[:2], inputs)) for inputs in (BATCH.inputs, changed))
    np.testing.assert_allclose(before[:, :3], after[:, :3], atol=1e-6)
    assert not np.allclose(before[:, 3:], after[:, 3:])


@LAYERS
def test_seq2seq_ignores_source_padding(layer):
    model, params, apply = made(layer)
    short = BATCH.lengths < 5
    assert 0 < short.sum() < 6
    spoilt = np.where(np.arange(5) < BATCH.lengths[:, None], BATCH.source, 11)
    np.testing.assert_allclose(apply(params, *GIVEN), apply(params, spoilt, BATCH.lengths, BATCH.inputs), atol=1e-6)
    weights = np.asarray(jax.jit(functools.partial(alignment, model))(params, *GIVEN))
    assert weights.shape == (6, 6, 5)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    assert not weights[short][:, :, 2:].any()


@LAYERS
def test_seq2seq_input_minus_one_uses_own_prediction(layer):
    _, params, apply = made(layer)
    free = BATCH.inputs.copy()
    free[:, 1:] = -1
    written = np.asarray(apply(params, BATCH.source, BATCH.lengths, free)).argmax(-1)
    fed = np.concatenate([BATCH.inputs[:, :1], written[:, :-1]], axis=1)
    again = np.asarray(apply(params, BATCH.source, BATCH.lengths, fed))
    np.testing.assert_array_equal(again.argmax(-1), written)


@pytest.mark.parametrize(
    "source, lengths, inputs, message",
    [
        ([[1, 12, 0]], [2], [[0, 1]], "source contains 12, .*0 to 11"),
        ([[1, 2, 0]], [4], [[0, 1]], "lengths contains 4, expected 0 to 3"),
        ([[1, 2, 0]], [2], [[-2, 1]], "inputs contains -2, .*-1 to 11"),
        ([[1, 2, 0]], [2], [[-1, 1]], "inputs.*0. contains -1, .*0 to 11"),
        ([[1, 2, 0]], [2, 2, 2], [[0, 1]], r"source has shape \(1, .*lengths \(3,\)"),
    ],
)
def test_seq2seq_invalid_argument_raises_one_line(own_errors, source, lengths, inputs, message):
    model, params, _ = made(AdditiveAttention())
    arguments = [np.array(x) for x in (source, lengths, inputs)]
    jax.eval_shape(lambda params: model.apply(params, np.array([[1, 2, 99]]), np.array([2]), arguments[2] * 0), params)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda params: model.apply(params, *arguments), params)  # ids are not traced
