"""Verdicts on synthetic losses with a known truth: how often they are false, and how often a difference is found."""

import numpy as np
import pytest
from scipy import stats

from attnlab.results import statistics


def verdicts(losses):
    return [difference.verdict for difference in statistics.differences(losses)]


@pytest.mark.parametrize(
    ("variants", "seeds", "step"),
    [(2, 5, 0.0), pytest.param(4, 3, 0.0, marks=pytest.mark.slow), (2, 2, 1.0), (2, 2, 0.2)],
)
def test_false_verdict_without_a_difference_is_at_most_one_in_twenty(variants, seeds, step):
    """1,000 comparisons; 6.5 % is two standard deviations above 5 %. Losses with the same seed share its luck."""
    draw, false = np.random.default_rng(variants), 0
    for _ in range(1000):
        luck = draw.normal(size=seeds)
        losses = luck + draw.normal(size=(variants, seeds))
        losses = np.round(losses / step) * step if step else losses  # like shares of 1/step answers
        false += {difference.verdict for difference in statistics.differences(losses, step)} != {"not told apart"}
    assert false / 1000 <= 0.065 and (step or false > 10)


def test_difference_is_found_as_often_as_power_states():
    for seeds, expected in ((3, 0.47), (5, 0.91), (8, 0.998)):
        assert statistics.power(2.0, seeds) == pytest.approx(expected, abs=0.005)
    draw, seen = np.random.default_rng(5), []
    for _ in range(1000):
        seen += verdicts(np.stack([np.zeros(5), draw.normal(2.0, 1.0, 5)]))
    assert seen.count("worse") / 1000 == pytest.approx(0.91, abs=0.05) and "better" not in seen


def test_p_values_and_intervals_match_the_paired_t_test():
    losses = np.random.default_rng(0).normal(size=(2, 6))
    (difference,) = statistics.differences(losses)
    expected = stats.ttest_rel(losses[1], losses[0])
    low, high = expected.confidence_interval(0.95)
    assert difference.p == pytest.approx(expected.pvalue) and difference.mean == pytest.approx((low + high) / 2)
    assert difference.interval == pytest.approx((high - low) / 2)


def test_verdict_interval_and_p_value_agree_in_random_tables():
    draw = np.random.default_rng(1)
    for _ in range(300):
        variants, seeds, step = draw.integers(2, 9), draw.integers(1, 7), draw.choice([0.0, 0.3])
        losses = draw.normal(size=(variants, seeds)) + draw.normal(0, 3, (variants, 1))
        for difference in statistics.differences(np.round(losses / step) * step if step else losses, step):
            seen = difference.verdict != "not told apart"
            assert seen == (abs(difference.mean) > difference.interval) == (difference.p < 0.05)
            assert (
                seen or seeds == 1 or difference.mean == 0 or difference.seeds_needed[1] <= difference.seeds_needed[0]
            )


def test_significance_is_corrected_for_the_number_of_variants():
    losses = [[0.0] * 5, *[[0.19, 1.19, 2.19, 3.19, 4.19]] * 2]  # t = 3.1 with four degrees of freedom: p = 0.036
    assert verdicts(losses[:2]) == ["worse"] and verdicts(losses) == ["not told apart"] * 2


def test_equal_losses_are_not_significant_for_any_number_of_seeds():
    (difference,) = statistics.differences([[1.0, 2.0, 3.0]] * 2)
    assert difference == (0.0, 0.0, 1.0, "not told apart", 0.0, None)


def test_constant_difference_is_significant():
    assert verdicts([[1.0, 2.0, 3.0], [0.5, 1.5, 2.5], [2.0, 3.0, 4.0]]) == ["better", "worse"]


def test_failed_seed_is_missing_only_from_its_own_difference():
    losses = np.random.default_rng(0).normal(size=(3, 5))
    losses[1, 2] = np.nan
    one, other = statistics.differences(losses)
    rest = [0, 1, 3, 4]
    assert one.mean == pytest.approx((losses[1] - losses[0])[rest].mean())
    assert other.mean == pytest.approx((losses[2] - losses[0]).mean())


def test_detectable_effect_and_seeds_needed_agree():
    for seeds in (3, 5, 8, 40):
        effect = statistics.detectable_effect(seeds)
        assert statistics.power(effect, seeds) == pytest.approx(0.8, abs=1e-4)
        assert statistics.seeds_needed(effect * 1.0001) == seeds
    assert statistics.seeds_needed(1e-3) == statistics.MOST_SEEDS


def test_detectable_effect_allows_for_the_other_variants():
    losses = np.random.default_rng(3).normal(size=(3, 5))
    differences = statistics.differences(losses)
    for n in range(2):
        spread = (losses[n + 1] - losses[0]).std(ddof=1)
        assert differences[n].detectable == pytest.approx(statistics.detectable_effect(5, 0.025) * spread)


def test_seeds_needed_estimated_from_two_seeds_is_a_wide_range():
    (difference,) = statistics.differences([[0.0, 0.0], [1.0, 1.8]])
    assert difference.seeds_needed == (4, 3, 1000)
