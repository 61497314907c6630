"""The statistics, against values worked out by hand, against scipy in another way, and against what they promise."""

import math

import numpy as np
import pytest
import scipy.stats

from transformer_flax.ablation import statistics

THREE, TWO = [34.1, 34.6, 33.9], [31.0, 33.5]


def test_the_mean_of_1_2_3_has_the_interval_of_the_books():
    estimate = statistics.mean([1, 2, 3])
    assert estimate.value == 2
    assert estimate.interval == pytest.approx((2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)))


def test_counts_may_be_integers_of_numpy():
    assert statistics.mean(np.array([36, 37])).value == 36.5
    assert statistics.difference(np.array([36, 37]), np.array([36, 36])).value == 0.5


@pytest.mark.parametrize("values", [THREE, TWO, list(range(17))])
def test_the_interval_of_a_mean_ends_where_scipys_test_is_just_significant(values):
    for end in statistics.mean(values).interval:
        assert scipy.stats.ttest_1samp(values, end).pvalue == pytest.approx(0.05)


def test_a_difference_worked_out_by_hand():
    # Base has no spread, so there are two degrees of freedom, for which Student's p is 1 - t / sqrt(2 + t^2).
    found = statistics.difference([1, 2, 3], [5, 5, 5])
    t = 3 / math.sqrt(1 / 3)
    assert found.value == -3
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t**2))
    assert found.interval == pytest.approx((-3 - 4.302653 / math.sqrt(3), -3 + 4.302653 / math.sqrt(3)))
    reversed_ = statistics.difference([5, 5, 5], [1, 2, 3])
    assert (reversed_.value, reversed_.p) == (3, found.p)


def test_what_seeds_do_not_tell_is_not_told():
    assert statistics.mean([3.5]) == statistics.Estimate(3.5, None)
    assert statistics.mean([100.0] * 3) == statistics.Estimate(100.0, None)
    assert statistics.difference([3.5], THREE).interval is None
    assert statistics.difference(THREE, [3.5]).p is None
    assert statistics.difference([2.0, 2.0], [1.0, 1.0]) == statistics.Estimate(1.0, None)
    assert statistics.difference([0.1] * 3, [0.1] * 2) == statistics.Estimate(0.0, None)  # (3 * 0.1) / 3 is not 0.1
    assert statistics.mean([0.1] * 3).value == 0.1


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Also where base spreads three times as much and has more seeds; Welch's is too wide then, if anything."""
    draws, held = np.random.default_rng(1), {"mean": 0, "difference": 0}
    for _ in range(1000):
        ours, base = draws.normal(5, 1, 3), draws.normal(4, 3, 5)
        for name, truth, found in (
            ("mean", 5, statistics.mean(ours)),
            ("difference", 1, statistics.difference(ours, base)),
        ):
            held[name] += found.interval[0] < truth < found.interval[1]
    assert 930 < held["mean"] < 970
    assert 930 < held["difference"] < 990


def test_holm_by_hand():
    assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert statistics.holm([0.6, 0.5]) == [1, 1]
    assert statistics.holm([0.2]) == [0.2]
    assert statistics.holm([]) == []


def test_after_holm_one_sweep_of_twenty_finds_an_effect_that_is_none():
    draws = np.random.default_rng(2)
    found = sum(min(statistics.holm(draws.uniform(size=19))) < 0.05 for _ in range(4000))
    assert 150 < found < 250  # 200 expected


def test_a_rank_correlation_by_hand():
    estimate = statistics.rank_correlation([10, 20, 30, 40, 50], [2, 1, 4, 3, 5])
    assert estimate.value == pytest.approx(1 - 6 * (1 + 1 + 1 + 1) / (5 * (5**2 - 1)))  # 0.8
    # atanh 0.8 = ln 3; standard error sqrt((1 + 0.32) / 2)
    half = 1.959964 * math.sqrt(0.66)
    assert estimate.interval == pytest.approx((math.tanh(math.log(3) - half), math.tanh(math.log(3) + half)))


def test_ties_share_their_rank():
    ours, theirs = [1, 2, 2, 3, 5, 4, 0.5], [25.4, 25.4, 25.1, 24.9, 26.0, 25.8, 25.4]
    ranks = scipy.stats.rankdata(ours), scipy.stats.rankdata(theirs)
    assert statistics.rank_correlation(ours, theirs).value == pytest.approx(scipy.stats.pearsonr(*ranks).statistic)


def test_ranks_that_agree_fully_are_no_certainty():
    assert statistics.rank_correlation(range(20), [x**3 for x in range(20)]) == statistics.Estimate(1, None)
    assert statistics.rank_correlation(range(7), range(0, -7, -1)) == statistics.Estimate(-1, None)


def test_what_cannot_be_ranked_has_no_correlation():
    assert statistics.rank_correlation([1, 2, 3], [1, 2, 3]) is None
    assert statistics.rank_correlation([1, 2, 3, 4], [0, 0, 0, 0]) is None
