"""Scores of attention heads: values, parity with TransformerLens, and null models."""

import numpy as np
import pytest
from scipy import stats

from attnlab.nn import GPT
from attnlab.see.head_scores import KINDS, mul_score, scores, targets
from tests.see import induction

LENGTH, BATCH, VOCAB = 24, 16, 9
DETECTED = {"previous": "previous_token_head", "duplicate": "duplicate_token_head", "induction": "induction_head"}


def softmax_patterns(seed: int, layers: int = 2, heads: int = 3) -> np.ndarray:
    """Causal attention by random logits."""
    logits = np.random.default_rng(seed).normal(0, 2, (layers, BATCH, heads, LENGTH, LENGTH))
    weights = np.where(np.tri(LENGTH, dtype=bool), np.exp(logits), 0)
    return weights / weights.sum(-1, keepdims=True)


def random_tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (BATCH, LENGTH))


def uniform_patterns(layers: int = 1, heads: int = 1) -> np.ndarray:
    weights = np.tri(LENGTH) / np.arange(1, LENGTH + 1)[:, None]
    return np.broadcast_to(weights, (layers, BATCH, heads, LENGTH, LENGTH))


def ideal_pattern(kind: str, tokens: np.ndarray) -> np.ndarray:
    """All weight on the targets, spread evenly, and on the first key where there are none; `[1, B, 1, T, T]`."""
    wanted = targets(kind, tokens).astype(float)
    wanted[..., 0] += wanted.sum(-1) == 0
    return (wanted / wanted.sum(-1, keepdims=True))[None, :, None]


def loops_over_queries(kind: str, pattern: np.ndarray, tokens: np.ndarray) -> float:
    """A head's score by its definition."""
    found = []
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
                found.append(sum(weights[q, k] for k in keys))
    return np.mean(found)


@pytest.mark.parametrize("kind", DETECTED | {"current": "", "sink": ""})
def test_score_is_the_mean_weight_on_targets_of_queries_that_have_any(kind):
    patterns, tokens = softmax_patterns(0), random_tokens()
    expected = [[loops_over_queries(kind, layer[:, head], tokens) for head in range(3)] for layer in patterns]
    found = scores(patterns, tokens, [kind])
    np.testing.assert_allclose(found.values[kind], expected, atol=1e-12)
    by_uniform = scores(uniform_patterns(), tokens, [kind])
    np.testing.assert_allclose(by_uniform.values[kind], by_uniform.uniform[kind], atol=1e-12)


def test_entropy_is_in_nats_over_queries_that_can_choose():
    patterns = softmax_patterns(0)
    expected = stats.entropy(patterns[..., 1:, :], axis=-1).mean((1, 3))
    found = scores(patterns, random_tokens(), ["entropy"])
    np.testing.assert_allclose(found.values["entropy"], expected, atol=1e-12)
    assert found.uniform["entropy"] == pytest.approx(np.log(np.arange(2, LENGTH + 1)).mean())


@pytest.mark.parametrize("kind", DETECTED | {"current": "", "sink": ""})
def test_ideal_head_scores_one_and_is_found(kind):
    tokens = random_tokens()
    found = scores(ideal_pattern(kind, tokens), tokens, [kind], untrained=softmax_patterns(1, layers=1))
    assert found.values[kind] == pytest.approx(1)
    assert found.heads(kind) == [(0, 0)]


def mul_by_formula(weights, wanted, exclude_bos, exclude_current_token):
    """`compute_head_attention_similarity_score` of TransformerLens, for one head and one sequence."""
    weights = weights.copy()
    if exclude_bos:
        weights[:, 0] = 0
    if exclude_current_token:
        np.fill_diagonal(weights, 0)
    return (weights * wanted).sum() / weights.sum()


OPTIONS = pytest.mark.parametrize(("exclude_bos", "exclude_current_token"), [(0, 0), (1, 0), (0, 1), (1, 1)])


