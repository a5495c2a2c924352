"""Scores of attention heads: values, targets equal to TransformerLens's, and the null model."""

import jax
import numpy as np
import pytest
from scipy import stats

from attnlab import see
from attnlab.data.tasks import repeats
from attnlab.nn import GPT
from attnlab.see.head_scores import KINDS, scores, targets
from tests.see.pages import causal_patterns

LENGTH, BATCH, VOCAB = 24, 16, 9
WITHOUT_REPEATS = {"tokens": np.broadcast_to(np.arange(LENGTH), (BATCH, LENGTH))}
DETECTED = {"previous": "previous_token_head", "duplicate": "duplicate_token_head", "induction": "induction_head"}


def softmax_patterns(seed: int, layers: int = 2, heads: int = 3) -> np.ndarray:
    return causal_patterns(seed, layers, BATCH, heads, LENGTH)


def random_tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (BATCH, LENGTH))


def loops_over_queries(kind: str, pattern: np.ndarray, tokens: np.ndarray) -> float:
    """A head's score by its definition."""
    sums = []
    for weights, text in zip(pattern, tokens):
        for q in range(LENGTH):
            keys = {
                "previous": [q - 1] if q else [],
                "current": [q],
                "sink": [0] if q else [],
                "duplicate": [k for k in range(q) if text[k] == text[q]],
                "induction": [k + 1 for k in range(q) if text[k] == text[q]],
            }[kind]
            if keys:
                sums.append(sum(weights[q, k] for k in keys))
    return np.mean(sums)


@pytest.mark.parametrize("kind", DETECTED | {"current": "", "sink": ""})
def test_score_is_the_mean_weight_on_targets_of_queries_that_have_any(kind):
    patterns, tokens = softmax_patterns(0), random_tokens()
    expected = [[loops_over_queries(kind, layer[:, head], tokens) for head in range(3)] for layer in patterns]
    result = scores(patterns, tokens, [kind])
    np.testing.assert_allclose(result.values[kind], expected, atol=1e-12)
    uniform = np.broadcast_to(np.tri(LENGTH) / np.arange(1, LENGTH + 1)[:, None], (1, BATCH, 1, LENGTH, LENGTH))
    by_uniform = scores(uniform, tokens, [kind])
    np.testing.assert_allclose(by_uniform.values[kind], by_uniform.uniform[kind], atol=1e-12)


def test_entropy_is_in_nats_over_queries_with_several_keys():
    patterns = softmax_patterns(0)
    expected = stats.entropy(patterns[..., 1:, :], axis=-1).mean((1, 3))
    result = scores(patterns, random_tokens(), ["entropy"])
    np.testing.assert_allclose(result.values["entropy"], expected, atol=1e-12)
    assert result.uniform["entropy"] == pytest.approx(np.log(np.arange(2, LENGTH + 1)).mean())


@pytest.mark.parametrize("kind", DETECTED | {"current": "", "sink": ""})
def test_ideal_head_scores_one_and_is_found(kind):
    """All weight is on the targets, spread evenly, and on the first key where there are none."""
    tokens = random_tokens()
    weights = targets(kind, tokens).astype(float)
    weights[..., 0] += weights.sum(-1) == 0
    ideal = (weights / weights.sum(-1, keepdims=True))[None, :, None]
    result = scores(ideal, tokens, [kind], untrained=softmax_patterns(1, layers=1))
    assert result.values[kind] == pytest.approx(1)
    assert result.heads(kind) == [(0, 0)]


def test_targets_match_transformer_lens():
    pytest.importorskip("transformer_lens", reason="transformer-lens is not installed: make peers")
    import torch
    from transformer_lens import head_detector

    tokens = random_tokens()
    for kind, name in DETECTED.items():
        detect = getattr(head_detector, f"get_{name}_detection_pattern")
        wanted = [detect(torch.tensor(text)[None]).numpy() for text in tokens]
        np.testing.assert_array_equal(targets(kind, tokens), wanted)


def test_correction_multiplies_by_heads_and_kinds_that_have_targets():
    patterns, untrained = softmax_patterns(0, layers=1), softmax_patterns(1, layers=1)

    def p(tokens, kinds, heads):
        return scores(patterns[:, :, :heads], tokens, kinds, untrained=untrained).p["previous"][0, 0]

    alone = p(random_tokens(), ["previous"], 1)
    assert p(random_tokens(), ["previous", "current"], 3) == pytest.approx(min(1, 6 * alone)) and 0 < alone < 1
    assert p(**WITHOUT_REPEATS, kinds=["previous", "induction"], heads=1) == alone


def test_kind_without_targets_is_nan_and_has_no_heads():
    kinds = ["induction", "previous"]
    result = scores(softmax_patterns(0), **WITHOUT_REPEATS, kinds=kinds, untrained=softmax_patterns(1))
    assert np.isnan(result.values["induction"]).all() and np.isnan(result.p["induction"]).all()
    assert not result.heads("induction") and not result.count["induction"]
    assert str(result).startswith("induction  no targets in these tokens\nprevious ")


@pytest.mark.slow
def test_untrained_model_has_no_head_of_any_kind():
    """Six kinds and eight heads of ten models."""
    gpt = GPT.of(vocab_size=64, num_layers=2, num_heads=4, width=32, context=48)
    tokens = np.asarray(repeats(0, batch_size=32, length=48, vocab_size=64))

    @jax.jit
    def patterns(seed):
        return see.capture(gpt, gpt.init(jax.random.key(seed), tokens), tokens).stack("pattern")

    for seed in range(10):
        result = scores(patterns(seed), tokens, untrained=patterns(100 + seed))
        assert not any(result.heads(kind) for kind in KINDS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kinds": ["copy"]}, r"kinds = \['copy'\]: .*previous, .*entropy"),
        ({"patterns": softmax_patterns(0)[..., :-1]}, r"patterns has a layer \[16, 3, 24, 23\]"),
        ({"patterns": softmax_patterns(0).swapaxes(-1, -2)}, "patterns has weights .*not causal"),
        ({"patterns": softmax_patterns(0) * np.nan}, "patterns has weights .*not finite"),
        ({"patterns": -softmax_patterns(0)}, "patterns has weights below 0, .*see.shares"),
        ({"untrained": softmax_patterns(0)[:1]}, "untrained has 1 layers .*3 heads"),
        ({"untrained": softmax_patterns(0)[:, :, :1]}, "untrained has 2 layers .*1 heads"),
        (WITHOUT_REPEATS | {"kinds": ["induction", "duplicate"]}, r"tokens \[16, 24\] .*induction, duplicate"),
    ],
)
def test_mismatched_argument_raises_one_line(change, message):
    with pytest.raises(ValueError, match=message):
        scores(**({"patterns": softmax_patterns(0), "tokens": random_tokens()} | change))


def test_heads_that_were_not_tested_raise_one_line():
    result = scores(softmax_patterns(0), random_tokens(), ["current"])
    with pytest.raises(ValueError, match="kind = 'sink' .*current"):
        result.heads("sink")
    with pytest.raises(ValueError, match="pass its weights to scores as untrained="):
        result.heads("current")
