"""Statistics of a few seeds: means, differences and rank correlations, with 95 % intervals."""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from statistics import mean as exact_mean
from typing import Any

import numpy as np
import scipy.stats

CONFIDENCE = 0.95
LEAST_RANKED = 4  # with fewer values, Fisher's z has no standard error


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean, a difference of means or a correlation, with its interval."""

    value: float
    interval: tuple[float, float] | None  # None: too few data, no spread, or ranks that agree fully or are reversed
    p: float | None = None  # of a difference, two-sided, for the null hypothesis of none; None: too few, or no spread


def mean(values: Sequence[float]) -> Estimate:
    """Returns the mean over seeds with Student's t interval, mean ± t(n - 1) s / sqrt(n).

    One seed has no interval. Several seeds with the same value, such as seeds that get everything right, have none
    either: a spread of 0 would claim more certainty than a few seeds give.
    """
    value = exact_mean(map(float, values))  # so that means of equal values are equal for any number of values
    if not np.ptp(values):
        return Estimate(value, None)
    low, high = scipy.stats.t.interval(CONFIDENCE, len(values) - 1, value, scipy.stats.sem(values))
    return Estimate(value, (float(low), float(high)))


def difference(ours: Sequence[float], base: Sequence[float]) -> Estimate:
    """Returns mean(ours) - mean(base) with the interval and the two-sided test of Welch's t.

    Welch's test does not assume equal spreads: a row that is hard to train spreads more than base. The test is
    unpaired. With the same seed, two rows see the data in the same order, but most rows start from other parameters.
    With three seeds, pairing would halve the degrees of freedom. What the seeds share can make this test miss an
    effect, but not invent one.
    """
    value = exact_mean(map(float, ours)) - exact_mean(map(float, base))
    if min(len(ours), len(base)) < 2 or not (np.ptp(ours) or np.ptp(base)):
        return Estimate(value, None)
    with warnings.catch_warnings():  # one side may have no spread
        warnings.simplefilter("ignore", RuntimeWarning)
        welch: Any = scipy.stats.ttest_ind(ours, base, equal_var=False)
    low, high = welch.confidence_interval(CONFIDENCE)
    return Estimate(value, (float(low), float(high)), float(welch.pvalue))


def holm(ps: Sequence[float]) -> list[float]:
    """Returns Holm's correction of p-values: without any effect, at most 5 % of sweeps have a corrected p below 0.05.

    The smallest of m p-values is multiplied by m, the next by m - 1, and so on. No corrected value is smaller than the
    one before it, or larger than 1.
    """
    order = np.argsort(ps, kind="stable")
    corrected = np.empty(len(ps))
    corrected[order] = np.maximum.accumulate(np.asarray(ps)[order] * np.arange(len(ps), 0, -1))
    return np.minimum(corrected, 1).tolist()


def rank_correlation(ours: Sequence[float], theirs: Sequence[float]) -> Estimate | None:
    """Returns Spearman's rho with the interval of Fisher's z and Bonett and Wright's standard error.

        tanh(atanh(rho) ± 1.96 sqrt((1 + rho^2 / 2) / (n - 3)))

    This takes the rows as a sample of possible changes. Resampling the seeds instead would hold the rows fixed, but
    three seeds are too few to resample. Returns None for fewer than four values, or if all of one side are equal. There
    is no interval if the ranks agree fully, or are fully reversed.
    """
    if len(ours) < LEAST_RANKED or not (np.ptp(ours) and np.ptp(theirs)):
        return None
    rho = float(scipy.stats.spearmanr(ours, theirs).statistic)
    if abs(rho) > 1 - 1e-9:  # 1 except for rounding
        return Estimate(round(rho), None)
    error = math.sqrt((1 + rho**2 / 2) / (len(ours) - 3))
    low, high = np.tanh(scipy.stats.norm.interval(CONFIDENCE, math.atanh(rho), error))
    return Estimate(rho, (float(low), float(high)))