@OPTIONS
def test_mul_is_the_share_of_all_attention(exclude_bos, exclude_current_token):
    options = {"exclude_bos": bool(exclude_bos), "exclude_current_token": bool(exclude_current_token)}
    patterns, tokens = softmax_patterns(0), random_tokens()
    found = scores(patterns, tokens, **options)
    for kind in DETECTED:
        wanted = targets(kind, tokens)
        each = [
            [[mul_by_formula(head, m, **options) for head in x] for x, m in zip(layer, wanted)] for layer in patterns
        ]
        np.testing.assert_allclose(found.mul[kind], np.mean(each, axis=1), atol=1e-12)
    assert "entropy" not in found.mul


@OPTIONS
def test_mul_agrees_with_transformer_lens(exclude_bos, exclude_current_token):
    pytest.importorskip("transformer_lens", reason="transformer-lens is not installed: make peers")
    import torch
    from transformer_lens import head_detector

    patterns, tokens = softmax_patterns(0), random_tokens()
    options = {"exclude_bos": bool(exclude_bos), "exclude_current_token": bool(exclude_current_token)}
    for kind, name in DETECTED.items():
        detect = getattr(head_detector, f"get_{name}_detection_pattern")
        wanted = [detect(torch.tensor(text)[None]) for text in tokens]
        np.testing.assert_array_equal(targets(kind, tokens), [each.numpy() for each in wanted])
        for layer in patterns:
            expected = [
                np.mean(
                    [
                        head_detector.compute_head_attention_similarity_score(
                            torch.tensor(weights), each, error_measure="mul", **options
                        )
                        for weights, each in zip(layer[:, head], wanted)
                    ]
                )
                for head in range(3)
            ]
            np.testing.assert_allclose(mul_score(layer, targets(kind, tokens), **options), expected, atol=1e-6)


def test_perfect_induction_head_has_half_by_mul_and_one_by_the_mean_over_targets():
    """On a text that is said twice, half of the queries have no target, yet "mul" counts their attention."""
    once = np.stack([np.random.default_rng(seed).permutation(100)[: LENGTH // 2] for seed in range(BATCH)])
    tokens = np.concatenate([once, once], axis=1)
    found = scores(ideal_pattern("induction", tokens), tokens, ["induction"])
    assert found.values["induction"] == pytest.approx(1) and found.mul["induction"] == pytest.approx(0.5)


def test_positional_head_is_not_found_by_repeats_of_drawn_periods():
    """It attends eight positions back, which is a target at period nine alone."""
    tokens = induction.sample()
    ahead = np.eye(tokens.shape[1], k=-8)
    ahead[:8, 0] = 1
    patterns = np.broadcast_to(ahead, (1, len(tokens), 1, *ahead.shape))
    found = scores(patterns, tokens, ["induction"])
    assert found.p["matched"]["induction"] > 0.5 and not found.heads("induction")


def test_one_period_for_all_sequences_leaves_no_matched_control():
    once = np.arange(BATCH)[:, None] * 20 + np.arange(LENGTH // 2)
    tokens = np.concatenate([once, once], axis=1)
    found = scores(ideal_pattern("induction", tokens), tokens, ["induction"])
    assert np.isnan(found.p["matched"]["induction"]) and found.p["uniform"]["induction"] < 0.01
    assert not found.heads("induction")


def test_uniform_attention_is_never_found():
    found = scores(uniform_patterns(2, 3), random_tokens(), untrained=uniform_patterns(2, 3))
    assert not any(found.heads(kind) for kind in KINDS)


def test_correction_multiplies_by_heads_and_kinds():
    patterns, tokens = softmax_patterns(0, layers=1, heads=3), random_tokens()
    alone = scores(patterns[:, :, :1], tokens, ["previous"]).p["uniform"]["previous"][0, 0]
    among = scores(patterns, tokens, ["previous", "current"]).p["uniform"]["previous"][0, 0]
    assert among == pytest.approx(min(1, 6 * alone)) and alone < 1


def test_kind_without_targets_is_nan_and_not_counted_by_the_correction():
    patterns, tokens = softmax_patterns(0), np.broadcast_to(np.arange(LENGTH), (BATCH, LENGTH))
    found = scores(patterns, tokens, ["induction", "previous"], untrained=softmax_patterns(1))
    assert np.isnan(found.values["induction"]).all() and not found.heads("induction") and not found.count["induction"]
    assert all(np.isnan(p["induction"]).all() for p in found.p.values())
    alone = scores(patterns, tokens, ["previous"])
    np.testing.assert_array_equal(found.p["uniform"]["previous"], alone.p["uniform"]["previous"])
    assert str(found).startswith("induction  no targets in these tokens\nprevious ")


def test_one_sequence_finds_nothing():
    tokens = random_tokens()[:1]
    found = scores(ideal_pattern("previous", tokens), tokens)
    assert not any(found.heads(kind) for kind in KINDS)


@pytest.mark.parametrize(("positions", "repeated"), [("rotary", True), ("learned", False)])
def test_untrained_model_has_no_head_of_any_kind(positions, repeated):
    """All nulls together, six kinds and eight heads of ten models."""
    gpt = GPT(64, num_layers=2, num_heads=4, width=32, context=48, positions=positions)
    tokens = induction.sample() if repeated else np.random.default_rng(0).integers(0, 64, (32, 48))
    for seed in range(10):
        own, other = (induction.patterns(gpt, induction.initial(at, gpt), tokens) for at in (seed, 100 + seed))
        found = scores(own, tokens, untrained=other)
        assert not any(found.heads(kind) for kind in KINDS)


@pytest.mark.slow
def test_trained_model_has_an_induction_head_by_all_nulls():
    model, params, untrained, losses = induction.trained()
    assert losses[LENGTH:].mean() < 0.7 * losses[: LENGTH // 2].mean()
    tokens = induction.sample()
    own, other = (induction.patterns(model, variables, tokens) for variables in (params, untrained))
    found = scores(own, tokens, untrained=other)
    layer, head = found.heads("induction")[0]
    assert layer == 1 and found.values["induction"][layer, head] > 0.5
    assert all(found.p[null]["induction"][layer, head] < 0.01 for null in ("uniform", "untrained", "matched"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kinds": ["copy"]}, r"kinds = \['copy'\]: .*previous, .*entropy"),
        ({"kinds": []}, r"kinds = \[\]: .*entropy"),
        ({"null": "random"}, r"null = \['random'\]: .*uniform, untrained, matched"),
        ({"null": "untrained"}, "null = 'untrained' needs untrained="),
        (
            {"patterns": softmax_patterns(0)[..., :-1]},
            r"patterns has a layer \[16, 3, 24, 23\]",
        ),
        ({"patterns": []}, "patterns has no layers"),
        ({"patterns": softmax_patterns(0).swapaxes(-1, -2)}, "patterns has weights .*not causal"),
        ({"patterns": softmax_patterns(0) * np.nan}, "patterns has weights .*not finite"),
        ({"untrained": softmax_patterns(0)[:1]}, "untrained has 1 layers .*3 heads"),
        ({"untrained": softmax_patterns(0)[:, :, :1]}, "untrained has 2 layers .*1 heads"),
    ],
)
def test_argument_that_does_not_fit_is_one_line(change, message):
    with pytest.raises(ValueError, match=message):
        scores(**({"patterns": softmax_patterns(0), "tokens": random_tokens()} | change))


def test_tokens_without_any_target_are_one_line():
    tokens = np.broadcast_to(np.arange(LENGTH), (BATCH, LENGTH))
    with pytest.raises(ValueError, match=r"tokens \[16, 24\] .*induction, duplicate"):
        scores(softmax_patterns(0), tokens, ["induction", "duplicate"])


def test_heads_of_a_kind_that_was_not_scored_is_one_line():
    with pytest.raises(ValueError, match="kind = 'sink' .*current"):
        scores(softmax_patterns(0), random_tokens(), ["current"]).heads("sink")
